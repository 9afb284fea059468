"""Launches cache.cu: new tokens into pages, and pages into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from weakref import ref

import torch

from portable.backends.digits import Pages, pages_of
from portable.backends.hip.archs import FP8_NAMES, NAMES, on_gpus
from portable.backends.hip.launch import (
    Function,
    Launch,
    Launches,
    addresses,
    checks,
    divide,
    floats,
    items,
    nothing,
    row_strides,
    rows_key,
    scale_step,
)
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors
from portable.ragged import cu_from_lens
from portable.sets import ANY_SIZE

NOTHING = (0,) * 6
ITEMS = "iIiiIiii"
# Of a row that a thread gathers; threads of a block. On an H200, us for 8,192 keys of 8 and of 64 requests: 20.4 and
# 21.3; with 4 chunks 21.8 and 22.6, and with one, in blocks of 256 threads, 21.5 and 23.5.
CHUNKS, THREADS = 2, 128


_Prepared = tuple[  # a NamedTuple would take 0.03 us more to unpack
    Launch,
    int,  # tokens of a block
    Callable[[], torch.Tensor | None],  # K's pages, and V's: a tensor's id, and an address, may have come to others
    Callable[[], torch.Tensor | None],
    int,  # where those start: pages that are given other memory have changed in place
    int,
    int,  # elements of K's, which may grow where they are
    int,  # bytes from the first part of a row of MLA's that is written in two to the second
    tuple[int, ...],  # steps of K's and V's scales, where the cache has them
    Layer | None,  # held, so that its id is no other's
]
UNKNOWN: _Prepared = nothing, 1, nothing, nothing, 0, 0, 0, 0, (), None  # for no pages
_writes: Launches[_Prepared] = Launches()
_gathers: Launches[_Prepared] = Launches()
_alike: Launches[_Prepared] = Launches()  # of both, by how pages lie: engines may cut them from a pool for each call


@cache
def _function(name: str, row: torch.dtype, stored: torch.dtype, **more: int) -> Function:
    fixed = {"write": f"{2 * ITEMS}4q12q6iiIiq3i", "gather": f"{2 * ITEMS}12q6iiIiiq4i"}[name]
    changing = {"write": "7Ni", "gather": "8Ni"}[name]
    return Function("cache", name, changing, fixed, ROW=NAMES[row], STORED=(NAMES | FP8_NAMES)[stored], **more)


def write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KV,
    slot_mapping: torch.Tensor,
    layer: Layer,
    tensors: LayerTensors,
) -> None:
    """Scatter rows to slots; a slot below 0 or past the end writes nothing, or, the latter, ends a debug build.

    For MLA, k is [T, rank + rope] without v, or [T, rank] with the roped part [T, rope] as v.
    """
    k_pages, v_pages = kv
    k_at, v_at = k_pages.data_ptr(), 0 if v_pages is None else v_pages.data_ptr()
    key = id(layer), id(k_pages), rows_key(k), None if v is None else rows_key(v), slot_mapping.dtype
    launch, together, k_known, v_known, k_start, v_start, elements, behind, steps, _ = _writes.known.get(key, UNKNOWN)
    scales = _scales(kv, tensors, layer) if steps else None
    same = k_known() is k_pages and v_known() is v_pages and k_start == k_at and v_start == v_at
    if not same or elements != k_pages.numel() or (scales and steps != _steps(scales)):
        scales = _scales(kv, tensors, layer)
        alike = _laid("write", key, kv, scales)
        known = _for(alike, kv, scales) or _prepare_write(k, v, kv, slot_mapping, layer, scales)
        launch, together, _, _, _, _, _, behind, _, _ = known
        if k.is_cuda:
            _writes.keep(key, known)
            _alike.keep(alike, known)
    tokens = slot_mapping.numel()
    if not tokens:
        return
    k_scale, v_scale = addresses(*scales) if scales else (0, 0)
    v_rows = 0
    if v is not None:
        v_rows, v_at = v.data_ptr(), k_at + behind if v_pages is None else v_at
    launch(-(-tokens // together), k.data_ptr(), v_rows, k_at, v_at, slot_mapping.data_ptr(), k_scale, v_scale, tokens)


Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def _scales(kv: KV, tensors: LayerTensors, layer: Layer) -> Scales:
    """Of K and V where the cache has them; MLA's parts have one."""
    if kv.k.dtype.itemsize > 1:
        return None, None
    k_scale = floats(tensors.k_scale)
    return k_scale, k_scale if layer.family == "mla" else floats(tensors.v_scale)


def _steps(scales: Scales) -> tuple[int, int]:
    return scale_step(scales[0]), scale_step(scales[1])


def _laid(what: str, key: tuple[Any, ...], kv: KV, scales: Scales) -> tuple[Any, ...]:
    """All that a launch follows from: the key, with how pages lie in place of which they are."""
    layer, _, *others = key
    pages = [None if each is None else (each.shape, each.stride(), each.dtype) for each in kv]
    return what, layer, *others, kv.k.get_device(), *pages, _steps(scales)


def _for(alike: tuple[Any, ...], kv: KV, scales: Scales) -> _Prepared | None:
    """A launch for pages that lie so, as one for these."""
    launch, together, _, _, _, _, _, behind, _, layer = _alike.known.get(alike, UNKNOWN)
    return None if layer is None else _prepared(launch, together, behind, kv, scales, layer)


def _prepare_write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KV,
    slot_mapping: torch.Tensor,
    layer: Layer,
    scales: Scales,
) -> _Prepared:
    layout, mla = layer.cache_layout, layer.family == "mla"
    heads, rank = 1 if mla else layer.num_kv_heads, k.shape[-1]
    page_size = kv.k.shape[1] if layout == "strided" else kv.k.shape[3]
    v_pages = kv.k[..., rank:] if mla and v is not None else kv.v
    first = pages_of(kv.k, "k", layout)
    second = None if v is None or v_pages is None else pages_of(v_pages, "k" if mla else "v", layout)
    widths = rank, 0 if v is None else v.shape[-1]
    made = [items(heads, width, k.dtype) for width in widths]
    together = made[0].tokens if v is None else min(each.tokens for each in made)
    fixed = (
        *made[0].numbers(together), *made[1].numbers(together),
        *row_strides(k), *((0, 0) if v is None else row_strides(v)),
        *first.strides, *(NOTHING if second is None else second.strides),
        *_sizes(widths[0], first), *_sizes(widths[1], second),
        *divide(page_size), kv.k.shape[0] * page_size, *_steps(scales),
        slot_mapping.dtype is torch.int64,
    )  # fmt: skip
    launch = _function("write", k.dtype, kv.k.dtype, **checks()).prepare(
        (k, v, kv.k, None if v is None else v_pages, slot_mapping, *scales),
        fixed,
        1 if v is None else 2,
        max(each.slices for each in made),
    )
    return _prepared(launch, together, rank * kv.k.itemsize, kv, scales, layer)


def _prepared(launch: Launch, together: int, behind: int, kv: KV, scales: Scales, layer: Layer) -> _Prepared:
    k, v = kv
    steps = _steps(scales) if k.dtype.itemsize == 1 else ()
    v_known, v_at = (nothing, 0) if v is None else (ref(v), v.data_ptr())
    return launch, together, ref(k), v_known, k.data_ptr(), v_at, k.numel(), behind, steps, layer


def prepare_gather(segment: Segment, layer: Layer) -> torch.Tensor:
    """Where each request's rows start: [n + 1] i32 on the device."""
    return cu_from_lens(segment.seq_lens)


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors, out: KV) -> None:
    """Every request's keys and values in order; rows beyond the last are 0 where host lengths are bounds."""
    (k_pages, v_pages), (k, v) = kv, out
    count, table = k.size(0), segment.block_table
    if not count:
        return
    assert table is not None
    key = id(layer), id(k_pages), v is None, table.stride(), len(segment.host_seq_lens)
    k_at, v_at = k_pages.data_ptr(), 0 if v_pages is None else v_pages.data_ptr()
    launch, together, k_known, v_known, k_start, v_start, elements, _, steps, _ = _gathers.known.get(key, UNKNOWN)
    scales = _scales(kv, tensors, layer) if steps else None
    same = k_known() is k_pages and v_known() is v_pages and k_start == k_at and v_start == v_at
    if not same or elements != k_pages.numel() or (scales and steps != _steps(scales)):
        scales = _scales(kv, tensors, layer)
        alike = _laid("gather", key, kv, scales)
        known = _for(alike, kv, scales) or _prepare_gather(kv, k, v, segment, layer, scales)
        launch, together, *_ = known
        if k.is_cuda:
            _gathers.keep(key, known)
            _alike.keep(alike, known)
    k_scale, v_scale = addresses(*scales) if scales else (0, 0)
    launch(
        -(-count // together), k_at, v_at, k.data_ptr(), 0 if v is None else v.data_ptr(),
        segment.prepared.data_ptr(), table.data_ptr(), k_scale, v_scale, count,
    )  # fmt: skip


def _prepare_gather(
    kv: KV, k: torch.Tensor, v: torch.Tensor | None, segment: Segment, layer: Layer, scales: Scales
) -> _Prepared:
    layout, table = layer.cache_layout, segment.block_table
    assert table is not None
    heads = 1 if layer.family == "mla" else layer.num_kv_heads
    widths = k.shape[-1], 0 if v is None else v.shape[-1]
    first = pages_of(kv.k, "k", layout)
    second = None if kv.v is None else pages_of(kv.v, "v", layout)
    made = [items(heads, width, layer.dtype, CHUNKS, THREADS) for width in widths]
    together = made[0].tokens if v is None else min(each.tokens for each in made)
    fixed = (
        *made[0].numbers(together), *made[1].numbers(together),
        *first.strides, *(NOTHING if second is None else second.strides),
        *_sizes(widths[0], first), *_sizes(widths[1], second),
        *divide(kv.k.shape[1] if layout == "strided" else kv.k.shape[3]), kv.k.shape[0],
        table.stride(0), *_steps(scales), heads, len(segment.seq_lens),
    )  # fmt: skip
    given = kv.k, kv.v, k, v, segment.prepared, table, *scales
    slices = max(each.slices for each in made)
    function = _function("gather", layer.dtype, kv.k.dtype, **checks())
    launch = function.prepare(given, fixed, 1 if v is None else 2, slices, THREADS)
    return _prepared(launch, together, 0, kv, scales, layer)


def _sizes(width: int, pages: Pages | None) -> tuple[int, int, int]:
    return (width, 1, 1) if pages is None else (width, pages.packed_offset, pages.packed_column)


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
