"""The data of a contract case: what a kernel is called with, in every kind of memory, and NaN all around it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from portable.cache import cache_shapes
from portable.conformance.cells import PACKED, Case
from portable.conformance.lens import Lens
from portable.conformance.measure import NOT_ITS_OWN, require
from portable.kernel import KV, Kernel, Segment
from portable.layer import Layer, LayerTensors

UNTOUCHED = {2: (torch.int16, 0x7FE5), 4: (torch.int32, 0x7FE5E5E5), 8: (torch.int64, 0x7FFE5E5E5E5E5E5E)}
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None]  # of one row of K, and of V


@dataclass
class Inputs:
    """The arguments of an attention kernel, and the same numbers in float64, packed."""

    q: torch.Tensor
    kv: KV
    segment: Segment
    tensors: LayerTensors
    k: torch.Tensor  # [Tk, Hkv, D] float64
    v: torch.Tensor
    stored: KV | None = None  # the same rows as the cache holds them
    attempt: int = 0  # of the numbers


def build(kernel: Kernel, case: Case, device: str, attempt: int = 0, blank: float = torch.nan) -> Inputs:
    """The inputs of an attention kernel or a gather. The last keys of a request stand out: there masks differ.

    `blank` is in the pages where no data are.
    """
    layer, normal = case.layer, numbers(case, attempt)
    num_keys, num_queries = sum(s for _, s in case.lens), sum(q for q, _ in case.lens)
    tensors = scales_of(case, device)._replace(
        sinks=torch.linspace(5, -1, layer.num_heads, device=device).to(given_as(case)) if layer.sinks else None,
        alibi=torch.linspace(1, 0.02, layer.num_heads, device=device) if layer.alibi else None,
    )
    shapes = row_shapes(case.layer)
    rows = drawn(normal, num_keys, shapes)
    values = rows.k[:, : layer.kv_lora_rank] if rows.v is None else rows.v
    for end in np.cumsum([s for _, s in case.lens]):
        values[max(0, end - 8) : end] *= 3 if rows.v is not None else 2
    stored = as_stored(layer, rows, tensors)
    q = strided(1.5 * normal(num_queries, layer.num_heads, shapes[0][-1]).to(layer.dtype), case.strided, device)
    table = None
    if case.page_size is None:
        kv = each(stored, lambda part: strided(part, case.strided, device))
    else:
        table, num_pages = block_table(case)
        kv = blank_pages(case, num_pages, device, blank)
        places = [torch.arange(length) for _, length in case.lens]
        pages = [table[r, at // case.page_size].long() for r, at in enumerate(places)]
        put(case, kv, torch.cat(pages) * case.page_size + torch.cat(places) % case.page_size, stored)
        table = strided(table, case.strided, device)
    k = worth(stored.k, tensors.k_scale, device)
    k = k if stored.v is not None else k[:, None]
    v = k[..., : layer.kv_lora_rank] if stored.v is None else worth(stored.v, tensors.v_scale, device)
    made = segment(kernel, case.lens, layer, table, case.page_size, case.causal, device)
    return Inputs(q, kv, made, tensors, k, v, each(stored, lambda part: part.to(device)), attempt)


def segment(
    kernel: Kernel,
    lens: Lens,
    layer: Layer,
    table: torch.Tensor | None = None,
    page_size: int | None = None,
    causal: bool | tuple[bool, ...] = True,
    device: str = "cpu",
) -> Segment:
    """A segment of these (query, sequence) lengths, prepared by the kernel where it prepares."""
    queries, keys = (np.array([pair[i] for pair in lens], dtype=np.int32) for i in range(2))
    made = Segment(
        kernel=kernel,
        requests=slice(0, len(lens)),
        tokens=slice(0, int(queries.sum())),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(keys, device=device),
        block_table=table,
        page_size=page_size or 1,
        causal=causal if isinstance(causal, bool) else torch.tensor(causal, device=device),
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(keys.max(initial=0)),
        host_query_lens=queries,
        host_seq_lens=keys,
    )
    return made if kernel.prepare is None else replace(made, prepared=kernel.prepare(made, layer))


def gathered(segment: Segment, layer: Layer, tensors: LayerTensors, kv: KV) -> KV:
    """What the segment's kernel gathers, in memory of its own."""
    rows = int(segment.host_seq_lens.sum())
    out = drawn(lambda *shape: untouched(shape, layer.dtype, kv.k.device), rows, row_shapes(layer))
    segment.kernel.run(kv, segment, layer, tensors, out)
    return out


def block_table(case: Case) -> tuple[torch.Tensor, int]:
    """[B, W] int32 of distinct pages in random order, one column too many, filled with page 0; and the pool's size."""
    counts = [-(-s // (case.page_size or 1)) for _, s in case.lens]
    num_pages = sum(counts) + 2
    pages = iter(np.random.default_rng(seed_of(case)).permutation(num_pages - 1) + 1)
    table = torch.zeros((len(counts), max(counts) + 1), dtype=torch.int32)
    for r, count in enumerate(counts):
        for column in range(count):
            table[r, column] = int(next(pages))
    return table, num_pages


def blank_pages(case: Case, num_pages: int, device: str, blank: float = torch.nan) -> KV:
    """Pages of NaN, or of another number, in the memory that `case.pages` names."""
    layer = case.layer
    k_shape, v_shape = cache_shapes(layer, num_pages, case.page_size or 1)

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, blank).to(layer.kv_dtype).to(device)

    if v_shape is None:  # with another layer's rows between
        return KV(nan(*k_shape) if case.pages == "nhd" else nan(num_pages, 2, *k_shape[1:])[:, 1], None)
    if case.pages == "nhd" or case.pages in PACKED:
        return KV(nan(*k_shape), nan(*v_shape))
    pages, size, heads, k_dim = k_shape
    v_dim = v_shape[-1]
    if case.pages == "hnd":
        return KV(nan(pages, heads, size, k_dim).transpose(1, 2), nan(pages, heads, size, v_dim).transpose(1, 2))
    if case.pages == "interleaved":
        k, v = nan(pages, 2, size, heads, max(k_dim, v_dim)).unbind(1)
    else:
        k, v = nan(2, pages, size, heads, max(k_dim, v_dim)).unbind(0)
    return KV(k[..., :k_dim], v[..., :v_dim])


def put(case: Case, kv: KV, slots: torch.Tensor, rows: KV) -> None:
    """Rows into their slots [n], as the layouts are defined."""
    layout, size = case.layer.cache_layout, case.page_size or 1
    for part, pages, new in zip("kv", kv, rows, strict=True):
        if pages is None or new is None:
            continue
        if pages.dtype.itemsize == 1:  # copied as bytes: not every device indexes 8-bit floats
            pages, new = pages.view(torch.uint8), new.view(torch.uint8)
        page, offset, row = slots.to(pages.device) // size, slots.to(pages.device) % size, new.to(pages.device)
        if layout == "strided":
            pages[page, offset] = row
        elif part == "k":
            pages[page, :, :, offset, :] = row.unflatten(-1, (-1, pages.shape[-1]))
        elif layout == "k_packed":
            pages[page, :, :, offset] = row
        else:
            x = pages.shape[-1]
            pages[page, :, offset // x, :, offset % x] = row


def row_shapes(layer: Layer) -> Shapes:
    """The shapes of one token's rows of K and V."""
    if layer.family == "mla":
        return (layer.latent_dim,), None
    return (layer.num_kv_heads, layer.qk_head_dim), (layer.num_kv_heads, layer.v_head_dim)


def drawn(normal: Callable[..., torch.Tensor], count: int, shapes: Shapes) -> KV:
    """`count` rows of K and of V, where there is a V."""
    k_shape, v_shape = shapes
    k = normal(count, *k_shape)
    return KV(k, None if v_shape is None else normal(count, *v_shape))


def given_as(case: Case) -> torch.dtype:
    """The type of sinks and scales: bfloat16 is taken too, and gpt-oss has it."""
    return torch.bfloat16 if case.strided or case.pages == "hnd" else torch.float32


def scales_of(case: Case, device: str) -> LayerTensors:
    """Powers of two, so that every way to divide or multiply by them gives the same bytes."""
    if case.scales == "none":
        return LayerTensors()
    head = torch.arange(case.layer.num_kv_heads, device=device) % 3
    k, v = (0.5 ** (head + 1), 2.0 ** (head + 1)) if case.scales == "head" else (torch.tensor(0.25), torch.tensor(4.0))
    return LayerTensors(k_scale=k.to(device, given_as(case)), v_scale=v.to(device, given_as(case)))


def as_stored(layer: Layer, rows: KV, tensors: LayerTensors) -> KV:
    """The rows as the layer's cache holds them."""
    k = quantized(rows.k, tensors.k_scale, layer.kv_dtype)
    return KV(k, None if rows.v is None else quantized(rows.v, tensors.v_scale, layer.kv_dtype))


def each(kv: KV, change: Callable[[torch.Tensor], torch.Tensor]) -> KV:
    """The change of K, and of V where there is one."""
    return KV(change(kv.k), None if kv.v is None else change(kv.v))


def worth(stored: torch.Tensor, scale: torch.Tensor | None, device: str) -> torch.Tensor:
    """What stored rows stand for, in float64."""
    return stored.to(device).double() * (1.0 if scale is None else scale.double().reshape(-1, 1))


def quantized(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """float numbers [n, ...] as a cache of `dtype` holds them."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    return (rows.double() / (1.0 if scale is None else scale.cpu().reshape(-1, 1))).clamp(-limit, limit).to(dtype)


def seed_of(case: Case) -> int:
    return zlib.crc32(repr(case).encode())


def numbers(case: Case, attempt: int = 0) -> Callable[..., torch.Tensor]:
    """normal(*shape): float32 on the CPU, always the same ones for a case and attempt."""
    generator = torch.Generator().manual_seed(seed_of(case) + attempt)
    return lambda *shape: torch.randn(shape, generator=generator)


def strided(dense: torch.Tensor, apply: bool, device: str) -> torch.Tensor:
    """The same values, where asked as a view with a gap after each row of every dimension."""
    dense = dense.to(device)
    if not apply:
        return dense.contiguous()
    filler = torch.nan if dense.is_floating_point() else 0
    base = torch.full([n + 8 for n in dense.shape], filler, dtype=dense.dtype, device=device)
    view = base[tuple(slice(0, n) for n in dense.shape)]
    return view.copy_(dense)


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """NaN of a pattern that no computation gives, so that what was not written is told from what came out as NaN.

    >>> bool(was_untouched(untouched((2,), torch.float32, "cpu")).all())
    True
    >>> bool(was_untouched(torch.full((2,), torch.nan)).any())
    False
    """
    bits, pattern = UNTOUCHED[dtype.itemsize]
    return torch.full(tuple(shape), pattern, dtype=bits, device=device).view(dtype)


def was_untouched(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor still has the pattern."""
    bits, pattern = UNTOUCHED[tensor.dtype.itemsize]
    return tensor.view(bits) == pattern


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, gaps: bool, device: str
) -> tuple[torch.Tensor, Callable[[str], None]]:
    """NaN to write into, with NaN around it, and the check that what is around it still is; that clears the view."""
    base = untouched((shape[0] + 2, *(n + 8 * gaps for n in shape[1:])), dtype, device)
    inside = (slice(1, -1), *(slice(0, n) for n in shape[1:]))
    view = base[inside]

    def intact(name: str) -> None:
        view.fill_(torch.nan)
        require(base.isnan().all(), f"it wrote outside of {name}", NOT_ITS_OWN)

    return view, intact


@contextmanager
def unchanged(*tensors: torch.Tensor | None) -> Iterator[None]:
    """The memory of the tensors, gaps included, is the same after as before."""
    given = [tensor for tensor in tensors if tensor is not None]
    before = [storage_of(tensor, torch.uint8).clone() for tensor in given]
    yield
    for tensor, old in zip(given, before, strict=True):
        same = torch.equal(storage_of(tensor, torch.uint8), old)
        require(same, f"an input of shape {tuple(tensor.shape)} was written", "input written")


def storage_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All the memory that a view belongs to, flat."""
    return torch.tensor([], dtype=dtype or tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def tensors_of(made: Segment) -> list[torch.Tensor]:
    return [value for f in fields(made) if isinstance(value := getattr(made, f.name), torch.Tensor)]
