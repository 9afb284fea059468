"""What a block table on the device holds, as the host knows it, and which entries a step changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from portable.batch import Batch
from portable.block_table import BlockTable
from portable.lengths import Int32, check_pages
from portable.ragged import cdiv

Entries = tuple[npt.NDArray[np.int64], Int32]  # places in the table, row * width + column, and their pages
NOTHING: Entries = (np.zeros(0, np.int64), np.zeros(0, np.int32))


def check_reach(batch: Batch, ahead: int, width: int) -> int:
    """Pages that the longest sequence reads, with `ahead` more tokens, once its table and one of `width` have them."""
    table = batch.block_table
    assert table is not None
    reach = cdiv(batch.max_seq_len + ahead, batch.page_size) if batch.num_reqs else 0
    if reach > min(table.shape[1], width):
        raise ValueError(
            f"block_table is {table.shape[1]} wide; sequences of {batch.max_seq_len} tokens and {ahead} more read "
            f"{reach} pages, of {width} at most"
        )
    return reach


class Mirror:
    """The rows of requests in a table of `rows` x `width` on the device, which begins with zeros.

    >>> mirror = Mirror(rows=2, width=4)
    >>> step = Batch.from_lens([1], [5], block_table=[[3, 7]], page_size=4)
    >>> mirror.changes(step), mirror.changes(step)[0].size
    ((array([0, 1]), array([3, 7], dtype=int32)), 0)
    """

    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self.pages: Int32 = np.zeros((rows, width), np.int32)
        self._source: BlockTable | None = None  # whose entries the device has, up to a version
        self._version = 0
        self._known = True  # whether `pages` or the source say what the device has
        self._negative = False  # whether `pages` has any, behind what sequences reach
        self._live = self._reach = 0  # rows and columns of `pages` that are not 0
        self.used = 0  # rows that any step had

    def forget(self, rows: int) -> None:
        """The table was written to on the device."""
        self._known, self.used = False, max(self.used, rows)

    def changes(self, batch: Batch, ahead: int = 0) -> Entries | None:
        """The entries that bring a step's table to the device; None: all of `whole` is to go there.

        Args:
            ahead: tokens beyond the lengths whose pages are read too.
        """
        table = batch.block_table
        assert table is not None
        live, reach, source = batch.num_reqs, check_reach(batch, ahead, self.width), batch.pages
        rows = table.stride(0)  # not the width of a table of every other row
        if source is not None and source.address == table.data_ptr() and source.pages.shape[1] == self.width == rows:
            return self._of_source(source)
        if self._source is not None:
            self._source, self._known = None, False
        self.used = max(self.used, live)
        return self._of_array(batch, live, reach, ahead)

    def _of_source(self, source: BlockTable) -> Entries | None:
        rows = min(len(source.pages), len(self.pages))
        places = source.since(self._version) if source is self._source and self._known else None
        self._source, self._version, self._known = source, source.version, True
        self.used = max(self.used, rows)
        if places is None:
            return None
        if not places.size:
            return NOTHING
        if rows < len(source.pages):
            places = places[places < rows * self.width]
        return places, source.pages.reshape(-1)[places]

    def _of_array(self, batch: Batch, live: int, reach: int, ahead: int) -> Entries | None:
        assert batch.block_table is not None
        given: Int32 = batch.block_table.numpy()
        pages, width = self.pages, reach
        if given.shape[1] == self.width < 2 * reach:  # one run of memory: a third of the time of rows that end early
            width = self.width
        wanted = given[:live, :width]
        different = wanted != pages[:live, :width]
        if reach < width:
            different[:, reach:] = False
        changed = different.reshape(-1).nonzero()[0]
        place, found = NOTHING
        if changed.size:
            row, column = np.divmod(changed, width)
            found = wanted[row, column]
        if self._negative or (changed.size and found.min() < 0):
            seq_lens = batch.host_seq_lens if batch.exact else batch.seq_lens.numpy()
            check_pages(given[:live], seq_lens[:live] + ahead, batch.page_size)
            self._negative = bool((wanted[:, :reach] < 0).any())
        if changed.size:
            place = row * self.width + column
            pages[row, column] = found
        if live < self._live or reach < self._reach:
            stale = self._stale(live, reach)
            pages.reshape(-1)[stale] = 0
            place, found = np.concatenate([place, stale]), np.concatenate([found, np.zeros(stale.size, np.int32)])
        self._live, self._reach = live, reach
        if self._known:
            return place, found
        self._known = True
        return None

    def _stale(self, live: int, reach: int) -> npt.NDArray[np.int64]:
        """The places outside of what a step has that still hold pages."""
        stale = self.pages[: self._live, : self._reach] != 0
        stale[:live, :reach] = False
        row, column = np.nonzero(stale)
        return row * self.width + column

    def whole(self) -> Int32:
        """[used * width] all that the device should have, of the rows that any step had."""
        pages = self.pages if self._source is None else self._source.pages
        return pages[: self.used].reshape(-1)
