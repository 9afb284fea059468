"""Instructions on LDS: ds_read*, ds_write* and LDS atomics."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.atomics import LDS, Atomic
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.transfer import LDS_LOADS, LDS_STORES, Load, Store, accept, data, read, write, write_old
from portable.platform.emulated.waves import LANES, Array, Group, handles

BLOCK = 16  # lanes that transpose together
TRANSPOSED = {"b64_tr_b16": 16, "b64_tr_b8": 8, "b96_tr_b6": 6, "b64_tr_b4": 4}  # the bits of an element


def address(w: Group, access: Access, vector: Operand, offset: int) -> Array:
    """[n] int64: vector + offset, in 32 bits."""
    return access.pick(w.u32(vector) + np.uint32(offset)).astype(np.int64)


for _name, _load in LDS_LOADS.items():

    @handles(f"ds_read_{_name}")
    def read_handler(w: Group, i: Instruction, load: Load = _load) -> None:
        """D = LDS[address + offset], sub-word loads extended or into one half."""
        accept(i, "offset", operands=2)
        access = Access(w, i)
        if not access.none:
            at = address(w, access, i.operands[1], i.number("offset"))
            write(w, i.operands[0], access.spread(w.memory.lds.load(access, at, load.nbytes)), load)


for _name, _store in LDS_STORES.items():

    @handles(f"ds_write_{_name}")
    def write_handler(w: Group, i: Instruction, store: Store = _store) -> None:
        """LDS[address + offset] = low bytes of D, or of D >> 16."""
        accept(i, "offset", operands=2)
        access = Access(w, i)
        if not access.none:
            at = address(w, access, i.operands[0], i.number("offset"))
            w.memory.lds.store(access, at, read(w, access, i.operands[1], store), store.nbytes)


for _stride, _times in (("", 1), ("st64", 64)):
    for _bits in (32, 64):

        @handles(f"ds_read2{_stride}_b{_bits}")
        def read2_handler(w: Group, i: Instruction, nbytes: int = _bits // 8, times: int = _times) -> None:
            """D[0], D[1] = LDS[address + offset0 * size], LDS[address + offset1 * size]; st64: * size * 64."""
            accept(i, "offset0", "offset1", operands=2)
            access = Access(w, i)
            if not access.none:
                parts = []
                for name in ("offset0", "offset1"):
                    at = address(w, access, i.operands[1], i.number(name) * nbytes * times)
                    parts.append(w.memory.lds.load(access, at, nbytes))
                write(w, i.operands[0], access.spread(np.concatenate(parts)), Load(2 * nbytes))

        @handles(f"ds_write2{_stride}_b{_bits}")
        def write2_handler(w: Group, i: Instruction, nbytes: int = _bits // 8, times: int = _times) -> None:
            """LDS[address + offset0 * size], LDS[address + offset1 * size] = D0, D1; st64: * size * 64."""
            accept(i, "offset0", "offset1", operands=3)
            access = Access(w, i)
            if not access.none:
                for name, source in zip(("offset0", "offset1"), i.operands[1:], strict=True):
                    at = address(w, access, i.operands[0], i.number(name) * nbytes * times)
                    w.memory.lds.store(access, at, read(w, access, source, Store(nbytes)), nbytes)


for _name, _bits in TRANSPOSED.items():

    @handles(f"ds_read_{_name}")
    def transpose_handler(w: Group, i: Instruction, bits: int = _bits) -> None:
        """In each 16 lanes: the 8 or 12 bytes each reads, end to end, are rows of 16 elements; lane t gets column t.

        Public texts on gfx950 describe it so for 16 bits; the manual says of all that they transpose a matrix, no more.
        """
        accept(i, "offset", operands=2)
        access = Access(w, i)
        if access.none:
            return
        if (blocks := w.active.reshape(-1, LANES // BLOCK, BLOCK)).any() and not (blocks.all(2) | ~blocks.any(2)).all():
            raise NotImplementedError(f"line {i.line}: {i.text!r} with some lanes of 16 inactive is not emulated")
        at = address(w, access, i.operands[1], i.number("offset"))
        size = 12 if bits == 6 else 8
        rows = np.ascontiguousarray(w.memory.lds.load(access, at, size).T).view(np.uint8)  # [n, size]
        elements = rows.view("u2") if bits == 16 else unpacked(rows, bits)
        columns = elements.reshape(-1, size * 8 // bits, BLOCK).transpose(0, 2, 1)  # [blocks, lane, row]
        packed = np.ascontiguousarray(columns) if bits == 16 else repacked(columns, bits)
        write(w, i.operands[0], access.spread(packed.view(np.uint32).reshape(-1, size // 4).T), Load(size))


def unpacked(rows: Array, bits: int) -> Array:
    """[n, bytes] to [n, elements] uint8, those in the low bits first.

    >>> unpacked(np.array([[0x21, 0x43]], np.uint8), 4).tolist()
    [[1, 2, 3, 4]]
    """
    single = np.unpackbits(rows, axis=-1, bitorder="little").reshape(len(rows), -1, bits)
    elements: Array = np.packbits(single, axis=-1, bitorder="little")[..., 0]
    return elements


def repacked(elements: Array, bits: int) -> Array:
    """[..., elements] uint8 to [..., bytes], undoing `unpacked`."""
    single = np.unpackbits(np.ascontiguousarray(elements)[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(single.reshape(*elements.shape[:-1], -1), axis=-1, bitorder="little")


def _atomic(w: Group, i: Instruction, operation: Atomic, returns: int) -> None:
    accept(i, "offset", operands=1 + operation.sources + returns)
    access = Access(w, i)
    if access.none:
        return
    at = address(w, access, i.operands[returns], i.number("offset"))
    given = [data(w, access, source, operation.dtype) for source in i.operands[returns + 1 :]]
    old = w.memory.lds.atomic(access, at, operation, given)
    if returns:
        write_old(w, access, i.operands[0], old)


for (_name, _type), _operation in LDS.items():
    if _name != "wrxchg":  # which exists with a result only

        @handles(f"ds_{_name}_{_type}")
        def atomic_handler(w: Group, i: Instruction, operation: Atomic = _operation) -> None:
            """LDS[address + offset] = LDS[address + offset] OP D0 (D1)."""
            _atomic(w, i, operation, 0)

    @handles(f"ds_{_name}_rtn_{_type}")
    def returning_handler(w: Group, i: Instruction, operation: Atomic = _operation) -> None:
        """D = LDS[address + offset]; LDS[address + offset] = D OP D0 (D1)."""
        _atomic(w, i, operation, 1)
