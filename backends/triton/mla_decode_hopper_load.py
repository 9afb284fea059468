"""What the programs of mla_decode_hopper_kernel.py work on, and how it is fetched: Gluon, see there."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portable.backends.triton.prefill_hopper_load import copy

ROWS = gl.constexpr(64)  # of a tile: what a warpgroup multiplies at once
BLOCK_N = gl.constexpr(32)  # keys of a block
OVERHEAD = gl.constexpr(6)  # what beginning a request costs, in blocks


@triton.jit
def _merge(place, start, queries, tile, count, slot, live):
    tl.store(place, start, mask=live)
    tl.store(place + 1, queries, mask=live)
    tl.store(place + 2, tile, mask=live)
    tl.store(place + 3, count, mask=live)
    tl.store(place + 4, slot, mask=live)


@triton.jit(do_not_specialize=["requests", "groups", "least"])
def ranges_kernel(
    cu_seqlens_q, seq_lens, starts, merges, requests, groups, least, TILES: tl.constexpr, BY_REQUEST: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Cut the blocks of all requests, one after the other, into `groups` equal ranges; program r looks at request r.

    `starts` [groups + 1, 2] i32 gets the first request of a range, and the place in the whole where that begins; behind
    it the size of a range. A request takes OVERHEAD places before its blocks. `merges` [TILES of each, 8] i32,
    by request or by the first range of a request that is split, whatever are fewer, is what the kernel that joins parts
    reads: the part of request r in range g is in slot r + g, which grows along both.
    """
    request = tl.program_id(0)
    each = tl.arange(0, VECTOR)
    everything = tl.zeros([VECTOR], tl.int32)
    before = tl.zeros([VECTOR], tl.int32)
    for first in range(0, requests, VECTOR):
        other = first + each
        live = other < requests
        blocks = tl.maximum(tl.cdiv(tl.load(seq_lens + other, mask=live, other=0), BLOCK_N), 1) + OVERHEAD
        everything += tl.where(live, blocks, 0)
        before += tl.where(other < request, blocks, 0)
    total, at = tl.sum(everything), tl.sum(before)
    size = tl.maximum(tl.cdiv(total, groups), least)
    start = tl.load(cu_seqlens_q + request)
    queries = tl.load(cu_seqlens_q + request + 1) - start
    blocks = tl.maximum(tl.cdiv(tl.load(seq_lens + request), BLOCK_N), 1)

    # ranges that begin in this request; behind the last one those that are empty
    begin = tl.where(request == 0, 0, tl.cdiv(at, size))
    end = tl.where(request == requests - 1, groups + 1, tl.cdiv(at + OVERHEAD + blocks, size))
    first_group = (at + OVERHEAD) // size
    parts = (at + OVERHEAD + blocks - 1) // size - first_group + 1
    for first in range(begin, end, VECTOR):
        group = first + each
        past = group * size >= at + OVERHEAD + blocks
        tl.store(starts + 2 * group, tl.where(past, requests, request), mask=group < end)
        tl.store(starts + 2 * group + 1, tl.where(past, total, at), mask=group < end)
        # of the requests that begin in a range only one goes on behind it
        if not BY_REQUEST:
            count = tl.where((group == first_group + 1) & (parts > 1), parts, 0)
            live = (group > 0) & (group < end)
            for tile in range(TILES):
                place = merges + ((group - 1) * TILES + tile) * 8
                slot = tile * (requests + groups) + request + first_group
                _merge(place, start, queries, tile, count, slot, live)
    if BY_REQUEST:
        for tile in range(TILES):
            slot = tile * (requests + groups) + request + first_group
            place = merges + (request * TILES + tile) * 8
            _merge(place, start, queries, tile, tl.where(parts > 1, parts, 0), slot, True)
    if request == 0:
        tl.store(starts + 2 * groups + 2, size)


@gluon.jit
def load_start(starts, group, requests):
    """The first and the last request of a range, and where the first begins; the last one may have no block here."""
    first = gl.load(starts + 2 * group)
    at = gl.load(starts + 2 * group + 1)
    last = gl.minimum(gl.load(starts + 2 * group + 2), requests - 1)
    return first, last, at


@gluon.jit
def load_request(request, at, size, group, tile, cu_seqlens_q, seq_lens, HEADS: gl.constexpr):
    """First query token, queries, keys, the blocks [begin, end) of a range, whether those are all, the next place."""
    start = gl.load(cu_seqlens_q + request)
    queries = gl.load(cu_seqlens_q + request + 1) - start
    length = gl.load(seq_lens + request)
    blocks = gl.maximum(gl.cdiv(length, BLOCK_N), 1)
    first = group * size - at - OVERHEAD
    begin = gl.minimum(gl.maximum(first, 0), blocks)
    end = gl.minimum(gl.maximum(first + size, 0), blocks)
    whole = end - begin == blocks
    end = gl.where(tile * ROWS < queries * HEADS, end, begin)
    return start, queries, length, begin, end, whole, at + OVERHEAD + blocks


@gluon.jit
def pages_of(table, request, table_row):
    """A request's row of the block table."""
    return table + request.to(gl.int64) * table_row


@gluon.jit
def rows_of(pages, block, final, k_page, PAGE: gl.constexpr):
    """Where the pieces of a block begin in the matrix of rows; past the last page, that again."""
    PIECE: gl.constexpr = min(PAGE, BLOCK_N)
    rows = ()
    for piece in gl.static_range(BLOCK_N // PIECE):
        key = block * BLOCK_N + piece * PIECE
        rows = rows + (gl.load(pages + gl.minimum(key // PAGE, final)) * k_page + key % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def fetch(k_half, k_rope, rings, ready, stage, rows, HALF: gl.constexpr, PAGE: gl.constexpr):
    """Begin to copy a block of keys to a place of the ring, page by page."""
    PIECE: gl.constexpr = min(PAGE, BLOCK_N)
    left_ring, right_ring, rope_ring = rings
    here = ready.index(stage)
    nbytes: gl.constexpr = 2 * k_half.block_type.nbytes + k_rope.block_type.nbytes
    mbarrier.expect(here, nbytes * (BLOCK_N // PIECE))
    for piece in gl.static_range(BLOCK_N // PIECE):
        copy(k_half, [rows[piece], 0], here, left_ring.index(stage).slice(piece * PIECE, PIECE))
        copy(k_half, [rows[piece], HALF], here, right_ring.index(stage).slice(piece * PIECE, PIECE))
        copy(k_rope, [rows[piece], 2 * HALF], here, rope_ring.index(stage).slice(piece * PIECE, PIECE))
