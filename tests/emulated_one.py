"""Run a few instructions on chosen registers. Import the modules whose handlers they need beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.isa import NAMED, instruction
from portable.platform.emulated.waves import HANDLERS, Group, Waves

ALL = (1 << 64) - 1


def run_one(
    text: str,
    v: Mapping[int, npt.ArrayLike] | None = None,
    s: Mapping[int | str, Any] | None = None,
    exec_mask: Any = ALL,
    waves: int = 1,
    arch: str = "gfx942",
    memory: Any = None,
    scc: Any = False,
    labels: Mapping[str, int] | None = None,
    at: Sequence[int] | None = None,
) -> Waves:
    """The state after the lines of `text`, in order (a branch sets `pc` and is not followed).

    Args:
        v: vector register -> [64] or [waves, 64]; 32-bit types are stored as they are, 64-bit ones into two registers,
            16-bit and 8-bit ones into the low bits.
        s: scalar register ("vcc", "m0", "s[4:5]" and "exec" too) -> an int or [waves] ints; a value of more than 32
            bits, and any given to a pair by name, fills two registers.
        exec_mask: an int or [waves] ints.
        waves: of one workgroup.
        memory: the `Memory` that loads and stores see.
        at: the waves that execute, all of them unless given.
    """
    state = Waves(1, waves, lds_bytes=0, scratch_bytes=0)
    for index, given in (v or {}).items():
        array = np.ascontiguousarray(given)
        size = array.dtype.itemsize
        words = array.view(np.uint32) if size >= 4 else array.view(f"u{size}").astype(np.uint32)
        for word in range(max(1, size // 4)):
            state.v[index + word] = words[..., word :: max(1, size // 4)]
    for register, value in {**(s or {}), "exec": exec_mask}.items():
        index, count = _register(register)
        numbers = [int(number) for number in np.broadcast_to(np.asarray(value, dtype=object), waves)]
        for word in range(2 if count == 2 or any(number >> 32 not in (0, -1) for number in numbers) else 1):
            state.s[index + word] = [number >> (32 * word) & 0xFFFFFFFF for number in numbers]
    state.scc[:] = scc
    for number, line in enumerate(filter(None, map(str.strip, text.split("\n")))):
        state.pc[:] = number + 1
        decoded = instruction(line, number)
        group = Group(state, np.arange(waves)[at or slice(None)], at is None, memory, arch, dict(labels or {}))
        HANDLERS[decoded.name](group, decoded)
    return state


def s64(state: Waves, register: int | str) -> list[int]:
    """A scalar register pair as one int a wave.

    >>> s64(run_one("", s={"vcc": -1}), "vcc") == [ALL]
    True
    """
    index, _ = _register(register)
    return [int(low) | int(high) << 32 for low, high in zip(state.s[index], state.s[index + 1], strict=True)]


def v64(state: Waves, index: int) -> npt.NDArray[np.uint64]:
    """A vector register pair, [waves, 64]."""
    return state.v[index].astype(np.uint64) | state.v[index + 1].astype(np.uint64) << np.uint64(32)


def _register(name: int | str) -> tuple[int, int]:
    if isinstance(name, int):
        return name, 1
    if name.startswith("s["):
        first, last = (int(part) for part in name[2:-1].split(":"))
        return first, last - first + 1
    return NAMED[name]
