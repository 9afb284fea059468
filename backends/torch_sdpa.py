"""Two kernels below `scaled_dot_product_attention`, by name: on a GPU that function tells no LSE.

* The memory-efficient one has its LSE as [B, H, Sq rounded up to 32], and wants rows of a bias 16 bytes apart.
* cuDNN has [B, H, Sq, 1], widths of K and V up to 128, and no float32.
* Both align `is_causal` to the top left; that either LSE is in natural log is told by the self-test.
* Both round a bias to q's dtype: ALiBi at 300 keys is then wrong by 0.0104 in bf16, above the tolerance, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from portable.backends.torch_native import TOLERANCE, attend, prepare
from portable.kernel import KV, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.sets import ANY_SIZE, from_arch, multiple_of

ALIGNED = 16  # numbers, so at least as many bytes in every dtype


def efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_scaled_dot_product_efficient_attention`, whose LSE is cut to [B, H, Sq]."""
    call = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = call(q, k, v, spread(bias, q, k), True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_scaled_dot_product_cudnn_attention`, whose LSE [B, H, Sq, 1] loses its last dimension."""
    call = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = call(q, k, v, spread(bias, q, k), True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def spread(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A bias as [B, H, Sq, Sk] whose rows are a multiple of `ALIGNED` numbers apart.

    >>> rows = torch.zeros(2, 3, 4, 8)
    >>> spread(torch.zeros(2, 1, 4, 5), rows, rows[:, :, :1].expand(2, 3, 5, 8)).stride()
    (64, 0, 16, 1)
    """
    if bias is None:
        return None
    width = bias.shape[-1]
    return pad(bias, (0, -width % ALIGNED))[..., :width].expand(*q.shape[:3], k.shape[2])


def attend_efficient(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    attend(q, kv, segment, layer, tensors, out, lse, efficient)


def attend_cudnn(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    attend(q, kv, segment, layer, tensors, out, lse, cudnn)


HALVES = frozenset({torch.bfloat16, torch.float16})


def _kernels() -> Iterator[Kernel]:
    for run, name, dtypes, widest in (
        (attend_efficient, "efficient", HALVES | {torch.float32}, 512),
        (attend_cudnn, "cudnn", HALVES, 128),
    ):
        for op in (Op.PREFILL, Op.PAGED):
            caps = KernelCaps(
                op=op,
                name=f"torch.{name}" if op is Op.PREFILL else f"torch.{name}_paged",
                provider="torch",
                vendors={"nvidia"},
                archs=from_arch("sm80"),
                requires=(Requires("torch", ">=2.11"),),
                dtypes=dtypes,
                head_dims=multiple_of(8, up_to=widest),
                gqa_ratios=ANY_SIZE,
                page_sizes=ANY_SIZE,
                features=frozenset({"window", "sinks", "noncausal", "lse"}),
                tolerance={dtype: TOLERANCE[dtype] for dtype in dtypes},
            )
            yield Kernel(caps, run, prepare)


KERNELS = tuple(_kernels())
