"""The scalar ALU: one value a wave, [G] uint32 or uint64, and SCC.

A row of a table is the operation of the ISA manual with the operands in the order of the text. `widths` has a letter
for the destination and one for each source: n for 32 bits, w for 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from portable.platform.emulated.bits import (
    bit_count,
    double_bits,
    field,
    gather_quads,
    leading_zeros,
    lowest_one,
    quads,
    reverse,
    sign_changes,
    signed32,
    signed64,
    wide,
)
from portable.platform.emulated.isa import EXEC, DecodeError, Instruction, Operand
from portable.platform.emulated.waves import I64, U32, U64, Array, Group, handles

Operation = Callable[..., Any]  # of [G] arrays


def plain(i: Instruction, count: int, *allowed: str) -> tuple[Operand, ...]:
    """The operands of an instruction that has `count` of them, no other modifier than those allowed, and no -x or |x|.

    Raises:
        NotImplementedError: it has others.
    """
    unknown = sorted(i.modifiers.keys() - set(allowed)) if i.modifiers else []
    signs = any(operand.negate or operand.absolute or operand.sign_extend for operand in i.operands)
    if unknown or signs or len(i.operands) != count:
        raise NotImplementedError(f"line {i.line}: {i.text!r} is not {count} plain operands with {list(allowed)}")
    return i.operands


def scalar_destination(i: Instruction, place: int = 0) -> int:
    """The number of the scalar register that is written."""
    if i.operands[place].kind != "s":
        raise NotImplementedError(f"line {i.line}: {i.text!r} writes {i.operands[place].text}, no scalar register")
    return i.operands[place].index


def simm16(operand: Operand) -> int:
    """A 16-bit immediate, sign-extended: the text of -128 is 0xff80."""
    if operand.kind != "i" or not -0x8000 <= operand.index <= 0xFFFF:
        raise DecodeError(f"{operand.text!r} is no 16-bit immediate")
    return (operand.index & 0xFFFF ^ 0x8000) - 0x8000


def _read(w: Group, operand: Operand, width: str) -> Array:
    return w.scalar(operand) if width == "n" else w.scalar64(operand)


def _write(w: Group, index: int, width: str, value: Array) -> None:
    if width == "n":
        w.set_s(index, value)
    else:
        w.set_s64(index, value)


def _enter(rows: Mapping[str, Operation], widths: str, scc: str = "") -> None:
    """Enter rows of `D = row(sources)`; `scc` is "" (kept), "nonzero" (D != 0), "given" (row returns D and it),
    "read" (row gets it before the sources) or "read given"."""
    readers = [Group.scalar if width == "n" else Group.scalar64 for width in widths[1:]]
    for name, operation in rows.items():

        def execute(w: Group, i: Instruction, operation: Operation = operation) -> None:
            operands = plain(i, len(widths))
            index = scalar_destination(i)
            sources = [read(w, operand) for read, operand in zip(readers, operands[1:], strict=True)]
            result = operation(w.scc, *sources) if scc.startswith("read") else operation(*sources)
            if scc.endswith("given"):
                result, w.scc = result
            _write(w, index, widths[0], result)
            if scc == "nonzero":
                w.scc = np.asarray(result).astype(U32 if widths[0] == "n" else U64) != 0

        handles(name)(execute)


def _carry(total: Array) -> tuple[Array, Array]:
    """A 33-bit result that may be negative, and whether it left 32 bits."""
    return total & 0xFFFFFFFF, total >> 32 != 0


def _overflow(total: Array) -> tuple[Array, Array]:
    """A result, and whether it left int32."""
    return total & 0xFFFFFFFF, (total < -(1 << 31)) | (total >= 1 << 31)


def _take(first: Array, a: Array, b: Array) -> tuple[Array, Array]:
    return np.where(first, a, b), first


LOGIC: dict[str, Operation] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_enter({f"s_{name}_b32": row for name, row in LOGIC.items()}, "nnn", "nonzero")
_enter({f"s_{name}_b64": row for name, row in LOGIC.items()}, "www", "nonzero")

_enter(
    {  # SCC: the carry or borrow of unsigned forms, the overflow of signed ones
        "s_add_u32": lambda a, b: _carry(a.astype(I64) + b),
        "s_sub_u32": lambda a, b: _carry(a.astype(I64) - b),
        "s_add_i32": lambda a, b: _overflow(signed32(a) + signed32(b)),
        "s_sub_i32": lambda a, b: _overflow(signed32(a) - signed32(b)),
        "s_lshl1_add_u32": lambda a, b: _carry((a.astype(I64) << 1) + b),
        "s_lshl2_add_u32": lambda a, b: _carry((a.astype(I64) << 2) + b),
        "s_lshl3_add_u32": lambda a, b: _carry((a.astype(I64) << 3) + b),
        "s_lshl4_add_u32": lambda a, b: _carry((a.astype(I64) << 4) + b),
        # SCC: the first source is taken; only a maximum takes it in a tie
        "s_min_i32": lambda a, b: _take(signed32(a) < signed32(b), a, b),
        "s_min_u32": lambda a, b: _take(a < b, a, b),
        "s_max_i32": lambda a, b: _take(signed32(a) >= signed32(b), a, b),
        "s_max_u32": lambda a, b: _take(a >= b, a, b),
    },
    "nnn",
    "given",
)
_enter(
    {
        "s_addc_u32": lambda scc, a, b: _carry(a.astype(I64) + b + scc),
        "s_subb_u32": lambda scc, a, b: _carry(a.astype(I64) - b - scc.astype(I64)),
    },
    "nnn",
    "read given",
)
_enter({"s_cselect_b32": lambda scc, a, b: np.where(scc, a, b)}, "nnn", "read")  # D = SCC ? S0 : S1
_enter({"s_cselect_b64": lambda scc, a, b: np.where(scc, a, b)}, "www", "read")

_enter(
    {
        "s_mul_i32": lambda a, b: wide(a) * wide(b),
        "s_mul_hi_u32": lambda a, b: wide(a) * wide(b) >> U64(32),
        "s_mul_hi_i32": lambda a, b: signed32(a) * signed32(b) >> 32,
        "s_bfm_b32": lambda a, b: (U32(1) << (a & 31)) - U32(1) << (b & 31),  # S0[4:0] ones from bit S1[4:0]
        "s_pack_ll_b32_b16": lambda a, b: a & 0xFFFF | b << U32(16),
        "s_pack_lh_b32_b16": lambda a, b: a & 0xFFFF | b & 0xFFFF0000,
        "s_pack_hh_b32_b16": lambda a, b: a >> U32(16) | b & 0xFFFF0000,
    },
    "nnn",
)
_enter({"s_bfm_b64": lambda a, b: (U64(1) << wide(a & 63)) - U64(1) << wide(b & 63)}, "wnn")

_enter(
    {
        "s_lshl_b32": lambda a, b: a << (b & 31),
        "s_lshr_b32": lambda a, b: a >> (b & 31),
        "s_ashr_i32": lambda a, b: signed32(a) >> (b & 31).astype(I64),
        "s_absdiff_i32": lambda a, b: np.abs(signed32(a - b)),  # of the difference in 32 bits
        # bits S1[22:16] from bit S1[4:0]
        "s_bfe_u32": lambda a, b: field(wide(a), b & 31, b >> U32(16) & 0x7F),
        "s_bfe_i32": lambda a, b: field(signed32(a), b & 31, b >> U32(16) & 0x7F),
    },
    "nnn",
    "nonzero",
)
_enter(
    {
        "s_lshl_b64": lambda a, b: a << wide(b & 63),
        "s_lshr_b64": lambda a, b: a >> wide(b & 63),
        "s_ashr_i64": lambda a, b: (signed64(a) >> (b & 63).astype(I64)).view(U64),
        # bits S1[22:16] from bit S1[5:0]
        "s_bfe_u64": lambda a, b: field(a, b & 63, b >> U32(16) & 0x7F),
        "s_bfe_i64": lambda a, b: field(signed64(a), b & 63, b >> U32(16) & 0x7F).view(U64),
    },
    "wwn",
    "nonzero",
)

_enter(
    {
        "s_mov_b32": lambda a: a,
        "s_brev_b32": lambda a: reverse(a, 32),
        "s_ff0_i32_b32": lambda a: lowest_one(wide(~a)),  # the lowest zero, -1 without one
        "s_ff1_i32_b32": lambda a: lowest_one(wide(a)),
        "s_flbit_i32_b32": lambda a: leading_zeros(wide(a), 32),  # zeros above the highest one, -1 without one
        "s_flbit_i32": lambda a: leading_zeros(sign_changes(wide(a), 32), 32),  # bits equal to the sign, or -1
        "s_sext_i32_i8": lambda a: (a & 0xFF ^ 0x80).astype(I64) - 0x80,
        "s_sext_i32_i16": lambda a: (a & 0xFFFF ^ 0x8000).astype(I64) - 0x8000,
    },
    "nn",
)
_enter(
    {
        "s_ff0_i32_b64": lambda a: lowest_one(~a),
        "s_ff1_i32_b64": lambda a: lowest_one(a),
        "s_flbit_i32_b64": lambda a: leading_zeros(a, 64),
        "s_flbit_i32_i64": lambda a: leading_zeros(sign_changes(a, 64), 64),
    },
    "nw",
)
_enter({"s_mov_b64": lambda a: a, "s_brev_b64": lambda a: reverse(a, 64)}, "ww")
_enter({"s_bitreplicate_b64_b32": lambda a: double_bits(wide(a))}, "wn")  # D[2k] = D[2k + 1] = S0[k]
_enter(
    {
        "s_not_b32": lambda a: ~a,
        "s_abs_i32": lambda a: np.abs(signed32(a)),
        "s_bcnt0_i32_b32": lambda a: bit_count(wide(~a)),
        "s_bcnt1_i32_b32": lambda a: bit_count(wide(a)),
        "s_wqm_b32": lambda a: quads(wide(a)) * U64(15),  # four bits are set where any of them is
        "s_quadmask_b32": lambda a: gather_quads(wide(a)),  # D[k] = any of S0[4k + 3 : 4k]
    },
    "nn",
    "nonzero",
)
_enter({"s_bcnt0_i32_b64": lambda a: bit_count(~a), "s_bcnt1_i32_b64": bit_count}, "nw", "nonzero")
_enter(
    {"s_not_b64": lambda a: ~a, "s_wqm_b64": lambda a: quads(a) * U64(15), "s_quadmask_b64": gather_quads},
    "ww",
    "nonzero",
)

EXEC_LOGIC = LOGIC | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}  # of S0 and EXEC


@handles(*(f"s_{name}_saveexec_b64" for name in EXEC_LOGIC), "s_andn1_wrexec_b64", "s_andn2_wrexec_b64")
def _exec_logic(w: Group, i: Instruction) -> None:
    """saveexec: D = EXEC, EXEC = op(S0, EXEC); wrexec: D = EXEC = op(S0, EXEC). SCC = EXEC != 0."""
    _, source = plain(i, 2)
    old = w.get_s64(EXEC)
    new = EXEC_LOGIC[i.name.split("_")[1]](w.scalar64(source), old)
    w.set_s64(scalar_destination(i), new if "wrexec" in i.name else old)
    w.set_s64(EXEC, new)
    w.scc = new != 0


@handles("s_cmov_b32", "s_cmov_b64", "s_cmovk_i32")
def _conditional_move(w: Group, i: Instruction) -> None:
    """if SCC: D = S0."""
    _, source = plain(i, 2)
    index, width = scalar_destination(i), "w" if i.name.endswith("b64") else "n"
    new = np.full(w.size, simm16(source)) if i.name == "s_cmovk_i32" else _read(w, source, width)
    _write(w, index, width, np.where(w.scc, new, _read(w, i.operands[0], width)))


@handles("s_bitset0_b32", "s_bitset1_b32", "s_bitset0_b64", "s_bitset1_b64")
def _set_bit(w: Group, i: Instruction) -> None:
    """D[S0[4:0]] = 0 or 1, S0[5:0] of 64 bits; the other bits stay."""
    _, source = plain(i, 2)
    index, width = scalar_destination(i), "w" if i.name.endswith("b64") else "n"
    old = wide(_read(w, i.operands[0], width))
    bit = U64(1) << wide(w.scalar(source) & (63 if width == "w" else 31))
    _write(w, index, width, old | bit if "set1" in i.name else old & ~bit)


@handles("s_movk_i32")
def _move_immediate(w: Group, i: Instruction) -> None:
    """D = sext(SIMM16)."""
    w.set_s(scalar_destination(i), np.full(w.size, simm16(plain(i, 2)[1])))


@handles("s_addk_i32")
def _add_immediate(w: Group, i: Instruction) -> None:
    """D = D + sext(SIMM16); SCC = signed overflow."""
    old, immediate = plain(i, 2)
    result, w.scc = _overflow(signed32(w.scalar(old)) + simm16(immediate))
    w.set_s(scalar_destination(i), result)


@handles("s_mulk_i32")
def _multiply_immediate(w: Group, i: Instruction) -> None:
    """D = D * sext(SIMM16)."""
    old, immediate = plain(i, 2)
    w.set_s(scalar_destination(i), signed32(w.scalar(old)) * simm16(immediate))


COMPARES: dict[str, Operation] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@handles(
    *(f"s_{kind}_{name}_{dtype}" for kind in ("cmp", "cmpk") for name in COMPARES for dtype in ("i32", "u32")),
    "s_cmp_eq_u64",
    "s_cmp_lg_u64",
)
def _compare(w: Group, i: Instruction) -> None:
    """SCC = S0 op S1; a cmpk's S1 is sext(SIMM16) for i32 and zext(SIMM16) for u32."""
    first, second = plain(i, 2)
    _, kind, name, dtype = i.name.split("_")
    width = "w" if dtype == "u64" else "n"
    a = _read(w, first, width)
    if kind == "cmp":
        b = _read(w, second, width)
    else:
        immediate = simm16(second)
        b = np.full(w.size, immediate & (0xFFFFFFFF if dtype == "i32" else 0xFFFF), U32)
    w.scc = COMPARES[name](signed32(a), signed32(b)) if dtype == "i32" else COMPARES[name](a, b)


@handles("s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitcmp0_b64", "s_bitcmp1_b64")
def _compare_bit(w: Group, i: Instruction) -> None:
    """SCC = S0[S1[4:0]] == 0 or 1; S1[5:0] of 64 bits."""
    first, second = plain(i, 2)
    width = "w" if i.name.endswith("b64") else "n"
    place = wide(w.scalar(second) & (63 if width == "w" else 31))
    w.scc = wide(_read(w, first, width)) >> place & U64(1) == U64("cmp1" in i.name)
