"""The device side of `mla_decode`: rows of (query token, head) pairs over a range of latent rows.

A row of the cache is the key of all heads, and its first columns are the value: a tile of it is loaded once, and
multiplied twice. Rows past the ends of an item's range repeat its last one, whose score is masked, so unused cache may
hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable.backends.triton.paged_load import load_pages, number
from portable.backends.triton.paged_result import finish, leave
from portable.backends.triton.parts import by_row, cut, joined, scores_of, values_of


@triton.jit
def _columns(at, columns, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """A tile [n, PAD] of rows that begin at `at`."""
    where = at[:, None] + columns[None, :]
    return tl.load(where) if WIDTH == PAD else tl.load(where, mask=columns[None, :] < WIDTH, other=0)


@triton.jit
def _pairs(tile, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Query token and head of each row of a tile."""
    if ROWS > HEADS and BLOCK_M % HEADS == 0:  # a lane's rows are then one number and constants, and one register
        row = tl.arange(0, BLOCK_M)
        token, head = tile * (BLOCK_M // HEADS) + row // HEADS, row % HEADS
    else:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token, head = row // HEADS, row % HEADS
    return token, head


@triton.jit(
    do_not_specialize=["lse_head", "lse_token", "table_row"],  # they vary from step to step
    do_not_specialize_on_alignment=["lse", "causal", "table"],
)
def attend_mla_kernel(
    q,
    k,
    out,
    lse,
    k_scale,
    causal,
    table,
    items,
    counts,
    parts,
    parts_lse,
    scale,
    q_token,
    q_head,
    k_page,
    k_row,
    out_token,
    out_head,
    lse_head,
    lse_token,
    table_row,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,  # None: a tensor says it for each request
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,  # an offset within a page is past 32 bits
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,  # of the rank; see `parts`
    RANK: tl.constexpr,
    PAD_V: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,  # the type with which Triton reads FP8, where the device has it
    PDL: tl.constexpr,  # programmatic dependent launch: start while the kernel before is running, and wait for its end
):
    item = tl.program_id(0)
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

    token, head = _pairs(tile, HEADS, ROWS, BLOCK_M)
    live = token < num_queries
    row_high = tl.zeros([BLOCK_M], tl.int32) + high
    if CAUSAL is None:
        row_high = tl.where(tl.load(causal + request) != 0, tl.minimum(high, context + token + 1), row_high)
    elif CAUSAL:
        row_high = tl.minimum(high, context + token + 1)
    row_high = tl.where(live, row_high, 0)

    columns, rope_columns = tl.arange(0, PAD_V), tl.arange(0, PAD_ROPE)
    at = q + ((first_token + token).to(tl.int64) * q_token + head.to(tl.int64) * q_head)[:, None]
    latent_queries = tl.load(at + columns[None, :], mask=live[:, None] & (columns[None, :] < RANK), other=0)
    at += RANK + rope_columns[None, :]
    rope_queries = tl.load(at, mask=live[:, None] & (rope_columns[None, :] < ROPE), other=0)
    if k_scale is not None:
        scale *= tl.load(k_scale)

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    latent_queries = cut(latent_queries, PIECES)
    total = cut(tl.zeros([BLOCK_M, PAD_V], tl.float32), PIECES)
    table += request.to(tl.int64) * table_row
    begin = low // BLOCK_N * BLOCK_N
    page = load_pages(table, begin, low, high, False, PAGE, BLOCK_N)
    for key in tl.range(begin, high, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        offset = (tl.minimum(keys, high - 1).to(tl.uint32) % PAGE).to(tl.int32)
        if WIDE:
            offset = offset.to(tl.int64)
        if PAGE % BLOCK_N == 0:  # a scalar, so that offsets of lanes stay within 32 bits
            begins = k + page.to(tl.int64) * k_page + offset * k_row
        else:
            begins = k + (page.to(tl.int64) * k_page + offset * k_row)
        latent = _columns(begins, columns, RANK, PAD_V)
        rope = _columns(begins, RANK + rope_columns, RANK + ROPE, RANK + PAD_ROPE)
        latent = cut(number(latent, latent_queries.dtype, FP8, NATIVE), PIECES)
        rope = number(rope, rope_queries.dtype, FP8, NATIVE)
        scores = tl.dot(rope_queries, tl.trans(rope), input_precision="ieee")
        if PIECES == 1:
            scores = scores_of(latent_queries, latent, scores, PIECES) * scale
        else:
            scores = (scores + tl.sum(scores_of(latent_queries, latent, None, PIECES), 0)) * scale
        scores = tl.where(keys[None, :] < row_high[:, None], scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet: -inf - -inf would be NaN
        weights = tl.math.exp2(scores - shift[:, None])
        shrink = tl.math.exp2(most - shift)
        norm = norm * shrink + tl.sum(weights, 1)
        most = top
        total = values_of(weights.to(latent.dtype), latent, total * by_row(shrink, PIECES), PIECES)
        page = load_pages(table, key + BLOCK_N, low, high, False, PAGE, BLOCK_N)

    total = joined(total, PIECES)
    if ROWS > HEADS or BLOCK_M == 64 or FP8 is not None:  # read again: to keep them, an sm90 spilled 4 to 40 bytes
        token, head = _pairs(tl.load(items + item * 8 + 4, volatile=True), HEADS, ROWS, BLOCK_M)
        live = token < num_queries
        first_token = tl.load(items + item * 8, volatile=True)
        slot = tl.load(items + item * 8 + 7, volatile=True)
    seen = row_high > low
    if k_scale is not None:
        total *= tl.load(k_scale)
    if parts is not None:  # noqa: SIM102 - known when it is compiled
        if slot >= 0:
            place = slot.to(tl.int64) * ROWS
            leave(parts + place * RANK, parts_lse + place, most, norm, total, seen, live, BLOCK_M, RANK, PAD_V)
            return
    finish(
        out, lse, None, most, norm, total, seen, live, first_token + token, head,
        out_token, out_head, lse_head, lse_token, RANK, PAD_V,
    )  # fmt: skip
