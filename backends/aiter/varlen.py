"""Attention over contiguous K/V: `flash_attn_varlen_func`, of CK and assembly or of Triton."""

from __future__ import annotations

from dataclasses import replace

import torch

from portable.backends.adapter import Convention
from portable.backends.aiter.calls import ARCHS, HALVES, NEW, OLD, TOLERANCE, Call, module_of
from portable.kernel import Kernel, KernelCaps, LseForm, Op, Segment
from portable.layer import Layer
from portable.sets import ANY_SIZE, multiple_of

NAMES = {
    "q": "q",
    "k": "k",
    "v": "v",
    "alibi": "alibi_slopes",
    "lse": "return_lse",
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_k",
    "max_query_len": "max_seqlen_q",
    "max_seq_len": "max_seqlen_k",
    "scale": "softmax_scale",
    "causal": "causal",
    "window": "window_size",
}


def slopes_for_ck(segment: Segment, layer: Layer) -> torch.Tensor | None:
    """Slopes of 0 where a window closes a side at the query itself, which alone keeps the call from the assembly.

    The dispatcher sees a window only in sides above 0, and the assembly has none.
    """
    closed = [side for side in layer.window if side is not None]
    if not closed or max(closed) > 0:
        return None
    return torch.zeros(layer.num_heads, dtype=torch.float32, device=segment.seq_lens.device)


class CkCall(Call):
    """CK or assembly. A flag of the process sends the same call to Triton, which has other conventions."""

    def why_not_routed(self) -> str | None:
        if getattr(module_of("aiter.ops.mha"), "ENABLE_CK", True):
            return None
        return "goes to Triton because ENABLE_CK is off; use aiter.varlen_triton, or switch it on"


class TritonCall(Call):
    """Slopes are those of each request."""

    def why_not_routed(self) -> str | None:
        form = getattr(module_of(self.convention.module), "_MHA_IMPL", "default")
        return None if form == "default" else f"is set to {form!r}, whose LSE is [H, T]; set 'default'"

    def _slopes(self, slopes: torch.Tensor, segment: Segment) -> torch.Tensor:
        return slopes.float().expand(len(segment.seq_lens), -1)  # it is told both strides


CK = Convention(
    module="aiter",
    function="flash_attn_varlen_func",
    names={**NAMES, "out": "out", "softcap": "logits_soft_cap"},
    step={"alibi_slopes": slopes_for_ck},
    window_more=(0,),  # sink tokens
    returns={2: 1},
    # neither is confirmed: CK and assembly may differ
    lse=LseForm(empty="nan"),
    zeroes_empty=False,
)
OLD_CK = replace(CK, window_more=())
TRITON = Convention(
    module="aiter.ops.triton.attention.mha",
    function="flash_attn_varlen_func",
    names=NAMES,
    equal_value_dim=True,  # a narrower V has to be a power of 2, and what is left of K too
    returns={2: 1},
    lse=LseForm(layout="th", empty="0"),
)
CK_CAPS = KernelCaps(
    op=Op.PREFILL,
    name="aiter.varlen",
    provider="aiter",
    vendors={"amd"},
    archs=ARCHS,
    requires=(NEW,),
    dtypes=HALVES,
    head_dims=multiple_of(8, up_to=256),
    gqa_ratios=ANY_SIZE,
    features=frozenset({"window", "softcap", "sinks", "alibi", "noncausal", "lse"}),
    tolerance=TOLERANCE,
    test_shapes=({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 1},),
)
TRITON_CAPS = replace(
    CK_CAPS,
    name="aiter.varlen_triton",
    features=frozenset({"sinks", "alibi", "noncausal", "lse"}),  # of windows it has some, of caps none
    test_shapes=({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},),
)

KERNELS: tuple[Kernel, ...] = (
    CkCall(CK).kernel(CK_CAPS),
    # here the assembly takes calls with a cap and drops it
    CkCall(OLD_CK).kernel(
        replace(CK_CAPS, name="aiter.varlen_017", requires=(OLD,), features=CK_CAPS.features - {"softcap"})
    ),
    TritonCall(TRITON).kernel(TRITON_CAPS),
    TritonCall(replace(TRITON, module="aiter.ops.triton.mha")).kernel(
        replace(TRITON_CAPS, name="aiter.varlen_triton_017", requires=(OLD,))
    ),
)
