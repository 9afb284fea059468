"""The checks that every run and write make: shapes, dtypes and devices, with the argument named.

Strides are not checked but brought to what kernels read, by `rows` and `flat`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from portable.batch import Batch
from portable.cache import cache_shapes
from portable.kernel import KV
from portable.layer import Layer, LayerTensors
from portable.mamba import MambaPlan
from portable.sets import short
from portable.states import SsmTensors

_of = attrgetter("shape", "dtype", "device")
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def facts(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What the checks look at, hashable: equal facts and the same step need no second look."""
    return tuple([None if each is None else _of(each) for each in tensors])


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same with the elements of the last dimension side by side, in a copy where they are not.

    >>> rows(torch.zeros(3, 4).T).stride(), rows(torch.zeros(8, 4)[::2]).stride()
    ((3, 1), (8, 1))
    """
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same with all elements side by side, in one dimension at most; an expanded tensor is a copy.

    >>> flat(torch.zeros(1).expand(4)).stride(), flat(torch.zeros(1, 4)).shape
    ((1,), torch.Size([4]))
    """
    if tensor is None or (tensor.dim() <= 1 and tensor.is_contiguous()):
        return tensor
    return tensor.reshape(-1).contiguous()


def step_facts(batch: Batch) -> tuple[Any, ...]:
    """What the checks look at in a step."""
    paged = batch.block_table is not None
    keys = 0 if paged else int(batch.host_seq_lens[: batch.num_reqs].sum())
    return batch.padded_tokens, batch.page_size, paged, keys, batch.device


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
    _like_out(out, (tokens, heads, layer.v_head_dim), layer.dtype, batch.device)
    if new is not None:
        keys = tokens if batch.block_table is not None else int(batch.host_seq_lens[: batch.num_reqs].sum())
        _check_new(layer, new, keys, batch.device)
    if batch.block_table is None:
        if new is None:
            raise ValueError("k and v are None; a batch without a block_table attends to the k and v that run is given")
    elif kv is None:
        raise ValueError("cache is None; a batch with a block_table attends to the pages of the cache")
    else:
        check_cache(layer, kv, batch.page_size, batch.device)
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
    check_cache(layer, kv, batch.page_size, batch.device)
    _check_scales(layer, tensors, batch.device)


def check_cache(layer: Layer, kv: KV, page_size: int, device: torch.device) -> None:
    """Raise a ValueError unless the pages have the layer's layout, dtype and page size."""
    shapes = cache_shapes(layer, max(1, kv.k.shape[0]), page_size)
    for name, tensor, shape in (("k", kv.k, shapes[0]), ("v", kv.v, shapes[1])):
        if tensor is None or shape is None:
            if (tensor is None) != (shape is None):
                wrong, right = ("missing", "needs it") if tensor is None else ("given", "has none")
                raise ValueError(f"cache {name} is {wrong}; a layer of family {layer.family!r} {right}")
            continue
        _like(f"cache {name}", tensor, shape, layer.kv_dtype, device)
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
        if scale is not None:
            _check_scale_dtype(layer, name, scale)


def _check_scale_dtype(layer: Layer, name: str, scale: torch.Tensor) -> None:
    if layer.dtype is not torch.float64 and scale.dtype not in SCALES:
        raise ValueError(f"tensors.{name} is {short(scale.dtype)}; it must be {short(torch.float32)}")


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
    if dtype is None and not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} is {short(tensor.dtype)}; it must hold numbers of floating point")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {short(tensor.dtype)}; the layer says {short(dtype)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the batch is on {device}")


def _like_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    _like("out", out, shape, dtype, device)
    extent = 1  # of the dimensions so far, the one of the smallest stride first
    for step, size in sorted((step, size) for step, size in zip(out.stride(), shape, strict=True) if size > 1):
        if step >= extent or not out.numel():
            extent += step * (size - 1)
            continue
        raise ValueError(
            f"out has strides {list(out.stride())}; its rows share memory or lie among each other, and each is written"
        )


def check_mla_run(
    layer: Layer,
    batch: Batch,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    pages: torch.Tensor | None,
    weights: tuple[torch.Tensor, torch.Tensor],
    tensors: LayerTensors,
    out: torch.Tensor,
) -> None:
    """Raise a ValueError unless the arguments of one run of MLA fit the layer, the step and each other."""
    q_nope, q_pe, kv_c, k_pe = new
    (w_uk, w_uv), tokens, heads, device = weights, batch.padded_tokens, layer.num_heads, batch.device
    nope, rope, rank, v_dim = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank, layer.v_head_dim
    _like("q_nope", q_nope, (tokens, heads, nope), layer.dtype, device)
    _like("q_pe", q_pe, (tokens, heads, rope), layer.dtype, device)
    _like_out(out, (tokens, heads, v_dim), layer.dtype, device)
    _like("weights.w_uk", w_uk, (heads, nope, rank), layer.dtype, device)
    _like("weights.w_uv", w_uv, (heads, v_dim, rank), layer.dtype, device)
    if batch.block_table is not None and pages is None:
        raise ValueError("cache is None; a batch with a block_table attends to the pages of the cache")
    check_latents(layer, batch, kv_c, k_pe, None if batch.block_table is None else pages, tensors)


def check_latents(
    layer: Layer,
    batch: Batch,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    pages: torch.Tensor | None,
    tensors: LayerTensors,
) -> None:
    """Raise a ValueError unless the new tokens' latents fit the layer, the batch and the pages."""
    _like("kv_c", kv_c, (batch.padded_tokens, layer.kv_lora_rank), layer.dtype, batch.device)
    if k_pe is None:
        raise ValueError("k_pe is None; kv_c and k_pe come together")
    _like("k_pe", k_pe, (batch.padded_tokens, layer.qk_rope_head_dim), layer.dtype, batch.device)
    if pages is not None:
        check_cache(layer, KV(pages, None), batch.page_size, batch.device)
    check_latent_tensors(tensors)
    if tensors.k_scale is not None:
        _like("tensors.k_scale", tensors.k_scale.reshape(-1), (1,), None, batch.device)
        _check_scale_dtype(layer, "k_scale", tensors.k_scale)


def check_latent_tensors(tensors: LayerTensors) -> None:
    """Raise a ValueError for a tensor that no MLA layer has."""
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if name != "k_scale" and tensor is not None:
            raise ValueError(f"tensors.{name} is given; an MLA layer has a k_scale alone, of its latents")


def check_conv(
    layer: Layer,
    plan: MambaPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raise a ValueError unless the arguments of one convolution fit the layer, the step and each other."""
    channels, width, device = layer.conv_channels, layer.conv_width, plan.device
    _like("x", x, (plan.padded_tokens, channels), layer.dtype, device)
    _like_out(out, (plan.padded_tokens, channels), layer.dtype, device)
    _like("weight", weight, (channels, width), None, device)
    if bias is not None:
        _like("bias", bias, (channels,), None, device)
    _check_pool("the convolution's pool", pool, (width - 1, channels), None, plan)


def check_scan(
    layer: Layer,
    plan: MambaPlan,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    pool: torch.Tensor,
    tensors: SsmTensors,
    out: torch.Tensor,
) -> None:
    """Raise a ValueError unless the arguments of one scan fit the layer, the step and each other."""
    x, dt, b, c, z = given
    tokens, heads, width, device = plan.padded_tokens, layer.num_heads, layer.qk_head_dim, plan.device
    for name, tensor in (("x", x), *([] if z is None else [("z", z)])):
        _like(name, tensor, (tokens, heads, width), layer.dtype, device)
    _like_out(out, (tokens, heads, width), layer.dtype, device)
    _like("dt", dt, (tokens, heads), None, device)
    for name, tensor in (("b", b), ("c", c)):
        _like(name, tensor, (tokens, layer.num_groups, layer.state_dim), layer.dtype, device)
    a = (heads, layer.state_dim) if layer.family == "mamba1" else (heads,)
    _like("tensors.a", tensors.a, a, torch.float32, device)
    for name, optional in (("d", tensors.d), ("dt_bias", tensors.dt_bias)):
        if optional is not None:
            _like(f"tensors.{name}", optional, (heads,), None, device)
    _check_pool("the scan's pool", pool, (heads, width, layer.state_dim), layer.kv_dtype, plan)
    if pool.stride(-1) != 1 and pool.shape[-1] > 1:
        raise ValueError(f"the scan's pool has a last stride of {pool.stride(-1)}; a slot's memory is dense")


def _check_pool(
    name: str, pool: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, plan: MambaPlan
) -> None:
    _like(name, pool, (len(pool), *shape), dtype, plan.device)
    if len(pool) <= plan.max_slot:
        raise ValueError(f"{name} has {len(pool)} slots; the step uses slot {plan.max_slot}")
