"""Launches cache.cu: new tokens into pages, and pages into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from portable.backends.digits import Pages, pages_of
from portable.backends.hip.archs import FP8_NAMES, NAMES, on_gpus
from portable.backends.hip.launch import Function, Launch, Launches, addresses, divide, items
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors
from portable.ragged import cu_from_lens
from portable.sets import ANY_SIZE

NOTHING = (0,) * 6
ITEMS = "iIiiIiii"


class _Prepared(NamedTuple):
    """A prepared launch, good for the layer and pages that it holds on to or looks at."""

    launch: Launch
    together: int  # tokens of a block
    k_pages: ReferenceType[torch.Tensor]
    v_pages: Callable[[], torch.Tensor | None]
    behind: int  # bytes from the first part of a row of MLA's that is written in two to the second
    scales: tuple[object, ...]
    layer: Layer

    def serves(self, kv: KV, tensors: LayerTensors, layer: Layer) -> bool:
        """An address, and a tensor's id, may have come to others."""
        same = self.k_pages() is kv.k and self.v_pages() is kv.v
        return same and (not self.scales or self.scales == _scale_facts(kv, tensors, layer))


_writes: Launches[_Prepared] = Launches()
_gathers: Launches[_Prepared] = Launches()


def _nothing() -> None:
    """In place of a reference."""


@cache
def _function(name: str, row: torch.dtype, stored: torch.dtype) -> Function:
    fixed = {"write": f"{2 * ITEMS}4q12q6iiIiq3i", "gather": f"{2 * ITEMS}12q6iiIiq4i"}[name]
    changing = {"write": "7Pi", "gather": "8Pi"}[name]
    return Function("cache", name, changing, fixed, ROW=NAMES[row], STORED=(NAMES | FP8_NAMES)[stored])


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
    k_pages, v_pages = kv
    if k.is_contiguous() and (v is None or v.is_contiguous()):  # what strides say too, in a third of the time
        key: tuple[Any, ...] = id(layer), id(k_pages), v is None, slot_mapping.dtype
    else:
        key = id(layer), id(k_pages), k.stride(), None if v is None else v.stride(), slot_mapping.dtype
    known = _writes.known.get(key)
    if known is None or not known.serves(kv, tensors, layer):
        known = _prepare_write(k, v, kv, slot_mapping, layer, tensors)
        if k.is_cuda:
            _writes.keep(key, known)
    tokens = slot_mapping.numel()
    if not tokens:
        return
    launch, together, _, _, behind, scales, _ = known
    at = k_pages.data_ptr()
    k_scale, v_scale = addresses(*_scales(kv, tensors, layer)) if scales else (0, 0)
    v_rows, v_at = 0, 0
    if v is not None:
        v_rows, v_at = v.data_ptr(), at + behind if v_pages is None else v_pages.data_ptr()
    launch(-(-tokens // together), k.data_ptr(), v_rows, at, v_at, slot_mapping.data_ptr(), k_scale, v_scale, tokens)


def _scales(kv: KV, tensors: LayerTensors, layer: Layer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of K and V where the cache has them; MLA's parts have one."""
    if kv.k.dtype.itemsize > 1:
        return None, None
    return tensors.k_scale, tensors.k_scale if layer.family == "mla" else tensors.v_scale


def _scale_facts(kv: KV, tensors: LayerTensors, layer: Layer) -> tuple[object, ...]:
    return tuple(None if scale is None else (scale.shape, scale.stride()) for scale in _scales(kv, tensors, layer))


def _prepare_write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KV,
    slot_mapping: torch.Tensor,
    layer: Layer,
    tensors: LayerTensors,
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
    k_scale, v_scale = _scales(kv, tensors, layer)
    fixed = (
        *made[0].numbers(together), *made[1].numbers(together),
        *_rows(k), *_rows(v),
        *first.strides, *(NOTHING if second is None else second.strides),
        *_sizes(widths[0], first), *_sizes(widths[1], second),
        *divide(page_size), kv.k.shape[0] * page_size, _step(k_scale), _step(v_scale),
        slot_mapping.dtype is torch.int64,
    )  # fmt: skip
    launch = _function("write", k.dtype, kv.k.dtype).prepare(
        (k, v, kv.k, None if v is None else v_pages, slot_mapping, k_scale, v_scale),
        fixed,
        1 if v is None else 2,
        max(each.slices for each in made),
    )
    return _prepared(launch, together, rank * kv.k.itemsize, kv, tensors, layer)


def _prepared(launch: Launch, together: int, behind: int, kv: KV, tensors: LayerTensors, layer: Layer) -> _Prepared:
    scales = _scale_facts(kv, tensors, layer) if kv.k.dtype.itemsize == 1 else ()
    k_ref, v_ref = ref(kv.k), _nothing if kv.v is None else ref(kv.v)
    return _Prepared(launch, together, k_ref, v_ref, behind, scales, layer)


def prepare_gather(segment: Segment, layer: Layer) -> torch.Tensor:
    """cu_seqlens_k [n + 1] i32 on the device."""
    return cu_from_lens(segment.seq_lens)


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors) -> KV:
    """Every request's keys and values in order; rows beyond the last are 0 where host lengths are bounds."""
    rows, heads, v = int(segment.host_seq_lens.sum()), layer.num_kv_heads, None
    facts: dict[str, Any] = {"dtype": layer.dtype, "device": kv.k.device}
    if layer.family == "mla":
        k = torch.empty((rows, layer.latent_dim), **facts)
    else:
        k = torch.empty((rows, heads, layer.qk_head_dim), **facts)
        v = None if kv.v is None else torch.empty((rows, heads, layer.v_head_dim), **facts)
    if not rows:
        return KV(k, v)
    table = segment.block_table
    assert table is not None
    key = id(layer), id(kv.k), kv.v is None, table.stride(0), len(segment.host_seq_lens)
    known = _gathers.known.get(key)
    if known is None or not known.serves(kv, tensors, layer):
        known = _prepare_gather(kv, k, v, segment, layer, tensors)
        if k.is_cuda:
            _gathers.keep(key, known)
    launch, together, _, _, _, scales, _ = known
    k_scale, v_scale = addresses(*_scales(kv, tensors, layer)) if scales else (0, 0)
    v_pages, v_at = (0, 0) if v is None or kv.v is None else (kv.v.data_ptr(), v.data_ptr())
    starts = segment.prepared.data_ptr()
    launch(
        -(-rows // together), kv.k.data_ptr(), v_pages, k.data_ptr(), v_at, starts, table.data_ptr(), k_scale, v_scale,
        rows,
    )  # fmt: skip
    return KV(k, v)


def _prepare_gather(
    kv: KV, k: torch.Tensor, v: torch.Tensor | None, segment: Segment, layer: Layer, tensors: LayerTensors
) -> _Prepared:
    layout, table = layer.cache_layout, segment.block_table
    assert table is not None
    heads = 1 if layer.family == "mla" else layer.num_kv_heads
    widths = k.shape[-1], 0 if v is None else v.shape[-1]
    first = pages_of(kv.k, "k", layout)
    second = None if kv.v is None else pages_of(kv.v, "v", layout)
    k_scale, v_scale = _scales(kv, tensors, layer)
    made = [items(heads, width, layer.dtype) for width in widths]
    together = made[0].tokens if v is None else min(each.tokens for each in made)
    fixed = (
        *made[0].numbers(together), *made[1].numbers(together),
        *first.strides, *(NOTHING if second is None else second.strides),
        *_sizes(widths[0], first), *_sizes(widths[1], second),
        *divide(kv.k.shape[1] if layout == "strided" else kv.k.shape[3]),
        table.stride(0), _step(k_scale), _step(v_scale), heads, len(segment.seq_lens),
    )  # fmt: skip
    given = kv.k, kv.v, k, v, segment.prepared, table, k_scale, v_scale
    slices = max(each.slices for each in made)
    launch = _function("gather", layer.dtype, kv.k.dtype).prepare(given, fixed, 1 if v is None else 2, slices)
    return _prepared(launch, together, 0, kv, tensors, layer)


def _rows(new: torch.Tensor | None) -> tuple[int, int]:
    """The strides of tokens and heads; of a dense tensor those that more tokens or heads would have.

    >>> _rows(torch.zeros(1, 1, 8).as_strided((1, 1, 8), (99, 7, 1))), _rows(torch.zeros(2, 3, 8)[:, :2])
    ((8, 8), (24, 8))
    """
    if new is None:
        return 0, 0
    if new.is_contiguous():
        return new.shape[1:].numel(), new.shape[2] if new.dim() == 3 else 0
    return new.stride(0), new.stride(1) if new.dim() == 3 else 0


def _sizes(width: int, pages: Pages | None) -> tuple[int, int, int]:
    return (width, 1, 1) if pages is None else (width, pages.packed_offset, pages.packed_column)


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
