"""Launches refresh.cu: what a graph's step changes in persistent metadata."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from portable.backends.hip.archs import on_gpus
from portable.backends.hip.launch import THREADS, Function, Launch, Launches, addresses, divide
from portable.kernel import Kernel, Op
from portable.ragged import cdiv
from portable.sets import ANY_SIZE

NO_PAIR = (None, None)
_collects: Launches[Launch] = Launches()  # by device: all that it takes comes with each launch


@cache
def _function(name: str) -> Function:
    changing, fixed = {"refresh": ("3Niq", ""), "advance": ("4Nii", "iIiq"), "collect": ("12N2qiIi10i", "")}[name]
    return Function("refresh", name, changing, fixed)


def refresh(index: torch.Tensor, pages: torch.Tensor, cells: torch.Tensor) -> None:
    """Changed entries of a block table; see `portable.kernel`."""
    entries = len(index)
    if entries:
        given = index, pages, cells
        launch = _function("refresh").prepare(given, ())
        launch(cdiv(entries, THREADS), *addresses(*given), entries, cells.numel())


def advance(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    page_size: int,
    max_seq_len: int,
) -> None:
    """One more token for each request; see `portable.kernel`."""
    requests = len(seq_lens)
    if requests:
        given = seq_lens, block_table, slot_mapping, positions
        launch = _function("advance").prepare(given, (*divide(page_size), block_table.stride(0)))
        launch(cdiv(requests, THREADS), *addresses(*given), requests, max_seq_len)


def collect(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    first: torch.Tensor | None,
    cells: torch.Tensor,
    pad: int,
    accepted: torch.Tensor | None = None,
    most: int = 1,
    kept: torch.Tensor | None = None,
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """What an engine's tensors hold, into persistent ones; see `portable.kernel`."""
    count, steps = cells.numel(), 0 if accepted is None else len(accepted)
    each = {source.element_size(): (source, target) for source, target in copies}
    pairs = [each.get(size, NO_PAIR) for size in (4, 8, 1)]
    nums = [0 if source is None else len(source) for source, _ in pairs]
    items = max(count, steps, *nums)
    if not items:
        return
    given = cells, table, rows, first, accepted, kept, *(tensor for pair in pairs for tensor in pair)
    device = cells.get_device()
    launch = _collects.known.get(device)
    if launch is None:
        launch = _function("collect").prepare(given, ())
        if device >= 0:
            _collects.keep(device, launch)
    launch(
        cdiv(items, THREADS),
        *addresses(*given),
        cells.stride(0),
        table.stride(0),
        *divide(max(1, cells.shape[1])),
        count,
        table.shape[1],
        pad,
        steps,
        most,
        *nums,
        table.dtype == torch.int64,
        accepted is not None and accepted.dtype == torch.int64,
    )


KERNELS = (
    Kernel(on_gpus(op=Op.REFRESH, name="hip.refresh", head_dims=ANY_SIZE), refresh),
    Kernel(on_gpus(op=Op.ADVANCE, name="hip.advance", head_dims=ANY_SIZE), advance),
    Kernel(on_gpus(op=Op.COLLECT, name="hip.collect", head_dims=ANY_SIZE), collect),
)
