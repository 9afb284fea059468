"""FlashAttention 2 on NVIDIA GPUs.

* The LSE of a row without keys is +inf, and V must be as wide as K.
* With a longest query of 1 and grouped heads, row i is taken for request i, so a request without a query would shift
  all behind it.
* Pages of multiples of 256 tokens only; from 2.8.4 on, decoding over them waits for the device, so no graph holds it.
"""

from __future__ import annotations

from dataclasses import replace

from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn.names import ALIBI, DTYPES, KVCACHE, LSE, SOFTCAP, TABLE, TOLERANCE, VARLEN
from portable.kernel import GraphLevel, KernelCaps, LseForm, Op, Requires
from portable.sets import ANY_SIZE, Sizes, from_arch, multiple_of

VARLEN_2 = Convention(
    module="flash_attn",
    function="flash_attn_varlen_func",
    names={**VARLEN, **SOFTCAP, **ALIBI, **LSE},
    equal_value_dim=True,
    folds_single=True,
    returns={3: 1},
    lse=LseForm(empty="+inf"),
)
PAGED_2 = replace(VARLEN_2, names={**VARLEN_2.names, **TABLE}, equal_value_dim=False)
KVCACHE_2 = Convention(
    module="flash_attn",
    function="flash_attn_with_kvcache",
    names={**KVCACHE, **SOFTCAP, **ALIBI, **TABLE},
    rows="batch",
    lse=LseForm(layout="bhs", empty="+inf"),
)
DECODE = multiple_of(1, up_to=16)  # longer queries are padded to the longest, and varlen pads nothing


def caps(
    op: Op,
    name: str,
    versions: str,
    *,
    pages: Sizes | None = None,
    queries: Sizes = ANY_SIZE,
    graph: GraphLevel = GraphLevel.NEVER,
) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=f"flash_attn.{name}",
        provider="flash_attn",
        vendors=frozenset({"nvidia"}),
        archs=from_arch("sm80"),
        requires=(Requires("flash-attn", versions),),
        dtypes=DTYPES,
        head_dims=multiple_of(8, up_to=256),
        equal_value_dim=op is Op.PAGED,  # pages are not padded at each call
        gqa_ratios=ANY_SIZE,
        query_lens=queries,
        page_sizes=pages or Sizes(only=frozenset()),
        features=frozenset({"window", "softcap", "alibi", "noncausal", "lse"}),
        graph=graph,
        tolerance=TOLERANCE,
    )


PAGES = multiple_of(256)
KERNELS = (
    Adapter(VARLEN_2).kernel(caps(Op.PREFILL, "varlen", ">=2.6,<3")),
    Adapter(KVCACHE_2).kernel(
        caps(Op.PAGED, "kvcache", ">=2.6,<2.8.4", pages=PAGES, queries=DECODE, graph=GraphLevel.UNIFORM)
    ),
    Adapter(KVCACHE_2).kernel(caps(Op.PAGED, "kvcache_eager", ">=2.8.4,<3", pages=PAGES, queries=DECODE)),
    Adapter(PAGED_2).kernel(caps(Op.PAGED, "varlen_paged", ">=2.6,<3", pages=PAGES)),
)
