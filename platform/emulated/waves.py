"""The registers of many waves at once: an instruction runs for every wave that stands at it, in one numpy operation.

Vector registers are [512, W, 64] (accumulation registers from 256), scalar registers [128, W], W waves of any number of
workgroups. A handler gets a `Group`, the waves of one step, and reads and writes through it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.isa import EXEC, Instruction, Operand, lanes, masks

LANES = 64
LANE = np.arange(LANES)
U32, I32, U64, I64, F32 = np.uint32, np.int32, np.uint64, np.int64, np.float32
POISON = 0x7FDF7FDF  # what registers hold before they are written: NaN in float32, float16 and bfloat16
Array = npt.NDArray[Any]
Handler = Callable[["Group", Instruction], None]

HANDLERS: dict[str, Handler] = {}  # mnemonic -> what it does


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for these mnemonics; one that is there already is a programming error."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            if name in HANDLERS:
                raise KeyError(f"{name} has two handlers")
            HANDLERS[name] = handler
        return handler

    return enter


class Waves:
    """The state of W waves in workgroups of `per_group` waves."""

    def __init__(self, num_groups: int, per_group: int, lds_bytes: int, scratch_bytes: int) -> None:
        self.per_group = per_group
        count = num_groups * per_group
        self.v = np.zeros((512, count, LANES), U32)
        self.s = np.zeros((128, count), U32)
        self.scc = np.zeros(count, np.bool_)
        self.pc = np.zeros(count, I64)
        self.done = np.zeros(count, np.bool_)
        self.waiting = np.zeros(count, np.bool_)  # at a barrier
        self.saturate = np.zeros(count, np.bool_)  # MODE.FP16_OVFL (bit 23): fp8 conversions clamp to the largest
        self.workgroup = np.repeat(np.arange(num_groups), per_group)  # within this batch of workgroups
        self.s[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.lds_bytes, self.scratch_bytes = lds_bytes, scratch_bytes


class Group:
    """The waves `at` (indices, ascending) of a batch, G of them, for one instruction.

    Vector values are [G, 64], scalar ones [G]. `memory` is the batch's `Memory`; `arch` the code's architecture.
    Writes to vector registers touch active lanes only.
    """

    __slots__ = ("_exec", "arch", "at", "everyone", "labels", "memory", "waves")

    def __init__(self, waves: Waves, at: Array, everyone: bool, memory: Any, arch: str, labels: dict[str, int]) -> None:
        self.waves, self.at, self.everyone = waves, at, everyone
        self.memory, self.arch, self.labels = memory, arch, labels
        self._exec: Array | None = None

    @property
    def size(self) -> int:
        return len(self.at)

    # exec and scc

    @property
    def active(self) -> Array:
        """[G, 64] bool: the lanes that execute."""
        if self._exec is None:
            self._exec = lanes(self.get_s64(EXEC))
        return self._exec

    @property
    def scc(self) -> Array:
        return self.waves.scc[self.at]

    @scc.setter
    def scc(self, value: Array) -> None:
        self.waves.scc[self.at] = value

    # scalar registers by number

    def get_s(self, index: int) -> Array:
        """[G] uint32."""
        value: Array = self.waves.s[index] if self.everyone else self.waves.s[index, self.at]
        return value

    def set_s(self, index: int, value: Array | int) -> None:
        if index == 125:  # null
            return
        bits = np.asarray(value).astype(U32)
        if self.everyone:
            self.waves.s[index] = bits
        else:
            self.waves.s[index, self.at] = bits
        if index in (EXEC, EXEC + 1):
            self._exec = None

    def get_s64(self, index: int) -> Array:
        """[G] uint64."""
        high = self.get_s(index + 1 if index != 125 else 125)  # both halves of null
        value: Array = self.get_s(index).astype(U64) | (high.astype(U64) << U64(32))
        return value

    def set_s64(self, index: int, value: Array) -> None:
        wide = np.asarray(value).astype(U64)
        self.set_s(index, wide & U64(0xFFFFFFFF))
        if index != 125:
            self.set_s(index + 1, wide >> U64(32))

    # scalar operands

    def scalar(self, operand: Operand) -> Array:
        """[G] uint32 of a scalar register or constant."""
        if operand.kind == "s":
            return self.get_s(operand.index)
        if operand.kind in "if":
            return np.full(self.size, operand.bits, U32)
        raise NotImplementedError(f"{operand.text} is no scalar operand")

    def scalar64(self, operand: Operand) -> Array:
        """[G] uint64 of a scalar register pair, or a sign-extended integer constant."""
        if operand.kind == "s":
            return self.get_s64(operand.index)
        if operand.kind in ("i", "aperture"):
            return np.full(self.size, operand.index & 0xFFFFFFFFFFFFFFFF, U64)
        if operand.kind == "f":
            return np.full(self.size, np.float64(operand.value).view(U64), U64)
        raise NotImplementedError(f"{operand.text} is no scalar operand")

    # vector operands

    def u32(self, operand: Operand, word: int = 0) -> Array:
        """[G, 64] uint32 of register `word` of an operand; scalars and constants fill the lanes. No modifiers."""
        if operand.kind == "v":
            register = self.waves.v[operand.index + word]
            value: Array = register if self.everyone else register[self.at]
            return value
        if operand.kind == "s":
            return np.broadcast_to(self.get_s(operand.index + word)[:, None], (self.size, LANES))
        if operand.kind == "i":
            bits = operand.bits if word == 0 else (0xFFFFFFFF if operand.index < 0 else 0)
            return np.full((self.size, LANES), bits, U32)
        if operand.kind == "f":
            return np.full((self.size, LANES), operand.bits if word == 0 else 0, U32)
        raise NotImplementedError(f"{operand.text} is no vector operand")

    def u64(self, operand: Operand) -> Array:
        """[G, 64] uint64 of two registers."""
        if operand.kind == "f":
            return np.full((self.size, LANES), np.float64(operand.value).view(U64), U64)
        value: Array = self.u32(operand).astype(U64) | (self.u32(operand, 1).astype(U64) << U64(32))
        return value

    def f32(self, operand: Operand, word: int = 0) -> Array:
        """[G, 64] float32, with |x| and -x applied."""
        return signed(np.ascontiguousarray(self.u32(operand, word)).view(F32), operand)

    def set(self, operand: Operand, value: Array, word: int = 0, where: Array | None = None) -> None:
        """Write 32 bits a lane into a vector register, for the active lanes (and those of `where`, if given)."""
        mask = self.active if where is None else self.active & where
        index = operand.index + word
        if self.everyone:
            np.copyto(self.waves.v[index], value, where=mask, casting="unsafe")
            return
        register = self.waves.v[index][self.at]
        np.copyto(register, value, where=mask, casting="unsafe")
        self.waves.v[index][self.at] = register

    def set_f32(self, operand: Operand, value: Array, word: int = 0, where: Array | None = None) -> None:
        """Write float32 values."""
        self.set(operand, np.ascontiguousarray(np.asarray(value, F32)).view(U32), word, where)

    def set64(self, operand: Operand, value: Array) -> None:
        """Write uint64 values into two registers."""
        wide = np.asarray(value).astype(U64)
        self.set(operand, (wide & U64(0xFFFFFFFF)).astype(U32))
        self.set(operand, (wide >> U64(32)).astype(U32), 1)

    def set_mask(self, index: int, active: Array) -> None:
        """Write [G, 64] bool into a scalar register pair; inactive lanes give 0."""
        self.set_s64(index, masks(np.ascontiguousarray(active & self.active)))

    def mask(self, operand: Operand) -> Array:
        """A scalar register pair as [G, 64] bool."""
        return lanes(self.scalar64(operand))

    # control

    def jump(self, taken: Array | bool, label: str) -> None:
        """Set the program counter of the waves that take a branch; it points behind the branch otherwise."""
        chosen = self.at if taken is True else self.at[np.asarray(taken)]
        self.waves.pc[chosen] = self.labels[label]


def signed(value: Array, operand: Operand) -> Array:
    """A float array with an operand's |x| and -x."""
    if operand.absolute:
        value = np.abs(value)
    return -value if operand.negate else value


def missing(instructions: Iterable[Instruction]) -> list[str]:
    """Mnemonics without a handler; `s_barrier` and `s_endpgm` belong to the scheduler."""
    return sorted({i.name for i in instructions if i.name not in HANDLERS and i.name not in ("s_barrier", "s_endpgm")})
