"""Branches, waits, the mode register and scalar loads. `s_barrier` and `s_endpgm` belong to the scheduler."""

from __future__ import annotations

import re

import numpy as np

from portable.platform.emulated.isa import EXEC, VCC, Instruction
from portable.platform.emulated.scalar import plain, scalar_destination
from portable.platform.emulated.waves import I64, U32, U64, Group, handles

# Round to nearest even (bits 3:0), denormals kept (7:4), DX10 clamp (8) and IEEE (9): what every handler computes with.
MODE = 0x3F0
OVERFLOW = 23  # FP16_OVFL: results of conversions to fp8 that overflow become the largest number


@handles("s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_icache_inv", "s_dcache_inv", "s_dcache_wb")
def _no_effect(w: Group, i: Instruction) -> None:
    """Time, priority and caches are not modelled: each instruction is complete before the next."""
    if i.modifiers:
        raise NotImplementedError(f"line {i.line}: {i.text!r} has modifiers")


@handles("buffer_inv", "buffer_wbl2")
def _caches(w: Group, i: Instruction) -> None:
    """Invalidate or write back the vector caches, in the scope of sc0 and sc1: there are none."""
    plain(i, 0, "sc0", "sc1", "nt")


@handles("s_branch")
def _branch(w: Group, i: Instruction) -> None:
    """PC = label."""
    w.jump(True, plain(i, 1)[0].text)


@handles("s_cbranch_scc0", "s_cbranch_scc1")
def _branch_scc(w: Group, i: Instruction) -> None:
    """if SCC == 0 or 1: PC = label."""
    w.jump(w.scc == (i.name[-1] == "1"), plain(i, 1)[0].text)


@handles("s_cbranch_execz", "s_cbranch_execnz", "s_cbranch_vccz", "s_cbranch_vccnz")
def _branch_mask(w: Group, i: Instruction) -> None:
    """if EXEC or VCC, all 64 bits, is 0 (z) or is not (nz): PC = label."""
    zero = w.get_s64(EXEC if "exec" in i.name else VCC) == 0
    w.jump(~zero if i.name.endswith("nz") else zero, plain(i, 1)[0].text)


@handles("s_trap")
def _trap(w: Group, i: Instruction) -> None:
    """Enter the trap handler: a failed assertion of the kernel."""
    place = i.source or f"line {i.line}"
    raise RuntimeError(f"the kernel executed {i.text!r} at {place} in workgroups {np.unique(w.waves.workgroup[w.at])}")


def _mode_field(i: Instruction, place: int) -> tuple[int, int]:
    """First bit and size of the field of MODE that an operand names."""
    found = re.fullmatch(r"hwreg\(HW_REG_MODE(?:,\s*(\d+),\s*(\d+))?\)", i.operands[place].text)
    if found is None:
        raise NotImplementedError(f"line {i.line}: {i.text!r} names another hardware register than HW_REG_MODE")
    return int(found[1] or 0), int(found[2] or 32)


@handles("s_getreg_b32")
def _get_register(w: Group, i: Instruction) -> None:
    """D = HWREG[offset + size - 1 : offset]."""
    plain(i, 2)
    first, size = _mode_field(i, 1)
    mode = w.waves.saturate[w.at].astype(U32) << U32(OVERFLOW) | U32(MODE)
    w.set_s(scalar_destination(i), mode >> U32(first) & U32((1 << size) - 1))


@handles("s_setreg_b32", "s_setreg_imm32_b32")
def _set_register(w: Group, i: Instruction) -> None:
    """HWREG[offset + size - 1 : offset] = S0; but for FP16_OVFL, a value that MODE does not have already is refused."""
    plain(i, 2)
    first, size = _mode_field(i, 0)
    field = (w.scalar(i.operands[1]) & U32((1 << size) - 1)).astype(U64) << U64(first)
    if first <= OVERFLOW < first + size:
        w.waves.saturate[w.at] = (field >> U64(OVERFLOW) & U64(1)) != 0
    kept = U64((1 << size) - 1 << first & ~(1 << OVERFLOW))
    if ((field ^ U64(MODE)) & kept).any():
        raise NotImplementedError(f"line {i.line}: {i.text!r} sets a rounding or denormal mode that is not emulated")


@handles(*(f"s_load_dword{count}" for count in ("", "x2", "x4", "x8", "x16")))
def _load(w: Group, i: Instruction) -> None:
    """D = MEM[(S0 + offset) & ~3], offset a signed immediate, or a zero-extended register plus one."""
    _, base, offset = plain(i, 3, "offset", "glc")
    words = int(i.name.partition("dword")[2].lstrip("x") or 1)
    index = scalar_destination(i)
    shift = np.full(w.size, offset.index, I64) if offset.kind == "i" else w.scalar(offset).astype(I64)
    addresses = (w.scalar64(base) + (shift + i.number("offset")).astype(U64)) & ~U64(3)
    w.memory.now(i, w)
    loaded = np.ascontiguousarray(w.memory.load_scalar(addresses, 4 * words)).view(U32)
    for word in range(words):
        w.set_s(index + word, loaded[:, word])


@handles("s_getpc_b64")
def _program_counter(w: Group, i: Instruction) -> None:
    """D = PC + 4, the address of the next instruction: 0 here, from where `data.link` counts."""
    plain(i, 1)
    w.set_s64(scalar_destination(i), np.zeros(w.size, U64))
