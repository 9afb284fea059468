"""Where tokens live in a paged cache: slot = page * page_size + offset, and the forms in which kernels want pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from portable.ragged import IntArray, cdiv, cu_from_lens

PAD_SLOT = -1  # a slot that no kernel writes


@overload
def slot_mapping(
    block_table: IntArray, requests: IntArray, positions: IntArray, page_size: int
) -> npt.NDArray[np.int64]: ...
@overload
def slot_mapping(
    block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor: ...
def slot_mapping(
    block_table: IntArray | torch.Tensor,
    requests: IntArray | torch.Tensor,
    positions: IntArray | torch.Tensor,
    page_size: int,
) -> npt.NDArray[np.int64] | torch.Tensor:
    """The slot of each token: [T] rows of `block_table` [B, W] and [T] positions to [T] int64.

    int64 because pages of a large pool overflow 32 bits: 65,536 pages of 32 KiB are 2 GiB.

    >>> slot_mapping(np.array([[7, 9]]), np.array([0, 0, 0]), np.array([3, 4, 5]), page_size=4)
    array([31, 36, 37])
    """
    if isinstance(block_table, torch.Tensor):
        assert isinstance(requests, torch.Tensor) and isinstance(positions, torch.Tensor)
        wide = positions.long()
        return block_table[requests.long(), wide // page_size].long() * page_size + wide % page_size
    pages, offsets = np.divmod(np.asarray(positions, dtype=np.int64), page_size)
    slots: npt.NDArray[np.int64] = np.asarray(block_table)[requests, pages].astype(np.int64) * page_size + offsets
    return slots


def page_table_from_tokens(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    width: int,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """A block table from a table of token slots, such as SGLang keeps: [B, width] int32, zero behind each row's pages.

    Args:
        req_to_token: [R, C] the slot of each token of each request.
        rows: [B] which rows of it.
        seq_lens: [B] tokens of each request.
        page_size: tokens per page; slots of one page are consecutive.
        width: columns of the result, at least ceil(seq_len / page_size) of each.
        offsets: [B] the column at which each request's tokens start, a multiple of page_size; None: 0.

    >>> slots = torch.tensor([[8, 9, 10, 11, 20, 21, 22, 23, 4, 5, 6, 7]])
    >>> page_table_from_tokens(slots, torch.tensor([0]), torch.tensor([9]), page_size=4, width=4).tolist()
    [[2, 5, 1, 0]]
    """
    first = torch.arange(width, device=req_to_token.device) * page_size
    columns = first.expand(len(rows), width)
    if offsets is not None:
        columns = columns + offsets.long()[:, None]
    slots = req_to_token[rows.long()[:, None], columns.clamp(max=req_to_token.shape[1] - 1)]
    return torch.where(first < seq_lens[:, None], slots // page_size, 0).to(torch.int32)


@dataclass(frozen=True, slots=True, eq=False)
class PageCsr:
    """Pages in compressed rows, with their granularity: row b has indices[indptr[b] : indptr[b + 1]].

    One object holds what must agree. (Indices of tokens beside lengths of pages of 64 once took a model's score from
    0.975 to 0.005.)
    """

    indptr: torch.Tensor  # [B + 1] i32
    indices: torch.Tensor  # [N] i32; behind the last row 0
    last_page_len: torch.Tensor  # [B] i32, tokens in the last page; 0 for a row without pages
    page_size: int

    @property
    def seq_lens(self) -> torch.Tensor:
        """[B] int32 tokens of each row."""
        return (self.indptr.diff() - 1).clamp(min=0) * self.page_size + self.last_page_len

    def table(self, width: int) -> torch.Tensor:
        """The block table [B, width] int32 again, zero behind each row's pages."""
        column = torch.arange(width, device=self.indptr.device)
        place = (self.indptr[:-1, None] + column).clamp(max=max(0, len(self.indices) - 1))
        pages = self.indices[place.long()] if len(self.indices) else torch.zeros_like(place)
        return torch.where(column < self.indptr.diff()[:, None], pages, 0).to(torch.int32)

    def of_tokens(self, num_tokens: int) -> PageCsr:
        """The same rows with pages of one token; `num_tokens` is their sum, or more."""
        lens = self.seq_lens
        indptr = cu_from_lens(lens)
        row, position, live = _places(indptr, num_tokens)
        if not len(self.indices):
            return PageCsr(indptr, torch.zeros_like(row, dtype=torch.int32), torch.zeros_like(lens), 1)
        page = self.indices[(self.indptr[row].long() + position // self.page_size).clamp(max=len(self.indices) - 1)]
        slots = page.long() * self.page_size + position % self.page_size
        if slots.device.type == "cpu" and slots.numel() and (most := int(slots.numpy().max())) >= 2**31:
            raise ValueError(f"slot {most} does not fit int32 indices; keep pages of {self.page_size} tokens")
        return PageCsr(indptr, torch.where(live, slots, 0).to(torch.int32), (lens > 0).to(torch.int32), 1)


def page_csr(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int) -> PageCsr:
    """The pages of a block table [B, W] in compressed rows, without reading the device.

    Args:
        num_pages: entries of `indices`: the sum of ceil(seq_len / page_size), or an upper bound of it.

    >>> csr = page_csr(torch.tensor([[3, 1], [0, 0], [2, 5]]), torch.tensor([5, 0, 8]), page_size=4, num_pages=4)
    >>> csr.indptr.tolist(), csr.indices.tolist(), csr.last_page_len.tolist()
    ([0, 2, 2, 4], [3, 1, 2, 5], [1, 0, 4])
    """
    pages = cdiv(seq_lens, page_size)
    indptr = cu_from_lens(pages)
    row, column, live = _places(indptr, num_pages)
    indices = block_table[row, column.clamp(max=block_table.shape[1] - 1)] if block_table.numel() else row
    last = torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)
    return PageCsr(indptr, torch.where(live, indices, 0).to(torch.int32), last.to(torch.int32), page_size)


def _places(indptr: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of n entries: its row, its place there, and whether it is one; int64, int64, bool."""
    entry = torch.arange(n, device=indptr.device)
    row = torch.searchsorted(indptr[1:].contiguous(), entry, right=True).clamp(max=max(0, len(indptr) - 2))
    return row, (entry - indptr[row]).clamp(min=0), entry < indptr[-1]


def num_pages(seq_lens: IntArray, page_size: int) -> int:
    """Pages that sequences of these lengths take.

    >>> num_pages(np.array([5, 0, 8]), 4)
    4
    """
    return int(cdiv(seq_lens, page_size).sum())


def table_width(max_seq_len: int, page_size: int, num_draft: int = 0) -> int:
    """Columns that a block table needs for sequences of `max_seq_len` tokens and `num_draft` drafted behind them.

    >>> table_width(8192, 16), table_width(8192, 16, num_draft=4)
    (512, 513)
    """
    return cdiv(max_seq_len + num_draft, page_size)


def pages_of(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The pages of a run of slots [n], each once, in the order of their first slot; on the host's tensors.

    >>> pages_of(torch.tensor([7, 16, 17]), page_size=4).tolist()
    [1, 4]
    """
    pages: torch.Tensor = torch.unique_consecutive(slots // page_size)
    return pages
