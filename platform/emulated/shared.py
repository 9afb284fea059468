"""The LDS of each workgroup and the scratch of each lane, with every access checked."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access, Array
from portable.platform.emulated.atomics import Atomic, apply
from portable.platform.emulated.races import Races
from portable.platform.emulated.spans import Places, Span, places, split

POISON = 0xCB  # uninitialised bytes: a large negative float, and no small integer


class Pieces:
    """`count` pieces of `nbytes` bytes, all uninitialised at first; addresses count from a piece's own start."""

    def __init__(self, count: int, nbytes: int, name: str) -> None:
        self.nbytes, self.name = nbytes, name
        self._pitch = -(-nbytes // 8) * 8
        self._span = Span(np.full(count * self._pitch, POISON, np.uint8))
        self._written = Span(np.zeros(count * self._pitch, np.uint8))  # 0xFF a byte that holds a value

    @property
    def bytes(self) -> Array:
        """[count * pitch] uint8."""
        return self._span.units[1]

    def _locate(self, access: Access, piece: Array, address: Array, nbytes: int, verb: str) -> Places:
        """Where addresses [n] int64 in pieces [n] lie."""
        bad = (address < 0) | (address + nbytes > self.nbytes)
        if bad.any():
            first = int(address[bad][0])
            raise access.fault(f"out-of-bounds {self.name} {verb} of {nbytes} bytes at {first} of {self.nbytes}", bad)
        return places(address + piece * self._pitch, nbytes)

    def _check_written(self, access: Access, at: Places) -> None:
        written = self._written.units[at.unit]
        bad = (written[at.numbers] != np.iinfo(written.dtype).max).any(axis=0)
        if bad.any():
            raise access.fault(f"read of {at.nbytes} uninitialised bytes of {self.name}", bad)

    def _write(self, at: Places) -> None:
        written = self._written.units[at.unit]
        written[at.numbers] = np.iinfo(written.dtype).max


class Lds(Pieces):
    """The LDS of `num_groups` workgroups, `nbytes` each."""

    def __init__(self, num_groups: int, nbytes: int, waves_per_group: int) -> None:
        super().__init__(num_groups, nbytes, "LDS")
        self._races = Races(num_groups * self._pitch, waves_per_group)

    def load(self, access: Access, address: Array, nbytes: int) -> Array:
        """[words, n] uint32 from addresses [n] int64."""
        at = self._locate(access, access.workgroups, address, nbytes, "read")
        self._check_written(access, at)
        self._races.load(access, at)
        return self._span.load(at)

    def store(self, access: Access, address: Array, words: Array, nbytes: int) -> None:
        """Write [words, n] uint32 to addresses [n] int64."""
        at = self._locate(access, access.workgroups, address, nbytes, "write")
        if not self._races.active:
            self._span.store(at, words)
        else:
            new, units = split(words, at), self._span.units[at.unit]
            self._races.store(access, at, units[at.numbers] != new)
            units[at.numbers] = new
            self._races.stored(access, at, units[at.numbers] != new)
        self._write(at)

    def atomic(self, access: Access, address: Array, operation: Atomic, sources: list[Array]) -> Array:
        """Read, modify, write, lane after lane; the values before, [n] of the operation's type."""
        size = operation.dtype.itemsize
        if (bad := address % size != 0).any():
            raise access.fault(f"misaligned LDS atomic of {size} bytes at {int(address[bad][0])}", bad)
        at = self._locate(access, access.workgroups, address, size, "atomic")
        self._check_written(access, at)
        self._races.atomic(access, at)
        return apply(self._span, address + access.workgroups * self._pitch, operation, sources)

    def barrier(self, workgroups: Array) -> None:
        """These workgroups have passed a barrier."""
        if self._races.active:
            for each in np.asarray(workgroups).tolist():
                self._races.barrier(each * self._pitch, (each + 1) * self._pitch)


class Scratch(Pieces):
    """The private memory of each lane of each wave of a batch: `nbytes` each."""

    def __init__(self, waves: int, nbytes: int) -> None:
        super().__init__(waves * 64, nbytes, "scratch")

    def load(self, access: Access, address: Array, nbytes: int) -> Array:
        """[words, n] uint32 from addresses [n] int64 within the lane's own memory."""
        at = self._locate(access, self._lane(access), address, nbytes, "read")
        self._check_written(access, at)
        return self._span.load(at)

    def store(self, access: Access, address: Array, words: Array, nbytes: int) -> None:
        """Write [words, n] uint32."""
        at = self._locate(access, self._lane(access), address, nbytes, "write")
        self._span.store(at, words)
        self._write(at)

    def atomic(self, access: Access, address: Array, operation: Atomic, sources: list[Array]) -> Array:
        """Hardware has none."""
        raise access.fault("atomic on scratch", np.ones(len(address), np.bool_))

    def _lane(self, access: Access) -> Array:
        """[n]: the lane's number within the batch."""
        lanes = np.broadcast_to(np.arange(64), access.mask.shape)
        lane: Array = access.batch_waves * 64 + access.pick(lanes)
        return lane
