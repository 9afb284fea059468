"""Matrix instructions against the manual's layout, element by element, and numpy's own product."""

import numpy as np
import pytest
from emulated_one import run_one

import portable.platform.emulated.control  # noqa: F401  (enters the mode register)
from portable.platform.emulated.formats import FORMATS, values
from portable.platform.emulated.matrix import BOTH, ONLY, product

OPCODES = [(name, arch) for arch in ONLY for name in (*BOTH.split(), *ONLY[arch].split())]
SEED = 7
TYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32}


def code(number, kind):
    """The float32 value of a code, from the format's definition."""
    exponent_bits, mantissa_bits, bias, special = kind.exponent, kind.mantissa, kind.bias, kind.special
    sign = -1.0 if number >> (kind.bits - 1) else 1.0
    exponent = number >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = number & (1 << mantissa_bits) - 1
    if special == "fnuz" and number == 1 << (kind.bits - 1):
        return np.nan
    if special == "fn" and number & (1 << kind.bits - 1) - 1 == (1 << kind.bits - 1) - 1:
        return np.nan
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return np.nan if mantissa else sign * np.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2.0**mantissa_bits) * 2.0 ** (exponent - bias)


def largest(name):
    finite = values(name)[np.isfinite(values(name))]
    return float(finite.max())


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_of_every_narrow_format(name):
    expected = np.array([code(number, FORMATS[name]) for number in range(1 << FORMATS[name].bits)], np.float32)
    np.testing.assert_array_equal(values(name), expected)


def test_largest_values_of_the_narrow_formats():
    found = [largest(name) for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e2m3", "e3m2", "e2m1")]
    assert found == [448.0, 240.0, 57344.0, 57344.0, 7.5, 28.0, 6.0]


class Kind:
    """Random elements of a type, as codes and as values."""

    def __init__(self, name, arch):
        fp8 = {"gfx942": {"fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}, "gfx950": {"fp8": "e4m3fn", "bf8": "e5m2"}}[arch]
        self.name = fp8.get(name, name)
        self.bits = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "i8": 8}.get(self.name)
        self.bits = self.bits or FORMATS[self.name].bits

    def draw(self, rng, shape):
        """Codes, as unsigned numbers; the values are small, so that products and sums are exact."""
        small = rng.integers(-8, 9, shape)
        if self.name == "f64":
            return small.astype(np.float64).view(np.uint64)
        if self.name in ("f32", "xf32"):
            return small.astype(np.float32).view(np.uint32)
        if self.name == "f16":
            return (small / 4).astype(np.float16).view(np.uint16)
        if self.name == "bf16":
            return ((small / 4).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.name == "i8":
            return rng.integers(0, 256, shape).astype(np.uint8)
        good = np.flatnonzero(np.isfinite(values(self.name)) & (np.abs(values(self.name)) <= 16))
        good = good[(values(self.name)[good] * 8) % 1 == 0]
        return rng.choice(good, shape).astype(np.uint8)

    def value(self, codes):
        if self.name == "f64":
            return codes.view(np.float64)
        if self.name in ("f32", "xf32"):
            return codes.view(np.float32).astype(np.float64)
        if self.name == "f16":
            return codes.view(np.float16).astype(np.float64)
        if self.name == "bf16":
            return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.name == "i8":
            return codes.view(np.int8).astype(np.float64)
        return values(self.name)[codes].astype(np.float64)


def lanes_of(matrix, blocks, bits, split=False):
    """[blocks, M, K] codes to [64] integers: lane's elements from bit 0 up.

    K runs over the lane groups in equal, consecutive parts; with `split`, over the first halves of all groups, and
    then over the second halves.
    """
    _, m, k = matrix.shape
    groups = 64 // (m * blocks)
    per_lane = k // groups
    held = [0] * 64
    for block in range(blocks):
        for row in range(m):
            for column in range(k):
                if split:
                    half, rest = divmod(column, k // 2)
                    group, place = divmod(rest, per_lane // 2)
                    place += half * (per_lane // 2)
                else:
                    group, place = divmod(column, per_lane)
                lane = row + m * (block * groups + group)
                held[lane] |= int(matrix[block, row, column]) << (bits * place)
    return held, per_lane * bits


def words(held, bits):
    """[64] integers to {word: [64] uint32}."""
    return [np.array([value >> (32 * word) & 0xFFFFFFFF for value in held], np.uint32) for word in range(bits // 32)]


def place(result, m, blocks, register, lane):
    """Block, row and column of a register of D."""
    if result == "f64":
        return 0, 4 * register + lane // 16, lane % 16
    if m == 4:
        return lane // 4, register, lane % 4
    per_block = m * m // 64
    block, register = divmod(register, per_block)
    return (
        block,
        8 * (register // 4) + 4 * (lane // 32) + register % 4 if m == 32 else 4 * (lane // 16) + register,
        (lane % m),
    )


def run(name, arch, a, b, c, modifiers="", kinds=None, extra="", split=(False, False), constant=None, more=None):
    """D [waves, blocks, m, m] of codes a, b [waves, blocks, m, k] and numbers c [waves, blocks, m, m]."""
    shape = product(name)
    kinds = kinds or (Kind(shape.a, arch), Kind(shape.b, arch))
    count = len(a)
    per = 2 if shape.result == "f64" else 1
    nd = shape.m * shape.m * shape.blocks // 64
    registers = {}

    def put(first, wave, arrays):
        for word, array in enumerate(arrays):
            registers.setdefault(first + word, np.zeros((count, 64), np.uint32))[wave] = array

    sizes = []
    for wave in range(count):
        sizes = []
        for first, codes, kind, each in ((0, a, kinds[0], split[0]), (8, b, kinds[1], split[1])):
            held, bits = lanes_of(codes[wave], shape.blocks, kind.bits, each)
            put(first, wave, words(held, bits))
            sizes.append(bits // 32)
        for register in range(nd):
            places = [place(shape.result, shape.m, shape.blocks, register, lane) for lane in range(64)]
            data = c[wave][tuple(np.transpose(places))].astype(TYPES[shape.result])
            as_words = data.view(np.uint32).reshape(64, per)
            put(300 + per * register, wave, as_words.T)
    for register, data in (more or {}).items():
        registers[register] = data
    texts = [f"v[{f}:{f + n - 1}]" if n > 1 else f"v{f}" for f, n in zip((0, 8), sizes, strict=True)]
    source = constant or f"a[44:{43 + per * nd}]"
    prefix = "v_mfma_scale_" if extra else "v_mfma_"
    state = run_one(
        f"{prefix}{name} v[100:{99 + per * nd}], {texts[0]}, {texts[1]}, {source}{extra} {modifiers}",
        v=registers,
        arch=arch,
        waves=count,
        exec_mask=0x5,  # ignored
    )
    out = np.zeros((count, shape.blocks, shape.m, shape.m))
    kind = TYPES[shape.result]
    for register in range(nd):
        pair = np.stack([state.v[100 + per * register + word] for word in range(per)], axis=-1)
        data = np.ascontiguousarray(pair).view(kind)[..., 0]
        for lane in range(64):
            out[(slice(None), *place(shape.result, shape.m, shape.blocks, register, lane))] = data[:, lane]
    return out


def draw(name, arch, waves=2):
    shape = product(name)
    rng = np.random.default_rng(SEED)
    kinds = Kind(shape.a if shape.a != "f8f6f4" else "fp8", arch), Kind(shape.b if shape.b != "f8f6f4" else "fp8", arch)
    a, b = (kind.draw(rng, (waves, shape.blocks, shape.m, shape.k)) for kind in kinds)
    c = rng.integers(-100, 100, (waves, shape.blocks, shape.m, shape.m)).astype(np.float64)
    return kinds, a, b, c


@pytest.mark.parametrize("name, arch", OPCODES)
def test_every_opcode_is_the_product(name, arch):
    kinds, a, b, c = draw(name, arch)
    split = (True, True) if "f8f6f4" in name else (False, False)  # of fp8, which `draw` takes for it
    got = run(name, arch, a, b, c, kinds=kinds, split=split)
    np.testing.assert_array_equal(got, kinds[0].value(a) @ kinds[1].value(b).swapaxes(-1, -2) + c)


@pytest.mark.parametrize("constant, value", [("0", 0.0), ("1.0", 1.0), ("-4.0", -4.0)])
def test_c_may_be_a_constant(constant, value):
    kinds, a, b, c = draw("f32_16x16x16_f16", "gfx942")
    got = run("f32_16x16x16_f16", "gfx942", a, b, c, constant=constant)
    np.testing.assert_array_equal(got, kinds[0].value(a) @ kinds[1].value(b).swapaxes(-1, -2) + value)


def test_integers_wrap():
    _, a, b, c = draw("i32_16x16x32_i8", "gfx942")
    a[:], b[:], c[:] = 0x80, 0x80, 2**31 - 1
    got = run("i32_16x16x32_i8", "gfx942", a, b, c)
    assert (got == 32 * 2**14 + 2**31 - 1 - 2**32).all()


@pytest.mark.parametrize("cbsz, abid", [(4, 0), (4, 13), (2, 3), (0, 0)])
def test_blocks_of_a_stand_for_others(cbsz, abid):
    kinds, a, b, c = draw("f32_4x4x4_16b_f16", "gfx950")
    got = run("f32_4x4x4_16b_f16", "gfx950", a, b, c, f"cbsz:{cbsz} abid:{abid}")
    lanes = 64 >> cbsz  # the manual's S: lane l reads lane l % S + S * ABID; a block has 4 lanes
    chosen = [(4 * block % lanes + lanes * abid) // 4 for block in range(16)]
    np.testing.assert_array_equal(got, kinds[0].value(a)[:, chosen] @ kinds[1].value(b).swapaxes(-1, -2) + c)


def test_xf32_rounds_to_ten_bits_of_mantissa():
    _, a, b, c = draw("f32_16x16x8_xf32", "gfx942", waves=1)
    a[:], b[:], c[:] = 0, 0, 0
    given = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-10, np.inf, np.nan, -0.0, 1 + 2**-11 + 2**-23, 2.0**-149])
    a[0, 0, :8, 0] = given.astype(np.float32).view(np.uint32)
    a[0, 0, 8, 0] = 0x7FFFFFFF  # a NaN that rounding must not turn into -0
    b[0, 0, :, 0] = np.float32(1).view(np.uint32)
    got = run("f32_16x16x8_xf32", "gfx942", a, b, c)[0, 0, :, 0]
    expected = [1, 1 + 2**-9, 1 + 2**-10, np.inf, np.nan, 0, 1 + 2**-10, 0, np.nan]
    np.testing.assert_array_equal(got[:9], expected)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 2.0**-24, -65504.0])
def test_special_halves_reach_their_row_alone(special):
    kinds, a, b, c = draw("f32_32x32x8_f16", "gfx942", waves=1)
    a[0, 0, 5, 3] = np.float16(special).view(np.uint16)
    b[0, 0, 0, :] = np.float16(1).view(np.uint16)
    with np.errstate(invalid="ignore"):
        got = run("f32_32x32x8_f16", "gfx942", a, b, c)
        exact = kinds[0].value(a) @ kinds[1].value(b).swapaxes(-1, -2) + c
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    assert np.isfinite(np.delete(got, 5, axis=2)).all()


def test_long_sums_of_bfloat16_are_close_to_float64():
    rng = np.random.default_rng(SEED)
    a, b = (rng.standard_normal((2, 1, 32, 8)).astype(np.float32) for _ in range(2))
    a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    c = rng.standard_normal((2, 1, 32, 32)).astype(np.float32)
    got = run("f32_32x32x8_bf16", "gfx942", a, b, c)
    kind = Kind("bf16", "gfx942")
    np.testing.assert_allclose(got, kind.value(a) @ kind.value(b).swapaxes(-1, -2) + c, rtol=1e-5, atol=1e-5)


MIXED = [(left, right) for left in range(5) for right in range(5)]
NAMES = ("fp8", "bf8", "e2m3", "e3m2", "e2m1")


@pytest.mark.parametrize("name", ["f32_16x16x128_f8f6f4", "f32_32x32x64_f8f6f4"])
@pytest.mark.parametrize("left, right", MIXED)
def test_scaled_products_of_every_pair_of_types(name, left, right):
    """The CDNA4 manual's tables in 7.1.5: 32 consecutive elements of K a lane for 4 and 6 bits; for 8 bits 16, and 16
    more from the second half of K. The scale's byte is {op_sel_hi, op_sel}, and it is of 32 consecutive elements."""
    shape = product(name)
    rng = np.random.default_rng(SEED)
    kinds = Kind(NAMES[left], "gfx950"), Kind(NAMES[right], "gfx950")
    a, b = (kind.draw(rng, (1, 1, shape.m, shape.k)) for kind in kinds)
    c = rng.integers(-9, 9, (1, 1, shape.m, shape.m)).astype(np.float64)
    exponents = rng.integers(120, 135, (2, shape.m, shape.k // 32))
    scale_words = np.zeros((2, 1, 64), np.uint32)
    for which in range(2):
        octet = 2 if which else 1
        for row in range(shape.m):
            for block in range(shape.k // 32):
                scale_words[which, 0, row + shape.m * block] = int(exponents[which, row, block]) << (8 * octet)
    got = run(
        name,
        "gfx950",
        a,
        b,
        c,
        f"op_sel:[1,0,0] op_sel_hi:[0,1,0] cbsz:{left} blgp:{right}",
        kinds=kinds,
        extra=", v60, v61",
        split=(left < 2, right < 2),
        more={60: scale_words[0], 61: scale_words[1]},
    )
    factors = 2.0 ** (np.repeat(exponents, 32, axis=-1) - 127)
    wide = [kind.value(x) * factor for kind, x, factor in zip(kinds, (a, b), factors, strict=True)]
    np.testing.assert_allclose(got, wide[0] @ wide[1].swapaxes(-1, -2) + c, rtol=1e-6, atol=1e-6)


def test_a_constant_scale_is_its_exponent():
    kinds, a, b, c = draw("f32_16x16x128_f8f6f4", "gfx950")
    got = run("f32_16x16x128_f8f6f4", "gfx950", a, b, c, "op_sel_hi:[0,0,0]", kinds, ", 4.0, -0.5", (True, True))
    np.testing.assert_array_equal(got, 2 * kinds[0].value(a) @ kinds[1].value(b).swapaxes(-1, -2) + c)


SATURATE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"


def test_overflow_saturates_when_the_mode_says_so():
    """The CDNA4 manual's table of rules: under FP16_OVFL, F32 results become the largest number and I32 ones too."""
    big = {k: np.full(64, 65504, np.float16).view(np.uint32).repeat(2) for k in range(4)}
    high = {300 + k: np.full(64, 3.4028234e38, np.float32) for k in range(4)}
    text = "v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[44:47]"
    state = {**big, **high}
    assert np.isfinite(run_one(text, state).v[256].view(np.float32)).all()  # 2**36 is lost in the largest number
    double = {**state, **{k: np.full(64, 0x7F7F7F7F, np.uint32) for k in range(4)}}
    bfloat = text.replace("_f16", "_bf16")
    assert np.isposinf(run_one(bfloat, double).v[256].view(np.float32)).all()
    assert (run_one(SATURATE + bfloat, double).v[256].view(np.float32) == np.finfo(np.float32).max).all()
    infinite = {**double, 0: np.full(64, 0x7F807F80, np.uint32)}
    assert np.isposinf(run_one(SATURATE + bfloat, infinite).v[256].view(np.float32)).all()
    octets = {k: np.full(64, 0x80808080, np.uint32) for k in range(4)}
    octets |= {300 + k: np.full(64, 2**31 - 1, np.uint32) for k in range(4)}
    text = "v_mfma_i32_16x16x32_i8 a[0:3], v[0:1], v[2:3], a[44:47]"
    assert (run_one(SATURATE + text, octets).v[256] == 2**31 - 1).all()


@pytest.mark.parametrize(
    "text, arch",
    [
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, 65, v21 op_sel_hi:[0,0,0]", "gfx950"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] blgp:1", "gfx942"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1", "gfx942"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] clamp", "gfx942"),
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:2 abid:4", "gfx942"),
        ("v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], v[0:3]", "gfx950"),
        ("v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], v[8:11], v[0:3]", "gfx942"),
        ("v_mfma_f32_16x16x16_f16 v[0:7], v[4:5], v[6:7], 0", "gfx942"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0 cbsz:5", "gfx950"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21", "gfx950"),
    ],
)
def test_what_is_not_emulated_is_refused(text, arch):
    with pytest.raises(NotImplementedError, match="v_mfma"):
        run_one(text, arch=arch)
