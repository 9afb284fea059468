"""Constants and variables that compiled code holds beside its instructions: lookup tables, `__device__` variables.

Code reaches them relative to its own address. Instructions have none here: `s_getpc_b64` gives 0, and `link` puts whole
addresses where the assembly asks for distances.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from portable.platform.emulated.isa import Code, Instruction, Operand

# A distance is counted from its own place, 4 bytes (low half) or 12 (high half) behind the instruction after s_getpc.
DISTANCE = re.compile(r"([\w.$]+)@rel32@(?:lo\+(\d+)|hi\+(\d+))")
SIZES = {".byte": 1, ".short": 2, ".long": 4, ".quad": 8}
QUOTED = re.compile(r'^"(.*)"$')


class Object(NamedTuple):
    """A symbol's bytes, as a kernel finds them when it is launched first."""

    data: bytes
    constant: bool


def references(code: Code) -> tuple[str, ...]:
    """The symbols that a kernel reaches.

    >>> from portable.platform.emulated.isa import instruction
    >>> references(Code("f", "gfx942", (instruction("s_add_u32 s2, s2, powers@rel32@lo+4"),), {}))
    ('powers',)
    """
    found = (DISTANCE.fullmatch(each.text) for i in code.instructions for each in i.operands)
    return tuple(dict.fromkeys(match[1] for match in found if match))


def objects(assembly: str) -> dict[str, Object | None]:
    """Every object of an assembly text; None for one that holds what is not emulated, such as another's address.

    >>> objects('''
    ...     .type a,@object
    ...     .section .rodata,"a",@progbits
    ... a:
    ...     .short 1, -2
    ...     .asciz "x\\\\001"
    ...     .size a, 7
    ... ''')
    {'a': Object(data=b'\\x01\\x00\\xfe\\xffx\\x01\\x00', constant=True)}
    """
    out: dict[str, Object | None] = {}
    section, name, data = "", "", bytearray()
    for line in assembly.split("\n"):
        words = line.split(None, 1)
        if not words or words[0].startswith(";") or words[0].endswith(":"):
            continue
        directive, rest = words[0], words[1] if len(words) > 1 else ""
        if directive in (".data", ".text", ".bss", ".section"):
            section = rest.split(",")[0].strip() if directive == ".section" else directive
        elif directive == ".type" and (found := re.match(r"([\w.$]+),\s*@object", rest)):
            name, data = found[1], bytearray()
            out[name] = Object(b"", False)
        elif name and directive == ".size":
            if out[name] is not None:
                out[name] = Object(bytes(data), section.startswith(".rodata"))
            name = ""
        elif name and directive.startswith(".") and directive not in (".globl", ".p2align", ".weak", ".local"):
            found_bytes = _bytes(directive, rest)
            if found_bytes is None:
                out[name] = None
            else:
                data += found_bytes
    return out


def _bytes(directive: str, rest: str) -> bytes | None:
    """What a data directive lays down; None where it is not known."""
    if directive in (".ascii", ".asciz"):
        text = rest[: rest.rfind('"') + 1]
        if (found := QUOTED.match(text)) is None:
            return None
        return found[1].encode("ascii").decode("unicode_escape").encode("latin-1") + bytes(directive == ".asciz")
    values = rest.split(";")[0].strip().split(",")
    try:
        numbers = [int(value, 0) for value in values]
    except ValueError:
        return None
    if directive == ".zero":
        return bytes(numbers[0]) if len(numbers) == 1 else bytes([numbers[1]]) * numbers[0]
    if directive not in SIZES:
        return None
    size = SIZES[directive]
    return b"".join((number & (1 << 8 * size) - 1).to_bytes(size, "little") for number in numbers)


def link(code: Code, addresses: Mapping[str, int]) -> Code:
    """The code, with the addresses of the symbols that it reaches."""
    if not addresses:
        return code

    def placed(operand: Operand) -> Operand:
        if (found := DISTANCE.fullmatch(operand.text)) is None:
            return operand
        low = found[2] is not None
        whole = addresses[found[1]] + (int(found[2]) - 4 if low else int(found[3]) - 12)
        return Operand("i", whole & 0xFFFFFFFF if low else whole >> 32 & 0xFFFFFFFF, text=operand.text)

    def each(i: Instruction) -> Instruction:
        return replace(i, operands=tuple(map(placed, i.operands))) if "@rel32" in i.text else i

    return replace(code, instructions=tuple(map(each, code.instructions)))
