"""Launching a kernel: its arguments, its first registers, and its workgroups in batches of about 32 waves."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from portable.platform.emulated.arguments import Buffer, pack
from portable.platform.emulated.indexed import covered
from portable.platform.emulated.isa import EXEC, VCC, Code, masks
from portable.platform.emulated.memory import Allocations, Memory
from portable.platform.emulated.opcodes import HANDLERS, missing
from portable.platform.emulated.processes import Shared
from portable.platform.emulated.scheduler import ExecutionError, Scheduler, Step
from portable.platform.emulated.waves import LANES, POISON, U64, Array, Handler, Waves

__all__ = ["BUDGET", "LDS_BYTES", "Buffer", "ExecutionError", "kernarg", "launch", "pack", "prepare"]

BATCH = 32  # waves that run together
BUDGET = 10_000_000  # steps of one batch, some minutes, before it counts as stuck
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # a workgroup's limit
LAST = ("s_endpgm", "s_branch", "s_setpc_b64", "s_trap")  # compilers put the blocks of traps last
CONTROL = ("s_branch", "s_cbranch", "s_barrier", "s_endpgm", "s_setpc", "s_swappc", "s_call")
# scalar registers that come before the arguments' pointer, in this order, where the kernel asks for them
USER_SGPRS = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
# What every handler computes with, and what a kernel may ask for otherwise: round to nearest even, denormals kept, NaN
# clamped to 0, and quiet NaN from signalling ones.
MODE = {"float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3}
MODE |= {"float_denorm_mode_16_64": 3, "dx10_clamp": 1, "ieee_mode": 1}
# What opcodes without emulation are for, where their names do not say so.
PURPOSE = {"s_sendmsg": "printing", "s_memtime": "a clock", "s_memrealtime": "a clock", "s_swappc_b64": "a call"}
Around = Callable[[int, Handler], Handler]  # (an instruction's number, its handler) -> what runs instead


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
        ExecutionError: the architecture, some opcodes, all of them named, or a mode of arithmetic have no emulation.
    """
    if code.arch not in LDS_BYTES:
        raise ExecutionError(f"{code.name}: {code.arch} is not one of {', '.join(LDS_BYTES)}")
    if unknown := missing(code.instructions):
        names = ", ".join(f"{name} ({PURPOSE[name]})" if name in PURPOSE else name for name in unknown)
        raise ExecutionError(f"{code.name} ({code.arch}) uses opcodes that are not emulated: {names}")
    if not code.instructions or code.instructions[-1].name not in LAST:
        raise ExecutionError(f"{code.name}: the code runs past its end")
    for name, value in MODE.items():  # compilers print all of them; code made by hand need not
        if (asked := int(code.facts.get(name, value))) != value:
            raise ExecutionError(f"{code.name}: {name} {asked} is not emulated; it must be {value}")
    try:
        indexed = covered(code)
    except NotImplementedError as error:
        raise ExecutionError(f"{code.name}: {error} is not emulated") from None
    steps = []
    for number, i in enumerate(code.instructions):
        handler = indexed.get(number, HANDLERS.get(i.name))
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
    processes: int = 1,
) -> int:
    """Run a kernel over a grid of workgroups of `block` threads, x, y, z; returns the instructions that waves executed.

    Args:
        explicit: the arguments, from `Arguments.packed` or `pack`; pointers are addresses from `Arguments.pointer`, or
            real ones, of which nobody knows which of the buffers they were derived from.
        lds_bytes: LDS of a workgroup, where it is more than the kernel itself declares.
        budget: steps that a batch of workgroups may take.
        around: what stands in for an instruction's handler, from the instruction's number and that handler.
        processes: as many, forked where it pays, share the workgroups, unless these use atomics on global memory.

    Raises:
        ExecutionError: an opcode, modifier or mode without emulation, too much LDS, a wait without end.
        MemoryFault: an access outside the buffers, a data race, a read of uninitialised memory.
    """
    program = prepare(code, around)
    lds = max(lds_bytes, int(code.facts.get("group_segment_fixed_size", 0)))
    if lds > LDS_BYTES[code.arch]:
        raise ExecutionError(f"{code.name}: {lds} bytes of LDS where {code.arch} has {LDS_BYTES[code.arch]}")
    scratch = int(code.facts.get("private_segment_fixed_size", 0))
    per_group = -(-int(np.prod(block)) // LANES)
    allocations = Allocations()
    for buffer in buffers:
        allocations.add(buffer.data, buffer.name, written=buffer.written, rows=buffer.rows)
    arguments = kernarg(code, explicit, grid, block)
    address = allocations.add(arguments, "kernarg")
    packet = allocations.add(dispatch_packet(grid, block, scratch, lds), "dispatch packet")
    total, at_once = int(np.prod(grid)), max(1, BATCH // per_group)

    def run(batch: int, pulse: Callable[[], None] | None) -> int:
        number = np.arange(batch * at_once, min((batch + 1) * at_once, total))
        where = np.stack(np.unravel_index(number, tuple(grid), order="F"), axis=1)
        memory = Memory(len(number), lds, per_group, scratch, allocations)
        memory.kernel = code.name
        memory.workgroup_name = [tuple(group) for group in where.tolist()].__getitem__
        waves = Waves(len(number), per_group, lds, scratch)
        start(waves, code, where, block, address, packet)
        return Scheduler(code, program, waves, memory, where, budget).run(pulse)

    if any("_atomic_" in i.name for i in code.instructions):  # not those on LDS, which have other names
        processes = 1
    with np.errstate(all="ignore"):
        return Shared(code.name, -(-total // at_once), run, allocations, processes).all()


def dispatch_packet(grid: Sequence[int], block: Sequence[int], scratch: int, lds: int) -> Array:
    """[64] uint8: what a kernel that asks for `dispatch_ptr` reads its sizes from; its kernarg address is left out.

    >>> struct.unpack_from("<3H2x3I2I", dispatch_packet((5, 1, 1), (64, 2, 1), 16, 512), 4)
    (64, 2, 1, 320, 2, 1, 16, 512)
    """
    threads = [count * size for count, size in zip(grid, block, strict=True)]
    return np.frombuffer(struct.pack("<2H3H2x3I2I32x", 0, 3, *block, *threads, scratch, lds), np.uint8)


def start(waves: Waves, code: Code, where: Array, block: Sequence[int], address: int, packet: int) -> None:
    """The registers with which waves begin: arguments, workgroup ids, lane ids, and exec of a last, partial wave."""

    def asks(name: str, default: int) -> bool:
        return bool(int(code.facts.get(name, default)))

    if asks("system_sgpr_workgroup_info", 0):
        raise ExecutionError(f"{code.name} asks for workgroup info, which is not emulated")
    waves.v[:], waves.s[:VCC] = POISON, POISON
    waves.saturate[:] = asks("fp16_overflow", 0)
    user = int(code.facts.get("user_sgpr_count", 2))
    waves.s[:user] = 0  # a read through a null pointer faults, and the dispatch id of a launch is 0
    index = 0
    for name, count in USER_SGPRS.items():
        if asks(f"user_sgpr_{name}", 0):
            if name == "dispatch_ptr":
                waves.s[index], waves.s[index + 1] = packet & 0xFFFFFFFF, packet >> 32
            index += count
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
