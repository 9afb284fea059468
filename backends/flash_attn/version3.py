"""FlashAttention 3, the release for Hopper.

* Its LSE and its output for rows without keys are the contract's own.
* V may be of another width in two ranges; elsewhere it is padded. Decoding over pages with an LSE returns four values.
* Pages are read whole, by TMA, where their size is a multiple of a tile of keys and the longest query has more rows for
  a KV head than a tile of queries, without a window. A weight of 0 times the NaN behind the last token would be NaN, so
  only smaller pages are taken then: a tile has 64 keys for V of 512, 80 and more for V up to 256 beside K as wide, and
  at least 64 rows of queries.
* fp8 caches want q in fp8 as well, so they are refused.
* Builds before September 2025 cannot return the LSE of varlen.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn.names import DTYPES, KVCACHE, LSE, SOFTCAP, TOLERANCE, VARLEN
from portable.backends.flash_attn.pieces import PIECE, Pieces
from portable.kernel import GraphLevel, Kernel, KernelCaps, Op, Requires, Segment, head_dims
from portable.layer import Layer
from portable.sets import ANY_SIZE, NO_SIZE, Sizes, multiple_of, one_of

MODULE = "flash_attn_interface"
# The widths of K, and of V, that are served as they are; None: V is as wide as K, or padded.
WIDTHS: dict[str, tuple[Sizes, Sizes | None]] = {
    "192_128": (multiple_of(8, at_least=136, up_to=192), multiple_of(8, at_least=104, up_to=128)),
    "64_512": (multiple_of(8, up_to=64), multiple_of(8, up_to=512)),
    "": (multiple_of(8, up_to=256), None),
}
# Over pages, where one tile serves K and V, the columns of V behind the width of K are not read: V of 64 beside K of 32
# was wrong by 0.9 on an H100. V above 64 has a tile of its own.
WIDER = multiple_of(8, at_least=72, up_to=512)
# Pages that TMA does not read, being smaller than any tile of keys.
SMALL = {"192_128": multiple_of(1, up_to=79), "64_512": multiple_of(1, up_to=63), "": multiple_of(1, up_to=79)}
FEW = multiple_of(1, up_to=64)  # rows of queries for a KV head with which TMA is not used
FEATURES = frozenset({"window", "softcap", "noncausal", "lse"})


def scheduler_metadata(module: str) -> Any:
    """What makes the schedule of a step, for builds that take one; None leaves it to each call."""

    def make(segment: Segment, layer: Layer) -> torch.Tensor | None:
        build = getattr(importlib.import_module(module), "get_scheduler_metadata", None)
        if build is None or segment.block_table is None or isinstance(segment.causal, torch.Tensor):
            return None
        qk_dim, v_dim = head_dims(Op.PAGED, layer)
        if layer.family == "mla":
            qk_dim, v_dim = layer.qk_rope_head_dim, layer.kv_lora_rank
        left, right = (-1 if side is None else side for side in layer.window)
        made: torch.Tensor = build(
            batch_size=len(segment.seq_lens),
            max_seqlen_q=segment.max_query_len,
            max_seqlen_k=segment.block_table.shape[1] * segment.page_size if module == MODULE else segment.max_seq_len,
            num_heads_q=layer.num_heads,
            num_heads_kv=1 if layer.family == "mla" else layer.num_kv_heads,
            headdim=qk_dim,
            headdim_v=v_dim,
            cache_seqlens=segment.seq_lens,
            qkv_dtype=layer.dtype,
            cu_seqlens_q=segment.cu_seqlens_q,
            page_size=segment.page_size,
            causal=segment.causal,
            window_size=(left, -1 if segment.causal else right),
            has_softcap=layer.softcap is not None,
        )
        return made

    return make


VARLEN_3 = Convention(
    module=MODULE,
    function="flash_attn_varlen_func",
    names={**VARLEN, **SOFTCAP, **LSE},
    equal_value_dim=True,
)
VARLEN_3_WITHOUT_LSE = replace(VARLEN_3, names={**VARLEN, **SOFTCAP})
PAGED_3 = Convention(
    module=MODULE,
    function="flash_attn_with_kvcache",
    names={
        **KVCACHE,
        **SOFTCAP,
        "block_table": "page_table",
        "cu_seqlens_q": "cu_seqlens_q",
        "max_query_len": "max_seqlen_q",
    },
    returns={4: 1},
)
PAGED_3_SCHEDULED = replace(PAGED_3, step={"scheduler_metadata": scheduler_metadata(MODULE)})
MLA_3 = replace(PAGED_3, names={**PAGED_3.names, "qv": "qv"})


def caps(
    op: Op,
    name: str,
    requires: Requires,
    widths: str = "",
    features: frozenset[str] = FEATURES,
    *,
    decode: bool = False,
    graph: GraphLevel = GraphLevel.NEVER,
) -> KernelCaps:
    """`decode`: of one token a request, over pages of any size."""
    keys, values = WIDTHS[widths]
    small = SMALL["64_512" if op is Op.MLA_DECODE else widths]
    if op is Op.PAGED and widths == "64_512":
        values = WIDER
    return KernelCaps(
        op=op,
        name="_".join(part for part in (name, widths) if part),
        provider="flash_attn",
        vendors=frozenset({"nvidia"}),
        archs=frozenset({"sm90"}),
        requires=(requires,),
        dtypes=DTYPES,
        head_dims=one_of(576) if op is Op.MLA_DECODE else keys,
        v_head_dims=one_of(512) if op is Op.MLA_DECODE else values,
        equal_value_dim=op is Op.PAGED and values is None,
        gqa_ratios=FEW if decode else ANY_SIZE,
        query_lens=one_of(1) if decode else ANY_SIZE,
        page_sizes=NO_SIZE if op is Op.PREFILL else ANY_SIZE if decode else small,
        features=features,
        graph=graph,
        tolerance=TOLERANCE,
    )


def in_pieces(convention: Convention, name: str, requires: Requires) -> Kernel:
    """MLA decode over pages that are too large to be read row by row, cut into smaller ones."""
    made = caps(Op.MLA_DECODE, name, requires, features=frozenset({"noncausal", "lse"}), graph=GraphLevel.ALWAYS)
    return Pieces(convention).kernel(replace(made, page_sizes=multiple_of(PIECE, at_least=2 * PIECE)))


def _kernels() -> Iterator[Kernel]:
    needs = Requires("flash_attn_3")
    for widths, (_, values) in WIDTHS.items():
        convention = VARLEN_3 if values is None else replace(VARLEN_3, equal_value_dim=False)
        yield Adapter(convention).kernel(caps(Op.PREFILL, "flash_attn_3.varlen", needs, widths))
    without = FEATURES - {"lse"}
    yield Adapter(VARLEN_3_WITHOUT_LSE).kernel(caps(Op.PREFILL, "flash_attn_3.varlen_only", needs, "", without))
    for convention, name, graph in (
        (PAGED_3_SCHEDULED, "flash_attn_3", GraphLevel.NEVER),  # its schedule is of one step
        (PAGED_3, "flash_attn_3.graph", GraphLevel.ALWAYS),
    ):
        for decode in (True, False):
            kind = "decode" if decode else "paged"
            title = f"{name}.{kind}" if name == "flash_attn_3" else f"{name}_{kind}"
            for widths in WIDTHS:
                yield Adapter(convention).kernel(caps(Op.PAGED, title, needs, widths, decode=decode, graph=graph))
    for decode in (True, False):
        title = "flash_attn_3.mla_decode" if decode else "flash_attn_3.mla_paged"
        features = frozenset({"noncausal", "lse"})
        yield Adapter(MLA_3).kernel(
            caps(Op.MLA_DECODE, title, needs, "", features, decode=decode, graph=GraphLevel.ALWAYS)
        )
    yield in_pieces(MLA_3, "flash_attn_3.mla_pieces", needs)


KERNELS = tuple(_kernels())
