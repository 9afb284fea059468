"""Block tables read off other block tables: what a derived step keeps in order to serve another KV group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from portable.lengths import Int32
from portable.ragged import cdiv
from portable.upload import upload


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class View:
    """How the block table of a derived batch is read off the table of a KV group: rows, and each one's first page."""

    rows: npt.NDArray[np.int64]  # [B]
    first_page: npt.NDArray[np.int64]  # [B]
    width: int
    picked: bool = True  # False: the batch has the group's table, for whoever reads this off it
    chunk: int | None = None  # of `local`, where it made this

    def of(self, table: torch.Tensor) -> torch.Tensor:
        """The derived table [B, width]."""
        (starts,) = upload((self.starts(table),), table.device)
        return self.pick(table, starts)

    def starts(self, table: torch.Tensor) -> npt.NDArray[np.int64]:
        """[B] where each row of the derived table begins in the memory of another."""
        starts: npt.NDArray[np.int64] = self.rows * np.int64(_pitch(table)) + self.first_page
        return starts

    def pick(self, table: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """`of`, with what `starts` gives on the device already.

        Behind the pages that the derived lengths reach stands whatever stands there in the table.
        """
        rows, columns, pitch = *table.shape, _pitch(table)
        if not columns or not len(starts):  # nothing but empty sequences
            return table.new_zeros(len(starts), self.width)
        if columns > 1 and table.stride(1) != 1:
            table = table.contiguous()
        reach = (rows - 1) * pitch + columns
        inside = self._inside(pitch, reach - self.width)
        if inside < len(starts):
            picked = table.new_empty(len(starts), self.width)
            at = starts[inside:, None]
            # Of the last rows, what lies past the end of the table repeats its last entry.
            last = (at + torch.arange(self.width, device=table.device)).clamp_(max=reach - 1)
            torch.index_select(table.as_strided((reach,), (1,)), 0, last.view(-1), out=picked[inside:].view(-1))
            if not inside:
                return picked
        else:
            picked = None
        # Windows of the table's memory, each copied as a whole: 1,024 rows of 512 pages take 0.25 ms, and 2.2 a page at
        # a time, whose places have to be made first.
        windows = table.as_strided((reach - self.width + 1, self.width), (1, 1))
        if picked is None:
            return windows.index_select(0, starts)
        torch.index_select(windows, 0, starts[:inside], out=picked[:inside])
        return picked

    def _inside(self, pitch: int, last: int) -> int:
        """How many rows, from the first on, lie inside of a table whose last window begins at `last`."""
        outside = self.rows * np.int64(pitch) + self.first_page > last
        return int(outside.argmax()) if outside.any() else outside.size

    def then(self, second: View) -> View:
        """The view of a view."""
        known = second.rows < self.rows.size  # padding is in no table
        rows, first_page = second.rows[known], second.first_page[known]
        return View(rows=self.rows[rows], first_page=self.first_page[rows] + first_page, width=second.width)

    def check(self, table: torch.Tensor, seq_lens: Int32, page_size: int) -> None:
        """Raise a ValueError unless a group's table has the rows, and the columns that the derived lengths reach."""
        if len(table) < (rows := int(self.rows.max(initial=-1)) + 1):
            raise ValueError(f"block_table has {len(table)} rows; the step has {rows} requests")
        lens = seq_lens[: self.rows.size]
        pages = np.where(lens > 0, self.first_page + cdiv(lens, page_size), 0)
        if (widest := int(pages.max(initial=0))) > table.shape[1]:
            row = int(self.rows[pages.argmax()])
            raise ValueError(f"row {row}: the step reads {widest} pages, but block_table is {table.shape[1]} wide")


def _pitch(table: torch.Tensor) -> int:
    """Elements from row to row, of a table whose rows are dense, or will be once it is."""
    rows, columns = table.shape
    return table.stride(0) if rows > 1 and (columns <= 1 or table.stride(1) == 1) else columns
