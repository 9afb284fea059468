"""Registers that M0 chooses, and flat addresses that lead to LDS and scratch."""

import numpy as np
import pytest
from emulated_one import run_one

from portable.platform.emulated.isa import APERTURES, M0, Code, instruction
from portable.platform.emulated.machine import Buffer, ExecutionError, launch, pack
from portable.platform.emulated.memory import Memory, MemoryFault

LANE = np.arange(64)
SHARED, PRIVATE = APERTURES["src_shared_base"], APERTURES["src_private_base"]


@pytest.mark.parametrize(
    "line, value",
    [
        ("s_set_gpr_idx_on s0, gpr_idx(SRC0)", 0xABCD0E00 | 0x1000 | 0x34),
        ("s_set_gpr_idx_on s0, gpr_idx(DST)", 0xABCD0E00 | 0x8000 | 0x34),
        ("s_set_gpr_idx_on s0, gpr_idx(SRC0,SRC1,SRC2,DST)", 0xABCD0E00 | 0xF000 | 0x34),
        ("s_set_gpr_idx_on 5, 9", 0xABCD0E00 | 0x9000 | 5),
        ("s_set_gpr_idx_idx s0", 0xABCD1E34),
        ("s_set_gpr_idx_mode gpr_idx(SRC1)", 0xABCD2EEF),
        ("s_set_gpr_idx_off", 0xABCD1EEF),
    ],
)
def test_what_m0_holds(line, value):
    assert run_one(line, s={0: 0x1234, "m0": 0xABCD1EEF}).s[M0].tolist() == [value]


def result_of(lines, threads=128, facts=None):
    """What `v9` holds at the end of each thread; v0 is the thread, s6 the wave."""
    begin = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "v_lshrrev_b32 v8, 6, v0", "v_readfirstlane_b32 s6, v8"]
    end = ["v_lshlrev_b32 v8, 2, v0", "global_store_dword v8, v9, s[4:5]", "s_endpgm"]
    code = tuple(instruction(line, number) for number, line in enumerate([*begin, *lines, *end]))
    out = np.zeros(threads, np.uint32)
    facts = {"user_sgpr_count": "2", "next_free_vgpr": "20"} | (facts or {})
    labels = {"inside": 1 + next((n for n, i in enumerate(code) if "gpr_idx_on" in i.name), 0)}
    raw = out.view(np.uint8)
    launch(
        Code("k", "gfx942", code, labels, facts),
        (1, 1, 1),
        (threads, 1, 1),
        pack([("*", raw.ctypes.data)]),
        [Buffer("out", raw)],
    )
    return out


FILL = [f"v_mov_b32 v{register}, {register}" for register in range(10, 20)]


def test_each_wave_has_an_index_of_its_own():
    """Source v[12 + wave], then destination v[14 + wave]."""
    read = ["s_set_gpr_idx_on s6, gpr_idx(SRC0)", "v_mov_b32 v9, v12", "s_set_gpr_idx_off"]
    assert result_of([*FILL, *read]).reshape(2, 64).T.tolist() == [[12, 13]] * 64
    write = ["s_set_gpr_idx_on s6, gpr_idx(DST)", "v_mov_b32 v14, v0", "s_set_gpr_idx_off", "v_mov_b32 v9, v15"]
    got = result_of([*FILL, *write])
    assert got.tolist() == [15] * 64 + list(range(64, 128))
    both = ["s_set_gpr_idx_on 3, 9", "s_nop 0", "v_mov_b32 v9, v12", "s_set_gpr_idx_off", "v_mov_b32 v9, v12"]
    assert set(result_of([*FILL, *both]).tolist()) == {15}
    masked = ["s_mov_b64 exec, 1", *write[:3], "s_mov_b64 exec, -1", "v_mov_b32 v9, v15"]
    assert result_of([*FILL, *masked]).tolist() == [15] * 64 + [64] + [15] * 63


def test_indices_that_change_within():
    lines = ["s_set_gpr_idx_on 2, gpr_idx(SRC0)", "v_mov_b32 v9, v10", "s_set_gpr_idx_idx 5", "v_mov_b32 v8, v10"]
    lines += ["s_set_gpr_idx_mode gpr_idx(SRC1)", "v_mov_b32 v7, v10", "s_set_gpr_idx_off"]
    sums = ["v_lshl_add_u32 v9, v9, 8, v8", "v_lshl_add_u32 v9, v9, 8, v7"]
    assert set(result_of([*FILL, *lines, *sums]).tolist()) == {12 << 16 | 15 << 8 | 10}


def test_registers_that_the_kernel_has_not():
    lines = ["s_set_gpr_idx_on 8, gpr_idx(SRC0)", "v_mov_b32 v9, v12", "s_set_gpr_idx_off"]
    with pytest.raises(MemoryFault, match=r"k: out-of-bounds register v20, an index of 8 from v12 where .* has 20 by"):
        result_of([*FILL, *lines])
    assert set(result_of([*FILL, "s_mov_b64 exec, 0", *lines, "s_mov_b64 exec, -1", "v_mov_b32 v9, 3"])) == {3}


@pytest.mark.parametrize("line", ["v_add_u32 v9, v9, v10", "s_branch inside", "v_mov_b32_dpp v9, v10 row_shl:1"])
def test_what_is_not_emulated_where_registers_are_indexed(line):
    with pytest.raises(ExecutionError, match=rf"{line.split()[0]}.* not emulated|where registers are indexed"):
        result_of(["s_set_gpr_idx_on 2, gpr_idx(SRC0)", line, "s_set_gpr_idx_off"])


def test_branches_into_indexing_are_refused():
    lines = ["s_branch inside", "s_set_gpr_idx_on 2, gpr_idx(SRC0)", "v_mov_b32 v9, v0", "s_set_gpr_idx_off"]
    with pytest.raises(ExecutionError, match=r"a branch to 'v_mov_b32 v9, v0', where registers are indexed"):
        result_of(lines)


def memory():
    """64 bytes of LDS, 32 of scratch a lane, 256 of global memory."""
    mem = Memory(1, 64, 2, 32)
    whole = np.zeros(256, np.uint8)
    return mem, whole, mem.add(whole, "x")


def test_apertures_are_constants_of_64_bits():
    got = run_one("s_mov_b64 s[0:1], src_shared_base\ns_mov_b64 s[2:3], src_private_base")
    assert got.s[:4, 0].tolist() == [0, SHARED >> 32, 0, PRIVATE >> 32]
    got = run_one("s_mov_b64 s[0:1], src_shared_limit\ns_mov_b64 s[2:3], src_private_limit")
    assert got.s[:4, 0].tolist() == [0xFFFFFFFF, SHARED >> 32, 0xFFFFFFFF, PRIVATE >> 32]
    for text in ("s_mov_b32 s0, src_shared_base", "v_mov_b32 v0, src_private_base"):
        with pytest.raises(NotImplementedError, match="src_"):
            run_one(text)


def addresses(start):
    """Lane by lane: LDS, scratch, global memory."""
    each = np.stack([SHARED + LANE % 16 // 3 * 4, PRIVATE + LANE % 8 * 4, start + LANE * 4]).astype(np.uint64)
    return each[LANE % 3, LANE]


@pytest.mark.parametrize("waves", [1, 2])
def test_flat_accesses_go_where_each_lane_points(waves):
    mem, whole, start = memory()
    at = addresses(start)
    values = np.stack([LANE * 7 + 1 + 1000 * wave for wave in range(waves)]).astype(np.uint32)
    mask = sum(1 << lane for lane in range(64) if lane % 3)  # LDS by one wave alone
    run_one("flat_store_dword v[0:1], v2", {0: at, 2: values}, exec_mask=[mask] * waves, waves=waves, memory=mem)
    lds = np.full((waves, 64), 9, np.uint32)
    run_one(
        "flat_store_dword v[0:1], v2",
        {0: at, 2: lds},
        exec_mask=[~mask & (1 << 64) - 1] * waves,
        waves=waves,
        memory=mem,
    )
    got = run_one("flat_load_dword v3, v[0:1]", {0: at}, waves=waves, memory=mem)
    want = np.where(LANE % 3 == 0, 9, np.where(LANE % 3 == 1, values, values[-1]))
    np.testing.assert_array_equal(got.v[3], want)
    np.testing.assert_array_equal(whole.view(np.uint32)[2::3], values[-1][2::3])


def test_flat_atomics_on_lds_and_global_memory():
    mem, whole, start = memory()
    at = np.where(LANE % 2 == 0, SHARED + 8, start + 16).astype(np.uint64)
    run_one("ds_write_b32 v0, v1", {0: np.full(64, 8), 1: np.full(64, 100)}, memory=mem)
    got = run_one("flat_atomic_add v3, v[0:1], v2 sc0", {0: at, 2: np.ones(64, np.uint32)}, memory=mem)
    np.testing.assert_array_equal(got.v[3, 0], np.where(LANE % 2 == 0, 100, 0) + LANE // 2)
    assert whole.view(np.uint32)[4] == 32
    got = run_one("ds_read_b32 v1, v0", {0: np.full(64, 8)}, memory=mem)
    assert set(got.v[1, 0].tolist()) == {132}
    with pytest.raises(MemoryFault, match="atomic on scratch"):
        run_one("flat_atomic_add v[0:1], v2", {0: np.full(64, PRIVATE, np.uint64)}, memory=mem)


@pytest.mark.parametrize("base, message", [(SHARED, "LDS write of 4 bytes at 64"), (PRIVATE, "scratch write .* at 64")])
def test_flat_accesses_are_checked(base, message):
    mem, _, _ = memory()
    with pytest.raises(MemoryFault, match=f"out-of-bounds {message} of (64|32) by 'flat_store"):
        run_one("flat_store_dword v[0:1], v2 offset:4", {0: np.full(64, base + 60, np.uint64)}, memory=mem)
    with pytest.raises(MemoryFault, match="uninitialised bytes of"):
        run_one("flat_load_dword v2, v[0:1]", {0: np.full(64, base, np.uint64)}, memory=mem)
