"""Branches, waits, the mode register and scalar loads, each wave with its own registers."""

import itertools

import numpy as np
import pytest
from emulated_one import run_one, s64

import portable.platform.emulated.control  # noqa: F401  (enters the handlers)

MASK_EDGES = [0, 1, 1 << 32, 1 << 63]


@pytest.mark.parametrize(
    ("name", "taken"),
    {
        "s_branch": lambda mask, vcc, scc: True,
        "s_cbranch_scc0": lambda mask, vcc, scc: not scc,
        "s_cbranch_scc1": lambda mask, vcc, scc: scc,
        "s_cbranch_execz": lambda mask, vcc, scc: mask == 0,
        "s_cbranch_execnz": lambda mask, vcc, scc: mask != 0,
        "s_cbranch_vccz": lambda mask, vcc, scc: vcc == 0,
        "s_cbranch_vccnz": lambda mask, vcc, scc: vcc != 0,
    }.items(),
)
def test_branches_move_the_waves_that_take_them(name, taken):
    cases = list(itertools.product(MASK_EDGES, MASK_EDGES, (False, True)))
    state = run_one(
        f"{name} .LBB0_2",
        s={"vcc": [vcc for _, vcc, _ in cases]},
        exec_mask=[mask for mask, _, _ in cases],
        scc=[scc for _, _, scc in cases],
        waves=len(cases),
        labels={".LBB0_2": 77},
    )
    assert state.pc.tolist() == [77 if taken(*case) else 1 for case in cases]


def test_code_has_no_address():
    state = run_one("s_getpc_b64 s[2:3]", s={"s[2:3]": [1 << 40, 5]}, waves=2)
    assert s64(state, 2) == [0, 0]


def test_waits_change_nothing():
    before = run_one("")
    for text in (
        "s_waitcnt vmcnt(0) lgkmcnt(1)",
        "s_nop 7",
        "s_icache_inv",
        "s_dcache_inv",
        "s_dcache_wb",
        "s_setprio 1",
        "s_sleep 2",
        "buffer_inv sc0 sc1",
        "buffer_wbl2 sc1",
    ):
        after = run_one(text)
        assert (after.s == before.s).all() and (after.v == before.v).all() and not after.scc.any()


def test_the_mode_register_may_be_read_and_set_to_what_it_is():
    state = run_one(
        "s_getreg_b32 s0, hwreg(HW_REG_MODE, 4, 2)\n"
        "s_getreg_b32 s1, hwreg(HW_REG_MODE)\n"
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\n"
        "s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s2\n"
        "s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s3",
        s={2: 0, 3: 0xFFFFFFF0},
    )
    assert state.s[0:2].tolist() == [[3], [0x3F0]]
    with pytest.raises(NotImplementedError, match="denormal mode"):
        run_one("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")
    with pytest.raises(NotImplementedError, match="another hardware register"):
        run_one("s_getreg_b32 s0, hwreg(HW_REG_HW_ID)")


def test_a_trap_is_reported():
    with pytest.raises(RuntimeError, match="'s_trap 2' at line 0 in workgroups"):
        run_one("s_trap 2")


class Bytes:
    """A memory whose byte at address a is a % 251."""

    def now(self, instruction, group):
        pass

    def load_scalar(self, addresses, nbytes):
        self.addresses = addresses.tolist()
        return ((addresses[:, None] + np.arange(nbytes, dtype=np.uint64)) % np.uint64(251)).astype(np.uint8)


@pytest.mark.parametrize("words", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("offset", "moved"), [("0x0", 0), ("0x1c", 28), ("-4", -4), ("s6", 20), ("s6 offset:0x8", 28)])
def test_scalar_loads(words, offset, moved):
    bases = [1 << 40, 4096]
    memory = Bytes()
    name, last = f"s_load_dword{f'x{words}' if words > 1 else ''}", 15 + words
    state = run_one(
        f"{name} {f's[16:{last}]' if words > 1 else 's16'}, s[4:5], {offset}",
        s={"s[4:5]": bases, 6: 20},
        waves=2,
        memory=memory,
    )
    assert memory.addresses == [base + moved for base in bases]
    for wave, base in enumerate(bases):
        loaded = bytes((base + moved + k) % 251 for k in range(4 * words))
        assert state.s[16 : 16 + words, wave].tobytes() == loaded
    assert not state.s[16 + words].any()


def test_a_scalar_load_may_overwrite_its_address_and_drops_its_low_bits():
    memory = Bytes()
    state = run_one("s_load_dwordx2 s[4:5], s[4:5], 0x2", s={"s[4:5]": 4097}, memory=memory)
    assert memory.addresses == [4096]
    assert s64(state, 4) == [int.from_bytes(bytes((4096 + k) % 251 for k in range(8)), "little")]


@pytest.mark.parametrize(
    "text",
    [
        "s_load_dword s0, s[2:3], 0x0 nt",
        "s_load_dword v0, s[2:3], 0x0",
        "s_load_dword s0, v[2:3], 0x0",
        "s_nop 0 nt",
        "s_branch .LBB0_1, .LBB0_1",
        "buffer_inv s0",
        "buffer_inv glc",
    ],
)
def test_what_is_not_such_an_instruction_is_refused(text):
    with pytest.raises(NotImplementedError):
        run_one(text, labels={".LBB0_1": 0}, memory=Bytes())
