"""The work of a paged kernel, cut into items of similar size on the device: one kernel per step, nothing read back.

A tile is `BLOCK_M` rows of a request, a row one of its (query token, query head of a KV head) pairs; its keys are
blocks of `BLOCK_N`. A request whose tiles have more than `size` blocks is split along the keys into equal items.
`size` follows from the total number of blocks: one item for each program that the device runs at once where that
gives short items, and more, so that ragged batches balance, where it gives long ones. Where requests are about as
long as each other there is nothing to balance: they are cut into equal parts, as many as end soonest. Items are listed
by their size, the longest first, which is what keeps a batch from ending in one long item. The launch has room for the
most items that there can be, which depends on the number of requests and tokens alone:
items <= tiles + blocks / size <= tiles + most wanted. Programs without an item end at once.

Every program of the kernel lists the items of one request. It finds their places by looking at all requests, which
costs less than a second kernel that would tell it: 256 requests are one vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from portable.backends.triton.launch import KEPT, Bound, bound
from portable.kernel import Segment
from portable.ragged import cdiv  # Triton's own takes 2.8 us, ours 0.3

CHOICES = 512  # the most parts that each tile of an even batch is cut into
EVEN = 288  # a batch is even whose longest tile has at most that many 256ths of the mean's blocks
FIELDS = 8  # int32 of an item and of a merge: 32 bytes, one sector
VECTOR = 256
OPEN = 1 << 30  # a window without a bound


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What `schedule` leaves on the device, and how many there can be."""

    items: torch.Tensor  # [items, 8] i32: first query token, queries, context, request, tile, first key, last + 1, slot
    merges: torch.Tensor  # [merges, 8] i32: first query token, queries, tile, parts, first slot
    counts: torch.Tensor  # [8] i32: items and merges that are there
    slots: int  # room for that many partial tiles; 0 where nothing is split


@triton.jit
def _keys(first, last, context, seq_len, bound, left):
    """The keys [low, high) that query tokens `first` to `last` of a request see."""
    low = tl.maximum(context + first - left, 0)
    high = tl.minimum(seq_len, context + last + 1 + bound)
    return low, high


@triton.jit
def _extent(
    cu_seqlens_q,
    seq_lens,
    causal,
    request,
    live,
    left,
    right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Of a request: its first query token, queries, context, keys, bound, tiles, and the most blocks of a tile."""
    start = tl.load(cu_seqlens_q + request, mask=live, other=0)
    queries = tl.load(cu_seqlens_q + request + 1, mask=live, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=live, other=0)
    context = seq_len - queries
    bound = right
    if CAUSAL is None:
        bound = tl.where(tl.load(causal + request, mask=live, other=0) != 0, 0, right)
    tiles = tl.cdiv(queries * GROUP, BLOCK_M)
    low, high = _keys(0, queries - 1, context, seq_len, bound, left)
    blocks = tl.maximum(tl.cdiv(high, BLOCK_N) - low // BLOCK_N, 0)
    # of many tiles, none has more than its own tokens and both sides of the window: one block more than fits
    tokens: tl.constexpr = (BLOCK_M - 1) // GROUP + 2
    most = tl.where((left < 1 << 29) & (bound < 1 << 29), (tokens + left + bound) // BLOCK_N + 2, 1 << 30)
    return start, queries, context, seq_len, bound, tiles, tl.minimum(blocks, most)


@triton.jit
def _parts(tiles, blocks, once, more, CHOICES: tl.constexpr, COST: tl.constexpr):
    """Of `tiles` tiles with as many blocks each: into how many parts they are cut to end soonest."""
    parts = 1 + tl.arange(0, CHOICES)
    rounds = (tiles * parts + once - 1) // once
    # a part that is not all of a tile costs about as much as 64 keys: its result is written, and read again
    cost = rounds.to(tl.int64) * (tl.cdiv(blocks, parts) + tl.where(parts > 1, COST, 0))
    cost = tl.where((parts == 1) | (tiles * (parts - 1) <= more), cost, 1 << 62)
    return tl.argmin(cost, 0) + 1


@triton.jit(
    do_not_specialize=["requests", "left", "right", "least", "enough", "once", "wanted", "even"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "causal"],  # of requests behind others
)
def schedule_kernel(
    cu_seqlens_q,
    seq_lens,
    causal,
    items,
    merges,
    counts,
    requests,
    left,
    right,
    least,
    enough,
    once,
    wanted,
    even,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,  # None: a tensor says it for each request
    CHOICES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    request = tl.program_id(0)
    each = tl.arange(0, VECTOR)

    total = tl.zeros([VECTOR], tl.int64)
    count = tl.zeros([VECTOR], tl.int64)
    most = tl.zeros([VECTOR], tl.int32)
    for first in range(0, requests, VECTOR):
        other = first + each
        _, _, _, _, _, tiles, blocks = _extent(
            cu_seqlens_q, seq_lens, causal, other, other < requests, left, right, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        total += tiles.to(tl.int64) * blocks
        count += tl.where(blocks > 0, tiles, 0)
        most = tl.maximum(most, tl.where(tiles > 0, blocks, 0))
    blocks = tl.sum(total)
    size = tl.minimum((blocks + once - 1) // once, enough)
    size = tl.maximum(size, (blocks + wanted - 1) // wanted)
    tiles, longest = tl.sum(count), tl.max(most)
    if tiles * longest * 256 <= blocks * even:
        size = tl.cdiv(longest, _parts(tiles, longest, once, wanted, CHOICES, (63 + BLOCK_N) // BLOCK_N)).to(tl.int64)
    size = tl.maximum(size, least).to(tl.int32)

    start, queries, context, seq_len, bound, tiles, blocks = _extent(
        cu_seqlens_q, seq_lens, causal, request, request < requests, left, right, GROUP, BLOCK_M, BLOCK_N, CAUSAL
    )
    parts = tl.maximum(tl.cdiv(blocks, size), 1)
    blocks = tl.maximum(tl.cdiv(blocks, parts), 1)

    item_place = tl.zeros([VECTOR], tl.int32)  # items of the requests that come before ours
    slot_place = tl.zeros([VECTOR], tl.int32)
    merge_place = tl.zeros([VECTOR], tl.int32)
    all_items = tl.zeros([VECTOR], tl.int32)
    all_merges = tl.zeros([VECTOR], tl.int32)
    for first in range(0, requests, VECTOR):
        other = first + each
        _, _, _, _, _, other_tiles, other_blocks = _extent(
            cu_seqlens_q, seq_lens, causal, other, other < requests, left, right, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        other_parts = tl.maximum(tl.cdiv(other_blocks, size), 1)
        other_blocks = tl.maximum(tl.cdiv(other_blocks, other_parts), 1)
        before = other < request
        split = other_parts > 1
        ahead = (other_blocks > blocks) | ((other_blocks == blocks) & before)
        item_place += tl.where(ahead, other_parts * other_tiles, 0)
        slot_place += tl.where(before & split, other_parts * other_tiles, 0)
        merge_place += tl.where(before & split, other_tiles, 0)
        all_items += other_parts * other_tiles
        all_merges += tl.where(split, other_tiles, 0)
    item_first, slot_first, merge_first = tl.sum(item_place), tl.sum(slot_place), tl.sum(merge_place)
    if request == 0:
        tl.store(counts, tl.sum(all_items))
        tl.store(counts + 1, tl.sum(all_merges))

    for first in range(0, tiles * parts, VECTOR):
        index = first + each
        live = index < tiles * parts
        part = index // tiles
        tile = index - part * tiles
        first_token = tile * BLOCK_M // GROUP
        last_token = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, queries - 1)
        low, high = _keys(first_token, last_token, context, seq_len, bound, left)
        block = low // BLOCK_N
        of_tile = tl.maximum(tl.cdiv(tl.maximum(tl.cdiv(high, BLOCK_N) - block, 0), blocks), 1)
        low = tl.maximum(low, (block + part * blocks) * BLOCK_N)
        high = tl.minimum(high, (block + (part + 1) * blocks) * BLOCK_N)
        place = items + (item_first + index) * 8
        tl.store(place, start, mask=live)
        tl.store(place + 1, tl.where(part < of_tile, queries, 0), mask=live)
        tl.store(place + 2, context, mask=live)
        tl.store(place + 3, request, mask=live)
        tl.store(place + 4, tile, mask=live)
        tl.store(place + 5, low, mask=live)
        tl.store(place + 6, high, mask=live)
        tl.store(place + 7, tl.where(of_tile > 1, slot_first + tile * parts + part, -1), mask=live)
        place = merges + (merge_first + tile) * 8
        live = live & (part == 0) & (parts > 1)
        tl.store(place, start, mask=live)
        tl.store(place + 1, queries, mask=live)
        tl.store(place + 2, tile, mask=live)
        tl.store(place + 3, tl.where(of_tile > 1, of_tile, 0), mask=live)
        tl.store(place + 4, slot_first + tile * parts, mask=live)


def schedule(
    segment: Segment,
    window: tuple[int | None, int | None],
    group: int,
    block_m: int,
    block_n: int,
    *,
    enough: int,
    once: int,
    wanted: int,
    multiple: int = 1,
    fixed: bool = False,
) -> Schedule:
    """List the items of a segment over pages.

    Args:
        enough: blocks of an item that is long enough for the work around it.
        once: items that the device runs at the same time.
        wanted: the most items that splits should make.
        multiple: of which the room for items is one.
        fixed: items have `enough` blocks, whatever else is in the batch.
    """
    assert segment.block_table is not None
    requests, tokens = segment.seq_lens.numel(), segment.tokens.stop - segment.tokens.start
    tiles = min(requests * cdiv(segment.max_query_len * group, block_m), requests + tokens * group // block_m)
    left, right = (OPEN if side is None else min(side, OPEN) for side in window)
    causal = segment.causal
    if causal is True:
        right = 0
    # the table's width and the window bound the blocks of a tile, in every step that is captured with this one
    blocks = cdiv(segment.block_table.shape[1] * segment.page_size, block_n)
    if left != OPEN and right != OPEN:
        blocks = min(blocks, ((block_m - 1) // group + 2 + left + right) // block_n + 2)
    # short tiles that fill half of the device are done sooner than a second kernel starts
    alone = blocks <= enough and 2 * tiles >= once and not fixed
    least = enough if fixed else blocks if alone else 1
    more = cdiv(tiles * blocks, least)
    more = more if fixed else min(wanted, more)
    splits = blocks > least
    num_items = tiles + more if splits else tiles
    num_merges = min(tiles, more) if splits else 0
    slots = min(num_items, 2 * more) if splits else 0
    num_items = -(-num_items // multiple) * multiple
    memory = torch.empty((num_items + num_merges + 1, FIELDS), dtype=torch.int32, device=segment.seq_lens.device)
    made = Schedule(memory[:num_items], memory[num_items:-1], memory[-1], slots)
    if not requests:
        return made
    _kernel(group, block_m, block_n, causal if isinstance(causal, bool) else None)(
        (requests,),
        segment.cu_seqlens_q,
        segment.seq_lens,
        None if isinstance(causal, bool) else causal,
        memory,
        memory[num_items:],
        made.counts,
        requests,
        left,
        right,
        least,
        max(enough, least),
        once,
        more,
        0 if fixed else EVEN,
    )
    return made


@lru_cache(KEPT)
def _kernel(group: int, block_m: int, block_n: int, causal: bool | None) -> Bound:
    options = {
        "GROUP": group,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "CAUSAL": causal,
        "CHOICES": CHOICES,
        "VECTOR": VECTOR,
        "num_warps": 4,
    }
    return bound(schedule_kernel, options)
