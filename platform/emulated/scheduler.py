"""The order in which the waves of a batch run.

Of the waves that can run, those with the least program counter go, all together, so that waves that parted at a branch
meet again behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from portable.platform.emulated.isa import Code, Instruction
from portable.platform.emulated.memory import Memory, MemoryFault
from portable.platform.emulated.waves import Array, Group, Handler, Waves

PATIENCE = 256  # straight runs for which waves with the least program counter may hold up the others
LOOK = 1 << 12  # steps before the first look at whether the batch stands still


class ExecutionError(RuntimeError):
    """A kernel that cannot run, or not to its end; the message names it and, where there is one, the instruction."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction, ready to run."""

    instruction: Instruction
    handler: Handler | None  # None: the scheduler's own, s_barrier and s_endpgm
    control: bool


class Scheduler:
    """Runs one batch of workgroups to its end."""

    def __init__(
        self, code: Code, program: list[Step], waves: Waves, memory: Memory, where: Array, budget: int
    ) -> None:
        self.code, self.program, self.waves, self.memory = code, program, waves, memory
        self.where, self.budget = where, budget
        self.labels = dict(code.labels)
        self.instructions = self.steps = 0

    def run(self, pulse: Callable[[], None] | None = None) -> int:
        """Returns the number of instructions that waves executed; `pulse` is called again and again meanwhile."""
        waves, held_up, still = self.waves, 0, Standstill(self.waves, self.memory)
        while True:
            runnable = np.flatnonzero(~(waves.done | waves.waiting))
            if not len(runnable):
                return self.instructions
            if pulse is not None:
                pulse()
            pc = waves.pc[runnable]
            first, last = int(pc.min()), int(pc.max())
            held_up = held_up + 1 if first != last else 0
            if self.steps > LOOK and still.again(self.steps, held_up % (2 * PATIENCE)):
                what = "waits without end: nothing can change any more; a workgroup may not wait for another's batch"
                raise ExecutionError(self.place(self.program[first], runnable[pc == first], what))
            if first == last:
                self.straight(runnable, first, len(self.program))
                continue
            # waves that spin for others further on must not starve them: after a while, those go first
            if held_up // PATIENCE % 2:
                self.straight(runnable[pc == last], last, len(self.program))
            else:
                ahead = pc > first
                self.straight(runnable[~ahead], first, int(pc[ahead].min()))

    def straight(self, at: Array, pc: int, stop: int) -> None:
        """Run waves `at` from `pc` to a control instruction, or until they meet others at `stop`."""
        waves, program = self.waves, self.program
        group = Group(waves, at, len(at) == len(waves.pc), self.memory, self.code.arch, self.labels)
        begin, step = pc, None
        try:
            while pc < stop:
                step = program[pc]
                pc += 1
                if step.control:
                    waves.pc[at] = pc
                    self.control(group, step)
                    break
                assert step.handler is not None
                step.handler(group, step.instruction)
            else:
                waves.pc[at] = pc
        except MemoryFault:
            raise
        except Exception as error:
            raise ExecutionError(self.place(step, at, f"{type(error).__name__}: {error}")) from error
        self.steps += pc - begin
        self.instructions += (pc - begin) * len(at)
        if self.steps > self.budget:
            raise ExecutionError(
                self.place(step, at, f"{self.steps} steps without an end; a workgroup may not wait for another's batch")
            )

    def control(self, group: Group, step: Step) -> None:
        """A branch, a barrier or an end."""
        waves, at = self.waves, group.at
        if step.handler is not None:
            step.handler(group, step.instruction)
            return
        if step.instruction.name == "s_endpgm":
            waves.done[at] = True
        else:
            waves.waiting[at] = True
        # a barrier opens when every wave of the workgroup that has not ended stands at it
        arrived = np.asarray((waves.waiting | waves.done).reshape(-1, waves.per_group).all(axis=1))
        opens = arrived & waves.waiting.reshape(-1, waves.per_group).any(axis=1)
        if opens.any():
            waves.waiting[opens[waves.workgroup]] = False
            self.memory.barrier(np.flatnonzero(opens))

    def place(self, step: Step | None, at: Array, what: str) -> str:
        """An error's sentence: where it happened, and what."""
        if step is None:
            return f"{self.code.name}: {what}"
        groups = sorted({tuple(int(n) for n in self.where[g]) for g in self.waves.workgroup[at]})
        source = f" ({step.instruction.source})" if step.instruction.source else ""
        line = f"line {step.instruction.line}{source}: {step.instruction.text!r}"
        return f"{self.code.name}, {line}, workgroup {groups[0]}{' and others' if len(groups) > 1 else ''}: {what}"


class Standstill:
    """Whether a batch has come back to a state in which it was before: then it does so for ever.

    The state is kept at steps whose numbers double, so that a cycle of any length is found in the end.
    """

    def __init__(self, waves: Waves, memory: Memory) -> None:
        self.waves, self.memory = waves, memory
        self.next = self.phase = self.changes = 0
        self.kept: list[Array] = []
        self.different = 0  # of the vector registers, the one where the last difference was

    def again(self, steps: int, phase: int) -> bool:
        """Whether this is the kept state; `phase` is what the scheduler's choices depend on."""
        w, m = self.waves, self.memory
        if steps >= self.next:
            self.next, self.phase, self.changes = 2 * steps, phase, m.allocations.changes
            self.kept = [each.copy() for each in (*self._small(), w.v, m.lds.bytes, m.scratch.bytes)]
            return False
        if phase != self.phase or m.allocations.changes != self.changes:
            return False
        if not all(map(np.array_equal, self._small(), self.kept)):
            return False
        *_, v, lds, scratch = self.kept
        for number in (self.different, *range(len(v))):
            if not np.array_equal(v[number], w.v[number]):
                self.different = number
                return False
        return np.array_equal(lds, m.lds.bytes) and np.array_equal(scratch, m.scratch.bytes)

    def _small(self) -> tuple[Array, ...]:
        w = self.waves
        return w.pc, w.s, w.scc, w.done, w.waiting, w.saturate
