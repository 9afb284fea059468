"""What a graph's step changes in persistent metadata, in torch operations that wait for no device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portable.backends.reference import DTYPES
from portable.kernel import Kernel, KernelCaps, Op
from portable.sets import ANY, ANY_SIZE


def refresh(index: torch.Tensor, pages: torch.Tensor, cells: torch.Tensor) -> None:
    """Changed entries of a block table; see `portable.kernel`.

    >>> cells = torch.zeros(4, dtype=torch.int32)
    >>> refresh(torch.tensor([2, -1, 4]), torch.tensor([7, 8, 9], dtype=torch.int32), cells)
    >>> cells.tolist()
    [0, 0, 7, 0]
    """
    if not len(index) or not len(cells):
        return
    live = (index >= 0) & (index < len(cells))
    # entries that are none repeat the first cell: what it holds, or what is to be there
    first = torch.where(live & (index == 0), pages, -1).max()
    first = torch.where(first < 0, cells[0], first)
    cells.scatter_(0, torch.where(live, index, 0), torch.where(live, pages, first))


def advance(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    page_size: int,
    max_seq_len: int,
) -> None:
    """One more token for each request; see `portable.kernel`.

    >>> lens, slots = torch.tensor([16, 0], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    >>> advance(lens, torch.tensor([[5, 3], [0, 0]], dtype=torch.int32), slots, None, page_size=16, max_seq_len=32)
    >>> lens.tolist(), slots.tolist()
    ([17, 0], [48, -1])
    """
    lens = seq_lens.long()
    grows = (lens > 0) & (lens < max_seq_len)
    nth = torch.where(grows, lens // page_size, 0)
    page = block_table.gather(1, nth[:, None])[:, 0].long()
    slot_mapping.copy_(torch.where(grows, page * page_size + lens % page_size, -1))
    seq_lens.add_(grows)
    if positions is not None:
        positions.copy_(torch.where(grows, lens, positions))


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
    """What an engine's tensors hold, into persistent ones; see `portable.kernel`.

    >>> cells, table = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([[5, 6, 7], [8, 9, 3]])
    >>> collect(table, torch.tensor([1, -1]), torch.tensor([1, 0]), cells, -4)
    >>> cells.tolist()
    [[9, 3, -4], [-4, -4, -4]]
    """
    count, columns = cells.shape
    at = torch.arange(columns, device=cells.device).expand(count, columns)
    row = torch.arange(count, device=cells.device) if rows is None else rows.long()
    if first is not None:
        at = at + first[:, None]
    if accepted is not None:
        taken = accepted.clamp(1, most)
        at = at + torch.nn.functional.pad(taken - 1, (0, count - len(taken)))[:, None]
        if kept is not None:
            kept.copy_(taken)
    if table.numel() and cells.numel():
        inside = (row[:, None] >= 0) & (at >= 0) & (at < table.shape[1])
        found = table[row.clamp(min=0)[:, None], at.clamp(0, table.shape[1] - 1)]
        cells.copy_(torch.where(inside, found, pad))
    else:
        cells.fill_(pad)
    for source, target in copies:
        target.copy_(source)


def _caps(op: Op) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=f"reference.{op}",
        provider="reference",
        vendors=ANY,
        archs=ANY,
        emulated=True,
        dtypes=DTYPES,
        head_dims=ANY_SIZE,
    )


KERNELS = (Kernel(_caps(Op.REFRESH), refresh), Kernel(_caps(Op.ADVANCE), advance), Kernel(_caps(Op.COLLECT), collect))
