"""Ways of asking for attention, as pure functions from a step to a step; they compose, and no planner knows of them.

`tree` and `prefix` give `Parts`: steps over the same query tokens, whose outputs are merged by their LSE.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import at_least, named
from portable.batch import Batch
from portable.layer import UnsupportedError
from portable.lengths import Int32, as_lens, check_lens, check_page_size, check_table, check_tensor
from portable.local_steps import local, local_capacity, local_size
from portable.paging import PAD_SLOT, slot_mapping
from portable.parts import Parts, prefix, prefix_pays, tree, without_leading
from portable.ragged import IntArray, cu_from_lens, ragged_arange
from portable.shards import shard, shard_lens
from portable.upload import upload

__all__ = [
    "Parts",
    "cross",
    "dead_pages",
    "draft",
    "encoder",
    "local",
    "local_capacity",
    "local_size",
    "prefix",
    "prefix_pays",
    "shard",
    "shard_lens",
    "tree",
    "trim",
    "verify",
]


@named
def cross(batch: Batch, encoder_lens: IntArray, block_table: torch.Tensor, page_size: int | None = None) -> Batch:
    """Encoder-decoder attention: the step's queries over each request's encoder tokens, all of them, whatever the step.

    Args:
        encoder_lens: [B] tokens of each request's encoder; 0 gives 0.
        block_table: [B, W] int32, the pages of the encoder's K/V.
        page_size: of those pages; None for the step's.

    The step writes nothing: `encoder` makes the one that does.

    >>> step = Batch.from_lens([1, 1], [4, 2], block_table=[[5], [6]], page_size=16)
    >>> crossed = cross(step, np.array([3, 0]), torch.tensor([[0], [1]], dtype=torch.int32))
    >>> crossed.host_seq_lens.tolist(), crossed.causal, crossed.slot_mapping is None
    ([3, 0], False, True)
    """
    page_size = batch.page_size if page_size is None else page_size
    lens = as_lens("encoder_lens", encoder_lens)
    if lens.size != batch.padded_reqs:
        raise ValueError(f"encoder_lens has {lens.size} rows; the step has {batch.padded_reqs}")
    check_page_size(page_size)
    check_tensor("block_table", block_table, torch.int32, (None, None), batch.device)
    check_table(block_table, batch.query_lens, lens, page_size)
    (lens_device,) = upload((lens,), batch.device)
    return replace(
        batch,
        seq_lens=lens_device,
        block_table=block_table,
        slot_mapping=None,
        page_size=page_size,
        causal=False,
        host_seq_lens=lens,
        exact=True,
        max_seq_len=int(lens.max(initial=0)),
        self_attention=False,
        view=None,
    )


@named
def encoder(encoder_lens: IntArray, block_table: torch.Tensor, page_size: int, first: npt.NDArray[np.bool_]) -> Batch:
    """The step that writes (and may run, both ways) the encoder tokens of the requests that are new: each just once.

    Args:
        encoder_lens: [B]; block_table: [B, W], as for `cross`.
        first: [B] bool, requests whose encoder runs in this step; of the others nothing is written.

    >>> encoder(np.array([2, 3]), torch.tensor([[4], [7]]), 4, first=np.array([False, True])).slot_mapping.tolist()
    [28, 29, 30]
    """
    lens = as_lens("encoder_lens", encoder_lens)
    if block_table is None:
        raise ValueError("block_table is None; an encoder's K and V are written to pages")
    if first.shape != lens.shape:
        raise ValueError(f"first has shape {list(first.shape)}; it must be [{lens.size}], one per request")
    new = np.where(first, lens, 0)
    return Batch.from_lens(new, new, block_table=block_table, page_size=page_size, causal=False)


@named
def draft(batch: Batch, step: int) -> Batch:
    """Step `step` (from 0) of a drafter behind a step: one new token per live request, `step + 1` behind its length.

    Raises:
        ValueError: step below 0, or a block table too narrow for the drafted tokens.

    >>> batch = Batch.from_lens([1], [7], block_table=[[4, 2, 9]], page_size=4)
    >>> [(d.host_seq_lens.tolist(), d.slot_mapping.tolist()) for d in (draft(batch, 0), draft(batch, 1))]
    [([8], [11]), ([9], [36])]
    """
    at_least(0, step=index(step))
    live = (batch.query_lens > 0).astype(np.int32)
    return _grown(batch, live, live * np.int32(step + 1))


@named
def verify(batch: Batch, num_draft: int | IntArray) -> Batch:
    """The drafted tokens behind a step, verified together: `num_draft` new tokens, an int or [B], per live request.

    Raises:
        ValueError: fewer than 0 tokens, or a block table too narrow for them.

    >>> batch = Batch.from_lens([1, 1], [7, 3], block_table=[[4, 2, 9], [1, 5, 0]], page_size=4)
    >>> verify(batch, np.array([2, 1])).slot_mapping.tolist()
    [11, 36, 7]
    """
    if np.ndim(num_draft) and np.shape(num_draft) != batch.query_lens.shape:
        raise ValueError(
            f"num_draft has shape {list(np.shape(num_draft))}; it must be [{batch.padded_reqs}], or an int"
        )
    added = as_lens("num_draft", np.broadcast_to(num_draft, batch.query_lens.shape))
    added = np.where(batch.query_lens > 0, added, 0).astype(np.int32)
    return _grown(batch, added, added)


def _grown(batch: Batch, query_lens: Int32, added: Int32) -> Batch:
    """Sequences longer by `added`, whose last `query_lens` tokens are the new ones; lengths may be bounds."""
    if batch.view is not None or not batch.self_attention:
        raise UnsupportedError("drafting behind a derived step: derive from the draft step instead")
    table, cu = batch.block_table, cu_from_lens(query_lens)
    seq_lens = batch.host_seq_lens + added
    check_lens(query_lens, seq_lens, batch.page_size)
    requests, back = ragged_arange(query_lens)
    cu_device, added_device, r, offset = upload((cu, added, requests, back - query_lens[requests]), batch.device)
    lens_device = batch.seq_lens + added_device
    slots, extra = None, batch.padded_tokens - batch.num_tokens
    if table is not None:
        check_table(table, query_lens, seq_lens, batch.page_size)
        slots = slot_mapping(table, r, lens_device[r.long()] + offset, batch.page_size)
        slots = torch.nn.functional.pad(slots, (0, extra), value=PAD_SLOT)
    return replace(
        batch,
        cu_seqlens_q=cu_device,
        seq_lens=lens_device,
        slot_mapping=slots,
        query_lens=query_lens,
        host_cu_seqlens_q=cu,
        host_seq_lens=seq_lens,
        is_prefilling=None,
        num_tokens=int(cu[-1]),
        padded_tokens=int(cu[-1]) + extra,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )


@named
def dead_pages(batch: Batch, left: int) -> npt.NDArray[np.int64]:
    """[B] leading pages of each request that no query of this step or a later one can see in a window of `left`.

    They may be freed or given to others: `trim` makes a step that does not name them.

    >>> dead_pages(Batch.from_lens([1], [11], block_table=[[0, 1, 2]], page_size=4), left=3).tolist()
    [1]
    """
    at_least(0, left=index(left))
    batch.needs_exact("the trimming of pages")
    if not batch.self_attention:
        raise UnsupportedError("trimming a step whose keys are not its own tokens: they have no window behind them")
    dead: npt.NDArray[np.int64] = np.maximum(0, batch.context_lens.astype(np.int64) - left) // batch.page_size
    return dead


@named
def trim(batch: Batch, left: int) -> Batch:
    """The step without the pages that a window of `left` keys has left behind: shorter sequences, the same results.

    What a window, a causal mask or ALiBi sees depends on distances from the end alone, and these stay.

    >>> step = trim(Batch.from_lens([1], [11], block_table=[[5, 6, 7]], page_size=4), left=3)
    >>> step.host_seq_lens.tolist(), step.block_table[:, :2].tolist()
    ([7], [[6, 7]])
    """
    dead = dead_pages(batch, left)
    if batch.block_table is None:
        raise ValueError("the step has no block_table, so there are no pages to trim")
    lens = (batch.host_seq_lens - dead * batch.page_size).astype(np.int32)
    return without_leading(batch, dead, lens)
