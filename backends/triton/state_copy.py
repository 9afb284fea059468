"""Copying whole state slots in any number of pools in one launch, in the order of the list of pairs.

A program owns some bytes of a slot in one pool and walks the whole list, so what a pair writes a later one reads: the
same lanes wrote it. Pools are reached by address, from a table that is made once for the same pools.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import launch, reached
from portable.kernel import Kernel, Op
from portable.sets import ANY_SIZE

KNOWN = 64  # tables kept: each set of pools needs one

_tables: dict[tuple[Any, ...], tuple[torch.Tensor, int]] = {}


@triton.jit(do_not_specialize=["num_copies"])
def _state_copy(
    table,  # [blocks, 3] i64: address in slot 0, bytes from slot to slot, bytes of the block
    copies,  # [n, 2] i64
    num_copies,
    UNIT: tl.constexpr,  # bytes of an element
    WIDE: tl.constexpr,  # elements come in pairs of 16 bytes
    BLOCK: tl.constexpr,  # elements
):
    row = table + 3 * tl.program_id(0)
    address, stride, size = tl.load(row), tl.load(row + 1) // UNIT, tl.load(row + 2) // UNIT
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
    for i in range(num_copies):
        come, go = tl.load(copies + 2 * i), tl.load(copies + 2 * i + 1)
        if (come >= 0) & (go >= 0) & (come != go):
            value = tl.load(base + come * stride + element, element < size)
            tl.store(base + go * stride + element, value, element < size)


def state_copy(pools: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Each pair (from, to) of `copies` [n, 2] int64 in all pools [slots, ...]; one with a negative slot does nothing.

    Raises:
        ValueError: a slot of a pool has gaps inside.
    """
    if not len(pools) or not len(copies):
        return
    key = (pools[0].device, *((pool.data_ptr(), pool.stride(0), pool.shape[1:], pool.stride()[1:]) for pool in pools))
    if key not in _tables:
        while len(_tables) >= KNOWN:
            del _tables[next(iter(_tables))]
        _tables[key] = table_of(pools)
    table, unit = _tables[key]
    with reached(pools):
        launch(
            _state_copy,
            (len(table),),
            table,
            copies,
            len(copies),
            UNIT=min(unit, 8),
            WIDE=unit == 16,
            BLOCK=elements(unit),
            num_warps=4,
            num_stages=1,  # a load must not move before the store of the pair in front
        )


def table_of(pools: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A row per block of each pool, on the pools' device, and the most bytes, up to 16, that divide all of it."""
    unit = 16
    for i, pool in enumerate(pools):
        if span_of(pool) != pool[0].numel():
            raise ValueError(f"pools[{i}] has strides {pool.stride()}; the memory of a slot must be dense")
        unit = math.gcd(unit, pool.data_ptr(), pool.stride(0) * pool.itemsize, pool[0].numel() * pool.itemsize)
    step = elements(unit) * min(unit, 8)
    rows = [
        (pool.data_ptr() + at, pool.stride(0) * pool.itemsize, min(step, size - at))
        for pool in pools
        for size in [pool[0].numel() * pool.itemsize]
        for at in range(0, size, step)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=pools[0].device), unit


def elements(unit: int) -> int:
    """Of a program: 16 KiB in words of 8 bytes (8 accesses of 16 bytes a lane), fewer bytes in smaller ones."""
    return 2048 if unit >= 8 else 1024


def span_of(pool: torch.Tensor) -> int:
    """Elements from the first to the last of a slot.

    >>> span_of(torch.empty(4, 3, 5).transpose(1, 2)), span_of(torch.empty(4, 3, 5)[..., :4])
    (15, 14)
    """
    return 1 + sum((size - 1) * stride for size, stride in zip(pool.shape[1:], pool.stride()[1:], strict=True))


KERNELS = (
    Kernel(
        on_gpus(op=Op.STATE_COPY, name="triton.state_copy", head_dims=ANY_SIZE, kv_dtypes=frozenset({torch.float32})),
        state_copy,
    ),
)
