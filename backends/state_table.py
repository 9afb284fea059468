"""Pools of states as a table of addresses, so that one launch reaches all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

KNOWN = 64  # tables kept by a `Tables`: each set of pools needs one

_address, _stride = torch.Tensor.data_ptr, torch.Tensor.stride  # looked up once: 0.1 us of each set of pools


Table = tuple[torch.Tensor, int]  # of `table_of`
Known = tuple[torch.Tensor, int, int, int, int]  # the same, the table's device, its rows and its address: 0.5 us to ask


class Tables:
    """The tables of sets of pools, each made once.

    Pools that were met before are known by being the same tensors in the same places and strides, in a fifth of the
    time that a hash of shapes and strides takes (48 pools: 18 and 88 us); others are looked up by these, so that views
    made for each call share a table. Slots that are added in place change no row of it. The tensors' ids are enough
    to tell them by, as a set is forgotten before the memory of one that dies can be another's.

    Args:
        block: bytes of a row of a table, for a unit of so many bytes.
    """

    def __init__(self, block: Callable[[int], int]) -> None:
        self.block = block
        self._met: dict[tuple[int, ...], tuple[list[Any], Known, list[ref[torch.Tensor]]]] = {}
        self._known: dict[tuple[Any, ...], Known] = {}

    def of(self, pools: Sequence[Sequence[torch.Tensor]]) -> Known:
        """`table_of` these pools; of none, no rows."""
        if len(pools) == 1:
            every = pools[0]
            key = tuple(map(id, every))
        else:
            every = [pool for group in pools for pool in group]
            key = *map(id, every), *map(len, pools)  # no id is as small as a length
        met = self._met.get(key)
        if met is not None and met[0] == [*map(_address, every), *map(_stride, every)]:
            return met[1]
        return self._meet(key, pools, every)

    def _meet(
        self, key: tuple[int, ...], pools: Sequence[Sequence[torch.Tensor]], every: Sequence[torch.Tensor]
    ) -> Known:
        if not every:
            return torch.empty(0, 4, dtype=torch.int64), 1, -1, 0, 0

        def forget(_: ref[torch.Tensor]) -> None:
            self._met.pop(key, None)

        places = [*map(_address, every), *map(_stride, every)]  # before the table: what changes meanwhile is seen
        known = self._like(pools, every)
        _keep(self._met, key, (places, known, [ref(pool, forget) for pool in every]))
        return known

    def _like(self, pools: Sequence[Sequence[torch.Tensor]], every: Sequence[torch.Tensor]) -> Known:
        parts = [(pool.data_ptr(), pool.dtype, pool.shape, pool.stride()) for pool in every]
        key = (every[0].device, *map(len, pools), *parts)
        if (known := self._known.get(key)) is None:
            table, unit = table_of(pools, self.block)
            known = table, unit, table.get_device(), table.shape[0], table.data_ptr()
            _keep(self._known, key, known)
        return known


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    while len(known) >= KNOWN:
        for oldest in [*known][:1]:  # a list: another thread, or a pool that dies, may take from it meanwhile
            known.pop(oldest, None)
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
