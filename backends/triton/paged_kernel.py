"""The device side of `paged`: a tile of rows over a range of its keys, and the second kernel that joins such parts.

Keys outside of an item's range are never read: rows of K and V past its ends repeat its last key, whose score is
masked, so loads need no masks and unused cache may hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable.backends.triton.fp8 import decode

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(base, page, offset, page_stride, row_stride, columns, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Rows [n, PAD] of a cache; `page` is a scalar where all rows are in one page."""
    if page.type.is_block():
        at = base + (page.to(tl.int64) * page_stride + offset * row_stride)[:, None] + columns[None, :]
    else:
        at = base + page.to(tl.int64) * page_stride + ((offset * row_stride)[:, None] + columns[None, :])
    return tl.load(at) if WIDTH == PAD else tl.load(at, mask=columns[None, :] < WIDTH, other=0)


@triton.jit
def _number(stored, like: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """What is stored as numbers to multiply; an fp8 value is exact in float16."""
    if FP8 is None:
        value = stored
    elif NATIVE is not None:
        value = stored.to(NATIVE, bitcast=True).to(like)
    else:
        value = decode(stored, FP8[0], FP8[1], FP8[2], FP8[3]).to(like)
    return value


@triton.jit
def _half(pair, HIGH: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """The low or the high byte of 16 bits, in float16."""
    if FP8[0] == 2 and not FP8[3]:  # e5m2 is the upper half of float16
        value = (pair & -256 if HIGH else pair << 8).to(tl.float16, bitcast=True)
    else:
        byte = (pair >> 8 if HIGH else pair) & 0xFF
        if NATIVE is not None:
            value = byte.to(tl.uint8).to(NATIVE, bitcast=True).to(tl.float16)
        else:  # the exponent as float16 reads it is 15 - bias too small
            bits = (byte & 0x7F) << (10 - FP8[0]) | (byte & 0x80) << 8
            value = bits.to(tl.float16, bitcast=True) * tl.full([], 2.0 ** (15 - FP8[1]), tl.float16)
            no_number = byte == 0x80 if FP8[3] else (byte & 0x7F) > FP8[2]
            value = tl.where(no_number, float("nan"), value)
    return value


@triton.jit
def _known(keys, low, high, MASKED: tl.constexpr, LEFT: tl.constexpr):
    """The keys, and in place of those outside of [low, high) one within."""
    if MASKED:
        keys = tl.minimum(keys, high - 1)
        if LEFT:
            keys = tl.maximum(keys, low)
    return keys


@triton.jit
def _pages(table, key, low, high, LEFT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of `BLOCK_N` keys, or the one of all. Loaded an iteration ahead, by hand: Triton would take
    a load that others wait for into the pipeline, and leave one stage of K and V of four."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + tl.maximum(tl.minimum(key, high - 1), 0).to(tl.uint32) // PAGE)
    else:
        keys = tl.maximum(_known(key + tl.arange(0, BLOCK_N), low, high, True, LEFT), 0)
        page = tl.load(table + keys.to(tl.uint32) // PAGE)
    return page


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
        offset = (_known(keys, low, high, MASKED, LEFT).to(tl.uint32) % PAGE).to(tl.int32)
        if WIDE:
            offset = offset.to(tl.int64)
        k_tile = _rows(k, page, offset, strides[0], strides[1], columns_k, WIDTH_K, PAD_K)
        if PAIRS:
            scores = tl.dot(queries[0], tl.trans(_half(k_tile, False, FP8, NATIVE)))
            scores = tl.dot(queries[1], tl.trans(_half(k_tile, True, FP8, NATIVE)), scores)
        else:
            k_tile = _number(k_tile, queries[0].dtype, FP8, NATIVE)
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
        v_tile = _rows(v, page, offset, strides[2], strides[3], columns_v, WIDTH_V, PAD_V)
        if PAIRS:
            odd_total *= shrink[:, None]
            total = tl.dot(weights, _half(v_tile, False, FP8, NATIVE), total)
            odd_total = tl.dot(weights, _half(v_tile, True, FP8, NATIVE), odd_total)
        else:
            v_tile = _number(v_tile, queries[0].dtype, FP8, NATIVE)
            total = tl.dot(weights, v_tile, total, input_precision="ieee")
        page = _pages(table, key + BLOCK_N, low, high, LEFT, PAGE, BLOCK_N)
    return most, norm, total, odd_total, page


@triton.jit(do_not_specialize=["left", "right"])
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
):
    PACK: tl.constexpr = 2 if PAIRS else 1
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    item = program // KV_HEADS
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
    at = q + (first_token + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + columns[None, :] * PACK
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
    page = _pages(table, begin, low, high, LEFT, PAGE, BLOCK_N)
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
        _finish(
            out, lse, sinks, most, norm, total, seen, live, first_token + token, head,
            out_token, out_head, lse_head, lse_token, WIDTH_V, PAD_V,
        )  # fmt: skip
    else:
        if slot >= 0:
            place = (slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS
            _leave(parts + place * WIDTH_V, parts_lse + place, most, norm, total, seen, live, BLOCK_M, WIDTH_V, PAD_V)
        else:
            _finish(
                out, lse, sinks, most, norm, total, seen, live, first_token + token, head,
                out_token, out_head, lse_head, lse_token, WIDTH_V, PAD_V,
            )  # fmt: skip


@triton.jit
def _leave(
    parts, parts_lse, most, norm, total, seen, live, BLOCK_M: tl.constexpr, WIDTH_V: tl.constexpr, PAD_V: tl.constexpr
):
    """Write the rows of a tile of which some keys were seen, for the second kernel."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, PAD_V)
    total = tl.where(seen[:, None], total / norm[:, None], 0.0)
    mask = live[:, None] & (columns[None, :] < WIDTH_V)
    tl.store(parts + rows[:, None] * WIDTH_V + columns[None, :], total, mask=mask)
    tl.store(parts_lse + rows, tl.where(seen, most + tl.math.log2(norm), float("-inf")), mask=live)


@triton.jit
def _finish(
    out,
    lse,
    sinks,
    most,
    norm,
    total,
    seen,
    live,
    token,
    head,
    out_token,
    out_head,
    lse_head,
    lse_token,
    WIDTH_V: tl.constexpr,
    PAD_V: tl.constexpr,
):
    """Write the rows of a tile of which all keys were seen."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0).to(tl.float32) * LOG2E
        top = tl.maximum(most, sink)
        shrink = tl.math.exp2(most - top)
        norm = norm * shrink + tl.math.exp2(sink - top)
        total *= shrink[:, None]
        most = top
    columns = tl.arange(0, PAD_V)
    total = tl.where(seen[:, None], total / norm[:, None], 0.0)
    at = out + token.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & (columns[None, :] < WIDTH_V))
    if lse is not None:
        found = (most + tl.math.log2(norm)) * LN2
        if sinks is None:
            found = tl.where(seen, found, float("-inf"))
        tl.store(lse + head.to(tl.int64) * lse_head + token.to(tl.int64) * lse_token, found, mask=live)


@triton.jit
def combine_kernel(
    out,
    lse,
    sinks,
    merges,
    counts,
    parts,
    parts_lse,
    out_token,
    out_head,
    lse_head,
    lse_token,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PAD_V: tl.constexpr,
    SPLITS: tl.constexpr,  # parts that are looked at together
    PDL: tl.constexpr,
):
    """One row of a tile that was split: its parts joined, and the sink where there is one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    row = program % ROWS
    kv_head = program // ROWS % KV_HEADS
    merge = program // (ROWS * KV_HEADS)
    there = tl.load(counts + 1)
    first_token = tl.load(merges + merge * 8)
    num_queries = tl.load(merges + merge * 8 + 1)
    tile = tl.load(merges + merge * 8 + 2)
    num_parts = tl.load(merges + merge * 8 + 3)
    slot = tl.load(merges + merge * 8 + 4)
    token, head = (tile * BLOCK_M + row) // GROUP, (tile * BLOCK_M + row) % GROUP + kv_head * GROUP
    if PDL:  # every program, so that the end of this kernel is after that of the first
        tl.extra.cuda.gdc_wait()
    if (merge >= there) | (num_parts == 0) | (token >= num_queries):
        return
    columns = tl.arange(0, PAD_V)
    place = (slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
    parts += place * WIDTH_V
    parts_lse += place
    step: tl.constexpr = KV_HEADS * ROWS
    most = float("-inf")
    norm = 0.0
    if sinks is not None:
        most = tl.load(sinks + head).to(tl.float32) * LOG2E
        norm = 1.0
    total = tl.zeros([PAD_V], tl.float32)
    for first in tl.range(0, num_parts, SPLITS):
        part = first + tl.arange(0, SPLITS)
        live = part < num_parts
        size = tl.load(parts_lse + part * step, mask=live, other=float("-inf"))
        at = parts + (part * (step * WIDTH_V))[:, None] + columns[None, :]
        each = tl.load(at, mask=live[:, None] & (columns[None, :] < WIDTH_V), other=0.0)
        top = tl.maximum(most, tl.max(size, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.math.exp2(most - shift)
        weights = tl.math.exp2(size - shift)
        total = total * shrink + tl.sum(each * weights[:, None], 0)
        norm = norm * shrink + tl.sum(weights, 0)
        most = top
    total = tl.where(norm == 0, 0.0, total / norm)
    at = out + (first_token + token).to(tl.int64) * out_token + head.to(tl.int64) * out_head + columns
    tl.store(at, total.to(out.dtype.element_ty), mask=columns < WIDTH_V)
    if lse is not None:
        found = tl.where(norm == 0, float("-inf"), (most + tl.math.log2(norm)) * LN2)
        tl.store(lse + head.to(tl.int64) * lse_head + (first_token + token).to(tl.int64) * lse_token, found)
