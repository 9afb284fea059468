"""Writing new tokens into pages and gathering pages into rows, in every cache layout and type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.digits import pages_of
from portable.backends.triton import fp8
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import launch, target_of
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors
from portable.ragged import cdiv, cu_from_lens, next_power_of_2
from portable.sets import ANY_SIZE


class Tile(NamedTuple):
    rows: int  # of one head of one token
    warps: int


TILES = {"nvidia": Tile(32, 4), "amd": Tile(64, 4)}


@triton.jit
def _address(page, offset, head, column, strides, PACKED_OFFSET: tl.constexpr, PACKED_COLUMN: tl.constexpr):
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
    at = _address(slot // page_size, slot % page_size, head, column, strides, PACKED_OFFSET, PACKED_COLUMN)
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
    layout = layer.cache_layout
    if layer.family == "mla" and v is not None:
        parts = [(k, kv.k[..., : k.shape[-1]], "k"), (v, kv.k[..., k.shape[-1] :], "k")]
    else:
        parts = [(k, kv.k, "k")] + ([] if v is None or kv.v is None else [(v, kv.v, "v")])
    tokens = len(slot_mapping)
    if not tokens:
        return
    tile = TILES[target_of(kv.k).vendor]
    heads = 1 if layer.family == "mla" else layer.num_kv_heads
    pages = [pages_of(tensor, part, layout) for _, tensor, part in parts]
    page_size = kv.k.shape[1] if layout == "strided" else kv.k.shape[3]
    stored = fp8_constants(kv.k.dtype)
    scales = [None if stored is None else tensors.v_scale if part == "v" else tensors.k_scale for *_, part in parts]
    widths = tuple(new.shape[-1] for new, *_ in parts)
    blocks = tuple(next_power_of_2(max(widths) if layer.family != "mla" else width) for width in widths)
    # a latent of 512 and its 64 columns beside it: 32 rows of both took 10.7 us where a copy took 8.5
    rows = tuple(tile.rows if layer.family != "mla" else max(1, tile.rows * 128 // block) for block in blocks)
    launch(
        _write,
        (cdiv(tokens * heads, min(rows)), len(parts)),
        tuple(t for (new, *_), p in zip(parts, pages, strict=True) for t in (new, bytes_of(p.tensor))),
        tuple(scales),
        tuple(0 if s is None or s.numel() == 1 else s.stride(0) for s in scales),
        tuple(s for new, *_ in parts for s in (new.stride(0), new.stride(1) if new.dim() == 3 else 0)),
        tuple(p.strides for p in pages),
        slot_mapping,
        tokens,
        kv.k.shape[0] * page_size,
        page_size,
        HEADS=heads,
        WIDTHS=widths,
        PACKED=tuple(x for p in pages for x in (p.packed_offset, p.packed_column)),
        ROWS=rows,
        BLOCKS=blocks,
        FP8=stored,
        num_warps=tile.warps,
    )


@triton.jit
def _gather_rows(
    pages,
    rows,
    scale,
    scale_stride,
    strides,
    cu_seqlens_k,
    block_table,
    table_stride,
    num_requests,
    num_rows,
    page_size,
    first,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED_OFFSET: tl.constexpr,
    PACKED_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    total = tl.load(cu_seqlens_k + num_requests)
    live = token < total
    # the last request that starts at or before the token, by halving
    request, beyond = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + num_requests
    for _ in tl.static_range(STEPS):
        middle = (request + beyond) // 2
        starts = tl.load(cu_seqlens_k + middle)
        request = tl.where((starts <= token) & (middle > request), middle, request)
        beyond = tl.where(starts <= token, beyond, middle)
    position = token - tl.load(cu_seqlens_k + request)
    page = tl.load(block_table + request.to(tl.int64) * table_stride + position // page_size, live, 0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH)[None, :]
    at = _address(page, position % page_size, head, column, strides, PACKED_OFFSET, PACKED_COLUMN)
    value = tl.load(pages + at, live[:, None] & inside, 0)
    if FP8 is not None:
        value = fp8.decode(value, FP8[0], FP8[1], FP8[2], FP8[3])
        if scale is not None:
            value *= tl.load(scale + head * scale_stride).to(tl.float32)[:, None]
    to = rows + (row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(to, value.to(rows.dtype.element_ty), (token < num_rows)[:, None] & inside)


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "table_stride"],
    do_not_specialize_on_alignment=["block_table"],
)
def _gather(
    parts,  # of K and V, or of one: pages, rows
    scales,
    scale_strides,
    page_strides,
    cu_seqlens_k,
    block_table,
    table_stride,
    num_requests,
    num_rows,
    page_size,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    STEPS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    for i in tl.static_range(len(WIDTHS)):
        if tl.program_id(1) == i:
            _gather_rows(
                parts[2 * i],
                parts[2 * i + 1],
                scales[i],
                scale_strides[i],
                page_strides[i],
                cu_seqlens_k,
                block_table,
                table_stride,
                num_requests,
                num_rows,
                page_size,
                first,
                HEADS,
                WIDTHS[i],
                PACKED[2 * i],
                PACKED[2 * i + 1],
                ROWS,
                BLOCK,
                FP8,
                STEPS,
            )


def prepare_gather(segment: Segment, layer: Layer) -> torch.Tensor:
    """cu_seqlens_k [n + 1] i32 on the device."""
    return cu_from_lens(segment.seq_lens)


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors) -> KV:
    """Every request's keys and values in order; rows beyond the last are 0 where host lengths are bounds."""
    rows, layout = int(segment.host_seq_lens.sum()), layer.cache_layout
    heads = 1 if layer.family == "mla" else layer.num_kv_heads
    given = [(kv.k, "k", tensors.k_scale)] + ([] if kv.v is None else [(kv.v, "v", tensors.v_scale)])
    pages = [pages_of(tensor, part, layout) for tensor, part, _ in given]
    widths = (layer.latent_dim,) if layer.family == "mla" else (layer.qk_head_dim, layer.v_head_dim)[: len(given)]
    shapes = [(rows, width) if layer.family == "mla" else (rows, heads, width) for width in widths]
    made = [torch.empty(shape, dtype=layer.dtype, device=kv.k.device) for shape in shapes]
    if rows:
        tile, stored = TILES[target_of(kv.k).vendor], fp8_constants(kv.k.dtype)
        scales = [None if stored is None else scale for *_, scale in given]
        assert segment.block_table is not None
        launch(
            _gather,
            (cdiv(rows * heads, tile.rows), len(given)),
            tuple(t for p, m in zip(pages, made, strict=True) for t in (bytes_of(p.tensor), m)),
            tuple(scales),
            tuple(0 if s is None or s.numel() == 1 else s.stride(0) for s in scales),
            tuple(p.strides for p in pages),
            segment.prepared,
            segment.block_table,
            segment.block_table.stride(0),
            len(segment.seq_lens),
            rows,
            kv.k.shape[1] if layout == "strided" else kv.k.shape[3],
            HEADS=heads,
            WIDTHS=widths,
            PACKED=tuple(x for p in pages for x in (p.packed_offset, p.packed_column)),
            ROWS=tile.rows,
            BLOCK=next_power_of_2(max(widths)),
            FP8=stored,
            STEPS=max(1, len(segment.seq_lens).bit_length() + 1),
            num_warps=tile.warps,
        )
    return KV(made[0], made[1] if len(made) > 1 else None)


def fp8_constants(dtype: torch.dtype) -> Any:
    """What `fp8` takes for a type; None for a type that is not fp8."""
    return fp8.FLAVOURS.get(dtype)


def bytes_of(pages: torch.Tensor) -> torch.Tensor:
    """fp8 pages as their bytes, which every device can load."""
    return pages.view(torch.uint8) if pages.dtype in fp8.FLAVOURS else pages


def _kernels() -> Iterator[Kernel]:
    shared: dict[str, Any] = dict(
        kv_dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16, *fp8.FLAVOURS}),
        head_dims=ANY_SIZE,
        page_sizes=ANY_SIZE,
        cache_layouts=CACHE_LAYOUTS,
    )
    yield Kernel(on_gpus(op=Op.CACHE_WRITE, name="triton.cache_write", **shared), write)
    yield Kernel(on_gpus(op=Op.CACHE_GATHER, name="triton.cache_gather", **shared), gather, prepare_gather)


KERNELS = tuple(_kernels())
