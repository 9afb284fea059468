"""Instructions on global memory through a buffer descriptor: buffer_*."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.atomics import MEMORY, Atomic
from portable.platform.emulated.global_ import TO_LDS, to_lds
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.transfer import CACHE, LOADS, STORES, Load, Store, accept, data, read, write, write_old
from portable.platform.emulated.waves import POISON, U64, Array, Group, handles

SWIZZLED = 1 << 31  # of descriptor word 1
ADD_LANE = 1 << 23  # of descriptor word 3
ANY = 0x7FFFFFFE  # the size of a buffer whose bounds its compiler does not know
MASKED = 1 << 31  # the offset that it gives lanes that shall not access it


def address(w: Group, i: Instruction, vector: Operand, descriptor: Operand, scalar: Operand) -> tuple[Array, Array]:
    """Addresses [G, 64] uint64 and the bytes [G, 64] int64 from there to the end of the buffer (negative: beyond).

    Address = base[47:0] + scalar + vector (with `offen`) + offset; all but the base count against num_records.
    A stride is legal, as it also steers the cache, but has no effect without an index or swizzling.
    """
    if (w.get_s(descriptor.index + 1) & np.uint32(SWIZZLED)).any():
        raise NotImplementedError(f"line {i.line}: {i.text!r} has a swizzled buffer, which is not emulated")
    if (w.get_s(descriptor.index + 3) & np.uint32(ADD_LANE)).any():
        raise NotImplementedError(f"line {i.line}: {i.text!r} has a buffer that adds the lane, which is not emulated")
    inside = np.full(w.active.shape, i.number("offset"), np.int64)
    if i.modifiers.get("offen"):
        inside += w.u32(vector)
    elif vector.kind != "off":
        raise NotImplementedError(f"line {i.line}: {i.text!r} has a vector address without offen")
    inside += w.scalar(scalar).astype(np.int64)[:, None]
    base, size = w.get_s64(descriptor.index) & U64(0xFFFFFFFFFFFF), w.get_s(descriptor.index + 2)[:, None]
    if (size == POISON).any():
        access = Access(w, i)
        if not access.none and (bad := access.pick(np.broadcast_to(size, w.active.shape)) == POISON).any():
            raise access.fault("access through a buffer whose size was never written", bad)
    return base[:, None] + inside.astype(U64), size.astype(np.int64) - inside


def check(
    w: Group, i: Instruction, vector: Operand, descriptor: Operand, at: Array, room: Array, nbytes: int, verb: str
) -> None:
    """Raise for a negative offset from a buffer of any size: hardware reads 0 there and drops what is written."""
    if vector.kind == "off" or not (w.active & (room < nbytes)).any():
        return
    any_size = (w.get_s(descriptor.index + 2) >= ANY)[:, None]
    access = Access(w, i, (room < nbytes) & any_size & (w.u32(vector) > MASKED))
    if not access.none:
        address = access.pick(at - U64(1 << 32))
        w.memory.allocations.check(access, address, nbytes, verb)  # says of what, where it is out of bounds
        raise access.fault(f"{verb} at a negative offset, beyond the end of a buffer", np.ones(len(address), np.bool_))


def fetch(w: Group, i: Instruction, at: Array, room: Array, nbytes: int) -> Array:
    """[words, G, 64] uint32: each word is 0 where it lies beyond the buffer."""
    whole = Access(w, i, room >= nbytes)
    count = max(1, nbytes // 4)
    words = np.zeros((count, *at.shape), np.uint32)
    if not whole.none:
        words = whole.spread(w.memory.allocations.load(whole, whole.pick(at), nbytes))
    if count > 1 and (w.active & (room < nbytes) & (room >= 4)).any():
        for number in range(count):
            part = Access(w, i, (room < nbytes) & (room >= 4 * number + 4))
            if not part.none:
                one = w.memory.allocations.load(part, part.pick(at + U64(4 * number)), 4)
                words[number] += part.spread(one)[0]
    return words


for _name, _load in LOADS.items():

    @handles(f"buffer_load_{_name}")
    def load_handler(w: Group, i: Instruction, load: Load = _load, pitch: int = TO_LDS.get(_name, 0)) -> None:
        """D = MEM[address], or LDS[M0 + offset + lane * size] with `lds`; words beyond the buffer read as 0."""
        direct = bool(i.modifiers.get("lds"))
        accept(i, "offset", "offen", *(("lds",) if pitch else ()), *CACHE, operands=3 if direct else 4)
        if direct and len(i.operands) == 3:
            vector, descriptor, scalar = i.operands
        else:
            vector, descriptor, scalar = i.operands[1:]
        access = Access(w, i)
        if access.none:
            return
        at, room = address(w, i, vector, descriptor, scalar)
        check(w, i, vector, descriptor, at, room, load.nbytes, "read")
        words = fetch(w, i, at, room, load.nbytes)
        if direct:
            to_lds(w, i, access, words, load, pitch)
        else:
            write(w, i.operands[0], words, load)


for _name, _store in STORES.items():

    @handles(f"buffer_store_{_name}")
    def store_handler(w: Group, i: Instruction, store: Store = _store) -> None:
        """MEM[address] = low bytes of D, or of D >> 16; words beyond the buffer are dropped."""
        accept(i, "offset", "offen", *CACHE, operands=4)
        source, vector, descriptor, scalar = i.operands
        at, room = address(w, i, vector, descriptor, scalar)
        check(w, i, vector, descriptor, at, room, store.nbytes, "write")
        whole = Access(w, i, room >= store.nbytes)
        if not whole.none:
            w.memory.allocations.store(whole, whole.pick(at), read(w, whole, source, store), store.nbytes)
        for number in range(store.nbytes // 4 if (w.active & (room < store.nbytes)).any() else 0):
            part = Access(w, i, (room < store.nbytes) & (room >= 4 * number + 4))
            if not part.none:
                word = part.pick(w.u32(source, number))[None]
                w.memory.allocations.store(part, part.pick(at + U64(4 * number)), word, 4)


for _name, _operation in MEMORY.items():

    @handles(f"buffer_atomic_{_name}")
    def atomic_handler(w: Group, i: Instruction, operation: Atomic = _operation) -> None:
        """old = MEM[address]; MEM[address] = old OP D; D = old if sc0; nothing beyond the buffer, where old is 0."""
        accept(i, "offset", "offen", *CACHE, operands=4)
        source, vector, descriptor, scalar = i.operands
        at, room = address(w, i, vector, descriptor, scalar)
        kind = operation.dtype
        check(w, i, vector, descriptor, at, room, kind.itemsize, "write")
        access = Access(w, i, room >= kind.itemsize)
        old = np.zeros(0, kind)
        if not access.none:
            given = [data(w, access, source, kind, n * kind.itemsize // 4) for n in range(operation.sources)]
            old = w.memory.allocations.atomic(access, access.pick(at), operation, given)
        if i.modifiers.get("sc0"):
            write_old(w, access, source, old)
