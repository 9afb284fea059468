"""Launches of hand-written assembly: first registers, arguments, scheduling, barriers, and what is refused."""

import ctypes
import time

import numpy as np
import pytest

from portable.platform.emulated.isa import decode
from portable.platform.emulated.machine import Buffer, ExecutionError, kernarg, launch, pack
from portable.platform.emulated.memory import MemoryFault

OUT = 4096  # words of the output buffer


def assembly(body, name="k", arch="gfx942", facts="", arguments=""):
    """A kernel that finds its arguments at s[0:1] and its workgroup at s2, s3, s4."""
    return f"""
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
	.file	1 "/src" "kernel.py"
{name}:
	.loc	1 7 0
{body}
	s_endpgm
.Lfunc_end0:
	.section	.rodata
	.amdhsa_kernel {name}
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_count 2
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 1
		.amdhsa_system_sgpr_workgroup_id_z 1
		{facts}
	.end_amdhsa_kernel
	.amdgpu_metadata
amdhsa.kernels:
  - .args:
{arguments}
    .name:           {name}
    .end: 0
	.end_amdgpu_metadata
"""


def run(body, grid=(1, 1, 1), block=(64, 1, 1), arch="gfx942", facts="", **options):
    """The output words that a kernel writes to the address at s[8:9], and the number of instructions."""
    out = np.zeros(OUT, np.uint32)
    code = decode(assembly("	s_load_dwordx2 s[8:9], s[0:1], 0x0\n" + body, arch=arch, facts=facts), "k")
    explicit = pack([("*i32", out.ctypes.data)])
    count = launch(code, grid, block, explicit, [Buffer("out", out.view(np.uint8))], **options)
    return out, count


# v3 = 4 * (number of the thread in the grid), for one-dimensional blocks of s7 threads
POSITION = """
	s_mul_i32 s6, s2, s7
	v_add_u32_e32 v3, s6, v0
	v_lshlrev_b32_e32 v3, 2, v3
"""


def test_arguments_are_packed_as_in_c():
    class Arguments(ctypes.Structure):
        _fields_ = (
            ("a", ctypes.c_int8),
            ("b", ctypes.c_void_p),
            ("c", ctypes.c_uint16),
            ("d", ctypes.c_float),
            ("e", ctypes.c_bool),
            ("f", ctypes.c_double),
            ("g", ctypes.c_int32),
        )

    expected = Arguments(-3, 1 << 40, 65535, 0.1, True, -2.5, -(2**31))
    types = ("i8", "*fp32", "u16", "fp32", "i1", "fp64", "i32")
    got = pack(zip(types, (-3, 1 << 40, 65535, 0.1, True, -2.5, -(2**31)), strict=True))
    assert got == bytes(expected)[: len(got)]


def test_half_arguments_are_rounded_to_nearest_even():
    assert pack([("bf16", 1 + 2**-8), ("bf16", 1 + 3 * 2**-8), ("fp16", 1 + 2**-11)]).hex() == "803f823f003c"


def test_unknown_argument_types_are_named():
    with pytest.raises(ValueError, match="argument type 'nvTmaDesc' is not"):
        pack([("nvTmaDesc", 0)])


HIDDEN = """      - .offset:         {offset}
        .size:           4
        .value_kind:     {kind}"""


def test_hidden_arguments_are_those_of_this_kernel():
    first = assembly("	s_nop 0", "first", arguments=HIDDEN.format(offset=16, kind="hidden_block_count_x"))
    second = assembly(
        "	s_nop 0",
        "second",
        arguments="\n".join(
            HIDDEN.format(offset=offset, kind=kind)
            for offset, kind in (
                (32, "hidden_block_count_x"),
                (40, "hidden_block_count_z"),
                (44, "hidden_group_size_y"),
            )
        ),
    )
    both = first.split("	.amdgpu_metadata")[0] + second.split("	.amdgpu_metadata")[0]
    both += "	.amdgpu_metadata\namdhsa.kernels:\n"
    both += "".join(text.split("amdhsa.kernels:\n")[1].split("	.end_amdgpu")[0] for text in (first, second))
    explicit = bytes(range(1, 9))
    found = kernarg(decode(both, "second"), explicit, (5, 6, 7), (64, 3, 2))
    assert found[:8].tobytes() == explicit
    assert found[32:36].view(np.uint32) == 5
    assert found[40:44].view(np.uint32) == 7
    assert found[44:46].view(np.uint16) == 3
    assert not found[8:32].any()
    assert kernarg(decode(both, "first"), explicit, (5, 6, 7), (64, 3, 2))[16:20].view(np.uint32) == 5


def test_a_hidden_argument_inside_the_explicit_ones_is_refused():
    code = decode(assembly("	s_nop 0", arguments=HIDDEN.format(offset=0, kind="hidden_block_count_x")), "k")
    with pytest.raises(ExecutionError, match="hidden_block_count_x at 0 lies inside 8 bytes"):
        kernarg(code, bytes(8), (1, 1, 1), (64, 1, 1))


def test_workgroup_ids_and_packed_thread_ids():
    body = """
	s_lshl_b32 s5, s3, 1
	s_add_i32 s5, s5, s2
	s_lshl_b32 s6, s4, 2
	s_add_i32 s5, s5, s6
	v_and_b32_e32 v1, 0x3ff, v0
	v_bfe_u32 v2, v0, 10, 10
	v_bfe_u32 v3, v0, 20, 10
	v_lshlrev_b32_e32 v2, 3, v2
	v_lshlrev_b32_e32 v3, 5, v3
	v_add3_u32 v1, v1, v2, v3
	v_lshlrev_b32_e32 v1, 2, v1
	v_mov_b32_e32 v4, s5
	s_lshl_b32 s5, s5, 9
	v_add_u32_e32 v1, s5, v1
	v_add_u32_e32 v4, 1, v4
	global_store_dword v1, v4, s[8:9]
"""
    out, _ = run(body, grid=(2, 2, 2), block=(8, 4, 3))  # 96 threads: the second wave is half empty
    expected = np.zeros((8, 128), np.uint32)
    expected[:, :96] = np.arange(1, 9)[:, None]
    np.testing.assert_array_equal(out[:1024].reshape(8, 128), expected)


def test_workgroups_beyond_one_batch_all_run():
    body = "	s_movk_i32 s7, 0x40\n" + POSITION + "	v_mov_b32_e32 v1, s2\n	global_store_dword v3, v1, s[8:9]\n"
    out, count = run(body, grid=(50, 1, 1))
    np.testing.assert_array_equal(out[: 50 * 64].reshape(50, 64), np.arange(50)[:, None] * np.ones((1, 64)))
    assert count == 50 * 8


def test_waves_that_part_at_branches_meet_again():
    """Wave n of workgroup g loops n + g + 1 times."""
    body = (
        "	s_movk_i32 s7, 0x100\n"
        + POSITION
        + """
	v_readfirstlane_b32 s10, v0
	s_lshr_b32 s10, s10, 6
	s_add_i32 s10, s10, s2
	s_mov_b32 s11, 0
	v_mov_b32_e32 v1, 0
.LBB0_1:
	v_add_u32_e32 v1, 3, v1
	s_add_i32 s11, s11, 1
	s_cmp_le_i32 s11, s10
	s_cbranch_scc1 .LBB0_1
	global_store_dword v3, v1, s[8:9]
"""
    )
    out, count = run(body, grid=(4, 1, 1), block=(256, 1, 1))
    loops = np.add.outer(np.arange(4), np.arange(4)) + 1
    np.testing.assert_array_equal(out[:1024].reshape(4, 4, 64), 3 * loops[:, :, None] * np.ones(64))
    assert count == 16 * 12 + 4 * loops.sum()


EXCHANGE = """
	v_lshlrev_b32_e32 v1, 2, v0
	v_mov_b32_e32 v2, s2
	v_lshl_add_u32 v2, v2, 10, v0
	ds_write_b32 v1, v2
	s_waitcnt lgkmcnt(0)
	{barrier}
	v_sub_u32_e32 v1, 0x3fc, v1
	ds_read_b32 v2, v1
	s_waitcnt lgkmcnt(0)
	global_store_dword v3, v2, s[8:9]
"""


def exchange(barrier, **options):
    body = "	s_movk_i32 s7, 0x100\n" + POSITION + EXCHANGE.format(barrier=barrier)
    return run(body, grid=(3, 1, 1), block=(256, 1, 1), lds_bytes=1024, **options)


def test_a_barrier_holds_each_workgroup_alone():
    out, _ = exchange("s_barrier")
    expected = np.arange(3)[:, None] * 1024 + np.arange(255, -1, -1)
    np.testing.assert_array_equal(out[:768].reshape(3, 256), expected)


def test_a_missing_barrier_is_a_race():
    with pytest.raises(MemoryFault, match="ds_read_b32"):
        exchange("s_nop 0")


def test_waves_that_have_ended_do_not_hold_a_barrier():
    body = """
	v_readfirstlane_b32 s10, v0
	s_cmp_eq_u32 s10, 0
	s_cbranch_scc1 .LBB0_1
	s_barrier
	v_lshlrev_b32_e32 v1, 2, v0
	global_store_dword v1, v0, s[8:9]
.LBB0_1:
"""
    out, _ = run(body, block=(128, 1, 1))
    np.testing.assert_array_equal(out[:128], np.where(np.arange(128) < 64, 0, np.arange(128)))


SPIN = """
	v_mov_b32_e32 v0, 0
.LBB0_1:
	global_load_dword v1, v0, s[8:9]
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s10, v1
	s_cmp_lg_u32 s10, {value}
	s_cbranch_scc1 .LBB0_1
"""


def test_waiting_for_another_workgroup_without_end_is_refused():
    with pytest.raises(ExecutionError, match=r"k, line \d+ \(kernel.py:7\).*2\d{3} steps without an end"):
        run(SPIN.format(value=1), budget=2000)


def test_a_wait_for_a_far_workgroup_is_refused_soon():
    """Workgroup 0 waits for a flag of workgroup 1000."""
    body = f"	s_cmp_lg_u32 s2, 0\n	s_cbranch_scc1 .LBB0_2\n{SPIN.format(value=7)}	s_endpgm\n.LBB0_2:\n"
    body += """
	s_cmp_lg_u32 s2, 1000
	s_cbranch_scc1 .LBB0_3
	v_mov_b32_e32 v0, 0
	v_mov_b32_e32 v1, 7
	global_store_dword v0, v1, s[8:9]
.LBB0_3:
"""
    start = time.monotonic()
    message = r"k, line \d+ \(kernel.py:7\): .*workgroup \(0, 0, 0\): waits without end: .* another's batch"
    with pytest.raises(ExecutionError, match=message):
        run(body, grid=(1001, 1, 1))
    assert time.monotonic() - start < 10


def test_a_loop_that_ends_is_no_standstill():
    """20,000 turns, counted in a vector register, that read the same word each time."""
    body = """
	v_mov_b32_e32 v0, 0
	v_mov_b32_e32 v2, 0
.LBB0_1:
	global_load_dword v1, v0, s[8:9]
	v_add_u32_e32 v2, 1, v2
	v_cmp_gt_u32_e32 vcc, 0x4e20, v2
	s_cbranch_vccnz .LBB0_1
	global_store_dword v0, v2, s[8:9] offset:4
"""
    out, _ = run(body)
    assert out[1] == 20000


@pytest.mark.parametrize("fact, value", [("float_denorm_mode_32", 0), ("float_round_mode_16_64", 3), ("ieee_mode", 0)])
def test_other_modes_of_arithmetic_are_refused(fact, value):
    with pytest.raises(ExecutionError, match=f"k: {fact} {value} is not emulated; it must be [031]$"):
        run("	s_nop 0", facts=f".amdhsa_{fact} {value}")
    run("	s_nop 0", facts=".amdhsa_float_denorm_mode_32 3\n.amdhsa_ieee_mode 1")


def test_a_buffer_whose_size_was_never_written_is_a_fault():
    """s[8:9] hold the address, s10 was never written, s11 is 0."""
    with pytest.raises(MemoryFault, match=r"^k: access through a buffer whose size was never written by 'buffer_load"):
        run("	s_mov_b32 s11, 0\n	v_mov_b32_e32 v1, 0\n	buffer_load_dword v2, v1, s[8:11], 0 offen")


def test_a_scalar_load_out_of_bounds_is_named():
    with pytest.raises(
        MemoryFault, match=r"^k: out-of-bounds read .*'s_load_dword s4.* at kernel.py:7, workgroup \(0, 0, 0\)"
    ):
        run("	s_load_dword s4, s[8:9], 0x8000")


def test_workgroups_of_a_batch_take_turns():
    """The second workgroup, which spins at a lower program counter, waits for the first one's late store."""
    body = (
        "	s_cmp_eq_u32 s2, 0\n	s_cbranch_scc1 .LBB0_2\n"
        + SPIN.format(value=7)
        + """
	v_mov_b32_e32 v1, 9
	global_store_dword v0, v1, s[8:9] offset:4
	s_endpgm
.LBB0_2:
	v_mov_b32_e32 v0, 0
	v_mov_b32_e32 v1, 7
	global_store_dword v0, v1, s[8:9]
"""
    )
    out, _ = run(body, grid=(2, 1, 1))
    assert out[:3].tolist() == [7, 9, 0]


def test_unknown_opcodes_are_named_before_anything_runs():
    with pytest.raises(ExecutionError, match=r"k \(gfx942\) uses opcodes .*: s_levitate, v_teleport_b32"):
        run("	v_teleport_b32 v0, v1\n	s_levitate s0")


def test_an_error_in_a_handler_names_the_instruction():
    with pytest.raises(ExecutionError, match=r"k, line \d+ \(kernel.py:7\): 'v_mfma.*clamp', workgroup \(0, 0, 0\)"):
        run("	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] clamp")


@pytest.mark.parametrize("arch, limit", [("gfx942", 65536), ("gfx950", 163840)])
def test_lds_is_limited(arch, limit):
    run("	s_nop 0", arch=arch, lds_bytes=limit)
    with pytest.raises(ExecutionError, match=f"k: {limit + 1} bytes of LDS where {arch} has {limit}"):
        run("	s_nop 0", arch=arch, lds_bytes=limit + 1)
    with pytest.raises(ExecutionError, match=f"{limit + 1} bytes of LDS"):
        run("	s_nop 0", arch=arch, facts=f".amdhsa_group_segment_fixed_size {limit + 1}")


def test_an_access_outside_the_buffers_is_located():
    with pytest.raises(MemoryFault) as caught:
        run("	s_movk_i32 s7, 0x7fff\n" + POSITION + "	global_store_dword v3, v0, s[8:9]", grid=(2, 1, 1))
    message = str(caught.value)
    assert "global_store_dword v3, v0, s[8:9]" in message
    assert "kernel.py:7" in message
    assert "(1, 0, 0)" in message


def test_another_architecture_is_refused():
    with pytest.raises(ExecutionError, match="k: gfx90a is not one of gfx942, gfx950"):
        run("	s_nop 0", arch="gfx90a")


def test_code_that_runs_past_its_end_is_refused():
    text = assembly("	s_nop 0").replace("	s_endpgm\n", "")
    with pytest.raises(ExecutionError, match="k: the code runs past its end"):
        launch(decode(text, "k"), (1, 1, 1), (64, 1, 1), b"", [])


def test_registers_hold_no_number_before_they_are_written():
    body = """
	v_add_f32_e32 v1, 1.0, v9
	v_lshlrev_b32_e32 v2, 2, v0
	global_store_dword v2, v1, s[8:9]
	v_mov_b32_e32 v1, s50
	global_store_dword v2, v1, s[8:9] offset:256
"""
    out, _ = run(body)
    assert np.isnan(out[:128].view(np.float32)).all()
    with pytest.raises(MemoryFault):
        run("	global_store_dword v9, v0, s[8:9]")


def test_workgroup_info_is_refused():
    with pytest.raises(ExecutionError, match="k asks for workgroup info"):
        run("	s_nop 0", facts=".amdhsa_system_sgpr_workgroup_info 1")


def test_arguments_come_behind_what_else_a_kernel_asks_for():
    out = np.zeros(64, np.uint32)
    body = """
	s_load_dwordx2 s[20:21], s[8:9], 0x0
	v_mov_b32_e32 v1, s12
	v_lshlrev_b32_e32 v2, 2, v0
	global_store_dword v2, v1, s[20:21]
"""
    facts = "".join(
        f".amdhsa_user_sgpr_{name} 1\n"
        for name in ("private_segment_buffer", "dispatch_ptr", "queue_ptr", "dispatch_id")
    )
    text = assembly(body, facts=facts).replace("user_sgpr_count 2", "user_sgpr_count 12")
    explicit = pack([("*i32", out.ctypes.data)])
    launch(decode(text, "k"), (2, 1, 1), (64, 1, 1), explicit, [Buffer("out", out.view(np.uint8))])
    assert (out == 1).all()
