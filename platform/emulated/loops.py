"""The loops of a kernel, and a static bound on each: clocks of the matrix unit against those of the vector unit.

The clocks rank kernels and show regressions; they do not predict. They are of one wave on one SIMD: neither memory nor
LDS nor waiting is in them, and none was ever compared with hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from portable.platform.emulated.isa import Code, DecodeError, Instruction
from portable.platform.emulated.matrix import NARROW, product

ENDS = ("s_endpgm", "s_setpc_b64", "s_trap")  # nothing runs behind them
PASS = 4  # clocks; also those of a vector instruction: 64 lanes, 16 at a time
TRANSCENDENTAL_CLOCKS = 16  # a quarter of the rate
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_(\w+_)?f\d\d$")
MATRIX = re.compile(r"v_(?:mfma|mfma_scale|smfmac)_(?=[fi]\d\d_)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop's static bound: clocks of an iteration, its inner loops left out and every branch inside taken."""

    label: str
    line: int  # of the assembly
    source: str  # "file:line", "" where the assembly does not say
    depth: int  # 1: in no other loop
    instructions: int
    matrix_clocks: int
    vector_clocks: int  # without the transcendental ones
    transcendental_clocks: int
    scratch: int  # scratch accesses: spills that every iteration pays

    @property
    def matrix_share(self) -> float:
        """The most that the matrix unit can be busy, 0 to 1, when other waves fill every gap."""
        clocks = max(self.matrix_clocks, self.vector_clocks + self.transcendental_clocks)
        return self.matrix_clocks / clocks if clocks else 0.0

    def __str__(self) -> str:
        at = f"{self.label} at line {self.line}{self.source and f' ({self.source})'}: {self.instructions} instructions"
        spilled = f", {self.scratch} scratch accesses" if self.scratch else ""
        units = {"matrix": self.matrix_clocks, "vector": self.vector_clocks}
        units["transcendental"] = self.transcendental_clocks
        clocks = ", ".join(f"{count} {unit}" for unit, count in units.items())
        busy = f"; matrix unit busy {self.matrix_share:.0%} at most" if self.matrix_clocks else ""
        return f"{at}{spilled}; clocks: {clocks}{busy}"


@dataclass(frozen=True, slots=True)
class Cycle:
    """A loop: where it is entered, and what an iteration runs, its inner loops left out and every branch inside taken.

    Instructions that only some iterations or lanes run, behind s_cbranch_execz say, are part of it.
    """

    label: str
    line: int  # of the assembly
    depth: int  # 1: in no other loop
    body: tuple[Instruction, ...]


def matrix_clocks(i: Instruction, arch: str) -> int:
    """Clocks that a matrix instruction holds the matrix unit; a sparse one, as the dense one of its size.

    Raises:
        ValueError: a name that is no matrix instruction's.
    """
    shape = product(MATRIX.sub("", i.name))
    usual = {16: 4, 32: 8}.get(shape.m, 2)
    if shape.result == "f64":
        passes = 4 if shape.m == 4 else 8 if arch == "gfx942" else 16
    elif shape.a == "f8f6f4":
        wide = any(NARROW[i.number(key)] in ("fp8", "bf8") for key in ("cbsz", "blgp"))
        passes = 2 * usual if wide else usual
    else:  # 4 or 8 passes at full rate; float32 and several small products take twice as long
        passes = 2 * usual if shape.m > 4 and (shape.a == "f32" or shape.blocks > 1) else usual
    return PASS * passes


def loops(code: Code) -> tuple[Loop, ...]:
    """Every loop, outer before inner.

    Raises:
        DecodeError: a branch to a label that is not there.
    """
    found = []
    for cycle in cycles(code):
        matrix = [i for i in cycle.body if MATRIX.match(i.name)]
        slow = sum(1 for i in cycle.body if TRANSCENDENTAL.match(i.name))
        vector = sum(1 for i in cycle.body if i.name.startswith("v_")) - len(matrix) - slow
        entered = [i for i in cycle.body if i.line >= cycle.line]
        found.append(
            Loop(
                label=cycle.label,
                line=cycle.line,
                source=next((i.source for i in entered if i.source and not i.source.endswith(":0")), ""),
                depth=cycle.depth,
                instructions=len(cycle.body),
                matrix_clocks=sum(matrix_clocks(i, code.arch) for i in matrix),
                vector_clocks=PASS * vector,
                transcendental_clocks=TRANSCENDENTAL_CLOCKS * slow,
                scratch=sum(1 for i in cycle.body if i.name.startswith("scratch_")),
            )
        )
    return tuple(found)


def cycles(code: Code) -> tuple[Cycle, ...]:
    """Every loop, outer before inner, in the order of the code.

    Raises:
        DecodeError: a branch to a label that is not there.
    """
    blocks = _blocks(code)
    after = {start: _successors(code, blocks, start) for start in blocks}
    names = {code.labels[name]: name for name in _targets(code)}

    def found(among: frozenset[int], depth: int) -> Iterator[Cycle]:
        for component in _components(after, among):
            entered = [to for at in after if at not in component for to in after[at] if to in component]
            first = min(entered, default=min(component))
            inner = list(found(component - {first}, depth + 1))
            held = {i.line for cycle in inner for i in cycle.body}
            body = (i for start in sorted(component) for i in code.instructions[start : blocks[start]])
            line = code.instructions[first].line
            yield Cycle(names.get(first, "loop"), line, depth, tuple(i for i in body if i.line not in held))
            yield from inner

    return tuple(found(frozenset(blocks), 1))


def _targets(code: Code) -> set[str]:
    """The labels that branches name."""
    named = {
        operand.text
        for i in code.instructions
        if i.name.startswith(("s_branch", "s_cbranch"))
        for operand in i.operands
        if operand.kind == "label"
    }
    if unknown := named - set(code.labels):
        raise DecodeError(f"{code.name} branches to {min(unknown)}, which is no label of it")
    return named


def _blocks(code: Code) -> dict[int, int]:
    """Straight runs of instructions: the index of the first -> the index behind the last."""
    size = len(code.instructions)
    starts = {0, *(code.labels[name] for name in _targets(code))}
    starts |= {at + 1 for at, i in enumerate(code.instructions) if i.name.startswith(("s_branch", "s_cbranch", *ENDS))}
    ordered = sorted(start for start in starts if start < size)
    return dict(zip(ordered, [*ordered[1:], size], strict=True))


def _successors(code: Code, blocks: Mapping[int, int], start: int) -> tuple[int, ...]:
    end = blocks[start]
    last = code.instructions[end - 1]
    to = [code.labels[o.text] for o in last.operands if o.kind == "label"] if "branch" in last.name else []
    if not last.name.startswith(("s_branch", *ENDS)):
        to.append(end)
    return tuple(each for each in to if each in blocks)


def _components(after: Mapping[int, tuple[int, ...]], among: frozenset[int]) -> Iterator[frozenset[int]]:
    """The sets of blocks that reach one another, without leaving `among`, by their first block."""
    before: dict[int, list[int]] = {at: [] for at in among}
    for at in among:
        for to in after[at]:
            if to in among:
                before[to].append(at)
    left = set(among)
    for start in sorted(among):
        if start in left and (cycle := _reach(after, start, among) & _reach(before, start, among)):
            left -= cycle
            yield cycle


def _reach(edges: Mapping[int, tuple[int, ...] | list[int]], start: int, among: frozenset[int]) -> frozenset[int]:
    """What one step or more lead to."""
    found: set[int] = set()
    todo = [start]
    while todo:
        new = {to for to in edges[todo.pop()] if to in among} - found
        found |= new
        todo += new
    return frozenset(found)
