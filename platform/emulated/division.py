"""The instructions that make a division: scale, multiply-add with the scale undone, and the fix-up of special cases."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.floating import F64, TINY, exact_sum, to_odd
from portable.platform.emulated.isa import VCC, Instruction, lanes
from portable.platform.emulated.modifiers import OUTPUT, define, read, refuse, write
from portable.platform.emulated.waves import F32, I32, U32, Array, Group, handles


def _exponent(value: Array) -> Array:
    """The biased exponent of float32."""
    field: Array = (value.view(U32) >> U32(23) & U32(0xFF)).astype(I32)
    return field


def _denormal(value: Array) -> Array:
    small: Array = (np.abs(value) < TINY) & (value != 0)
    return small


@handles("v_div_scale_f32")
def scale(w: Group, i: Instruction) -> None:
    """D = S0 (S1 or S2) times 2**64 or 2**-64 where S2 / S1 needs it; VCC = whether v_div_fmas must undo it.

    Quotients that overflow or a denormal denominator scale the denominator up; a denominator whose reciprocal is
    denormal scales it down; a denormal quotient or a tiny numerator scales the numerator up (or, with a denormal
    reciprocal, leaves that to the denominator scaled down).
    """
    refuse(i)
    value, bottom, top = (np.ascontiguousarray(read(w, i, k, "f", first=2)) for k in (2, 3, 4))
    with np.errstate(all="ignore"):
        zero = (bottom == 0) | (top == 0)
        apart = ~zero & (_exponent(top) - _exponent(bottom) >= 96)
        small_bottom = ~zero & ~apart & _denormal(bottom)
        rest = ~zero & ~apart & ~small_bottom
        small_inverse, small_quotient = rest & _denormal(F32(1) / bottom), rest & _denormal(top / bottom)
        tiny_top = rest & ~small_inverse & ~small_quotient & (_exponent(top) <= 23)
        is_bottom, is_top = value.view(U32) == bottom.view(U32), value.view(U32) == top.view(U32)
        up = apart & is_bottom | small_bottom | small_quotient & ~small_inverse & is_top | tiny_top
        down = small_inverse & (~small_quotient | is_bottom)
        power = np.where(up, 64, np.where(down, -64, 0)).astype(I32)
        write(w, i, np.where(zero, F32(np.nan), np.ldexp(value, power)), "f")
    w.set_mask(i.operands[1].index, apart | small_quotient)


@handles("v_div_fmas_f32")
def scaled_multiply_add(w: Group, i: Instruction) -> None:
    """D = S0 * S1 + S2, times 2**64 (S2 of 2 or more) or 2**-64 in the lanes of VCC, rounded after it."""
    refuse(i, OUTPUT)
    a, b, c = (np.ascontiguousarray(read(w, i, k, "f")) for k in (1, 2, 3))
    with np.errstate(all="ignore"):
        total = to_odd(*exact_sum(a.astype(F64) * b, c.astype(F64)))
        power = np.where(_exponent(c) > 127, 64, -64) * lanes(w.get_s64(VCC))
        write(w, i, np.ldexp(total, power.astype(I32)).astype(F32), "f")


def _fixed(quotient: Array, bottom: Array, top: Array) -> Array:
    """D = S0 with the sign of S2 / S1; NaN, infinity and 0 where S2 / S1 says so."""
    kind = quotient.dtype.type
    negative = np.signbit(bottom) ^ np.signbit(top)
    size = np.abs(quotient)
    if kind is F32:
        size = np.where(np.isnan(size), kind(np.inf), size)  # the steps of an overflow ended in infinity less infinity
        size = np.where(_exponent(top) - _exponent(bottom) < -150, kind(0), size)
    size = np.where(np.isinf(bottom) | (top == 0), kind(0), size)
    size = np.where((bottom == 0) | np.isinf(top), kind(np.inf), size)
    result = np.where(negative, -size, size)
    none = ((bottom == 0) & (top == 0)) | (np.isinf(bottom) & np.isinf(top))
    result = np.where(none, np.copysign(kind(np.nan), kind(-1)), result)
    result = np.where(np.isnan(bottom), bottom, result)
    return np.where(np.isnan(top), top, result)


define("v_div_fixup_f32", "fff>f", _fixed)
define("v_div_fixup_f16", "hhh>h", _fixed, halves=True)
