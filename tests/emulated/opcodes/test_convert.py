"""Conversions against definitions: nearest code by search over all of them, integers by Python, halves by numpy."""

import functools
import itertools
import math

import numpy as np
import pytest
from emulated_one import run_one, v64

import portable.platform.emulated.control
import portable.platform.emulated.convert
import portable.platform.emulated.scaled  # noqa: F401  (they enter their handlers)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the statements, on NaN and infinity

WAVES = 8
SATURATE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
FLAVOURS = {("gfx942", "fp8"): "e4m3fnuz", ("gfx942", "bf8"): "e5m2fnuz"}
FLAVOURS |= {("gfx950", "fp8"): "e4m3fn", ("gfx950", "bf8"): "e5m2", ("gfx950", "fp4"): "e2m1"}
SHAPES = {"e4m3fnuz": (4, 3, 8), "e5m2fnuz": (5, 2, 16), "e4m3fn": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
NAN = {"e4m3fnuz": [0x80], "e5m2fnuz": [0x80], "e4m3fn": [0x7F, 0xFF], "e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]}


@functools.cache
def decoded(name):
    """Every code's value, from the format's definition."""
    exponent_bits, mantissa_bits, bias = SHAPES[name]
    size = 1 + exponent_bits + mantissa_bits
    result = []
    for code in range(1 << size):
        exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
        fraction = code % (1 << mantissa_bits) / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if name == "e5m2" and exponent == 31:
            value = math.inf
        if code in NAN.get(name, []):
            value = math.nan
        result.append(-value if code >> size - 1 else value)
    return np.array(result)


def encoded(value, name, saturate):
    """A set of right codes: of the nearest value, and of two, the even one."""
    table = decoded(name)
    codes = [k for k in range(len(table)) if math.isfinite(table[k])]
    half = len(table) // 2
    top = max(table[k] for k in codes)
    if math.isnan(value):
        return set(NAN.get(name, [half - 1, len(table) - 1]))
    sign = half if math.copysign(1, value) < 0 else 0
    largest = max(k for k in codes if k < half)
    step = top - table[largest - 1]
    if abs(value) >= top + step / 2:
        if saturate or name == "e2m1":
            return {sign + largest}
        return {sign + 0x7C} if name == "e5m2" else set(NAN[name])
    nearest = min(abs(abs(value) - table[k]) for k in codes if k < half)
    close = [k for k in codes if k < half and abs(abs(value) - table[k]) == nearest]
    code = close[0] if len(close) == 1 else next(k for k in close if k % 2 == 0)
    return {0 if code == 0 and name.endswith("fnuz") else sign + code}


def samples(name, seed):
    """Every value of a format, every midpoint and its neighbours, ends and specials, [WAVES, 64] float32."""
    table = np.unique(decoded(name)[np.isfinite(decoded(name))])
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    ends = np.array([np.inf, np.nan, 1e-40, 3e38, table[-1] * 1.05, table[-1] * 1.2, table[-1] * 2, 0.0], np.float32)
    around = [np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf)]
    pool = np.concatenate([table.astype(np.float32), middles, *around, ends, -ends])
    rows = np.concatenate([pool, np.random.default_rng(seed).choice(pool, 4 * WAVES * 64)])
    return rows[: -(len(rows) % (WAVES * 64)) or None].reshape(-1, WAVES, 64)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("arch", "kind"), [key for key in FLAVOURS if key[1] != "fp4"])
def test_packing_fp8(arch, kind, saturate):
    name = FLAVOURS[arch, kind]
    old = np.full((WAVES, 64), np.uint32(0x12345678))
    for values in samples(name, 1):
        text = f"v_cvt_pk_{kind}_f32 v4, v0, v1\nv_cvt_pk_{kind}_f32 v5, v0, -v1 op_sel:[0,0,1]"
        sources = {0: values, 1: values[::-1], 4: old, 5: old}
        state = run_one((SATURATE if saturate else "") + text, sources, waves=WAVES, arch=arch)
        assert (state.v[4] >> 16 == 0x1234).all() and (state.v[5] & 0xFFFF == 0x5678).all()
        right = np.vectorize(lambda x, code: int(code) in encoded(float(x), name, saturate))
        for source, codes in (
            (values, state.v[4] & 0xFF),
            (values[::-1], state.v[4] >> 8 & 0xFF),
            (values, state.v[5] >> 16 & 0xFF),
            (-values[::-1], state.v[5] >> 24),
        ):
            assert right(source, codes).all()


@pytest.mark.parametrize(("arch", "kind"), [key for key in FLAVOURS if key[1] != "fp4"])
def test_unpacking_every_code(arch, kind):
    table = decoded(FLAVOURS[arch, kind]).astype(np.float32)
    codes = np.arange(256, dtype=np.uint32).repeat(2).reshape(WAVES, 64)
    register = codes | (codes ^ 0xFF) << 8 | (codes ^ 0x55) << 16 | (codes ^ 0x81) << 24
    text = (
        f"v_cvt_f32_{kind}_e32 v4, v0\nv_cvt_f32_{kind}_sdwa v5, v0 src0_sel:BYTE_3\n"
        f"v_cvt_pk_f32_{kind}_e32 v[6:7], v0\nv_cvt_pk_f32_{kind}_sdwa v[8:9], v0 src0_sel:WORD_1\n"
        f"v_cvt_pk_f32_{kind}_e64 v[10:11], v0 op_sel:[1,0]"
    )
    state = run_one(text, {0: register}, waves=WAVES, arch=arch)
    for k, mask in ((4, 0), (5, 0x81), (6, 0), (7, 0xFF), (8, 0x55), (9, 0x81), (10, 0x55), (11, 0x81)):
        np.testing.assert_array_equal(state.v[k].view(np.float32), table[codes ^ mask])
        nan = np.isnan(table[codes ^ mask])
        np.testing.assert_array_equal(
            np.signbit(state.v[k].view(np.float32))[~nan], np.signbit(table[codes ^ mask])[~nan]
        )


PAIRS = list(itertools.product(["fp8", "bf8", "fp4"], ["f32", "f16", "bf16"]))
SCALES = [np.float32(2.0**k) for k in (0, 1, -1, 3, -5)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("kind", "wide"), PAIRS)
def test_packing_divides_by_the_scale(kind, wide, scale):
    name = FLAVOURS["gfx950", kind]
    for values in samples(name, 2)[:2]:
        with np.errstate(over="ignore"):
            low, high = values * scale, -values[::-1] * scale
        if wide == "f32":
            sources, operands = {0: low, 1: high}, "v0, v1"
            count = 3
        else:
            with np.errstate(over="ignore"):
                bits = [
                    x.astype(np.float16).view(np.uint16).astype(np.uint32) if wide == "f16" else x.view(np.uint32) >> 16
                    for x in (low, high)
                ]
            if wide == "f16":
                low, high = (b.astype(np.uint16).view(np.float16).astype(np.float32) for b in bits)
            else:
                low, high = ((b << 16).astype(np.uint32).view(np.float32) for b in bits)
            sources, operands, count = {0: bits[0] | bits[1] << 16}, "v0", 2
        old = np.full((WAVES, 64), np.uint32(0x12345678))
        zeros = ",0" * (count - 1)
        selection = f"op_sel:[0{zeros[:2] if count == 2 else zeros[:4]},1]" if kind != "fp4" else "op_sel:[0,0,0,1]"
        text = f"{SATURATE}v_cvt_scalef32_pk_{kind}_{wide} v4, {operands}, v2 {selection}"
        scaled = np.full((WAVES, 64), scale * np.float32(1.75))  # the mantissa of a scale has no effect
        state = run_one(text, {**sources, 2: scaled, 4: old}, waves=WAVES, arch="gfx950")
        right = np.vectorize(lambda x, code: int(code) in encoded(float(x) / float(scale), name, True))
        place, width = (16, 4) if kind == "fp4" else (16, 8)
        mask = np.uint32((1 << 2 * width) - 1 << place)
        assert ((state.v[4] ^ old) & ~mask == 0).all()
        assert right(low, state.v[4] >> place & (1 << width) - 1).all()
        assert right(high, state.v[4] >> place + width & (1 << width) - 1).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("kind", "wide"), PAIRS)
def test_unpacking_multiplies_by_the_scale(kind, wide, scale):
    width = 4 if kind == "fp4" else 8
    table = decoded(FLAVOURS["gfx950", kind]) * float(scale)
    register = np.random.default_rng(3).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    for choice in range(4 if kind == "fp4" else 2):
        target = "v[4:5]" if wide == "f32" else "v4"
        text = f"v_cvt_scalef32_pk_{wide}_{kind} {target}, v0, v2 op_sel:[{choice & 1},{choice >> 1},0]"
        state = run_one(text, {0: register, 2: np.full((WAVES, 64), scale)}, waves=WAVES, arch="gfx950")
        for part in range(2):
            expected = table[register >> np.uint32(width * (2 * choice + part)) & np.uint32((1 << width) - 1)]
            if wide == "f32":
                result = np.ascontiguousarray(state.v[4 + part]).view(np.float32)
                expected = expected.astype(np.float32)
            else:
                bits = (state.v[4] >> 16 * part).astype(np.uint16)
                with np.errstate(over="ignore"):
                    half = expected.astype(np.float16)
                result = bits.view(np.float16) if wide == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)
                expected = half if wide == "f16" else expected.astype(np.float32)
            np.testing.assert_array_equal(result, expected)
    if kind != "fp4" and wide == "f32":
        text = f"v_cvt_scalef32_f32_{kind} v4, v0, v2 op_sel:[1,1,0]"
        state = run_one(text, {0: register, 2: np.full((WAVES, 64), scale)}, waves=WAVES, arch="gfx950")
        np.testing.assert_array_equal(state.v[4].view(np.float32), table[register >> 24].astype(np.float32))


def floats(kind, seed):
    """Edge values and random bits."""
    bits = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}[kind]
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
    random = np.random.default_rng(seed)
    values = random.integers(0, np.iinfo(bits).max, (WAVES, 64), bits, endpoint=True).view(dtype)
    with np.errstate(over="ignore"):
        edges = np.array(
            [
                0,
                -0.0,
                0.5,
                -0.5,
                1.5,
                2.5,
                -2.5,
                32767.5,
                65535.9,
                2147483520,
                2147483648,
                4294967040,
                1e30,
                -1e30,
                np.inf,
                -np.inf,
                np.nan,
                65519,
                65520,
                2.0**-25,
                2.0**-24,
            ],
            dtype,
        )
    return np.where(random.random((WAVES, 64)) < 0.7, random.choice(edges, (WAVES, 64)), values)


INTEGERS = {"i32": (-(1 << 31), (1 << 31) - 1), "u32": (0, (1 << 32) - 1), "i16": (-32768, 32767), "u16": (0, 65535)}


@pytest.mark.parametrize(
    "name", ["i32_f32", "u32_f32", "i32_f64", "u32_f64", "i16_f16", "u16_f16", "rpi_i32_f32", "flr_i32_f32"]
)
def test_floats_to_integers_saturate(name):
    integer, kind = name.split("_")[-2:]
    values = floats(kind, 4)
    low, high = INTEGERS[integer]
    rounding = {"rpi": lambda x: math.floor(x + 0.5), "flr": math.floor}.get(name[:3], math.trunc)

    def statement(x):
        if math.isnan(x):
            return 0
        return min(max(rounding(x), low), high) if math.isfinite(x) else high if x > 0 else low

    state = run_one(f"v_cvt_{name} v4, {'v[0:1]' if kind == 'f64' else 'v0'}", {0: values}, waves=WAVES)
    mask = 0xFFFF if integer.endswith("16") else 0xFFFFFFFF
    expected = np.vectorize(lambda x: statement(float(x)) & mask, otypes=[np.uint32])(values.astype(object))
    np.testing.assert_array_equal(state.v[4], expected)


def test_integers_to_floats():
    bits = np.random.default_rng(5).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    bits[0, :6] = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000001]
    text = "".join(
        f"v_cvt_{name} v{register}, v0\n"
        for register, name in enumerate(
            ["f32_i32", "f32_u32", "f16_i16", "f16_u16", "f32_ubyte0", "f32_ubyte1", "f32_ubyte2", "f32_ubyte3"], 4
        )
    )
    state = run_one(
        text
        + "v_cvt_f64_i32 v[12:13], v0\nv_cvt_f64_u32 v[14:15], v0\nv_cvt_f32_i32_sdwa v16, sext(v0) src0_sel:WORD_1",
        {0: bits},
        waves=WAVES,
    )
    single = lambda register: np.ascontiguousarray(state.v[register]).view(np.float32)  # noqa: E731
    np.testing.assert_array_equal(single(4), bits.view(np.int32).astype(np.float32))
    np.testing.assert_array_equal(single(5), bits.astype(np.float32))
    np.testing.assert_array_equal(state.v[6], bits.astype(np.uint16).view(np.int16).astype(np.float16).view(np.uint16))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(state.v[7], bits.astype(np.uint16).astype(np.float16).view(np.uint16))
    for k in range(4):
        np.testing.assert_array_equal(single(8 + k), (bits >> 8 * k & 0xFF).astype(np.float32))
    np.testing.assert_array_equal(v64(state, 12).view(np.float64), bits.view(np.int32).astype(np.float64))
    np.testing.assert_array_equal(v64(state, 14).view(np.float64), bits.astype(np.float64))
    np.testing.assert_array_equal(single(16), (bits.view(np.int32) >> 16).astype(np.float32))


def test_between_floats():
    with np.errstate(all="ignore"):
        f32, f16, f64 = floats("f32", 6), floats("f16", 7), floats("f64", 8)
        text = (
            "v_cvt_f16_f32_e32 v4, v0\nv_cvt_f32_f16_e32 v5, v1\nv_cvt_f64_f32_e32 v[6:7], v0\n"
            "v_cvt_f32_f64_e32 v8, v[2:3]\nv_cvt_f32_bf16_e32 v9, v0"
        )
        state = run_one(text, {0: f32, 1: f16, 2: f64}, waves=WAVES, arch="gfx950")
        np.testing.assert_array_equal(state.v[4].astype(np.uint16).view(np.float16), f32.astype(np.float16))
        assert (state.v[4] >> 16 == 0).all()
        np.testing.assert_array_equal(state.v[5].view(np.float32), f16.astype(np.float32))
        np.testing.assert_array_equal(v64(state, 6).view(np.float64), f32.astype(np.float64))
        np.testing.assert_array_equal(state.v[8].view(np.float32), f64.astype(np.float32))
        np.testing.assert_array_equal(state.v[9], f32.view(np.uint32) << 16)


def test_pairs_of_halves():
    with np.errstate(all="ignore"):
        a, b = floats("f32", 9), floats("f32", 10)
        text = "v_cvt_pk_f16_f32 v4, v0, -v1\nv_cvt_pkrtz_f16_f32 v5, v0, v1\nv_cvt_pk_bf16_f32 v6, v0, |v1|"
        state = run_one(text, {0: a, 1: b}, waves=WAVES, arch="gfx950")
        half = lambda register, high: (state.v[register] >> 16 * high).astype(np.uint16)  # noqa: E731
        np.testing.assert_array_equal(half(4, 0).view(np.float16), a.astype(np.float16))
        np.testing.assert_array_equal(half(4, 1).view(np.float16), (-b).astype(np.float16))
        for high, value in ((0, a), (1, b)):
            zeroward = half(5, high).view(np.float16)
            further = np.nextafter(zeroward, np.copysign(np.float16(np.inf), zeroward))
            finite = np.isfinite(value)
            size = np.abs(value.astype(np.float64))
            assert (np.abs(zeroward.astype(np.float64)) <= size)[finite].all()
            assert (np.abs(further.astype(np.float64)) > size)[finite].all()
            np.testing.assert_array_equal(zeroward[~finite], value[~finite].astype(np.float16))
        for high, value in ((0, a), (1, np.abs(b))):
            exact, nan = value.astype(np.float64), np.isnan(value)
            result = (half(6, high).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            bits = half(6, high)
            np.testing.assert_array_equal(np.isnan(result), nan)
            chop = value.view(np.uint32) & 0xFFFF
            up = (chop > 0x8000) | ((chop == 0x8000) & (value.view(np.uint32) >> 16 & 1 == 1))
            expected = (value.view(np.uint32) >> 16) + up
            np.testing.assert_array_equal(bits[~nan], expected[~nan])
            assert (np.isnan(exact) == nan).all()


def test_overflow_of_halves_saturates_when_the_mode_says_so():
    values = np.full((WAVES, 64), np.float32(1e6))
    values[:, 1], values[:, 2] = np.inf, -1e6
    text = "v_cvt_f16_f32_e32 v4, v0\nv_cvt_pk_f16_f32 v5, v0, v0"
    state = run_one(SATURATE + text, {0: values}, waves=WAVES, arch="gfx950")
    assert state.v[4][0, :4].tolist() == [0x7BFF, 0x7C00, 0xFBFF, 0x7BFF]
    assert run_one(SATURATE + "s_getreg_b32 s0, hwreg(HW_REG_MODE)").s[0, 0] == 1 << 23 | 0x3F0
    assert state.v[5][0, :4].tolist() == [0x7BFF7BFF, 0x7C007C00, 0xFBFFFBFF, 0x7BFF7BFF]
    state = run_one(text, {0: values}, waves=WAVES, arch="gfx950")
    assert state.v[4][0, :4].tolist() == [0x7C00, 0x7C00, 0xFC00, 0x7C00]


def test_packing_integers_and_normalised_numbers():
    bits = np.random.default_rng(11).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    bits[:, ::2] &= 0xFFFF
    x = np.random.default_rng(12).uniform(-1.5, 1.5, (WAVES, 64)).astype(np.float32)
    text = (
        "v_cvt_pk_u16_u32 v4, v0, v1\nv_cvt_pk_i16_i32 v5, v0, v1\nv_cvt_pknorm_i16_f32 v6, v2, v3\n"
        "v_cvt_pknorm_u16_f32 v7, v2, v3\nv_cvt_pk_u8_f32 v8, v9, 2, v0"
    )
    wide = x * np.float32(200)
    state = run_one(text, {0: bits, 1: bits[::-1], 2: x, 3: -x, 9: wide}, waves=WAVES)
    for register, statement, sources in (
        (4, lambda v: np.minimum(v, 65535), (bits, bits[::-1])),
        (5, lambda v: np.clip(v.astype(np.int32), -32768, 32767), (bits, bits[::-1])),
        (6, lambda v: np.rint(np.clip(v.astype(np.float64), -1, 1) * 32767).astype(np.int64), (x, -x)),
        (7, lambda v: np.rint(np.clip(v.astype(np.float64), 0, 1) * 65535).astype(np.int64), (x, -x)),
    ):
        for part, source in enumerate(sources):
            expected = statement(source).astype(np.int64) & 0xFFFF
            np.testing.assert_array_equal(state.v[register] >> 16 * part & 0xFFFF, expected)
    byte = np.clip(np.rint(wide), 0, 255).astype(np.uint32)
    np.testing.assert_array_equal(state.v[8], (bits & 0xFF00FFFF) | byte << 16)


@pytest.mark.parametrize(
    "text",
    [
        "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[1,0,0]",
        "v_cvt_pk_f32_fp8 v[0:1], v2 clamp",
        "v_cvt_scalef32_pk_f16_fp8 v0, v1, v2 op_sel:[0,1,0]",
        "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, v3 op_sel:[1,0,0,0]",
        "v_cvt_f16_f32_e64 v0, v1 op_sel:[0,1]",
    ],
)
def test_what_is_not_emulated_raises(text):
    with pytest.raises(NotImplementedError, match="line"):
        run_one(text, arch="gfx950")
