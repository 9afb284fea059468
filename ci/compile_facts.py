"""What a compiled Triton kernel says of itself, for AMD from its assembly and for NVIDIA from its binary."""

from __future__ import annotations

import linecache
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import portable
from portable.platform.detect import describe
from portable.platform.emulated import static
from portable.platform.emulated.machine import LDS_BYTES

STRICT = ("gfx90a", "gfx942", "gfx950")  # 16-byte loads and matrix instructions are asked of these
CACHED = ("attend_kernel", "attention")  # kernels that load K and V, each in a line that assigns `k_...` or `v_...`
MATRIX = re.compile(r"^\s+(v_(?:mfma|smfmac|wmma|swmmac)_\w+)", re.MULTILINE)
WIDE = re.compile(r"^\s+(?:global|buffer)_load_(?:lds_)?(dwordx4|b128)", re.MULTILINE)
LOAD = re.compile(r"^\s+(?:global|buffer)_load_(?:lds_)?(\w+)", re.MULTILINE)
BYTES = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}
FRAME = re.compile(r"(\w+\.py):(\d+):\d+")  # of the lines inlined into one another, which a comment at a .loc names
OPERAND = re.compile(r"\s*([kv])_\w+ = .*load")
KERNELS = Path(portable.__file__).parent / "backends" / "triton"


def facts(made: Any, arch: str) -> dict[str, Any]:
    """The row of a kernel that `triton.compile` made."""
    return _amd(made, arch) if arch.startswith("gfx") else _nvidia(made)


def faults(
    row: dict[str, Any], arch: str, kernel: str, products: bool, spills: bool = False, least: int = 16
) -> list[str]:
    """What no default tile may do.

    `products`: the kernel multiplies matrices that it loads; `spills`: it may; `least`: bytes of a load of K or V.
    """
    found = []
    limit = describe(arch).shared_memory
    if row["shared"] > limit:
        found.append(f"{row['shared']} bytes of shared memory where {arch} has {limit}")
    # scalar ones go to lanes of vector registers, not to memory
    if arch.startswith("gfx") and not spills and (row["vector_spills"] or row["scratch"]):
        found.append(f"{row['vector_spills']} vector registers are spilled, {row['scratch']} bytes of scratch a lane")
    if arch in STRICT:
        if products and not row["matrix"]:
            found.append("no matrix instruction")
        if products and not row["loads_16"]:
            found.append("no load of 16 bytes a lane")
        if products and kernel in CACHED:
            narrow = [name for name in "kv" if row[f"{name}_bytes"] < least]
            found += [f"{name.upper()} is loaded by {row[f'{name}_bytes']} bytes a lane" for name in narrow]
    return found


def _amd(made: Any, arch: str) -> dict[str, Any]:
    text = made.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.findall(rf"^\s+(?:- )?\.{key}:\s+(\d+)", text, re.MULTILINE)[-1])

    occupancy = re.findall(r"; Occupancy: (\d+)", text)
    size = re.findall(r"; codeLenInByte = (\d+)", text)
    agprs = number("agpr_count") if ".agpr_count" in text else 0
    row = {
        "vgprs": number("vgpr_count") - agprs,
        "agprs": agprs,
        "sgprs": number("sgpr_count"),
        "vector_spills": number("vgpr_spill_count"),
        "scalar_spills": number("sgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
        "shared": made.metadata.shared,
        "occupancy": int(occupancy[-1]) if occupancy else 0,
        "matrix": dict(sorted(Counter(MATRIX.findall(text)).items())),
        "loads_16": len(WIDE.findall(text)),
        "loads": len(LOAD.findall(text)),
        "bytes": int(size[-1]) if size else 0,
    }
    if made.name in CACHED:
        row |= widest(text)
    if arch in LDS_BYTES:  # whole: occupancy by LDS too, and how busy the hot loop can keep the matrix unit
        read = static.analyse(text, made.name, made.metadata.shared)
        hot = read.hot_loop
        row["occupancy"] = read.occupancy
        row["busy"] = round(hot.matrix_share, 3) if hot else 0.0
    return row


def widest(text: str) -> dict[str, int]:
    """Bytes a lane of the widest load of K and of V, by the lines of Python that places in the assembly name."""
    found: dict[str, list[int]] = {"k": [], "v": []}
    operand = ""
    for line in text.splitlines():
        if line.startswith("\t.loc"):
            lines = (linecache.getline(str(KERNELS / file), int(number)) for file, number in FRAME.findall(line))
            operand = next((match[1] for match in map(OPERAND.match, lines) if match), "")
        elif operand and (load := LOAD.match(line)):
            found[operand].append(BYTES.get(load[1], 2))
    return {f"{name}_bytes": max(sizes, default=0) for name, sizes in found.items()}


def _nvidia(made: Any) -> dict[str, Any]:
    binary, text = made.asm["cubin"], made.asm["ptx"]
    registers, stack, size = _cubin(binary)
    kinds = re.findall(
        r"\b((?:wgmma\.mma_async|tcgen05\.mma|mma)\.sync\.aligned\.\w+|wgmma\.mma_async|tcgen05\.mma)", text
    )
    return {
        "registers": registers,
        "stack": stack,  # bytes; spilled registers live there, and ptxas counts them in its log only
        "shared": made.metadata.shared,
        "matrix": dict(sorted(Counter(kinds).items())),
        "loads_16": len(
            re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.cg\.shared\.global|ld\.global[\w.:]*\.v2\.b64", text)
        ),
        "bytes": size,
    }


def _cubin(binary: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack and bytes of code in an ELF of one kernel.

    Attributes of .nv.info, each of a symbol: 0x2f is its number of registers, 0x11 its frame's size.
    """
    at, size, count, names = struct.unpack_from("<Q", binary, 40) + struct.unpack_from("<HHH", binary, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", binary, at + i * size) for i in range(count)]
    strings = sections[names][4]
    registers = code = stack = 0
    for section in sections:
        name = binary[strings + section[0] : binary.index(b"\0", strings + section[0])].decode()
        if name.startswith(".text."):
            code = section[5]
        elif name == ".nv.info":
            place, end = section[4], section[4] + section[5]
            while place < end:
                form, attribute, length = struct.unpack_from("<BBH", binary, place)
                if form == 4 and attribute == 0x2F:
                    registers = struct.unpack_from("<I", binary, place + 8)[0]
                elif form == 4 and attribute == 0x11:
                    stack = struct.unpack_from("<I", binary, place + 8)[0]
                place += 4 + (length if form == 4 else 0)
    return registers, stack, code
