"""Who sees what, as dense boolean masks in the space of slots: the brute force that variants are compared with."""

from __future__ import annotations

import numpy as np

from portable import Batch


def seen(batch: Batch, num_slots: int) -> np.ndarray:
    """[T, num_slots] counts: how often each new token's query meets each slot, by the contract of a batch."""
    found = np.zeros((batch.num_tokens, num_slots), dtype=int)
    table, seq_lens = batch.block_table.numpy(), batch.seq_lens.numpy()
    cu = batch.cu_seqlens_q.numpy()
    assert cu.tolist() == batch.host_cu_seqlens_q.tolist()
    if batch.exact:
        assert seq_lens.tolist() == batch.host_seq_lens.tolist()
    for row in range(len(seq_lens)):
        queries, keys = cu[row + 1] - cu[row], seq_lens[row]
        causal = batch.causal if isinstance(batch.causal, bool) else bool(batch.causal[row])
        for i in range(queries):
            for j in range(keys):
                if not causal or j <= keys - queries + i:
                    page, offset = divmod(j, batch.page_size)
                    assert table[row, page] >= 0
                    found[cu[row] + i, table[row, page] * batch.page_size + offset] += 1
    return found


def expected(batch: Batch, num_slots: int, visible) -> np.ndarray:
    """The same from `visible(row, query position, key position)` over the whole sequences of an underived batch."""
    found = np.zeros((batch.num_tokens, num_slots), dtype=int)
    token = 0
    for row, (queries, keys) in enumerate(zip(batch.query_lens, batch.host_seq_lens, strict=True)):
        for position in range(keys - queries, keys):
            for key in range(keys):
                if visible(row, position, key):
                    found[token, slot(batch, row, key)] += 1
            token += 1
    return found


def slot(batch: Batch, row: int, position: int) -> int:
    page, offset = divmod(position, batch.page_size)
    return int(batch.block_table[row, page]) * batch.page_size + offset
