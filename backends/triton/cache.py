"""Writing new tokens into pages, in every cache layout and type."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.digits import digits_of
from portable.backends.triton import fp8
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import KEPT, Typed, bound, target_of
from portable.kernel import KV, Kernel, Op
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors
from portable.ragged import next_power_of_2
from portable.sets import ANY_SIZE


class Tile(NamedTuple):
    rows: int  # of one head of one token
    lanes: int  # of four waves of 32 a gfx1100's gather of latents held 512 columns each, and spilled 16 registers


TILES = {"nvidia": Tile(32, 128), "amd": Tile(64, 256)}

# of K or V: width, strides of rows, sizes and strides of pages, and from a head's scale to the next (None: no scale)
Part = tuple[int, tuple[int, ...], torch.Size, tuple[int, ...], int | None]


class Launch(NamedTuple):
    """What parts launch; all but tensors, and numbers that differ from step to step."""

    launch: Typed
    rows: int  # of a program
    constants: tuple[Any, ...]  # in the kernel's order: strides of scales, of rows where they are read, of pages
    sizes: tuple[int, ...]  # tokens of all pages where they are written, and of one


@triton.jit
def address_of(page, offset, head, column, strides, PACKED_OFFSET: tl.constexpr, PACKED_COLUMN: tl.constexpr):
    """Elements from the start of the pool, int64: 65,536 pages of 32 KiB are past 2**31."""
    row = page * strides[0] + (offset // PACKED_OFFSET) * strides[1] + head.to(tl.int64) * strides[3]
    if PACKED_OFFSET > 1:
        row += (offset % PACKED_OFFSET) * strides[2]
    inner = (column // PACKED_COLUMN) * strides[4]
    if PACKED_COLUMN > 1:
        inner += (column % PACKED_COLUMN) * strides[5]
    return row[:, None] + inner[None, :]


@triton.jit
def _write_rows(
    new,
    pages,
    slots,
    scale,
    scale_stride,
    new_token,
    new_head,
    strides,
    num_tokens,
    capacity,
    page_size,
    first,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED_OFFSET: tl.constexpr,
    PACKED_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token, token < num_tokens, -1).to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    slot = tl.where(live, slot, 0)
    column = tl.arange(0, BLOCK)
    inside = live[:, None] & (column < WIDTH)[None, :]
    source = token.to(tl.int64) * new_token + head.to(tl.int64) * new_head
    value = tl.load(new + source[:, None] + column[None, :], inside, 0.0)
    if FP8 is not None:
        value = value.to(tl.float32)
        if scale is not None:
            value = tl.div_rn(
                value, tl.load(scale + head * scale_stride).to(tl.float32)[:, None] + tl.zeros_like(value)
            )
        stored = fp8.encode(value, FP8[0], FP8[1], FP8[2], FP8[3])
    else:
        stored = value.to(pages.dtype.element_ty)
    at = address_of(slot // page_size, slot % page_size, head, column, strides, PACKED_OFFSET, PACKED_COLUMN)
    tl.store(pages + at, stored, inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write(
    parts,  # of K and V, or of one: new rows, pages
    scales,
    scale_strides,
    new_strides,  # token, head of each
    page_strides,  # six of each
    slots,
    num_tokens,
    capacity,
    page_size,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,
    PACKED: tl.constexpr,  # offset, column of each
    ROWS: tl.constexpr,  # of each, by its width
    BLOCKS: tl.constexpr,
    FP8: tl.constexpr,
):
    for i in tl.static_range(len(WIDTHS)):
        if tl.program_id(1) == i:
            _write_rows(
                parts[2 * i],
                parts[2 * i + 1],
                slots,
                scales[i],
                scale_strides[i],
                new_strides[2 * i],
                new_strides[2 * i + 1],
                page_strides[i],
                num_tokens,
                capacity,
                page_size,
                tl.program_id(0) * ROWS[i],
                HEADS,
                WIDTHS[i],
                PACKED[2 * i],
                PACKED[2 * i + 1],
                ROWS[i],
                BLOCKS[i],
                FP8,
            )


def write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KV,
    slot_mapping: torch.Tensor,
    layer: Layer,
    tensors: LayerTensors,
) -> None:
    """Scatter rows to slots; a slot below 0 or past the end writes nothing.

    For MLA, k is [T, rank + rope] without v, or [T, rank] with the roped part [T, rope] as v: no tensor holds both.
    """
    tokens = slot_mapping.numel()
    if not tokens:
        return
    k_pages, v_pages = kv
    mla, k_scale, v_scale = layer.family == "mla", None, None
    if k_pages.dtype in fp8.FLAVOURS:
        k_scale = tensors.k_scale
        v_scale = k_scale if mla else tensors.v_scale
    heads, first = 1 if mla else layer.num_kv_heads, bytes_of(k_pages)
    parts = [(k.shape[-1], k.stride(), k_pages.shape, k_pages.stride(), step_of(k_scale))]
    given: tuple[torch.Tensor, ...] = k, first
    scales: tuple[torch.Tensor | None, ...] = (k_scale,)
    if v is not None and (mla or v_pages is not None):
        pages = k_pages if v_pages is None else v_pages
        parts.append((v.shape[-1], v.stride(), pages.shape, pages.stride(), step_of(v_scale)))
        given = k, first, v, first[..., k.shape[-1] :] if mla else bytes_of(pages)
        scales = k_scale, v_scale
    target = target_of(k_pages)
    made = _writing(target.vendor, target.wave_size, layer.cache_layout, mla, heads, k_pages.dtype, *parts)
    grid = -(-tokens * heads // made.rows), len(scales)
    made.launch(grid, given, scales, *made.constants, slot_mapping, tokens, *made.sizes)


@lru_cache(KEPT)
def _writing(
    vendor: str, wave_size: int, layout: str, mla: bool, heads: int, stored: torch.dtype, *parts: Part
) -> Launch:
    tile, widths = TILES[vendor], tuple(width for width, *_ in parts)
    digits = [
        digits_of(sizes, strides, "v" if i and not mla else "k", layout)
        for i, (_, _, sizes, strides, _) in enumerate(parts)
    ]
    blocks = tuple(next_power_of_2(width if mla else max(widths)) for width in widths)
    # a latent of 512 and its 64 columns beside it: 32 rows of both took 10.7 us where a copy took 8.5
    rows = tuple(max(1, tile.rows * 128 // block) if mla else tile.rows for block in blocks)
    options = {
        "HEADS": heads,
        "WIDTHS": widths,
        "PACKED": tuple(x for each in digits for x in each[1:]),
        "ROWS": rows,
        "BLOCKS": blocks,
        "FP8": fp8.FLAVOURS.get(stored),
        "num_warps": tile.lanes // wave_size,
    }
    constants = (
        tuple(step or 0 for *_, step in parts),
        tuple(s for _, strides, *_ in parts for s in (strides[0], strides[1] if len(strides) == 3 else 0)),
        tuple(each.strides for each in digits),
    )
    page_size = page_size_of(parts[0], layout)
    return Launch(Typed(bound(_write, options)), min(rows), constants, (parts[0][2][0] * page_size, page_size))


def page_size_of(part: Part, layout: str) -> int:
    return part[2][1 if layout == "strided" else 3]


def step_of(scale: torch.Tensor | None) -> int | None:
    """From a head's scale to the next one's: 0 where they share one, None where there is none."""
    return None if scale is None else 0 if scale.numel() == 1 else scale.stride(0)


def bytes_of(pages: torch.Tensor) -> torch.Tensor:
    """fp8 pages as their bytes, which every device can load."""
    return pages.view(torch.uint8) if pages.dtype in fp8.FLAVOURS else pages


CAPS: dict[str, Any] = dict(  # of what reads or writes pages alone
    kv_dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16, *fp8.FLAVOURS}),
    head_dims=ANY_SIZE,
    page_sizes=ANY_SIZE,
    cache_layouts=CACHE_LAYOUTS,
)
KERNELS = (Kernel(on_gpus(op=Op.CACHE_WRITE, name="triton.cache_write", **CAPS), write),)
