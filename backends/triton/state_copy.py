"""Copying whole state slots of any number of groups of pools in one launch, in the order of each group's pairs.

A program owns some bytes of a slot in one pool and walks its group's pairs, so what a pair writes a later one reads:
the same lanes wrote it. Pools are reached by address, from a table that is made once for the same pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from portable.backends.state_table import Tables
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import Bound, bound, reached
from portable.kernel import Kernel, Op
from portable.sets import ANY_SIZE


@triton.jit
def _state_copy(
    table,  # [blocks, 4] i64: address in slot 0, bytes from slot to slot, bytes of the block, group
    copies,  # [n, 2] i64
    cu_copies,  # [groups + 1] i32
    UNIT: tl.constexpr,  # bytes of an element
    WIDE: tl.constexpr,  # elements come in pairs of 16 bytes
    BLOCK: tl.constexpr,  # elements
):
    row = table + 4 * tl.program_id(0)
    address, stride, size = tl.load(row), tl.load(row + 1) // UNIT, tl.load(row + 2) // UNIT
    pairs = cu_copies + tl.load(row + 3)
    if UNIT == 8:
        base = address.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        base = address.to(tl.pointer_type(tl.int16))
    else:
        base = address.to(tl.pointer_type(tl.int8))
    if WIDE:
        base = tl.multiple_of(base, 16)
        stride, size = tl.multiple_of(stride, 2), tl.multiple_of(size, 2)
    element = tl.arange(0, BLOCK)
    for i in range(tl.load(pairs), tl.load(pairs + 1)):
        come, go = tl.load(copies + 2 * i), tl.load(copies + 2 * i + 1)
        if (come >= 0) & (go >= 0) & (come != go):
            value = tl.load(base + come * stride + element, element < size)
            tl.store(base + go * stride + element, value, element < size)


def elements(unit: int) -> int:
    """Of a program: 16 KiB in words of 8 bytes (8 accesses of 16 bytes a lane), fewer bytes in smaller ones."""
    return 2048 if unit >= 8 else 1024


_tables = Tables(lambda unit: elements(unit) * min(unit, 8))


def state_copy(pools: Sequence[Sequence[torch.Tensor]], copies: torch.Tensor, cu_copies: torch.Tensor) -> None:
    """Whole slots in the pools [slots, ...] of each group; see `portable.kernel`.

    Raises:
        ValueError: a slot of a pool has gaps inside.
    """
    if not copies.numel():
        return
    table, unit, device, blocks, _ = _tables.of(pools)
    if not blocks:
        return
    if device >= 0:
        _kernel(unit)((blocks,), table, copies, cu_copies)
    else:
        with reached([pool for group in pools for pool in group]):
            _kernel(unit)((blocks,), table, copies, cu_copies)


@cache
def _kernel(unit: int) -> Bound:
    options = {
        "UNIT": min(unit, 8),
        "WIDE": unit == 16,
        "BLOCK": elements(unit),
        "num_warps": 4,
        "num_stages": 1,  # a load must not move before the store of the pair in front
    }
    return bound(_state_copy, options)


KERNELS = (
    Kernel(
        on_gpus(op=Op.STATE_COPY, name="triton.state_copy", head_dims=ANY_SIZE, kv_dtypes=frozenset({torch.float32})),
        state_copy,
    ),
)
