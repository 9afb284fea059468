"""Context parallelism: the keys of a sequence spread over ranks, and the step that each rank sees."""

from __future__ import annotations

from dataclasses import replace
from operator import index

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import at_least, named
from portable.batch import Batch
from portable.layer import UnsupportedError
from portable.lengths import as_lens, check_page_size, check_table, check_tensor
from portable.paging import PAD_SLOT, slot_mapping
from portable.ragged import IntArray, cu_from_lens, ragged_arange
from portable.upload import upload


@named
def shard_lens(lens: IntArray, world: int, rank: int, interleave: int = 1) -> npt.NDArray[np.int64]:
    """[B] tokens of each sequence that a rank holds, where blocks of `interleave` tokens go round the ranks.

    >>> [shard_lens(np.array([5, 8]), world=2, rank=r, interleave=2).tolist() for r in (0, 1)]
    [[3, 4], [2, 4]]
    """
    at_least(1, world=index(world), interleave=index(interleave))
    at_least(0, rank=index(rank))
    if rank >= world:
        raise ValueError(f"rank is {rank}; it must be at least 0 and below {world}")
    rounds, rest = np.divmod(as_lens("lens", lens).astype(np.int64), world * interleave)
    held: npt.NDArray[np.int64] = rounds * interleave + np.clip(rest - rank * interleave, 0, interleave)
    return held


@named
def shard(batch: Batch, world: int, rank: int, block_table: torch.Tensor, page_size: int, interleave: int = 1) -> Batch:
    """Context parallelism: the step's queries over the keys that one rank holds; the ranks' outputs merge by LSE.

    Args:
        batch: the whole step; it needs no block table.
        block_table: [B, W] int32, this rank's pages, filled with this rank's tokens one behind the other.

    A query token sees those of the rank's keys that are not behind it. With more than one new token, each becomes a
    request of its own, since on a rank they do not see one key more each. Of the new tokens, the rank writes its own:
    the slots of the others are -1.

    >>> step = Batch.from_lens([1], [6])
    >>> mine = shard(step, world=2, rank=1, block_table=torch.tensor([[7]], dtype=torch.int32), page_size=4)
    >>> mine.host_seq_lens.tolist(), mine.slot_mapping.tolist()
    ([3], [30])
    """
    batch.needs_exact("a shard")
    if not batch.self_attention or batch.view is not None:
        raise UnsupportedError(
            "a shard is made of the step itself: shard first, or give the rank its own cross lengths"
        )
    check_page_size(page_size)
    check_tensor("block_table", block_table, torch.int32, (None, None), batch.device)
    whole = shard_lens(batch.host_seq_lens, world, rank, interleave).astype(np.int32)
    check_table(block_table, batch.query_lens, whole, page_size)
    requests, new = ragged_arange(batch.query_lens)
    positions = (new + batch.context_lens[requests]).astype(np.int64)
    local = shard_lens(positions, world, rank, interleave)  # this rank's tokens before each new one
    mine = positions // interleave % world == rank
    single = batch.max_query_len <= 1
    if batch.causal is not True:
        raise UnsupportedError("a shard of a step that is not causal throughout: its lengths would differ by token")
    if single:
        query_lens, lens = batch.query_lens, whole
    else:
        query_lens, lens = np.ones(len(requests), np.int32), (local + mine).astype(np.int32)
    cu = cu_from_lens(query_lens)
    rows, cu_device, lens_device, local_device, mine_device = upload((requests, cu, lens, local, mine), batch.device)
    slots = slot_mapping(
        block_table,
        rows,
        local_device.minimum(local_device.new_tensor(block_table.shape[1] * page_size - 1)),
        page_size,
    )
    extra = batch.padded_tokens - batch.num_tokens
    slots = torch.nn.functional.pad(slots.where(mine_device, PAD_SLOT), (0, extra), value=PAD_SLOT)
    return replace(
        batch,
        cu_seqlens_q=cu_device,
        seq_lens=lens_device,
        block_table=block_table if single else block_table[rows.long()],
        slot_mapping=slots,
        page_size=page_size,
        causal=False,
        query_lens=query_lens,
        host_cu_seqlens_q=cu,
        host_seq_lens=lens,
        is_prefilling=None,
        num_reqs=batch.num_reqs if single else len(requests),
        padded_tokens=len(requests) + extra,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        self_attention=False,
    )
