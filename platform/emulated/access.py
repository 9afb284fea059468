"""Who accesses memory, and what a fault says about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.isa import Instruction
from portable.platform.emulated.waves import LANES, Group

Array = npt.NDArray[Any]


class MemoryFault(Exception):
    """An access that the hardware would not report, or not where it happens.

    Attributes:
        reason: what is wrong with it.
        instruction: the text, "" where it is not known.
        source: "file:line" of the kernel, "" where the assembly does not say.
        workgroup: of the first wave at fault: its `Memory.workgroup_name`.
        lanes: of that wave; empty for a scalar access.
        kernel: its name, "" where it is not known.
    """

    def __init__(
        self,
        reason: str,
        instruction: Instruction | None,
        workgroup: object,
        wave: int,
        lanes: tuple[int, ...],
        kernel: str = "",
    ) -> None:
        self.reason, self.workgroup, self.wave, self.lanes, self.kernel = reason, workgroup, wave, lanes, kernel
        self.instruction = instruction.text if instruction else ""
        self.source = instruction.source if instruction else ""
        where = f" by {instruction.text!r} (assembly line {instruction.line})" if instruction else ""
        where += f" at {self.source}" if self.source else ""
        which = f", lanes {ranges(lanes)}" if lanes else ""
        name = f"{kernel}: " if kernel else ""
        super().__init__(f"{name}{reason}{where}, workgroup {workgroup}, wave {wave}{which}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), self.__dict__)


def _restored(message: str, attributes: dict[str, Any]) -> MemoryFault:
    """A fault that another process has sent."""
    fault = MemoryFault.__new__(MemoryFault, message)
    fault.__dict__.update(attributes)
    return fault


def ranges(numbers: tuple[int, ...]) -> str:
    """Ascending numbers in few words.

    >>> ranges((0, 1, 2, 5, 62, 63))
    '0-2, 5, 62-63'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


class Access:
    """The n lanes of a group that take part in one access.

    Values of all lanes are [G, 64]; `pick` makes them [n], wave by wave and lane by lane, and `spread` undoes it.
    """

    __slots__ = ("full", "group", "instruction", "mask")

    def __init__(self, group: Group, instruction: Instruction | None, where: Array | None = None) -> None:
        self.group, self.instruction = group, instruction
        self.mask: Array = group.active if where is None else group.active & where
        self.full = bool(self.mask.all())

    @property
    def none(self) -> bool:
        """No lane takes part."""
        return not self.full and not self.mask.any()

    def pick(self, values: Array) -> Array:
        """[G, 64] to [n]."""
        return values.reshape(-1) if self.full else values[self.mask]

    def spread(self, words: Array) -> Array:
        """[words, n] to [words, G, 64], 0 where no lane takes part."""
        if self.full:
            return words.reshape(len(words), *self.mask.shape)
        wide = np.zeros((len(words), *self.mask.shape), words.dtype)
        wide[:, self.mask] = words
        return wide

    @property
    def workgroups(self) -> Array:
        """[n]: each lane's workgroup, as an index of the batch."""
        return self._per_wave(self.group.waves.workgroup[self.group.at])

    @property
    def waves(self) -> Array:
        """[n]: each lane's wave, within its workgroup."""
        return self._per_wave(self.group.at % self.group.waves.per_group)

    @property
    def batch_waves(self) -> Array:
        """[n]: each lane's wave, within the batch."""
        return self._per_wave(self.group.at)

    def fault(self, reason: str, bad: Array) -> MemoryFault:
        """The fault of the lanes where `bad` [n] holds; it names those of the first wave."""
        rows, lanes = np.nonzero(self.mask)
        rows, lanes = rows[bad], lanes[bad]
        return _fault(reason, self.instruction, self.group, int(rows[0]), tuple(lanes[rows == rows[0]].tolist()))

    def _per_wave(self, values: Array) -> Array:
        if self.full:
            return np.repeat(values, LANES)
        return np.broadcast_to(values[:, None], self.mask.shape)[self.mask]


class ScalarAccess:
    """The waves of a group, each with one scalar access; None where no instruction was announced."""

    def __init__(self, group: Group | None, instruction: Instruction | None) -> None:
        self.group, self.instruction = group, instruction

    def fault(self, reason: str, bad: Array) -> MemoryFault:
        """The fault of the waves where `bad` [G] holds."""
        row = int(np.flatnonzero(bad)[0])
        if self.group is None:
            return MemoryFault(reason, self.instruction, "unknown", row, ())
        return _fault(reason, self.instruction, self.group, row, ())


def _fault(reason: str, i: Instruction | None, group: Group, row: int, lanes: tuple[int, ...]) -> MemoryFault:
    wave = int(group.at[row])
    workgroup = group.memory.workgroup_name(int(group.waves.workgroup[wave]))
    return MemoryFault(reason, i, workgroup, wave % group.waves.per_group, lanes, group.memory.kernel)
