"""How the MLA decode kernel is cut for each family of devices: facts as data, and how one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import triton

from portable.layer import Layer
from portable.platform.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One way to cut the work: `programs` run at once on a compute unit, items have `enough` keys where there are."""

    block_m: int  # rows: (query token, head) pairs
    block_n: int  # keys
    num_warps: int
    num_stages: int
    pieces: int = 1  # of the rank
    programs: int = 1
    turns: int = 4  # at most so many times as many items as run at once
    enough: int = 1024
    options: Mapping[str, int] = field(default_factory=dict)  # of the vendor's compiler


def rows_of(layer: Layer, max_query_len: int, most: int) -> int:
    """Rows of a tile, a power of two: all heads for every query token, where they fit.

    >>> layer = Layer.mla(num_heads=16)
    >>> [rows_of(layer, n, 64) for n in (1, 2, 8)]
    [16, 32, 64]
    """
    tokens = 1 if layer.batch_invariant else max_query_len
    return min(max(16, 1 << (layer.num_heads * tokens - 1).bit_length()), most)


# The most rows of a tile, and keys, for rows of at most 1,152 bytes. 64 rows of queries pass through 64 KiB of LDS, all
# that a gfx942 has, and spill 4 registers there beside 16 keys, 12 beside 32. On a gfx90a 32 rows spill 12 when Triton
# 3.6 compiles them, and leave room for one wave a SIMD beside 16 keys; 16 rows for two.
AMD = {"gfx90a": (16, 32), "gfx950": (64, 32)}
AMD_OTHERS = (32, 32)
# Columns of the rank that a wave of 32 lanes has on RDNA, in products of 16 rows and 16 keys. Where each multiplied
# 16 queries of all 512 columns, it spilled 2,417 registers on a gfx1100, which holds them twice, and 207 on a gfx1201;
# with 64 columns a wave, 53 on a gfx1100. float32 has no matrix instruction there: 8 rows beside 16 keys spill 4 when
# Triton 3.6 compiles them.
RDNA_COLUMNS = 32
# With Triton 3.9 (ptxas 13.4, told --regAllocOptLevel=2) tiles of 64 rows and 64 keys of 16 bits spill 164 and 268
# bytes on an sm90, with 3.6 none. What is between was not looked at. Tiles of 32 rows spill nothing: beside the former,
# assembled so, they took on an H200 1.18 to 1.39 of the time of full batches, and 0.45 to 0.72 for one request.
TIGHT = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)


def tile_of(target: Target, layer: Layer, max_query_len: int) -> Tile:
    """The tile for this device, layer and query tokens."""
    size = layer.dtype.itemsize
    row = (padded(layer.kv_lora_rank) + padded(layer.qk_rope_head_dim)) * size  # bytes of a key, as it is multiplied
    if target.matrix == "wmma":
        side = 16 if size == 2 else 8
        rank = padded(layer.kv_lora_rank)
        pieces = max(1, rank // (RDNA_COLUMNS if rank > 64 else 16))
        return Tile(
            block_m=rows_of(layer, max_query_len, side),
            block_n=side,
            num_warps=pieces,
            num_stages=2 if size == 2 else 1,
            pieces=pieces,
        )
    if target.vendor == "amd":
        most, keys = AMD.get(target.arch, AMD_OTHERS) if size == 2 else (16, 16)
        block_m = rows_of(layer, max_query_len, most)
        # 32 keys of 576 bf16 are 36 KiB, and four waves share the output of 16 rows: 32 registers a lane
        return Tile(
            block_m=block_m,
            block_n=keys if row > 576 else 64,
            num_warps=4,
            num_stages=2,
            options={"waves_per_eu": 0, "matrix_instr_nonkdim": 16},
        )
    fp8, hopper = layer.kv_dtype.itemsize < size, target.matrix == "wgmma"
    most, block_n = (64, 64) if size == 2 else (16, 16)
    if TIGHT and hopper and row > 576 and not fp8:
        most = min(most, 32)
    block_m = rows_of(layer, max_query_len, most)
    if target.matrix == "tcgen05" and (block_m == 64 or fp8):
        block_n = min(block_n, 32)  # Triton gives 64 rows more shared memory, 281 KiB; 64 keys of fp8 spill 8 bytes
    # queries, two blocks of keys and weights: on an H100 64 keys took 218 us where 32 took 222, and 16 rows of 4
    # warps as long as of 8, which fp8 takes so as not to spill; of 64 rows, a warpgroup has half of the columns
    while block_n > 16 and (block_m + 2 * block_n) * row + block_m * block_n * size > target.shared_memory:
        block_n //= 2
    while block_m > 16 and (block_m + 2 * block_n) * row + block_m * block_n * size > target.shared_memory:
        block_m //= 2
    stages = 2 if (block_m + 2 * block_n) * row <= target.shared_memory else 1  # float32 on 99 KiB
    stages += not (hopper and block_m == 64)
    stages += hopper and fp8  # 64 rows took 0.90 of the time on an H200, 16 spill 8 bytes less
    return Tile(
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if row > 576 and (block_m > 16 or fp8) else 4,
        num_stages=stages,
        turns=2,
    )


def padded(width: int) -> int:
    """Columns that a product takes for a width: a power of two from 16.

    >>> padded(512), padded(24), padded(8)
    (512, 32, 16)
    """
    return max(16, 1 << (width - 1).bit_length())
