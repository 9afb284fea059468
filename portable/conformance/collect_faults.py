"""What a wrong kernel leaves behind that collects an engine's tensors: other rows, other columns, other padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Answer = tuple[Array, "Array | None"]  # the cells, and the accepted tokens that are kept
FRESH = -5  # in what is written into


@dataclass(frozen=True, eq=False)
class Step:
    """What is collected, with every argument filled in; the first `width` columns of the table are its own."""

    table: Array
    width: int
    rows: Array  # [n]
    first: Array  # [n]
    accepted: Array | None  # [m]
    most: int
    pad: int
    columns: int
    taken: Array = field(init=False)  # [n], of each row

    def __post_init__(self) -> None:
        taken = np.ones(len(self.rows), np.int64)
        if self.accepted is not None:
            taken[: len(self.accepted)] = self.accepted.clip(1, self.most)
        object.__setattr__(self, "taken", taken)

    @property
    def kept(self) -> Array | None:
        return None if self.accepted is None else self.taken[: len(self.accepted)]

    def cells(self, taken: Array | None = None, first: Array | None = None, end: int | None = None) -> Array:
        """The cells [n, columns], those of the fault that has other numbers."""
        begin = (self.first if first is None else first) + (self.taken if taken is None else taken) - 1
        at, end = begin[:, None] + np.arange(self.columns), self.width if end is None else end
        inside = (self.rows >= 0)[:, None] & (at >= 0) & (at < end)
        found: Array = self.table[self.rows[:, None] % len(self.table), at.clip(0, self.table.shape[1] - 1)]
        return np.where(inside, found, self.pad)


def collected_wrongly(step: Step) -> Iterator[tuple[str, Answer]]:
    """What is left after each fault."""
    right, kept, fresh, count = step.cells(), step.kept, np.full_like(step.cells(), FRESH), len(step.rows)
    yield "nothing collected", (fresh, None if kept is None else np.full_like(kept, FRESH))
    yield "cells not written", (fresh, kept)
    for name, cells in (*_of_rows(step), *_of_columns(step)):
        yield name, (cells, kept)
    pads = (right == step.pad) & (step.rows < 0)[:, None]
    ends = (right == step.pad) & (step.rows >= 0)[:, None]
    yield "pad row not written", (np.where(pads, FRESH, right), kept)
    yield "cells behind the last column not written", (np.where(ends, FRESH, right), kept)
    yield "another pad value", (replace(step, pad=0).cells(), kept)
    yield "another pad value", (replace(step, pad=-1).cells(), kept)
    yield "cells transposed", (right.T.reshape(count, -1), kept)
    yield "the last rows left out", (np.where(np.arange(count)[:, None] >= _whole(count), FRESH, right), kept)
    if kept is not None and step.accepted is not None:
        raw = step.taken.copy()
        raw[: len(kept)] = step.accepted
        yield "accepted tokens out of bounds", (step.cells(raw), step.accepted)
        yield "accepted tokens out of bounds are kept", (right, step.accepted)
        yield "accepted tokens out of bounds are collected", (step.cells(raw), kept)
        yield "accepted tokens not kept", (right, np.full_like(kept, FRESH))


def _of_rows(step: Step) -> Iterator[tuple[str, Array]]:
    count, size = len(step.rows), len(step.table)
    live = step.rows >= 0
    yield "wrong row collected: that of its own place", replace(step, rows=np.where(live, np.arange(count), -1)).cells()
    yield "wrong row collected: one too far", replace(step, rows=np.where(live, step.rows + 1, -1)).cells()
    yield "wrong row collected: one before", replace(step, rows=np.where(live, (step.rows - 1) % size, -1)).cells()
    yield "wrong row collected: the first for all", replace(step, rows=np.where(live, 0, -1)).cells()
    yield "row -1 taken for the last one", replace(step, rows=step.rows % size).cells()
    yield "row -1 taken for the first one", replace(step, rows=step.rows.clip(0)).cells()
    yield "row -1 taken for its own place", replace(step, rows=np.where(live, step.rows, np.arange(count))).cells()
    dense = step.table.reshape(-1)[: size * step.width].reshape(size, -1)
    yield "rows taken to lie dense", replace(step, table=dense).cells()


def _of_columns(step: Step) -> Iterator[tuple[str, Array]]:
    count, right, mixed = len(step.rows), step.cells(), "tokens of a row mixed up"
    one, live = np.ones(count, np.int64), step.rows.clip(0)
    yield f"{mixed}: in reverse order", right[:, ::-1]
    yield f"{mixed}: first column not read", step.cells(first=0 * step.first)
    yield f"{mixed}: first column of another row", step.cells(first=step.first[live % count])
    yield f"{mixed}: one too far", step.cells(taken=step.taken + 1)
    yield f"{mixed}: one before", step.cells(taken=step.taken - 1)
    if step.accepted is not None:
        yield f"{mixed}: accepted tokens not counted", step.cells(taken=one)
        yield f"{mixed}: accepted tokens of another row", step.cells(taken=step.taken[live % count])
        yield f"{mixed}: accepted tokens of the first row", step.cells(taken=step.taken[:1] * one)
        yield f"{mixed}: all accepted tokens", step.cells(taken=step.most * one)
    yield "reads behind the last column", step.cells(end=step.table.shape[1])


def _whole(count: int, block: int = 64) -> int:
    """Rows of the whole blocks; of a single block all but the last one."""
    return count - (count % block or block) if count > block else count - 1
