"""Launches state_copy.cu: whole slots of states in any number of groups of pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from portable.backends.hip.archs import on_gpus
from portable.backends.hip.launch import THREADS, Function, Launch, Launches
from portable.backends.state_table import Tables
from portable.kernel import Kernel, Op
from portable.sets import ANY_SIZE

UNITS = (16, 8, 4, 2, 1)  # bytes of an access

_tables = Tables(lambda unit: 4 * unit * THREADS)  # a thread moves 4 units of a row: 16 KiB of the widest
_prepared: Launches[Launch] = Launches()  # by device and unit: all that it takes comes with each launch


@cache
def _function(unit: int) -> Function:
    return Function("state_copy", "state_copy", "3N", "", UNIT=unit)


def state_copy(pools: Sequence[Sequence[torch.Tensor]], copies: torch.Tensor, cu_copies: torch.Tensor) -> None:
    """Whole slots in the pools [slots, ...] of each group; see `portable.kernel`.

    Raises:
        ValueError: a slot of a pool has gaps inside.
    """
    if not copies.numel():
        return
    table, unit, device, blocks, address = _tables.of(pools)
    if not blocks:
        return
    launch = _prepared.known.get((device, unit))
    if launch is None:
        every = [pool for group in pools for pool in group]
        launch = _function(unit).prepare((table, copies, cu_copies), (), reached=every)
        if device >= 0:
            _prepared.keep((device, unit), launch)
    launch(blocks, address, copies.data_ptr(), cu_copies.data_ptr())


KERNELS = (
    Kernel(
        on_gpus(op=Op.STATE_COPY, name="hip.state_copy", head_dims=ANY_SIZE, kv_dtypes=frozenset({torch.float32})),
        state_copy,
    ),
)
