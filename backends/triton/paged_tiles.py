"""How the paged kernel is cut for each family of devices: facts as data, and how one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from portable.layer import Layer
from portable.platform.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One way to cut the work.

    `programs` run at once on a compute unit. Items have `enough` keys or more where there are that many, and there
    are at most `turns` times as many as run at once: more items balance ragged batches, fewer save partial results.
    """

    block_n: int  # keys
    num_warps: int
    num_stages: int
    programs: int
    turns: int = 4
    enough: int = 1024
    masked: bool = True  # one loop that masks every tile, not three: short loops, and few scores per thread
    options: Mapping[str, int] = field(default_factory=dict)  # of the vendor's compiler


def rows_of(layer: Layer, max_query_len: int) -> int:
    """Rows of a tile, a power of two from 16 to 128: the heads of a KV head for every query token, where they fit.

    Queries of 32 KiB at most: 128 rows of 256 float32 are 128 KiB, twice the shared memory of a gfx942.

    >>> layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    >>> [rows_of(layer, n) for n in (1, 4, 8, 1000)]
    [16, 16, 32, 128]
    """
    tokens = 1 if layer.batch_invariant else max_query_len
    width = 1 << (max(layer.qk_head_dim, layer.v_head_dim) - 1).bit_length()
    most = min(128, 32768 // (width * layer.dtype.itemsize))
    return min(max(16, 1 << (layer.group * tokens - 1).bit_length()), most)


def tile_of(target: Target, layer: Layer, block_m: int, few: bool = False) -> Tile:
    """The tile for this device, layer and rows; `few`: the tiles of all heads are fewer than half the compute units."""
    # bytes of K and V of a key, as they are multiplied
    row = (layer.qk_head_dim + layer.v_head_dim) * max(layer.kv_dtype.itemsize, layer.dtype.itemsize)
    if target.vendor == "amd":
        options = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16}
        if block_m < 64:
            # Few keys and no copy in flight take few registers, so that 5 waves a SIMD (d128, gfx942: 90 registers)
            # hide each other's waits; 64 keys of 4 waves took 148 for 2 of them, and kept matrix units no busier.
            # 2 waves read 16 bytes a lane: 2 KiB of K
            narrow = min(layer.qk_head_dim, layer.v_head_dim) * layer.kv_dtype.itemsize
            block_n = 16 if narrow >= 128 else 32
            return Tile(block_n=block_n, num_warps=2, num_stages=1, programs=4, options=options)
        # LDS holds one stage of K and V of a workgroup: 64 KiB on gfx942, 2 to 4 workgroups
        block_n = 64 if row <= 512 and block_m <= 64 else 32 if row <= 1024 else 16
        return Tile(block_n=block_n, num_warps=4, num_stages=2, programs=2, masked=False, options=options)
    if block_m >= 64:
        block_n = 64 if row <= 512 else 32
        tile = Tile(block_n=block_n, num_warps=block_m // 16, num_stages=3, programs=1, turns=2, masked=False)
        return fitting(tile, target, layer, block_m)
    if layer.window[0] is None and layer.kv_dtype.itemsize > 1:  # of fp8 they took 94 us, not 64, for 8x8k
        # measured on an H100, us beside those of 64 keys, 4 warps, 4 stages, 2 programs
        if row <= 256:  # d64: 8x8k 56.1 and 58.0, 256x8k 1455 and 1506, but 64x1k 56.5 and 54.6
            return fitting(Tile(block_n=128, num_warps=4, num_stages=4, programs=2), target, layer, block_m)
        # d128: 1x8k 18.9 and 19.9, 8x8k 100.8 and 102.4; two stages of 512 bytes, which rows of 320 are padded to, fit
        if few and row <= 512 and target.shared_memory > 2 * 128 * 512:
            return fitting(Tile(block_n=128, num_warps=8, num_stages=3, programs=1), target, layer, block_m)
    block_n = 64 if row <= 512 else 32 if row <= 1024 else 16
    return fitting(Tile(block_n=block_n, num_warps=4, num_stages=4, programs=2), target, layer, block_m)


def fitting(tile: Tile, target: Target, layer: Layer, block_m: int) -> Tile:
    """The tile, with fewer copies in flight, and then fewer keys, where shared memory does not hold it.

    The 99 KiB of an sm86, sm89 or sm120 hold two copies of 64 keys of d128, not three: 104,448 bytes; nor do they hold
    three of d80, which is padded to as much, or two of 32 keys of d256 beside 64 rows: 102,400 bytes.
    """
    k_width, v_width = (1 << (width - 1).bit_length() for width in (layer.qk_head_dim, layer.v_head_dim))
    row = (k_width + v_width) * max(layer.kv_dtype.itemsize, layer.dtype.itemsize)

    def taken(tile: Tile) -> int:
        weights = tile.block_n if block_m < 128 else 0  # a row; those of 128 rows stay in registers
        return (tile.num_stages - 1) * tile.block_n * row + block_m * (k_width + weights) * layer.dtype.itemsize

    while taken(tile) > target.shared_memory and (tile.num_stages > 2 or tile.block_n > 16):
        fewer = tile.num_stages > 2
        tile = replace(tile, num_stages=tile.num_stages - 1) if fewer else replace(tile, block_n=tile.block_n // 2)
    return tile
