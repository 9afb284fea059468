"""How the paged kernel writes results: of whole tiles, of parts, and, by a second kernel, of parts that are joined."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def leave(
    parts, parts_lse, most, norm, total, seen, live, BLOCK_M: tl.constexpr, WIDTH_V: tl.constexpr, PAD_V: tl.constexpr
):
    """Write the rows of a tile of which some keys were seen, for the second kernel."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, PAD_V)
    total = tl.where(seen[:, None], total / norm[:, None], 0.0)
    mask = live[:, None] & (columns[None, :] < WIDTH_V)
    tl.store(parts + rows[:, None] * WIDTH_V + columns[None, :], total, mask=mask)
    tl.store(parts_lse + rows, tl.where(seen, most + tl.math.log2(norm), float("-inf")), mask=live)


@triton.jit
def finish(
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
        shift = tl.where(top == float("-inf"), 0.0, top)  # a sink of -inf, and no key: -inf - -inf would be NaN
        shrink = tl.math.exp2(most - shift)
        norm = norm * shrink + tl.math.exp2(sink - shift)
        total *= shrink[:, None]
        most = top
    columns = tl.arange(0, PAD_V)
    total = tl.where(seen[:, None], total / norm[:, None], 0.0)
    at = out + (token.to(tl.int64) * out_token + head.to(tl.int64) * out_head)[:, None] + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & (columns[None, :] < WIDTH_V))
    if lse is not None:
        found = (most + tl.math.log2(norm)) * LN2
        if sinks is None:
            found = tl.where(seen, found, float("-inf"))
        tl.store(lse + head.to(tl.int64) * lse_head + token.to(tl.int64) * lse_token, found, mask=live)


@triton.jit
def join(
    parts,
    parts_lse,
    place,
    num_parts,
    columns,
    most,
    norm,
    STEP: tl.constexpr,  # rows from one part to the next
    WIDTH_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,  # parts that are looked at together
):
    """Some columns of a row, from the parts that `leave` wrote, and what its LSE is of; both begin with the sink's."""
    total = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, num_parts, SPLITS):
        part = first + tl.arange(0, SPLITS)
        live = part < num_parts
        size = tl.load(parts_lse + place + part * STEP, mask=live, other=float("-inf"))
        at = parts + place * WIDTH_V + (part * (STEP * WIDTH_V))[:, None] + columns[None, :]
        each = tl.load(at, mask=live[:, None] & (columns[None, :] < WIDTH_V), other=0.0)
        top = tl.maximum(most, tl.max(size, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.math.exp2(most - shift)
        weights = tl.math.exp2(size - shift)
        total = total * shrink + tl.sum(each * weights[:, None], 0)
        norm = norm * shrink + tl.sum(weights, 0)
        most = top
    return tl.where(norm == 0, 0.0, total / norm), most, norm


@triton.jit
def natural_lse(most, norm):
    """The LSE of a row whose scores are in base 2; -inf where it saw no key."""
    return tl.where(norm == 0, float("-inf"), (most + tl.math.log2(norm)) * LN2)


@triton.jit
def _merge(merges, index, PER_MERGE: tl.constexpr):
    """First query token, queries, tile, parts and first slot of the merge that a row belongs to."""
    at = merges + index // PER_MERGE * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit(do_not_specialize=["lse_head", "lse_token"], do_not_specialize_on_alignment=["lse"])
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
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of tiles that were split, their parts joined, and the sink where there is one.

    A program takes a row, then the one that is as many rows further as there are programs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    step: tl.constexpr = KV_HEADS * ROWS
    begin = tl.program_id(0)
    there = tl.load(counts + 1) * step
    first_token, num_queries, tile, num_parts, slot = _merge(merges, begin, step)
    if PDL:  # every program, so that the end of this kernel is after that of the first
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, PAD_V)
    for index in tl.range(begin, there, tl.num_programs(0), num_stages=1):
        row, kv_head = index % ROWS, index // ROWS % KV_HEADS
        pair = tile * BLOCK_M + row
        token, head = pair // GROUP, pair % GROUP + kv_head * GROUP
        if (num_parts > 0) & (token < num_queries):
            place = (slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
            most, norm = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.float32)
            if sinks is not None:
                most, norm = tl.load(sinks + head).to(tl.float32) * LOG2E, norm + 1
            total, most, norm = join(
                parts, parts_lse, place, num_parts, columns, most, norm, step, WIDTH_V, PAD_V, SPLITS
            )
            at = out + (first_token + token).to(tl.int64) * out_token + head.to(tl.int64) * out_head + columns
            tl.store(at, total.to(out.dtype.element_ty), mask=columns < WIDTH_V)
            if lse is not None:
                at = lse + head.to(tl.int64) * lse_head + (first_token + token).to(tl.int64) * lse_token
                tl.store(at, natural_lse(most, norm))
        following = tl.minimum(index + tl.num_programs(0), there - 1)
        first_token, num_queries, tile, num_parts, slot = _merge(merges, following, step)
