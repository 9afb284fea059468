"""Integer vector instructions: each entry of a table is the ISA manual's operation on its sources, S0 first."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.isa import Instruction
from portable.platform.emulated.modifiers import (
    SDWA,
    Function,
    define,
    read,
    read_mask,
    refuse,
    write,
)
from portable.platform.emulated.waves import I32, I64, U32, U64, Array, Group, handles

FULL = U32(0xFFFFFFFF)
LOW24 = U32(0xFFFFFF)


def _low5(shift: Array) -> Array:
    amount: Array = shift & U32(31)
    return amount


def _signed24(value: Array) -> Array:
    extended: Array = (value << U32(8)).view(I32).astype(I64) >> 8
    return extended


def _wide(value: Array) -> Array:
    return value.astype(U64)


def _low(value: Array) -> Array:
    """The low 32 bits of a 64-bit value, as uint32."""
    return value.astype(U64).astype(U32)


def _ones(value: Array) -> Array:
    """The number of set bits."""
    bits = np.unpackbits(np.ascontiguousarray(value).view(np.uint8), axis=-1)
    count: Array = bits.reshape(*value.shape, 32).sum(-1, dtype=U32)
    return count


def bit_length(value: Array) -> Array:
    """The position of the highest set bit plus one, 0 of 0, as int32: the exponent of the exact float64."""
    exponent: Array = np.frexp(value.astype(np.float64))[1].astype(I32)
    return exponent


def _reversed(value: Array) -> Array:
    """D[31-k] = S0[k]."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        value = (value >> U32(shift)) & U32(mask) | (value & U32(mask)) << U32(shift)
    result: Array = value.byteswap()
    return result


def _first_set(value: Array) -> Array:
    """The lowest set bit's position; -1 of 0."""
    position: Array = bit_length(value & (~value + U32(1))) - 1
    return position.view(U32)


def _leading(value: Array) -> Array:
    """The count of zeros above the highest set bit; -1 of 0."""
    return np.where(value == 0, FULL, (32 - bit_length(value)).view(U32))


def _leading_signs(value: Array) -> Array:
    """The count of bits at the top that equal the sign bit; -1 if all do."""
    return _leading(value ^ (value.view(I32) >> 31).view(U32))


def _extract_signed(value: Array, offset: Array, width: Array) -> Array:
    """D = sign-extended (S0 >> S1[4:0])[S2[4:0]-1 : 0]; 0 of no bits."""
    rest = I64(64) - _low5(width).astype(I64)
    shifted = value.view(I32).astype(I64) >> _low5(offset).astype(I64)
    field = (shifted << (rest & 63)) >> (rest & 63)
    result: Array = np.where(rest == 64, I64(0), field).astype(I32)
    return result


def _bytes(value: Array) -> Array:
    """[.., 4] uint8, the lowest first."""
    return np.ascontiguousarray(value).view(np.uint8).reshape(*value.shape, 4)


def _permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """D.byte[k] = byte S2.byte[k] of {S0,S1}; 8 to 11 the sign of byte 1, 3, 5 or 7; 12 is 0, above is 0xff."""
    choices = np.empty((*low.shape, 14), np.uint8)
    choices[..., :4], choices[..., 4:8] = _bytes(low), _bytes(high)
    choices[..., 8:12] = choices[..., 1:8:2].view(np.int8) >> 7
    choices[..., 12], choices[..., 13] = 0, 0xFF
    chosen = np.take_along_axis(choices, np.minimum(_bytes(selector), 13).astype(np.intp), -1)
    result: Array = chosen.view(U32)[..., 0]
    return result


def _absolute_bytes(first: Array, second: Array, third: Array) -> Array:
    """D = S2 + the sum over bytes k of |S0.byte[k] - S1.byte[k]|."""
    for k in range(4):
        a, b = (value >> U32(8 * k) & U32(0xFF) for value in (first, second))
        third = third + (np.maximum(a, b) - np.minimum(a, b))
    return third


def _middle(first: Array, second: Array, third: Array) -> Array:
    """The median of three."""
    return np.maximum(np.minimum(first, second), np.minimum(np.maximum(first, second), third))


def _saturated_bytes(value: Array) -> Array:
    """D = {sat_u8(S0.i16[1]), sat_u8(S0.i16[0])}."""
    low, high = ((value << U32(shift)).view(I32) >> 16 for shift in (16, 0))
    packed: Array = np.clip(low, 0, 255).astype(U32) | np.clip(high, 0, 255).astype(U32) << U32(8)
    return packed


ONE: dict[str, Function] = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": _reversed,
    "v_ffbh_u32": _leading,
    "v_ffbh_i32": _leading_signs,
    "v_ffbl_b32": _first_set,
    "v_sat_pk_u8_i16": _saturated_bytes,
}
TWO: dict[str, Function] = {
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_lshlrev_b32": lambda a, b: b << _low5(a),
    "v_lshrrev_b32": lambda a, b: b >> _low5(a),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: (_wide(a) * _wide(b) >> U64(32)).astype(U32),
    "v_mul_u32_u24": lambda a, b: (a & LOW24) * (b & LOW24),
    "v_mul_hi_u32_u24": lambda a, b: (_wide(a & LOW24) * _wide(b & LOW24) >> U64(32)).astype(U32),
    "v_mul_i32_i24": lambda a, b: _low(_signed24(a) * _signed24(b)),
    "v_mul_hi_i32_i24": lambda a, b: _low(_signed24(a) * _signed24(b) >> 32),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_bfm_b32": lambda a, b: ((U32(1) << _low5(a)) - U32(1)) << _low5(b),
    "v_bcnt_u32_b32": lambda a, b: _ones(a) + b,
}
THREE: dict[str, Function] = {
    "v_mad_u32_u24": lambda a, b, c: (a & LOW24) * (b & LOW24) + c,
    "v_mad_i32_i24": lambda a, b, c: _low(_signed24(a) * _signed24(b)) + c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << _low5(b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << _low5(c),
    "v_lshl_or_b32": lambda a, b, c: a << _low5(b) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": lambda a, b, c: a >> _low5(b) & (U32(1) << _low5(c)) - U32(1),
    "v_alignbit_b32": lambda a, b, c: ((_wide(a) << U64(32) | b) >> _wide(_low5(c))).astype(U32),
    "v_alignbyte_b32": lambda a, b, c: ((_wide(a) << U64(32) | b) >> _wide(c & U32(3)) * U64(8)).astype(U32),
    "v_perm_b32": _permute_bytes,
    "v_sad_u8": _absolute_bytes,
    "v_sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_u32": _middle,
}
CLAMPED: dict[str, Function] = {  # with `clamp`: saturated at the type's ends
    "v_add_u32": lambda a, b: np.where(a + b < a, FULL, a + b),
    "v_sub_u32": lambda a, b: np.where(a < b, U32(0), a - b),
    "v_subrev_u32": lambda a, b: np.where(b < a, U32(0), b - a),
    "v_add_u16": lambda a, b: np.where(a + b < a, np.uint16(0xFFFF), a + b),
    "v_sub_u16": lambda a, b: np.where(a < b, np.uint16(0), a - b),
    "v_subrev_u16": lambda a, b: np.where(b < a, np.uint16(0), b - a),
    "v_add_i32": lambda a, b: np.clip(a.astype(I64) + b, -(1 << 31), (1 << 31) - 1),
    "v_sub_i32": lambda a, b: np.clip(a.astype(I64) - b, -(1 << 31), (1 << 31) - 1),
    "v_add_i16": lambda a, b: np.clip(a.astype(I32) + b, -(1 << 15), (1 << 15) - 1),
    "v_sub_i16": lambda a, b: np.clip(a.astype(I32) - b, -(1 << 15), (1 << 15) - 1),
}
OTHER: dict[str, tuple[str, Function]] = {
    "v_ashrrev_i32": ("ui>i", lambda a, b: b >> _low5(a).astype(I32)),
    "v_add_i32": ("ii>i", lambda a, b: a + b),
    "v_sub_i32": ("ii>i", lambda a, b: a - b),
    "v_mul_hi_i32": ("ii>i", lambda a, b: a.astype(I64) * b >> 32),
    "v_min_i32": ("ii>i", np.minimum),
    "v_max_i32": ("ii>i", np.maximum),
    "v_min3_i32": ("iii>i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("iii>i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("iii>i", _middle),
    "v_bfe_i32": ("uuu>i", _extract_signed),
    "v_lshlrev_b16": ("ww>w", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": ("ww>w", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": ("ws>s", lambda a, b: b >> (a & np.uint16(15)).astype(np.int16)),
    "v_add_u16": ("ww>w", lambda a, b: a + b),
    "v_sub_u16": ("ww>w", lambda a, b: a - b),
    "v_subrev_u16": ("ww>w", lambda a, b: b - a),
    "v_mul_lo_u16": ("ww>w", lambda a, b: a * b),
    "v_mad_legacy_u16": ("www>w", lambda a, b, c: a * b + c),  # these clear the upper half, v_mad_* keep it
    "v_mad_legacy_i16": ("sss>s", lambda a, b, c: a * b + c),
    "v_min_u16": ("ww>w", np.minimum),
    "v_max_u16": ("ww>w", np.maximum),
    "v_min_i16": ("ss>s", np.minimum),
    "v_max_i16": ("ss>s", np.maximum),
    "v_mov_b64": ("U>U", lambda a: a),
    "v_lshlrev_b64": ("uU>U", lambda a, b: b << _wide(a & U32(63))),
    "v_lshrrev_b64": ("uU>U", lambda a, b: b >> _wide(a & U32(63))),
    "v_ashrrev_i64": ("uI>I", lambda a, b: b >> (a & U32(63)).astype(I64)),
    "v_lshl_add_u64": ("UuU>U", lambda a, b, c: (a << _wide(b & U32(7))) + c),
}
HALVES: dict[str, tuple[str, Function]] = {  # op_sel chooses the halves
    "v_add_i16": ("ss>s", lambda a, b: a + b),
    "v_sub_i16": ("ss>s", lambda a, b: a - b),
    "v_mad_u16": ("www>w", lambda a, b, c: a * b + c),
    "v_mad_i16": ("sss>s", lambda a, b, c: a * b + c),
    "v_mad_u32_u16": ("wwu>u", lambda a, b, c: a.astype(U32) * b + c),
    "v_mad_i32_i16": ("ssi>i", lambda a, b, c: a.astype(I32) * b + c),
    "v_min3_u16": ("www>w", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u16": ("www>w", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u16": ("www>w", _middle),
    "v_min3_i16": ("sss>s", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i16": ("sss>s", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i16": ("sss>s", _middle),
}
for _table, _signature in ((ONE, "u>u"), (TWO, "uu>u"), (THREE, "uuu>u")):
    for _name, _function in _table.items():
        define(_name, _signature, _function, CLAMPED.get(_name))
for _name, (_signature, _function) in OTHER.items():
    define(_name, _signature, _function, CLAMPED.get(_name))
for _name, (_signature, _function) in HALVES.items():
    define(_name, _signature, _function, CLAMPED.get(_name), halves=True)


@handles("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
def carry(w: Group, i: Instruction) -> None:
    """{VCC, D} = S0 + S1 (+ carry in), or {borrow, D} = S0 - S1 (- borrow in); rev: S1 - S0."""
    refuse(i, SDWA)
    a, b = (read(w, i, k, "u", first=2).astype(I64) for k in (2, 3))
    if "rev" in i.name:
        a, b = b, a
    extra = read_mask(w, i, 4).astype(I64) if len(i.operands) == 5 else I64(0)
    result = a + b + extra if "add" in i.name else a - b - extra
    write(w, i, _low(result), "u")
    w.set_mask(i.operands[1].index, (result >> 32) != 0)


@handles("v_mad_u64_u32", "v_mad_i64_i32")
def multiply_add64(w: Group, i: Instruction) -> None:
    """{VCC, D.64} = S0.32 * S1.32 + S2.64, the carry being bit 64."""
    refuse(i)
    if i.name == "v_mad_u64_u32":
        a, b, c = (read(w, i, 2 + k, kind, first=2) for k, kind in enumerate("uuU"))
        total = _wide(a) * _wide(b) + c
        overflow = total < c
    else:
        a, b, c = (read(w, i, 2 + k, kind, first=2) for k, kind in enumerate("iiI"))
        product = a.astype(I64) * b.astype(I64)
        total = product + c
        overflow = np.where((product < 0) == (c < 0), c < 0, total < 0)
    write(w, i, total.view(U64), "U")
    w.set_mask(i.operands[1].index, overflow)


@handles("v_bitop3_b32", "v_bitop3_b16")
def bitwise3(w: Group, i: Instruction) -> None:
    """D[k] = bit {S0[k], S1[k], S2[k]} of the truth table `bitop3`; b16 takes halves by op_sel."""
    short = i.name == "v_bitop3_b16"
    refuse(i, {"bitop3", "op_sel"} if short else {"bitop3"})
    halves = i.numbers("op_sel", (0, 0, 0, 0))
    sources = [read(w, i, 1 + k, "w" if short else "u", high=halves[k]) for k in range(3)]
    table = i.number("bitop3")
    result = np.zeros_like(sources[0])
    for row in range(8):
        if table >> row & 1:
            a, b, c = (value if row >> 2 - k & 1 else ~value for k, value in enumerate(sources))
            result |= a & b & c
    write(w, i, result, "w" if short else "u", halves[3] if short else None)


@handles("v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32")
def shift_pack(w: Group, i: Instruction) -> None:
    """D = {sat8(S1 >> S2[4:0]), sat8(S0 >> S2[4:0])} in the low half, or by op_sel the high one."""
    refuse(i, {"op_sel"})
    a, b, shift = (read(w, i, 1 + k, kind) for k, kind in enumerate("iiu"))
    ends = (-128, 127) if "_i8_" in i.name else (0, 255)
    low, high = (np.clip(value >> _low5(shift).astype(I32), *ends).astype(np.uint8).astype(U32) for value in (a, b))
    write(w, i, (low | high << U32(8)).astype(np.uint16), "w", i.numbers("op_sel", (0, 0, 0, 0))[3])
