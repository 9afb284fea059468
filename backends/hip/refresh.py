"""Launches refresh.cu: what a graph's step changes in persistent metadata."""

from __future__ import annotations

from functools import cache

import torch

from portable.backends.hip.archs import on_gpus
from portable.backends.hip.launch import THREADS, Function, addresses, divide
from portable.kernel import Kernel, Op
from portable.ragged import cdiv
from portable.sets import ANY_SIZE


@cache
def _function(name: str) -> Function:
    changing, fixed = {"refresh": ("3Piq", ""), "advance": ("4Pii", "iIiq")}[name]
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


KERNELS = (
    Kernel(on_gpus(op=Op.REFRESH, name="hip.refresh", head_dims=ANY_SIZE), refresh),
    Kernel(on_gpus(op=Op.ADVANCE, name="hip.advance", head_dims=ANY_SIZE), advance),
)
