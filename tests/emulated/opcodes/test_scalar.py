"""Scalar instructions against statements on Python integers, every edge value with every other, one pair a wave."""

import itertools

import pytest
from emulated_one import run_one, s64

import portable.platform.emulated.scalar  # noqa: F401  (enters the handlers)
from portable.platform.emulated.isa import DecodeError

EDGES = [0, 1, 2, 31, 32, 63, 64, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EDGES32 = [*EDGES, 0xDEADBEEF, 0x00100005, 0x001F0001, 0x0020001F, 0x0040003F, 0x007F0010]  # fields of s_bfe last
EDGES64 = [*EDGES, 1 << 32, 1 << 63, (1 << 64) - 1, (1 << 63) - 1, 0xFFFFFFFF00000000, 0x8000000080000000]
ONE_BITS = 0xFFFFFFFF


def signed(value, width=32):
    """Two's complement of any integer."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> width - 1 else value


def field(value, control, place_bits):
    """Bits control[22:16] from bit control[place_bits - 1:0] of an integer that may be negative."""
    size = control >> 16 & 0x7F
    return (value >> (control & (1 << place_bits) - 1)) & (1 << size) - 1, size


def ones(value, width):
    return bin(value & (1 << width) - 1).count("1")


def leading(value, width):
    return width - value.bit_length() if value else -1


def trailing(value):
    return (value & -value).bit_length() - 1 if value else -1


def sign_run(value, width):
    """How many of the top bits equal the sign; -1 if all do."""
    digits = f"{value:0{width}b}"
    return -1 if len(set(digits)) == 1 else len(digits) - len(digits.lstrip(digits[0]))


def quad(value, k):
    return bool(value >> 4 * k & 15)


def nonzero(result):
    return result, None


def kept(result):
    return result, "kept"


# name: widths of the destination and the sources, and (result, SCC) of the sources; SCC None: result != 0
TWO = {
    "s_add_u32": ("nnn", lambda a, b: (a + b, a + b > ONE_BITS)),
    "s_sub_u32": ("nnn", lambda a, b: (a - b, b > a)),
    "s_add_i32": ("nnn", lambda a, b: (a + b, signed(a) + signed(b) != signed(a + b))),
    "s_sub_i32": ("nnn", lambda a, b: (a - b, signed(a) - signed(b) != signed(a - b))),
    "s_min_i32": ("nnn", lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b))),
    "s_max_i32": ("nnn", lambda a, b: (max(signed(a), signed(b)), signed(a) >= signed(b))),
    "s_min_u32": ("nnn", lambda a, b: (min(a, b), a < b)),
    "s_max_u32": ("nnn", lambda a, b: (max(a, b), a >= b)),
    "s_mul_i32": ("nnn", lambda a, b: kept(a * b)),
    "s_mul_hi_u32": ("nnn", lambda a, b: kept(a * b >> 32)),
    "s_mul_hi_i32": ("nnn", lambda a, b: kept(signed(a) * signed(b) >> 32)),
    "s_bfm_b32": ("nnn", lambda a, b: kept((1 << a % 32) - 1 << b % 32)),
    "s_bfm_b64": ("wnn", lambda a, b: kept((1 << a % 64) - 1 << b % 64)),
    "s_pack_ll_b32_b16": ("nnn", lambda a, b: kept(a % 65536 + (b % 65536 << 16))),
    "s_pack_lh_b32_b16": ("nnn", lambda a, b: kept(a % 65536 + (b >> 16 << 16))),
    "s_pack_hh_b32_b16": ("nnn", lambda a, b: kept((a >> 16) + (b >> 16 << 16))),
    "s_lshl_b32": ("nnn", lambda a, b: nonzero(a << b % 32)),
    "s_lshr_b32": ("nnn", lambda a, b: nonzero(a >> b % 32)),
    "s_ashr_i32": ("nnn", lambda a, b: nonzero(signed(a) >> b % 32)),
    "s_lshl_b64": ("wwn", lambda a, b: nonzero(a << b % 64)),
    "s_lshr_b64": ("wwn", lambda a, b: nonzero(a >> b % 64)),
    "s_ashr_i64": ("wwn", lambda a, b: nonzero(signed(a, 64) >> b % 64)),
    "s_absdiff_i32": ("nnn", lambda a, b: nonzero(abs(signed(a - b)))),
    "s_bfe_u32": ("nnn", lambda a, b: nonzero(field(a, b, 5)[0])),
    "s_bfe_i32": ("nnn", lambda a, b: nonzero(signed_field(*field(signed(a), b, 5)))),
    "s_bfe_u64": ("wwn", lambda a, b: nonzero(field(a, b, 6)[0])),
    "s_bfe_i64": ("wwn", lambda a, b: nonzero(signed_field(*field(signed(a, 64), b, 6)))),
}
TWO |= {f"s_lshl{k}_add_u32": ("nnn", lambda a, b, k=k: ((a << k) + b, (a << k) + b > ONE_BITS)) for k in (1, 2, 3, 4)}
for _name, _of in {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: (a | b) - (a & b),
    "andn2": lambda a, b: a - (a & b),
    "orn2": lambda a, b: ~(b - (a & b)),
    "nand": lambda a, b: -1 - (a & b),
    "nor": lambda a, b: -1 - (a | b),
    "xnor": lambda a, b: -1 - (a ^ b),
}.items():
    TWO[f"s_{_name}_b32"] = ("nnn", lambda a, b, of=_of: nonzero(of(a, b)))
    TWO[f"s_{_name}_b64"] = ("www", lambda a, b, of=_of: nonzero(of(a, b)))

ONE = {
    "s_mov_b32": ("nn", kept),
    "s_mov_b64": ("ww", kept),
    "s_not_b32": ("nn", lambda a: nonzero(-1 - a)),
    "s_not_b64": ("ww", lambda a: nonzero(-1 - a)),
    "s_abs_i32": ("nn", lambda a: nonzero(abs(signed(a)))),
    "s_sext_i32_i8": ("nn", lambda a: kept(signed(a, 8))),
    "s_sext_i32_i16": ("nn", lambda a: kept(signed(a, 16))),
    "s_brev_b32": ("nn", lambda a: kept(int(f"{a:032b}"[::-1], 2))),
    "s_brev_b64": ("ww", lambda a: kept(int(f"{a:064b}"[::-1], 2))),
    "s_bcnt0_i32_b32": ("nn", lambda a: nonzero(32 - ones(a, 32))),
    "s_bcnt1_i32_b32": ("nn", lambda a: nonzero(ones(a, 32))),
    "s_bcnt0_i32_b64": ("nw", lambda a: nonzero(64 - ones(a, 64))),
    "s_bcnt1_i32_b64": ("nw", lambda a: nonzero(ones(a, 64))),
    "s_ff0_i32_b32": ("nn", lambda a: kept(trailing(a ^ ONE_BITS))),
    "s_ff1_i32_b32": ("nn", lambda a: kept(trailing(a))),
    "s_ff0_i32_b64": ("nw", lambda a: kept(trailing(a ^ (1 << 64) - 1))),
    "s_ff1_i32_b64": ("nw", lambda a: kept(trailing(a))),
    "s_flbit_i32_b32": ("nn", lambda a: kept(leading(a, 32))),
    "s_flbit_i32_b64": ("nw", lambda a: kept(leading(a, 64))),
    "s_flbit_i32": ("nn", lambda a: kept(sign_run(a, 32))),
    "s_flbit_i32_i64": ("nw", lambda a: kept(sign_run(a, 64))),
    "s_bitreplicate_b64_b32": ("wn", lambda a: kept(int("".join(2 * bit for bit in f"{a:032b}"), 2))),
    "s_wqm_b32": ("nn", lambda a: nonzero(sum(15 << 4 * k for k in range(8) if quad(a, k)))),
    "s_wqm_b64": ("ww", lambda a: nonzero(sum(15 << 4 * k for k in range(16) if quad(a, k)))),
    "s_quadmask_b32": ("nn", lambda a: nonzero(sum(1 << k for k in range(8) if quad(a, k)))),
    "s_quadmask_b64": ("ww", lambda a: nonzero(sum(1 << k for k in range(16) if quad(a, k)))),
}


def signed_field(value, size):
    return signed(value, size) if size else 0


def values(width):
    return EDGES32 if width == "n" else EDGES64


def register(width, first):
    return f"s{first}" if width == "n" else f"s[{first}:{first + 1}]"


def check(name, widths, cases, expected, scc):
    """Run one wave a case from a given SCC; both results of each must be the expected ones."""
    names = [register(width, first) for width, first in zip(widths, (2, 4, 6), strict=False)]
    sources = {
        int(text[1:]) if width == "n" else text: [case[k] for case in cases]
        for k, (width, text) in enumerate(zip(widths[1:], names[1:], strict=True))
    }
    state = run_one(f"{name} {', '.join(names)}", s=sources, waves=len(cases), scc=scc)
    mask = (1 << (32 if widths[0] == "n" else 64)) - 1
    results = state.s[2].tolist() if widths[0] == "n" else s64(state, 2)
    for case, result, flag in zip(cases, results, state.scc, strict=True):
        wanted, wanted_flag = expected(*case)
        shown = f"{name} of {[hex(value) for value in case]}"
        assert result == wanted & mask, shown
        if wanted_flag is None:
            wanted_flag = wanted & mask != 0
        assert flag == (scc if wanted_flag == "kept" else wanted_flag), f"SCC after {shown}"
    if widths[0] == "n":
        assert not state.s[3].any()  # the register behind the destination is untouched


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("scc", [False, True])
def test_two_sources(name, scc):
    widths, expected = TWO[name]
    check(name, widths, list(itertools.product(values(widths[1]), values(widths[2]))), expected, scc)


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("scc", [False, True])
def test_one_source(name, scc):
    widths, expected = ONE[name]
    check(name, widths, [(value,) for value in values(widths[1])], expected, scc)


WITH_SCC = {
    "s_addc_u32": ("nnn", lambda scc, a, b: (a + b + scc, a + b + scc > ONE_BITS)),
    "s_subb_u32": ("nnn", lambda scc, a, b: (a - b - scc, a < b + scc)),
    "s_cselect_b32": ("nnn", lambda scc, a, b: kept(a if scc else b)),
    "s_cselect_b64": ("www", lambda scc, a, b: kept(a if scc else b)),
}


@pytest.mark.parametrize("name", WITH_SCC)
@pytest.mark.parametrize("scc", [False, True])
def test_two_sources_and_scc(name, scc):
    widths, expected = WITH_SCC[name]
    cases = list(itertools.product(values(widths[1]), values(widths[2])))
    check(name, widths, cases, lambda *case: expected(scc, *case), scc)


def test_a_64_bit_sum_carries():
    state = run_one(
        "s_add_u32 s0, s2, s4\ns_addc_u32 s1, s3, s5",
        s={"s[2:3]": [0xFFFFFFFF, 5, (1 << 64) - 1], "s[4:5]": [1, 6, 1]},
        waves=3,
    )
    assert s64(state, 0) == [1 << 32, 11, 0]
    assert state.scc.tolist() == [False, False, True]


COMPARES = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@pytest.mark.parametrize("name", COMPARES)
def test_compares(name):
    cases = list(itertools.product(EDGES32, EDGES32))
    sources = {4: [a for a, _ in cases], 6: [b for _, b in cases]}
    for dtype, of in (("i32", signed), ("u32", int)):
        state = run_one(f"s_cmp_{name}_{dtype} s4, s6", s=sources, waves=len(cases))
        assert state.scc.tolist() == [COMPARES[name](of(a), of(b)) for a, b in cases]


@pytest.mark.parametrize("name", ["eq", "lg"])
def test_64_bit_compares(name):
    cases = list(itertools.product(EDGES64, EDGES64))
    sources = {"s[4:5]": [a for a, _ in cases], "s[6:7]": [b for _, b in cases]}
    state = run_one(f"s_cmp_{name}_u64 s[4:5], s[6:7]", s=sources, waves=len(cases))
    assert state.scc.tolist() == [COMPARES[name](a, b) for a, b in cases]


IMMEDIATES = {"0": 0, "5": 5, "0x7fff": 0x7FFF, "0x8000": -0x8000, "0xff80": -128, "0xffff": -1, "-1": -1}


@pytest.mark.parametrize("text", IMMEDIATES)
def test_16_bit_immediates_are_sign_extended(text):
    """0xff80 stands for -128, as the compiler prints it."""
    value, count = IMMEDIATES[text], len(EDGES32)
    moved = run_one(f"s_movk_i32 s2, {text}", waves=2)
    assert moved.s[2].tolist() == [value & ONE_BITS] * 2
    added = run_one(f"s_addk_i32 s2, {text}", s={2: EDGES32}, waves=count)
    assert added.s[2].tolist() == [a + value & ONE_BITS for a in EDGES32]
    assert added.scc.tolist() == [signed(a) + value != signed(a + value) for a in EDGES32]
    multiplied = run_one(f"s_mulk_i32 s2, {text}", s={2: EDGES32}, waves=count, scc=True)
    assert multiplied.s[2].tolist() == [a * value & ONE_BITS for a in EDGES32]
    assert multiplied.scc.all()
    conditional = run_one(f"s_cmovk_i32 s2, {text}", s={2: [3, 4]}, waves=2, scc=[True, False])
    assert conditional.s[2].tolist() == [value & ONE_BITS, 4]


@pytest.mark.parametrize("name", COMPARES)
@pytest.mark.parametrize("text", IMMEDIATES)
def test_compares_with_immediates_extend_by_their_type(name, text):
    value = IMMEDIATES[text]
    state = run_one(f"s_cmpk_{name}_i32 s2, {text}", s={2: EDGES32}, waves=len(EDGES32))
    assert state.scc.tolist() == [COMPARES[name](signed(a), value) for a in EDGES32]
    state = run_one(f"s_cmpk_{name}_u32 s2, {text}", s={2: EDGES32}, waves=len(EDGES32))
    assert state.scc.tolist() == [COMPARES[name](a, value & 0xFFFF) for a in EDGES32]


def test_immediates_that_do_not_fit_are_refused():
    for text in ("s_movk_i32 s0, 0x10000", "s_addk_i32 s0, -0x8001", "s_cmpk_eq_i32 s0, s1"):
        with pytest.raises(DecodeError, match="no 16-bit immediate"):
            run_one(text)


def test_constants_of_both_widths():
    state = run_one("s_mov_b64 s[0:1], -1\ns_mov_b64 s[2:3], 0x80000000\ns_mov_b32 s4, 1.0\ns_mov_b64 s[6:7], -0.5")
    assert s64(state, 0) == [(1 << 64) - 1]
    assert s64(state, 2) == [0x80000000]
    assert state.s[4].tolist() == [0x3F800000]
    assert s64(state, 6) == [0xBFE0000000000000]
    assert run_one("s_mov_b32 s0, 0.15915494").s[0].tolist() == [0x3E22F983]


def test_null_reads_0_and_drops_what_is_written():
    state = run_one("s_mov_b64 null, -1\ns_mov_b32 null, 7\ns_mov_b64 s[0:1], null", s={"s[0:1]": -1}, exec_mask=5)
    assert s64(state, 0) == [0] and s64(state, "exec") == [5]


SAVEEXEC = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn1": lambda s, e: ~s & e,
    "andn2": lambda s, e: s & ~e,
    "orn1": lambda s, e: ~s | e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
}


@pytest.mark.parametrize("name", SAVEEXEC)
def test_saveexec_returns_the_old_mask(name):
    cases = list(itertools.product(EDGES64, EDGES64))
    sources, masks = [s for s, _ in cases], [e for _, e in cases]
    state = run_one(
        f"s_{name}_saveexec_b64 s[2:3], s[4:5]", s={"s[4:5]": sources}, exec_mask=masks, waves=len(cases), scc=True
    )
    new = [SAVEEXEC[name](s, e) & (1 << 64) - 1 for s, e in cases]
    assert s64(state, 2) == masks
    assert s64(state, "exec") == new
    assert state.scc.tolist() == [mask != 0 for mask in new]


@pytest.mark.parametrize("name", ["andn1", "andn2"])
def test_wrexec_returns_the_new_mask(name):
    cases = list(itertools.product(EDGES64, EDGES64))
    state = run_one(
        f"s_{name}_wrexec_b64 vcc, vcc",
        s={"vcc": [s for s, _ in cases]},
        exec_mask=[e for _, e in cases],
        waves=len(cases),
    )
    new = [SAVEEXEC[name](s, e) & (1 << 64) - 1 for s, e in cases]
    assert s64(state, "vcc") == s64(state, "exec") == new
    assert state.scc.tolist() == [mask != 0 for mask in new]


@pytest.mark.parametrize("width", [32, 64])
def test_bits_set_cleared_and_tested(width):
    edges, places = EDGES32 if width == 32 else EDGES64, [0, 1, 31, 32, 63, 64, 0xFFFFFFFF]
    cases = list(itertools.product(edges, places))
    name = "s2" if width == 32 else "s[2:3]"
    sources = {2 if width == 32 else name: [a for a, _ in cases], 4: [b for _, b in cases]}
    for bit in (0, 1):
        state = run_one(f"s_bitset{bit}_b{width} {name}, s4", s=sources, waves=len(cases))
        results = state.s[2].tolist() if width == 32 else s64(state, 2)
        assert results == [a & ~(1 << b % width) | bit << b % width for a, b in cases]
        state = run_one(f"s_bitcmp{bit}_b{width} {name}, s4", s=sources, waves=len(cases))
        assert state.scc.tolist() == [a >> b % width & 1 == bit for a, b in cases]


def test_conditional_moves():
    pair = {"s[2:3]": [1 << 40, 2], "s[4:5]": [3 << 40, 4]}
    state = run_one("s_cmov_b64 s[2:3], s[4:5]", s=pair, waves=2, scc=[True, False])
    assert s64(state, 2) == [3 << 40, 2]
    state = run_one("s_cmov_b32 s2, s4", s={2: [1, 2], 4: [3, 4]}, waves=2, scc=[True, False])
    assert state.s[2].tolist() == [3, 2]


def test_some_of_the_waves():
    state = run_one("s_addk_i32 s2, 0x1\ns_cmp_eq_u32 s2, 1", s={2: [0, 0, 5]}, waves=3, at=[0, 2])
    assert state.s[2].tolist() == [1, 0, 6]
    assert state.scc.tolist() == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "s_add_u32 s0, s1",
        "s_add_u32 v0, s1, s2",
        "s_add_u32 s0, v1, s2",
        "s_add_u32 s0, s1, s2 clamp",
        "s_add_u32 s0, -s1, s2",
        "s_add_u32 s0, s1, src_scc",
        "s_movk_i32 v0, 0x1",
        "s_and_saveexec_b64 s[0:1], v[2:3]",
    ],
)
def test_what_is_not_such_an_instruction_is_refused(text):
    with pytest.raises(NotImplementedError):
        run_one(text)
