"""Steps padded to a captured size: rows and tokens behind the real ones that touch nothing alive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from portable.batch import Batch
from portable.lengths import Int32
from portable.paging import PAD_SLOT
from portable.ragged import cdiv
from portable.sizes import Size


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


def pad_host(batch: Batch, num_reqs: int, num_tokens: int) -> Batch:
    """`pad` of what the host has; the tensors stay as they are, for planners that do not look at them.

    >>> pad_host(Batch.from_lens([1], [5]), 3, 3).query_lens.tolist()
    [1, 0, 0]
    """
    live = batch.num_reqs
    query_lens, seq_lens = np.zeros((2, num_reqs), np.int32)
    query_lens[:live], seq_lens[:live] = batch.query_lens[:live], batch.host_seq_lens[:live]
    cu = np.full(num_reqs + 1, batch.num_tokens, np.int32)
    cu[:live] = batch.host_cu_seqlens_q[:live]
    prefilling = batch.is_prefilling
    return replace(
        batch,
        query_lens=query_lens,
        host_cu_seqlens_q=cu,
        host_seq_lens=seq_lens,
        is_prefilling=None if prefilling is None else np.pad(prefilling[:live], (0, num_reqs - live)),
        padded_tokens=num_tokens,
    )


def write_cu(batch: Batch, size: Size, cu: Int32) -> None:
    """The offsets [rows + 1] of the step padded to a size.

    Padding has new tokens, and keys for none of them: so a kernel gives it 0, by the lengths, and whoever captures the
    call need not know where it begins. Each padded row has as many tokens as the size allows, while there are any.
    """
    live = batch.num_reqs
    cu[: live + 1] = batch.host_cu_seqlens_q[: live + 1]
    more = np.arange(1, size.rows - live + 1, dtype=np.int32) * np.int32(size.queries)
    cu[live + 1 :] = np.minimum(more + batch.num_tokens, size.padded_tokens)


def padded(batch: Batch, size: Size, *, seq_len: int = 0, page: int = 0, slot: int = PAD_SLOT) -> Batch:
    """The step as the planning of a size sees it, on tensors of its own: what a captured graph is compared with.

    Columns of the block table that no sequence reaches hold `page`.

    Raises:
        ValueError: it does not fit.

    >>> step = Batch.from_lens([1, 1], [5, 2], block_table=[[3, 7], [1, 0]], page_size=4)
    >>> wide = padded(step, Size(4))
    >>> wide.cu_seqlens_q.tolist(), wide.seq_lens.tolist(), wide.slot_mapping.tolist()
    ([0, 1, 2, 3, 4], [5, 2, 0, 0], [28, 5, -1, -1])
    >>> padded(step, Size(4, 3, tokens=8)).cu_seqlens_q.tolist()
    [0, 1, 2, 5, 8, 8, 8, 8]
    """
    size.check(batch)
    live, rows, tokens = batch.num_reqs, size.rows, size.padded_tokens
    cu, lens = np.empty(rows + 1, np.int32), np.full(rows, seq_len, np.int32)
    write_cu(batch, size, cu)
    lens[:live] = batch.host_seq_lens[:live]
    table, slots, causal, fill = batch.block_table, batch.slot_mapping, batch.causal, torch.nn.functional.pad
    if table is not None:
        reach = cdiv(batch.max_seq_len, batch.page_size)
        table = fill(table[:live, :reach], (0, table.shape[1] - reach, 0, rows - live), value=page)
    return replace(
        batch,
        cu_seqlens_q=torch.from_numpy(cu).to(batch.device),
        seq_lens=fill(batch.seq_lens[:live], (0, rows - live), value=seq_len),
        block_table=table,
        slot_mapping=None
        if slots is None
        else fill(slots[: batch.num_tokens], (0, tokens - batch.num_tokens), value=slot),
        causal=causal if isinstance(causal, bool) else fill(causal[:live], (0, rows - live), value=True),
        query_lens=np.diff(cu),
        host_cu_seqlens_q=cu,
        host_seq_lens=lens,
        is_prefilling=None,
        num_reqs=rows,
        num_tokens=tokens,
        padded_tokens=tokens,
        max_query_len=int(np.diff(cu).max()),
        max_seq_len=max(batch.max_seq_len, seq_len),
        view=None,
        pages=None,
    )
