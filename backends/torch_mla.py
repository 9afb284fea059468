"""MLA in plain PyTorch: decodes over latent pages by the CPU's attention, and contexts gathered from them.

To that attention, latents are a single KV head whose values are as wide as its keys; what is behind the rank is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from portable.backends import torch_native
from portable.backends.pages import FP8, compute_of, values_of
from portable.kernel import KV, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cu_from_lens
from portable.sets import ANY, ANY_SIZE


def prepare(segment: Segment, layer: Layer) -> tuple[torch_native.Block, ...]:
    """As of grouped-query attention."""
    return torch_native.prepare(segment, single(layer))


def decode(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """q [T, H, rank + rope] over latent pages -> out [T, H, rank]."""
    pages = kv.k[:, :, None]
    wide = torch.empty_like(q)
    torch_native.attend(q, KV(pages, pages), segment, single(layer), tensors, wide, lse)
    out.copy_(wide[..., : layer.kv_lora_rank])


def single(layer: Layer) -> Layer:
    """The layer as one of a single KV head as wide as the latent."""
    wide = layer.latent_dim
    return replace(layer, num_kv_heads=1, qk_head_dim=wide, v_head_dim=wide)


def prepare_gather(segment: Segment, layer: Layer) -> torch.Tensor:
    """[Tk] i64, the slot of each key of each request in order, in the pages that the table names."""
    table, lens = segment.block_table, segment.host_seq_lens
    assert table is not None
    total = int(lens.sum())
    cu = cu_from_lens(segment.seq_lens).long()
    key = torch.arange(total, device=table.device)
    row = torch.searchsorted(cu[1:].contiguous(), key, right=True).clamp(max=max(0, len(lens) - 1))
    position = (key - cu[row]).clamp(min=0)
    page = (position // segment.page_size).clamp(max=max(0, table.shape[1] - 1))
    slot = table[row, page].long() * segment.page_size + position % segment.page_size
    return slot if segment.exact else torch.where(key < cu[-1], slot, 0)  # the table may hold anything behind the keys


def gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors, out: KV) -> None:
    """The keys and values of every request in order, dequantised; MLA has one tensor [Tk, rank + rope]."""
    slots: torch.Tensor = segment.prepared
    num_pages, page_size = len(kv.k), segment.page_size
    if slots.device.type == "cpu" and slots.numel():
        low, high = int(slots.min()) // page_size, int(slots.max()) // page_size
        if low < 0 or high >= num_pages:
            key = int(slots.argmin() if low < 0 else slots.argmax())
            row = int(segment.host_seq_lens.cumsum().searchsorted(key, side="right")) + segment.requests.start
            wrong = low if low < 0 else high
            raise ValueError(f"row {row}: block_table holds page {wrong}; the cache has pages 0 to {num_pages - 1}")
    _select(kv.k, slots, page_size, tensors.k_scale, layer, out.k)
    if kv.v is not None and out.v is not None:
        _select(kv.v, slots, page_size, tensors.v_scale, layer, out.v)
    if not segment.exact:
        beyond = torch.arange(len(slots), device=slots.device) >= segment.seq_lens.sum()
        for part in out:
            if part is not None:
                part[beyond] = 0


def _select(
    pages: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    scale: torch.Tensor | None,
    layer: Layer,
    out: torch.Tensor,
) -> None:
    whole = pages.stride(0) == page_size * pages.stride(1)
    if whole and pages.dtype == layer.dtype:
        torch.index_select(pages.flatten(0, 1), 0, slots, out=out)
        return
    rows = pages.flatten(0, 1)[slots] if whole else pages[slots // page_size, slots % page_size]
    out.copy_(rows if rows.dtype == layer.dtype else values_of(rows, scale, compute_of(layer.dtype)))


def _kernels() -> Iterator[Kernel]:
    dtypes = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    caps = KernelCaps(
        op=Op.MLA_DECODE,
        name="torch.mla",
        provider="torch",
        vendors=ANY,
        archs=ANY,
        emulated=True,
        dtypes=dtypes,
        head_dims=ANY_SIZE,
        gqa_ratios=ANY_SIZE,
        page_sizes=ANY_SIZE,
        features=frozenset({"noncausal"}),
        tolerance=torch_native.TOLERANCE,
    )
    yield Kernel(caps, decode, prepare)
    features = caps.features | {"lse"}
    lse = replace(caps, name="torch.mla_lse", vendors={"cpu"}, features=features, requires=(Requires("torch"),))
    yield Kernel(lse, decode, prepare)  # only the kernel of CPUs tells its LSE
    tolerance = torch_native.TOLERANCE
    gathers = replace(
        caps,
        op=Op.CACHE_GATHER,
        name="torch.index_select",
        kv_dtypes=dtypes | FP8,
        features=frozenset(),
        tolerance=tolerance,
    )
    yield Kernel(gathers, gather, prepare_gather)


KERNELS = tuple(_kernels())
