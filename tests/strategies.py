"""Random batches for property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    page_size = draw(st.sampled_from([1, 2, 3, 8, 16]))
    need = [-(-s // page_size) for _, s in rows]
    width = max(need, default=0) + draw(st.integers(0, 2))
    num_pages = sum(need) + 3
    order = draw(st.permutations(range(num_pages)))
    table = np.zeros((len(rows), width), dtype=np.int32)
    for row, pages in enumerate(need):
        table[row, :pages], order = order[:pages], order[pages:]
    return Case([q for q, _ in rows], [s for _, s in rows], table, page_size, num_pages)
