"""The second kernel of both MLA decodes: joins the parts of tiles whose keys were split."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from portable.backends.triton.mla_decode_tiles import padded
from portable.backends.triton.paged_result import join, natural_lse


@triton.jit(do_not_specialize=["lse_head", "lse_token"], do_not_specialize_on_alignment=["lse"])
def combine_mla_kernel(
    out,
    lse,
    merges,
    counts,
    parts,
    parts_lse,
    out_token,
    out_head,
    lse_head,
    lse_token,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLUMNS columns of a row of a tile; a merge is: first query token, queries, tile, parts, first slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    chunk, row = program % CHUNKS, program // CHUNKS % ROWS
    merge = program // (CHUNKS * ROWS)
    there = tl.load(counts + 1)
    first_token = tl.load(merges + merge * 8)
    num_queries = tl.load(merges + merge * 8 + 1)
    tile = tl.load(merges + merge * 8 + 2)
    num_parts = tl.load(merges + merge * 8 + 3)
    slot = tl.load(merges + merge * 8 + 4)
    token, head = (tile * BLOCK_M + row) // HEADS, (tile * BLOCK_M + row) % HEADS
    if PDL:  # every program, so that the end of this kernel is after that of the first
        tl.extra.cuda.gdc_wait()
    if (merge >= there) | (num_parts == 0) | (token >= num_queries):
        return
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    place = slot.to(tl.int64) * ROWS + row
    none, zero = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.float32)
    total, most, norm = join(parts, parts_lse, place, num_parts, columns, none, zero, ROWS, RANK, COLUMNS, SPLITS)
    at = out + (first_token + token).to(tl.int64) * out_token + head.to(tl.int64) * out_head + columns
    tl.store(at, total.to(out.dtype.element_ty), mask=columns < RANK)
    if lse is not None:  # noqa: SIM102 - known when it is compiled
        if chunk == 0:
            found = natural_lse(most, norm)
            tl.store(lse + head.to(tl.int64) * lse_head + (first_token + token).to(tl.int64) * lse_token, found)


# parts of a row from which on: columns of a program, and parts that it looks at together
SHAPES = ((64, 128, 32), (4, 512, 16), (0, 512, 4))


def shape_of(rank: int, parts: int) -> dict[str, Any]:
    """How the rows are cut that have about so many parts.

    One shape for all took 25 us for 128 parts of a row, where this takes 20, or 19 us for 8 parts instead of 17.
    """
    columns, splits = next((columns, splits) for least, columns, splits in SHAPES if parts >= least)
    columns = min(columns, padded(rank))
    return {
        "RANK": rank,
        "COLUMNS": columns,
        "CHUNKS": triton.cdiv(rank, columns),
        "SPLITS": splits,
        "num_warps": max(1, min(4, columns * splits // 1024)),
    }
