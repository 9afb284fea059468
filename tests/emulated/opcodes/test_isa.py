"""The decoder, on the forms that the compiler prints."""

import numpy as np
import pytest

from portable.platform.emulated.isa import AGPR, EXEC, M0, VCC, DecodeError, decode, instruction, lanes, masks, operand

TEXT = """\
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-"
	.amdhsa_code_object_version 5
	.text
	.globl	first                           ; -- Begin function first
	.p2align	8
	.type	first,@function
first:                                  ; @first
.Lfunc_begin0:
	.file	1 "/src" "kernel.py"
	.loc	1 19 0 prologue_end             ; kernel.py:19:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_waitcnt vmcnt(0) lgkmcnt(0)           ; a comment
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
.Ltmp3:
	.loc	1 22 9                          ; kernel.py:22:9
	v_add_u32_e32 v0, s2, v0
	s_cbranch_scc1 .LBB0_1 // another
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel first
		.amdhsa_group_segment_fixed_size 1024
		.amdhsa_user_sgpr_count 16
	.end_amdhsa_kernel
	.text
.Lfunc_end0:
	.size	first, .Lfunc_end0-first
first_too:                              ; @first_too
	s_nop 1
	s_endpgm
.Lfunc_end1:
	.amdhsa_kernel first_too
		.amdhsa_group_segment_fixed_size 8
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .name:           first_too
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_x
    .name:           first
    .symbol:         first.kd
  - .agpr_count:     0
    .args:
      - .offset:         40
        .size:           4
        .value_kind:     hidden_block_count_x
      - .offset:         52
        .size:           2
        .value_kind:     hidden_group_size_x
    .name:           first_too
    .symbol:         first_too.kd
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...
	.end_amdgpu_metadata
"""


def test_a_kernel_is_read_from_its_own_part_of_the_text():
    code = decode(TEXT, "first")
    assert (code.name, code.arch) == ("first", "gfx942")
    names = ["s_load_dwordx2", "s_waitcnt", "v_add_u32", "s_cbranch_scc1", "s_endpgm"]
    assert [i.name for i in code.instructions] == names
    assert code.labels[".LBB0_1"] == code.labels[".Ltmp3"] == 2
    assert code.facts == {"group_segment_fixed_size": "1024", "user_sgpr_count": "16"}
    assert code.instructions[0].source == "kernel.py:19"
    assert code.instructions[2].source == code.instructions[4].source == "kernel.py:22"
    assert TEXT.split("\n")[code.instructions[2].line - 1].strip() == code.instructions[2].text


def test_hidden_arguments_are_those_of_the_kernel_that_runs():
    """Two kernels in a file, and an argument of the first with the name of the second."""
    assert decode(TEXT, "first").hidden == {"hidden_block_count_x": 16}
    second = decode(TEXT, "first_too")
    assert second.hidden == {"hidden_block_count_x": 40, "hidden_group_size_x": 52}
    assert second.facts == {"group_segment_fixed_size": "8"}
    assert [i.name for i in second.instructions] == ["s_nop", "s_endpgm"]


@pytest.mark.parametrize("triple", ["amdgcn-amd-amdhsa--gfx950", "amdgpu9.50-amd-amdhsa-unknown-gfx950"])
def test_the_arch_is_the_targets_in_both_spellings(triple):
    assert decode(TEXT.replace("amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-", triple), "first").arch == "gfx950"


def test_what_is_not_there_is_said():
    with pytest.raises(DecodeError, match="no kernel 'third'"):
        decode(TEXT, "third")
    with pytest.raises(DecodeError, match=r"no \.amdgcn_target"):
        decode(TEXT[TEXT.index("\n") :], "first")


@pytest.mark.parametrize(
    ("text", "kind", "index", "count"),
    [
        ("v7", "v", 7, 1),
        ("v[4:7]", "v", 4, 4),
        ("a3", "v", AGPR + 3, 1),
        ("a[0:15]", "v", AGPR, 16),
        ("s101", "s", 101, 1),
        ("s[0:7]", "s", 0, 8),
        ("vcc", "s", VCC, 2),
        ("vcc_lo", "s", VCC, 1),
        ("vcc_hi", "s", VCC + 1, 1),
        ("exec", "s", EXEC, 2),
        ("exec_hi", "s", EXEC + 1, 1),
        ("m0", "s", M0, 1),
        ("null", "s", 125, 1),
        ("ttmp9", "s", 117, 1),
        ("off", "off", 0, 1),
        ("-16", "i", -16, 1),
        ("64", "i", 64, 1),
        ("0xff80", "i", 0xFF80, 1),
        ("-0x4", "i", -4, 1),
        (".LBB0_2", "label", 0, 1),
        ("hwreg(HW_REG_MODE, 4, 2)", "label", 0, 1),
    ],
)
def test_operands(text, kind, index, count):
    found = operand(text)
    assert (found.kind, found.index, found.count, found.text) == (kind, index, count, text)
    assert not (found.negate or found.absolute or found.sign_extend)


@pytest.mark.parametrize(
    ("text", "inner", "negate", "absolute", "extend"),
    [
        ("-v1", "v1", True, False, False),
        ("|v1|", "v1", False, True, False),
        ("-|v[2:3]|", "v[2:3]", True, True, False),
        ("-|s3|", "s3", True, True, False),
        ("-vcc_lo", "vcc_lo", True, False, False),
        ("abs(v1)", "v1", False, True, False),
        ("-abs(v1)", "v1", True, True, False),
        ("neg(0)", "0", True, False, False),
        ("neg(1.0)", "1.0", True, False, False),
        ("sext(v1)", "v1", False, False, True),
        ("-a2", "a2", True, False, False),
    ],
)
def test_signs_of_operands(text, inner, negate, absolute, extend):
    found = operand(text)
    assert (found.text, found.negate, found.absolute, found.sign_extend) == (inner, negate, absolute, extend)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1.0", 0x3F800000),
        ("-4.0", 0xC0800000),
        ("0.15915494", 0x3E22F983),
        ("0.15915494309189532", 0x3E22F983),
        ("-1", 0xFFFFFFFF),
        ("0xdeadbeef", 0xDEADBEEF),
        ("64", 64),
    ],
)
def test_constants_as_32_bits(text, bits):
    assert operand(text).bits == bits


@pytest.mark.parametrize("text", ["v[1", "v1 v2", "1.5e", "f(v1)", "v1 foo:1", "|v1", "3.0"])
def test_operands_that_are_not_understood(text):
    with pytest.raises(DecodeError, match="not understood"):
        operand(text)


MODIFIED = {
    "buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen offset:16 sc0 nt": {
        "offen": True,
        "offset": 16,
        "sc0": True,
        "nt": True,
    },
    "v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0x5 bound_ctrl:1": {
        "quad_perm": [1, 0, 3, 2],
        "row_mask": 15,
        "bank_mask": 5,
        "bound_ctrl": 1,
    },
    "v_mov_b32_dpp v0, v1 row_half_mirror row_mask:0xf bank_mask:0xf": {
        "row_half_mirror": True,
        "row_mask": 15,
        "bank_mask": 15,
    },
    "v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel_hi:[1,0,1] neg_lo:[0,1,0]": {
        "op_sel_hi": [1, 0, 1],
        "neg_lo": [0, 1, 0],
    },
    "v_add_u32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 src1_sel:DWORD": {
        "dst_sel": "WORD_1",
        "dst_unused": "UNUSED_PRESERVE",
        "src0_sel": "BYTE_0",
        "src1_sel": "DWORD",
    },
    "ds_swizzle_b32 v0, v1 offset:swizzle(QUAD_PERM,0,1,2,3)": {"offset": "swizzle(QUAD_PERM,0,1,2,3)"},
    'ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"01pip")': {"offset": 'swizzle(BITMASK_PERM,"01pip")'},
    "global_load_dword v0, v[2:3], off offset:-4096": {"offset": -4096},
    "ds_read2st64_b32 v[0:1], v2 offset0:1 offset1:255": {"offset0": 1, "offset1": 255},
    "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3] cbsz:1 blgp:1": {"cbsz": 1, "blgp": 1},
    "v_mul_f32_e64 v0, v1, v2 clamp mul:2": {"clamp": True, "mul": 2},
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0xca": {"bitop3": 0xCA},
    "v_add_f32_e32 v0, v1, v2": {},
}


@pytest.mark.parametrize("text", MODIFIED)
def test_modifiers(text):
    decoded = instruction(text)
    assert decoded.modifiers == MODIFIED[text]
    plain = text
    for name in ("offen", "offset", "quad_perm", "row_", "op_sel", "dst_sel", "cbsz", "clamp", "bitop3:"):
        plain = plain.split(f" {name}")[0]
    assert [o.text for o in decoded.operands] == [part.strip() for part in plain.partition(" ")[2].split(",")]


@pytest.mark.parametrize(
    ("text", "name", "encoding"),
    [
        ("v_add_f32_e64 v0, v1, v2", "v_add_f32", "e64"),
        ("v_add_f32_e32 v0, v1, v2", "v_add_f32", "e32"),
        ("v_mov_b32_dpp v0, v1 row_mirror row_mask:0xf bank_mask:0xf", "v_mov_b32", "dpp"),
        ("v_mov_b32_sdwa v0, v1 src0_sel:BYTE_1", "v_mov_b32", "sdwa"),
        ("s_endpgm", "s_endpgm", ""),
        ("s_endpgm_saved", "s_endpgm_saved", ""),
    ],
)
def test_encodings(text, name, encoding):
    decoded = instruction(text)
    assert (decoded.name, decoded.encoding) == (name, encoding)


def test_a_label_may_end_like_a_flag():
    decoded = instruction("s_branch .Lloop_lds")
    assert [o.text for o in decoded.operands] == [".Lloop_lds"] and not decoded.modifiers


@pytest.mark.parametrize(
    "text", ["v_add_f32 v0, v1, v2 fi:1", "v_add_f32 v0, v1, v2 what", "s_nop instid0(VALU_DEP_1)"]
)
def test_unknown_modifiers_name_the_line(text):
    with pytest.raises(DecodeError, match=r"^line 12: "):
        instruction(text, line=12)


def test_numbers_of_modifiers():
    decoded = instruction("v_pk_add_f16 v0, v1, v2 op_sel:[1] dst_sel:WORD_1 cbsz:3")
    assert decoded.number("cbsz") == 3 and decoded.number("blgp", 7) == 7
    assert decoded.numbers("op_sel", (0, 0, 0)) == (1, 0, 0)
    assert decoded.numbers("op_sel_hi", (1, 1, 1)) == (1, 1, 1)
    with pytest.raises(DecodeError, match="dst_sel"):
        decoded.number("dst_sel")


def test_masks_and_lanes_are_inverse():
    words = np.array([0, 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0], np.uint64)
    spread = lanes(words)
    assert spread.shape == (5, 64)
    assert [np.nonzero(row)[0].tolist() for row in spread[:3]] == [[], [0], [63]]
    assert (masks(spread) == words).all()
