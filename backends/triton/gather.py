"""Gathering pages into rows, in every cache layout and type."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from portable.backends.digits import digits_of
from portable.backends.triton import fp8
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.cache import CAPS, TILES, Launch, Part, address_of, bytes_of, page_size_of, step_of
from portable.backends.triton.launch import KEPT, Typed, bound, target_of
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cu_from_lens, next_power_of_2


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
    at = address_of(page, position % page_size, head, column, strides, PACKED_OFFSET, PACKED_COLUMN)
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
    """Where each request's rows start: [n + 1] i32 on the device."""
    return cu_from_lens(segment.seq_lens)


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors, out: KV) -> None:
    """Every request's keys and values in order; rows beyond the last are 0 where host lengths are bounds."""
    (k_pages, v_pages), (k, v) = kv, out
    rows = k.size(0)
    if not rows:
        return
    k_scale = v_scale = None
    heads, width = (1, layer.latent_dim) if layer.family == "mla" else (layer.num_kv_heads, layer.qk_head_dim)
    if k_pages.dtype in fp8.FLAVOURS:
        k_scale, v_scale = tensors.k_scale, tensors.v_scale
    parts = [(width, (), k_pages.shape, k_pages.stride(), step_of(k_scale))]
    given: tuple[torch.Tensor, ...] = bytes_of(k_pages), k
    scales: tuple[torch.Tensor | None, ...] = (k_scale,)
    if v_pages is not None and v is not None:
        parts.append((layer.v_head_dim, (), v_pages.shape, v_pages.stride(), step_of(v_scale)))
        given = *given, bytes_of(v_pages), v
        scales = k_scale, v_scale
    table, requests = segment.block_table, len(segment.host_seq_lens)
    assert table is not None
    target, steps = target_of(k_pages), requests.bit_length() + 1
    made = _gathering(target.vendor, target.wave_size, layer.cache_layout, heads, k_pages.dtype, steps, *parts)
    grid = -(-rows * heads // made.rows), len(scales)
    sizes = table.stride(0), requests, rows, *made.sizes
    made.launch(grid, given, scales, *made.constants, segment.prepared, table, *sizes)


@lru_cache(KEPT)
def _gathering(
    vendor: str, wave_size: int, layout: str, heads: int, stored: torch.dtype, steps: int, *parts: Part
) -> Launch:
    tile, widths = TILES[vendor], tuple(width for width, *_ in parts)
    digits = [
        digits_of(sizes, strides, part, layout) for part, (_, _, sizes, strides, _) in zip("kv", parts, strict=False)
    ]
    options = {
        "HEADS": heads,
        "WIDTHS": widths,
        "PACKED": tuple(x for each in digits for x in each[1:]),
        "ROWS": tile.rows,
        "BLOCK": next_power_of_2(max(widths)),
        "FP8": fp8.FLAVOURS.get(stored),
        "STEPS": steps,
        "num_warps": tile.lanes // wave_size,
    }
    constants = tuple(step or 0 for *_, step in parts), tuple(each.strides for each in digits)
    return Launch(Typed(bound(_gather, options)), tile.rows, constants, (page_size_of(parts[0], layout),))


KERNELS = (Kernel(on_gpus(op=Op.CACHE_GATHER, name="triton.cache_gather", **CAPS), gather, prepare_gather),)
