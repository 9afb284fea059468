"""Pools of states as a table of addresses, so that one launch reaches all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any
from weakref import ref

import torch

KNOWN = 64  # tables kept by a `Tables`: each set of pools needs one


Table = tuple[torch.Tensor, int]  # of `table_of`


class Tables:
    """The tables of sets of pools, each made once.

    Pools that were met before are known by being the same tensors in the same places and strides, in a fifth of the
    time that a hash of shapes and strides takes (48 pools: 18 and 88 us); others are looked up by these, so that views
    made for each call share a table. Slots that are added in place change no row of it.

    Args:
        block: bytes of a row of a table, for a unit of so many bytes.
    """

    def __init__(self, block: Callable[[int], int]) -> None:
        self.block = block
        self._met: dict[tuple[int, ...], tuple[list[ref[torch.Tensor]], list[Any], Table]] = {}
        self._known: dict[tuple[Any, ...], Table] = {}

    def of(self, pools: Sequence[Sequence[torch.Tensor]]) -> Table:
        """`table_of` these pools, one at least."""
        every = [pool for group in pools for pool in group]
        key = id(every[0]), *map(len, pools)
        places = [*map(torch.Tensor.data_ptr, every), *map(torch.Tensor.stride, every)]
        known = self._met.get(key)
        if known is not None and known[1] == places and all(map(is_, [each() for each in known[0]], every)):
            return known[2]
        table = self._like(pools, every)
        _keep(self._met, key, ([ref(pool) for pool in every], places, table))
        return table

    def _like(self, pools: Sequence[Sequence[torch.Tensor]], every: list[torch.Tensor]) -> Table:
        parts = [(pool.data_ptr(), pool.dtype, pool.shape, pool.stride()) for pool in every]
        key = (every[0].device, *map(len, pools), *parts)
        if (table := self._known.get(key)) is None:
            table = table_of(pools, self.block)
            _keep(self._known, key, table)
        return table


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    while len(known) >= KNOWN:
        known.pop(next(iter(known)), None)  # another thread may have been faster
    known[key] = value


def table_of(pools: Sequence[Sequence[torch.Tensor]], block: Callable[[int], int]) -> Table:
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
