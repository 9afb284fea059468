"""What moves between memory and registers: the formats of loads and stores, and the modifiers that they accept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from portable.platform.emulated.access import Access, Array
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.waves import U32, Group

CACHE = ("sc0", "sc1", "nt")  # which caches keep the line: no effect on values


class Load(NamedTuple):
    """`half`: the 16 bits of the register that are written, the others stay; "": all of it."""

    nbytes: int
    signed: bool = False
    half: str = ""


class Store(NamedTuple):
    """`shift`: of the register, before its low bytes are stored."""

    nbytes: int
    shift: int = 0


# The names behind global_load_, flat_load_, buffer_load_ and scratch_load_.
LOADS = {
    "ubyte": Load(1),
    "sbyte": Load(1, signed=True),
    "ushort": Load(2),
    "sshort": Load(2, signed=True),
    "dword": Load(4),
    "dwordx2": Load(8),
    "dwordx3": Load(12),
    "dwordx4": Load(16),
    "ubyte_d16": Load(1, half="low"),
    "ubyte_d16_hi": Load(1, half="high"),
    "sbyte_d16": Load(1, signed=True, half="low"),
    "sbyte_d16_hi": Load(1, signed=True, half="high"),
    "short_d16": Load(2, half="low"),
    "short_d16_hi": Load(2, half="high"),
}
STORES = {
    "byte": Store(1),
    "short": Store(2),
    "dword": Store(4),
    "dwordx2": Store(8),
    "dwordx3": Store(12),
    "dwordx4": Store(16),
    "byte_d16_hi": Store(1, shift=16),
    "short_d16_hi": Store(2, shift=16),
}
# The names behind ds_read_ and ds_write_.
LDS_LOADS = {
    "u8": Load(1),
    "i8": Load(1, signed=True),
    "u16": Load(2),
    "i16": Load(2, signed=True),
    "b32": Load(4),
    "b64": Load(8),
    "b96": Load(12),
    "b128": Load(16),
    "u8_d16": Load(1, half="low"),
    "u8_d16_hi": Load(1, half="high"),
    "i8_d16": Load(1, signed=True, half="low"),
    "i8_d16_hi": Load(1, signed=True, half="high"),
    "u16_d16": Load(2, half="low"),
    "u16_d16_hi": Load(2, half="high"),
}
LDS_STORES = {
    "b8": Store(1),
    "b16": Store(2),
    "b32": Store(4),
    "b64": Store(8),
    "b96": Store(12),
    "b128": Store(16),
    "b8_d16_hi": Store(1, shift=16),
    "b16_d16_hi": Store(2, shift=16),
}


def accept(i: Instruction, *modifiers: str, operands: int) -> None:
    """Refuse an instruction with another modifier, another number of operands, or a changed operand such as -v1.

    Raises:
        NotImplementedError: naming it.
    """
    if unknown := sorted(set(i.modifiers) - set(modifiers)):
        raise NotImplementedError(f"line {i.line}: {', '.join(unknown)} of {i.text!r} is not emulated")
    if len(i.operands) != operands:
        raise NotImplementedError(f"line {i.line}: {i.text!r} has {len(i.operands)} operands, not {operands}")
    if any(each.negate or each.absolute or each.sign_extend for each in i.operands):
        raise NotImplementedError(f"line {i.line}: an operand of {i.text!r} has a modifier that memory does not know")


def extended(words: Array, load: Load) -> Array:
    """Loaded words with the sign extended: to 32 bits, or to 16 if half a register is written."""
    if not load.signed:
        return words
    wide = words.astype(f"i{load.nbytes}").astype(np.int32).view(U32)
    return wide & U32(0xFFFF) if load.half else wide


def write(w: Group, to: Operand, words: Array, load: Load) -> None:
    """Put loaded words [words, G, 64] into registers, for the active lanes."""
    words = extended(words, load)
    if load.half:
        kept, shift = (0xFFFF0000, 0) if load.half == "low" else (0x0000FFFF, 16)
        w.set(to, (w.u32(to) & U32(kept)) | (words[0] << U32(shift)))
        return
    for number, word in enumerate(words):
        w.set(to, word, number)


def read(w: Group, access: Access, source: Operand, store: Store) -> Array:
    """The words [words, n] that a store takes from registers."""
    count = max(1, store.nbytes // 4)
    words = np.stack([access.pick(w.u32(source, number)) for number in range(count)])
    return words >> U32(store.shift) if store.shift else words


def data(w: Group, access: Access, source: Operand, dtype: np.dtype[np.generic], word: int = 0) -> Array:
    """[n] of a 4-byte or 8-byte type, from one or two registers of a source beginning at its register `word`."""
    size = dtype.itemsize // 4
    words = np.stack([access.pick(w.u32(source, word + number)) for number in range(size)], axis=-1)
    return np.ascontiguousarray(words).view(dtype)[:, 0]


def words_of(values: Array) -> Array:
    """[n] of a 4-byte or 8-byte type as [words, n] uint32."""
    words: Array = np.ascontiguousarray(values).view(U32).reshape(len(values), -1).T
    return words


def write_old(w: Group, access: Access, to: Operand, old: Array) -> None:
    """Put the values before an atomic, [n], into registers."""
    for number, word in enumerate(access.spread(words_of(old))):
        w.set(to, word, number)
