"""What vector encodings add to an instruction: lane permutation (DPP), parts of registers (SDWA, op_sel), |x|, -x,
output factors and clamping. `define` makes a handler of a signature and a function; all arithmetic modules use it.

A signature names operand kinds, sources before the arrow and the destination behind it: `"ff>f"`. Kinds: u i f are
32 bits of uint, int and float; w s h are 16 bits of the same; U I d are 64 bits of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.waves import HANDLERS, LANE, LANES, U32, U64, Array, Group, signed

KINDS: dict[str, np.dtype[np.generic]] = {
    kind: np.dtype(name)
    for kind, name in zip("uifwshUId", ["u4", "i4", "f4", "u2", "i2", "f2", "u8", "i8", "f8"], strict=True)
}
_ROWS = frozenset(("row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast"))
PERMUTATIONS = _ROWS | {"quad_perm", "wave_shl", "wave_shr", "wave_rol", "wave_ror"}
DPP = PERMUTATIONS | {"row_mask", "bank_mask", "bound_ctrl"}
SDWA = frozenset(("src0_sel", "src1_sel", "dst_sel", "dst_unused"))
OUTPUT = frozenset(("mul", "div", "clamp"))  # of float results
PARTS = {"DWORD": (0, 32)} | {f"WORD_{k}": (16 * k, 16) for k in range(2)} | {f"BYTE_{k}": (8 * k, 8) for k in range(4)}

Function = Callable[..., Array]


def refuse(i: Instruction, allowed: Iterable[str] = ()) -> None:
    """Raise for a modifier that the handler does not implement.

    Raises:
        NotImplementedError: names it.
    """
    if i.modifiers and (unknown := set(i.modifiers).difference(allowed)):
        names = ", ".join(sorted(unknown))
        raise NotImplementedError(f"line {i.line}: {i.name} with {names} is not emulated: {i.text}")


def plain(i: Instruction, operand: Operand) -> None:
    """Raise for -x, |x| or sext(x) on an operand that cannot have them."""
    if operand.negate or operand.absolute or operand.sign_extend:
        raise NotImplementedError(f"line {i.line}: operand {operand.text!r} of {i.text!r} has a modifier; not emulated")


@cache
def _permutation(kind: str, value: int | tuple[int, ...]) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether there is one: rows are 16 lanes."""
    row, column = LANE & ~15, LANE & 15
    everywhere = np.ones(LANES, np.bool_)
    if isinstance(value, tuple):  # quad_perm
        return (LANE & ~3) + np.array(value)[LANE & 3], everywhere
    if kind == "row_shl":
        return (LANE + value) % LANES, column + value < 16
    if kind == "row_shr":
        return (LANE - value) % LANES, column >= value
    if kind == "row_ror":
        return row + (column - value) % 16, everywhere
    if kind == "row_mirror":
        return row + 15 - column, everywhere
    if kind == "row_half_mirror":
        return (LANE & ~7) + 7 - (LANE & 7), everywhere
    if kind == "row_newbcast":
        return row + value, everywhere
    if kind == "row_bcast" and value == 15:  # the last lane of each row, to the next row
        return (row - 1) % LANES, LANE >= 16
    if kind == "row_bcast" and value == 31:  # lane 31, to rows 2 and 3
        return np.full(LANES, 31), LANE >= 32
    if kind in ("wave_shl", "wave_rol"):
        return (LANE + 1) % LANES, everywhere if kind == "wave_rol" else LANE < 63
    if kind in ("wave_shr", "wave_ror"):
        return (LANE - 1) % LANES, everywhere if kind == "wave_ror" else LANE > 0
    raise NotImplementedError(f"lane permutation {kind}:{value} is not emulated")


def _permuted(w: Group, i: Instruction) -> tuple[Array, Array] | None:
    """Of a DPP instruction: the lane that each lane reads, [64], and whether it exists and executes, [G, 64]."""
    kinds = PERMUTATIONS.intersection(i.modifiers)
    if not kinds:
        return None
    (kind,) = kinds
    given = i.modifiers[kind]
    value = tuple(given) if isinstance(given, list) else 0 if given is True else i.number(kind)
    lane, there = _permutation(kind, value)
    return lane, there & w.active[:, lane]


def enabled(w: Group, i: Instruction) -> Array | None:
    """The lanes that a DPP instruction may write: rows and banks of its masks, and without `bound_ctrl` (which the
    assembler writes as 0 or 1 for the same bit) only lanes whose source exists."""
    permutation = _permuted(w, i) if i.modifiers else None
    if permutation is None:
        return None
    rows = (i.number("row_mask", 15) >> (LANE >> 4)) & 1
    banks = (i.number("bank_mask", 15) >> (LANE >> 2 & 3)) & 1
    chosen = np.broadcast_to((rows & banks).astype(np.bool_), (w.size, LANES))
    return chosen if "bound_ctrl" in i.modifiers else np.logical_and(chosen, permutation[1])


def words(w: Group, i: Instruction, position: int, first: int = 1, word: int = 0) -> Array:
    """[G, 64] uint32 of an operand, its lanes permuted if it is the first source of a DPP instruction."""
    value = w.u32(i.operands[position], word)
    if position == first and i.modifiers and (permutation := _permuted(w, i)):
        lane, there = permutation
        value = value[:, lane]
        if "bound_ctrl" in i.modifiers:
            value = np.where(there, value, U32(0))
    return value


def constant16(operand: Operand) -> int | None:
    """The 16 bits of a constant for a 16-bit float or integer operand."""
    if operand.kind == "f":
        return int(np.float16(operand.value).view(np.uint16))
    return operand.bits & 0xFFFF if operand.kind == "i" else None


def read(w: Group, i: Instruction, position: int, kind: str, first: int = 1, high: int = 0) -> Array:
    """[G, 64] of an operand as a kind, all modifiers applied; `high` takes the upper half for a 16-bit kind.

    A 32-bit literal of a float64 operand is its upper half; an inline integer is that number's bits.
    """
    operand = i.operands[position]
    dtype = KINDS[kind]
    is_float = kind in "fhd"
    if operand.sign_extend if is_float else operand.negate or operand.absolute:
        plain(i, operand)
    if high and dtype.itemsize != 2:
        raise NotImplementedError(f"line {i.line}: op_sel of a {8 * dtype.itemsize}-bit operand in {i.text!r}")
    if dtype.itemsize == 8:
        if kind == "d" and operand.kind == "i" and not -16 <= operand.index <= 64:
            return signed(np.full((w.size, LANES), operand.bits << 32, U64).view(dtype), operand)
        if operand.kind == "f":
            value = w.u64(operand)
        else:
            low, upper = (words(w, i, position, first, word).astype(U64) for word in range(2))
            value = low | upper << U64(32)
        return signed(value.view(dtype), operand) if is_float else value.view(dtype)
    selected = i.modifiers.get(f"src{position - first}_sel", "DWORD") if i.encoding == "sdwa" else "DWORD"
    if dtype.itemsize == 2 and (bits := constant16(operand)) is not None:
        raw = np.full((w.size, LANES), bits, U32)
    else:
        raw = words(w, i, position, first)
        if high:
            raw = raw >> U32(16)
    if selected != "DWORD" or operand.sign_extend:
        shift, width = PARTS[str(selected)]
        raw = (raw << U32(32 - width - shift)) & U32(0xFFFFFFFF)
        raw = (raw.view(np.int32) >> (32 - width)).view(U32) if operand.sign_extend else raw >> U32(32 - width)
    if dtype.itemsize == 2:
        raw = raw.astype(np.uint16)
    value = np.ascontiguousarray(raw).view(dtype)
    return signed(value, operand) if is_float else value


def read_mask(w: Group, i: Instruction, position: int) -> Array:
    """[G, 64] bool of a scalar register pair."""
    plain(i, i.operands[position])
    return w.mask(i.operands[position])


def write(w: Group, i: Instruction, value: Array, kind: str, high: int | None = None) -> None:
    """Write a result of a kind into the first operand: output factor, clamp (NaN to 0) and part of the register.

    A 16-bit result clears the upper half, unless `high` says which half it replaces.
    """
    dtype = KINDS[kind]
    result = np.asarray(value).astype(dtype, copy=False)
    target, where = i.operands[0], enabled(w, i)
    if i.modifiers and kind in "fhd":
        if "mul" in i.modifiers:
            result = result * dtype.type(i.number("mul"))
        if "div" in i.modifiers:
            result = result / dtype.type(i.number("div"))
        if "clamp" in i.modifiers:
            result = np.fmin(np.fmax(result, dtype.type(0)), dtype.type(1))
    result = np.ascontiguousarray(result)
    if dtype.itemsize == 8:
        pair = result.view(U32).reshape(*result.shape, 2)
        low, upper = pair[..., 0].copy(), pair[..., 1].copy()
        w.set(target, low, 0, where)
        w.set(target, upper, 1, where)
        return
    bits = result.view(U32) if dtype.itemsize == 4 else result.view(np.uint16).astype(U32)
    if high is not None:
        old = w.u32(target)
        bits = (old & U32(0xFFFF)) | bits << U32(16) if high else (old & U32(0xFFFF0000)) | bits
    if i.encoding == "sdwa":
        bits = _placed(w, i, bits)
    w.set(target, bits, 0, where)


def bounded(w: Group, value: Array, *sources: Array) -> Array:
    """Rounded to float16; under MODE.FP16_OVFL an overflow of finite sources gives the largest number, not infinity."""
    result: Array = np.asarray(value).astype(np.float16)
    if not w.waves.saturate.any():
        return result
    over = np.isinf(result) & w.waves.saturate[w.at][:, None]
    for source in sources:
        over &= np.isfinite(source) & ((source != 0) | (len(sources) > 1))  # 1 / 0 is a true infinity
    return np.where(over, np.copysign(np.float16(65504), result), result)


def _placed(w: Group, i: Instruction, bits: Array) -> Array:
    """An SDWA result in its part of the destination; the rest is 0, the sign or what it was."""
    shift, width = PARTS[str(i.modifiers.get("dst_sel", "DWORD"))]
    if width == 32:
        return bits
    part = U32((1 << width) - 1)
    placed: Array = (bits & part) << U32(shift)
    unused = i.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_PRESERVE":
        placed |= w.u32(i.operands[0]) & ~(part << U32(shift))
        return placed
    if unused == "UNUSED_SEXT":
        extended: Array = (bits << U32(32 - width)).view(np.int32) >> (32 - width) << shift
        return extended.view(U32)
    if unused == "UNUSED_PAD":
        return placed
    raise NotImplementedError(f"line {i.line}: dst_unused:{unused} is not emulated: {i.text}")


def define(
    name: str, signature: str, function: Function, clamped: Function | None = None, halves: bool = False, first: int = 1
) -> None:
    """Enter a handler that computes `function` of the sources.

    Args:
        clamped: the function under `clamp`, for an integer result that saturates.
        halves: the encoding has op_sel: it chooses the half of each 16-bit source, and of the destination, whose other
            half stays.
        first: the position of the first source.
    """
    if name in HANDLERS:
        raise KeyError(f"{name} has two handlers")
    kinds, result = signature.split(">")
    wide = any(KINDS[kind].itemsize == 8 for kind in signature.replace(">", ""))
    allowed = (DPP if wide else DPP | SDWA) | (OUTPUT if result in "fhd" else frozenset())
    allowed |= (frozenset(("op_sel",)) if halves else frozenset()) | (frozenset(("clamp",)) if clamped else frozenset())

    def handler(w: Group, i: Instruction) -> None:
        refuse(i, allowed)
        chosen = i.numbers("op_sel", (0,) * (len(kinds) + 1)) if halves else (0,) * (len(kinds) + 1)
        sources = [read(w, i, first + k, kind, first, chosen[k]) for k, kind in enumerate(kinds)]
        compute = clamped if clamped is not None and "clamp" in i.modifiers else function
        if chosen[-1] and result not in "wsh":
            raise NotImplementedError(f"line {i.line}: op_sel of a 32-bit destination in {i.text!r}")
        with np.errstate(all="ignore"):
            value = compute(*sources)
            if result == "h":
                value = bounded(w, value, *sources)
            write(w, i, value, result, chosen[-1] if halves and result in "wsh" else None)

    HANDLERS[name] = handler
