"""Conversions with a block scale and stochastic ones, against the nearest numbers of each format.

The packing, the byte and half that op_sel chooses, the successor of a random number and saturation at the ends are
those of AMD's CDNA4 manual (section 7.3 and the instructions); that the top bits of the random number are added to the
discarded ones and the sum is cut off is there for v_cvt_sr_fp8_f32, and for denormals in AMD's emulator rocjitsu alone.
"""

import numpy as np
import pytest
from emulated_one import run_one

import portable.platform.emulated.control
import portable.platform.emulated.convert
import portable.platform.emulated.scaled  # noqa: F401  (they enter their handlers)
from portable.platform.emulated.formats import FORMATS, values

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the statements, on NaN and infinity

WAVES = 2
OLD = np.uint32(0xA5C3_9617)
SATURATE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
NAMES = {"fp6": "e2m3", "bf6": "e3m2", "fp4": "e2m1", "fp8": "e4m3fn", "bf8": "e5m2", "f16": "f16", "bf16": "bf16"}
SCALES = [np.float32(1), np.float32(-8), np.float32(0.75)]  # of which the exponent counts: 1, 8, 1/2
FACTOR = [1.0, 8.0, 0.5]
EDGES = [0, -0.0, 0.24, 0.25, 0.26, -0.75, 1.25, 1.75, 2.5, 5, 6, 6.9, 7.25, 7.5, 27, 28, -31, 1e9, 2.0**-130, np.inf]


def drawn(wide, count, seed):
    """[count, WAVES, 64] float64 that the kind has, and the registers that hold them."""
    rng = np.random.default_rng(seed)
    numbers = np.where(
        rng.random((count, WAVES, 64)) < 0.3,
        rng.choice([*EDGES, np.nan], (count, WAVES, 64)),
        rng.normal(0, 4, (count, WAVES, 64)) * 2.0 ** rng.integers(-6, 4, (count, WAVES, 64)),
    ).astype(np.float32)
    if wide == "f32":
        return numbers.astype(np.float64), list(numbers)
    bits = numbers.astype(np.float16).view(np.uint16) if wide == "f16" else (numbers.view(np.uint32) >> 16)
    bits = bits.astype(np.uint32)
    exact = bits.astype(np.uint16).view(np.float16) if wide == "f16" else (bits << 16).view(np.float32)
    return exact.astype(np.float64), list(bits[0::2] | bits[1::2] << 16)


def neighbours(size, name):
    """The numbers of a format just below or at |x|, the next one above, and the code of the first; |x| in range."""
    half = 1 << FORMATS[name].bits - 1
    table = values(name)[:half].astype(np.float64)
    table = table[np.isfinite(table)]
    code = np.clip(np.searchsorted(table, size, "right") - 1, 0, len(table) - 2)
    return table[code], table[code + 1], code


def nearest(x, name):
    """Codes of a format without infinities."""
    half = 1 << FORMATS[name].bits - 1
    size = np.where(np.isnan(x), np.inf, np.minimum(np.abs(x), 1e6))
    low, high, code = neighbours(np.minimum(size, 1e6), name)
    up = (size - low > high - size) | ((size - low == high - size) & (code % 2 == 1))
    return (code + up + np.where(np.signbit(x), half, 0)).astype(np.uint32)


def stochastic(x, name, seed):
    """Codes of float32 numbers: up if the lost bits and as many of the seed's carry. Finite, within the format."""
    half = 1 << FORMATS[name].bits - 1
    size = np.abs(x)
    low, high, code = neighbours(size, name)
    unit = 2.0 ** (np.frexp(np.where(size > 0, size, 1))[1] - 24.0)
    lost = np.log2((high - low) / unit).astype(np.int64)  # 2**lost units from one number to the next
    carry = (size - low) / unit + (seed.astype(np.int64) >> (32 - np.clip(lost, 0, 32))) >= 2.0**lost
    return (code + np.where(lost > 24, 0, carry) + np.where(np.signbit(x), half, 0)).astype(np.uint32)


def unpacked(state, first):
    """[32, WAVES, 64] codes of 6 bits."""
    words = [int(word) for word in range(6)]
    whole = np.zeros((WAVES, 64), object)
    for word in words:
        whole = whole + state.v[first + word].astype(object) * (1 << 32 * word)
    return np.array([(whole >> 6 * k) & 63 for k in range(32)]).astype(np.uint32)


def following(seed):
    """The random number after this one."""
    return (seed << np.uint32(1)) ^ np.where(seed >= 1 << 31, np.uint32(197), np.uint32(0))


def registers(first, held):
    return {first + k: register for k, register in enumerate(held)}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("six", ["fp6", "bf6"])
@pytest.mark.parametrize("form", ["pk32_{}_f16", "pk32_{}_bf16", "2xpk16_{}_f32"])
def test_thirty_two_numbers_to_six_bits(form, six, which):
    wide = form.split("_")[-1]
    numbers, held = drawn(wide, 32, which)
    state = {**registers(40, held), 90: np.full((WAVES, 64), SCALES[which])}
    name = "v_cvt_scalef32_" + form.format(six)
    sources = "v[40:55], v[56:71]" if wide == "f32" else "v[40:55]"
    if wide == "f32":  # the first 16 and the other 16 alternate
        numbers = np.stack([numbers[:16], numbers[16:]], 1).reshape(32, WAVES, 64)
    result = run_one(f"{name} v[0:5], {sources}, v90", state, waves=WAVES, arch="gfx950")
    np.testing.assert_array_equal(unpacked(result, 0), nearest(numbers / FACTOR[which], NAMES[six]))


@pytest.mark.parametrize("six", ["fp6", "bf6"])
@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_thirty_two_numbers_to_six_bits_stochastically(wide, six):
    numbers, held = drawn(wide, 32, 5)
    seed = np.random.default_rng(1).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    state = {**registers(40, held), 90: np.full((WAVES, 64), SCALES[1]), 91: seed}
    text = f"v_cvt_scalef32_sr_pk32_{six}_{wide} v[0:5], v[40:{39 + len(held)}], v91, v90"
    got = unpacked(run_one(text, state, waves=WAVES, arch="gfx950"), 0)
    largest = values(NAMES[six]).max()
    for k in range(32):
        x = numbers[k] / FACTOR[1]
        inside = np.abs(x) < largest
        expected = stochastic(np.where(inside, x, 0), NAMES[six], seed)
        expected = np.where(inside, expected, nearest(x, NAMES[six]))
        np.testing.assert_array_equal(got[k], expected)
        seed = following(seed)


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["fp8", "bf8", "pk_fp4"])
@pytest.mark.parametrize("byte", range(4))
def test_one_byte_stochastically_with_a_scale(kind, wide, byte):
    pair = kind == "pk_fp4"
    numbers, held = drawn(wide, 2, 7 + byte)
    numbers = numbers if pair else numbers[:1]
    seed = np.random.default_rng(byte).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    state = {**registers(4, held), 90: np.full((WAVES, 64), SCALES[2]), 91: seed, 0: np.full((WAVES, 64), OLD)}
    source = "v[4:5]" if pair and wide == "f32" else "v4"
    text = f"v_cvt_scalef32_sr_{kind}_{wide} v0, {source}, v91, v90 op_sel:[0,0,{byte & 1},{byte >> 1}]"
    got = run_one(SATURATE + text, state, waves=WAVES, arch="gfx950").v[0]
    name = NAMES[kind[-3:]]
    largest, expected = values(name)[np.isfinite(values(name))].max(), np.zeros((WAVES, 64), np.uint32)
    for k, x in enumerate(numbers / FACTOR[2]):
        codes = stochastic(np.where(np.abs(x) < largest, x, 0), name, seed)
        top = {"fp8": 0x7E, "bf8": 0x7B, "pk_fp4": 7}[kind] + np.where(np.signbit(x), 8 if pair else 128, 0)
        codes = np.where(np.abs(x) >= largest, top, codes).astype(np.uint32)
        nan = np.isnan(x)
        if pair:
            codes = np.where(nan, 7 + np.where(np.signbit(x), 8, 0), codes).astype(np.uint32)
        else:
            codes = np.where(nan, 0x7F + np.where(np.signbit(x), 128, 0), codes).astype(np.uint32)
        expected |= codes << np.uint32(4 * k)
        seed = following(seed)
    np.testing.assert_array_equal(got, OLD & ~np.uint32(0xFF << 8 * byte) | expected << np.uint32(8 * byte))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_fp8_stochastically(kind, arch):
    name = NAMES[kind] if arch == "gfx950" else {"fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}[kind]
    x = np.random.default_rng(3).normal(0, 30, (WAVES, 64)).astype(np.float32)
    x[0, :8] = [2.0**-9, 3 * 2.0**-12, 1.0, -1.75, 2.0**-40, 1e9, np.nan, -np.inf]
    seed = np.random.default_rng(4).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    state = {1: x, 2: seed, 0: np.full((WAVES, 64), OLD)}
    text = f"v_cvt_sr_{kind}_f32 v0, v1, v2 op_sel:[0,0,1,0]"
    codes = run_one(text, state, waves=WAVES, arch=arch).v[0] >> 8 & 0xFF
    plain = np.isfinite(x) & (np.abs(x) < 200)
    expected = stochastic(np.where(plain, x, 0).astype(np.float64), name, seed)
    if name.endswith("fnuz"):  # there is no minus zero
        expected = np.where(expected == 128, 0, expected)
    np.testing.assert_array_equal(codes[plain], expected[plain])
    np.testing.assert_array_equal(values(name)[codes[0, 5:8]], [np.inf, np.nan, -np.inf] if name == "e5m2" else np.nan)
    codes = run_one(SATURATE + text, state, waves=WAVES, arch=arch).v[0] >> 8 & 0xFF
    largest = values(name)[np.isfinite(values(name))].max()
    np.testing.assert_array_equal(values(name)[codes[0, 5:8]], [largest, np.nan, -largest])
    negative = run_one(f"v_cvt_sr_{kind}_f32 v0, -|v1|, v2", state, waves=WAVES, arch=arch).v[0] & 0xFF
    assert (values(name)[negative[plain]] <= 0).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("high", [0, 1])
def test_halves_stochastically(kind, high):
    x = np.random.default_rng(5).normal(0, 30, (WAVES, 64)).astype(np.float32)
    x[0, :4] = [2.0**-14, -1.0, 1 + 2.0**-20, 60000]
    seed = np.random.default_rng(6).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    state = {1: x, 2: seed, 0: np.full((WAVES, 64), OLD)}
    text = f"v_cvt_sr_{kind}_f32 v0, v1, v2 op_sel:[0,0,{high}]"
    got = run_one(text, state, waves=WAVES, arch="gfx950").v[0]
    expected = stochastic(x.astype(np.float64), kind, seed)
    np.testing.assert_array_equal(got >> 16 * high & 0xFFFF, expected)
    np.testing.assert_array_equal(got >> 16 * (1 - high) & 0xFFFF, OLD >> 16 * (1 - high) & 0xFFFF)
    huge = run_one(SATURATE + text, {**state, 1: np.full((WAVES, 64), np.float32(3.4e38))}, waves=WAVES, arch="gfx950")
    assert set((huge.v[0] >> 16 * high & 0xFFFF).ravel().tolist()) <= {0x7BFF if kind == "f16" else 0x7F7F}


def test_stochastic_rounding_is_unbiased():
    seed = (np.arange(WAVES * 64, dtype=np.uint32) * np.uint32(0x0200_0000)).reshape(WAVES, 64)
    x = np.full((WAVES, 64), np.float32(17.25))  # between 16 and 18
    codes = run_one("v_cvt_sr_fp8_f32 v0, v1, v2", {1: x, 2: seed}, waves=WAVES, arch="gfx950").v[0] & 0xFF
    assert values("e4m3fn")[codes].mean() == 17.25


def test_random_numbers():
    seed = np.random.default_rng(2).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    got = run_one("v_prng_b32_e32 v1, v0", {0: seed}, waves=WAVES, arch="gfx950").v[1]
    np.testing.assert_array_equal(got, following(seed))


@pytest.mark.parametrize("six", ["fp6", "bf6"])
@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_thirty_two_numbers_from_six_bits(wide, six):
    held = np.random.default_rng(8).integers(0, 1 << 32, (6, WAVES, 64), np.uint32)
    state = {**registers(80, held), 90: np.full((WAVES, 64), SCALES[2])}
    last = 31 if wide == "f32" else 15
    text = f"v_cvt_scalef32_pk32_{wide}_{six} v[0:{last}], v[80:85], v90"
    result = run_one(text, state, waves=WAVES, arch="gfx950")
    before = run_one("", state, waves=WAVES)
    numbers = values(NAMES[six])[unpacked(before, 80)] * np.float32(FACTOR[2])
    for k in range(32):
        if wide == "f32":
            got = np.ascontiguousarray(result.v[k]).view(np.float32)
        else:
            bits = (result.v[k // 2] >> 16 * (k % 2)).astype(np.uint16)
            got = bits.view(np.float16) if wide == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(got, numbers[k])


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_one_byte_to_a_half(kind):
    held = np.random.default_rng(9).integers(0, 1 << 32, (WAVES, 64), np.uint32)
    state = {1: held, 2: np.full((WAVES, 64), SCALES[1]), 0: np.full((WAVES, 64), OLD)}
    text = f"v_cvt_scalef32_f16_{kind} v0, v1, v2 op_sel:[1,0,1]"
    got = run_one(text, state, waves=WAVES, arch="gfx950").v[0]
    with np.errstate(over="ignore"):
        expected = (values(NAMES[kind])[held >> 8 & 0xFF] * np.float32(8)).astype(np.float16)
    np.testing.assert_array_equal((got >> 16).astype(np.uint16).view(np.float16), expected)
    np.testing.assert_array_equal(got & 0xFFFF, OLD & 0xFFFF)


def test_bfloats_saturate_when_the_mode_says_so():
    x = np.array([3.4e38, -3.4e38, np.inf, np.nan] * 16, np.float32)
    text = "v_cvt_pk_bf16_f32 v0, v1, v1"
    assert run_one(text, {1: x}, arch="gfx950").v[0, 0, :3].tolist() == [0x7F807F80, 0xFF80FF80, 0x7F807F80]
    assert run_one(SATURATE + text, {1: x}, arch="gfx950").v[0, 0, :3].tolist() == [0x7F7F7F7F, 0xFF7FFF7F, 0x7F807F80]


@pytest.mark.parametrize(
    "text, arch",
    [
        ("v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, v3", "gfx942"),
        ("v_cvt_sr_bf16_f32 v0, v1, v2", "gfx942"),
        ("v_cvt_scalef32_sr_fp8_f32 v0, v1, v2, v3 op_sel:[1,0,0,0]", "gfx950"),
        ("v_cvt_scalef32_sr_fp8_f32 v0, v1, v2, v3 clamp", "gfx950"),
        ("v_cvt_scalef32_pk32_fp6_f16 v[0:5], v[8:23], v3 op_sel:[0,0,1]", "gfx950"),
        ("v_cvt_sr_fp8_f32 v0, v1, v2 op_sel:[0,1,0,0]", "gfx950"),
        ("v_cvt_sr_fp8_f32 v0, v1, v2 mul:2", "gfx950"),
    ],
)
def test_what_is_not_emulated_raises(text, arch):
    with pytest.raises(NotImplementedError, match="line"):
        run_one(text, arch=arch)
