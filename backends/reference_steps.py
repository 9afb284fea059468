"""What a graph's step changes in persistent metadata, in torch operations that wait for no device."""

from __future__ import annotations

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


KERNELS = (Kernel(_caps(Op.REFRESH), refresh), Kernel(_caps(Op.ADVANCE), advance))
