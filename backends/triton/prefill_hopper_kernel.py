"""The device code of prefill_hopper.py, in Gluon: one program per multiprocessor, three kinds of warps in it.

A producer warp fetches queries, keys and values by TMA into rings of shared memory. Two warpgroups of 128 threads have
64 query rows each and share the keys and values. While the tensor cores multiply a group's scores of one block and its
weights of the block before, the other group is in its softmax, and each group's own softmax of this block overlaps its
product of the block before: the weights are kept in float32 until the next block's products start, which costs no
registers (they are where the scores were) and no repacking. Heads with a rest (192/128) have no room for that, and
spilled 248 bytes: there they wait as pairs in 32 bits, and the sums are shrunk behind the start of the next scores,
which took 0.85 to 1.00 of the time on an H200; heads of 128 would take 1.00 to 1.05.

Barriers: `ready` counts the bytes of a copy, `free` the groups that no longer read a place. A wait names the parity of
the phase that it waits for; "the phase before the first" passes at once, so the producer's first round never waits.
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

from portable.backends.triton.prefill_hopper_load import GROUPS, ROWS, barriers, load_item, produce, rounds

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
VARYING = [
    "total",
    "left",
    "right",
    "table_row",
    "q_step",
    "k_step",
    "k_page",
    "v_step",
    "v_page",
    "lse_head",
    "lse_token",
]


@gluon.jit
def _softmax(s, most, total, block, low, high, scale, BLOCK_N: gl.constexpr, MASK: gl.constexpr, LEFT: gl.constexpr):
    """Weights of a block's scores, and what the sums so far are multiplied by; all in powers of two."""
    if MASK:
        # columns as 8 * piece + within: 600 instructions of such a sweep, not 623; Triton 3.9 spills 104 bytes, not 372
        parts = s.reshape([ROWS, BLOCK_N // 8, 8])
        PARTS: gl.constexpr = parts.type.layout
        EACH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PARTS))
        piece = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))[None, :][:, :, None]
        within = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))[None, :][:, None, :]
        right = gl.convert_layout(high - block * BLOCK_N, EACH)[:, None][:, :, None]
        seen = piece * 8 <= right - within
        if LEFT:
            left = gl.convert_layout(low - block * BLOCK_N, EACH)[:, None][:, :, None]
            seen = seen & (piece * 8 >= left - within)
        s = gl.convert_layout(gl.where(seen, parts, float("-inf")).reshape([ROWS, BLOCK_N]), s.type.layout)
    now = gl.maximum(most, gl.max(s, 1) * scale)
    base = now
    if MASK:
        base = gl.where(now == float("-inf"), 0.0, now)
    shrink = gl.exp2(most - base)
    weights = gl.exp2(s * scale - base[:, None])
    return weights, now, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _scores(q, k_rings, stage, BLOCK_N: gl.constexpr, REST: gl.constexpr, SCORES: gl.constexpr):
    """q times the keys of a block, begun."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q[0], k_rings[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if REST:
        s = warpgroup_mma(q[1], k_rings[1].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Weights in the type of the values, two in 32 bits."""
    even, odd = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
    NAME: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr):
    even = pairs.to(gl.uint16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(even, odd).reshape([ROWS, pairs.shape[1] * 2])


@gluon.jit
def _product(weights, values, acc, SUMS: gl.constexpr):
    """acc plus the weights of a block, as numbers or as pairs, times its values, begun."""
    if weights.dtype == gl.uint32:
        weights = _unpack(weights, values.dtype)
    p = gl.convert_layout(weights.to(values.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def _shrunk(acc, shrink, SUMS: gl.constexpr):
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _sweep(
    begin, end, place, last, state, q, rings, ready, free, low, high, scale, BLOCK_N: gl.constexpr,
    REST: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, LEFT: gl.constexpr, SCORES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Blocks `begin` to `end`, counted from the last one down: scores, beside the product of the block before."""
    _, k_rings, v_ring = rings
    _, k_ready, v_ready = ready
    _, k_free, v_free = free
    weights, shrink, acc, most, total = state
    for block in range(begin, end):
        k_stage, v_stage = (place + block) % STAGES, (place + block - 1) % STAGES
        v_parity = ((place + block - 1) // STAGES) & 1
        mbarrier.wait(k_ready.index(k_stage), ((place + block) // STAGES) & 1)
        s = _scores(q, k_rings, k_stage, BLOCK_N, REST, SCORES)
        mbarrier.wait(v_ready.index(v_stage), v_parity)
        if REST:
            acc = _shrunk(acc, shrink, SUMS)
        acc = _product(weights, v_ring.index(v_stage), acc, SUMS)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(k_stage), count=1)
        weights, most, total, shrink = _softmax(s, most, total, last - block, low, high, scale, BLOCK_N, MASK, LEFT)
        # passes at once: without a branch here ptxas moves the wait for the product above the exponentials
        mbarrier.wait(v_ready.index(v_stage), v_parity)
        acc, total = warpgroup_mma_wait(0, deps=[acc, total])
        mbarrier.arrive(v_free.index(v_stage), count=1)
        if REST:
            weights = _pack(weights, v_ring.dtype)
        else:
            acc = _shrunk(acc, shrink, SUMS)
    return weights, shrink, acc, most, total


@gluon.jit
def _consume(
    rings, ready, free, out, lse, sinks, items, num_items, causal, left, right, scale, out_token, out_head,
    lse_head, lse_token, GROUP: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    V_WIDTH: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """A group of 64 query rows of each item."""
    q_rings, k_rings, v_ring = rings
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    # 16 bytes of a row of values or of the output per thread
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_WIDTH, V_WIDTH // 8], [4, 1], [1, 0])
    row = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    line = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    q = (q_rings[0].index(GROUP), q_rings[1].index(GROUP))
    place = 0
    item = load_item(items, 0, num_items, causal, left, right, HEADS, BLOCK_N, CAUSAL, LEFT, LISTED)
    for i in range(rounds(num_items, LISTED)):
        head, q_row, rows, _, length, position, _, bound, last, blocks = item
        high = gl.minimum(position + row + bound, length - 1)
        low = gl.maximum(position + row - left, 0)
        # blocks that every row of the group sees whole need no mask: first those at the right edge do, then the left
        first = position + GROUP * ROWS
        whole = gl.maximum(gl.minimum(first + bound, length - 1) + 1, 0) // BLOCK_N
        right_edge = gl.minimum(gl.maximum(last + 1 - whole, 1), blocks)
        left_edge = blocks
        if LEFT:
            whole = gl.cdiv(gl.maximum(first + ROWS - 1 - left, 0), BLOCK_N)
            left_edge = gl.maximum(gl.minimum(last + 1 - whole, blocks), right_edge)

        acc = gl.zeros([ROWS, V_WIDTH], gl.float32, SUMS)
        most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        stage, parity = place % STAGES, (place // STAGES) & 1
        mbarrier.wait(q_ready.index(GROUP), i & 1)
        mbarrier.wait(k_ready.index(stage), parity)
        s = warpgroup_mma_wait(0, deps=[_scores(q, k_rings, stage, BLOCK_N, REST, SCORES)])
        mbarrier.arrive(k_free.index(stage), count=1)
        weights, most, total, shrink = _softmax(s, most, total, last, low, high, scale, BLOCK_N, True, LEFT)
        if REST:
            weights = _pack(weights, v_ring.dtype)
        if (last + 1) * BLOCK_N > length:  # what is behind the request may be NaN, and 0 times NaN is NaN
            mbarrier.wait(v_ready.index(stage), parity)
            for piece in gl.static_range(BLOCK_N // 32):
                values = v_ring.index(stage).slice(piece * 32, 32)
                key = last * BLOCK_N + piece * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, LINES))
                zeros = gl.zeros([32, V_WIDTH], v_ring.dtype, LINES)
                values.store(gl.where((key < length)[:, None], values.load(LINES), zeros))
            fence_async_shared()
        state = (weights, shrink, acc, most, total)
        state = _sweep(
            1, right_edge, place, last, state, q, rings, ready, free, low, high, scale,
            BLOCK_N, REST, STAGES, True, LEFT, SCORES, SUMS,
        )  # fmt: skip
        state = _sweep(
            right_edge, left_edge, place, last, state, q, rings, ready, free, low, high, scale,
            BLOCK_N, REST, STAGES, False, LEFT, SCORES, SUMS,
        )  # fmt: skip
        if LEFT:
            state = _sweep(
                left_edge, blocks, place, last, state, q, rings, ready, free, low, high, scale,
                BLOCK_N, REST, STAGES, True, LEFT, SCORES, SUMS,
            )  # fmt: skip
        weights, shrink, acc, most, total = state
        if REST:
            acc = _shrunk(acc, shrink, SUMS)
        # here and not before the sweeps, which would carry it: 2 to 4 % of a prompt on an H200
        item = load_item(items, i + 1, num_items, causal, left, right, HEADS, BLOCK_N, CAUSAL, LEFT, LISTED)
        mbarrier.arrive(q_free.index(GROUP), count=1)
        place += blocks
        stage = (place - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), ((place - 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[_product(weights, v_ring.index(stage), acc, SUMS)])
        mbarrier.arrive(v_free.index(stage), count=1)

        empty = high < low
        if sinks is not None:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            now = gl.maximum(most, sink)
            shift = gl.where(now == float("-inf"), 0.0, now)  # a sink of -inf, and no key: -inf - -inf would be NaN
            factor = gl.exp2(most - shift)
            total = total * factor + gl.exp2(sink - shift)
            most = now
            factor = factor / total
        else:
            total = gl.where(empty, 1.0, total)
            factor = 1.0 / total
        factor = gl.where(empty, 0.0, factor)
        if lse is not None:
            logsum = (most + gl.log2(total)) * LN2
            if sinks is None:
                logsum = gl.where(empty, float("-inf"), logsum)
            at = lse + head.to(gl.int64) * lse_head + (q_row + row).to(gl.int64) * lse_token
            gl.store(at, logsum, mask=row < rows)
        acc = _shrunk(acc, factor, SUMS)
        result = gl.convert_layout(acc.to(v_ring.dtype), LINES)
        column = gl.arange(0, V_WIDTH, layout=gl.SliceLayout(0, LINES))
        at = out + (q_row + line).to(gl.int64)[:, None] * out_token + head.to(gl.int64) * out_head + column[None, :]
        gl.store(at, result, mask=(line < rows)[:, None])


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["lse", "causal", "table"])
def attend_kernel(
    q, k, v, q_rest, k_rest, out, lse, sinks, items, total, causal, left, right, scale, table, table_row, q_head,
    q_step, k_head, k_step, k_page, v_head, v_step, v_page, out_token, out_head, lse_head, lse_token,
    HEADS: gl.constexpr, RATIO: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr,
    V_WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr,
    LEFT: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """`total` items: a head of a tile; that is 8 int32: first row of q, rows, first row of K and V (pages: 0), keys,
    position of the first row among the keys, request; LISTED: one for each head, which is the seventh. CAUSAL None:
    `causal` tells it for each request.

    Heads of q and k are WIDTH columns and REST more, whose maps are q_rest and k_rest: tiles are powers of two wide.
    q, k and v are matrices of rows. The next head is `_head` columns and `_step` rows further, the next page `_page`.
    """
    dtype: gl.constexpr = q.dtype
    q_ring = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, WIDTH], q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, WIDTH], k.layout)
    q_rings, k_rings = (q_ring, q_ring), (k_ring, k_ring)
    if REST:
        q_rings = (q_ring, gl.allocate_shared_memory(dtype, [GROUPS, ROWS, REST], q_rest.layout))
        k_rings = (k_ring, gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], k_rest.layout))
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V_WIDTH], v.layout)
    q_ready, q_free = barriers(GROUPS, 1, 1)
    k_ready, k_free = barriers(STAGES, 1, GROUPS)
    v_ready, v_free = barriers(STAGES, 1, GROUPS)
    rings = (q_rings, k_rings, v_ring)
    ready = (q_ready, k_ready, v_ready)
    free = (q_free, k_free, v_free)
    fence_async_shared()
    # 2 * 128 threads of 240 registers and 128 of 24 are the 64512 that 384 threads of 168 have
    gl.warp_specialize(
        [
            (_consume, (
                rings, ready, free, out, lse, sinks, items, total, causal, left, right, scale, out_token,
                out_head, lse_head, lse_token, 0, HEADS, BLOCK_N, V_WIDTH, REST, STAGES, CAUSAL, LEFT, LISTED,
            )),
            (_consume, (
                rings, ready, free, out, lse, sinks, items, total, causal, left, right, scale, out_token,
                out_head, lse_head, lse_token, 1, HEADS, BLOCK_N, V_WIDTH, REST, STAGES, CAUSAL, LEFT, LISTED,
            )),
            (produce, (
                (q, q_rest), (k, k_rest), v, rings, ready, free, items, total, causal, left, right, table,
                table_row, q_head, q_step, k_head, k_step, k_page, v_head, v_step, v_page, HEADS, RATIO, WIDTH, REST,
                BLOCK_N, STAGES, PAGE, CAUSAL, LEFT, LISTED,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
