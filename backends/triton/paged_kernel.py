"""The device side of `paged`: a tile of rows over a range of its keys. `paged_load` reads the cache, and
`paged_result` joins the parts of a tile.

Keys outside of an item's range are never read: rows of K and V past its ends repeat its last key, whose score is
masked, so loads need no masks and unused cache may hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable.backends.triton.paged_load import half, known, load_pages, load_rows, number
from portable.backends.triton.paged_result import LOG2E, finish, leave
from portable.backends.triton.strides import times
from portable.backends.triton.xcd import xcd_order


@triton.jit
def _sweep(
    state,
    queries,
    k,
    v,
    table,
    begin,
    end,
    low,
    high,
    row_low,
    row_high,
    position,
    slopes,
    strides,
    scale,
    softcap,
    MASKED: tl.constexpr,
    LEFT: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH_K: tl.constexpr,
    PAD_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PAD_V: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The keys from `begin` to `end` onto the running softmax of a tile, whose next pages are known."""
    most, norm, total, odd_total, page = state
    columns_k, columns_v = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    for key in tl.range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        offset = (known(keys, low, high, MASKED, LEFT).to(tl.uint32) % PAGE).to(tl.int32)
        if WIDE:
            offset = offset.to(tl.int64)
        k_tile = load_rows(k, page, offset, strides[0], strides[1], columns_k, WIDTH_K, PAD_K)
        if PAIRS:
            scores = tl.dot(queries[0], tl.trans(half(k_tile, False, FP8, NATIVE)))
            scores = tl.dot(queries[1], tl.trans(half(k_tile, True, FP8, NATIVE)), scores)
        else:
            k_tile = number(k_tile, queries[0].dtype, FP8, NATIVE)
            scores = tl.dot(queries[0], tl.trans(k_tile), input_precision="ieee")
        scores *= scale
        if softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2x) + 1); `scale` is that of 2x, and `softcap` in units of log2
            scores = softcap - (2 * softcap) / (tl.math.exp2(scores) + 1)
        if slopes is not None:
            scores -= slopes[:, None] * tl.abs(position[:, None] - keys[None, :]).to(tl.float32)
        if MASKED:
            seen = keys[None, :] < row_high[:, None]
            if LEFT:
                seen = seen & (keys[None, :] >= row_low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        shift = top
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.math.exp2(scores - shift[:, None])
        shrink = tl.math.exp2(most - shift)
        norm = norm * shrink + tl.sum(weights, 1)
        most = top
        weights = weights.to(queries[0].dtype)
        total *= shrink[:, None]
        v_tile = load_rows(v, page, offset, strides[2], strides[3], columns_v, WIDTH_V, PAD_V)
        if PAIRS:
            odd_total *= shrink[:, None]
            total = tl.dot(weights, half(v_tile, False, FP8, NATIVE), total)
            odd_total = tl.dot(weights, half(v_tile, True, FP8, NATIVE), odd_total)
        else:
            v_tile = number(v_tile, queries[0].dtype, FP8, NATIVE)
            total = tl.dot(weights, v_tile, total, input_precision="ieee")
        page = load_pages(table, key + BLOCK_N, low, high, LEFT, PAGE, BLOCK_N)
    return most, norm, total, odd_total, page


@triton.jit(
    do_not_specialize=["left", "right", "lse_head", "lse_token", "table_row"],  # they vary from step to step
    do_not_specialize_on_alignment=["lse", "causal", "table"],
)
def attend_kernel(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    alibi,
    k_scale,
    v_scale,
    causal,
    table,
    items,
    counts,
    parts,
    parts_lse,
    scale,
    softcap,
    left,
    right,
    q_token,
    q_head,
    k_page,
    k_row,
    k_head,
    v_page,
    v_row,
    v_head,
    out_token,
    out_head,
    lse_head,
    lse_token,
    table_row,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    XCDS: tl.constexpr,
    RUN: tl.constexpr,  # items in turn that are for one XCD
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    MASKED: tl.constexpr,
    SCALES: tl.constexpr,  # strides of the scales of K and V: 1 for one per KV head, 0 for one
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH_K: tl.constexpr,
    PAD_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PAD_V: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,  # the type with which Triton reads FP8, where the device has it
    PAIRS: tl.constexpr,  # two bytes of fp8 are read as 16 bits, and even and odd columns multiplied apart
    PDL: tl.constexpr,  # programmatic dependent launch: start while the kernel before is running, and wait for its end
    STEP: tl.constexpr,  # strides came divided by it
):
    PACK: tl.constexpr = 2 if PAIRS else 1
    kv_head, item = xcd_order(tl.program_id(0), KV_HEADS, XCDS, RUN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = tl.load(counts)
    first_token = tl.load(items + item * 8)
    num_queries = tl.load(items + item * 8 + 1)
    context = tl.load(items + item * 8 + 2)
    request = tl.load(items + item * 8 + 3)
    tile = tl.load(items + item * 8 + 4)
    low = tl.load(items + item * 8 + 5)
    high = tl.load(items + item * 8 + 6)
    slot = tl.load(items + item * 8 + 7)
    if (item >= there) | (num_queries == 0):
        return

    if STEP > 1:
        q_token, q_head = times(q_token, STEP), times(q_head, STEP)
        out_token, out_head = times(out_token, STEP), times(out_head, STEP)
        k_page, k_head, v_page, v_head = (
            times(k_page, STEP),
            times(k_head, STEP),
            times(v_page, STEP),
            times(v_head, STEP),
        )
        # within a page they need 64 bits only where WIDE says so
        k_row = times(k_row, STEP) if WIDE else k_row * STEP
        v_row = times(v_row, STEP) if WIDE else v_row * STEP
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, row % GROUP + kv_head * GROUP
    live = token < num_queries
    position = context + token
    bound = right
    if CAUSAL is None:
        bound = tl.where(tl.load(causal + request) != 0, 0, right)
    row_high = tl.where(live, tl.minimum(high, position + 1 + bound), 0)
    row_low = tl.maximum(low, position - left)

    columns = tl.arange(0, PAD_K // PACK)
    at = q + ((first_token + token).to(tl.int64) * q_token + head.to(tl.int64) * q_head)[:, None]
    at += columns[None, :] * PACK
    mask = live[:, None] & (columns[None, :] < WIDTH_K // PACK)
    queries = tl.load(at, mask=mask, other=0)
    odd_queries = 0.0
    odd_total = 0.0
    if PAIRS:
        # float16 has the bits for any row of queries whose largest one is in [1, 2)
        odd_queries = tl.load(at + 1, mask=mask, other=0)
        largest = tl.maximum(tl.max(tl.abs(queries), 1), tl.max(tl.abs(odd_queries), 1)).to(tl.float32)
        power = largest.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
        queries = (queries * inverse[:, None]).to(tl.float16)
        odd_queries = (odd_queries * inverse[:, None]).to(tl.float16)
        scale = (scale * power.to(tl.float32, bitcast=True))[:, None]
        odd_total = tl.zeros([BLOCK_M, PAD_V // 2], tl.float32)
    queries = (queries, odd_queries)
    slopes = None
    if alibi is not None:
        slopes = tl.load(alibi + head, mask=live, other=0).to(tl.float32) * LOG2E
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * SCALES[0])

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, PAD_V // PACK], tl.float32)
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    table += request.to(tl.int64) * table_row
    begin = low // BLOCK_N * BLOCK_N
    page = load_pages(table, begin, low, high, LEFT, PAGE, BLOCK_N)
    end = begin
    state = (most, norm, total, odd_total, page)
    strides = (k_page, k_row, v_page, v_row)
    if not MASKED:
        last_token = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, num_queries - 1)
        clear = begin  # the keys [clear, end) are seen by every row
        if LEFT:
            clear = tl.cdiv(tl.maximum(low, context + last_token - left), BLOCK_N) * BLOCK_N
            clear = tl.minimum(clear, tl.cdiv(high, BLOCK_N) * BLOCK_N)
            state = _sweep(
                state, queries, k, v, table, begin, clear, low, high, row_low, row_high, position, slopes, strides,
                scale, softcap, True, LEFT, PAGE, WIDE, BLOCK_N, WIDTH_K // PACK, PAD_K // PACK, WIDTH_V // PACK,
                PAD_V // PACK, FP8, NATIVE, PAIRS,
            )  # fmt: skip
        end = tl.minimum(high, context + tile * BLOCK_M // GROUP + 1 + bound) // BLOCK_N * BLOCK_N
        end = tl.maximum(end, clear)
        state = _sweep(
            state, queries, k, v, table, clear, end, low, high, row_low, row_high, position, slopes, strides, scale,
            softcap, False, LEFT, PAGE, WIDE, BLOCK_N, WIDTH_K // PACK, PAD_K // PACK, WIDTH_V // PACK, PAD_V // PACK,
            FP8, NATIVE, PAIRS,
        )  # fmt: skip
    state = _sweep(
        state, queries, k, v, table, end, high, low, high, row_low, row_high, position, slopes, strides, scale,
        softcap, True, LEFT, PAGE, WIDE, BLOCK_N, WIDTH_K // PACK, PAD_K // PACK, WIDTH_V // PACK, PAD_V // PACK,
        FP8, NATIVE, PAIRS,
    )  # fmt: skip

    most, norm, total, odd_total, _ = state
    seen = row_high > row_low
    if PAIRS:
        total = tl.reshape(tl.join(total, odd_total), [BLOCK_M, PAD_V])
    if v_scale is not None:
        total *= tl.load(v_scale + kv_head * SCALES[1])
    if parts is None:
        finish(
            out, lse, sinks, most, norm, total, seen, live, first_token + token, head,
            out_token, out_head, lse_head, lse_token, WIDTH_V, PAD_V,
        )  # fmt: skip
    else:
        if slot >= 0:
            place = (slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS
            leave(parts + place * WIDTH_V, parts_lse + place, most, norm, total, seen, live, BLOCK_M, WIDTH_V, PAD_V)
        else:
            finish(
                out, lse, sinks, most, norm, total, seen, live, first_token + token, head,
                out_token, out_head, lse_head, lse_token, WIDTH_V, PAD_V,
            )  # fmt: skip
