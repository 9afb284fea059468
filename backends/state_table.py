"""Pools of states as a table of addresses, so that one launch reaches all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

KNOWN = 64  # tables kept by a `Tables`: each set of pools needs one


class Tables:
    """The tables of sets of pools, each made once.

    Args:
        block: bytes of a row of a table, for a unit of so many bytes.
    """

    def __init__(self, block: Callable[[int], int]) -> None:
        self.block = block
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, int]] = {}

    def of(self, pools: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, int]:
        """`table_of` these pools, one at least."""
        every = [pool for group in pools for pool in group]
        parts = [(pool.data_ptr(), pool.dtype, pool.shape, pool.stride()) for pool in every]  # 0.3 us a pool
        key = (every[0].device, *map(len, pools), *parts)
        if key not in self._known:
            while len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = table_of(pools, self.block)
        return self._known[key]


def table_of(pools: Sequence[Sequence[torch.Tensor]], block: Callable[[int], int]) -> tuple[torch.Tensor, int]:
    """A row for every `block(unit)` bytes of a slot of each pool, and the unit: the bytes, 16 at most, that divide all.

    Rows are (address in slot 0, bytes from slot to slot, bytes of the row, group), int64, on the pools' device.

    Raises:
        ValueError: a slot of a pool has gaps inside.
    """
    unit, sizes = 16, []
    for number, group in enumerate(pools):
        for i, pool in enumerate(group):
            if span_of(pool) != pool[0].numel():
                raise ValueError(
                    f"pools[{number}][{i}] has strides {pool.stride()}; the memory of a slot must be dense"
                )
            stride, size = pool.stride(0) * pool.itemsize, pool[0].numel() * pool.itemsize
            unit = math.gcd(unit, pool.data_ptr(), stride, size)
            sizes.append((pool.data_ptr(), stride, size, number))
    step = block(unit)
    rows = [
        (address + at, stride, min(step, size - at), number)
        for address, stride, size, number in sizes
        for at in range(0, size, step)
    ]
    device = next(pool.device for group in pools for pool in group)
    return torch.tensor(rows, dtype=torch.int64, device=device), unit


def span_of(pool: torch.Tensor) -> int:
    """Elements from the first to the last of a slot.

    >>> span_of(torch.empty(4, 3, 5).transpose(1, 2)), span_of(torch.empty(4, 3, 5)[..., :4])
    (15, 14)
    """
    return 1 + sum((size - 1) * stride for size, stride in zip(pool.shape[1:], pool.stride()[1:], strict=True))
