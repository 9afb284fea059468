"""The checks that every run and write make: shapes, dtypes and devices, with the argument named."""

from __future__ import annotations

import torch

from portable.batch import Batch
from portable.cache import cache_shapes
from portable.kernel import KV
from portable.layer import Layer, LayerTensors
from portable.sets import short


def check_run(
    layer: Layer,
    parts: tuple[Batch, ...],
    q: torch.Tensor,
    kv: KV | None,
    new: KV | None,
    tensors: LayerTensors,
    out: torch.Tensor,
) -> None:
    """Raise a ValueError unless the arguments of one run fit the layer, the step and each other."""
    batch = parts[0]
    tokens, heads = batch.padded_tokens, layer.num_heads
    _like("q", q, (tokens, heads, layer.qk_head_dim), layer.dtype, batch.device)
    _like("out", out, (tokens, heads, layer.v_head_dim), layer.dtype, batch.device)
    if new is not None:
        keys = tokens if batch.block_table is not None else int(batch.host_seq_lens[: batch.num_reqs].sum())
        _check_new(layer, new, keys, batch.device)
    if batch.block_table is None:
        if new is None:
            raise ValueError("k and v are None; a batch without a block_table attends to the k and v that run is given")
    elif kv is None:
        raise ValueError("cache is None; a batch with a block_table attends to the pages of the cache")
    else:
        check_cache(layer, kv, batch)
    for name, wanted in (("sinks", layer.sinks), ("alibi", layer.alibi)):
        tensor: torch.Tensor | None = getattr(tensors, name)
        if wanted and tensor is None:
            raise ValueError(f"tensors.{name} is None; the layer has {name}, so each run needs a [{heads}] tensor")
        if tensor is not None:
            if not wanted:
                raise ValueError(f"tensors.{name} is given, but the layer has {name}=False; build the layer with it")
            _like(f"tensors.{name}", tensor, (heads,), None, batch.device)
    _check_scales(layer, tensors, batch.device)


def check_write(layer: Layer, parts: tuple[Batch, ...], new: KV, kv: KV, tensors: LayerTensors) -> None:
    """Raise a ValueError unless the new tokens fit the layer, the batch and the pages."""
    batch = parts[0]
    _check_new(layer, new, batch.padded_tokens, batch.device)
    check_cache(layer, kv, batch)
    _check_scales(layer, tensors, batch.device)


def check_cache(layer: Layer, kv: KV, batch: Batch) -> None:
    """Raise a ValueError unless the pages have the layer's layout, dtype and page size."""
    shapes = cache_shapes(layer, max(1, kv.k.shape[0]), batch.page_size)
    for name, tensor, shape in (("k", kv.k, shapes[0]), ("v", kv.v, shapes[1])):
        if tensor is None or shape is None:
            if (tensor is None) != (shape is None):
                wrong, right = ("missing", "needs it") if tensor is None else ("given", "has none")
                raise ValueError(f"cache {name} is {wrong}; a layer of family {layer.family!r} {right}")
            continue
        _like(f"cache {name}", tensor, shape, layer.kv_dtype, batch.device)
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"cache {name} has a last stride of {tensor.stride(-1)}; elements of a head are contiguous"
            )


def _check_scales(layer: Layer, tensors: LayerTensors, device: torch.device) -> None:
    for name in ("k_scale", "v_scale", "q_scale"):
        scale: torch.Tensor | None = getattr(tensors, name)
        if scale is not None and scale.numel() not in (1, layer.num_kv_heads):
            raise ValueError(
                f"tensors.{name} has {scale.numel()} elements; it is a scalar or one per KV head ({layer.num_kv_heads})"
            )
        if scale is not None and scale.device != device:
            raise ValueError(f"tensors.{name} is on {scale.device}; the batch is on {device}")


def _check_new(layer: Layer, new: KV, tokens: int, device: torch.device) -> None:
    _like("k", new.k, (tokens, layer.num_kv_heads, layer.qk_head_dim), layer.dtype, device)
    if new.v is None:
        raise ValueError("v is None; k and v come together")
    _like("v", new.v, (tokens, layer.num_kv_heads, layer.v_head_dim), layer.dtype, device)


def _like(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {short(tensor.dtype)}; the layer says {short(dtype)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the batch is on {device}")
