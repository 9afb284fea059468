"""Attention of many query tokens per request, over contiguous K/V and over pages: chunks of prompts.

A tile is `BLOCK_M` rows of one request and one KV head. A row is a (token, query head) pair, the heads that share the
KV head side by side, so K and V are read once for all of them, the diagonal wastes `BLOCK_M / group` tokens and no
more, and any ratio of heads fills its tiles. Keys that all rows of a tile see go through a loop without masks; the
edges of the causal triangle, of a window and of the sequence through a loop with them.

Widths that are no power of two are split in two (192 = 128 + 64, 80 = 64 + 16), so that no product is padded to the
next one. Scores stay in units of log2: scale and softmax are one fused multiply-add and one exp2 per score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable.backends.triton.fp8 import decode
from portable.backends.triton.parts import by_row, cut, joined, scores_of, values_of
from portable.backends.triton.strides import times
from portable.backends.triton.xcd import xcd_order

LOG2E = tl.constexpr(1.4426950408889634)
# Elements from one token to the next of a page or of packed K/V: usually less. Then offsets within a tile are known to
# fit 31 bits, and the compiler uses a scalar base and half the registers for addresses.
FAR = tl.constexpr(1 << 20)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(base, offsets, live, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Rows [n, PAD] of which the first WIDTH columns exist; masked rows and columns are 0, whatever is in memory."""
    columns = tl.arange(0, PAD)
    at = base + (offsets[:, None] + columns[None, :])
    if MASKED and WIDTH != PAD:
        rows = tl.load(at, mask=live[:, None] & (columns[None, :] < WIDTH), other=0)
    elif MASKED:
        rows = tl.load(at, mask=live[:, None], other=0)
    elif WIDTH != PAD:
        rows = tl.load(at, mask=columns[None, :] < WIDTH, other=0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
def _number(stored, DTYPE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """What is stored as numbers of the queries' type; an fp8 value is exact in float16 and bfloat16."""
    if NATIVE is not None:
        number = stored.to(NATIVE, bitcast=True).to(DTYPE)
    elif FP8 is None:
        number = stored.to(DTYPE)
    elif FP8[0] == 2 and not FP8[3]:  # e5m2 is the upper byte of a float16
        number = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        number = decode(stored, FP8[0], FP8[1], FP8[2], FP8[3])
        if tl.bfloat16 == DTYPE:  # the lower half is 0
            number = (number.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        else:
            number = number.to(DTYPE)
    return number


@triton.jit
def _sweep(
    q, q_tail, acc, acc_tail, total, most, k, v, table, begin, end, first_key, last_key, row_first, row_last,
    position, slope, k_page, k_token, v_page, v_token, scale, softcap,
    MASKED: tl.constexpr, LEFT: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr, QK_MAIN: tl.constexpr, QK_TAIL: tl.constexpr, QK_WIDTH: tl.constexpr, V_MAIN: tl.constexpr,
    V_TAIL: tl.constexpr, V_WIDTH: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    HALF_UP: tl.constexpr, EDGE_STAGES: tl.constexpr, SCALAR_PAGE: tl.constexpr,
):  # fmt: skip
    """Keys `begin` to `end`, multiples of BLOCK_N but for the last, onto the running state of a tile."""
    span = tl.arange(0, BLOCK_N)
    for key in tl.range(begin, end, BLOCK_N, num_stages=EDGE_STAGES if MASKED else None):
        keys = key + span
        live = (keys >= first_key) & (keys <= last_key)
        if PAGE is None:
            k_at, k_rows = k + tl.cast(key, tl.int64) * k_token, span * k_token
            v_at, v_rows = v + tl.cast(key, tl.int64) * v_token, span * v_token
        elif PAGE % BLOCK_N == 0:  # the keys are in one page
            page, within = tl.load(table + key // PAGE).to(tl.int64), tl.cast(key % PAGE, tl.int64)
            k_first, v_first = page * k_page + within * k_token, page * v_page + within * v_token
            if SCALAR_PAGE:
                k_at, k_rows, v_at, v_rows = k + k_first, span * k_token, v + v_first, span * v_token
            else:
                k_at, k_rows, v_at, v_rows = k, k_first + span * k_token, v, v_first + span * v_token
        else:
            pages = tl.load(table + keys // PAGE, mask=live, other=0) if MASKED else tl.load(table + keys // PAGE)
            k_at, k_rows = k, pages.to(tl.int64) * k_page + keys % PAGE * k_token
            v_at, v_rows = v, pages.to(tl.int64) * v_page + keys % PAGE * v_token

        main: tl.constexpr = QK_WIDTH if QK_WIDTH < QK_MAIN else QK_MAIN
        k_tile = _number(_load(k_at, k_rows, live, main, QK_MAIN, MASKED), q.dtype, FP8, NATIVE)
        scores = scores_of(q, cut(k_tile, PARTS), None, PARTS)
        if QK_TAIL:
            k_rest = _load(k_at + QK_MAIN, k_rows, live, QK_WIDTH - QK_MAIN, QK_TAIL, MASKED)
            scores = scores_of(q_tail, cut(_number(k_rest, q.dtype, FP8, NATIVE), PARTS), scores, PARTS)
        if PARTS > 1:
            scores = tl.sum(scores, 0)

        # What is left to do to a score is one multiplication, by `factor`, in units of log2.
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends; scale is that of 2x and softcap in units of log2
            scores = softcap - (2 * softcap) / (tl.math.exp2(scores * scale) + 1)
        if ALIBI:
            if not SOFTCAP:
                scores = scores * scale
            scores -= slope[:, None] * tl.abs(position.to(tl.float32)[:, None] - keys.to(tl.float32)[None, :])
        if MASKED:
            seen = keys[None, :] <= row_last[:, None]
            if LEFT:
                seen = seen & (keys[None, :] >= row_first[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.max(scores, 1)
        top = tl.maximum(most, highest if SOFTCAP or ALIBI else highest * scale)
        # a row that has seen nothing yet has no maximum: -inf - -inf would be NaN
        shift = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        if SOFTCAP or ALIBI:
            weights = tl.math.exp2(scores - shift[:, None])
        else:
            weights = tl.math.exp2(scores * scale - shift[:, None])
        fade = tl.math.exp2(most - shift)
        total = total * fade + tl.sum(weights, 1)
        most = top

        v_main: tl.constexpr = V_WIDTH if V_WIDTH < V_MAIN else V_MAIN
        v_tile = _number(_load(v_at, v_rows, live, v_main, V_MAIN, MASKED), q.dtype, FP8, NATIVE)
        if HALF_UP:  # without an instruction for it, rounding ties to even takes 5 instructions a weight; this takes 2
            bits = weights.to(tl.uint32, bitcast=True) + 0x8000
            weights = (bits >> 16).to(tl.uint16).to(q.dtype, bitcast=True)
        else:
            weights = weights.to(q.dtype)
        acc = values_of(weights, cut(v_tile, PARTS), acc * by_row(fade, PARTS), PARTS)
        if V_TAIL:
            v_rest = _load(v_at + V_MAIN, v_rows, live, V_WIDTH - V_MAIN, V_TAIL, MASKED)
            v_rest = cut(_number(v_rest, q.dtype, FP8, NATIVE), PARTS)
            acc_tail = values_of(weights, v_rest, acc_tail * by_row(fade, PARTS), PARTS)
    return acc, acc_tail, total, most


@triton.jit
def _find(cu_seqlens_q, tile, requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(request, tile of the request) of a tile, from lengths on the device: request r starts at tile rows // M + r."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle
        low, high = tl.where(start <= tile, middle, low), tl.where(start <= tile, high, middle)
    return low, tile - (tl.load(cu_seqlens_q + low) * GROUP // BLOCK_M + low)


@triton.jit(
    do_not_specialize=["requests", "tiles", "left", "right", "lse_head", "lse_token", "table_row"],
    do_not_specialize_on_alignment=["lse", "cu_seqlens_q", "seq_lens", "key_starts", "table", "causal"],
)
def attention(
    q, k, v, out, lse, work, cu_seqlens_q, seq_lens, key_starts, table, causal, sinks, slopes, k_scale, v_scale,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head, lse_head, lse_token,
    table_row, requests, tiles, left, right, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, QK_MAIN: tl.constexpr, QK_TAIL: tl.constexpr, QK_WIDTH: tl.constexpr,
    V_MAIN: tl.constexpr, V_TAIL: tl.constexpr, V_WIDTH: tl.constexpr, PARTS: tl.constexpr, LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALE_HEADS: tl.constexpr, NEAR: tl.constexpr, HALF_UP: tl.constexpr,
    EDGE_STAGES: tl.constexpr, SCALAR_PAGE: tl.constexpr, XCDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of one KV head; `work` [tiles, 2] holds (request, tile of the request), heavy ones first, or None."""
    kv_head, tile = xcd_order(tl.program_id(0), KV_HEADS, XCDS, 1)
    if tile >= tiles:
        return
    if work is None:
        request, part = _find(cu_seqlens_q, tile, requests, GROUP, BLOCK_M)
    else:
        request, part = tl.load(work + 2 * tile), tl.load(work + 2 * tile + 1)
    query_start = tl.load(cu_seqlens_q + request)
    query_len = tl.load(cu_seqlens_q + request + 1) - query_start
    if work is None:
        part = tl.cdiv(query_len * GROUP, BLOCK_M) - 1 - part  # heavy ones first
        if part < 0:
            return
    seq_len = tl.load(seq_lens + request)
    q_token, q_head, out_token, out_head = (
        times(q_token, STEP), times(q_head, STEP), times(out_token, STEP), times(out_head, STEP),
    )  # fmt: skip
    k_page, k_head, v_page, v_head = times(k_page, STEP), times(k_head, STEP), times(v_page, STEP), times(v_head, STEP)
    if NEAR:
        k_token, v_token = k_token * STEP, v_token * STEP
        tl.assume(k_token >= 0)
        tl.assume(k_token < FAR)
        tl.assume(v_token >= 0)
        tl.assume(v_token < FAR)
    else:
        k_token, v_token = tl.cast(k_token, tl.int64) * STEP, tl.cast(v_token, tl.int64) * STEP

    rows = part * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    inside = token < query_len
    bound = right
    if causal is not None:
        bound = tl.where(tl.load(causal + request) != 0, 0, right)
    context = seq_len - query_len
    position = context + token
    row_first = tl.maximum(position - left, 0)
    row_last = tl.minimum(position + bound, seq_len - 1)
    # what the first and the last token of the tile see bounds what any row does
    token_0 = part * BLOCK_M // GROUP
    token_1 = tl.minimum((part * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    first_key = tl.maximum(context + token_0 - left, 0)
    last_key = tl.minimum(context + token_1 + bound, seq_len - 1)
    begin = first_key // BLOCK_N * BLOCK_N
    end = tl.maximum(last_key + 1, begin)
    # keys that every row sees
    whole_end = tl.maximum(tl.minimum(context + token_0 + bound + 1, seq_len), 0) // BLOCK_N * BLOCK_N
    whole = tl.maximum(context + token_1 - left, 0) + BLOCK_N - 1
    whole = whole // BLOCK_N * BLOCK_N

    q_at = q + tl.cast(query_start, tl.int64) * q_token
    q_rows = token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    main: tl.constexpr = QK_WIDTH if QK_WIDTH < QK_MAIN else QK_MAIN
    v_main: tl.constexpr = V_WIDTH if V_WIDTH < V_MAIN else V_MAIN
    q_tile = cut(_load(q_at, q_rows, inside, main, QK_MAIN, True), PARTS)
    q_tail, acc_tail = 0.0, 0.0
    if QK_TAIL:
        q_tail = cut(_load(q_at + QK_MAIN, q_rows, inside, QK_WIDTH - QK_MAIN, QK_TAIL, True), PARTS)
    if V_TAIL:
        acc_tail = cut(tl.zeros([BLOCK_M, V_TAIL], tl.float32), PARTS)
    acc = cut(tl.zeros([BLOCK_M, V_MAIN], tl.float32), PARTS)
    if sinks is None:
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:  # one more key, seen by every row, with value 0
        most = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2E
    if k_scale is not None:
        scale *= tl.load(k_scale + (kv_head if SCALE_HEADS else 0)).to(tl.float32)

    k_at, v_at = k + tl.cast(kv_head, tl.int64) * k_head, v + tl.cast(kv_head, tl.int64) * v_head
    if PAGE is None:
        start = tl.load(key_starts + request).to(tl.int64)
        k_at += start * k_token
        v_at += start * v_token
        pages = table
    else:
        pages = table + tl.cast(request, tl.int64) * table_row

    if LEFT:
        edge = tl.minimum(whole, end)
        acc, acc_tail, total, most = _sweep(
            q_tile, q_tail, acc, acc_tail, total, most, k_at, v_at, pages, begin, edge, first_key, last_key, row_first,
            row_last, position, slope, k_page, k_token, v_page, v_token, scale, softcap, True, LEFT, BLOCK_N, PAGE, FP8,
            NATIVE, QK_MAIN, QK_TAIL, QK_WIDTH, V_MAIN, V_TAIL, V_WIDTH, PARTS, SOFTCAP, slopes is not None, HALF_UP,
            EDGE_STAGES, SCALAR_PAGE,
        )  # fmt: skip
        begin = tl.maximum(edge, begin)
    acc, acc_tail, total, most = _sweep(
        q_tile, q_tail, acc, acc_tail, total, most, k_at, v_at, pages, begin, whole_end, first_key, last_key, row_first,
        row_last, position, slope, k_page, k_token, v_page, v_token, scale, softcap, False, LEFT, BLOCK_N, PAGE, FP8,
        NATIVE, QK_MAIN, QK_TAIL, QK_WIDTH, V_MAIN, V_TAIL, V_WIDTH, PARTS, SOFTCAP, slopes is not None, HALF_UP,
        EDGE_STAGES, SCALAR_PAGE,
    )  # fmt: skip
    begin = tl.maximum(begin, whole_end)
    acc, acc_tail, total, most = _sweep(
        q_tile, q_tail, acc, acc_tail, total, most, k_at, v_at, pages, begin, end, first_key, last_key, row_first,
        row_last, position, slope, k_page, k_token, v_page, v_token, scale, softcap, True, LEFT, BLOCK_N, PAGE, FP8,
        NATIVE, QK_MAIN, QK_TAIL, QK_WIDTH, V_MAIN, V_TAIL, V_WIDTH, PARTS, SOFTCAP, slopes is not None, HALF_UP,
        EDGE_STAGES, SCALAR_PAGE,
    )  # fmt: skip

    empty = row_last < row_first
    factor = 1.0 / tl.where(empty, 1.0, total)
    if v_scale is not None:
        factor *= tl.load(v_scale + (kv_head if SCALE_HEADS else 0)).to(tl.float32)
    factor = tl.where(empty, 0.0, factor)
    out_at = out + tl.cast(query_start, tl.int64) * out_token
    at = out_at + (token.to(tl.int64) * out_token + head.to(tl.int64) * out_head)[:, None]
    columns = tl.arange(0, V_MAIN)
    result = (joined(acc, PARTS) * factor[:, None]).to(out.dtype.element_ty)
    tl.store(at + columns[None, :], result, mask=inside[:, None] & (columns[None, :] < v_main))
    if V_TAIL:
        columns = V_MAIN + tl.arange(0, V_TAIL)
        result = (joined(acc_tail, PARTS) * factor[:, None]).to(out.dtype.element_ty)
        tl.store(at + columns[None, :], result, mask=inside[:, None] & (columns[None, :] < V_WIDTH))
    if lse is not None:
        logsum = (most + tl.math.log2(total)) * LN2
        if sinks is None:
            logsum = tl.where(empty, float("-inf"), logsum)
        at = lse + head.to(tl.int64) * lse_head + (tl.cast(query_start, tl.int64) + token) * lse_token
        tl.store(at, logsum, mask=inside)
