"""FlashAttention 2 on AMD GPUs: one API, and behind it Composable Kernel or one of two Triton implementations.

* Composable Kernel takes softcap and the lengths of pages in use without a word and ignores them. What its LSE holds
  for a row without keys is not documented.
* The Triton implementation up to 2.8.3 ignores windows, softcap and the block table, and its LSE is [T, H] with 0 for
  a row without keys; the later one, of aiter, has windows, refuses softcap, and takes the block table in decoding
  alone. There a right side of -1 beside a bounded left leaves out the query's own key, causal or not.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn.names import ALIBI, DTYPES, KVCACHE, LSE, TABLE, TOLERANCE, VARLEN
from portable.backends.flash_attn.version2 import DECODE, KVCACHE_2, VARLEN_2
from portable.kernel import GraphLevel, KernelCaps, LseForm, Op, Requires
from portable.sets import ANY, ANY_SIZE, Sizes, multiple_of

VARLEN_CK = replace(VARLEN_2, names={**VARLEN, **ALIBI, **LSE}, zeroes_empty=False, lse=LseForm(empty="nan"))
PAGED_CK = replace(VARLEN_CK, names={**VARLEN_CK.names, **TABLE}, equal_value_dim=False)
KVCACHE_CK = replace(
    KVCACHE_2, names={**KVCACHE, **ALIBI, **TABLE}, zeroes_empty=False, lse=LseForm(layout="bhs", empty="nan")
)
_NO_WINDOW = {name: keyword for name, keyword in VARLEN.items() if name != "window"}
VARLEN_TRITON: Convention = replace(
    VARLEN_2, names={**_NO_WINDOW, **LSE}, folds_single=False, lse=LseForm(layout="th", empty="0")
)
VARLEN_AITER = replace(
    VARLEN_2, names={**VARLEN, **LSE}, folds_single=False, literal_right=True, lse=LseForm(empty="0")
)
KVCACHE_AITER = replace(
    KVCACHE_2, names={**KVCACHE, **ALIBI, **TABLE}, literal_right=True, lse=LseForm(layout="bhs", empty="-inf")
)

CDNA = frozenset({"gfx90a", "gfx942", "gfx950"})  # what Composable Kernel is built for
CK, TRITON = "flash-attn[ck]", "flash-attn[triton]"
FEATURES = frozenset({"noncausal", "lse"})
REACH = 2**32  # bytes: the Triton kernel up to 2.8.3 multiplies rows by strides in int32, elements of two bytes


def caps(
    op: Op,
    name: str,
    requires: Requires,
    archs: Container[str],
    features: frozenset[str] = FEATURES,
    *,
    queries: Sizes = ANY_SIZE,
    graph: GraphLevel = GraphLevel.NEVER,
) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=f"flash_attn.{name}",
        provider="flash_attn",
        vendors=frozenset({"amd"}),
        archs=archs,
        requires=(requires,),
        dtypes=DTYPES,
        head_dims=multiple_of(8, up_to=256),
        equal_value_dim=op is Op.PAGED,
        gqa_ratios=ANY_SIZE,
        query_lens=queries,
        page_sizes=multiple_of(128) if op is Op.PAGED else Sizes(only=frozenset()),
        features=features,
        graph=graph,
        tolerance=TOLERANCE,
    )


MASKS = FEATURES | {"window", "alibi"}
KERNELS = (
    Adapter(VARLEN_CK).kernel(caps(Op.PREFILL, "ck_varlen", Requires(CK, ">=2.6,<3"), CDNA, MASKS)),
    Adapter(KVCACHE_CK).kernel(
        caps(
            Op.PAGED,
            "ck_kvcache",
            Requires(CK, ">=2.6,<3"),
            CDNA,
            MASKS,
            queries=DECODE,
            graph=GraphLevel.UNIFORM,
        )
    ),
    Adapter(PAGED_CK).kernel(caps(Op.PAGED, "ck_varlen_paged", Requires(CK, ">=2.6,<3"), CDNA, MASKS)),
    Adapter(VARLEN_TRITON).kernel(
        replace(caps(Op.PREFILL, "triton_varlen", Requires(TRITON, ">=2.6,<2.8.4"), ANY), max_tensor_bytes=REACH)
    ),
    Adapter(VARLEN_AITER).kernel(
        caps(Op.PREFILL, "aiter_varlen", Requires(TRITON, ">=2.8.4,<3"), ANY, FEATURES | {"window"})
    ),
    Adapter(KVCACHE_AITER).kernel(
        replace(
            caps(Op.PAGED, "aiter_kvcache", Requires(TRITON, ">=2.8.4,<3"), ANY, MASKS, queries=DECODE),
            page_sizes=multiple_of(16),
        )
    ),
)
