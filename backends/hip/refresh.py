"""Launches refresh.cu: what a graph's step changes in persistent metadata."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from portable.backends.hip.archs import on_gpus
from portable.backends.hip.launch import THREADS, Function, Launch, Launches, divide
from portable.kernel import Kernel, Op
from portable.ragged import cdiv
from portable.sets import ANY_SIZE

NOTHING = 0, 0, 0  # addresses and entries of a list that there is none of
KIND = {4: 0, 8: 1, 1: 2}  # of a list, by the bytes of an entry
_refreshes: Launches[Launch] = Launches()  # by device: all that it takes comes with each launch
_advances: Launches[Launch] = Launches()
_collects: Launches[tuple[Launch, int]] = Launches()  # beside the launch: blocks


@cache
def _function(name: str) -> Function:
    changing, fixed = {"refresh": ("3Niq", ""), "advance": ("4Nii", "iIiq"), "collect": ("12N", "2qiIi10i")}[name]
    return Function("refresh", name, changing, fixed)


def refresh(index: torch.Tensor, pages: torch.Tensor, cells: torch.Tensor) -> None:
    """Changed entries of a block table; see `portable.kernel`."""
    entries, device = index.numel(), cells.get_device()
    if not entries:
        return
    launch = _refreshes.known.get(device)
    if launch is None:
        launch = _function("refresh").prepare((index, pages, cells), ())
        if device >= 0:
            _refreshes.keep(device, launch)
    launch(-(-entries // THREADS), index.data_ptr(), pages.data_ptr(), cells.data_ptr(), entries, cells.numel())


def advance(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    page_size: int,
    max_seq_len: int,
) -> None:
    """One more token for each request; see `portable.kernel`."""
    requests, device = seq_lens.numel(), seq_lens.get_device()
    if not requests:
        return
    key = device, page_size, block_table.stride()
    launch = _advances.known.get(key)
    if launch is None:
        given = seq_lens, block_table, slot_mapping, positions
        launch = _function("advance").prepare(given, (*divide(page_size), block_table.stride(0)))
        if device >= 0:
            _advances.keep(key, launch)
    launch(
        -(-requests // THREADS), seq_lens.data_ptr(), block_table.data_ptr(), slot_mapping.data_ptr(),
        0 if positions is None else positions.data_ptr(), requests, max_seq_len,
    )  # fmt: skip


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
    lists = [NOTHING] * 3
    for source, target in copies:
        lists[KIND[source.itemsize]] = source.data_ptr(), target.data_ptr(), source.numel()
    (lens, lens_to, num_lens), (slots, slots_to, num_slots), (flags, flags_to, num_flags) = lists
    device, width = cells.get_device(), table.shape[1]
    steps, wide = (0, None) if accepted is None else (accepted.numel(), accepted.dtype)
    key = (
        device, cells.shape, cells.stride(), width, table.stride(), table.dtype, pad, steps, wide, most,
        num_lens, num_slots, num_flags,
    )  # fmt: skip
    known = _collects.known.get(key)
    if known is None:
        count, nums = cells.numel(), (num_lens, num_slots, num_flags)
        fixed = (
            cells.stride(0), table.stride(0), *divide(max(1, cells.shape[1])), count, width, pad, steps, most, *nums,
            table.dtype is torch.int64, wide is torch.int64,
        )  # fmt: skip
        pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * 3
        for source, target in copies:
            pairs[KIND[source.itemsize]] = source, target
        given = cells, table, rows, first, accepted, kept, *(tensor for pair in pairs for tensor in pair)
        known = _function("collect").prepare(given, fixed), cdiv(max(count, steps, *nums), THREADS)
        if device >= 0:
            _collects.keep(key, known)
    launch, blocks = known
    if blocks:
        launch(
            blocks, cells.data_ptr(), table.data_ptr(), 0 if rows is None else rows.data_ptr(),
            0 if first is None else first.data_ptr(), 0 if accepted is None else accepted.data_ptr(),
            0 if kept is None else kept.data_ptr(), lens, lens_to, slots, slots_to, flags, flags_to,
        )  # fmt: skip


KERNELS = (
    Kernel(on_gpus(op=Op.REFRESH, name="hip.refresh", head_dims=ANY_SIZE), refresh),
    Kernel(on_gpus(op=Op.ADVANCE, name="hip.advance", head_dims=ANY_SIZE), advance),
    Kernel(on_gpus(op=Op.COLLECT, name="hip.collect", head_dims=ANY_SIZE), collect),
)
