"""FlashAttention 4, `flash_attn.cute`, on data-centre Blackwell.

* An open side of a window is None: a negative number would be taken as it is.
* Two results at every release, of which the LSE may be None; sinks are in it, and a row without keys has the sink.
* The tail of a page of 128 tokens must be finite, so only other sizes are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn.names import DTYPES, PACKED, SOFTCAP, TOLERANCE
from portable.kernel import GraphLevel, Kernel, KernelCaps, LseForm, Op, Requires
from portable.sets import ANY_SIZE, NO_SIZE, Sizes, multiple_of, one_of

VARLEN_4 = Convention(
    module="flash_attn.cute",
    function="flash_attn_varlen_func",
    names={
        **PACKED,
        **SOFTCAP,
        "cu_seqlens_k": "cu_seqlens_k",
        "sinks": "learnable_sink",
        "lse": "return_lse",
    },
    open_side=None,
    lse=LseForm(empty="sink"),
)
_PAGES = {name: keyword for name, keyword in VARLEN_4.names.items() if name != "cu_seqlens_k"}
PAGED_4 = replace(VARLEN_4, names={**_PAGES, "seq_lens": "seqused_k", "block_table": "page_table"})
# The widths of K and V that are served as they are; other pairs are padded to equal widths where they may be.
WIDTHS: dict[str, tuple[Sizes, Sizes]] = {
    "": (multiple_of(8, up_to=128), multiple_of(8, up_to=128)),
    "192_128": (one_of(192), one_of(128)),
    "256": (one_of(256), one_of(256)),
}
ARCHS = frozenset({"sm100", "sm103", "sm110"})
PAGE_SIZES = one_of(1, 2, 4, 8, 16, 32, 64, 256)


def _kernels() -> Iterator[Kernel]:
    for widths, (keys, values) in WIDTHS.items():
        name = f"_{widths}" if widths else ""
        caps = KernelCaps(
            op=Op.PREFILL,
            name=f"flash_attn_4.varlen{name}",
            provider="flash_attn",
            vendors=frozenset({"nvidia"}),
            archs=ARCHS,
            requires=(Requires("flash-attn-4", ">=4.0.0b36"),),
            dtypes=DTYPES,
            head_dims=keys,
            v_head_dims=values,
            gqa_ratios=ANY_SIZE,
            page_sizes=NO_SIZE,
            features=frozenset({"window", "softcap", "sinks", "noncausal", "lse"}),
            tolerance=TOLERANCE,
        )
        yield Adapter(VARLEN_4).kernel(caps)
        if widths != "256":  # whose pages must be of 128 tokens
            paged = replace(
                caps,
                op=Op.PAGED,
                name=f"flash_attn_4.paged{name}",
                page_sizes=PAGE_SIZES,
                graph=GraphLevel.ALWAYS,
            )
            yield Adapter(PAGED_4).kernel(paged)


KERNELS = tuple(_kernels())
