"""The tiles of prefill.py: their sizes per architecture, and the order in which a step's tiles are worked on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from portable.backends.triton.launch import Bound
from portable.kernel import Segment
from portable.layer import Layer
from portable.platform.target import Target
from portable.ragged import cdiv, next_power_of_2
from portable.upload import upload

OPEN = 1 << 30  # an open side of a window: further than any key, and no overflow when a position is added


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time, and how it is compiled."""

    rows: int  # (token, head of the group) pairs
    keys: int
    warps: int
    stages: int
    edge_stages: int | None = None  # of the loops with masks; None: as many
    piece: int = 256  # the most columns of K or V in one product; fewer need fewer registers
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler
    parts: int = 1  # of those columns: batches of both products, so that a wave holds the columns of its own only


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A step's tiles."""

    tile: Tile
    target: Target
    tiles: int  # of a KV head; an upper bound where `order` is None
    order: torch.Tensor | None  # [tiles, 2] i32 (request, tile of the request); None: found on the device
    key_starts: torch.Tensor | None  # [n] i32, where a request's rows of contiguous K/V begin; None for pages
    kernels: dict[tuple[object, ...], Bound] = field(default_factory=dict)  # of a step's layers, by their constants


def pieces(width: int, most: int = 256, parts: int = 1) -> tuple[int, int]:
    """The two powers of two that a head width is computed in; the second is 0 where one of up to `most` does as well.

    >>> pieces(192), pieces(80), pieces(128), pieces(120), pieces(24), pieces(128, most=64), pieces(80, parts=4)
    ((128, 64), (64, 16), (128, 0), (128, 0), (32, 0), (64, 64), (128, 0))
    """
    least = 16 * parts
    main = max(least, 1 << (width.bit_length() - 1))
    tail = max(least, next_power_of_2(width - main)) if width > main else 0
    if tail >= main:
        main, tail = 2 * main, 0
    return (main // 2, main // 2) if main > most and not tail else (main, tail)


# Per architecture, by the columns of K and V that a tile computes with (both together), for 2-byte types.
_CDNA = {"matrix_instr_nonkdim": 32, "waves_per_eu": 2}  # two waves a SIMD hide each other's waits: 256 registers each
_WIDE = {"matrix_instr_nonkdim": 16, "waves_per_eu": 2}  # 16 rows a wave
_CDNA3 = {
    128: Tile(128, 64, 4, 2, 1, 256, _CDNA),
    256: Tile(128, 64, 4, 1, 1, 64, _CDNA),
    384: Tile(128, 32, 4, 2, 1, 64, _CDNA),
    512: Tile(128, 64, 8, 1, 1, 128, _WIDE),
}
_CDNA2 = {**_CDNA3, 512: Tile(128, 32, 8, 1, 1, 128, _WIDE)}
_CDNA4 = {
    128: Tile(128, 64, 4, 2, 1, 256, _CDNA),
    256: Tile(128, 64, 4, 1, 1, 64, _CDNA),
    384: Tile(128, 32, 4, 2, 1, 256, _CDNA),
    512: Tile(128, 64, 8, 2, 1, 128, _WIDE),
}
# 256 registers of 32 lanes, where a gfx1100 holds what its products take twice: by rows of all columns, a head of 128
# spilled 105 there, 192/128 with every feature 220, 256 of it 769; 64 rows of those in parts, 221
_RDNA3 = {
    128: Tile(64, 32, 4, 1),
    192: Tile(64, 16, 4, 1),
    256: Tile(64, 16, 8, 1, parts=8),
    512: Tile(32, 16, 8, 1, parts=8),
}
_RDNA4 = {256: Tile(64, 32, 4, 1), 384: Tile(32, 32, 4, 1), 512: Tile(32, 16, 8, 1, parts=8)}
_AMPERE = {256: Tile(128, 64, 8, 2), 512: Tile(64, 32, 4, 2)}
# measured on an H100, bf16 causal, TFLOP/s: d64 458, d128 502 (128 rows of 8 warps: 476), 192/128 345, d256 492
_HOPPER = {256: Tile(64, 64, 4, 3), 384: Tile(128, 64, 8, 3), 512: Tile(128, 64, 8, 2)}
TILES: Mapping[str, Mapping[int, Tile]] = {
    "gfx90a": _CDNA2,
    "gfx942": _CDNA3,
    "gfx950": _CDNA4,
    "gfx1100": _RDNA3,
    "gfx1201": _RDNA4,
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm89": _AMPERE,
    "sm90": _HOPPER,
    "sm100": _HOPPER,
    "sm120": _AMPERE,
}
# architectures whose conversion from float32 to bfloat16 is a sequence of instructions
NO_BF16_CONVERSION = frozenset({"gfx90a", "gfx942", "gfx1100"})
# where memory is copied to LDS directly, a page id that was loaded is in a vector register, and a base address made
# of it costs each copy a loop over its lanes; offsets made of it cost 30 instructions an iteration less
VECTOR_PAGES = frozenset({"gfx950"})
# four waves spill 13 registers there when Triton 3.6 compiles them, at a head of 128
FP8_WARPS = {"gfx90a": 8}


def tile_of(target: Target, layer: Layer, rows: int | None = None) -> Tile:
    """The tile for a layer, cut down to `rows`, the most (token, head) pairs that a request has per KV head."""
    columns = sum(pieces(layer.qk_head_dim)) + sum(pieces(layer.v_head_dim))
    tile = next(tile for most, tile in TILES[target.arch].items() if columns <= most)
    if tile.options and ((layer.v_head_dim > 128 and columns <= 384) or (layer.alibi and columns > 256)):
        # by 32 rows a wave, d192 spilled 94 registers on a gfx950, 85 on a gfx942 with ALiBi; 2 with a copy in flight
        tile = replace(tile, warps=8, stages=1, options=_WIDE)
        # 32 keys of 64 columns are 8 bytes for each lane of 8 waves; of 128, fp8 spilled 22 registers on a gfx90a
        if layer.kv_dtype.itemsize == 2:
            tile = replace(tile, piece=max(tile.piece, 128))
    if target.vendor == "amd" and (layer.softcap is not None or layer.alibi or layer.window[0] is not None):
        tile = replace(tile, keys=min(tile.keys, 32))  # they need registers, and short windows end in fewer masked keys
    if layer.kv_dtype.itemsize == 1:  # without the registers for a copy in flight: bytes become numbers in registers
        tile = replace(tile, keys=min(tile.keys, 32), stages=1 if target.vendor == "amd" else 2)
        tile = replace(tile, warps=FP8_WARPS.get(target.arch, tile.warps))
        if target.arch == "gfx90a" and layer.v_head_dim > 128:  # of 128 rows Triton 3.6 spilled 27 registers there
            tile = replace(tile, rows=64)
    if layer.dtype.itemsize == 4:  # twice the registers and LDS
        if target.matrix == "wmma":  # products of multiply-adds there: by 64 rows d64 spilled 596 registers
            parts = min(8, next_power_of_2(columns // 32))
            return replace(tile, rows=16, keys=8, warps=parts, parts=parts)
        tile = replace(tile, rows=min(tile.rows, 64), keys=32 if columns <= 256 else 16, warps=4, stages=1)
        if target.vendor != "amd":  # without matrix units: a product of float32 is made of multiply-adds there
            return replace(tile, rows=32, warps=8)
        if tile.options and columns > 256:  # by 32 rows a wave, 192/128 spilled 20 registers on a gfx942
            tile = replace(tile, options=_WIDE, piece=min(tile.piece, 128))
    if rows is not None and rows <= 64 and not layer.batch_invariant:
        tile = replace(tile, rows=min(tile.rows, 32 if rows <= 32 else 64), keys=min(tile.keys, 32))
        if tile.parts == 1:
            tile = replace(tile, warps=2 if rows <= 32 else 4)
    return tile


def plan(segment: Segment, layer: Layer, target: Target) -> Work:
    """The tiles of a step, those with most keys first, so that no long one is left for the end.

    Lengths that only the device knows leave the order to the kernel: its programs then find their request by
    bisection, one request after the other, and the number of programs depends on nothing but the number of tokens and
    requests. So it is in a graph that is being captured, which will see other lengths.
    """
    tokens, requests = segment.tokens.stop - segment.tokens.start, len(segment.seq_lens)
    tile = tile_of(target, layer, segment.max_query_len * layer.group)
    contiguous = segment.block_table is None
    if not segment.exact or (segment.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()):
        starts = torch.cumsum(segment.seq_lens, 0, dtype=torch.int32) - segment.seq_lens if contiguous else None
        return Work(tile, target, tokens * layer.group // tile.rows + requests, None, starts)
    order = longest_first(segment, layer, tile.rows)
    arrays: list[npt.NDArray[np.int32]] = [order]
    if contiguous:
        arrays.append(np.cumsum(segment.host_seq_lens, dtype=np.int32) - segment.host_seq_lens)
    there = upload(arrays, segment.seq_lens.device)
    return Work(tile, target, len(order), there[0], there[1] if contiguous else None)


def longest_first(segment: Segment, layer: Layer, rows: int) -> npt.NDArray[np.int32]:
    """[tiles, 2] (request, tile of the request), by falling number of keys."""
    query_lens, seq_lens = segment.host_query_lens.astype(np.int64), segment.host_seq_lens.astype(np.int64)
    counts = cdiv(query_lens * layer.group, rows)
    request = np.repeat(np.arange(counts.size), counts)
    part = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts)
    left, right = (OPEN if side is None else min(side, OPEN) for side in layer.window)
    if segment.causal is not False:  # with a flag per request, which is on the device, as if causal
        right = 0
    context = (seq_lens - query_lens)[request]
    last = np.minimum((part * rows + rows - 1) // layer.group, query_lens[request] - 1)
    end = np.minimum(context + last + right + 1, seq_lens[request])
    keys = end - np.maximum(context + part * rows // layer.group - left, 0)
    by_keys = np.argsort(-keys, kind="stable")
    return np.stack([request[by_keys], part[by_keys]], axis=1).astype(np.int32)
