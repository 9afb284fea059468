"""The oracle: every operation of attention in plain PyTorch, one request at a time, written to be read.

It runs on any device, computes in float32 at least (float64 for float64 layers, or when asked to), serves every
feature, and is the kernel of last resort. Where the contract leaves a choice, it is made here:

* Position of a query: the last query of a request sits at its last key (bottom-right), causal or not.
* ALiBi adds -slope * |query position - key position|, after scale and softcap and before the mask.
* Keys that no query of the call may see do not count at all: their K and V may be NaN.
* q is used as it is: `q_scale` is for kernels that quantise q themselves.
* Of equal slots in one cache write, the last row wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from portable.backends.pages import FP8, at, compute_of, page_size_of, quantize, values_of
from portable.kernel import FEATURES, KV, PAGES, AttnOut, GraphLevel, Kernel, KernelCaps, Op, Segment
from portable.layer import CACHE_LAYOUTS, Layer, LayerTensors, Window
from portable.merge import merge_states
from portable.paging import slot_mapping as slots_of
from portable.sets import ANY, ANY_SIZE

MAX_SCORES = 2**24  # scores held at once: 64 MiB of float32


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool | torch.Tensor = True,
    window: Window = (None, None),
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    first: int | None = None,
) -> AttnOut:
    """One request: q [Sq, H, D] against k [Sk, Hkv, D] and v [Sk, Hkv, Dv].

    `first` is the position of the first query among the keys, Sk - Sq when None. `causal` may be a bool tensor of
    one element. Returns out [Sq, H, Dv] and lse [H, Sq] in the dtype `compute`; a query that sees no key has
    out 0 and lse -inf, or the sink.

    >>> out, lse = attend(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.ones(1, 1, 3), scale=1.0,
    ...                   sinks=torch.zeros(1))
    >>> out.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5, 0.5]]], 0.6931)
    """
    (num_queries, num_heads, _), (num_keys, num_kv_heads, _) = q.shape, k.shape
    group = num_heads // num_kv_heads
    first = num_keys - num_queries if first is None else first
    positions = torch.arange(first, first + num_queries, device=q.device)
    distance = positions[:, None] - torch.arange(num_keys, device=q.device)  # [Sq, Sk], 0 on the diagonal
    mask = visible(distance, causal, window)

    # a KV head and the group of query heads that share it make one matrix product
    queries = q.to(compute).unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G * Sq, D]
    keys = k.to(compute).permute(1, 2, 0)  # [Hkv, D, Sk]
    values = v.to(compute).permute(1, 0, 2).masked_fill(~mask.any(0)[:, None], 0)  # [Hkv, Sk, Dv]
    scores = (queries @ keys).reshape(num_heads, num_queries, num_keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores - alibi.to(compute)[:, None, None] * distance.abs()
    scores = scores.masked_fill(~mask, -torch.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.to(compute)[:, None, None].expand(-1, num_queries, 1)], -1)
    lse = torch.logsumexp(logits, -1)  # [H, Sq]
    weights = torch.exp(scores - lse[..., None]).masked_fill(~mask, 0)
    out = weights.reshape(num_kv_heads, group * num_queries, num_keys) @ values  # [Hkv, G * Sq, Dv]
    return AttnOut(out.reshape(num_heads, num_queries, v.shape[-1]).transpose(0, 1), lse)


def visible(distance: torch.Tensor, causal: bool | torch.Tensor, window: Window) -> torch.Tensor:
    """Where a query sees a key, from the distance (query position - key position); both [Sq, Sk].

    >>> visible(torch.tensor([[2, 1, 0, -1]]), causal=False, window=(1, 0)).tolist()
    [[False, True, True, False]]
    """
    left, right = window
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= distance >= -right
    if isinstance(causal, torch.Tensor):
        return mask & (~causal | (distance >= 0))
    return mask & (distance >= 0) if causal else mask


def prefill(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    compute: torch.dtype | None = None,
) -> None:
    """Attention over contiguous K/V: the keys of the segment's requests, packed in order."""
    compute, lens = compute or compute_of(layer.dtype), host_lens(segment)
    if (needed := sum(keys for _, keys in lens)) != kv.k.shape[0]:
        raise ValueError(f"kv.k has {kv.k.shape[0]} rows; seq_lens of the segment sum to {needed}")

    def requests() -> Iterator[KV]:
        start = 0
        for _, keys in lens:
            yield dequantize(kv, slice(start, start + keys), tensors, compute)
            start += keys

    attend_each(q, requests(), lens, segment, layer, tensors, out, lse, compute)


def paged(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    compute: torch.dtype | None = None,
) -> None:
    """Attention over the pages of a cache, in any layout."""
    compute, lens = compute or compute_of(layer.dtype), host_lens(segment)
    requests = (gather(kv, segment, r, keys, layer, tensors, compute) for r, (_, keys) in enumerate(lens))
    attend_each(q, requests, lens, segment, layer, tensors, out, lse, compute)


def mla_decode(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    compute: torch.dtype | None = None,
) -> None:
    """q [T, H, rank + rope] over latent pages [pages, page_size, rank + rope] -> out [T, H, rank].

    All heads share a row: it is their key, and its first `kv_lora_rank` columns are their value.
    """
    compute, lens = compute or compute_of(layer.dtype), host_lens(segment)

    def requests() -> Iterator[KV]:
        for r, (_, keys) in enumerate(lens):
            rows = gather(kv, segment, r, keys, layer, tensors, compute).k[:, None]
            yield KV(rows, rows[..., : layer.kv_lora_rank])

    attend_each(q, requests(), lens, segment, layer, tensors, out, lse, compute)


def attend_each(
    q: torch.Tensor,
    requests: Iterator[KV],
    lens: list[tuple[int, int]],
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    compute: torch.dtype,
) -> None:
    """Each request's queries against its own keys, a block of queries at a time."""
    start = 0
    for r, ((queries, keys), (k, v)) in enumerate(zip(lens, requests, strict=True)):
        assert v is not None
        causal = segment.causal if isinstance(segment.causal, bool) else segment.causal[r]
        step = max(1, MAX_SCORES // (layer.num_heads * max(keys, 1)))
        for block in range(0, queries, step):
            rows = slice(start + block, start + min(block + step, queries))
            part = attend(
                q[rows],
                k,
                v,
                scale=layer.scale,
                causal=causal,
                window=layer.window,
                softcap=layer.softcap,
                sinks=tensors.sinks,
                alibi=tensors.alibi,
                compute=compute,
                first=keys - queries + block,
            )
            out[rows] = part.out
            if lse is not None and part.lse is not None:
                lse[:, rows] = part.lse
        start += queries


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`merge_states`, in place."""
    merge_states(outs, lses, sinks, out, lse)


def cache_write(
    k: torch.Tensor, v: torch.Tensor | None, kv: KV, slot_mapping: torch.Tensor, layer: Layer, tensors: LayerTensors
) -> None:
    """The first `len(slot_mapping)` rows of k and v into their slots; MLA has one row of both parts.

    A negative slot writes nothing. A slot past the end is a ValueError on the CPU, and skipped on other devices,
    where looking would cost a sync.
    """
    page_size = page_size_of(kv, layer)
    capacity, slots = kv.k.shape[0] * page_size, slot_mapping.long()
    if slots.device.type == "cpu" and slots.numel() and (largest := int(slots.max())) >= capacity:
        raise ValueError(f"slot_mapping holds {largest}; the cache has {capacity} slots, 0 to {capacity - 1}")
    by_slot, order = torch.sort(slots, stable=True)
    last = torch.ones_like(by_slot, dtype=torch.bool)
    last[:-1] = by_slot[1:] != by_slot[:-1]
    tokens = order[last & (by_slot >= 0) & (by_slot < capacity)]
    page, offset = slots[tokens] // page_size, slots[tokens] % page_size
    if layer.family == "mla":
        k, v = k if v is None else torch.cat([k, v], -1), None
    for part, rows, pages, scale in (("k", k, kv.k, tensors.k_scale), ("v", v, kv.v, tensors.v_scale)):
        if rows is None or pages is None:
            if rows is not None or pages is not None:
                raise ValueError("v and the V pages must both be given, or both be None")
            continue
        view, index = at(pages, part, layer.cache_layout, page, offset)
        stored = quantize(rows[tokens], scale, pages.dtype)
        view[index] = stored.reshape(stored.shape[0], *view.shape[len(index) :])


def cache_gather(kv: KV, segment: Segment, layer: Layer, tensors: LayerTensors, out: KV) -> None:
    """The keys and values of every request in order, [Tk, Hkv, D], in the layer's dtype; MLA [Tk, rank + rope]."""
    start, compute = 0, compute_of(layer.dtype)
    for r, (_, keys) in enumerate(host_lens(segment)):
        rows = slice(start, start + keys)
        for to, part in zip(out, gather(kv, segment, r, keys, layer, tensors, compute), strict=True):
            if to is not None and part is not None:
                to[rows] = part
        start += keys
    for to in out:
        if to is not None:
            to[start:] = 0  # where host lengths are bounds


def cache_copy(source: KV, target: KV, pages: torch.Tensor, layer: Layer) -> None:
    """Whole pages, each pair (from, to) of `pages` [n, 2]; a pair with a negative page copies nothing."""
    come, go = pages[(pages >= 0).all(1)].long().unbind(1)
    for read, written in zip(source, target, strict=True):
        if read is not None and written is not None:
            written[go] = read[come]


def gather(
    kv: KV, segment: Segment, request: int, keys: int, layer: Layer, tensors: LayerTensors, compute: torch.dtype
) -> KV:
    """The first `keys` rows of one request, read through its row of the block table."""
    assert segment.block_table is not None
    page_size = page_size_of(kv, layer)
    positions = torch.arange(keys, device=kv.k.device)
    slots = slots_of(segment.block_table, torch.full_like(positions, request), positions, page_size)
    if slots.device.type == "cpu" and keys:
        low, high, pages = int(slots.min()) // page_size, int(slots.max()) // page_size, kv.k.shape[0]
        if low < 0 or high >= pages:
            row, wrong = segment.requests.start + request, low if low < 0 else high
            raise ValueError(f"row {row}: block_table holds page {wrong}; the cache has pages 0 to {pages - 1}")
    page, offset = slots // page_size, slots % page_size
    k_view, k_index = at(kv.k, "k", layer.cache_layout, page, offset)
    k, v = k_view[k_index], None
    if kv.v is not None:
        v_view, v_index = at(kv.v, "v", layer.cache_layout, page, offset)
        v = v_view[v_index]
    return dequantize(KV(k if k.dim() < 4 else k.flatten(2), v), slice(None), tensors, compute)


def dequantize(kv: KV, rows: slice, tensors: LayerTensors, compute: torch.dtype) -> KV:
    """Some rows of contiguous K/V as numbers."""
    k = values_of(kv.k[rows], tensors.k_scale, compute)
    return KV(k, None if kv.v is None else values_of(kv.v[rows], tensors.v_scale, compute))


def host_lens(segment: Segment) -> list[tuple[int, int]]:
    """(query length, sequence length) of each request; reads the device only where the host twins are bounds."""
    if segment.exact:
        return list(zip(segment.host_query_lens.tolist(), segment.host_seq_lens.tolist(), strict=True))
    return list(zip(segment.cu_seqlens_q.diff().tolist(), segment.seq_lens.tolist(), strict=True))


DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# half a unit in the last place of each type, with room for the order of the sums
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def _caps(op: Op) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=f"reference.{op}",
        provider="reference",
        vendors=ANY,
        archs=ANY,
        emulated=True,
        graph=GraphLevel.NEVER,  # it reads lengths and slots
        dtypes=DTYPES,
        kv_dtypes=DTYPES | FP8,
        head_dims=ANY_SIZE,
        gqa_ratios=ANY_SIZE,
        page_sizes=ANY_SIZE,
        cache_layouts=CACHE_LAYOUTS if op in PAGES else ("strided",),
        features=FEATURES,
        tolerance=TOLERANCE,
    )


KERNELS = (
    Kernel(_caps(Op.PREFILL), prefill),
    Kernel(_caps(Op.PAGED), paged),
    Kernel(_caps(Op.MLA_DECODE), mla_decode),
    Kernel(_caps(Op.MERGE), merge),
    Kernel(_caps(Op.CACHE_WRITE), cache_write),
    Kernel(_caps(Op.CACHE_GATHER), cache_gather),
    Kernel(_caps(Op.CACHE_COPY), cache_copy),
)
