"""Which instructions of a kernel had an effect: liveness over what one launch executed.

An instruction was live if, in some wave, something read what it wrote before that was written again: a lane of a vector
register, a scalar register (VCC, EXEC and M0 are some), SCC, or a byte of LDS or scratch. What is written to global
memory counts as read, by the host. A read counts for every lane, so that none too few are called live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.isa import Code, Instruction, Operand
from portable.platform.emulated.machine import Buffer, launch
from portable.platform.emulated.waves import LANES, Array, Group, Handler, Waves


class Liveness(NamedTuple):
    """Of each instruction of the code, [n] bool: whether a wave executed it, and whether it was live.

    `total` counts what waves executed.
    """

    executed: Array
    live: Array
    total: int


def liveness(
    code: Code,
    grid: Sequence[int],
    block: Sequence[int],
    explicit: bytes,
    buffers: Sequence[Buffer],
    lds_bytes: int = 0,
) -> Liveness:
    """Launch a kernel, with the arguments of `machine.launch`, and say which of its instructions were live.

    Raises:
        ExecutionError, MemoryFault: as `machine.launch`.
    """
    trace = Trace(len(code.instructions))
    total = launch(code, grid, block, explicit, buffers, lds_bytes, around=trace.around)
    return Liveness(trace.executed, trace.live[:-1], total)


class Trace:
    """Who wrote last: every lane of every register and every byte of LDS and scratch, of the batch that runs."""

    def __init__(self, count: int) -> None:
        self.executed = np.zeros(count, np.bool_)
        self.live = np.zeros(count + 1, np.bool_)  # the last: what a register holds at the start
        self.now = count
        self._batch: Waves | None = None

    def around(self, number: int, handler: Handler) -> Handler:
        """The handler of instruction `number`, watched."""

        def watched(w: Group, i: Instruction) -> None:
            if w.waves is not self._batch:
                self._begin(w)
            self.now = number
            self.executed[number] = True
            handler(Watched(w, self), i)
            # the two families that write registers past `Group.set`, whatever EXEC says
            if i.name.startswith(("v_mfma_", "v_smfmac_")):
                self.v[i.operands[0].index : i.operands[0].index + i.operands[0].count, w.at] = number
            elif i.name == "v_writelane_b32":
                self.v[i.operands[0].index, w.at, (w.scalar(i.operands[2]) & 63).astype(np.intp)] = number

        return watched

    def read(self, writers: Array | int) -> None:
        """Something reads what these instructions wrote."""
        self.live[writers] = True

    def _begin(self, w: Group) -> None:
        """Nothing of a new batch is written yet."""
        self._batch, nobody = w.waves, len(self.executed)
        count = len(w.waves.pc)
        self.v = np.full(w.waves.v.shape, nobody)
        self.s = np.full(w.waves.s.shape, nobody)
        self.scc = np.full(count, nobody)
        self.lds = np.full(count // w.waves.per_group * w.memory.lds.nbytes, nobody)
        self.scratch = np.full(count * LANES * w.memory.scratch.nbytes, nobody)


class Watched(Group):
    """A group that tells a trace what one instruction reads and writes; EXEC too, which is read once."""

    __slots__ = ("trace",)

    def __init__(self, w: Group, trace: Trace) -> None:
        super().__init__(w.waves, w.at, w.everyone, WatchedMemory(w.memory, trace), w.arch, w.labels)
        self.trace = trace

    @property
    def scc(self) -> Array:
        self.trace.read(self.trace.scc[self.at])
        return self.waves.scc[self.at]

    @scc.setter
    def scc(self, value: Array) -> None:
        self.trace.scc[self.at] = self.trace.now
        self.waves.scc[self.at] = value

    def get_s(self, index: int) -> Array:
        self.trace.read(self.trace.s[index, self.at])
        return super().get_s(index)

    def set_s(self, index: int, value: Array | int) -> None:
        self.trace.s[index, self.at] = self.trace.now
        super().set_s(index, value)

    def u32(self, operand: Operand, word: int = 0) -> Array:
        if operand.kind == "v":
            self.trace.read(self.trace.v[operand.index + word, self.at])
        return super().u32(operand, word)

    def set(self, operand: Operand, value: Array, word: int = 0, where: Array | None = None) -> None:
        waves, lanes = np.nonzero(self.active if where is None else self.active & where)
        self.trace.v[operand.index + word, self.at[waves], lanes] = self.trace.now
        super().set(operand, value, word, where)


class WatchedMemory:
    """The batch's memory, watched; all else of it is its own."""

    def __init__(self, memory: Any, trace: Trace) -> None:
        self._memory = memory
        self.lds = WatchedBytes(memory.lds, trace, trace.lds, _in_workgroup)
        self.scratch = WatchedBytes(memory.scratch, trace, trace.scratch, _in_lane)
        self.allocations = WatchedGlobal(memory.allocations, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


class WatchedBytes:
    """LDS or scratch; `place` says which of its lanes' or workgroups' bytes begin where in `writers`."""

    def __init__(self, space: Any, trace: Trace, writers: Array, place: Callable[[Access], Array]) -> None:
        self._space, self._trace, self._writers, self._place = space, trace, writers, place

    def load(self, access: Access, address: Array, nbytes: int) -> Array:
        found: Array = self._space.load(access, address, nbytes)
        self._trace.read(self._writers[self._bytes(access, address, nbytes)])
        return found

    def store(self, access: Access, address: Array, words: Array, nbytes: int) -> None:
        self._space.store(access, address, words, nbytes)
        self._writers[self._bytes(access, address, nbytes)] = self._trace.now

    def atomic(self, access: Access, address: Array, operation: Any, sources: list[Array]) -> Array:
        old: Array = self._space.atomic(access, address, operation, sources)
        touched = self._bytes(access, address, operation.dtype.itemsize)
        self._trace.read(self._writers[touched])
        self._writers[touched] = self._trace.now
        return old

    def _bytes(self, access: Access, address: Array, nbytes: int) -> Array:
        start: Array = self._place(access) * self._space.nbytes + address
        return start + np.arange(nbytes)[:, None]


def _in_workgroup(access: Access) -> Array:
    return access.workgroups


def _in_lane(access: Access) -> Array:
    return access.batch_waves * LANES + np.nonzero(access.mask)[1]


class WatchedGlobal:
    """Global memory: the host reads whatever is written."""

    def __init__(self, allocations: Any, trace: Trace) -> None:
        self._allocations, self._trace = allocations, trace

    def load(self, access: Access, address: Array, nbytes: int) -> Array:
        found: Array = self._allocations.load(access, address, nbytes)
        return found

    def store(self, access: Access, address: Array, words: Array, nbytes: int) -> None:
        self._trace.read(self._trace.now)
        self._allocations.store(access, address, words, nbytes)

    def atomic(self, access: Access, address: Array, operation: Any, sources: list[Array]) -> Array:
        self._trace.read(self._trace.now)
        old: Array = self._allocations.atomic(access, address, operation, sources)
        return old
