"""Random batches for property tests."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from hypothesis import strategies as st

from portable import Batch


@dataclass(frozen=True)
class Case:
    """The arguments of Batch.from_lens, and the number of pages in the pool."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: np.ndarray
    page_size: int
    num_pages: int

    def batch(self, **kwargs: object) -> Batch:
        return Batch.from_lens(
            self.query_lens, self.seq_lens, block_table=self.block_table, page_size=self.page_size, **kwargs
        )

    @property
    def context_lens(self) -> list[int]:
        return [s - q for q, s in zip(self.query_lens, self.seq_lens, strict=True)]

    def slot(self, row: int, position: int) -> int:
        """Where a token lives."""
        return int(self.block_table[row, position // self.page_size]) * self.page_size + position % self.page_size

    def slots(self) -> list[int]:
        """Where the new tokens live, in order."""
        return [
            self.slot(row, position)
            for row, (q, s) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for position in range(s - q, s)
        ]


@st.composite
def cases(draw: st.DrawFn, ordered: bool = False, max_reqs: int = 6, max_len: int = 40) -> Case:
    """Ragged requests on distinct pages: decodes, extends, first chunks, and rows without new tokens."""
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, max_len)).map(lambda qc: (qc[0], qc[0] + qc[1])),
            min_size=0,
            max_size=max_reqs,
        )
    )
    if ordered:
        rows.sort(key=lambda row: (0 if row[0] <= 1 else 1) if row[1] > row[0] else 2)
    page_size = draw(st.sampled_from([1, 2, 3, 8, 16, 64]))
    need = [-(-s // page_size) for _, s in rows]
    width = max(need, default=0) + draw(st.integers(0, 2))
    num_pages = sum(need) + 3
    order = draw(st.permutations(range(num_pages)))
    table = np.zeros((len(rows), width), dtype=np.int32)
    for row, pages in enumerate(need):
        table[row, :pages], order = order[:pages], order[pages:]
    return Case([q for q, _ in rows], [s for _, s in rows], table, page_size, num_pages)


def assert_same_batch(found: Batch, right: Batch, ignore: tuple[str, ...] = ()) -> None:
    """Every field is equal: dtypes, shapes and values of tensors and arrays, and plain numbers."""
    for name in (field.name for field in fields(Batch) if field.init):
        a, b = getattr(found, name), getattr(right, name)
        if name in ignore:
            continue
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), name
        else:
            assert a == b, name
