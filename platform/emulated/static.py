"""What a kernel's assembly says before it runs: registers, LDS, spills, occupancy, matrix instructions, its loops.

Resources are what the compiler decided, and serve as budgets. The clocks of a loop rank kernels and do not predict:
they were never compared with hardware.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from portable.platform.emulated.isa import Code, DecodeError, Instruction, decode
from portable.platform.emulated.loops import MATRIX, Loop, loops
from portable.platform.emulated.machine import LDS_BYTES
from portable.platform.emulated.waves import LANES

SIMDS = 4  # of a compute unit; they share its LDS, which is as large as the limit of a workgroup
MAX_WAVES = 8  # on a SIMD
REGISTERS, REGISTER_STEP = 512, 8  # vector and accumulation registers of a SIMD's lane; waves get multiples of 8
SCALARS, SCALAR_STEP, TRAP_SCALARS = 800, 16, 16  # scalar registers of a SIMD; the trap handler has 16 of each wave's
LDS_STEP = {"gfx942": 512, "gfx950": 1280}  # bytes; workgroups get multiples of it

FAMILIES = ("s_", "v_", "ds_", "global_", "flat_", "buffer_", "scratch_")
ACCESS = re.compile(
    r"(?:global|flat|buffer)_(?:load|store)_(?:lds_)?(?:dwordx?(\d?)|[us]?(short|byte)(?:_d16)?(?:_hi)?)$"
)
ENTRY = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "max_flat_workgroup_size")
EXCHANGE = ("ds_bpermute", "ds_permute", "ds_swizzle")  # use LDS's wiring, not its memory


@dataclass(frozen=True, slots=True)
class Static:
    """A kernel, as its assembly describes it."""

    name: str
    arch: str
    vector_registers: int
    accumulation_registers: int
    scalar_registers: int
    allocated_registers: int  # vector and accumulation; more than are used where the compiler bounds the waves
    vector_spills: int  # registers
    scalar_spills: int
    scratch_bytes: int  # of a lane
    lds_bytes: int | None  # of a workgroup; None: it is chosen at launch, and the assembly does not say
    waves_per_group: int  # at most
    instructions: int
    matrix: Mapping[str, int]  # mnemonic -> count
    loads: Mapping[int, int]  # of global memory, bytes of a lane -> count
    stores: Mapping[int, int]
    loops: tuple[Loop, ...]

    @property
    def lds_limit(self) -> int:
        """Bytes that a workgroup may have."""
        return LDS_BYTES[self.arch]

    @property
    def occupancy_by_registers(self) -> int:
        """Waves per SIMD that registers allow."""
        by_scalars = SCALARS // _up(self.scalar_registers + TRAP_SCALARS, SCALAR_STEP)
        return min(MAX_WAVES, by_scalars, REGISTERS // _up(max(self.allocated_registers, 1), REGISTER_STEP))

    @property
    def occupancy_by_lds(self) -> int:
        """Waves per SIMD that LDS allows; as many as there can be where the assembly does not say how much is used."""
        if not self.lds_bytes:
            return MAX_WAVES
        return self._waves(self.lds_limit // _up(self.lds_bytes, LDS_STEP[self.arch]))

    @property
    def occupancy(self) -> int:
        """Waves on the fullest SIMD when a compute unit holds as many whole workgroups as it can; 0: not even one."""
        by_registers = self._waves(self.occupancy_by_registers * SIMDS // self.waves_per_group)
        return min(by_registers, self.occupancy_by_lds)

    @property
    def matrix_instructions(self) -> int:
        """How many there are in the code."""
        return sum(self.matrix.values())

    @property
    def hot_loop(self) -> Loop | None:
        """The loop with the most matrix clocks, then vector clocks, of an iteration."""
        return max(self.loops, key=lambda loop: (loop.matrix_clocks, loop.vector_clocks), default=None)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the kernel cannot be launched: a sentence each."""
        if (self.lds_bytes or 0) > self.lds_limit:
            return (f"kernel {self.name} uses {self.lds_bytes} bytes of LDS where {self.arch} has {self.lds_limit}",)
        if not self.occupancy:
            waves = self.occupancy_by_registers * SIMDS
            return (f"kernel {self.name} has registers for {waves} waves where a workgroup has {self.waves_per_group}",)
        return ()

    def data(self) -> dict[str, object]:
        """All of it for JSON."""
        return {
            **asdict(self),
            "lds_limit": self.lds_limit,
            "occupancy": self.occupancy,
            "matrix_instructions": self.matrix_instructions,
            "loops": [{**asdict(loop), "matrix_share": loop.matrix_share} for loop in self.loops],
            "faults": list(self.faults),
        }

    def _waves(self, groups: int) -> int:
        return min(MAX_WAVES, -(-groups * self.waves_per_group // SIMDS))

    def __str__(self) -> str:
        lds = "chosen at launch, at most" if self.lds_bytes is None else f"{self.lds_bytes} of"
        known = "" if self.lds_bytes is None else f", LDS {self.occupancy_by_lds}"
        kinds = ", ".join(f"{count} {name}" for name, count in self.matrix.items())
        share = self.matrix_instructions / self.instructions if self.instructions else 0.0
        lines = [
            f"{self.name}: {self.arch}",
            *(f"  cannot run: {fault}" for fault in self.faults),
            f"  registers      {self.vector_registers} vector, {self.accumulation_registers} accumulation, "
            f"{self.scalar_registers} scalar; {self.allocated_registers} of {REGISTERS} allocated",
            f"  spills         {self.vector_spills} vector, {self.scalar_spills} scalar; "
            f"{self.scratch_bytes} bytes of scratch a lane",
            f"  LDS            {lds} {self.lds_limit} bytes",
            f"  occupancy      {self.occupancy} of {MAX_WAVES} waves per SIMD (registers "
            f"{self.occupancy_by_registers}{known}), workgroups of {self.waves_per_group} waves",
            f"  matrix         {self.matrix_instructions} of {self.instructions} instructions ({share:.0%})"
            + (kinds and f": {kinds}"),
            f"  global loads   {_widths(self.loads)}",
            f"  global stores  {_widths(self.stores)}",
            *(f"  {'  ' * (loop.depth - 1)}loop {loop}" for loop in self.loops),
        ]
        return "\n".join(lines)


def read(path: Path) -> tuple[Static, ...]:
    """Every kernel in a file of assembly text; Triton's JSON beside it, where there is one, says how much LDS it uses.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not assembly text, holds no kernel, or one that `analyse` refuses.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not assembly text; a compiled kernel's text is wanted, not its object") from None
    names = kernels(text)
    if not names:
        raise ValueError(f"{path} holds no kernel: it has no .amdhsa_kernel")
    launched = _launched(path.with_suffix(".json"))
    return tuple(analyse(text, name, launched.get(name)) for name in names)


def kernels(text: str) -> tuple[str, ...]:
    """The names of the kernels in an assembly text.

    >>> kernels(".amdhsa_kernel first")
    ('first',)
    """
    return tuple(re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE))


def analyse(text: str, name: str, lds_bytes: int | None = None) -> Static:
    """What the assembly text says of kernel `name`.

    Args:
        lds_bytes: LDS of a workgroup where the launch chooses it, as Triton does (`compiled.metadata.shared`).

    Raises:
        ValueError: an architecture without emulation, no such kernel, an instruction that is not understood, or a call:
            what a called function needs is not in the kernel's own text.
    """
    code = decode(text, name)
    if code.arch not in LDS_BYTES:
        raise ValueError(f"{name}: {code.arch} is not one of {', '.join(LDS_BYTES)}")
    entry = _entry(text, name)
    for i in code.instructions:
        if not i.name.startswith(FAMILIES):
            raise DecodeError(f"line {i.line}: {i.name} is no instruction of {code.arch}")
        if i.name.startswith(("s_swappc", "s_call")):
            raise DecodeError(f"line {i.line}: {name} calls a function; only kernels without calls are read")
    static = _number(code, "group_segment_fixed_size")
    unknown = lds_bytes is None and not static and any(map(_uses_lds, code.instructions))
    return Static(
        name=name,
        arch=code.arch,
        vector_registers=entry["vgpr_count"] - entry["agpr_count"],
        accumulation_registers=entry["agpr_count"],
        scalar_registers=entry["sgpr_count"],
        allocated_registers=_number(code, "next_free_vgpr"),
        vector_spills=entry["vgpr_spill_count"],
        scalar_spills=entry["sgpr_spill_count"],
        scratch_bytes=_number(code, "private_segment_fixed_size"),
        lds_bytes=None if unknown else max(lds_bytes or 0, static),
        waves_per_group=max(-(-entry["max_flat_workgroup_size"] // LANES), 1),
        instructions=len(code.instructions),
        matrix=dict(Counter(i.name for i in code.instructions if MATRIX.match(i.name)).most_common()),
        loads=_accesses(code.instructions, "load"),
        stores=_accesses(code.instructions, "store"),
        loops=loops(code),
    )


def _launched(path: Path) -> dict[str, int]:
    """Kernel -> bytes of LDS, from the JSON that Triton keeps beside the assembly; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("shared"), int):
        return {found["name"]: found["shared"]}
    return {}


def _accesses(instructions: Iterable[Instruction], kind: str) -> dict[int, int]:
    """Bytes of a lane -> count, wide ones first; `kind` is "load" or "store"."""
    found: Counter[int] = Counter()
    for i in instructions:
        if i.name.startswith(tuple(f"{space}_{kind}_" for space in ("global", "flat", "buffer"))):
            if (access := ACCESS.match(i.name)) is None:
                raise DecodeError(f"line {i.line}: the width of {i.name} is not known")
            found[{"short": 2, "byte": 1}[access[2]] if access[2] else 4 * int(access[1] or 1)] += 1
    return dict(sorted(found.items(), reverse=True))


def _widths(accesses: Mapping[int, int]) -> str:
    return ", ".join(f"{count} of {width} bytes a lane" for width, count in accesses.items()) or "none"


def _uses_lds(i: Instruction) -> bool:
    return (i.name.startswith("ds_") and not i.name.startswith(EXCHANGE)) or "_lds_" in i.name or "lds" in i.modifiers


def _number(code: Code, key: str) -> int:
    value = code.facts.get(key, "")
    if not value.isdecimal():
        raise DecodeError(f"{code.name}: .amdhsa_{key} is {value!r}, not a number")
    return int(value)


def _entry(text: str, name: str) -> dict[str, int]:
    """The numbers of the kernel's own entry in the metadata."""
    for entry in re.split(r"\n  - ", text[max(text.find(".amdgpu_metadata"), 0) :]):
        if re.search(rf"^    \.name:\s+{re.escape(name)}\s*$", entry, re.MULTILINE):
            found = dict(re.findall(r"^    \.(\w+):\s+(\d+)\s*$", "    " + entry, re.MULTILINE))
            if absent := [key for key in ENTRY if key not in found]:
                raise DecodeError(f"the metadata of kernel {name!r} has no .{absent[0]}")
            return {key: int(found[key]) for key in ENTRY}
    raise DecodeError(f"the assembly has no metadata of kernel {name!r}")


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
