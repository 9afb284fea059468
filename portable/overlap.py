"""Pages of two tensors that share memory: what a copy may not read and write at the same time."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Pages = npt.NDArray[np.int64]
Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # of a page: shape, strides and the bytes of an element


def shared_pages(read: torch.Tensor, come: Pages, written: torch.Tensor, go: Pages) -> tuple[int, int] | None:
    """A page of `read` [P, ...] among `come` and one of `written` among `go` with an element in common; None without.

    >>> pool = torch.zeros(4, 2, 8)
    >>> shared_pages(pool[:-1], np.array([2]), pool[1:], np.array([0, 1])), shared_pages(
    ...     pool[:, 0], np.arange(4), pool[:, 1], np.arange(4))
    ((2, 1), None)
    """
    if read.device != written.device or read.untyped_storage().data_ptr() != written.untyped_storage().data_ptr():
        return None
    if not (come.size and go.size):
        return None
    order = np.argsort(come * read.stride(0), kind="stable")
    starts = read.data_ptr() + come[order] * (read.stride(0) * read.itemsize)
    targets = written.data_ptr() + go * (written.stride(0) * written.itemsize)
    last = np.searchsorted(starts, targets + _span(written), side="left")
    first = np.searchsorted(starts, targets - _span(read), side="right")
    for place in range(int((last - first).max())):  # one or two, unless pages lie among each other
        near = np.flatnonzero(first + place < last)
        distances = targets[near] - starts[first[near] + place]
        for distance in np.unique(distances):
            if _meet(_layout(read), _layout(written), int(distance)):
                at = int(near[(distances == distance).argmax()])
                return int(come[order[first[at] + place]]), int(go[at])
    return None


def _layout(pages: torch.Tensor) -> Layout:
    return tuple(pages.shape[1:]), tuple(pages.stride()[1:]), pages.itemsize


def _span(pages: torch.Tensor) -> int:
    """Bytes from the start of a page to the end of its last element."""
    shape, strides, size = _layout(pages)
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * size if 0 not in shape else 0


@lru_cache(maxsize=4096)
def _meet(read: Layout, written: Layout, by: int) -> bool:
    """Whether two pages have a byte in common, the second `by` bytes behind the first and within its span."""
    if _dense(read) and _dense(written):
        return True
    unit = math.gcd(read[2], written[2], by)
    return bool(np.isin(_offsets(*written, unit) + by, _offsets(*read, unit)).any())


def _dense(layout: Layout) -> bool:
    """Whether a page has no gaps."""
    shape, strides, _ = layout
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 == math.prod(shape)


@lru_cache(maxsize=64)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...], size: int, unit: int) -> Pages:
    """Where every `unit` bytes of a page are."""
    offsets = np.arange(0, size, unit)
    for n, stride in zip(shape, strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(n) * (stride * size))
    return offsets.reshape(-1)
