"""Lane movement against loops over lanes: inactive lanes, several waves, lane numbers past 63."""

import numpy as np
import pytest
from emulated_one import ALL, run_one

import portable.platform.emulated.crosslane  # noqa: F401  (enters the handlers)
from portable.platform.emulated.crosslane import swizzled
from portable.platform.emulated.isa import DecodeError

RNG = np.random.default_rng(7)
WAVES = 3
MASKS = [ALL, 0x8000_0000_FFFF_0002, 0]  # every lane, some, none


def active(mask):
    return [mask >> lane & 1 == 1 for lane in range(64)]


def words(high=1 << 32):
    return RNG.integers(0, high, (WAVES, 64), dtype=np.uint64).astype(np.uint32)


@pytest.fixture
def data():
    return words()


def test_readfirstlane_takes_the_lowest_active_lane_and_lane_0_of_none(data):
    state = run_one("v_readfirstlane_b32 s5, v1", v={1: data}, exec_mask=[1 << 63, 0b1100, 0], waves=WAVES)
    assert state.s[5].tolist() == [data[0, 63], data[1, 2], data[2, 0]]


@pytest.mark.parametrize("exec_mask", MASKS)
def test_readlane_ignores_exec_and_takes_the_lane_modulo_64(data, exec_mask):
    lanes = [0, 63, 64 + 17]
    state = run_one("v_readlane_b32 s5, v1, s6", v={1: data}, s={6: lanes}, exec_mask=exec_mask, waves=WAVES)
    assert state.s[5].tolist() == [data[wave, lane % 64] for wave, lane in enumerate(lanes)]
    assert (run_one("v_readlane_b32 vcc_hi, v1, 9", v={1: data}, waves=WAVES).s[107] == data[:, 9]).all()


@pytest.mark.parametrize("exec_mask", MASKS)
def test_writelane_ignores_exec_and_touches_one_lane(data, exec_mask):
    lanes = [0, 63, 64 + 17]
    state = run_one(
        "v_writelane_b32 v1, s5, m0", v={1: data}, s={5: [7, 8, -1], "m0": lanes}, exec_mask=exec_mask, waves=WAVES
    )
    for wave, (lane, value) in enumerate(zip(lanes, (7, 8, 0xFFFFFFFF), strict=True)):
        data[wave, lane % 64] = value
    assert (state.v[1] == data).all()


def test_lanes_of_some_of_the_waves(data):
    state = run_one("v_readlane_b32 s5, v1, 3\nv_writelane_b32 v1, s5, 4", v={1: data}, waves=WAVES, at=[0, 2])
    assert state.s[5].tolist() == [data[0, 3], 0, data[2, 3]]
    assert state.v[1][:, 4].tolist() == [data[0, 3], data[1, 4], data[2, 3]]


@pytest.mark.parametrize("exec_mask", MASKS)
def test_mbcnt_counts_the_mask_below_each_lane(data, exec_mask):
    mask = 0x8000_0001_F0F0_0003
    state = run_one(
        "v_mbcnt_lo_u32_b32 v1, s4, 5\nv_mbcnt_hi_u32_b32 v1, s5, v1",
        v={1: data},
        s={"s[4:5]": mask},
        exec_mask=exec_mask,
        waves=WAVES,
    )
    for lane, on in enumerate(active(exec_mask)):
        expected = 5 + bin(mask & (1 << lane) - 1).count("1")
        assert (state.v[1][:, lane] == (expected if on else data[:, lane])).all()


def test_mbcnt_of_a_constant_is_the_number_of_the_lane():
    state = run_one("v_mbcnt_lo_u32_b32 v1, -1, 0\nv_mbcnt_hi_u32_b32 v1, -1, v1")
    assert state.v[1][0].tolist() == list(range(64))


@pytest.mark.parametrize("exec_mask", MASKS)
def test_swap(data, exec_mask):
    other = words()
    state = run_one("v_swap_b32 v1, v2", v={1: data, 2: other}, exec_mask=exec_mask, waves=WAVES)
    on = active(exec_mask)
    assert (state.v[1] == np.where(on, other, data)).all()
    assert (state.v[2] == np.where(on, data, other)).all()


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("exec_mask", [ALL, 0, 0x0001_0001_0001_0001])
def test_permlane_swap_exchanges_odd_rows_with_even_rows(data, rows, exec_mask):
    other = words()
    state = run_one(
        f"v_permlane{rows}_swap_b32_e32 v1, v2",
        v={1: data, 2: other},
        exec_mask=exec_mask,
        waves=WAVES,
        arch="gfx950",
    )
    first, second = data.copy(), other.copy()
    for lane, on in enumerate(active(exec_mask)):
        if on and lane // rows % 2:
            first[:, lane], second[:, lane - rows] = other[:, lane - rows], data[:, lane]
    assert (state.v[1] == first).all() and (state.v[2] == second).all()


def test_permlane_swap_refuses_half_active_pairs_and_the_older_arch():
    with pytest.raises(NotImplementedError, match="an active lane with an inactive one"):
        run_one("v_permlane16_swap_b32 v1, v2", exec_mask=1, arch="gfx950")
    with pytest.raises(NotImplementedError, match="not an instruction of gfx942"):
        run_one("v_permlane16_swap_b32 v1, v2")


@pytest.mark.parametrize("exec_mask", MASKS)
@pytest.mark.parametrize("offset", [0, 4 * 61])
def test_bpermute_pulls_and_reads_0_from_inactive_lanes(data, exec_mask, offset):
    addresses = words()
    state = run_one(
        f"ds_bpermute_b32 v0, v1, v2 offset:{offset}",
        v={0: data, 1: addresses, 2: (other := words())},
        exec_mask=exec_mask,
        waves=WAVES,
    )
    on = active(exec_mask)
    for wave in range(WAVES):
        for lane in range(64):
            source = (int(addresses[wave, lane]) + offset) % (1 << 32) // 4 % 64
            pulled = other[wave, source] if on[source] else 0
            assert state.v[0][wave, lane] == (pulled if on[lane] else data[wave, lane])


@pytest.mark.parametrize("exec_mask", MASKS)
@pytest.mark.parametrize("offset", [0, 8])
def test_permute_pushes_and_the_highest_lane_wins(data, exec_mask, offset):
    targets = RNG.integers(0, 4 * 40, (WAVES, 64)).astype(np.uint32)  # several lanes name one target
    state = run_one(
        f"ds_permute_b32 v0, v1, v2 offset:{offset}",
        v={0: data, 1: targets, 2: (other := words())},
        exec_mask=exec_mask,
        waves=WAVES,
    )
    on = active(exec_mask)
    for wave in range(WAVES):
        pushed = [0] * 64
        for lane in range(64):
            if on[lane]:
                pushed[(int(targets[wave, lane]) + offset) // 4 % 64] = other[wave, lane]
        assert state.v[0][wave].tolist() == [pushed[lane] if on[lane] else data[wave, lane] for lane in range(64)]


SWIZZLES = {
    "swizzle(SWAP,16)": lambda lane: lane ^ 16,
    "swizzle(SWAP,1)": lambda lane: lane ^ 1,
    "swizzle(REVERSE,8)": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "swizzle(BROADCAST,4,3)": lambda lane: lane // 4 * 4 + 3,
    "swizzle(BROADCAST,32,31)": lambda lane: lane // 32 * 32 + 31,
    "swizzle(QUAD_PERM,3,0,2,1)": lambda lane: lane // 4 * 4 + (3, 0, 2, 1)[lane % 4],
    'swizzle(BITMASK_PERM,"01pip")': lambda lane: lane // 32 * 32 + 8 + (lane & 4) + (~lane & 2) + (lane & 1),
    "swizzle(ROTATE,0,3)": lambda lane: lane // 32 * 32 + (lane + 3) % 32,
    "swizzle(ROTATE,1,3)": lambda lane: lane // 32 * 32 + (lane - 3) % 32,
    str(0x401F): lambda lane: lane ^ 16,  # the number of swizzle(SWAP,16)
    str(0x0018 | 5 << 5): lambda lane: lane & 56 | 5,  # and 0x18, or 5
    str(0x8000 | 0b01_10_00_11): lambda lane: lane // 4 * 4 + (3, 0, 2, 1)[lane % 4],
    str(0xC000 | 1 << 10 | 3 << 5): lambda lane: lane // 32 * 32 + (lane - 3) % 32,
    str(0): lambda lane: lane // 32 * 32,
}


@pytest.mark.parametrize("pattern", SWIZZLES)
@pytest.mark.parametrize("exec_mask", MASKS)
def test_swizzle(data, pattern, exec_mask):
    state = run_one(
        f"ds_swizzle_b32 v0, v1 offset:{pattern}",
        v={0: data, 1: (other := words())},
        exec_mask=exec_mask,
        waves=WAVES,
    )
    on = active(exec_mask)
    for lane in range(64):
        source = SWIZZLES[pattern](lane)
        read = other[:, source] if on[source] else 0
        assert (state.v[0][:, lane] == (read if on[lane] else data[:, lane])).all()


NUMBERS = {  # as an assembler encodes them
    "swizzle(SWAP,16)": 0x401F,
    "swizzle(REVERSE,8)": 0x1C1F,
    "swizzle(BROADCAST,4,3)": 0x007C,
    "swizzle(QUAD_PERM,3,0,2,1)": 0x8063,
    'swizzle(BITMASK_PERM,"01pip")': 0x0907,
    "swizzle(ROTATE,1,3)": 0xC460,
}


@pytest.mark.parametrize("pattern", NUMBERS)
def test_a_swizzle_and_its_number_are_one(pattern):
    assert (swizzled(pattern) == swizzled(NUMBERS[pattern])).all()


@pytest.mark.parametrize("pattern", ["swizzle(FFT,5)", 0xE000, "swizzle(SWAP,1,2)", -1, "swizzle(SWAP,x)"])
def test_unknown_swizzles_are_refused(pattern):
    with pytest.raises(DecodeError, match="swizzle pattern"):
        swizzled(pattern)


@pytest.mark.parametrize(
    "text",
    [
        "ds_bpermute_b32 v0, v1, v2 gds",
        "v_readlane_b32 s0, s1, 0",
        "v_readlane_b32 v0, v1, 0",
        "v_writelane_b32 v0, s1, v2",
        "v_mbcnt_lo_u32_b32 v0, -v1, v2",
        "v_swap_b32 v0, v1 row_mirror",
        "v_readfirstlane_b32 s0, v1, v2",
    ],
)
def test_what_is_not_such_an_instruction_is_refused(text):
    with pytest.raises(NotImplementedError):
        run_one(text)
