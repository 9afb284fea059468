"""Values that move between the lanes of a wave, or between a lane and a scalar register. (DPP is in `modifiers`.)"""

from __future__ import annotations

import re

import numpy as np

from portable.platform.emulated.bits import bit_count
from portable.platform.emulated.isa import DecodeError, Instruction, Operand
from portable.platform.emulated.scalar import plain, scalar_destination
from portable.platform.emulated.waves import LANE, LANES, U32, U64, Array, Group, handles


def _vector(i: Instruction, place: int) -> Operand:
    if i.operands[place].kind != "v":
        raise NotImplementedError(f"line {i.line}: {i.operands[place].text} of {i.text!r} is no vector register")
    return i.operands[place]


@handles("v_readfirstlane_b32")
def _read_first(w: Group, i: Instruction) -> None:
    """D = S0[lowest lane of EXEC], of lane 0 where EXEC is 0."""
    plain(i, 2)
    w.set_s(scalar_destination(i), w.u32(_vector(i, 1))[np.arange(w.size), w.active.argmax(axis=1)])


@handles("v_readlane_b32")
def _read_lane(w: Group, i: Instruction) -> None:
    """D = S0[lane S1[5:0]], whether the lane is active or not."""
    plain(i, 3)
    lane = (w.scalar(i.operands[2]) & 63).astype(np.intp)
    w.set_s(scalar_destination(i), w.u32(_vector(i, 1))[np.arange(w.size), lane])


@handles("v_writelane_b32")
def _write_lane(w: Group, i: Instruction) -> None:
    """D[lane S1[5:0]] = S0, whether the lane is active or not."""
    plain(i, 3)
    lane = (w.scalar(i.operands[2]) & 63).astype(np.intp)
    w.waves.v[_vector(i, 0).index, w.at, lane] = w.scalar(i.operands[1])


@handles("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _masked_bit_count(w: Group, i: Instruction) -> None:
    """D = S1 + ones of S0 & bits 31:0 (lo) or 63:32 (hi) of (1 << lane) - 1."""
    _, mask, addend = plain(i, 3)
    below = (U64(1) << LANE.astype(U64)) - U64(1)
    below = below & U64(0xFFFFFFFF) if i.name == "v_mbcnt_lo_u32_b32" else below >> U64(32)
    w.set(_vector(i, 0), bit_count(w.u32(mask) & below).astype(U32) + w.u32(addend))


@handles("v_swap_b32")
def _swap(w: Group, i: Instruction) -> None:
    """D, S0 = S0, D."""
    plain(i, 2)
    first, second = _vector(i, 0), _vector(i, 1)
    old = w.u32(first).copy()
    w.set(first, w.u32(second))
    w.set(second, old)


@handles("v_permlane16_swap_b32", "v_permlane32_swap_b32")
def _permlane_swap(w: Group, i: Instruction) -> None:
    """D[odd rows of 16 or 32 lanes] and S0[even rows] change places.

    A pair of lanes of which one alone is active is refused: what it reads depends on a bit that the decoder does not
    know (fetch inactive).
    """
    plain(i, 2, "bound_ctrl")
    first, second = _vector(i, 0), _vector(i, 1)
    rows = 16 if i.name == "v_permlane16_swap_b32" else 32
    partner = LANE ^ rows
    if w.arch != "gfx950":
        raise NotImplementedError(f"line {i.line}: {i.text!r} is not an instruction of {w.arch}")
    if (w.active != w.active[:, partner]).any():
        raise NotImplementedError(f"line {i.line}: {i.text!r} swaps an active lane with an inactive one")
    odd = LANE & rows != 0
    old, new = w.u32(first).copy(), w.u32(second).copy()
    w.set(first, np.where(odd, new[:, partner], old))
    w.set(second, np.where(odd, new, old[:, partner]))


@handles("ds_bpermute_b32")
def _pull(w: Group, i: Instruction) -> None:
    """D = S1[lane (S0 + offset)[7:2]], 0 from an inactive lane."""
    _, address, data = plain(i, 3, "offset")
    lane = ((w.u32(address) + U32(i.number("offset"))) >> U32(2) & 63).astype(np.intp)
    w.set(_vector(i, 0), _from_lanes(w, data, lane))


@handles("ds_permute_b32")
def _push(w: Group, i: Instruction) -> None:
    """D[lane (S0 + offset)[7:2]] = S1, of the highest active lane that names it; 0 where none does."""
    _, address, data = plain(i, 3, "offset")
    target = ((w.u32(address) + U32(i.number("offset"))) >> U32(2) & 63).astype(np.intp)
    writer = np.full((w.size, LANES), -1)
    wave, lane = np.nonzero(w.active)
    np.maximum.at(writer, (wave, target[wave, lane]), lane)
    values = w.u32(data)[np.arange(w.size)[:, None], writer]
    w.set(_vector(i, 0), np.where(writer < 0, U32(0), values))


@handles("ds_swizzle_b32")
def _swizzle(w: Group, i: Instruction) -> None:
    """D = S0[lane that the pattern in `offset` names], 0 from an inactive lane."""
    _, data = plain(i, 2, "offset")
    try:
        lane = swizzled(i.modifiers.get("offset", 0))
    except DecodeError as error:
        raise DecodeError(f"line {i.line}: {error}") from None
    w.set(_vector(i, 0), _from_lanes(w, data, np.broadcast_to(lane, (w.size, LANES))))


def _from_lanes(w: Group, data: Operand, lane: Array) -> Array:
    """[G, 64] of a vector register's lanes [G, 64], 0 where they are inactive."""
    wave = np.arange(w.size)[:, None]
    values: Array = np.where(w.active, w.u32(data), U32(0))[wave, lane]
    return values


def swizzled(pattern: object) -> Array:
    """[64] lanes that a swizzle reads: patterns for 4 lanes, or for 32 lanes and in each half of the wave alike.

    >>> swizzled("swizzle(SWAP,2)")[:4], swizzled(0x8000 | 0b00_01_10_11)[:4]
    (array([2, 3, 0, 1]), array([3, 2, 1, 0]))
    """
    if isinstance(pattern, int) and 0 <= pattern < 0x8000:
        return _masked(pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31)
    if isinstance(pattern, int) and 0x8000 <= pattern < 0xC000:
        return _quad_lanes([pattern >> 2 * k & 3 for k in range(4)])
    if isinstance(pattern, int) and 0xC000 <= pattern < 0xE000:
        return _rotated(pattern >> 10 & 1, pattern >> 5 & 31, pattern & 31)
    found = re.fullmatch(r"swizzle\(\s*(\w+)((?:\s*,\s*[\"\w]+)+)\s*\)", str(pattern))
    name, values = (found[1], [part.strip(' "') for part in found[2].split(",")[1:]]) if found else ("", [])
    if name == "BITMASK_PERM" and re.fullmatch("[01pi]{5}", values[0]):
        bits = {letter: int("".join("1" if bit == letter else "0" for bit in values[0]), 2) for letter in "01pi"}
        return _masked(bits["p"] | bits["i"], bits["1"], bits["i"])
    numbers = [int(value) for value in values if value.isdecimal()]
    if len(numbers) == len(values):
        match name, numbers:
            case "QUAD_PERM", [_, _, _, _]:
                return _quad_lanes(numbers)
            case "SWAP", [size]:
                return _masked(31, 0, size)
            case "REVERSE", [size]:
                return _masked(31, 0, size - 1)
            case "BROADCAST", [size, lane]:
                return _masked(31 & ~(size - 1), lane, 0)
            case "ROTATE", [direction, count]:
                return _rotated(direction, count, 0)
    raise DecodeError(f"swizzle pattern {pattern!r} is not understood")


def _masked(keep: int, put: int, turn: int) -> Array:
    """Lane bits 4:0 become ((bits & keep) | put) ^ turn."""
    return LANE & 32 | ((LANE & 31 & keep) | put) ^ turn


def _quad_lanes(quad: list[int]) -> Array:
    """Lane k of four reads lane quad[k] of them."""
    lanes: Array = LANE & ~3 | np.array(quad)[LANE & 3]
    return lanes


def _rotated(right: int, count: int, fixed: int) -> Array:
    """Lane bits 4:0 outside `fixed` come from lane + count, or lane - count."""
    return LANE & 32 | LANE & fixed | (LANE + (-count if right else count)) & 31 & ~fixed
