"""The instructions that make a division: scale, multiply-add with the scale undone, and the fix-up of special cases."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from portable.platform.emulated.floating import F64, exact_sum, fma64, rounded, to_odd
from portable.platform.emulated.isa import VCC, Instruction, lanes
from portable.platform.emulated.modifiers import KINDS, OUTPUT, define, read, refuse, write
from portable.platform.emulated.waves import F32, I32, U32, Array, Group, handles


class Division(NamedTuple):
    """The numbers of a type: bits of its fraction, the highest exponent field, and where quotients need scaling."""

    kind: str
    fraction: int
    top: int
    power: int  # operands are scaled by 2**power
    apart: int  # exponents of a quotient that may overflow on the way
    tiny: int  # exponent of a numerator whose steps lose bits
    vanishing: int  # exponents of a quotient that rounds to 0


KINDS_OF_DIVISION = {
    "f32": Division("f", 23, 0xFF, 64, 96, 23, -150),
    "f64": Division("d", 52, 0x7FF, 128, 768, 53, -1075),
}


def _exponent(value: Array, of: Division) -> Array:
    """The biased exponent."""
    bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    field: Array = ((bits >> bits.dtype.type(of.fraction)) & bits.dtype.type(of.top)).astype(I32)
    return field


def _denormal(value: Array, of: Division) -> Array:
    small: Array = (_exponent(value, of) == 0) & (value != 0)
    return small


@handles("v_div_scale_f32", "v_div_scale_f64")
def scale(w: Group, i: Instruction) -> None:
    """D = S0 (S1 or S2) times 2**64 or 2**-64 where S2 / S1 needs it; VCC = whether v_div_fmas must undo it; f64: 128.

    Quotients that overflow or a denormal denominator scale the denominator up; a denominator whose reciprocal is
    denormal scales it down; a denormal quotient or a tiny numerator scales the numerator up (or, with a denormal
    reciprocal, leaves that to the denominator scaled down: the manual prints it scaled up, which would overflow).
    """
    refuse(i)
    of = KINDS_OF_DIVISION[i.name[-3:]]
    value, bottom, top = (np.ascontiguousarray(read(w, i, k, of.kind, first=2)) for k in (2, 3, 4))
    bits = f"u{value.dtype.itemsize}"
    one, nan = value.dtype.type(1), value.dtype.type(np.nan)
    with np.errstate(all="ignore"):
        zero = (bottom == 0) | (top == 0)
        apart = ~zero & (_exponent(top, of) - _exponent(bottom, of) >= of.apart)
        small_bottom = ~zero & ~apart & _denormal(bottom, of)
        rest = ~zero & ~apart & ~small_bottom
        small_inverse, small_quotient = rest & _denormal(one / bottom, of), rest & _denormal(top / bottom, of)
        tiny_top = rest & ~small_inverse & ~small_quotient & (_exponent(top, of) <= of.tiny)
        is_bottom, is_top = value.view(bits) == bottom.view(bits), value.view(bits) == top.view(bits)
        up = apart & is_bottom | small_bottom | small_quotient & ~small_inverse & is_top | tiny_top
        down = small_inverse & (~small_quotient | is_bottom)
        power = np.where(up, of.power, np.where(down, -of.power, 0)).astype(I32)
        write(w, i, np.where(zero, nan, np.ldexp(value, power)), of.kind)
    w.set_mask(i.operands[1].index, apart | small_quotient)


@handles("v_div_fmas_f32", "v_div_fmas_f64")
def scaled_multiply_add(w: Group, i: Instruction) -> None:
    """D = S0 * S1 + S2, times 2**64 (S2 of 2 or more) or 2**-64 in the lanes of VCC, rounded after it; f64: 128.

    The manual of these architectures prints factors (2**32 and 2**64) that cannot undo its own scales; these ones do.
    """
    refuse(i, OUTPUT)
    of = KINDS_OF_DIVISION[i.name[-3:]]
    a, b, c = (np.ascontiguousarray(read(w, i, k, of.kind)) for k in (1, 2, 3))
    power = (np.where(_exponent(c, of) > of.top >> 1, of.power, -of.power) * lanes(w.get_s64(VCC))).astype(I32)
    with np.errstate(all="ignore"):
        if of.kind == "f":
            total = np.ldexp(to_odd(*exact_sum(a.astype(F64) * b, c.astype(F64))), power).astype(F32)
        else:
            total = np.ldexp(fma64(a, b, c), power)
            for at in zip(*np.nonzero((power != 0) & w.active & np.isfinite(total)), strict=True):
                exact = Fraction(a[at]) * Fraction(b[at]) + Fraction(c[at])
                total[at] = rounded(exact * Fraction(2) ** int(power[at]))
        write(w, i, total, of.kind)


def _fixed(quotient: Array, bottom: Array, top: Array) -> Array:
    """D = S0 with the sign of S2 / S1; NaN, infinity and 0 where S2 / S1 says so."""
    kind = quotient.dtype.type
    negative = np.signbit(bottom) ^ np.signbit(top)
    size = np.abs(quotient)
    if of := next((each for each in KINDS_OF_DIVISION.values() if KINDS[each.kind] == quotient.dtype), None):
        size = np.where(np.isnan(size), kind(np.inf), size)  # the steps of an overflow ended in infinity less infinity
        size = np.where(_exponent(top, of) - _exponent(bottom, of) < of.vanishing, kind(0), size)
    size = np.where(np.isinf(bottom) | (top == 0), kind(0), size)
    size = np.where((bottom == 0) | np.isinf(top), kind(np.inf), size)
    result = np.where(negative, -size, size)
    none = ((bottom == 0) & (top == 0)) | (np.isinf(bottom) & np.isinf(top))
    result = np.where(none, np.copysign(kind(np.nan), kind(-1)), result)
    result = np.where(np.isnan(bottom), bottom, result)
    return np.where(np.isnan(top), top, result)


define("v_div_fixup_f64", "ddd>d", _fixed)
define("v_div_fixup_f32", "fff>f", _fixed)
define("v_div_fixup_f16", "hhh>h", _fixed, halves=True)


def _two_over_pi() -> int:
    """The first 1201 bits of 2 / pi, by Machin's formula."""
    digits = 1300

    def inverse_tangent(x: int) -> int:  # atan(1 / x) * 2**digits
        total = term = (1 << digits) // x
        k = 1
        while term:
            term //= -x * x
            k += 2
            total += term // k
        return total

    pi = 4 * (4 * inverse_tangent(5) - inverse_tangent(239))
    return (1 << digits + 1 + 1201) // pi


TWO_OVER_PI = _two_over_pi()


def _segment(value: Array, number: Array) -> Array:
    """Bits of 2 / pi for the reduction of S0: 53 from bit 53 * S1[4:0] on, later ones where S0 is huge, as a double."""
    exponent = _exponent(value, KINDS_OF_DIVISION["f64"])
    shift = (number & U32(31)).astype(I32) * 53 + np.maximum(exponent - 1077, 0)
    wanted = np.unique(shift)
    bits = [TWO_OVER_PI << int(each) >> 1201 - 53 & (1 << 53) - 1 for each in wanted]
    found = np.array(bits, F64)[np.searchsorted(wanted, shift)]
    result: Array = np.ldexp(found, -53 - shift + np.where(exponent >= 1968, 128, 0))
    return result


define("v_trig_preop_f64", "du>d", _segment)
