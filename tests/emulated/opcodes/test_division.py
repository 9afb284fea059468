"""Division, multiply-add and angles of float64, against fractions.

The steps and their scales are those of AMD's CDNA4 manual; where it prints a factor of v_div_fmas that cannot undo the
scale of v_div_scale (2**64 against 2**128), this follows tinygrad's correction of RDNA's manual: 2**128 for sources of
2 or more, 2**-128 below. The sequence is the one that compilers emit.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulated_one import run_one, v64

import portable.platform.emulated.division
import portable.platform.emulated.floating  # noqa: F401  (both enter their handlers)

WAVES = 4
SHAPE = (WAVES, 64)
EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 1.0, -3.0]
DIVISION = """
v_div_scale_f64 v[10:11], s[0:1], v[2:3], v[2:3], v[0:1]
v_rcp_f64_e32 v[12:13], v[10:11]
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_div_scale_f64 v[14:15], vcc, v[0:1], v[2:3], v[0:1]
v_mul_f64 v[16:17], v[14:15], v[12:13]
v_fma_f64 v[10:11], -v[10:11], v[16:17], v[14:15]
v_div_fmas_f64 v[10:11], v[10:11], v[12:13], v[16:17]
v_div_fixup_f64 v[8:9], v[10:11], v[2:3], v[0:1]
"""


def drawn(seed, count, low=-1074, high=1024):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size = np.ldexp(rng.uniform(1, 2, SHAPE), rng.integers(low, high, SHAPE))
        yield np.where(rng.random(SHAPE) < 0.1, rng.choice(EDGES, SHAPE), size * rng.choice([-1, 1], SHAPE))


def same(got, expected):
    """Bit for bit, NaN as NaN."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    differ = (got.view(np.uint64) != expected.view(np.uint64)) & ~(np.isnan(got) & np.isnan(expected))
    assert not differ.any(), (got[differ][:3], expected[differ][:3])


@pytest.mark.parametrize("seed", range(6))
def test_the_division_sequence_is_correctly_rounded(seed):
    a, b = drawn(seed, 2)
    if seed == 1:  # quotients near the least numbers
        b = np.ldexp(b, np.minimum(np.frexp(a)[1] + 1060, 1023) - np.frexp(b)[1])
    if seed == 2:  # and near the largest
        b = np.ldexp(b, np.maximum(np.frexp(a)[1] - 1023, -1073) - np.frexp(b)[1])
    state = run_one(DIVISION, {0: a, 2: b}, waves=WAVES)
    with np.errstate(all="ignore"):
        same(v64(state, 8).view(np.float64), a / b)


@pytest.mark.parametrize("seed", range(4))
def test_multiply_add_rounds_once(seed):
    a, b, c = drawn(seed, 3)
    if seed % 2:  # sums that cancel
        with np.errstate(all="ignore"):
            c = -(a * b) * (1 + np.random.default_rng(seed).integers(-3, 3, SHAPE) * 2.0**-52)
    state = run_one("v_fma_f64 v[8:9], v[0:1], v[2:3], v[4:5]", {0: a, 2: b, 4: c}, waves=WAVES)

    def exact(x, y, z):
        total = Fraction(x) * Fraction(y) + Fraction(z) if np.isfinite([x, y, z]).all() else 0
        if not total:
            return z if np.isinf(z) and np.isfinite(x) and np.isfinite(y) else x * y + z
        try:
            return total.numerator / total.denominator
        except OverflowError:
            return math.inf if total > 0 else -math.inf

    with np.errstate(all="ignore"):
        same(v64(state, 8).view(np.float64), np.vectorize(exact)(a, b, c))


def test_the_scale_is_undone_before_rounding():
    rng = np.random.default_rng(3)
    a, b = rng.uniform(-2, 2, (2, *SHAPE))
    c = np.ldexp(rng.uniform(1, 2, SHAPE), rng.integers(-940, -930, SHAPE))  # denormal after 2**-128
    state = run_one(
        "v_div_fmas_f64 v[8:9], v[0:1], v[2:3], v[4:5]",
        {0: np.ldexp(a, -990), 2: b, 4: c},
        {"vcc": 0xF0F0F0F0F0F0F0F0},
        waves=WAVES,
    )
    lane = np.arange(64) & 4 != 0
    exact = np.vectorize(
        lambda x, y, z, scaled: (
            float(Fraction(x) * Fraction(y) + Fraction(z) if not scaled else 0)
            or float((Fraction(x) * Fraction(y) + Fraction(z)) / 2**128)
        )
    )(np.ldexp(a, -990), b, c, np.broadcast_to(lane, SHAPE))
    same(v64(state, 8).view(np.float64), exact)


@pytest.mark.parametrize("exponent", [0, 60, 500, 1023])
def test_segments_of_two_over_pi(exponent):
    """Segment k holds 53 bits from bit 53 k on; sources above 2**54 shift by what they exceed it."""
    x = np.full(SHAPE, 1.25 * 2.0**exponent)
    number = np.broadcast_to(np.arange(64, dtype=np.uint32), SHAPE)
    state = run_one("v_trig_preop_f64 v[4:5], v[0:1], v2", {0: x, 2: number}, waves=WAVES)
    parts = v64(state, 4).view(np.float64)[0]
    shift = max(exponent + 1023 - 1077, 0)
    total = sum(Fraction(part) for part in parts[:12])  # 636 bits after the shift
    total = total / 2**128 if exponent + 1023 >= 1968 else total
    # 2 / pi less the bits before the shift, from pi by Gauss and Legendre
    pi = gauss_legendre(1900)
    whole = (2 << 1900 + 1900) // pi
    rest = whole - (whole >> 1900 - shift << 1900 - shift)
    ends = min(shift + 630, 1200, 1074 + (128 if exponent + 1023 >= 1968 else 0))  # of the 12, of the table, of float64
    assert abs(total - Fraction(rest, 1 << 1900)) < Fraction(2, 1 << ends)
    same(parts[32:], parts[:32])  # five bits of S1 count


def gauss_legendre(digits):
    """pi * 2**digits."""
    a, t, p = 1 << digits, 1 << digits - 2, 1
    b = math.isqrt(1 << 2 * digits - 1)
    for _ in range(11):
        mean = a + b >> 1
        b, t = math.isqrt(a * b), t - (p * (a - mean) ** 2 >> digits)
        a, p = mean, 2 * p
    return (a + b) ** 2 // (4 * t)
