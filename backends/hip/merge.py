"""Launches merge.cu: partial attentions into one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from portable.backends.hip.archs import NAMES, on_gpus
from portable.backends.hip.launch import THREADS, Function
from portable.kernel import Kernel, Op
from portable.ragged import cdiv
from portable.sets import ANY_SIZE

MOST_PARTS = 8


@cache
def _merge(dtype: torch.dtype, parts: int) -> Function:
    return Function("merge", f"merge{parts}", 2 * parts + 3, f"{4 * parts}q4q3i", ELEMENT=NAMES[dtype])


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """All parts, `MOST_PARTS` at a time; `out` may be one of `outs`."""
    if len(outs) > MOST_PARTS:
        some, log = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        merge(outs[:MOST_PARTS], lses[:MOST_PARTS], None, some, log)
        merge((some, *outs[MOST_PARTS:]), (log, *lses[MOST_PARTS:]), sinks, out, lse)
        return
    tokens, heads, width = out.shape
    if not out.numel():
        return
    parts = 2 if len(outs) <= 2 else MOST_PARTS
    none = (None,) * (parts - len(outs))
    strides = [s for o, x in zip(outs, lses, strict=True) for s in (*o.stride()[:2], *x.stride())]
    _merge(out.dtype, parts)(
        (cdiv(tokens * heads * cdiv(width * out.dtype.itemsize, 16), THREADS), 1),
        (*outs, *none, *lses, *none, sinks, out, lse),
        *strides, *(0,) * (4 * len(none)),
        *out.stride()[:2], *((0, 0) if lse is None else lse.stride()),
        tokens, heads, width,
    )  # fmt: skip


KERNELS = (Kernel(on_gpus(op=Op.MERGE, name="hip.merge", head_dims=ANY_SIZE, gqa_ratios=ANY_SIZE), merge),)
