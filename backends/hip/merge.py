"""Launches merge.cu: partial attentions into one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from portable.backends.hip.archs import NAMES, on_gpus
from portable.backends.hip.launch import THREADS, Function, Launch, Launches, addresses, floats, items
from portable.kernel import Kernel, Op
from portable.ragged import cdiv
from portable.sets import ANY_SIZE

MOST_PARTS = 8
# Chunks of a row that a thread merges, and threads of a block, by parts. On an H200, us for two parts of 8,192 tokens
# and of one: 54.7 and 2.2; with 2 chunks in blocks of 256 threads 53.8 and 2.5, with one in such 63.1 and 2.2.
CUTS = {2: (2, 128), MOST_PARTS: (1, THREADS)}

_prepared: Launches[tuple[Launch, int]] = Launches()  # beside the launch: blocks


@cache
def _merge(dtype: torch.dtype, parts: int) -> Function:
    fixed = f"iiIiiIiii{4 * parts}I4Ii"
    return Function("merge", f"merge{parts}", f"{2 * parts + 3}N", fixed, ELEMENT=NAMES[dtype])


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """All parts, `MOST_PARTS` at a time; `out` may be one of `outs`."""
    count = len(outs)
    if count > MOST_PARTS:
        some, log = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        merge(outs[:MOST_PARTS], lses[:MOST_PARTS], None, some, log)
        merge((some, *outs[MOST_PARTS:]), (log, *lses[MOST_PARTS:]), sinks, out, lse)
        return
    if sinks is not None:
        sinks = floats(sinks)
    # where all is dense, the shape says it, in a third of the time that strides take
    key: tuple[Any, ...] = count, lse is None, out.get_device(), out.dtype, out.shape
    dense = out.is_contiguous() and (lse is None or lse.is_contiguous())
    if count == 2:  # by name: loops take 0.3 us
        (a, b), (c, d) = outs, lses
        dense = dense and a.is_contiguous() and b.is_contiguous() and c.is_contiguous() and d.is_contiguous()
    else:
        dense = dense and all([each.is_contiguous() for each in (*outs, *lses)])
    if not dense:
        given = (*outs, *lses, out) if lse is None else (*outs, *lses, out, lse)
        key += tuple([each.stride() for each in given])
    known = _prepared.known.get(key)
    if known is None:
        known = _prepare(outs, lses, sinks, out, lse)
        if out.is_cuda:
            _prepared.keep(key, known)
    launch, blocks = known
    if not blocks:
        return
    sinks_at = 0 if sinks is None else sinks.data_ptr()
    lse_at = 0 if lse is None else lse.data_ptr()
    if count == 2:
        launch(blocks, a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), sinks_at, out.data_ptr(), lse_at)
    else:
        none = [0] * ((2 if count == 1 else MOST_PARTS) - count)
        launch(blocks, *addresses(*outs), *none, *addresses(*lses), *none, sinks_at, out.data_ptr(), lse_at)


def _prepare(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[Launch, int]:
    tokens, heads, width = out.shape
    parts = 2 if len(outs) <= 2 else MOST_PARTS
    none = (None,) * (parts - len(outs))
    strides = [s for o, x in zip(outs, lses, strict=True) for s in (*o.stride()[:2], *x.stride())]
    chunks, threads = CUTS[parts]
    made = items(heads, width, out.dtype, chunks, threads)
    fixed = (
        tokens, *made.numbers(), *strides, *(0,) * (4 * len(none)),
        *out.stride()[:2], *((0, 0) if lse is None else lse.stride()), width,
    )  # fmt: skip
    given = (*outs, *none, *lses, *none, sinks, out, lse)
    return _merge(out.dtype, parts).prepare(given, fixed, 1, made.slices, threads), cdiv(tokens, made.tokens)


KERNELS = (Kernel(on_gpus(op=Op.MERGE, name="hip.merge", head_dims=ANY_SIZE, gqa_ratios=ANY_SIZE), merge),)
