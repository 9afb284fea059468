"""Launching a kernel: its arguments, its first registers, and the order in which waves run.

Workgroups run in batches of about 32 waves. Of the waves that can run, those with the least program counter go, all
together, so that waves that parted at a branch meet again behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from portable.platform.emulated.isa import EXEC, VCC, Code, Instruction, masks
from portable.platform.emulated.memory import Allocations, Memory, MemoryFault
from portable.platform.emulated.opcodes import HANDLERS, missing
from portable.platform.emulated.waves import LANES, U64, Array, Group, Handler, Waves

BATCH = 32  # waves that run together
BUDGET = 10_000_000  # steps of one batch, some minutes, before it counts as stuck
PATIENCE = 256  # straight runs for which waves with the least program counter may hold up the others
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # a workgroup's limit
CONTROL = ("s_branch", "s_cbranch", "s_barrier", "s_endpgm", "s_setpc", "s_swappc", "s_call")
# scalar registers that come before the arguments' pointer, in this order, where the kernel asks for them
USER_SGPRS = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
POISON = 0x7FDF7FDF  # what registers hold before they are written: NaN in float32, float16 and bfloat16
TYPES = {"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q"}
TYPES |= {"u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d", "bf16": "bf16"}
Around = Callable[[int, Handler], Handler]  # (an instruction's number, its handler) -> what runs instead


class ExecutionError(RuntimeError):
    """A kernel that cannot run, or not to its end; the message names it and, where there is one, the instruction."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a kernel may access: bytes, and the name that a fault calls them by."""

    name: str
    data: Array  # uint8, one-dimensional, contiguous


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction, ready to run."""

    instruction: Instruction
    handler: Handler | None  # None: the scheduler's own, s_barrier and s_endpgm
    control: bool


def pack(arguments: Iterable[tuple[str, int | float]]) -> bytes:
    """Kernel arguments as the hardware finds them: each at a multiple of its size. Pointers are `"*..."`.

    >>> pack([("i8", -1), ("*fp32", 2), ("fp32", 1.0)]).hex()
    'ff0000000000000002000000000000000000803f'

    Raises:
        ValueError: a type that has no layout.
    """
    out = bytearray()
    for kind, value in arguments:
        code = "Q" if kind.startswith("*") else TYPES.get(kind)
        if code is None:
            raise ValueError(f"argument type {kind!r} is not a pointer or one of {', '.join(TYPES)}")
        if code == "bf16":
            bits = int(np.float32(value).view(np.uint32))
            data = struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
        else:
            data = struct.pack("<" + code, value)
        out += bytes(-len(out) % len(data)) + data
    return bytes(out)


def kernarg(code: Code, explicit: bytes, grid: Sequence[int], block: Sequence[int]) -> Array:
    """[n] uint8: the explicit arguments, and the hidden ones at this kernel's own offsets.

    Raises:
        ExecutionError: a hidden argument lies on an explicit one.
    """
    hidden: dict[str, bytes] = {"hidden_grid_dims": struct.pack("<H", 3)}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        hidden[f"hidden_block_count_{axis}"] = struct.pack("<I", count)
        hidden[f"hidden_group_size_{axis}"] = struct.pack("<H", size)
    size = max([int(code.facts.get("kernarg_size", 0)), len(explicit), *(at + 8 for at in code.hidden.values())])
    out = bytearray(explicit.ljust(size, b"\0"))
    for name, at in code.hidden.items():
        if at < len(explicit):
            raise ExecutionError(f"{code.name}: {name} at {at} lies inside {len(explicit)} bytes of arguments")
        data = hidden.get(name, b"")
        out[at : at + len(data)] = data
    return np.array(out, np.uint8)


def prepare(code: Code, around: Around | None = None) -> list[Step]:
    """Every instruction with its handler, or with what `around` makes of the two.

    Raises:
        ExecutionError: the architecture, or some opcodes, all of them named, have no emulation.
    """
    if code.arch not in LDS_BYTES:
        raise ExecutionError(f"{code.name}: {code.arch} is not one of {', '.join(LDS_BYTES)}")
    if unknown := missing(code.instructions):
        raise ExecutionError(f"{code.name} ({code.arch}) uses opcodes that are not emulated: {', '.join(unknown)}")
    if not code.instructions or code.instructions[-1].name not in ("s_endpgm", "s_branch", "s_setpc_b64"):
        raise ExecutionError(f"{code.name}: the code runs past its end")
    steps = []
    for number, i in enumerate(code.instructions):
        handler = HANDLERS.get(i.name)
        if around is not None and handler is not None:
            handler = around(number, handler)
        steps.append(Step(i, handler, i.name.startswith(CONTROL)))
    return steps


def launch(
    code: Code,
    grid: Sequence[int],
    block: Sequence[int],
    explicit: bytes,
    buffers: Sequence[Buffer],
    lds_bytes: int = 0,
    budget: int = BUDGET,
    around: Around | None = None,
) -> int:
    """Run a kernel over a grid of workgroups of `block` threads, x, y, z; returns the instructions that waves executed.

    Args:
        explicit: the arguments, from `pack`; pointers are addresses inside `buffers`.
        lds_bytes: LDS of a workgroup, where it is more than the kernel itself declares.
        budget: steps that a batch of workgroups may take.
        around: what stands in for an instruction's handler, from the instruction's number and that handler.

    Raises:
        ExecutionError: an opcode or modifier without emulation, too much LDS, or the budget is spent.
        MemoryFault: an access outside the buffers, a data race, a read of uninitialised LDS.
    """
    program = prepare(code, around)
    lds = max(lds_bytes, int(code.facts.get("group_segment_fixed_size", 0)))
    if lds > LDS_BYTES[code.arch]:
        raise ExecutionError(f"{code.name}: {lds} bytes of LDS where {code.arch} has {LDS_BYTES[code.arch]}")
    scratch = int(code.facts.get("private_segment_fixed_size", 0))
    per_group = -(-int(np.prod(block)) // LANES)
    allocations = Allocations()
    arguments = kernarg(code, explicit, grid, block)
    address = allocations.add(arguments, "kernarg")
    for buffer in buffers:
        allocations.add(buffer.data, buffer.name)
    total, at_once = int(np.prod(grid)), max(1, BATCH // per_group)
    instructions = 0
    with np.errstate(all="ignore"):
        for first in range(0, total, at_once):
            number = np.arange(first, min(first + at_once, total))
            where = np.stack(np.unravel_index(number, tuple(grid), order="F"), axis=1)
            memory = Memory(len(number), lds, per_group, scratch, allocations)
            memory.workgroup_name = [tuple(group) for group in where.tolist()].__getitem__
            waves = Waves(len(number), per_group, lds, scratch)
            start(waves, code, where, block, address)
            instructions += Scheduler(code, program, waves, memory, where, budget).run()
    return instructions


def start(waves: Waves, code: Code, where: Array, block: Sequence[int], address: int) -> None:
    """The registers with which waves begin: arguments, workgroup ids, lane ids, and exec of a last, partial wave."""

    def asks(name: str, default: int) -> bool:
        return bool(int(code.facts.get(name, default)))

    if asks("system_sgpr_workgroup_info", 0):
        raise ExecutionError(f"{code.name} asks for workgroup info, which is not emulated")
    waves.v[:], waves.s[:VCC] = POISON, POISON
    user = int(code.facts.get("user_sgpr_count", 2))
    waves.s[:user] = 0  # a read through a null pointer faults, and the dispatch id of a launch is 0
    index = sum(count for name, count in USER_SGPRS.items() if asks(f"user_sgpr_{name}", 0))
    waves.s[index], waves.s[index + 1] = address & 0xFFFFFFFF, address >> 32
    index = user
    for axis, name in enumerate("xyz"):
        if asks(f"system_sgpr_workgroup_id_{name}", name == "x"):
            waves.s[index] = where[waves.workgroup, axis]
            index += 1
    thread = np.arange(waves.per_group * LANES).reshape(waves.per_group, LANES)
    x, y, z = thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])
    everyone = (len(where), 1)
    waves.v[0] = np.tile(x | (y << 10) | (z << 20), everyone)
    mask = np.tile(masks(np.ascontiguousarray(z < block[2])), len(where)).astype(U64)
    waves.s[EXEC], waves.s[EXEC + 1] = mask & U64(0xFFFFFFFF), mask >> U64(32)


class Scheduler:
    """Runs one batch of workgroups to its end."""

    def __init__(
        self, code: Code, program: list[Step], waves: Waves, memory: Memory, where: Array, budget: int
    ) -> None:
        self.code, self.program, self.waves, self.memory = code, program, waves, memory
        self.where, self.budget = where, budget
        self.labels = dict(code.labels)
        self.instructions = self.steps = 0

    def run(self) -> int:
        """Returns the number of instructions that waves executed."""
        waves, held_up = self.waves, 0
        while True:
            runnable = np.flatnonzero(~(waves.done | waves.waiting))
            if not len(runnable):
                return self.instructions
            pc = waves.pc[runnable]
            first, last = int(pc.min()), int(pc.max())
            if first == last:
                held_up = 0
                self.straight(runnable, first, len(self.program))
                continue
            # waves that spin for others further on must not starve them: after a while, those go first
            held_up += 1
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
