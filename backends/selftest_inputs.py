"""What a self-test calls a kernel with: small steps of random numbers, in memory that is NaN where it holds no data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from portable.backends.pages import at, quantize, values_of
from portable.cache import cache_shapes
from portable.kernel import KV, Kernel, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cu_from_lens, ragged_arange

Lens = tuple[tuple[int, int], ...]  # (query length, sequence length) of each request


@dataclass
class Inputs:
    """The arguments of a call, and the same numbers where no kernel can write them."""

    q: torch.Tensor
    kv: KV
    segment: Segment
    tensors: LayerTensors
    queries: torch.Tensor  # as q, on the CPU
    k: torch.Tensor  # [Tk, Hkv, D] float32, on the CPU
    v: torch.Tensor


class Drawn(NamedTuple):
    """The numbers of a call, on the CPU."""

    q: torch.Tensor
    stored: KV  # rows as a cache holds them
    tensors: LayerTensors
    k: torch.Tensor  # [Tk, Hkv, D] float32
    v: torch.Tensor


@lru_cache(maxsize=64)  # kernels of a package are asked much the same, and this is most of the time of a test
def drawn(lens: Lens, layer: Layer) -> Drawn:
    """Random numbers of a fixed seed: the last keys of a request weigh most, for there masks differ."""
    generator = torch.Generator().manual_seed(len(lens) + sum(map(sum, lens)))
    queries, keys = (np.array([pair[i] for pair in lens], dtype=np.int32) for i in range(2))
    mla = layer.family == "mla"
    heads, dim = (1, layer.latent_dim) if mla else (layer.num_kv_heads, layer.qk_head_dim)
    q = torch.randn(int(queries.sum()), layer.num_heads, dim, generator=generator).to(layer.dtype)
    k = torch.randn(int(keys.sum()), heads, dim, generator=generator)
    v = k[..., : layer.kv_lora_rank] if mla else torch.randn(len(k), heads, layer.v_head_dim, generator=generator)
    for end in np.cumsum(keys):
        v[max(0, end - 4) : end] *= 2
    tensors = LayerTensors(
        sinks=torch.linspace(1, 2, layer.num_heads) if layer.sinks else None,
        alibi=torch.linspace(0.5, 0.1, layer.num_heads) if layer.alibi else None,
        k_scale=torch.tensor(0.25) if layer.kv_dtype != layer.dtype else None,
        v_scale=torch.tensor(0.5) if layer.kv_dtype != layer.dtype else None,
    )
    stored = KV(quantize(k, tensors.k_scale, layer.kv_dtype), quantize(v, tensors.v_scale, layer.kv_dtype))
    assert stored.v is not None
    k, v = values_of(stored.k, tensors.k_scale, torch.float32), values_of(stored.v, tensors.v_scale, torch.float32)
    rows = KV(stored.k[:, 0], None) if mla else stored
    return Drawn(q, rows, tensors, k, k[..., : layer.kv_lora_rank] if mla else v)


def inputs_of(
    kernel: Kernel, lens: Lens, layer: Layer, page_size: int | None, device: str, causal: bool = True
) -> Inputs:
    """The same numbers in memory of their own on a device, in pages or contiguous."""
    queries, keys = (np.array([pair[i] for pair in lens], dtype=np.int32) for i in range(2))
    q, rows, tensors, k, v = drawn(lens, layer)
    table = None
    if page_size is not None:
        rows, table = _paged(lens, layer, page_size)
        table = table.clone().to(device)
    return Inputs(
        q.clone().to(device),
        on(device, KV(rows.k.clone(), None if rows.v is None else rows.v.clone())),
        segment_of(kernel, layer, queries, keys, table, page_size, causal, device),
        LayerTensors(*(x if x is None else x.clone().to(device) for x in tensors)),
        q,
        k,
        v,
    )


@lru_cache(maxsize=64)
def _paged(lens: Lens, layer: Layer, page_size: int) -> tuple[KV, torch.Tensor]:
    """The rows of a call in pages, on the CPU, which kernels ask for again and again."""
    return into_pages(drawn(lens, layer).stored, lens, layer, page_size)


def on(device: str, kv: KV) -> KV:
    return KV(kv.k.to(device), None if kv.v is None else kv.v.to(device))


def segment_of(
    kernel: Kernel, layer: Layer, queries: Any, keys: Any, table: torch.Tensor | None, page_size: int | None,
    causal: bool, device: str,
) -> Segment:  # fmt: skip
    segment = Segment(
        kernel=kernel,
        requests=slice(0, len(queries)),
        tokens=slice(0, int(queries.sum())),
        cu_seqlens_q=torch.from_numpy(cu_from_lens(queries)).to(device),
        seq_lens=torch.from_numpy(keys).to(device),
        block_table=table,
        page_size=page_size or 1,
        causal=causal,
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(keys.max(initial=0)),
        host_query_lens=queries,
        host_seq_lens=keys,
    )
    return segment if kernel.prepare is None else replace(segment, prepared=kernel.prepare(segment, layer))


def into_pages(rows: KV, lens: Lens, layer: Layer, page_size: int) -> tuple[KV, torch.Tensor]:
    """The rows in pages of NaN, scattered backwards; page 0 belongs to nobody."""
    counts = [-(-keys // page_size) for _, keys in lens]
    total = sum(counts) + 1
    table = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32)
    free = total
    for r, count in enumerate(counts):
        table[r, :count] = torch.arange(free - 1, free - 1 - count, -1)
        free -= count
    request, position = (torch.from_numpy(x).long() for x in ragged_arange([keys for _, keys in lens]))
    page, offset = table[request, position // page_size].long(), position % page_size

    def pool(part: str, new: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        pages = torch.full(shape, torch.nan).to(layer.kv_dtype)
        view, index = at(pages, part, layer.cache_layout, page, offset)
        view[index] = new.reshape(len(new), *view.shape[len(index) :])
        return pages

    k_shape, v_shape = cache_shapes(layer, total, page_size)
    v = None if rows.v is None or v_shape is None else pool("v", rows.v, v_shape)
    return KV(pool("k", rows.k, k_shape), v), table
