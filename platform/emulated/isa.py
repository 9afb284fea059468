"""AMD assembly text to typed instructions: what the compiler printed, decoded once per kernel."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

EXEC, VCC, M0 = 126, 106, 124  # scalar registers that have names
AGPR = 256  # accumulation registers stand behind the 256 vector registers
NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (107, 1), "m0": (M0, 1), "null": (125, 1)}
NAMED |= {"exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (127, 1)} | {f"ttmp{i}": (108 + i, 1) for i in range(16)}
FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532")
FLAGS = "offen|idxen|glc|slc|sc0|sc1|nt|lds|clamp|row_mirror|row_half_mirror|high|gds"
PAIRS = (
    "offset|offset0|offset1|row_shl|row_shr|row_ror|row_bcast|row_newbcast|wave_shl|wave_shr|wave_rol|wave_ror|"
    "row_mask|bank_mask|bound_ctrl|quad_perm|op_sel|op_sel_hi|neg_lo|neg_hi|cbsz|blgp|abid|dst_sel|dst_unused|"
    "src0_sel|src1_sel|mul|div|bitop3"
)
MODIFIER = re.compile(rf"(?<!\S)(?:({PAIRS}):(\[[^\]]*\]|swizzle\([^)]*\)|[\w.-]+)|({FLAGS}))(?=\s|$)")
# Where flat addresses mean LDS or scratch: the upper halves of addresses that no allocation has.
APERTURES = {"src_shared_base": 1 << 61, "src_private_base": (1 << 61) + (1 << 32)}
APERTURES |= {name.replace("base", "limit"): start | 0xFFFFFFFF for name, start in APERTURES.items()}
UNTYPED = ("s_waitcnt", "s_sendmsg")  # no register among their operands
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")


class DecodeError(ValueError):
    """Text that this decoder does not know; the message holds the line."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A register range, a constant, a label, or `off`.

    `kind` is "v" (vector; accumulation registers from 256), "s" (scalar), "i" (integer), "f" (float), "off", "aperture"
    (a constant of 64 bits), or "label" for any other name, hwreg(...) included, that only `text` holds.
    """

    kind: str
    index: int = 0  # first register, or the value of "i"
    count: int = 1  # 32-bit registers
    value: float = 0.0  # of "f"
    text: str = ""
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False  # sext(...)

    @property
    def bits(self) -> int:
        """A constant as 32 bits."""
        if self.kind == "f":
            return int(struct.unpack("<I", struct.pack("<f", self.value))[0])
        return self.index & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of assembly."""

    name: str  # the mnemonic without its encoding suffix: "v_add_f32"
    encoding: str  # "e32", "e64", "dpp", "sdwa" or ""
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, object]  # int, list of int, str, or True for a flag
    text: str
    line: int  # of the assembly
    source: str = ""  # "file:line" where the assembly says so, and the kernel's line if that is in a header

    def number(self, name: str, default: int = 0) -> int:
        """An integer modifier."""
        value = self.modifiers.get(name, default)
        if not isinstance(value, int):
            raise DecodeError(f"line {self.line}: {name} of {self.text!r} is {value!r}, not a number")
        return value

    def numbers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list modifier, filled up from its default."""
        value = self.modifiers.get(name)
        given = tuple(value) if isinstance(value, list) else ()
        return given + default[len(given) :]


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's instructions, and where its labels stand."""

    name: str
    arch: str  # of the text's own .amdgcn_target
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    facts: Mapping[str, str] = field(default_factory=dict)  # of .amdhsa_kernel: user_sgpr_count, ...
    hidden: Mapping[str, int] = field(default_factory=dict)  # hidden argument -> offset, of this kernel's metadata


def decode(text: str, name: str) -> Code:
    """The code of kernel `name` in an assembly text that may hold several.

    Raises:
        DecodeError: no such kernel, no target, or a line that is not understood.
    """
    target = re.search(r'\.amdgcn_target\s+"[^"]*-(gfx\w+)', text)
    if target is None:
        raise DecodeError("the assembly has no .amdgcn_target")
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(f"{name}:")]
    if not starts:
        raise DecodeError(f"the assembly has no kernel {name!r}")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files: dict[str, str] = {}
    for found in re.finditer(r'^\s*\.file\s+(\d+)(?:\s+"[^"]*")?\s+"([^"]+)"', text, re.MULTILINE):
        files[found[1]] = found[2]
    source = ""
    for number, raw in enumerate(lines[starts[0] + 1 :], starts[0] + 2):
        if raw.startswith(".Lfunc_end") or raw.strip().startswith(".section"):
            break
        line = raw.split(";")[0].split("//")[0].strip()
        if at := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            source = f"{files.get(at[1], at[1])}:{at[2]}" + _caller(files.get(at[1], ""), raw)
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(instruction(line, number, source))
    return Code(name, target[1], tuple(instructions), labels, _facts(text, name), _hidden(text, name))


def _caller(file: str, location: str) -> str:
    """Where code that was inlined from `file`, a header, was called in the kernel's own, which the comment has last."""
    chain = re.findall(r"@\[ (?:\S*/)?([^/\s]+):(\d+):\d+", location)
    return f", called at {chain[-1][0]}:{chain[-1][1]}" if chain and chain[-1][0] != Path(file).name else ""


def instruction(text: str, line: int = 0, source: str = "") -> Instruction:
    """One line.

    >>> instruction("v_add_f32_e64 v1, -v2, |s3| clamp").operands[1].negate
    True
    """
    mnemonic, _, rest = text.partition(" ")
    suffix = SUFFIX.search(mnemonic)
    name = SUFFIX.sub("", mnemonic)
    encoding = suffix[1] if suffix else ""
    if name in UNTYPED:
        return Instruction(name, encoding, (), {}, text, line, source)
    modifiers: dict[str, object] = {}
    parts = _split(rest)
    operands = []
    for part in parts:
        words = part
        while found := MODIFIER.search(words):
            if found[3]:
                modifiers[found[3]] = True
            else:
                modifiers[found[1]] = _value(found[2])
            words = (words[: found.start()] + words[found.end() :]).strip()
        if words:
            try:
                operands.append(operand(words))
            except DecodeError as error:
                raise DecodeError(f"line {line}: {error} in {text!r}") from None
    return Instruction(name, encoding, tuple(operands), modifiers, text, line, source)


def operand(text: str) -> Operand:
    """One operand, with its modifiers.

    >>> operand("-|v[2:3]|").count, operand("a0").index, operand("0x10").index
    (2, 256, 16)
    """
    negate = absolute = extend = False
    inner = text
    if found := re.fullmatch(r"neg\((.*)\)", inner):
        negate, inner = True, found[1]
    if found := re.fullmatch(r"-(\|.*\||[vas]\[?\d.*|vcc.*|exec.*|abs\(.*\))", inner):
        negate, inner = True, found[1]
    if found := re.fullmatch(r"\|(.*)\||abs\((.*)\)", inner):
        absolute, inner = True, found[1] or found[2]
    if found := re.fullmatch(r"sext\((.*)\)", inner):
        extend, inner = True, found[1]
    kind, index, count, value = "", 0, 1, 0.0
    if found := re.fullmatch(r"([vas])(\d+)", inner):
        kind, index = found[1], int(found[2])
    elif found := re.fullmatch(r"([vas])\[(\d+):(\d+)\]", inner):
        kind, index, count = found[1], int(found[2]), int(found[3]) - int(found[2]) + 1
    elif inner in NAMED:
        kind, (index, count) = "s", NAMED[inner]
    elif inner in APERTURES:
        kind, index, count = "aperture", APERTURES[inner], 2
    elif inner == "off":
        kind = "off"
    elif inner in FLOATS:
        kind, value = "f", float(inner)
    elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", inner):
        kind, index = "i", int(inner, 0)
    elif re.fullmatch(r"[.A-Za-z_$][\w.@+$]*|(hwreg|gpr_idx)\(.*\)", inner):
        kind = "label"
    else:
        raise DecodeError(f"operand {text!r} is not understood")
    if kind == "a":
        kind, index = "v", index + AGPR
    return Operand(kind, index, count, value, inner, negate, absolute, extend)


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _value(text: str) -> object:
    if text.startswith("["):
        return [int(part, 0) for part in text[1:-1].split(",")]
    return int(text, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) else text


def _facts(text: str, name: str) -> dict[str, str]:
    block = re.search(rf"\.amdhsa_kernel\s+{re.escape(name)}\s*\n(.*?)\.end_amdhsa_kernel", text, re.DOTALL)
    found = re.findall(r"\.amdhsa_(\w+)\s+(\S+)", block[1]) if block else []
    return dict(found)


def _hidden(text: str, name: str) -> dict[str, int]:
    """The offsets of the hidden arguments, from the metadata entry of this kernel alone."""
    metadata = text[text.find(".amdgpu_metadata") :]
    for entry in re.split(r"\n  - ", metadata):
        if re.search(rf"\n    \.name:\s+{re.escape(name)}\s*\n", entry):
            found = {}
            for argument in re.split(r"\n\s*-\s+\.", entry):
                offset = re.search(r"offset:\s*(\d+)", argument)
                kind = re.search(r"value_kind:\s*(hidden_\w+)", argument)
                if offset and kind:
                    found[kind[1]] = int(offset[1])
            return found
    return {}


def lanes(mask: np.ndarray) -> np.ndarray:
    """[W] uint64 masks to [W, 64] bool."""
    return np.unpackbits(mask.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").view(np.bool_)


def masks(active: np.ndarray) -> np.ndarray:
    """[W, 64] bool to [W] uint64."""
    return np.ascontiguousarray(np.packbits(active, axis=1, bitorder="little")).view("<u8")[:, 0]
