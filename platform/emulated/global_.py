"""Instructions on global memory: global_*, and flat_* on that, LDS or scratch, as each lane's address says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.atomics import MEMORY, Atomic
from portable.platform.emulated.isa import APERTURES, M0, Instruction, Operand
from portable.platform.emulated.transfer import (
    CACHE,
    LOADS,
    STORES,
    Load,
    Store,
    accept,
    data,
    extended,
    read,
    words_of,
    write,
)
from portable.platform.emulated.waves import LANE, U64, Array, Group, handles

# What can be loaded straight into LDS, and the bytes from one lane's place there to the next one's.
TO_LDS = {"ubyte": 4, "sbyte": 4, "ushort": 4, "sshort": 4, "dword": 4, "dwordx3": 12, "dwordx4": 16}


def address(w: Group, i: Instruction, vector: Operand, base: Operand | None) -> Array:
    """[G, 64] uint64: vector pair + offset, or scalar pair + zero-extended 32-bit vector + offset."""
    offset = np.int64(i.number("offset")).astype(U64)
    if base is None or base.kind == "off":
        pair: Array = w.u64(vector) + offset
        return pair
    if base.kind != "s":
        raise NotImplementedError(f"line {i.line}: base {base.text!r} of {i.text!r} is no scalar pair")
    start = (w.get_s64(base.index) + offset)[:, None]
    return np.asarray(start + (U64(0) if vector.kind == "off" else w.u32(vector).astype(U64)))


def spaces(w: Group, i: Instruction, at: Array, flat: bool) -> Iterator[tuple[Access, Any, Array]]:
    """The lanes that access global memory, LDS and scratch, that memory, and their addresses [n] in it."""
    if flat:
        high = at >> U64(32)
        shared, private = (high == U64(APERTURES[f"src_{name}_base"] >> 32) for name in ("shared", "private"))
        for where, memory in ((shared, w.memory.lds), (private, w.memory.scratch)):
            access = Access(w, i, where)
            if not access.none:
                yield access, memory, access.pick(at & U64(0xFFFFFFFF)).astype(np.int64)
        access = Access(w, i, ~(shared | private))
    else:
        access = Access(w, i)
    if not access.none:
        yield access, w.memory.allocations, access.pick(at)


def merged(found: list[Array]) -> Array:
    """What lanes of several spaces have found, each 0 where the others have not."""
    return found[0] if len(found) == 1 else np.bitwise_or.reduce(found)


def to_lds(w: Group, i: Instruction, access: Access, words: Array, load: Load, pitch: int) -> None:
    """LDS[M0 + offset + lane * pitch] = words [words, G, 64], narrow ones extended to 32 bits."""
    start = w.get_s(M0).astype(np.int64)[:, None] + i.number("offset") + LANE * pitch
    picked = np.stack([access.pick(each) for each in extended(words, load)])
    w.memory.lds.store(access, access.pick(start), picked, pitch)


def _enter(kind: str) -> None:
    """global_*: addresses are (vector, base); flat_*: a vector pair alone."""
    flat = kind == "flat"

    def base(i: Instruction, number: int) -> Operand | None:
        return None if flat else i.operands[number]

    for name, load in LOADS.items():

        @handles(f"{kind}_load_{name}")
        def load_handler(w: Group, i: Instruction, load: Load = load) -> None:
            """D = MEM[address], sub-word loads extended or into one half."""
            accept(i, "offset", *CACHE, operands=2 if flat else 3)
            found = [
                access.spread(memory.load(access, at, load.nbytes))
                for access, memory, at in spaces(w, i, address(w, i, i.operands[1], base(i, 2)), flat)
            ]
            if found:
                write(w, i.operands[0], merged(found), load)

    for name, store in STORES.items():

        @handles(f"{kind}_store_{name}")
        def store_handler(w: Group, i: Instruction, store: Store = store) -> None:
            """MEM[address] = low bytes of D, or of D >> 16."""
            accept(i, "offset", *CACHE, operands=2 if flat else 3)
            for access, memory, at in spaces(w, i, address(w, i, i.operands[0], base(i, 2)), flat):
                memory.store(access, at, read(w, access, i.operands[1], store), store.nbytes)

    for name, operation in MEMORY.items():

        @handles(f"{kind}_atomic_{name}")
        def atomic_handler(w: Group, i: Instruction, operation: Atomic = operation) -> None:
            """old = MEM[address]; MEM[address] = old OP D; return old if sc0."""
            returns = 1 if i.modifiers.get("sc0") else 0
            accept(i, "offset", *CACHE, operands=(2 if flat else 3) + returns)
            kind, found = operation.dtype, list[Array]()
            for access, memory, at in spaces(w, i, address(w, i, i.operands[returns], base(i, returns + 2)), flat):
                given = [
                    data(w, access, i.operands[returns + 1], kind, number * kind.itemsize // 4)
                    for number in range(operation.sources)
                ]
                found.append(access.spread(words_of(memory.atomic(access, at, operation, given))))
            for number, word in enumerate(merged(found) if returns and found else ()):
                w.set(i.operands[0], word, number)


_enter("global")
_enter("flat")

for _name, _pitch in TO_LDS.items():

    @handles(f"global_load_lds_{_name}")
    def load_to_lds(w: Group, i: Instruction, load: Load = LOADS[_name], pitch: int = _pitch) -> None:
        """LDS[M0 + offset + lane * size] = MEM[address + offset]: the offset counts on both sides."""
        accept(i, "offset", *CACHE, operands=2)
        access = Access(w, i)
        if not access.none:
            at = access.pick(address(w, i, i.operands[0], i.operands[1]))
            words = access.spread(w.memory.allocations.load(access, at, load.nbytes))
            to_lds(w, i, access, words, load, pitch)
