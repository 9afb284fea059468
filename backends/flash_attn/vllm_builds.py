"""FlashAttention 2 and 3 as vLLM ships them: one function, which a version number sends on.

* It takes the lengths of pages in use, not offsets into them; of both, it takes one.
* Version 2 reads pages of multiples of 16. It returns the `out` that it is given, or another tensor in its place.
* Version 3 writes to `out`, and has sinks, which are bfloat16, for V as wide as K and up to 64 heads. They are in the
  LSE; a row without keys has the sink or -inf there, as its tile was computed or passed over.
* Descales, a schedule or `q_v` that version 2 is given are dropped without a word, so it is given none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn import version2, version3
from portable.backends.flash_attn.names import ALIBI, PACKED, SOFTCAP
from portable.kernel import GraphLevel, Kernel, KernelCaps, LseForm, Op, Requires
from portable.sets import multiple_of

MODULE = "vllm.vllm_flash_attn"
NEEDS = Requires("vllm", ">=0.11")
FLAG, OUT = {"lse": "return_softmax_lse"}, {"out": "out"}
CONTIGUOUS, PAGES = {"cu_seqlens_k": "cu_seqlens_k"}, {"seq_lens": "seqused_k", "block_table": "block_table"}
SCHEDULE = {"scheduler_metadata": version3.scheduler_metadata(MODULE)}

VARLEN_V2 = Convention(
    module=MODULE,
    function="flash_attn_varlen_func",
    names={**PACKED, **SOFTCAP, **ALIBI, **FLAG, **CONTIGUOUS, **OUT},
    fixed={"fa_version": 2},
    equal_value_dim=True,
    folds_single=True,
    lse=LseForm(empty="+inf"),
)
PAGED_V2 = replace(VARLEN_V2, names={**PACKED, **SOFTCAP, **ALIBI, **FLAG, **PAGES, **OUT}, equal_value_dim=False)
VARLEN_V3 = Convention(
    module=MODULE,
    function="flash_attn_varlen_func",
    names={**PACKED, **SOFTCAP, **FLAG, **CONTIGUOUS, **OUT},
    fixed={"fa_version": 3},
    equal_value_dim=True,
    writes_out=True,
)
PAGED_V3 = replace(VARLEN_V3, names={**PACKED, **SOFTCAP, **FLAG, **PAGES, **OUT}, equal_value_dim=False)
PAGED_V3_SCHEDULED = replace(PAGED_V3, step=SCHEDULE)
MLA_V3 = replace(PAGED_V3, names={**PAGED_V3.names, "qv": "q_v"})


def _with_sinks(convention: Convention) -> Convention:
    return replace(
        convention,
        names={**convention.names, "sinks": "s_aux"},
        sink_dtype=torch.bfloat16,
        zeroes_empty=False,
        lse=LseForm(empty="nan"),
    )


def _kernels() -> Iterator[Kernel]:
    for widths, (_, values) in version3.WIDTHS.items():
        contiguous = VARLEN_V3 if values is None else replace(VARLEN_V3, equal_value_dim=False)
        yield _kernel(contiguous, Op.PREFILL, "varlen", widths)
        for decode in (True, False):
            kind = "decode" if decode else "paged"
            yield _kernel(PAGED_V3_SCHEDULED, Op.PAGED, kind, widths, decode=decode)
            yield _kernel(PAGED_V3, Op.PAGED, f"graph_{kind}", widths, decode=decode, graph=GraphLevel.ALWAYS)
    yield _sinks(VARLEN_V3, Op.PREFILL, "sinks_varlen")
    for decode in (True, False):
        kind = "decode" if decode else "paged"
        yield _sinks(PAGED_V3, Op.PAGED, f"sinks_{kind}", decode=decode)
        features = frozenset({"noncausal", "lse"})
        yield _kernel(MLA_V3, Op.MLA_DECODE, f"mla_{kind}", features=features, decode=decode, graph=GraphLevel.ALWAYS)
    yield version3.in_pieces(MLA_V3, "vllm_flash_attn_3.mla_pieces", NEEDS)
    base = version2.caps(Op.PREFILL, "vllm_varlen", "")
    pages = version2.caps(Op.PAGED, "vllm_paged", "", pages=multiple_of(16), graph=GraphLevel.UNIFORM)
    yield Adapter(VARLEN_V2).kernel(replace(base, requires=(NEEDS,)))
    yield Adapter(PAGED_V2).kernel(replace(pages, requires=(NEEDS,)))


def _kernel(
    convention: Convention,
    op: Op,
    name: str,
    widths: str = "",
    features: frozenset[str] = version3.FEATURES,
    *,
    decode: bool = False,
    graph: GraphLevel = GraphLevel.NEVER,
) -> Kernel:
    caps: KernelCaps = version3.caps(
        op, f"vllm_flash_attn_3.{name}", NEEDS, widths, features, decode=decode, graph=graph
    )
    return Adapter(convention).kernel(caps)


def _sinks(convention: Convention, op: Op, name: str, *, decode: bool = False) -> Kernel:
    kernel = _kernel(_with_sinks(convention), op, name, features=version3.FEATURES | {"sinks"}, decode=decode)
    limits: dict[str, Any] = {"dtypes": frozenset({torch.bfloat16}), "num_heads": multiple_of(1, up_to=64)}
    rounded = {torch.bfloat16: 2e-2}  # a sink of 5 is off by up to 0.016, so its weight by 1.6 %
    return replace(kernel, caps=replace(kernel.caps, tolerance=rounded, **limits))


KERNELS = tuple(_kernels())
