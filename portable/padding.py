"""Steps padded to a captured size: rows and tokens behind the real ones that touch nothing alive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from portable.batch import Batch
from portable.paging import PAD_SLOT


def pad(
    batch: Batch, num_reqs: int, num_tokens: int, *, seq_len: int = 0, page: int = 0, slot: int = PAD_SLOT
) -> Batch:
    """The step with padding behind it: rows without new tokens, of length `seq_len` on page `page`; slots `slot`.

    Raises:
        ValueError: the step is larger than the size, or its block table has no page for `seq_len`.

    >>> pad(Batch.from_lens([1], [5], block_table=[[3, 7]], page_size=4), 2, 3).slot_mapping.tolist()
    [28, -1, -1]
    """
    more, extra = num_reqs - batch.padded_reqs, num_tokens - batch.padded_tokens
    if more < 0 or extra < 0:
        raise ValueError(
            f"a batch of {batch.padded_reqs} rows and {batch.padded_tokens} tokens does not fit into "
            f"{num_reqs} rows and {num_tokens} tokens"
        )
    width = None if batch.block_table is None else batch.block_table.shape[1]
    if seq_len < 0 or (more and width is not None and seq_len > width * batch.page_size):
        raise ValueError(
            f"seq_len is {seq_len}; padding is at least 0 long and fits into {width} pages of {batch.page_size} tokens"
        )
    fill, cu = torch.nn.functional.pad, batch.cu_seqlens_q
    return replace(
        batch,
        cu_seqlens_q=torch.cat([cu, cu[-1:].expand(more)]),
        seq_lens=fill(batch.seq_lens, (0, more), value=seq_len),
        block_table=None if batch.block_table is None else fill(batch.block_table, (0, 0, 0, more), value=page),
        slot_mapping=None if batch.slot_mapping is None else fill(batch.slot_mapping, (0, extra), value=slot),
        causal=batch.causal if isinstance(batch.causal, bool) else fill(batch.causal, (0, more), value=True),
        query_lens=np.pad(batch.query_lens, (0, more)),
        host_cu_seqlens_q=np.pad(batch.host_cu_seqlens_q, (0, more), mode="edge"),
        host_seq_lens=np.pad(batch.host_seq_lens, (0, more), constant_values=seq_len),
        is_prefilling=None if batch.is_prefilling is None else np.pad(batch.is_prefilling, (0, more)),
        padded_tokens=num_tokens,
        max_seq_len=max(batch.max_seq_len, seq_len if more else 0),
    )


def unpad(batch: Batch) -> Batch:
    """Views of the rows and tokens that are not padding.

    >>> unpad(pad(Batch.from_lens([1], [5]), 4, 1)).seq_lens.tolist()
    [5]
    """
    b, t = batch.num_reqs, batch.num_tokens
    return replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[: b + 1],
        seq_lens=batch.seq_lens[:b],
        block_table=None if batch.block_table is None else batch.block_table[:b],
        slot_mapping=None if batch.slot_mapping is None else batch.slot_mapping[:t],
        causal=batch.causal if isinstance(batch.causal, bool) else batch.causal[:b],
        query_lens=batch.query_lens[:b],
        host_cu_seqlens_q=batch.host_cu_seqlens_q[: b + 1],
        host_seq_lens=batch.host_seq_lens[:b],
        is_prefilling=None if batch.is_prefilling is None else batch.is_prefilling[:b],
        padded_tokens=t,
    )
