"""Copying whole pages within a pool, or between two pools of one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.cache import bytes_of
from portable.backends.triton.fp8 import FLAVOURS
from portable.backends.triton.launch import KEPT, Typed, bound, target_of
from portable.kernel import KV, Kernel, Op
from portable.layer import CACHE_LAYOUTS, Layer
from portable.ragged import cdiv, next_power_of_2
from portable.sets import ANY_SIZE


class Tile(NamedTuple):
    elements: int
    warps: int


TILES = {"nvidia": Tile(4096, 4), "amd": Tile(8192, 4)}
DIMS = 4  # inside a page, of the packed layouts


@triton.jit
def _copy(
    source,
    target,
    pages,  # [n, 2]
    num_source,
    num_target,
    source_strides,  # of a page, and inside one
    target_strides,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    come = tl.load(pages + 2 * tl.program_id(0)).to(tl.int64)
    go = tl.load(pages + 2 * tl.program_id(0) + 1).to(tl.int64)
    if (come >= 0) & (come < num_source) & (go >= 0) & (go < num_target):
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = element < SIZES[0] * SIZES[1] * SIZES[2] * SIZES[3]
        last = element % SIZES[3]
        third = element // SIZES[3] % SIZES[2]
        second = element // (SIZES[3] * SIZES[2]) % SIZES[1]
        first = element // (SIZES[3] * SIZES[2] * SIZES[1])
        first, second, third = first.to(tl.int64), second.to(tl.int64), third.to(tl.int64)
        s, t = source_strides, target_strides
        come_at = come * s[0] + (first * s[1] + second * s[2] + third * s[3] + last * s[4])
        go_at = go * t[0] + (first * t[1] + second * t[2] + third * t[3] + last * t[4])
        tl.store(target + go_at, tl.load(source + come_at, inside), inside)


def copy(source: KV, target: KV, pages: torch.Tensor, layer: Layer) -> None:
    """Each pair (from, to) of `pages` [n, 2] int64; one with a page that is not there copies nothing.

    No page may be both read and written: pairs run at the same time.
    """
    count = len(pages)
    for come, go in zip(source, target, strict=True):
        if come is None or go is None or not count:
            continue
        made = _copying(target_of(go).vendor, come.shape, come.stride(), go.shape[0], go.stride())
        made.launch((count, made.blocks), bytes_of(come), bytes_of(go), pages, *made.rest)


class Copying(NamedTuple):
    """What a copy between pools of such sizes and strides launches."""

    launch: Typed
    blocks: int  # of a page
    rest: tuple[Any, ...]  # of the arguments


@lru_cache(KEPT)
def _copying(vendor: str, shape: torch.Size, come: tuple[int, ...], num_target: int, go: tuple[int, ...]) -> Copying:
    sizes, from_strides, to_strides = collapsed(shape[1:], come[1:], go[1:])
    tile, count = TILES[vendor], shape[1:].numel()
    block = min(tile.elements, next_power_of_2(count))
    launch = Typed(bound(_copy, {"SIZES": sizes, "BLOCK": block, "num_warps": tile.warps}))
    return Copying(launch, cdiv(count, block), (shape[0], num_target, (come[0], *from_strides), (go[0], *to_strides)))


def collapsed(
    shape: Sequence[int], come: Sequence[int], go: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes and both strides inside a page, in as few dimensions as both allow; ones in front up to `DIMS`.

    >>> collapsed((16, 2, 64), (128, 64, 1), (128, 64, 1))[0], collapsed((16, 2, 64), (128, 64, 1), (256, 64, 1))[0]
    ((1, 1, 1, 2048), (1, 1, 16, 128))
    """
    dims: list[tuple[int, int, int]] = []
    for size, a, b in zip(shape, come, go, strict=True):
        if dims and dims[-1][1] == size * a and dims[-1][2] == size * b:
            dims[-1] = dims[-1][0] * size, a, b
        else:
            dims.append((size, a, b))
    dims = [(1, 0, 0)] * (DIMS - len(dims)) + dims
    sizes, a_strides, b_strides = zip(*dims, strict=True)
    return sizes, a_strides, b_strides


_CAPS: dict[str, Any] = dict(
    kv_dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16, *FLAVOURS}),
    head_dims=ANY_SIZE,
    page_sizes=ANY_SIZE,
    cache_layouts=CACHE_LAYOUTS,
)
KERNELS = (Kernel(on_gpus(op=Op.CACHE_COPY, name="triton.cache_copy", **_CAPS), copy),)
