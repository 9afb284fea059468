"""Vector registers chosen at run time: from `s_set_gpr_idx_on` to `s_set_gpr_idx_off` M0 is added to register numbers.

M0[7:0] is the index and M0[15:12] says to which operands it is added: bit 0 the first source, bit 3 the destination.
Compilers put a `v_mov_b32` between the two, for arrays that live in registers; any other instruction is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.isa import M0, Code, Instruction, Operand
from portable.platform.emulated.modifiers import plain as unchanged
from portable.platform.emulated.modifiers import refuse
from portable.platform.emulated.scalar import plain
from portable.platform.emulated.waves import U32, Array, Group, Handler, handles

BITS = {"SRC0": 1, "SRC1": 2, "SRC2": 4, "DST": 8}
ARCHITECTED = 256  # registers that instructions can name


def mode(operand: Operand) -> int:
    """The operands that are indexed: `gpr_idx(SRC0,DST)`, or a number of 4 bits."""
    if operand.kind == "i" and 0 <= operand.index < 16:
        return operand.index
    found = re.fullmatch(r"gpr_idx\(([\w, ]*)\)", operand.text)
    if found is None or not set(names := re.findall(r"\w+", found[1])) <= BITS.keys():
        raise NotImplementedError(f"{operand.text!r} is no mode of register indexing")
    return sum(BITS[name] for name in names)


@handles("s_set_gpr_idx_on")
def _on(w: Group, i: Instruction) -> None:
    """MODE.gpr_idx_en = 1, M0[7:0] = S0[7:0], M0[15:12] = SIMM4."""
    index, which = plain(i, 2)
    w.set_s(M0, w.get_s(M0) & U32(0xFFFF0F00) | w.scalar(index) & U32(0xFF) | U32(mode(which) << 12))


@handles("s_set_gpr_idx_idx")
def _index(w: Group, i: Instruction) -> None:
    """M0[7:0] = S0[7:0]."""
    w.set_s(M0, w.get_s(M0) & U32(0xFFFFFF00) | w.scalar(plain(i, 1)[0]) & U32(0xFF))


@handles("s_set_gpr_idx_mode")
def _mode(w: Group, i: Instruction) -> None:
    """M0[15:12] = SIMM4."""
    w.set_s(M0, w.get_s(M0) & U32(0xFFFF0FFF) | U32(mode(plain(i, 1)[0]) << 12))


@handles("s_set_gpr_idx_off")
def _off(w: Group, i: Instruction) -> None:
    """MODE.gpr_idx_en = 0, which `covered` has seen."""
    plain(i, 0)


def covered(code: Code) -> dict[int, Handler]:
    """The instructions that index registers, by number, and what they do.

    Raises:
        NotImplementedError: one that is not emulated, or a branch into or out of where they stand.
    """
    targets = {code.labels.get(each.text, -1) for i in code.instructions for each in i.operands if each.kind == "label"}
    count = int(code.facts.get("accum_offset", ARCHITECTED))
    if (used := code.facts.get("next_free_vgpr", "")).isdigit():
        count = min(count, int(used))

    def move(w: Group, i: Instruction) -> None:
        """D + index = S0 + index."""
        refuse(i)
        indexed_move(w, i, count)

    out: dict[int, Handler] = {}
    on = False
    for number, i in enumerate(code.instructions):
        if on and number in targets:
            raise NotImplementedError(f"line {i.line}: a branch to {i.text!r}, where registers are indexed")
        if i.name.startswith("s_set_gpr_idx_"):
            on = not i.name.endswith("off") and (on or i.name.endswith("on"))
        elif on and i.name == "v_mov_b32":
            out[number] = move
        elif on and i.name not in ("s_nop", "s_waitcnt"):
            raise NotImplementedError(f"line {i.line}: {i.text!r} where registers are indexed")
    return out


def indexed_move(w: Group, i: Instruction, count: int) -> None:
    """A move whose registers M0 chooses for each wave, among the `count` that the kernel has."""
    target, source = i.operands
    unchanged(i, source)
    chosen = w.get_s(M0) & U32(0xF0FF)
    for value in np.unique(chosen).tolist():
        rows = (chosen == value)[:, None]
        index = value & 0xFF
        w.set(
            _moved(w, i, target, index * (value >> 15), rows, count),
            w.u32(_moved(w, i, source, index * (value >> 12 & 1), rows, count)),
            where=rows,
        )


def _moved(w: Group, i: Instruction, operand: Operand, index: int, rows: Array, count: int) -> Operand:
    """The register that is `index` further."""
    if operand.kind != "v" or not index:
        return operand
    access = Access(w, i, rows)
    if operand.index + index >= count and not access.none:
        reason = f"out-of-bounds register v{operand.index + index}, an index of {index} from v{operand.index}"
        bad = np.ones(int(access.mask.sum()), np.bool_)
        raise access.fault(f"{reason} where the kernel has {count}", bad)
    return replace(operand, index=operand.index + index)
