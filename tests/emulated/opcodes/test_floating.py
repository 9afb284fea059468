"""Float vector instructions against exact arithmetic on fractions, rounded once, with edge values throughout."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulated_one import run_one, s64, v64

import portable.platform.emulated.compares
import portable.platform.emulated.division
import portable.platform.emulated.floating  # noqa: F401  (they enter their handlers)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the statements, on NaN and infinity

WAVES = 8
EXEC = 0xFF00_1234_FFFF_8001
TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
BITS = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def edges(kind):
    """Values at every end of a type, and some between."""
    dtype = TYPES[kind]
    info = np.finfo(dtype)
    least, tiny, top = info.smallest_subnormal, info.tiny, info.max
    positive = [
        0,
        least,
        tiny - least,
        tiny,
        tiny * 1.5,
        info.eps,
        0.3,
        0.5,
        1,
        1 + info.eps,
        1.5,
        2.5,
        3,
        100.75,
        top / 2,
    ]
    values = np.array([*positive, top, np.inf, np.nan], dtype)
    return np.concatenate([values, -values])


def draws(kind, count, seed):
    """Edge values and random bits, [count][WAVES, 64]."""
    random = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        values = random.choice(edges(kind), (WAVES, 64))
        noise = random.integers(0, np.iinfo(BITS[kind]).max, (WAVES, 64), BITS[kind], endpoint=True).view(TYPES[kind])
        result.append(np.where(random.random((WAVES, 64)) < 0.4, noise, values))
    return result


def run(text, kind, sources, **kw):
    """Sources in v[0:1], v[2:3], v[4:5]; the result from v[8:9]."""
    state = run_one(text, {2 * k: source for k, source in enumerate(sources)}, waves=WAVES, **kw)
    if kind == "f64":
        return v64(state, 8).view(np.float64)
    return (state.v[8].astype(np.uint16) if kind == "f16" else np.ascontiguousarray(state.v[8])).view(TYPES[kind])


def registers(kind, count):
    return ", ".join(f"v[{2 * k}:{2 * k + 1}]" if kind == "f64" else f"v{2 * k}" for k in range(count))


def same(result, expected, kind):
    """Bit for bit, any NaN being like any other."""
    expected = np.asarray(expected, TYPES[kind])
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(result), nan)
    np.testing.assert_array_equal(result.view(BITS[kind])[~nan], expected.view(BITS[kind])[~nan])


def target(kind):
    return "v[8:9]" if kind == "f64" else "v8"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["add", "mul", "sub", "subrev", "min", "max"])
def test_two_operands(name, kind):
    if kind == "f64" and name in ("sub", "subrev"):
        return  # no such instruction
    a, b = draws(kind, 2, 1)

    def least(x, y):
        if math.isnan(x) or math.isnan(y):
            return y if math.isnan(x) else x
        return min((x, math.copysign(1, x)), (y, math.copysign(1, y)))[0]

    with np.errstate(all="ignore"):
        statement = {
            "add": lambda: a + b,
            "mul": lambda: a * b,
            "sub": lambda: a - b,
            "subrev": lambda: b - a,
            "min": lambda: np.vectorize(least)(a.astype(float), b.astype(float)),
            "max": lambda: -np.vectorize(least)(-a.astype(float), -b.astype(float)),
        }[name]
        same(run(f"v_{name}_{kind} {target(kind)}, {registers(kind, 2)}", kind, (a, b)), statement(), kind)


def nearest(exact, dtype):
    """A fraction rounded once, to nearest even, from its definition."""
    info = np.finfo(dtype)
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    exponent += 1 if Fraction(2) ** (exponent + 1) <= size else 0
    exponent -= 1 if Fraction(2) ** exponent > size else 0
    quantum = Fraction(2) ** (max(exponent, int(info.minexp)) - info.nmant)
    rounded = round(size / quantum) * quantum
    value = math.inf if rounded > Fraction(float(info.max)) else float(rounded)
    return math.copysign(value, exact)


@pytest.mark.parametrize("kind", TYPES)
def test_fused_multiply_add_rounds_once(kind):
    a, b, c = draws(kind, 3, 2)
    dtype = TYPES[kind]
    with np.errstate(all="ignore"):  # close cancellations, which only the exact product decides
        c[:, ::3] = -(a * b)[:, ::3]
        # A product that is half way between two numbers, and a c that is too small for the sum in float64.
        a[:4, 1::6], b[:4, 1::6] = (
            dtype(1 + 2.0 ** -(np.finfo(dtype).nmant // 2 + 1)),
            dtype(1 + 2.0 ** -(np.finfo(dtype).nmant // 2 + 1)),
        )
        c[:4, 1::6] = np.resize([np.finfo(dtype).tiny, -np.finfo(dtype).tiny, 0], c[:4, 1::6].shape)
    if kind == "f64":  # the products that the exact algorithm covers
        a, b, c = (
            np.where(np.abs(x) > 1e140, dtype(1.25), np.where(np.abs(x) < 1e-140, dtype(0), x)) for x in (a, b, c)
        )
        c[0, :8] = [1e-30, -1e-30, 2.0**-53, -(2.0**-53), 2.0**-54, 1e-17, 3e-17, 0]

    def statement(x, y, z):
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            with np.errstate(all="ignore"):
                return float(np.float64(x) * np.float64(y) + np.float64(z))
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        return nearest(exact, dtype) if exact else x * y + z

    result = run(f"v_fma_{kind} {target(kind)}, {registers(kind, 3)}", kind, (a, b, c))
    expected = np.vectorize(statement, otypes=[np.float64])(*(x.astype(float) for x in (a, b, c)))
    zero = expected == 0  # the sign of an exact zero is numpy's business
    same(np.where(zero, dtype(0), result), np.where(zero, 0, expected), kind)


@pytest.mark.parametrize("kind", TYPES)
def test_accumulating_into_the_destination(kind):
    a, b, c = draws(kind, 3, 14)
    if kind == "f64":
        a, b, c = (np.where(np.abs(x) < 1e140, x, 2.5) for x in (a, b, c))
    fused = run(f"v_fma_{kind} {target(kind)}, {registers(kind, 3)}", kind, (a, b, c))
    text = f"v_fmac_{kind} {target(kind)}, {registers(kind, 2)}"
    state = run_one(text, {0: a, 2: b, 8: c}, waves=WAVES)
    result = v64(state, 8) if kind == "f64" else state.v[8]
    same(result.astype(BITS[kind]).view(TYPES[kind]), fused, kind)


def test_a_zero_makes_the_legacy_product_zero():
    a, b = draws("f32", 2, 15)
    expected = np.where((a == 0) | (b == 0), np.float32(0), a * b)
    same(run("v_mul_legacy_f32 v8, v0, v2", "f32", (a, b)), expected, "f32")


@pytest.mark.parametrize("name", ["rcp", "rsq", "sqrt"])
def test_double_roots_and_reciprocals(name):
    (a,) = draws("f64", 1, 16)
    result = run(f"v_{name}_f64 v[8:9], v[0:1]", "f64", (a,))
    np.testing.assert_allclose(result, TRANSCENDENTAL[name](a), rtol=1e-14)


def test_accumulating_and_constant_forms():
    a, b, c = draws("f32", 3, 3)
    fused = run("v_fma_f32 v8, v0, v2, v4", "f32", (a, b, c))
    state = run_one("v_fmac_f32_e32 v4, v0, v2", {0: a, 2: b, 4: c}, waves=WAVES)
    same(np.ascontiguousarray(state.v[4]).view(np.float32), fused, "f32")
    fused = run("v_fma_f32 v8, v0, 0x40490fdb, v4", "f32", (a, b, c))
    same(run("v_fmamk_f32 v8, v0, 0x40490fdb, v4", "f32", (a, b, c)), fused, "f32")
    fused = run("v_fma_f32 v8, v0, v2, 0x40490fdb", "f32", (a, b, c))
    same(run("v_fmaak_f32 v8, v0, v2, 0x40490fdb", "f32", (a, b, c)), fused, "f32")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["rndne", "floor", "ceil", "trunc", "fract", "frexp_mant", "frexp_exp"])
def test_one_operand(name, kind):
    (a,) = draws(kind, 1, 4)
    values = a.astype(float)
    finite = np.isfinite(values)
    if name == "frexp_exp":
        suffix = {"f16": "i16_f16", "f32": "i32_f32", "f64": "i32_f64"}[kind]
        state = run_one(f"v_frexp_exp_{suffix} v8, {registers(kind, 1)}", {0: a}, waves=WAVES)
        expected = np.where(finite, np.vectorize(lambda x: math.frexp(x)[1])(values), 0)
        np.testing.assert_array_equal(
            state.v[8], expected.astype(np.int32).astype(np.uint32) & (0xFFFF if kind == "f16" else 0xFFFFFFFF)
        )
        return
    with np.errstate(all="ignore"):
        expected = {
            "rndne": lambda: np.rint(values),
            "floor": lambda: np.floor(values),
            "ceil": lambda: np.ceil(values),
            "trunc": lambda: np.trunc(values),
            "fract": lambda: np.minimum(values - np.floor(values), 1 - np.finfo(TYPES[kind]).epsneg),
            "frexp_mant": lambda: np.where(finite, np.vectorize(lambda x: math.frexp(x)[0])(values), values),
        }[name]()
    suffix = kind
    same(run(f"v_{name}_{suffix} {target(kind)}, {registers(kind, 1)}", kind, (a,)), expected, kind)


TRANSCENDENTAL = {
    "rcp_iflag": lambda x: 1 / x,
    "exp": np.exp2,
    "log": np.log2,
    "rcp": lambda x: 1 / x,
    "rsq": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": lambda x: np.where(np.abs(x) > 256, np.where(np.isinf(x), np.nan, 0), np.sin(2 * np.pi * x)),
    "cos": lambda x: np.where(np.abs(x) > 256, np.where(np.isinf(x), np.nan, 1), np.cos(2 * np.pi * x)),
}


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendental_to_two_units_flushing_denormals(name):
    (a,) = draws("f32", 1, 5)
    result = run(f"v_{name}_f32 v8, v0", "f32", (a,)).astype(np.float64)
    tiny = 2.0**-126
    source = np.where(np.abs(a) < tiny, np.copysign(0, a), a).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = TRANSCENDENTAL[name](source)
        expected = np.where(np.abs(expected) < tiny, np.copysign(0, expected), expected)
        single = expected.astype(np.float32).astype(np.float64)
        expected = np.where(np.isinf(single), single, expected)
        close = np.abs(result - expected) <= 2.0**-22 * np.abs(expected) + (
            1e-7 if name in ("sin", "cos", "log") else tiny
        )
    assert (close | (result == expected) | (np.isnan(result) & np.isnan(expected))).all()


@pytest.mark.parametrize("name", ["exp", "log", "rcp", "rsq", "sqrt", "sin", "cos"])
def test_half_transcendental_within_one_step(name):
    (a,) = draws("f16", 1, 6)
    result = run(f"v_{name}_f16 v8, v0", "f16", (a,))
    with np.errstate(all="ignore"):
        expected = TRANSCENDENTAL[name](a.astype(np.float64)).astype(np.float16)
        steps = np.abs(result.view(np.int16).astype(int) - expected.view(np.int16))
        near = np.abs(result.astype(float) - expected) < 1e-15  # sines of whole turns
    assert ((steps <= 1) | near | (np.isnan(result) & np.isnan(expected))).all()


def test_ldexp_at_every_end():
    (a,) = draws("f32", 1, 7)
    power = np.random.default_rng(8).choice(
        np.array([0, 1, -1, 64, -64, 127, -126, -149, -160, 300, -300], np.int32), a.shape
    )
    result = run("v_ldexp_f32 v8, v0, v2", "f32", (a, power))
    with np.errstate(all="ignore"):
        expected = np.ldexp(a.astype(np.float64), power).astype(np.float32)
    same(result, expected, "f32")
    (d,) = draws("f64", 1, 17)
    expected = np.vectorize(lambda x, p: np.ldexp(x, int(p)))(d, power)
    same(run("v_ldexp_f64 v[8:9], v[0:1], v2", "f64", (d, power)), expected, "f64")
    (h,) = draws("f16", 1, 9)
    result = run("v_ldexp_f16 v8, v0, v2", "f16", (h, np.clip(power, -40, 40).astype(np.int16)))
    with np.errstate(all="ignore"):
        same(result, np.ldexp(h.astype(np.float64), np.clip(power, -40, 40)).astype(np.float16), "f16")


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_three_operand_extremes(kind):
    sources = draws(kind, 3, 10)

    def least(*values):
        numbers = [x for x in values if not math.isnan(x)]
        return min(numbers, key=lambda x: (x, math.copysign(1, x))) if numbers else math.nan

    def greatest(*values):
        return -least(*(-x for x in values))

    def median(*values):
        if any(map(math.isnan, values)):
            return least(*values)
        return sorted(values, key=lambda x: (x, math.copysign(1, x)))[1]

    for name, statement in (("min3", least), ("max3", greatest), ("med3", median)):
        expected = np.vectorize(statement, otypes=[float])(*(s.astype(float) for s in sources))
        same(run(f"v_{name}_{kind} v8, v0, v2, v4", kind, sources), expected, kind)
    if kind == "f32":
        for name, function in (("minimum3", np.minimum), ("maximum3", np.maximum)):
            result = run(f"v_{name}_f32 v8, v0, v2, v4", kind, sources, arch="gfx950")
            np.testing.assert_array_equal(result, function(function(*sources[:2]), sources[2]))


def test_half_results_clear_or_keep_the_upper_half():
    a, b, c = draws("f16", 3, 11)
    old = np.full((WAVES, 64), np.uint32(0xABCD1234))
    high = {0: a.view(np.uint16).astype(np.uint32) << 16, 2: b, 4: c, 8: old, 9: old}
    text = "v_add_f16_e32 v8, v2, v4\nv_fma_f16 v9, v0, v2, v4 op_sel:[1,0,0,1]"
    state = run_one(text, high, waves=WAVES)
    assert (state.v[8] >> 16 == 0).all()
    assert (state.v[9] & 0xFFFF == 0x1234).all()
    with np.errstate(all="ignore"):
        expected = (a.astype(float) * b + c).astype(np.float16)
    same((state.v[9] >> 16).astype(np.uint16).view(np.float16), expected, "f16")
    sdwa = run_one(
        "v_add_f16_sdwa v8, v0, -v2 src0_sel:WORD_1 src1_sel:DWORD dst_sel:WORD_1 dst_unused:UNUSED_PAD",
        high,
        waves=WAVES,
    )
    with np.errstate(all="ignore"):
        same((sdwa.v[8] >> 16).astype(np.uint16).view(np.float16), a - b, "f16")


def test_signs_factors_clamp_and_partial_exec():
    a, b = draws("f32", 2, 12)
    old = np.full((WAVES, 64), np.float32(7))
    state = run_one("v_mul_f32_e64 v8, -|v0|, v2 mul:4 clamp", {0: a, 2: b, 8: old}, exec_mask=EXEC, waves=WAVES)
    with np.errstate(all="ignore"):
        product = -np.abs(a) * b * np.float32(4)
    expected = np.where(np.isnan(product), 0, np.clip(product, 0, 1))
    active = np.array([EXEC >> k & 1 for k in range(64)], bool)
    np.testing.assert_array_equal(state.v[8].view(np.float32), np.where(active, expected, old))


@pytest.mark.parametrize("kind", TYPES)
def test_compares(kind):
    a, b = draws(kind, 2, 13)
    a[:, ::4] = b[:, ::4]
    unordered = np.isnan(a) | np.isnan(b)
    with np.errstate(all="ignore"):
        ordered = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "lg": ~unordered & (a != b)}
    ordered["o"], ordered["f"] = ~unordered, np.zeros_like(unordered)
    negated = {f"n{name}": ~value for name, value in ordered.items() if name not in "of"}
    for name, value in {**ordered, **negated, "u": unordered, "tru": ~ordered["f"]}.items():
        expected = [sum(int(bit) << k for k, bit in enumerate(row)) & EXEC for row in value]
        for form in ("v_cmp", "v_cmpx"):
            text = f"{form}_{name}_{kind} s[2:3], {registers(kind, 2)}"
            state = run_one(text, {0: a, 2: b}, exec_mask=EXEC, waves=WAVES)
            assert s64(state, "s[2:3]") == expected
            assert s64(state, "exec") == (expected if form == "v_cmpx" else [EXEC] * WAVES)


@pytest.mark.parametrize("kind", TYPES)
def test_classes(kind):
    info, bits = np.finfo(TYPES[kind]), BITS[kind]
    quiet = int(np.array(np.inf, TYPES[kind]).view(bits)) | 1 << info.nmant - 1
    signalling = int(np.array(np.inf, TYPES[kind]).view(bits)) | 1
    positive = [np.array(x, TYPES[kind]).view(bits) for x in (0, info.smallest_subnormal, info.tiny, np.inf)]
    sign = 1 << 8 * info.dtype.itemsize - 1
    examples = [signalling, quiet, *(int(x) | sign for x in reversed(positive)), *map(int, positive)]
    values = np.resize(np.array(examples, bits), (WAVES, 64))
    wanted = np.repeat(1 << np.arange(WAVES, dtype=np.uint32), 64).reshape(WAVES, 64)
    for shift in (0, 2):
        state = run_one(
            f"v_cmp{'x' if shift else ''}_class_{kind} s[2:3], {registers(kind, 1)}, v2",
            {0: values, 2: wanted << shift},
            waves=WAVES,
        )
        for wave in range(WAVES):
            assert s64(state, "s[2:3]")[wave] == sum(1 << k for k in range(64) if (64 * wave + k) % 10 == wave + shift)


DIVISION = """
v_div_scale_f32 v10, s[0:1], v2, v2, v0
v_rcp_f32_e32 v11, v10
v_div_scale_f32 v12, vcc, v0, v2, v0
v_fma_f32 v13, -v10, v11, 1.0
v_fma_f32 v11, v13, v11, v11
v_mul_f32_e32 v14, v12, v11
v_fma_f32 v13, -v10, v14, v12
v_fma_f32 v14, v13, v11, v14
v_fma_f32 v13, -v10, v14, v12
v_div_fmas_f32 v15, v13, v11, v14
v_div_fixup_f32 v8, v15, v2, v0
"""


@pytest.mark.parametrize("seed", range(4))
def test_the_division_sequence_is_correctly_rounded(seed):
    a, b = draws("f32", 2, 20 + seed)
    with np.errstate(all="ignore"):
        if seed == 1:  # quotients near the ends of the range
            b = np.where(np.isfinite(b) & (b != 0), np.clip(a * np.float32(2.0**-127), -1e38, 1e38), b).astype(
                np.float32
            )
        if seed == 2:
            b = np.where(np.abs(b) < 1, np.float32(1.7e38), b)
        expected = (a.astype(np.float64) / b).astype(np.float32)
        exact = np.vectorize(
            lambda x, y: (
                nearest(Fraction(x) / Fraction(y), np.float32)
                if y and math.isfinite(x) and math.isfinite(y) and x
                else np.float32(x) / np.float32(y)
            )
        )
        expected = exact(a.astype(float), b.astype(float)).astype(np.float32)
    same(run(DIVISION, "f32", (a, b)), expected, "f32")


def test_division_fixup_of_halves():
    q, b, a = draws("f16", 3, 30)
    result = run("v_div_fixup_f16 v8, v0, v2, v4", "f16", (q, b, a))
    with np.errstate(all="ignore"):
        quotient = a.astype(float) / b.astype(float)
    special = ~np.isfinite(a) | ~np.isfinite(b) | (a == 0) | (b == 0)
    sign = np.signbit(a) ^ np.signbit(b)
    same(result, np.where(special, quotient, np.where(sign, -np.abs(q), np.abs(q))), "f16")


@pytest.mark.parametrize(
    "text",
    [
        "v_add_f32_e64 v0, v1, v2 op_sel:[1,0,0]",
        "v_div_scale_f32 v0, vcc, v1, v2, v3 clamp",
        "v_add_f32_e64 v0, sext(v1), v2",
    ],
)
def test_what_is_not_emulated_raises(text):
    with pytest.raises((NotImplementedError, KeyError)):
        run_one(text)
