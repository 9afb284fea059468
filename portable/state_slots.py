"""Who owns which state slot: running states of requests, and checkpoints of prefixes that others may go on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from portable.mamba_copies import Moves, RunningStates
from portable.schedule import Chunk

NONE = -1


class StateSlots:
    """The slots of one group of states in the mode `align` of `portable.mamba`.

    A step needs three slots of a request at most: that of its running state, that of the block that the step ends in,
    and that of the last block end that it passes. A checkpoint that nobody uses is forgotten when its slot is needed,
    the least recently used one first.

    Args:
        max_reqs: rows of the table.
        num_checkpoints: states of prefixes to keep beside those of running requests.
        block_size: tokens between states that may be kept.
        max_seq_len: the longest sequence.
    """

    def __init__(self, *, max_reqs: int, num_checkpoints: int, block_size: int, max_seq_len: int) -> None:
        self.block_size = block_size
        self.num_slots = 3 * max_reqs + num_checkpoints
        self.free = list(range(self.num_slots - 1, -1, -1))
        self.table: npt.NDArray[np.int32] = np.full((max_reqs, -(-max_seq_len // block_size)), NONE, np.int32)
        self.states = RunningStates(max_reqs, block_size=block_size)
        self._checkpoints: dict[int, int] = {}  # prefix -> slot
        self._prefix: dict[int, int] = {}  # slot -> prefix
        self._users: dict[int, int] = {}  # of each checkpoint's slot
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots of checkpoints that nobody uses

    def longest(self, prefixes: Sequence[int]) -> int:
        """How many of these blocks, each named by the prefix that it ends, a request can go on behind."""
        return next((n for n in range(len(prefixes), 0, -1) if prefixes[n - 1] in self._checkpoints), 0)

    def admit(self, row: int, prefixes: Sequence[int]) -> None:
        """Give a row to a request that goes on behind these blocks, from the checkpoint of the last."""
        self.states.forget([row])
        if prefixes:
            slot = self._checkpoints[prefixes[-1]]
            self._users[slot] += 1
            self._idle.pop(slot, None)
            self.table[row, len(prefixes) - 1] = slot

    def before(self, chunks: Sequence[Chunk]) -> Moves:
        """Slots for what a step stores, and the running states to move there."""
        for chunk in chunks:
            end, row = chunk.start + chunk.length, chunk.request.row
            columns = {(end - 1) // self.block_size}
            if end // self.block_size > chunk.start // self.block_size:
                columns.add(end // self.block_size - 1)
            for column in columns:
                if self.table[row, column] == NONE:
                    self.table[row, column] = self._take()
        rows = [chunk.request.row for chunk in chunks]
        return self.states.before(rows, *([getattr(chunk, name) for chunk in chunks] for name in ("start", "length")))

    def after(self, chunk: Chunk, prefixes: Sequence[int]) -> None:
        """Keep the checkpoint that a step made, and free what the request will not read again.

        Args:
            prefixes: of the request's whole blocks, that of the step included.
        """
        end, row = chunk.start + chunk.length, chunk.request.row
        block = end // self.block_size
        if block > chunk.start // self.block_size and prefixes[block - 1] not in self._checkpoints:
            slot = int(self.table[row, block - 1])
            self._checkpoints[prefixes[block - 1]] = slot
            self._prefix[slot], self._users[slot] = prefixes[block - 1], 1
        self._drop(row, slice(0, (end - 1) // self.block_size))

    def release(self, row: int) -> None:
        """Take the slots of a request back that finished or is preempted."""
        self._drop(row, slice(None))
        self.states.forget([row])

    def forget(self, prefix: int) -> None:
        """Drop the checkpoint of a prefix whose pages are gone."""
        slot = self._checkpoints.pop(prefix, None)
        if slot is None:
            return
        del self._prefix[slot]
        if not self._users.pop(slot):
            del self._idle[slot]
            self.free.append(slot)

    def _take(self) -> int:
        if not self.free:
            self.forget(self._prefix[next(iter(self._idle))])
        return self.free.pop()

    def _drop(self, row: int, columns: slice) -> None:
        for slot in self.table[row, columns][self.table[row, columns] != NONE].tolist():
            if slot not in self._users:
                self.free.append(slot)
                continue
            self._users[slot] -= 1
            if not self._users[slot]:
                self._idle[slot] = None
        self.table[row, columns] = NONE
