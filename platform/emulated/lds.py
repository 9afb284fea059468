"""Instructions on LDS: ds_read*, ds_write* and LDS atomics."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.atomics import LDS, Atomic
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.transfer import LDS_LOADS, LDS_STORES, Load, Store, accept, data, read, write, write_old
from portable.platform.emulated.waves import LANES, Array, Group, handles

BLOCK = 16  # lanes that transpose together
TRANSPOSED = {"b16": 16, "b8": 8, "b4": 4}  # ds_read_b64_tr_*: the bits of an element


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

    @handles(f"ds_read_b64_tr_{_name}")
    def transpose_handler(w: Group, i: Instruction, bits: int = _bits) -> None:
        """In each 16 lanes: the 8 bytes each reads, end to end, are rows of 16 elements; lane t gets column t."""
        accept(i, "offset", operands=2)
        access = Access(w, i)
        if access.none:
            return
        if (blocks := w.active.reshape(-1, LANES // BLOCK, BLOCK)).any() and not (blocks.all(2) | ~blocks.any(2)).all():
            raise NotImplementedError(f"line {i.line}: {i.text!r} with some lanes of 16 inactive is not emulated")
        at = address(w, access, i.operands[1], i.number("offset"))
        rows = np.ascontiguousarray(w.memory.lds.load(access, at, 8).T).view(np.uint8)  # [n, 8]
        elements = nibbles(rows) if bits == 4 else rows.view(f"u{bits // 8}")
        columns = elements.reshape(-1, 64 // bits, BLOCK).transpose(0, 2, 1)  # [blocks, lane, row]
        packed = np.ascontiguousarray(columns[..., 0::2] | columns[..., 1::2] << 4 if bits == 4 else columns)
        write(w, i.operands[0], access.spread(packed.view(np.uint32).reshape(-1, 2).T), Load(8))


def nibbles(rows: Array) -> Array:
    """[n, bytes] to [n, 2 * bytes], the low half of each byte first.

    >>> nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist()
    [[1, 2, 3, 4]]
    """
    return np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), -1)


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
