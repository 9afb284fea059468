"""Floating-point vector instructions: f32, f16 and f64, rounded to nearest even, denormals kept (what compilers set).

Transcendental instructions are exact here to about one unit in the last place, and flush denormal inputs and results to
zero, as LLVM's lowering assumes of them (it scales such operands first); no public text says so of these architectures,
captures of RDNA show it. Signalling NaNs count as quiet ones.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from portable.platform.emulated.isa import Instruction
from portable.platform.emulated.modifiers import DPP, OUTPUT, SDWA, Function, define, read, refuse, write
from portable.platform.emulated.waves import F32, I32, I64, U64, Array, Group, handles

F64 = np.float64
TINY = F32(2.0**-126)  # the least normal float32


def exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b as the float64 sum and what it lost (Knuth)."""
    total: Array = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(total: Array, lost: Array) -> Array:
    """A float64 sum rounded to odd: if it lost something and its last bit is 0, one step towards what it lost. Rounding
    it again to at most 51 bits is then right."""
    bits = np.ascontiguousarray(total).view(I64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    change = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    return np.where(change, bits + step, bits).view(F64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded once.

    The product is exact in float64. The sum is rounded to it first, which matters only where it then lies half way
    between two float32 (29 bits 1 0 0...) or is a float32 denormal.
    """
    product = a.astype(F64) * b
    total: Array = product + c
    half = (total.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    if (half | (np.abs(total) < TINY) & (total != 0)).any():
        total = to_odd(*exact_sum(product, c.astype(F64)))
    return total.astype(F32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float16, rounded once: where float64 is inexact, the greater term alone decides."""
    return (a.astype(F64) * b + c).astype(np.float16)


def rounded(exact: Fraction) -> float:
    """The nearest float64, infinity beyond the largest."""
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64, rounded once (Dekker's product, Boldo and Melquiond's sum).

    That needs terms within 2**-900 and 2**900, so that no part of them is lost; fractions take the others.
    """
    factor = F64((1 << 27) + 1)
    high_a, high_b = (factor * value - (factor * value - value) for value in (a, b))
    low_a, low_b = a - high_a, b - high_b
    product = a * b
    rest = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    low_sum, lost = exact_sum(c, rest)
    total, remainder = exact_sum(product, low_sum)
    result = np.array(total + to_odd(*exact_sum(remainder, lost)))
    known = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    result = np.where(known & (product != 0), result, product + c)
    result = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, result)
    sizes = np.abs(np.stack(np.broadcast_arrays(a, b, product, c)))
    extreme = known & ((sizes > 2.0**900).any(0) | ((sizes < 2.0**-900) & (sizes > 0)).any(0))
    extreme |= known & (product == 0) & (a != 0) & (b != 0)
    for at in zip(*np.nonzero(extreme), strict=True):
        exact = Fraction(a[at]) * Fraction(b[at]) + Fraction(c[at])
        result[at] = rounded(exact) if exact else product[at] + c[at]
    return result


def _flush(value: Array) -> Array:
    """float32 denormals to zero of their sign."""
    return np.where(np.abs(value) < TINY, np.copysign(F32(0), value), value)


def _flushing(function: Function) -> Function:
    return lambda value: _flush(np.asarray(function(_flush(value)), F32))


def minimum(a: Array, b: Array) -> Array:
    """The number if the other is NaN; -0 is below +0."""
    result = np.fmin(a, b)
    return np.where((a == 0) & (b == 0) & (np.signbit(a) | np.signbit(b)), -np.zeros_like(a), result)


def maximum(a: Array, b: Array) -> Array:
    """The number if the other is NaN; +0 is above -0."""
    result = np.fmax(a, b)
    return np.where((a == 0) & (b == 0) & ~(np.signbit(a) & np.signbit(b)), np.zeros_like(a), result)


def _median(a: Array, b: Array, c: Array) -> Array:
    """The middle one; of any NaN, the least."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b), c), middle)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    """The least; NaN if any is."""
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), a.dtype.type(np.nan), minimum(minimum(a, b), c))


def maximum3(a: Array, b: Array, c: Array) -> Array:
    """The greatest; NaN if any is."""
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), a.dtype.type(np.nan), maximum(maximum(a, b), c))


def _legacy_product(a: Array, b: Array) -> Array:
    """S0 * S1; 0 if either is 0."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def _fraction(value: Array) -> Array:
    """S0 - floor(S0), below 1."""
    below_one = np.nextafter(value.dtype.type(1), value.dtype.type(0))
    fraction: Array = np.minimum(value - np.floor(value), below_one)
    return fraction


def _circular(function: Function, outside: float) -> Function:
    """Of 2 * pi * S0; a fixed number for |S0| above 256."""

    def compute(value: Array) -> Array:
        turns = value.astype(F64)
        return np.where(np.abs(turns) > 256, np.where(np.isinf(turns), np.nan, outside), function(turns * 2 * np.pi))

    return compute


def _mantissa(value: Array) -> Array:
    """S0 / 2**exponent, in [0.5, 1); infinities and NaN stay."""
    return np.where(np.isfinite(value), np.frexp(value)[0], value)


def _frexp_exponent(value: Array) -> Array:
    """The exponent of `_mantissa`; 0 of infinities and NaN."""
    return np.where(np.isfinite(value), np.frexp(value)[1], 0)


def _scaled(value: Array, power: Array) -> Array:
    """S0 * 2**S1."""
    return np.ldexp(value, power.astype(I32))


ANY: dict[str, tuple[str, Function]] = {  # for f16, f32 and f64: "x" stands for the type
    "v_add": ("xx>x", lambda a, b: a + b),
    "v_mul": ("xx>x", lambda a, b: a * b),
    "v_rndne": ("x>x", np.rint),
    "v_floor": ("x>x", np.floor),
    "v_ceil": ("x>x", np.ceil),
    "v_trunc": ("x>x", np.trunc),
    "v_fract": ("x>x", _fraction),
    "v_frexp_mant": ("x>x", _mantissa),
}
SHORT: dict[str, tuple[str, Function]] = {  # for f16 and f32
    "v_sub": ("xx>x", lambda a, b: a - b),
    "v_subrev": ("xx>x", lambda a, b: b - a),
    "v_min": ("xx>x", minimum),
    "v_max": ("xx>x", maximum),
}
TERNARY: dict[str, Function] = {
    "v_min3": lambda a, b, c: minimum(minimum(a, b), c),
    "v_max3": lambda a, b, c: maximum(maximum(a, b), c),
    "v_med3": _median,
}
SINGLE: dict[str, tuple[str, Function]] = {
    "v_mul_legacy_f32": ("ff>f", _legacy_product),
    "v_fma_f32": ("fff>f", fma),
    "v_fmaak_f32": ("fff>f", fma),
    "v_fmamk_f32": ("fff>f", fma),  # the constant stands second in the text: D = S0 * K + S1
    "v_minimum3_f32": ("fff>f", minimum3),
    "v_maximum3_f32": ("fff>f", maximum3),
    "v_exp_f32": ("f>f", _flushing(np.exp2)),
    "v_log_f32": ("f>f", _flushing(np.log2)),
    "v_rcp_f32": ("f>f", _flushing(lambda a: F32(1) / a)),
    "v_rcp_iflag_f32": ("f>f", _flushing(lambda a: F32(1) / a)),
    "v_rsq_f32": ("f>f", _flushing(lambda a: 1 / np.sqrt(a.astype(F64)))),
    "v_sqrt_f32": ("f>f", _flushing(np.sqrt)),
    "v_sin_f32": ("f>f", _flushing(_circular(np.sin, 0.0))),
    "v_cos_f32": ("f>f", _flushing(_circular(np.cos, 1.0))),
    "v_ldexp_f32": ("fi>f", _scaled),
    "v_frexp_exp_i32_f32": ("f>i", _frexp_exponent),
    "v_exp_f16": ("h>h", lambda a: np.exp2(a.astype(F32))),
    "v_log_f16": ("h>h", lambda a: np.log2(a.astype(F32))),
    "v_rcp_f16": ("h>h", lambda a: F32(1) / a.astype(F32)),
    "v_rsq_f16": ("h>h", lambda a: 1 / np.sqrt(a.astype(F64))),
    "v_sqrt_f16": ("h>h", lambda a: np.sqrt(a.astype(F32))),
    "v_sin_f16": ("h>h", _circular(np.sin, 0.0)),
    "v_cos_f16": ("h>h", _circular(np.cos, 1.0)),
    "v_ldexp_f16": ("hs>h", lambda a, b: np.ldexp(a.astype(F64), b.astype(I32))),
    "v_frexp_exp_i16_f16": ("h>s", _frexp_exponent),
    "v_fma_f64": ("ddd>d", fma64),
    "v_min_f64": ("dd>d", minimum),
    "v_max_f64": ("dd>d", maximum),
    "v_rcp_f64": ("d>d", lambda a: 1 / a),
    "v_rsq_f64": ("d>d", lambda a: 1 / np.sqrt(a)),
    "v_sqrt_f64": ("d>d", np.sqrt),
    "v_ldexp_f64": ("di>d", _scaled),
    "v_frexp_exp_i32_f64": ("d>i", _frexp_exponent),
}
for _name, (_signature, _function) in ANY.items():
    for _kind, _type in (("h", "f16"), ("f", "f32"), ("d", "f64")):
        define(f"{_name}_{_type}", _signature.replace("x", _kind), _function)
for _name, (_signature, _function) in SHORT.items():
    for _kind, _type in (("h", "f16"), ("f", "f32")):
        define(f"{_name}_{_type}", _signature.replace("x", _kind), _function)
for _name, _function in TERNARY.items():
    define(f"{_name}_f32", "fff>f", _function)
    define(f"{_name}_f16", "hhh>h", _function, halves=True)
for _name, (_signature, _function) in SINGLE.items():
    define(_name, _signature, _function)
define("v_fma_f16", "hhh>h", fma16, halves=True)


@handles("v_fmac_f32", "v_fmac_f16", "v_fmac_f64")
def accumulate(w: Group, i: Instruction) -> None:
    """D = S0 * S1 + D."""
    kind, function = {"f32": ("f", fma), "f16": ("h", fma16), "f64": ("d", fma64)}[i.name[-3:]]
    refuse(i, DPP | SDWA | OUTPUT if kind != "d" else DPP | OUTPUT)
    a, b, c = (read(w, i, k, kind) for k in (1, 2, 0))
    with np.errstate(all="ignore"):
        write(w, i, function(a, b, c), kind)
