"""Which bytes a strided view of memory consists of: an interval, less the gaps between its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from portable.platform.emulated.access import Array


class Rows(NamedTuple):
    """Rows of `run` bytes, one at each sum of a multiple, below its count, of each step of `steps`, widest first.

    >>> import numpy as np
    >>> rows = Rows(8, ((64, 3), (16, 2)))
    >>> rows.hold(np.array([0, 8, 20, 60, 64, 128, 148]), 4).tolist()
    [True, False, True, False, True, True, True]
    """

    run: int
    steps: tuple[tuple[int, int], ...]  # bytes from one to the next, count

    def hold(self, byte: Array, nbytes: int) -> Array:
        """[n] bool: whether `nbytes` bytes from `byte` [n], which is not negative, lie within a row."""
        rest, good = byte, byte >= 0
        for step, count in self.steps:
            number = rest // step
            good = good & (number < count)
            rest = rest - number * step
        held: Array = good & (rest + nbytes <= self.run)
        return held


class Extent(NamedTuple):
    """`before` bytes in front of the first element and `size` in all; `rows` where some of them belong to no element.

    Rows that interlock, neither apart nor one inside a gap of another, count as all that they span.
    """

    before: int
    size: int
    rows: Rows | None = None


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Extent:
    """Of a view with strides in bytes, negative ones included.

    >>> extent((2, 3), (12, 4), 4), extent((2, 3), (16, 4), 4).rows
    (Extent(before=0, size=24, rows=None), Rows(run=12, steps=((16, 2),)))
    >>> extent((4,), (-4,), 4), extent((0, 3), (12, 4), 4).size
    (Extent(before=12, size=16, rows=None), 0)
    """
    if 0 in shape:
        return Extent(0, 0)
    before = sum((count - 1) * -stride for count, stride in zip(shape, strides, strict=True) if stride < 0)
    run, steps, interlocked = itemsize, list[tuple[int, int]](), False
    span = itemsize  # bytes that the dimensions so far reach over
    for step, count in sorted((abs(stride), count) for count, stride in zip(shape, strides, strict=True)):
        if count == 1 or step == 0:
            continue
        if not steps and step <= run:
            run += (count - 1) * step
        elif steps and step == steps[-1][0] * steps[-1][1]:
            steps[-1] = (steps[-1][0], steps[-1][1] * count)
        else:
            interlocked = interlocked or step < span
            steps.append((step, count))
        span += (count - 1) * step
    return Extent(before, span, Rows(run, tuple(reversed(steps))) if steps and not interlocked else None)
