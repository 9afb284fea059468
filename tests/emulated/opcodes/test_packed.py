"""Packed, dot and mixed instructions against float64 and Python integers, with every choice of halves and signs."""

import itertools

import numpy as np
import pytest
from emulated_one import run_one, v64

import portable.platform.emulated.packed  # noqa: F401  (enters its handlers)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the statements, on NaN and infinity

WAVES = 4
EXEC = 0xFF00_1234_FFFF_8001
EDGES = [
    0,
    1,
    2,
    15,
    16,
    0x7F,
    0x80,
    0xFF,
    0x3FF,
    0x400,
    0x3C00,
    0x7BFF,
    0x7C00,
    0x7E00,
    0x7FFF,
    0x8000,
    0x8001,
    0xBC00,
    0xFBFF,
]
EDGES += [0xFC00, 0xFFFF, 0x3555, 0xC500, 0x6400]
CHOICES = [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)]


def draws(seed, count):
    """Registers of two 16-bit edge values."""
    random = np.random.default_rng(seed)
    return [
        (random.choice(EDGES, (WAVES, 64)) | random.choice(EDGES, (WAVES, 64)) << 16).astype(np.uint32)
        for _ in range(count)
    ]


def singles(seed, count):
    """float32 edge values, and pairs of them in uint64."""
    random = np.random.default_rng(seed)
    values = np.array([0, 1, 1.5, 1e-40, 3e38, np.inf, np.nan, 0.1, 1 / 3, 2.0**-126], np.float32)
    signs = np.array([1, -1], np.float32)
    draw = lambda: random.choice(values, (WAVES, 64)) * random.choice(signs, (WAVES, 64))  # noqa: E731
    pairs = [(draw(), draw()) for _ in range(count)]
    return pairs, [
        low.view(np.uint32).astype(np.uint64) | high.view(np.uint32).astype(np.uint64) << np.uint64(32)
        for low, high in pairs
    ]


def half(register, high):
    return (register >> np.uint32(16 * high)).astype(np.uint16)


def same(result, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(result), nan)
    bits = f"u{expected.dtype.itemsize}"
    np.testing.assert_array_equal(result.view(bits)[~nan], expected.view(bits)[~nan])


def modifiers(count, low, high, neg_low=(0, 0, 0), neg_high=(0, 0, 0)):
    lists = {"op_sel": low, "op_sel_hi": high, "neg_lo": neg_low, "neg_hi": neg_high}
    return "".join(
        f" {name}:[{','.join(map(str, value[:count]))}]"
        for name, value in lists.items()
        if name[:2] == "op" or any(value)
    )


FLOATS = {
    "add": (2, lambda a, b: a + b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
    "min": (2, np.fmin),
    "max": (2, np.fmax),
    "minimum3": (3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "maximum3": (3, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_halves_of_floats(name):
    count, statement = FLOATS[name]
    sources = draws(1, count)
    for low, high in itertools.product(CHOICES, CHOICES):
        signs = (low, high) if name in ("add", "fma") else ((0, 0, 0), (0, 0, 0))
        operands = ", ".join(f"v{k}" for k in range(count))
        text = f"v_pk_{name}_f16 v8, {operands}{modifiers(count, low, high, *signs)}"
        state = run_one(text, dict(enumerate(sources)), waves=WAVES, arch="gfx950")
        for part, choice, negative in ((0, low, signs[0]), (1, high, signs[1])):
            halves = [
                half(s, choice[k]).view(np.float16) * np.float16(-1 if negative[k] else 1)
                for k, s in enumerate(sources)
            ]
            with np.errstate(all="ignore"):
                expected = statement(*(x.astype(np.float64) for x in halves)).astype(np.float16)
            result = half(state.v[8], part).view(np.float16)
            if name[:2] in ("mi", "ma"):  # the order of zeros has its test in test_floating
                expected, result = expected + np.float16(0), result + np.float16(0)
            same(result, expected)


def sx(value):
    return value.astype(np.uint16).view(np.int16).astype(np.int64)


INTEGERS = {
    "add_u16": (2, lambda a, b: a + b),
    "sub_u16": (2, lambda a, b: a - b),
    "add_i16": (2, lambda a, b: sx(a) + sx(b)),
    "sub_i16": (2, lambda a, b: sx(a) - sx(b)),
    "mul_lo_u16": (2, lambda a, b: a * b),
    "mad_u16": (3, lambda a, b, c: a * b + c),
    "mad_i16": (3, lambda a, b, c: sx(a) * sx(b) + sx(c)),
    "min_u16": (2, np.minimum),
    "max_u16": (2, np.maximum),
    "min_i16": (2, lambda a, b: np.minimum(sx(a), sx(b))),
    "max_i16": (2, lambda a, b: np.maximum(sx(a), sx(b))),
    "lshlrev_b16": (2, lambda a, b: b << (a & 15)),
    "lshrrev_b16": (2, lambda a, b: b >> (a & 15)),
    "ashrrev_i16": (2, lambda a, b: sx(b) >> (a & 15)),
}


@pytest.mark.parametrize("clamp", ["", " clamp"])
@pytest.mark.parametrize("name", INTEGERS)
def test_halves_of_integers(name, clamp):
    count, statement = INTEGERS[name]
    sources = draws(2, count)
    operands = ", ".join(f"v{k}" for k in range(count))
    text = f"v_pk_{name} v8, {operands}{modifiers(count, (0, 1, 0), (1, 0, 1))}{clamp}"
    if clamp and name[:3] not in ("add", "sub", "mad"):
        with pytest.raises(NotImplementedError, match="clamp"):
            run_one(text)
        return
    state = run_one(
        text, {**dict(enumerate(sources)), 8: np.full((WAVES, 64), np.uint32(9))}, exec_mask=EXEC, waves=WAVES
    )
    active = np.array([EXEC >> k & 1 for k in range(64)], bool)
    expected = np.zeros((WAVES, 64), np.uint32)
    for part, choice in ((0, (0, 1, 0)), (1, (1, 0, 1))):
        value = statement(*(half(s, choice[k]).astype(np.int64) for k, s in enumerate(sources)))
        if clamp:
            value = np.clip(value, *((-32768, 32767) if "_i16" in name else (0, 65535)))
        expected |= (value & 0xFFFF).astype(np.uint32) << np.uint32(16 * part)
    np.testing.assert_array_equal(state.v[8], np.where(active, expected, 9))


def test_constants_fill_the_low_half():
    (a,) = draws(3, 1)
    text = "v_pk_add_u16 v4, v0, 15 op_sel_hi:[1,0]\nv_pk_add_u16 v5, v0, 15\nv_pk_mul_f16 v6, v0, 2.0 op_sel_hi:[1,0]"
    state = run_one(text, {0: a}, waves=WAVES)
    low, high = half(a, 0).astype(np.uint32), half(a, 1).astype(np.uint32)
    np.testing.assert_array_equal(state.v[4], (low + 15 & 0xFFFF) | (high + 15 & 0xFFFF) << 16)
    np.testing.assert_array_equal(state.v[5], (low + 15 & 0xFFFF) | high << 16)
    for part in range(2):
        with np.errstate(all="ignore"):
            same(half(state.v[6], part).view(np.float16), half(a, part).view(np.float16) * np.float16(2))


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_pairs_of_singles(name):
    count, statement = FLOATS[name]
    pairs, registers = singles(4, count)
    for low, high in itertools.product(CHOICES, CHOICES):
        operands = ", ".join(f"v[{2 * k}:{2 * k + 1}]" for k in range(count))
        text = f"v_pk_{name}_f32 v[8:9], {operands}{modifiers(count, low, high, high, low)}"
        state = run_one(text, {2 * k: r for k, r in enumerate(registers)}, waves=WAVES)
        for part, choice, negative in ((0, low, high), (1, high, low)):
            with np.errstate(all="ignore"):
                values = [(-1.0 if negative[k] else 1.0) * pairs[k][choice[k]].astype(np.float64) for k in range(count)]
                expected = statement(*values).astype(np.float32)
            same(np.ascontiguousarray(state.v[8 + part]).view(np.float32), expected)


def test_pair_moves_and_a_destination_among_the_sources():
    _, (a, b) = singles(5, 2)
    low = lambda x: x & np.uint64(0xFFFFFFFF)  # noqa: E731
    high = lambda x: x >> np.uint64(32)  # noqa: E731
    shift = np.uint64(32)
    state = run_one("v_pk_mov_b32 v[0:1], v[0:1], v[2:3] op_sel:[1,0]", {0: a, 2: b}, waves=WAVES)
    np.testing.assert_array_equal(v64(state, 0), high(a) | low(b) << shift)
    state = run_one("v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]", {0: a}, waves=WAVES)
    np.testing.assert_array_equal(v64(state, 0), high(a) | low(a) << shift)
    state = run_one(
        "v_pk_add_f32 v[0:1], v[0:1], s[2:3] op_sel:[1,0] op_sel_hi:[0,0]", {0: a}, {2: 0, 3: 0}, waves=WAVES
    )
    same(np.ascontiguousarray(state.v[0]).view(np.float32), high(a).astype(np.uint32).view(np.float32) + np.float32(0))
    same(np.ascontiguousarray(state.v[1]).view(np.float32), low(a).astype(np.uint32).view(np.float32) + np.float32(0))


def test_packing_two_halves():
    a, b = draws(6, 2)
    state = run_one("v_pack_b32_f16 v8, v0, -|v1| op_sel:[1,0,0]", {0: a, 1: b}, waves=WAVES)
    np.testing.assert_array_equal(
        state.v[8], half(a, 1).astype(np.uint32) | (half(b, 0).astype(np.uint32) | 0x8000) << 16
    )


def test_mixed_multiply_add():
    a, b = draws(7, 2)
    ((c, _),) = singles(8, 1)[0]
    sources = {0: a, 1: b, 2: c, 5: a, 6: a}
    text = (
        "v_fma_mix_f32 v4, -v0, |v1|, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]\n"
        "v_fma_mixlo_f16 v5, v0, v1, neg(0) op_sel:[0,1,0] op_sel_hi:[1,1,0]\n"
        "v_fma_mixhi_f16 v6, v0, 1.0, v2 op_sel_hi:[1,1,0]"
    )
    state = run_one(text, sources, waves=WAVES)
    low = [half(x, 0).view(np.float16).astype(np.float64) for x in (a, b)]
    high = [half(x, 1).view(np.float16).astype(np.float64) for x in (a, b)]
    with np.errstate(all="ignore"):
        same(np.ascontiguousarray(state.v[4]).view(np.float32), (-high[0] * np.abs(low[1]) + c).astype(np.float32))
        same(half(state.v[5], 0).view(np.float16), (low[0] * high[1]).astype(np.float16))
        same(half(state.v[6], 1).view(np.float16), (low[0] + c.astype(np.float64)).astype(np.float16))
    np.testing.assert_array_equal(half(state.v[5], 1), half(a, 1))
    np.testing.assert_array_equal(half(state.v[6], 0), half(a, 0))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_dot_products_of_two(kind):
    """The CDNA4 manual adds S2 or D first, and last in v_dot2_f32_bf16."""
    random = np.random.default_rng(9)
    wide = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else bits.view(np.float16)  # noqa: E731
    a, b = (random.integers(0, 1 << 32, (WAVES, 64), np.uint32) & np.uint32(0xBFFFBFFF) for _ in range(2))
    c = random.standard_normal((WAVES, 64)).astype(np.float32)
    text = f"v_dot2_f32_{kind} v4, v0, v1, v2\nv_dot2c_f32_{kind} v2, v0, v1"
    state = run_one(text, {0: a, 1: b, 2: c}, waves=WAVES, arch="gfx950")
    exact = c.astype(np.float64) + sum(wide(half(a, k)).astype(np.float64) * wide(half(b, k)) for k in range(2))
    np.testing.assert_allclose(state.v[4].view(np.float32), exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.v[2].view(np.float32), exact, rtol=1e-5, atol=1e-5)
    one, huge = (0x3C003C00, 2.0**24) if kind == "f16" else (0x3F803F80, 2.0**24)
    ones = np.full((WAVES, 64), one, np.uint32)
    state = run_one(text, {0: ones, 1: ones, 2: np.full((WAVES, 64), huge, np.float32)}, waves=WAVES, arch="gfx950")
    assert set(state.v[2].view(np.float32).ravel()) == {huge}  # 1 is lost twice
    assert set(state.v[4].view(np.float32).ravel()) == {huge if kind == "f16" else huge + 2}


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("sign", ["i", "u"])
def test_dot_products_of_other_widths(bits, sign):
    random = np.random.default_rng(11)
    a, b, c = (random.integers(0, 1 << 32, (WAVES, 64), np.uint32) for _ in range(3))
    a[:, 0], b[:, 0] = 0x80008000, 0x80008000
    count, word = 32 // bits, np.int32 if sign == "i" else np.uint32
    name = f"{count}_{sign}32_{sign}{bits}"
    text = f"v_dot{name} v4, v0, v1, v2\nv_dot{name} v5, v0, v1, v2 clamp"
    if sign == "i":
        text += f"\nv_dot{count}c_i32_i{bits} v2, v0, v1"
    state = run_one(text, {0: a, 1: b, 2: c}, waves=WAVES)

    def part(value, k):
        field = value.astype(np.int64) >> bits * k & (1 << bits) - 1
        return field - ((field >> bits - 1) << bits) if sign == "i" else field

    exact = c.view(word) + sum(part(a, k) * part(b, k) for k in range(count))
    ends = np.iinfo(word)
    np.testing.assert_array_equal(state.v[4], (exact & 0xFFFFFFFF).astype(np.uint32))
    np.testing.assert_array_equal(state.v[5], (np.clip(exact, ends.min, ends.max) & 0xFFFFFFFF).astype(np.uint32))
    if sign == "i":
        np.testing.assert_array_equal(state.v[2], state.v[4])


@pytest.mark.parametrize("kind", ["i32_i8", "u32_u8"])
def test_dot_products_of_four(kind):
    random = np.random.default_rng(10)
    a, b, c = (random.integers(0, 1 << 32, (WAVES, 64), np.uint32) for _ in range(3))
    byte, word = (np.int8, np.int32) if kind[0] == "i" else (np.uint8, np.uint32)
    a[:, 0], b[:, 0], c[:, 0] = 0x7F7F7F7F, 0x7F7F7F7F, np.array(np.iinfo(word).max, word).view(np.uint32)
    text = f"v_dot4_{kind} v4, v0, v1, v2\nv_dot4_{kind} v5, v0, v1, v2 clamp"
    state = run_one(text, {0: a, 1: b, 2: c}, waves=WAVES)
    products = a.view(byte).reshape(WAVES, 64, 4).astype(np.int64) * b.view(byte).reshape(WAVES, 64, 4)
    exact = products.sum(-1) + c.view(word)
    np.testing.assert_array_equal(state.v[4], (exact & 0xFFFFFFFF).astype(np.uint32))
    if word is np.int32:
        state2 = run_one("v_dot4c_i32_i8 v2, v0, v1", {0: a, 1: b, 2: c}, waves=WAVES)
        np.testing.assert_array_equal(state2.v[2], state.v[4])
    ends = np.iinfo(word)
    np.testing.assert_array_equal(state.v[5], (np.clip(exact, ends.min, ends.max) & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.parametrize(
    "text",
    [
        "v_pk_add_u16 v0, v1, v2 neg_lo:[1,0]",
        "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]",
        "v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,0]",
        "v_dot4_i32_i8 v0, v1, v2, v3 neg_lo:[1,0,0]",
    ],
)
def test_what_is_not_emulated_raises(text):
    with pytest.raises(NotImplementedError, match="line"):
        run_one(text)
