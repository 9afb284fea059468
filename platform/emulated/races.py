"""Which waves touched each byte of LDS since the last barrier, and whether two of them needed one."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access, Array
from portable.platform.emulated.spans import Places

MOST_WAVES = 16  # of a workgroup: 1,024 work-items
ONES = {1: np.uint16(1), 2: np.uint32(0x00010001), 4: np.uint64(0x0001000100010001)}  # one mark a byte


class Marks:
    """For each byte the set of waves that `did` something: 16 bits a byte, handled in the units of the access."""

    def __init__(self, size: int, did: str) -> None:
        self.did = did
        self.bytes = np.zeros(size, np.uint16)
        self.units: dict[int, Array] = {1: self.bytes, 2: self.bytes.view(np.uint32), 4: self.bytes.view(np.uint64)}
        self.empty = True

    def others(self, at: Places, own: Array) -> Array:
        """[units, n]: the waves but `own` that have marked each unit."""
        return self.units[at.unit][at.numbers] & ~own

    def add(self, at: Places, own: Array) -> None:
        """Mark; lanes of several waves may mark the same bytes at once."""
        table, self.empty = self.units[at.unit], False
        numbers, bits = at.numbers, np.broadcast_to(own, at.numbers.shape)
        while numbers.size:
            table[numbers] |= bits
            lost = (table[numbers] & bits) != bits
            numbers, bits = numbers[lost], bits[lost]

    def clear(self, start: int, end: int) -> None:
        if not self.empty:
            self.bytes[start:end] = 0


class Races:
    """Reports two waves of a workgroup on the same bytes of LDS between two barriers, one of them writing.

    A write that leaves the bytes as they are races with nothing: compilers let several waves write the same value.
    Atomics do not race with one another.
    """

    def __init__(self, size: int, waves_per_group: int) -> None:
        self.active = waves_per_group > 1
        size = size if self.active else 0
        self.reads, self.writes = Marks(size, "read"), Marks(size, "written")
        self.atomics = Marks(size, "changed by an atomic")

    def load(self, access: Access, at: Places) -> None:
        """A read: after another wave's write it is a race, unless the own wave wrote the same value."""
        if self.active:
            own = _own(access, at)
            if not self.writes.empty:
                others = self.writes.others(at, own)
                if others.any():
                    mine = (self.writes.units[at.unit][at.numbers] & own) >> access.waves.astype(own.dtype)
                    self._report(access, at, others & ~(mine * own.dtype.type(0xFFFF)), "read", self.writes)
            self._check(access, at, own, "read", self.atomics)
            self.reads.add(at, own)

    def store(self, access: Access, at: Places, changed: Array) -> None:
        """A write, before it is done: after another wave's access it is a race where it changes a unit ([units, n])."""
        if self.active:
            own = _own(access, at)
            for marks in (self.writes, self.reads, self.atomics):
                self._check(access, at, own, "write", marks, changed)
            self.writes.add(at, own)

    def stored(self, access: Access, at: Places, different: Array) -> None:
        """The same write, done: where memory holds a different unit another lane of the instruction overwrote it."""
        if self.active and different.any():
            self._check(access, at, _own(access, at), "write", self.writes, different)

    def atomic(self, access: Access, at: Places) -> None:
        """An atomic: after another wave's plain access it is a race."""
        if self.active:
            own = _own(access, at)
            for marks in (self.writes, self.reads):
                self._check(access, at, own, "atomic", marks)
            self.atomics.add(at, own)

    def barrier(self, start: int, end: int) -> None:
        """Forget the bytes from `start` to `end`."""
        for marks in (self.reads, self.writes, self.atomics):
            marks.clear(start, end)

    def _check(
        self, access: Access, at: Places, own: Array, does: str, marks: Marks, where: Array | None = None
    ) -> None:
        if not marks.empty:
            others = marks.others(at, own)
            self._report(access, at, others if where is None else np.where(where, others, 0), does, marks)

    def _report(self, access: Access, at: Places, others: Array, does: str, marks: Marks) -> None:
        """Raise if there are marks of other waves."""
        if (bad := others != 0).any():
            first = int(others[bad][0])
            waves = [str(wave) for wave in range(MOST_WAVES) if any(first >> (16 * k + wave) & 1 for k in range(4))]
            reason = (
                f"data race in LDS: {does} of {at.nbytes} bytes {marks.did} by wave {', '.join(waves)} since the last"
            )
            raise access.fault(f"{reason} barrier", bad.any(axis=0))


def _own(access: Access, at: Places) -> Array:
    """[n]: the mark of each lane's wave, in every byte of a unit."""
    one = ONES[at.unit]
    mark: Array = one << access.waves.astype(one.dtype)
    return mark
