"""What the assembly says of a kernel: hand-written text with known answers, and real Triton kernels."""

import re

import pytest
import torch

from portable.platform.emulated.isa import DecodeError, decode, instruction
from portable.platform.emulated.loops import cycles, matrix_clocks
from portable.platform.emulated.static import analyse, kernels, read


def assembly(body, name="k", arch="gfx942", lds=0, vector=8, accumulation=0, scalar=16, threads=256, allocated=None):
    return f"""
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
{name}:
{body}
	s_endpgm
.Lfunc_end_{name}:
	.amdhsa_kernel {name}
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_private_segment_fixed_size 24
		.amdhsa_next_free_vgpr {allocated or vector + accumulation}
	.end_amdhsa_kernel
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     {accumulation}
    .args:
      - .offset:         0
        .name:           x
    .max_flat_workgroup_size: {threads}
    .name:           {name}
    .sgpr_count:     {scalar}
    .sgpr_spill_count: 3
    .vgpr_count:     {vector + accumulation}
    .vgpr_spill_count: 5
	.end_amdgpu_metadata
"""


def test_registers_spills_and_counts():
    found = analyse(
        assembly(
            """
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_dwordx4 v[0:3], v[4:5], off
	buffer_load_dwordx3 v[0:2], v4, s[0:3], 0 offen
	flat_load_dword v0, v[4:5]
	global_load_short_d16_hi v0, v[4:5], off
	buffer_load_ubyte v0, v4, s[0:3], 0 offen
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	global_store_dwordx2 v[4:5], v[0:1], off
	global_store_byte v[4:5], v0, off
	global_atomic_add_f32 v[4:5], v0, off
	v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
	v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
	v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]
""",
            vector=6,
            accumulation=16,
        ),
        "k",
    )
    assert (found.vector_registers, found.accumulation_registers, found.scalar_registers) == (6, 16, 16)
    assert (found.vector_spills, found.scalar_spills, found.scratch_bytes) == (5, 3, 24)
    assert found.loads == {16: 2, 12: 1, 4: 1, 2: 1, 1: 1}
    assert found.stores == {8: 1, 1: 1}
    assert found.matrix == {"v_mfma_f32_16x16x16_f16": 2, "v_mfma_f32_32x32x8_f16": 1}
    assert (found.matrix_instructions, found.instructions) == (3, 14)
    assert "3 of 14 instructions (21%): 2 v_mfma_f32_16x16x16_f16, 1 v_mfma_f32_32x32x8_f16" in str(found)
    assert "2 of 16 bytes a lane, 1 of 12 bytes a lane" in str(found)


def test_70_kib_of_lds_is_a_fault_with_both_numbers_on_gfx942_alone():
    found = analyse(assembly("", name="big", lds=70 * 1024), "big")
    assert found.faults == ("kernel big uses 71680 bytes of LDS where gfx942 has 65536",)
    assert found.faults[0] in str(found)
    assert found.occupancy == 0
    assert analyse(assembly("", lds=64 * 1024), "k").faults == ()
    larger = analyse(assembly("", arch="gfx950", lds=70 * 1024), "k")
    assert larger.faults == ()
    assert larger.occupancy == 2  # two workgroups of four waves, on four SIMDs


@pytest.mark.parametrize(
    "registers, waves",
    # 512 registers, handed out in eights
    [(1, 8), (64, 8), (65, 7), (72, 7), (73, 6), (128, 4), (129, 3), (168, 3), (169, 2), (256, 2), (257, 1), (512, 1)],
)
def test_occupancy_by_vector_registers(registers, waves):
    assert analyse(assembly("", vector=registers), "k").occupancy == waves
    half = registers // 2
    shared = analyse(assembly("", vector=registers - half, accumulation=half), "k")
    assert shared.occupancy == waves  # accumulation registers are of the same file


def test_occupancy_by_registers_that_are_allocated_but_not_used():
    found = analyse(assembly("", vector=86, allocated=169), "k")
    assert (found.vector_registers, found.allocated_registers, found.occupancy) == (86, 169, 2)


@pytest.mark.parametrize("scalar, waves", [(80, 8), (81, 7), (96, 7), (97, 6), (106, 6)])
def test_occupancy_by_scalar_registers(scalar, waves):
    """800 in sixteens, 16 of each wave's for the trap handler."""
    assert analyse(assembly("", scalar=scalar), "k").occupancy == waves


@pytest.mark.parametrize(
    "arch, lds, threads, waves",
    [
        ("gfx942", 16384, 256, 4),
        ("gfx942", 16385, 256, 3),  # handed out in 512 bytes
        ("gfx942", 32768, 512, 4),
        ("gfx942", 40000, 64, 1),  # one wave, on one SIMD
        ("gfx950", 16640, 256, 8),  # 163840 / 8 = 20480
        ("gfx950", 53760, 256, 3),  # 42 x 1280
        ("gfx950", 53761, 256, 2),
    ],
)
def test_occupancy_by_lds(arch, lds, threads, waves):
    found = analyse(assembly("", arch=arch, lds=lds, threads=threads), "k")
    assert found.occupancy == found.occupancy_by_lds == waves


def test_occupancy_counts_whole_workgroups():
    found = analyse(assembly("", vector=168, threads=512), "k")
    assert found.occupancy_by_registers == 3  # 12 waves: a workgroup of 8, and half of another
    assert found.occupancy == 2
    none = analyse(assembly("", vector=256, threads=1024), "k")
    assert none.faults == ("kernel k has registers for 8 waves where a workgroup has 16",)


def test_lds_that_the_launch_chooses_is_unknown_until_it_is_said():
    text = assembly("\tds_read_b32 v0, v1")
    assert analyse(text, "k").lds_bytes is None
    assert "chosen at launch, at most 65536 bytes" in str(analyse(text, "k"))
    assert analyse(text, "k", 4096).lds_bytes == 4096
    assert analyse(assembly("\tds_bpermute_b32 v0, v1, v2"), "k").lds_bytes == 0
    assert analyse(assembly("\tglobal_load_lds_dword v[0:1], off"), "k").lds_bytes is None
    assert analyse(assembly("\tbuffer_load_dword v0, s[0:3], 0 offen lds"), "k").lds_bytes is None


NEST = """
	s_branch .Lfirst
.Llatch:
	v_add_u32 v0, v1, v2
	s_cbranch_scc0 .Lend
.Lfirst:
	v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[2:3], v[0:3]
.Linner:
	v_exp_f32 v0, v1
	v_exp_f32 v0, v1
	v_rcp_f16 v0, v1
	scratch_load_dword v0, off, s0
	s_cbranch_scc1 .Linner
	s_cbranch_execz .Llatch
	v_mul_f32 v0, v1, v2
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
	s_branch .Llatch
.Lback:
	s_nop 0
	s_endpgm
.Lend:
	s_cbranch_scc1 .Lback
"""


def test_loops_are_found_by_their_branches():
    """One whose latch stands before its header, one inside it, and a branch back that closes no loop."""
    outer, inner = analyse(assembly(NEST), "k").loops
    assert (outer.label, outer.depth, outer.line, outer.instructions) == (".Lfirst", 1, 10, 7)
    assert (outer.matrix_clocks, outer.vector_clocks, outer.transcendental_clocks) == (16, 12, 0)
    assert outer.matrix_share == 1.0
    assert (inner.label, inner.depth, inner.instructions, inner.scratch) == (".Linner", 2, 5, 1)
    assert (inner.matrix_clocks, inner.vector_clocks, inner.transcendental_clocks) == (0, 0, 48)
    assert analyse(assembly(NEST), "k").hot_loop == outer
    assert analyse(assembly(""), "k").hot_loop is None


def test_a_cycle_with_two_entries_is_a_loop():
    text = assembly(
        "\ts_cbranch_scc0 .Lb\n.La:\n\tv_mov_b32 v0, v1\n.Lb:\n\tv_mov_b32 v1, v0\n\ts_cbranch_scc1 .La\n"
        ".Lself:\n\ts_sleep 1\n\ts_cbranch_vccz .Lself"
    )
    assert [(cycle.label, len(cycle.body)) for cycle in cycles(decode(text, "k"))] == [(".La", 3), (".Lself", 2)]


PEAKS = [  # dense TFLOP/s of the data sheets: 304 compute units at 2.1 GHz, 256 at 2.4 GHz
    ("gfx942", "f32_32x32x8_f16", 1307.4),
    ("gfx942", "f32_16x16x16_bf16", 1307.4),
    ("gfx942", "f32_16x16x32_fp8_bf8", 2614.9),
    ("gfx942", "i32_32x32x16_i8", 2614.9),
    ("gfx942", "f32_16x16x8_xf32", 653.7),
    ("gfx942", "f32_32x32x2_f32", 163.4),
    ("gfx942", "f32_16x16x1_4b_f32", 163.4),
    ("gfx942", "f64_16x16x4_f64", 163.4),
    ("gfx950", "f32_32x32x16_bf16", 2516.6),
    ("gfx950", "f32_16x16x32_f16", 2516.6),
    ("gfx950", "f32_16x16x16_f16", 1258.3),
    ("gfx950", "i32_16x16x64_i8", 5033.2),
    ("gfx950", "f32_16x16x128_f8f6f4", 5033.2),
    ("gfx950", "f32_32x32x64_f8f6f4 cbsz:2 blgp:1", 5033.2),  # 6 bits with 8 bits
    ("gfx950", "f32_32x32x64_f8f6f4 cbsz:4 blgp:2", 10066.3),
    ("gfx950", "f64_16x16x4_f64", 78.6),
]


@pytest.mark.parametrize("arch, name, peak", PEAKS)
def test_matrix_clocks_are_those_of_the_published_rates(arch, name, peak):
    m, k, blocks = re.match(r"\w\d\d_(\d+)x\d+x(\d+)_(?:(\d+)b)?", name).groups("1")
    opcode, _, modifiers = name.partition(" ")
    i = instruction(f"v_mfma_{opcode} v[0:3], v[4:7], v[8:11], v[0:3] {modifiers}".strip())
    work = 2 * int(m) ** 2 * int(k) * int(blocks)
    rate = {"gfx942": 304 * 2.1e9, "gfx950": 256 * 2.4e9}[arch] * 4 / 1e12
    assert work / matrix_clocks(i, arch) * rate == pytest.approx(peak, rel=1e-3)


@pytest.mark.parametrize(
    "text, why",
    [
        (assembly("\tx_mov_b32 v0, v1"), "line 4: x_mov_b32 is no instruction of gfx942"),
        (
            assembly("\tbuffer_load_format_x v0, v1, s[0:3], 0"),
            "line 4: the width of buffer_load_format_x is not known",
        ),
        (assembly("\ts_swappc_b64 s[0:1], s[2:3]"), "line 4: k calls a function; only kernels without calls are read"),
        (assembly("\ts_branch .Lnowhere"), "k branches to .Lnowhere, which is no label of it"),
        (assembly("", allocated="max(1,2)"), ".amdhsa_next_free_vgpr is 'max(1,2)', not a number"),
        (assembly("", arch="gfx1100"), "k: gfx1100 is not one of gfx942, gfx950"),
        (assembly("").replace(".sgpr_spill_count", ".other"), "the metadata of kernel 'k' has no .sgpr_spill_count"),
        (assembly("").replace(".name:           k", ".name: other"), "the assembly has no metadata of kernel 'k'"),
    ],
)
def test_what_is_not_understood_is_refused(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        analyse(text, "k")


def test_every_kernel_of_a_file_by_its_own_facts(tmp_path):
    first, second = assembly("", "first", vector=8), assembly("\tv_nop\n\tds_read_b32 v0, v1", "second", vector=200)
    entry = second[second.index("  - .agpr") : second.index("\t.end_amdgpu")]
    code = second[: second.index("\t.amdgpu_metadata")].replace('\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"', "")
    path = tmp_path / "two.amdgcn"
    path.write_text(
        first.replace("\t.amdgpu_metadata", code + "\t.amdgpu_metadata").replace(
            "\t.end_amdgpu", entry + "\t.end_amdgpu"
        )
    )
    assert kernels(path.read_text()) == ("first", "second")
    (tmp_path / "two.json").write_text('{"name": "second", "shared": 512}')
    one, two = read(path)
    assert (one.name, one.vector_registers, one.instructions, one.lds_bytes) == ("first", 8, 1, 0)
    assert (two.name, two.vector_registers, two.instructions, two.lds_bytes) == ("second", 200, 3, 512)
    (tmp_path / "two.json").write_text("[]")
    assert read(path)[1].lds_bytes is None
    (tmp_path / "two.json").write_text("{")
    with pytest.raises(ValueError, match=r"two\.json is not JSON"):
        read(path)


def test_a_file_without_kernels_or_without_text(tmp_path):
    (tmp_path / "k.s").write_text("nothing")
    with pytest.raises(ValueError, match="holds no kernel"):
        read(tmp_path / "k.s")
    (tmp_path / "k.s").write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ValueError, match="is not assembly text"):
        read(tmp_path / "k.s")
    assert issubclass(DecodeError, ValueError)


# Triton's own


def compiled(arch, make):
    """A kernel compiled for an emulated device, as text and as what is said of it."""
    pytest.importorskip("triton")
    from portable.platform.emulated import activate

    with activate(arch):
        kernel = make()
    text = kernel.asm["amdgcn"]
    return text, analyse(text, kernel.name, kernel.metadata.shared)


def add():
    from emulated.test_kernels import add_kernel

    x = torch.empty(4096)
    return add_kernel.warmup(x, x, x, 4096, block=1024, num_warps=4, grid=(4,))


def product():
    from emulated.test_kernels import dot_kernel

    a = torch.empty(128, 8192, dtype=torch.float16)  # 127 iterations: too many for the compiler to unroll
    out = torch.empty(128, 128)
    return dot_kernel.warmup(a, a, out, 128, 128, 8192, 64, num_warps=4, matrix_instr_nonkdim=16, grid=(1,))


def attention(**options):
    from emulated.test_kernels import attention_kernel

    q = torch.empty(1, 512, 128, dtype=torch.bfloat16)
    options = {"num_warps": 4, "matrix_instr_nonkdim": 16, **options}
    return attention_kernel.warmup(q, q, q, q, 512, 0.09, 128, 64, 128, 1, grid=(4, 1), **options)


ARCHS = ["gfx942", "gfx950"]


@pytest.mark.parametrize("make", [add, product, attention])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_compilers_own_comments_say_the_same(arch, make):
    text, found = compiled(arch, make)

    def said(pattern):
        return int(re.search(pattern, text)[1])

    assert found.arch == arch
    assert found.vector_registers + found.accumulation_registers == said(r"; TotalNumVgprs: (\d+)")
    assert found.accumulation_registers == said(r"; NumAgprs: (\d+)")
    assert found.scalar_registers == said(r"; (?:TotalNumSgprs|NumSgprs): (\d+)")
    assert found.scratch_bytes == said(r"; ScratchSize: (\d+)")
    assert found.occupancy_by_registers == said(r"; Occupancy: (\d+)")
    headers = re.findall(r"^(\.LBB\w+):[^\n]*(?:\n\s+;[^\n]*)*?Loop Header: Depth=(\d+)", text, re.MULTILINE)
    assert [(loop.label, str(loop.depth)) for loop in found.loops] == headers
    assert sum(found.matrix.values()) == len(re.findall(r"^\s+v_mfma", text, re.MULTILINE))
    assert found.faults == ()


@pytest.mark.parametrize("arch", ARCHS)
def test_add_uses_wide_accesses_and_nothing_else(arch):
    _, found = compiled(arch, add)
    assert (found.loads, found.stores) == ({16: 2}, {16: 1})
    assert (found.lds_bytes, found.matrix, found.loops, found.occupancy) == (0, {}, (), 8)


@pytest.mark.parametrize("arch, kind", [("gfx942", "16x16x16_f16"), ("gfx950", "16x16x32_f16")])
def test_the_products_loop_is_bound_by_the_matrix_unit(arch, kind):
    _, found = compiled(arch, product)
    (loop,) = found.loops
    work = 2 * 128 * 128 * 64 / 4  # of a wave, an iteration
    assert set(found.matrix) == {f"v_mfma_f32_{kind}"}
    assert loop.matrix_clocks == work / {"gfx942": 512, "gfx950": 1024}[arch]
    assert loop.matrix_share == 1.0
    assert loop.scratch == 0
    assert "matrix unit busy 100% at most" in str(found)
    assert 16 in found.loads


@pytest.mark.parametrize("arch", ARCHS)
def test_attention_has_more_vector_work_for_its_matrix_work_on_the_faster_matrix_unit(arch):
    _, found = compiled(arch, attention)
    loop = found.hot_loop
    work = 2 * 2 * 128 * 64 * 128 / 4  # of a wave, an iteration: two products
    assert loop.matrix_clocks == work / {"gfx942": 512, "gfx950": 1024}[arch]
    assert loop.transcendental_clocks >= 16 * (128 * 64 + 128) / 4 / 64  # exp2 of every logit, and of every row
    assert 0 < loop.matrix_share < 1
    assert f"of {found.lds_limit} bytes" in str(found)


def test_a_bound_on_the_registers_spills_inside_the_loop():
    _, free = compiled("gfx942", attention)
    _, bounded = compiled("gfx942", lambda: attention(waves_per_eu=4))
    assert bounded.occupancy_by_registers > free.occupancy_by_registers
    assert bounded.vector_spills > 0
    assert bounded.scratch_bytes > 0
    assert bounded.hot_loop.scratch > 0
    assert f"{bounded.hot_loop.scratch} scratch accesses" in str(bounded)
