"""The device code of mla_decode_hopper.py, in Gluon: one program per multiprocessor, three warpgroups in it.

A tile is 64 rows, (query token, head) pairs, whose queries stay in shared memory beside a ring of four blocks of 32
keys; both come by TMA. The first warpgroup fetches, multiplies queries and keys, and leaves the softmax's weights in
shared memory; the other two multiply the weights with a half of the latent columns each, 128 registers of output. So a
block is read once for both products, and the scores of a block overlap the sums of the one before.

Barriers: `ready` counts the bytes of a copy; `sent` and `taken` hand over the weights of a block, or, after the last
one, what the sums are divided by, in two places in turn. What was taken frees a block for the next copy. A wait names
the parity of the phase that it waits for; "the phase before the first" passes at once. A fourth warpgroup, to fetch,
would leave 128 registers a thread, with which ptxas serialises the products, as it does where a group has fewer than
the 168 that three groups have on average.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portable.backends.triton.mla_decode_hopper_load import (
    BLOCK_N,
    ROWS,
    fetch,
    load_request,
    load_start,
    pages_of,
    rows_of,
)
from portable.backends.triton.prefill_hopper_load import barriers, copy

LN2 = gl.constexpr(0.6931471805599453)
WIDEST = gl.constexpr(256)  # columns of one product
VARYING = ["requests", "lse_head", "lse_token", "table_row", "k_page"]


@gluon.jit
def _clear(ring, first, WIDTH: gl.constexpr):
    """Zeros in the rows from `first` on: what is behind a request may be NaN, and 0 times NaN is NaN."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for piece in gl.static_range(BLOCK_N // 16):
        part = ring.slice(piece * 16, 16)
        row = piece * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LINES))
        part.store(gl.where((row < first)[:, None], part.load(LINES), gl.zeros([16, WIDTH], ring.dtype, LINES)))


@gluon.jit
def _weigh(
    maps, places, rings, ready, weights_ring, factor_ring, sent, taken, lse, parts_lse, starts, size, requests,
    cu_seqlens_q, seq_lens, causal, table, scale, k_page, table_row, lse_head, lse_token, HEADS: gl.constexpr,
    TILES: gl.constexpr, LIVE: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Fetch; scores and weights of every block, for the two groups that sum values."""
    q_half, q_rope, k_half, k_rope = maps
    q_left, q_right, q_rest, q_ready = places
    left_ring, right_ring, rope_ring = rings
    AHEAD: gl.constexpr = STAGES - 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    group, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    token = (tile * ROWS + row) // HEADS
    place = 0  # blocks so far
    message = 0
    items = 0
    first, last, at = load_start(starts, group, requests)
    for request in range(first, last + 1):
        start, queries, length, begin, end, whole, at = load_request(
            request, at, size, group, tile, cu_seqlens_q, seq_lens, HEADS
        )
        if begin < end:
            bound = queries
            if CAUSAL is None:
                bound = gl.where(gl.load(causal + request) != 0, 0, queries)
            elif CAUSAL:
                bound = 0
            high = gl.minimum(length, length - queries + 1 + token + bound)
            high = gl.where(token < queries, high, 0)
            pages = pages_of(table, request, table_row)
            final = gl.maximum(length - 1, 0) // PAGE
            mbarrier.expect(q_ready, 2 * q_half.block_type.nbytes + q_rope.block_type.nbytes)
            query = start * HEADS + tile * ROWS
            copy(q_half, [query, 0], q_ready, q_left)
            copy(q_half, [query, HALF], q_ready, q_right)
            copy(q_rope, [query, 2 * HALF], q_ready, q_rest)
            # the end of the request before was taken by both groups, so that the whole ring is free
            mbarrier.wait(taken.index((message + 1) & 1), ((message - 1) >> 1) & 1)
            for ahead in gl.static_range(STAGES):
                if begin + ahead < end:
                    rows = rows_of(pages, begin + ahead, final, k_page, PAGE)
                    fetch(k_half, k_rope, rings, ready, (place + ahead) % STAGES, rows, HALF, PAGE)
            mbarrier.wait(q_ready, items & 1)
            items += 1
            most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            for block in range(begin, end):
                stage = place % STAGES
                rows = rows_of(pages, block + AHEAD, final, k_page, PAGE)  # on their way before the wait
                mbarrier.wait(ready.index(stage), (place // STAGES) & 1)
                zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
                s = warpgroup_mma(q_rest, rope_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma(q_left, left_ring.index(stage).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma(q_right, right_ring.index(stage).permute((1, 0)), s, is_async=True)
                # beside the products, 3 to 5 % at 128 heads: the block before the last one was taken, its place is free
                mbarrier.wait(taken.index(message & 1), ((message >> 1) & 1) ^ 1)
                if (block >= begin + 2) & (block + AHEAD < end):
                    fetch(k_half, k_rope, rings, ready, (place + AHEAD) % STAGES, rows, HALF, PAGE)
                s = warpgroup_mma_wait(0, deps=[s])
                s = gl.where(column[None, :] < (high - block * BLOCK_N)[:, None], s, float("-inf"))
                now = gl.maximum(most, gl.max(s, 1) * scale)
                base = gl.where(now == float("-inf"), 0.0, now)
                shrink = gl.exp2(most - base)
                weights = gl.exp2(s * scale - base[:, None])
                total = total * shrink + gl.sum(weights, 1)
                most = now
                weights_ring.index(message & 1).store(weights.to(q_left.dtype))
                factor_ring.index(message & 1).store(shrink)
                if (block + 1) * BLOCK_N > length:
                    _clear(left_ring.index(stage), length - block * BLOCK_N, HALF)
                    _clear(right_ring.index(stage), length - block * BLOCK_N, HALF)
                fence_async_shared()
                mbarrier.arrive(sent.index(message & 1), count=1)
                place += 1
                message += 1
            empty = high <= begin * BLOCK_N
            total = gl.where(empty, 1.0, total)
            mbarrier.wait(taken.index(message & 1), ((message >> 1) & 1) ^ 1)
            factor_ring.index(message & 1).store(gl.where(empty, 0.0, 1.0 / total))
            mbarrier.arrive(sent.index(message & 1), count=1)
            message += 1
            logsum = gl.where(empty, float("-inf"), most + gl.log2(total))
            live = token < queries
            if whole:
                if lse is not None:
                    head = (tile * ROWS + row) % HEADS
                    at_row = head.to(gl.int64) * lse_head + (start + token).to(gl.int64) * lse_token
                    gl.store(lse + at_row, logsum * LN2, mask=live)
            else:
                slot = tile * (requests + gl.num_programs(0) // TILES) + request + group
                gl.store(parts_lse + slot.to(gl.int64) * LIVE + row, logsum, mask=live)


@gluon.jit
def _sum(
    ring, ready, weights_ring, factor_ring, sent, taken, out, parts, starts, size, requests, cu_seqlens_q, seq_lens,
    out_token, out_head, SIDE: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr, LIVE: gl.constexpr,
    HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weights times a half of the latent columns."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(HALF, WIDEST), 16])
    group, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    place = 0
    message = 0
    first, last, at = load_start(starts, group, requests)
    for request in range(first, last + 1):
        start, queries, _, begin, end, whole, at = load_request(
            request, at, size, group, tile, cu_seqlens_q, seq_lens, HEADS
        )
        if begin < end:
            acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
            for _block in range(begin, end):
                stage = place % STAGES
                mbarrier.wait(ready.index(stage), (place // STAGES) & 1)
                mbarrier.wait(sent.index(message & 1), (message >> 1) & 1)
                acc = acc * factor_ring.index(message & 1).load(gl.SliceLayout(1, SUMS))[:, None]
                acc = warpgroup_mma(weights_ring.index(message & 1), ring.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(taken.index(message & 1), count=1)
                place += 1
                message += 1
            mbarrier.wait(sent.index(message & 1), (message >> 1) & 1)
            factor = factor_ring.index(message & 1).load(gl.SliceLayout(1, SUMS))
            mbarrier.arrive(taken.index(message & 1), count=1)
            message += 1
            acc = acc * factor[:, None]
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
            column = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
            token, head = (tile * ROWS + row) // HEADS, (tile * ROWS + row) % HEADS
            live = (token < queries)[:, None]
            if whole:
                row_at = (start + token).to(gl.int64) * out_token + head * out_head
                gl.store(out + row_at[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=live)
            else:
                slot = tile * (requests + gl.num_programs(0) // TILES) + request + group
                part = parts + slot.to(gl.int64) * (LIVE * 2 * HALF)
                gl.store(part + row[:, None] * (2 * HALF) + column[None, :], acc, mask=live)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["lse", "causal", "table"])
def attend_mla_hopper_kernel(
    q_half, q_rope, k_half, k_rope, out, lse, parts, parts_lse, starts, cu_seqlens_q, seq_lens, causal, table,
    requests, scale, k_page, table_row, out_token, out_head, lse_head, lse_token, HEADS: gl.constexpr,
    TILES: gl.constexpr, LIVE: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Program i is tile i % TILES of the requests that `starts` gives to group i // TILES.

    q and k are matrices of rows, each by two maps: boxes of HALF and of ROPE columns. LIVE rows of a tile may be live.
    """
    dtype: gl.constexpr = q_half.dtype
    HALVES: gl.constexpr = q_half.layout
    RESTS: gl.constexpr = q_rope.layout
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], dtype)
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [ROWS, HALF], HALVES)
    q_right = gl.allocate_shared_memory(dtype, [ROWS, HALF], HALVES)
    q_rest = gl.allocate_shared_memory(dtype, [ROWS, ROPE], RESTS)
    left_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], HALVES)
    right_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], HALVES)
    rope_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], RESTS)
    weights_ring = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_N], WEIGHTS)
    factor_ring = gl.allocate_shared_memory(gl.float32, [2, ROWS], FACTORS)
    q_ready, _ = barriers(1, 1, 1)
    ready, _ = barriers(STAGES, 1, 1)
    sent, taken = barriers(2, 1, 2)
    size = gl.load(starts + 2 * (gl.num_programs(0) // TILES) + 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_weigh, (
                (q_half, q_rope, k_half, k_rope), (q_left, q_right, q_rest, q_ready.index(0)),
                (left_ring, right_ring, rope_ring), ready, weights_ring, factor_ring, sent, taken, lse, parts_lse,
                starts, size, requests, cu_seqlens_q, seq_lens, causal, table, scale, k_page, table_row, lse_head,
                lse_token, HEADS, TILES, LIVE, HALF, STAGES, PAGE, CAUSAL,
            )),
            (_sum, (
                left_ring, ready, weights_ring, factor_ring, sent, taken, out, parts, starts, size, requests,
                cu_seqlens_q, seq_lens, out_token, out_head, 0, HEADS, TILES, LIVE, HALF, STAGES,
            )),
            (_sum, (
                right_ring, ready, weights_ring, factor_ring, sent, taken, out, parts, starts, size, requests,
                cu_seqlens_q, seq_lens, out_token, out_head, 1, HEADS, TILES, LIVE, HALF, STAGES,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
