"""Who sees what, as dense boolean masks in the space of slots: the brute force that variants are compared with."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from portable import Batch
from portable.padding import pad


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


def slots(case):
    return case.num_pages * case.page_size


def padded(batch, extra):
    return pad(batch, batch.padded_reqs + extra[0], batch.padded_tokens + extra[1])


def check_dtypes(batch):
    """The types that every builder promises."""
    assert {batch.cu_seqlens_q.dtype, batch.seq_lens.dtype, batch.block_table.dtype} == {torch.int32}
    assert batch.slot_mapping is None or batch.slot_mapping.dtype == torch.int64
    assert {batch.query_lens.dtype, batch.host_seq_lens.dtype, batch.host_cu_seqlens_q.dtype} == {np.dtype(np.int32)}
    assert len(batch.block_table) == len(batch.query_lens) == len(batch.seq_lens) == len(batch.cu_seqlens_q) - 1
    assert batch.query_lens.sum() == batch.num_tokens <= batch.padded_tokens
    assert batch.max_query_len == batch.query_lens.max(initial=0)
    assert batch.max_seq_len == batch.host_seq_lens.max(initial=0)


def widened(case, tokens):
    """The case with pages for more tokens behind each request."""
    need = [-(-(s + tokens) // case.page_size) for s in case.seq_lens]
    width = max(need, default=0)
    table = np.arange(width * len(need), dtype=np.int32).reshape(len(need), width)[:, ::-1].copy()
    return dataclasses.replace(case, block_table=table, num_pages=max(1, table.size))
