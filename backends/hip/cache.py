"""Launches cache.cu: new tokens into pages, and pages into rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from portable.backends.digits import Pages, pages_of
from portable.backends.hip.archs import FP8_NAMES, NAMES, on_gpus
from portable.backends.hip.launch import THREADS, Function
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors
from portable.ragged import cdiv, cu_from_lens
from portable.sets import ANY_SIZE

NOTHING = (0,) * 6


@cache
def _function(name: str, row: torch.dtype, stored: torch.dtype) -> Function:
    numbers = {"write": "4q12q8i4iq", "gather": "12q8i2q4i"}[name]
    return Function("cache", name, 8, numbers, ROW=NAMES[row], STORED=(NAMES | FP8_NAMES)[stored])


def write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KV,
    slot_mapping: torch.Tensor,
    layer: Layer,
    tensors: LayerTensors,
) -> None:
    """Scatter rows to slots; a slot below 0 or past the end writes nothing.

    For MLA, k is [T, rank + rope] without v, or [T, rank] with the roped part [T, rope] as v.
    """
    tokens = len(slot_mapping)
    if not tokens:
        return
    layout, mla = layer.cache_layout, layer.family == "mla"
    k_pages, v_pages = kv.k, kv.v
    if mla and v is not None:
        k_pages, v_pages = kv.k[..., : k.shape[-1]], kv.k[..., k.shape[-1] :]
    if v is None or v_pages is None:
        v, v_pages = None, None
    heads = 1 if mla else layer.num_kv_heads
    page_size = kv.k.shape[1] if layout == "strided" else kv.k.shape[3]
    first = pages_of(k_pages, "k", layout)
    second = None if v_pages is None else pages_of(v_pages, "k" if mla else "v", layout)
    fp8 = kv.k.dtype.itemsize == 1
    k_scale = tensors.k_scale if fp8 else None
    v_scale = (k_scale if mla else tensors.v_scale) if fp8 else None
    wide = slot_mapping.dtype is torch.int64
    width = max(k.shape[-1], 0 if v is None else v.shape[-1])
    _function("write", k.dtype, kv.k.dtype)(
        (_blocks(tokens * heads, width, k.dtype), 1 if v is None else 2),
        (
            k, v, k_pages, v_pages, slot_mapping if wide else None, None if wide else slot_mapping, k_scale, v_scale,
        ),
        *_rows(k), *_rows(v),
        *first.strides, *(NOTHING if second is None else second.strides),
        *_sizes(heads, k.shape[-1], first), *_sizes(heads, 0 if v is None else v.shape[-1], second),
        _step(k_scale), _step(v_scale), tokens, page_size, kv.k.shape[0] * page_size,
    )  # fmt: skip


def prepare_gather(segment: Segment, layer: Layer) -> torch.Tensor:
    """cu_seqlens_k [n + 1] i32 on the device."""
    return cu_from_lens(segment.seq_lens)


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors) -> KV:
    """Every request's keys and values in order; rows beyond the last are 0 where host lengths are bounds."""
    rows, layout, mla = int(segment.host_seq_lens.sum()), layer.cache_layout, layer.family == "mla"
    heads = 1 if mla else layer.num_kv_heads
    widths = (layer.latent_dim, 0) if mla else (layer.qk_head_dim, layer.v_head_dim if kv.v is not None else 0)
    made = [
        torch.empty((rows, width) if mla else (rows, heads, width), dtype=layer.dtype, device=kv.k.device)
        for width in widths
        if width
    ]
    k, v = made[0], made[1] if len(made) > 1 else None
    if rows:
        table = segment.block_table
        assert table is not None
        first = pages_of(kv.k, "k", layout)
        second = None if kv.v is None else pages_of(kv.v, "v", layout)
        fp8 = kv.k.dtype.itemsize == 1
        k_scale, v_scale = (tensors.k_scale, tensors.v_scale if v is not None else None) if fp8 else (None, None)
        _function("gather", layer.dtype, kv.k.dtype)(
            (_blocks(rows * heads, max(widths), layer.dtype), len(made)),
            (kv.k, kv.v, k, v, segment.prepared, table, k_scale, v_scale),
            *first.strides, *(NOTHING if second is None else second.strides),
            *_sizes(heads, widths[0], first), *_sizes(heads, widths[1], second),
            table.stride(0), rows, _step(k_scale), _step(v_scale), len(segment.seq_lens),
            kv.k.shape[1] if layout == "strided" else kv.k.shape[3],
        )  # fmt: skip
    return KV(k, v)


def _blocks(rows: int, width: int, dtype: torch.dtype) -> int:
    """A thread takes 16 bytes of a row."""
    return cdiv(rows * cdiv(width * dtype.itemsize, 16), THREADS)


def _rows(new: torch.Tensor | None) -> tuple[int, int]:
    if new is None:
        return 0, 0
    return new.stride(0), new.stride(1) if new.dim() == 3 else 0


def _sizes(heads: int, width: int, pages: Pages | None) -> tuple[int, int, int, int]:
    return (heads, width, 1, 1) if pages is None else (heads, width, pages.packed_offset, pages.packed_column)


def _step(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _kernels() -> Iterator[Kernel]:
    shared: dict[str, Any] = dict(
        kv_dtypes=frozenset({*NAMES, *FP8_NAMES}),
        head_dims=ANY_SIZE,
        page_sizes=ANY_SIZE,
        cache_layouts=CACHE_LAYOUTS,
    )
    yield Kernel(on_gpus(op=Op.CACHE_WRITE, name="hip.cache_write", **shared), write)
    yield Kernel(on_gpus(op=Op.CACHE_GATHER, name="hip.cache_gather", **shared), gather, prepare_gather)


KERNELS = tuple(_kernels())
