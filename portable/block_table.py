"""A block table on the host that knows which of its entries changed, so that a plan need not look for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from portable.arguments import at_least, checked, named
from portable.lengths import MAX_INT32, Int32, as_integers

KEPT = 1 << 16  # entries of the log; a plan that was longer away takes the whole table


class BlockTable:
    """The pages of an engine's requests: [rows, width] int32, 0 where none was written.

    `Batch.from_lens` takes it for an array: its first rows are the requests of the step. With an array a plan that is
    padded to a size compares all its entries with those of the last one, 20 us for 256 rows of 512; with this it takes
    those that were written since, whatever the size.

    Args:
        rows: requests at most.
        width: pages of a request at most.

    >>> table = BlockTable(rows=2, width=4)
    >>> table.write(0, 0, [7, 9])
    >>> table.write(0, 2, [3])
    >>> table.move(0, 1)
    >>> table.pages.tolist(), table.since(2).tolist()
    ([[7, 9, 3, 0], [7, 9, 3, 0]], [4, 5, 6])
    """

    @checked
    def __init__(self, rows: int, width: int) -> None:
        at_least(1, rows=rows, width=width)
        self._table: Int32 = np.zeros((rows, width), np.int32)
        self._log: list[npt.NDArray[np.int64]] = []
        self._first = self._entries = 0  # the version before the log, and what it holds
        self.pages: Int32 = self._table.view()
        self.pages.flags.writeable = False
        self.address = self._table.ctypes.data

    @property
    def version(self) -> int:
        """How often it was written to."""
        return self._first + len(self._log)

    @named
    def write(self, row: int, column: int, pages: npt.ArrayLike) -> None:
        """Pages of a request from a column on.

        Raises:
            ValueError: no such row or columns, or a page below 0.
        """
        found = as_integers("pages", pages)
        end = column + found.size
        rows, width = self._table.shape
        if not (0 <= row < rows and column >= 0 and end <= width):
            raise ValueError(f"row {row} and columns {column} to {end - 1} are not in a table of {rows} x {width}")
        if found.size and (found.min() < 0 or found.max() > MAX_INT32):
            raise ValueError(f"row {row}: pages are {found.min()} to {found.max()}; a page is 0 to 2**31 - 1")
        self._table[row, column:end] = found
        first = row * width
        self._changed(np.arange(first + column, first + end))

    @named
    def put(self, rows: npt.ArrayLike, columns: npt.ArrayLike, pages: npt.ArrayLike) -> None:
        """One page each into entries, [n] of each argument: what requests that grow take in a step.

        Raises:
            ValueError: no such row or column, or a page below 0.

        >>> table = BlockTable(rows=2, width=4)
        >>> table.put([0, 1], [0, 2], [7, 8])
        >>> table.pages.tolist()
        [[7, 0, 0, 0], [0, 0, 8, 0]]
        """
        row, column, page = as_integers("rows", rows), as_integers("columns", columns), as_integers("pages", pages)
        count, width = self._table.shape
        shapes = row.shape, column.shape, page.shape
        if row.ndim != 1 or len(set(shapes)) > 1:
            raise ValueError("rows, columns and pages have shapes {}, {} and {}; one each".format(*shapes))
        if row.size and (
            (row | column | page).min() < 0 or row.max() >= count or column.max() >= width or page.max() > MAX_INT32
        ):
            raise ValueError(
                f"rows are {row.min()} to {row.max()}, columns {column.min()} to {column.max()} and pages {page.min()} "
                f"to {page.max()}; the table is {count} x {width}, and a page 0 to 2**31 - 1"
            )
        places = row * width + column
        self._table.reshape(-1)[places] = page
        self._changed(places)

    @named
    def move(self, source: int, target: int) -> None:
        """The pages of one row into another one, whose own are gone: what closes the gap of a request that left."""
        self._check_row(source=source, target=target)
        self._become(target, self._table[source])

    @named
    def clear(self, row: int) -> None:
        """A row without pages."""
        self._check_row(row=row)
        self._become(row, np.zeros(self._table.shape[1], np.int32))

    @named
    def rows(self, count: int) -> Int32:
        """[count, width] the first rows, which change with the table; they are to be read only."""
        if count < 0:
            at_least(0, count=count)
        return self._table[:count]

    @named
    def since(self, version: int) -> npt.NDArray[np.int64] | None:
        """The places, row * width + column, that were written since a version; None where that is too long ago."""
        if version < self._first:
            return None
        recent = self._log[version - self._first :]
        if len(recent) == 1:
            return recent[0]
        return np.concatenate(recent) if recent else np.zeros(0, np.int64)

    def _check_row(self, **rows: int) -> None:
        for name, row in rows.items():
            if not 0 <= row < len(self._table):
                raise ValueError(f"{name} is {row}; the table has rows 0 to {len(self._table) - 1}")

    def _become(self, row: int, pages: Int32) -> None:
        places = np.flatnonzero(self._table[row] != pages)
        self._table[row] = pages
        self._changed(row * self._table.shape[1] + places)

    def _changed(self, places: npt.NDArray[np.int64]) -> None:
        places.flags.writeable = False  # `since` gives it away
        self._log.append(places)
        self._entries += places.size
        while self._entries > KEPT:
            self._entries -= self._log.pop(0).size
            self._first += 1
