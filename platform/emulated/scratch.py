"""Instructions on the private memory of a lane: scratch_*."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.access import Access
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.transfer import CACHE, LOADS, STORES, Load, Store, accept, read, write
from portable.platform.emulated.waves import Array, Group, handles


def address(w: Group, i: Instruction, vector: Operand, scalar: Operand) -> Array:
    """[G, 64] int64: vector (or `off`) + scalar (or `off`) + signed offset, within the lane's own memory."""
    at = np.full(w.active.shape, i.number("offset"), np.int64)
    if vector.kind != "off":
        at += w.u32(vector).view(np.int32)
    if scalar.kind != "off":
        at += w.scalar(scalar).view(np.int32)[:, None]
    return at


for _name, _load in LOADS.items():

    @handles(f"scratch_load_{_name}")
    def load_handler(w: Group, i: Instruction, load: Load = _load) -> None:
        """D = SCRATCH[lane][address], sub-word loads extended or into one half."""
        accept(i, "offset", *CACHE, operands=3)
        access = Access(w, i)
        if not access.none:
            at = access.pick(address(w, i, i.operands[1], i.operands[2]))
            write(w, i.operands[0], access.spread(w.memory.scratch.load(access, at, load.nbytes)), load)


for _name, _store in STORES.items():

    @handles(f"scratch_store_{_name}")
    def store_handler(w: Group, i: Instruction, store: Store = _store) -> None:
        """SCRATCH[lane][address] = low bytes of D, or of D >> 16."""
        accept(i, "offset", *CACHE, operands=3)
        access = Access(w, i)
        if not access.none:
            at = access.pick(address(w, i, i.operands[0], i.operands[2]))
            w.memory.scratch.store(access, at, read(w, access, i.operands[1], store), store.nbytes)
