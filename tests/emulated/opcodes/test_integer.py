"""Integer vector instructions against statements on Python integers, edges with edges, eight waves at once."""

import numpy as np
import pytest
from emulated_one import run_one, s64, v64

import portable.platform.emulated.compares
import portable.platform.emulated.integer  # noqa: F401  (both enter their handlers)

WAVES = 8
FULL = (1 << 32) - 1
EDGES = [
    0,
    1,
    2,
    3,
    7,
    8,
    12,
    15,
    16,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
]
EDGES += [0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFFFFFE, FULL, 0xDEADBEEF, 0x0C0D0906]
EDGES64 = [
    *EDGES,
    1 << 32,
    1 << 63,
    (1 << 64) - 1,
    (1 << 63) - 1,
    0xFFFFFFFF00000000,
    0x80000000_80000000,
    0xFFFFFFFF_7FFFFFFF,
]
EXEC = 0xF0F0_1234_FFFF_8001


def draws(seed, *choices):
    """[count][WAVES, 64] of edge values, in random combinations."""
    random = np.random.default_rng(seed)
    dtype = lambda edges: np.uint64 if edges is EDGES64 else np.uint32  # noqa: E731
    return [random.choice(np.array(edges, dtype(edges)), (WAVES, 64)) for edges in choices]


def sx(value, bits=32):
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def clip(value, low, high):
    return min(max(value, low), high)


def active():
    return np.array([EXEC >> lane & 1 for lane in range(64)], bool)


def permuted_byte(high, low, selector):
    if selector >= 13:
        return 0xFF
    if selector == 12:
        return 0
    both = high << 32 | low
    if selector >= 8:
        return 0xFF if both >> (16 * (selector - 8) + 15) & 1 else 0
    return both >> 8 * selector & 0xFF


def bfe_i(a, b, c):
    offset, width = b & 31, c & 31
    return sx(sx(a) >> offset, width) if width else 0


def leading(value):
    return 32 - value.bit_length() if value else -1


def middle(*values):
    return sorted(values)[1]


ONE = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": leading,
    "v_ffbh_i32": lambda a: leading(a if sx(a) >= 0 else ~a & FULL),
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1,
    "v_sat_pk_u8_i16": lambda a: clip(sx(a, 16), 0, 255) | clip(sx(a >> 16, 16), 0, 255) << 8,
}
TWO = {
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: sx(b) >> (a & 31),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: sx(a) * sx(b) >> 32,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mul_i32_i24": lambda a, b: sx(a, 24) * sx(b, 24),
    "v_mul_hi_i32_i24": lambda a, b: sx(a, 24) * sx(b, 24) >> 32,
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": lambda a, b: min(sx(a), sx(b)),
    "v_max_i32": lambda a, b: max(sx(a), sx(b)),
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_lshlrev_b16": lambda a, b: b << (a & 15) & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16": lambda a, b: sx(b, 16) >> (a & 15) & 0xFFFF,
    "v_add_u16": lambda a, b: a + b & 0xFFFF,
    "v_sub_u16": lambda a, b: a - b & 0xFFFF,
    "v_subrev_u16": lambda a, b: b - a & 0xFFFF,
    "v_mul_lo_u16": lambda a, b: a * b & 0xFFFF,
    "v_min_u16": lambda a, b: min(a & 0xFFFF, b & 0xFFFF),
    "v_max_u16": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_min_i16": lambda a, b: min(sx(a, 16), sx(b, 16)) & 0xFFFF,
    "v_max_i16": lambda a, b: max(sx(a, 16), sx(b, 16)) & 0xFFFF,
}
THREE = {
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: sx(a, 24) * sx(b, 24) + c,
    "v_mad_legacy_u16": lambda a, b, c: (a * b + c) & 0xFFFF,  # the upper half becomes 0
    "v_mad_legacy_i16": lambda a, b, c: (a * b + c) & 0xFFFF,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_bfe_i32": bfe_i,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32": lambda a, b, c: sum(permuted_byte(a, b, c >> 8 * k & 0xFF) << 8 * k for k in range(4)),
    "v_sad_u8": lambda a, b, c: c + sum(abs((a >> 8 * k & 0xFF) - (b >> 8 * k & 0xFF)) for k in range(4)),
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_med3_u32": middle,
    "v_min3_i32": lambda *s: min(map(sx, s)),
    "v_max3_i32": lambda *s: max(map(sx, s)),
    "v_med3_i32": lambda *s: middle(*map(sx, s)),
    "v_mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16": lambda a, b, c: sx(a, 16) * sx(b, 16) + c,
}


@pytest.mark.parametrize("name", [*ONE, *TWO, *THREE])
def test_32_bits(name):
    statement = (ONE | TWO | THREE)[name]
    count = 1 + (name in TWO) + 2 * (name in THREE)
    sources = draws(1, *[EDGES] * count)
    old = np.uint32(0x12345678)
    state = run_one(
        f"{name} v9, {', '.join(f'v{k}' for k in range(count))}",
        {9: np.full((WAVES, 64), old), **dict(enumerate(sources))},
        exec_mask=EXEC,
        waves=WAVES,
    )
    expected = np.vectorize(lambda *s: statement(*map(int, s)) & FULL, otypes=[np.uint32])(*sources)
    np.testing.assert_array_equal(state.v[9], np.where(active(), expected, old))


HALVES = {
    "v_mad_u16": lambda a, b, c: a * b + c,
    "v_min3_u16": min,
    "v_max3_u16": max,
    "v_med3_u16": middle,
    "v_mad_i16": lambda *s: sx(s[0], 16) * sx(s[1], 16) + sx(s[2], 16),
    "v_min3_i16": lambda *s: min(sx(x, 16) for x in s),
    "v_max3_i16": lambda *s: max(sx(x, 16) for x in s),
    "v_med3_i16": lambda *s: middle(*(sx(x, 16) for x in s)),
}


@pytest.mark.parametrize("halves", [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("name", HALVES)
def test_chosen_halves(name, halves):
    sources, old = draws(13, EDGES, EDGES, EDGES), np.uint32(0x12345678)
    text = f"{name} v9, v0, v1, v2 op_sel:[{','.join(map(str, halves))}]"
    state = run_one(text, {9: np.full((WAVES, 64), old), **dict(enumerate(sources))}, waves=WAVES)
    parts = [source >> np.uint32(16 * half) & 0xFFFF for source, half in zip(sources, halves[:3], strict=True)]
    value = np.vectorize(lambda *s: HALVES[name](*map(int, s)) & 0xFFFF, otypes=[np.uint32])(*parts)
    expected = (old & 0xFFFF) | value << np.uint32(16) if halves[3] else (old & np.uint32(0xFFFF0000)) | value
    np.testing.assert_array_equal(state.v[9], expected)


def test_accumulation_registers():
    (a,) = draws(14, EDGES)
    text = "v_accvgpr_write_b32 a3, v0\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 v1, a4\nv_accvgpr_write_b32 a5, -1"
    state = run_one(text, {0: a}, exec_mask=EXEC, waves=WAVES)
    np.testing.assert_array_equal(state.v[1], np.where(active(), a, 0))
    np.testing.assert_array_equal(state.v[256 + 5], np.broadcast_to(np.where(active(), np.uint32(FULL), 0), a.shape))


SATURATED = {
    "v_add_u32": (lambda a, b: a + b, 0, FULL, 32),
    "v_sub_u32": (lambda a, b: a - b, 0, FULL, 32),
    "v_subrev_u32": (lambda a, b: b - a, 0, FULL, 32),
    "v_add_i32": (lambda a, b: sx(a) + sx(b), -(1 << 31), (1 << 31) - 1, 32),
    "v_sub_i32": (lambda a, b: sx(a) - sx(b), -(1 << 31), (1 << 31) - 1, 32),
    "v_add_u16": (lambda a, b: (a & 0xFFFF) + (b & 0xFFFF), 0, 0xFFFF, 16),
    "v_sub_u16": (lambda a, b: (a & 0xFFFF) - (b & 0xFFFF), 0, 0xFFFF, 16),
    "v_add_i16": (lambda a, b: sx(a, 16) + sx(b, 16), -(1 << 15), (1 << 15) - 1, 16),
    "v_sub_i16": (lambda a, b: sx(a, 16) - sx(b, 16), -(1 << 15), (1 << 15) - 1, 16),
}


@pytest.mark.parametrize("name", SATURATED)
def test_clamp_saturates(name):
    statement, low, high, bits = SATURATED[name]
    a, b = draws(2, EDGES, EDGES)
    state = run_one(f"{name}_e64 v9, v0, v1 clamp", {0: a, 1: b}, waves=WAVES)
    mask = (1 << bits) - 1
    expected = np.vectorize(lambda a, b: clip(statement(int(a), int(b)), low, high) & mask, otypes=[np.uint32])(a, b)
    np.testing.assert_array_equal(state.v[9], expected)


@pytest.mark.parametrize("amount", [0, 1, 31, 32, 33, 63, 64, FULL])
def test_64_bit_shifts(amount):
    (value,) = draws(3, EDGES64)
    state = run_one(
        "v_lshlrev_b64 v[2:3], s0, v[0:1]\nv_lshrrev_b64 v[4:5], s0, v[0:1]\nv_ashrrev_i64 v[6:7], s0, v[0:1]",
        {0: value},
        {0: amount},
        waves=WAVES,
    )
    shift, mask = amount & 63, (1 << 64) - 1
    for register, statement in (
        (2, lambda a: a << shift & mask),
        (4, lambda a: a >> shift),
        (6, lambda a: sx(a, 64) >> shift & mask),
    ):
        expected = np.vectorize(lambda a, f=statement: f(int(a)), otypes=[np.uint64])(value)
        np.testing.assert_array_equal(v64(state, register), expected)


def test_64_bit_moves_and_sums():
    a, c = draws(4, EDGES64, EDGES64)
    state = run_one(
        "v_lshl_add_u64 v[4:5], v[0:1], 3, v[2:3]\nv_mov_b64_e32 v[6:7], v[0:1]\nv_mov_b64_e32 v[8:9], -1\n"
        "v_mov_b64_e32 v[10:11], 1.0\nv_lshl_add_u64 v[0:1], v[0:1], 0, s[4:5]",
        {0: a, 2: c},
        {"s[4:5]": 0xFFFFFFFF_00000001},
        waves=WAVES,
    )
    np.testing.assert_array_equal(v64(state, 4), (a << np.uint64(3)) + c)
    np.testing.assert_array_equal(v64(state, 6), a)
    assert (v64(state, 8) == np.uint64((1 << 64) - 1)).all()
    assert (v64(state, 10) == np.float64(1.0).view(np.uint64)).all()
    np.testing.assert_array_equal(v64(state, 0), a + np.uint64(0xFFFFFFFF_00000001))


@pytest.mark.parametrize("name", ["add_co", "sub_co", "subrev_co", "addc_co", "subb_co", "subbrev_co"])
def test_carries(name):
    a, b = draws(5, EDGES, EDGES)
    carry_in = 0xAAAA_5555_F00F_0001
    takes = name[:4] in ("addc", "subb")
    state = run_one(
        f"v_{name}_u32_e64 v9, s[2:3], v0, v1{', vcc' if takes else ''}",
        {0: a, 1: b},
        {"vcc": carry_in},
        exec_mask=EXEC,
        waves=WAVES,
    )
    x, y = (value.astype(object) for value in ((b, a) if "rev" in name else (a, b)))
    extra = np.array([carry_in >> lane & 1 for lane in range(64)], object) if takes else 0
    total = x + y + extra if "add" in name else x - y - extra
    np.testing.assert_array_equal(state.v[9], np.where(active(), (total & FULL).astype(np.uint32), 0))
    for wave in range(WAVES):
        bits = sum(1 << lane for lane in range(64) if not 0 <= total[wave, lane] <= FULL)
        assert s64(state, "s[2:3]")[wave] == bits & EXEC


@pytest.mark.parametrize("name", ["v_mad_u64_u32", "v_mad_i64_i32"])
def test_64_bit_multiply_add(name):
    a, b, c = draws(6, EDGES, EDGES, EDGES64)
    state = run_one(f"{name} v[4:5], s[2:3], v0, v1, v[2:3]", {0: a, 1: b, 2: c}, waves=WAVES)
    convert = (lambda x, bits: sx(int(x), bits)) if "i64" in name else (lambda x, bits: int(x))
    for wave in range(WAVES):
        exact = [convert(a[wave, k], 32) * convert(b[wave, k], 32) + convert(c[wave, k], 64) for k in range(64)]
        assert v64(state, 4)[wave].tolist() == [value % (1 << 64) for value in exact]
        assert s64(state, "s[2:3]")[wave] == sum((value >> 64 & 1) << k for k, value in enumerate(exact))


@pytest.mark.parametrize("kind", ["i16", "u16", "i32", "u32", "i64", "u64"])
def test_compares(kind):
    bits = int(kind[1:])
    edges = EDGES64 if bits == 64 else EDGES
    a, b = draws(7, edges, edges)
    a[:, ::5] = b[:, ::5]
    value = (lambda x: sx(int(x), bits)) if kind[0] == "i" else (lambda x: int(x) & (1 << bits) - 1)
    statements = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
    names = {name: eval(f"lambda x, y: x {sign} y") for name, sign in statements.items()}
    for name, statement in {**names, "f": lambda x, y: False, "t": lambda x, y: True}.items():
        sources = "v[0:1], v[2:3]" if bits == 64 else "v0, v2"
        for form in ("v_cmp", "v_cmpx"):
            state = run_one(f"{form}_{name}_{kind} vcc, {sources}", {0: a, 2: b}, exec_mask=EXEC, waves=WAVES)
            expected = [
                sum(1 << k for k in range(64) if statement(value(a[wave, k]), value(b[wave, k]))) & EXEC
                for wave in range(WAVES)
            ]
            assert s64(state, "vcc") == expected
            assert s64(state, "exec") == (expected if form == "v_cmpx" else [EXEC] * WAVES)


def test_choice_by_mask_with_float_signs():
    a, b = draws(8, EDGES, EDGES)
    mask = 0x0123_4567_89AB_CDEF
    state = run_one(
        "v_cndmask_b32_e32 v4, v0, v1, vcc\nv_cndmask_b32_e64 v5, -v0, |v1|, s[2:3]",
        {0: a, 1: b},
        {"vcc": mask, "s[2:3]": ~mask},
        waves=WAVES,
    )
    chosen = np.array([mask >> k & 1 for k in range(64)], bool)
    np.testing.assert_array_equal(state.v[4], np.where(chosen, b, a))
    np.testing.assert_array_equal(state.v[5], np.where(chosen, a ^ np.uint32(1 << 31), b & np.uint32(0x7FFFFFFF)))


@pytest.mark.parametrize("table", [0x00, 0x6C, 0xDE, 0xFF, 0xCA, 0x96])
def test_bitwise_tables(table):
    a, b, c = draws(9, EDGES, EDGES, EDGES)
    old = np.full((WAVES, 64), np.uint32(0xABCD0123))
    text = f"v_bitop3_b32 v4, v0, v1, v2 bitop3:{table}\nv_bitop3_b16 v5, v0, v1, v2 bitop3:{table}"
    state = run_one(text, {0: a, 1: b, 2: c, 5: old}, waves=WAVES, arch="gfx950")
    expected = np.zeros_like(a)
    for k in range(32):
        rows = (a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)
        expected |= (np.uint32(table) >> rows & 1) << np.uint32(k)
    np.testing.assert_array_equal(state.v[4], expected)
    np.testing.assert_array_equal(state.v[5], (expected & 0xFFFF) | 0xABCD0000)


def test_shift_and_pack_bytes():
    a, b = draws(10, EDGES, EDGES)
    text = "v_ashr_pk_i8_i32 v4, v0, v1, 3\nv_ashr_pk_u8_i32 v5, v0, v1, 3 op_sel:[0,0,0,1]"
    state = run_one(text, {0: a, 1: b, 5: np.full((WAVES, 64), np.uint32(7))}, waves=WAVES, arch="gfx950")
    pack = lambda low, high, x, y: sum((clip(sx(int(v)) >> 3, low, high) & 0xFF) << s for v, s in ((x, 0), (y, 8)))  # noqa: E731
    for register, ends, place in ((4, (-128, 127), 0), (5, (0, 255), 16)):
        expected = np.vectorize(lambda x, y, e=ends: pack(*e, x, y), otypes=[np.uint32])(a, b)
        np.testing.assert_array_equal(state.v[register], expected << np.uint32(place) | (7 if place else 0))


@pytest.mark.parametrize("select", ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
def test_parts_of_registers(select, unused):
    a, b, old = draws(11, EDGES, EDGES, EDGES)
    shift, width = {"B": (8 * int(select[-1] if select[-1].isdigit() else 0), 8), "D": (0, 32)}.get(
        select[0], (16 * int(select[-1] if select[-1].isdigit() else 0), 16)
    )
    text = f"v_add_u32_sdwa v9, sext(v0), v1 dst_sel:{select} dst_unused:{unused} src0_sel:{select} src1_sel:WORD_1"
    state = run_one(text, {0: a, 1: b, 9: old}, waves=WAVES)

    def expected(x, y, before):
        part = sx(int(x) >> shift, width) + (int(y) >> 16) & (1 << width) - 1
        if unused == "UNUSED_PRESERVE":
            return int(before) & ~((1 << width) - 1 << shift) & FULL | part << shift
        return (sx(part, width) if unused == "UNUSED_SEXT" else part) << shift & FULL

    np.testing.assert_array_equal(state.v[9], np.vectorize(expected, otypes=[np.uint32])(a, b, old))


PERMUTATIONS = {
    "quad_perm:[2,3,0,1]": lambda k: k & ~3 | (k + 2) & 3,
    "row_shr:8": lambda k: k - 8 if k % 16 >= 8 else None,
    "row_shl:3": lambda k: k + 3 if k % 16 + 3 < 16 else None,
    "row_ror:5": lambda k: k & ~15 | (k - 5) & 15,
    "row_mirror": lambda k: k & ~15 | 15 - k % 16,
    "row_half_mirror": lambda k: k & ~7 | 7 - k % 8,
    "row_newbcast:9": lambda k: k & ~15 | 9,
    "row_bcast:15": lambda k: (k & ~15) - 1 if k >= 16 else None,
    "row_bcast:31": lambda k: 31 if k >= 32 else None,
    "wave_shr:1": lambda k: k - 1 if k else None,
    "wave_shl:1": lambda k: k + 1 if k < 63 else None,
    "wave_ror:1": lambda k: (k - 1) % 64,
    "wave_rol:1": lambda k: (k + 1) % 64,
}


@pytest.mark.parametrize("permutation", PERMUTATIONS)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_lane_permutations(permutation, bound):
    a, b, old = draws(12, EDGES, EDGES, EDGES)
    text = f"v_sub_u32_dpp v9, v0, v1 {permutation} row_mask:0xa bank_mask:0xd{bound}"
    state = run_one(text, {0: a, 1: b, 9: old}, exec_mask=EXEC, waves=WAVES)
    expected = old.copy()
    for lane in range(64):
        source = PERMUTATIONS[permutation](lane)
        there = source is not None and EXEC >> source & 1
        if EXEC >> lane & 1 and 0xA >> lane // 16 & 1 and 0xD >> lane % 16 // 4 & 1 and (there or bound):
            expected[:, lane] = (a[:, source] if there else np.uint32(0)) - b[:, lane]
    np.testing.assert_array_equal(state.v[9], expected)


@pytest.mark.parametrize(
    "text",
    [
        "v_add_u32_e64 v0, v1, v2 mul:2",
        "v_and_b32_e64 v0, v1, v2 clamp",
        "v_mad_u64_u32 v[0:1], vcc, v2, v3, v[4:5] clamp",
        "v_cmp_eq_u32_e64 vcc, v1, v2 clamp",
        "v_add_u32_e64 v0, -v1, v2",
        "v_lshlrev_b64 v[0:1], v2, v[3:4] op_sel:[1,0]",
        "v_mad_u32_u16 v0, v1, v2, v3 op_sel:[0,0,0,1]",
        "v_addc_co_u32_dpp v0, vcc, v1, v2, vcc row_shr:1 row_mask:0xf bank_mask:0xf",
    ],
)
def test_what_is_not_emulated_raises(text):
    with pytest.raises(NotImplementedError, match=r"line \d"):
        run_one(text)


def test_only_the_chosen_waves_change():
    values = np.arange(4 * 64, dtype=np.uint32).reshape(4, 64)
    state = run_one("v_add_u32_e32 v0, 5, v0\nv_cmp_gt_u32_e32 vcc, 64, v0", {0: values}, waves=4, at=[0, 2])
    np.testing.assert_array_equal(state.v[0], values + np.array([5, 0, 5, 0], np.uint32)[:, None])
    assert s64(state, "vcc") == [(1 << 59) - 1, 0, 0, 0]
