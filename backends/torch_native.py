"""PyTorch's own attention: the fast path of a CPU, and of any device with nothing but torch.

`scaled_dot_product_attention` aligns its `is_causal` to the top left: with 2 queries on 5 keys it shows them 1 and
2 keys, where 4 and 5 are right. So only square blocks use it, and all others a mask that is built here, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from portable.kernel import KV, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cu_from_lens
from portable.sets import ANY, ANY_SIZE

Indices = npt.NDArray[np.int64]
# (q [n, H, Sq, D], k, v [n, H, Sk, D], bias, causal from the top left, scale) -> out, LSE [n, H, Sq] in natural log
Fused = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float], tuple[torch.Tensor, torch.Tensor]
]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Requests with the same number of query tokens and similar lengths, attended to in one call."""

    queries: torch.Tensor  # [n * Sq] i64 rows of q
    keys: torch.Tensor  # [n * Sk] i64 rows of k and v, or slots of the cache
    shape: tuple[int, int, int]  # n, Sq, Sk
    bias: torch.Tensor | None  # [n, 1, Sq, Sk], 0 where visible and -inf elsewhere; None for causal square or no mask
    causal: bool  # Sq == Sk and causal, without a bias
    distance: torch.Tensor | None  # [n, 1, Sq, Sk] positions between query and key, for ALiBi
    empty: torch.Tensor | None  # [n, Sq] rows that see no key
    rows: Indices  # [n] requests of the segment
    reach: tuple[int, int] | None  # the least and greatest of `keys`, known on a CPU


def prepare(segment: Segment, layer: Layer) -> tuple[Block, ...]:
    """Group the requests by query length and the power of two that holds their visible keys, which pads at most 2x."""
    query_lens, seq_lens = segment.host_query_lens.astype(np.int64), segment.host_seq_lens.astype(np.int64)
    left = layer.window[0]
    span = seq_lens
    if left is not None:
        span = np.minimum(seq_lens, left + query_lens)
    live = np.flatnonzero((query_lens > 0) & (seq_lens > 0))
    if not live.size:
        return ()
    # up to 256 keys, a call of its own costs more than padding
    bucket = query_lens[live] << 6 | np.ceil(np.log2(span[live].clip(min=256))).astype(np.int64)
    query_start = cu_from_lens(query_lens)
    key_start = torch.from_numpy(cu_from_lens(seq_lens)[:-1]).to(segment.seq_lens.device)
    return tuple(
        _block(segment, layer, live[bucket == b], query_start, key_start, int(span[live[bucket == b]].max()))
        for b in np.unique(bucket)
    )


def _block(
    segment: Segment,
    layer: Layer,
    rows: Indices,
    query_start: npt.NDArray[np.int32],
    key_start: torch.Tensor,
    span: int,
) -> Block:
    device = segment.seq_lens.device
    host_q, host_s = segment.host_query_lens[rows], segment.host_seq_lens[rows]
    sq = int(host_q[0])
    chosen = torch.from_numpy(rows).to(device)
    queries = torch.from_numpy((query_start[rows][:, None] + np.arange(sq)).ravel().astype(np.int64)).to(device)
    seq_lens = segment.seq_lens[chosen].long()[:, None]
    context = seq_lens - sq
    left, right = layer.window
    first = torch.zeros_like(context) if left is None else (context - left).clamp(min=0)
    position = first + torch.arange(span, device=device)
    position = torch.where(position < seq_lens, position, first.minimum(seq_lens - 1))  # padding reads a live key
    if segment.block_table is None:
        keys = key_start[chosen].long()[:, None] + position
    else:
        page = position // segment.page_size
        keys = segment.block_table[chosen].long().gather(1, page) * segment.page_size + position % segment.page_size

    causal = segment.causal
    unmasked = segment.exact and left is None and (right is None or causal is True) and bool((host_s == span).all())
    square = unmasked and causal is True and bool((host_q == host_s).all())
    whole = unmasked and (causal is False or (causal is True and sq == 1))
    bias = distance = empty = None
    if not (square or whole) or layer.alibi:
        query = (context + torch.arange(sq, device=device))[:, None, :, None]
        key = (first + torch.arange(span, device=device))[:, None, None, :]
        visible = key < seq_lens[:, None, None]
        if isinstance(causal, torch.Tensor):
            visible = visible & ((key <= query) | ~causal[chosen][:, None, None, None])
        elif causal:
            visible = visible & (key <= query)
        if left is not None:
            visible = visible & (key >= query - left)
        if right is not None:
            visible = visible & (key <= query + right)
        visible = visible.expand(len(rows), 1, sq, span)
        bias = torch.zeros(visible.shape, dtype=layer.dtype, device=device).masked_fill_(~visible, -torch.inf)
        distance = (query - key).abs().to(layer.dtype) if layer.alibi else None
        if (host_q > host_s).any() or not segment.exact:
            empty = ~visible.any(-1)[:, 0]
    flat = keys.reshape(-1)
    reach = (int(flat.numpy().min()), int(flat.numpy().max())) if device.type == "cpu" else None
    return Block(queries, flat, (len(rows), sq, span), bias, square and bias is None, distance, empty, rows, reach)


def attend(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    fused: Fused | None = None,
) -> None:
    """Serve PREFILL and PAGED: the blocks differ only in what their keys index.

    `fused` computes them; None: what torch chooses, and where an LSE is wanted the kernel of CPUs.
    """
    assert kv.v is not None
    if fused is None and lse is not None:
        fused = _flash_cpu
    if (segment.host_seq_lens == 0).any():
        out.zero_()
        if lse is not None:
            _ = lse.fill_(-torch.inf) if tensors.sinks is None else lse.copy_(tensors.sinks[:, None])
    rows_of_kv = len(kv.k) * (segment.page_size if segment.block_table is not None else 1)
    for block in segment.prepared:
        if block.reach is not None and not 0 <= block.reach[0] <= block.reach[1] < rows_of_kv:
            _refuse(block, segment, len(kv.k), rows_of_kv)
        n, sq, sk = block.shape
        whole = n * sq == len(q)
        rows = q if whole else q[block.queries]
        k = _rows(kv.k, block.keys, segment).view(n, sk, *kv.k.shape[-2:])
        v = k if kv.v is kv.k else _rows(kv.v, block.keys, segment).view(n, sk, *kv.v.shape[-2:])
        result, logs = _sdpa(rows.reshape(n, sq, *q.shape[1:]), k, v, block, layer, tensors, fused)
        if block.empty is not None:
            result = result.masked_fill(block.empty[:, :, None, None], 0)
        if lse is not None and logs is not None:
            if block.empty is not None and not layer.sinks:
                logs = logs.masked_fill(block.empty[:, None], -torch.inf)
            lse[:, slice(None) if whole else block.queries] = logs.transpose(0, 1).flatten(1).to(lse.dtype)
        if whole:
            out.copy_(result.reshape(out.shape))
        else:
            out[block.queries] = result.reshape(-1, *out.shape[1:])


def _refuse(block: Block, segment: Segment, num_pages: int, capacity: int) -> None:
    """Name the row whose pages are not in the cache: torch would wrap a negative index round."""
    slots = block.keys.numpy().reshape(block.shape[0], -1)
    row, column = np.argwhere((slots < 0) | (slots >= capacity))[0]
    page = slots[row, column] // segment.page_size
    where = segment.requests.start + int(block.rows[row])
    raise ValueError(f"row {where}: block_table holds page {page}; the cache has pages 0 to {num_pages - 1}")


def _rows(cache: torch.Tensor, index: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Rows [n, Hkv, D] of contiguous K/V or of pages with any strides."""
    if segment.block_table is None:
        return cache[index]
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, index)
    return cache[index // segment.page_size, index % segment.page_size]


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Block,
    layer: Layer,
    tensors: LayerTensors,
    fused: Fused | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [n, Sq, H, D], k and v [n, Sk, Hkv, D] to [n, Sq, H, Dv] and [n, H, Sq]."""
    n, sq, heads, _ = q.shape
    sk, kv_heads = k.shape[1], k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if block.causal and not layer.sinks:
        if fused is not None:
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            square, square_lse = fused(q.transpose(1, 2), k, v, None, sq > 1, layer.scale)
            return square.transpose(1, 2), square_lse
        square = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=sq > 1, scale=layer.scale, enable_gqa=heads != kv_heads
        )
        return square.transpose(1, 2), None
    bias = block.bias
    if bias is None and layer.sinks:
        bias = q.new_zeros(n, 1, sq, sk)
        if block.causal:
            bias = bias.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if bias is not None and layer.alibi:
        assert tensors.alibi is not None and block.distance is not None
        bias = bias - tensors.alibi.to(q.dtype)[None, :, None, None] * block.distance
    if bias is not None and layer.sinks:
        # The sink is the score of one more key: zeros for K and V, its logit as the bias.
        assert tensors.sinks is not None
        sink = tensors.sinks.to(q.dtype)[None, :, None, None].expand(n, heads, sq, 1)
        bias = torch.cat([bias.expand(n, heads, sq, sk), sink], -1)
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
    # The query heads of a KV head become its query rows, so that K and V are not repeated: twice as fast at a decode.
    group = heads // kv_heads
    packed = q.view(n, sq, kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, group * sq, -1)
    if bias is not None and (sq > 1 or bias.shape[1] > 1):  # the bias of a decode broadcasts as it is
        per_head = bias.shape[1] > 1
        width = bias.shape[-1]
        bias = bias.view(n, kv_heads, group, sq, width) if per_head else bias[:, :, None].expand(n, 1, group, sq, width)
        bias = bias.reshape(n, -1, group * sq, width)
    logs: torch.Tensor | None = None
    if fused is not None:
        result, logs = fused(packed, k, v, bias, False, layer.scale)
        logs = logs.reshape(n, heads, sq)
    else:
        result = scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=layer.scale)
    return result.reshape(n, kv_heads, group, sq, -1).permute(0, 3, 1, 2, 4).reshape(n, sq, heads, -1), logs


def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU's kernel below `scaled_dot_product_attention`, for its LSE [n, H, Sq]. Its three widths are equal."""
    width, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (t if t.shape[-1] == widest else torch.nn.functional.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    attend_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out[..., :width], lse


def cache_write(
    k: torch.Tensor, v: torch.Tensor | None, kv: KV, slot_mapping: torch.Tensor, layer: Layer, tensors: LayerTensors
) -> None:
    """Scatter rows to slots. On a device without reading it: there a row that writes nothing repeats one that writes.

    Which of two rows with the same slot is kept is not defined.
    """
    if kv.v is None:
        k, v = k if v is None else torch.cat([k, v], -1), None
    pairs = [(new, cache) for new, cache in ((k, kv.k), (v, kv.v)) if new is not None and cache is not None]
    num_pages, page_size = kv.k.shape[:2]
    slots = slot_mapping.long()
    live = (slots >= 0) & (slots < num_pages * page_size)
    if slots.device.type == "cpu":  # where looking costs no sync, and most of the work is saved
        if (slots >= num_pages * page_size).any():
            raise ValueError(f"slot_mapping holds {int(slots.max())}; the cache has {num_pages * page_size} slots")
        tokens = slice(None) if live.all() else live.nonzero()[:, 0]
        pages, offsets = slots[tokens] // page_size, slots[tokens] % page_size
        for new, cache in pairs:
            cache[pages, offsets] = new[: len(slots)][tokens]
        return
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.long().argmax())
    slots = slots[source].clamp(min=0, max=num_pages * page_size - 1)
    pages, offsets = slots // page_size, slots % page_size
    for new, cache in pairs:
        keep = live[source].view(-1, *[1] * (new.dim() - 1))
        cache[pages, offsets] = torch.where(keep, new[source], cache[pages, offsets])


def _kernels() -> Iterator[Kernel]:
    features = frozenset({"window", "sinks", "alibi", "noncausal"})
    for op, name in ((Op.PREFILL, "torch.sdpa"), (Op.PAGED, "torch.sdpa_paged")):
        caps = KernelCaps(
            op=op,
            name=name,
            provider="torch",
            vendors=ANY,
            archs=ANY,
            emulated=True,
            dtypes={torch.float64, torch.float32, torch.bfloat16, torch.float16},
            head_dims=ANY_SIZE,
            gqa_ratios=ANY_SIZE,
            page_sizes=ANY_SIZE,
            features=features,
            tolerance=TOLERANCE,
        )
        yield Kernel(caps, attend, prepare)
        # Only the kernel of CPUs tells its LSE.
        caps = replace(
            caps, name=f"{name}_lse", vendors={"cpu"}, features=features | {"lse"}, requires=(Requires("torch"),)
        )
        yield Kernel(caps, attend, prepare)
    caps = KernelCaps(
        op=Op.CACHE_WRITE,
        name="torch.index_put",
        provider="torch",
        vendors=ANY,
        archs=ANY,
        emulated=True,
        dtypes={torch.float64, torch.float32, torch.bfloat16, torch.float16},
        head_dims=ANY_SIZE,
        page_sizes=ANY_SIZE,
        tolerance=dict.fromkeys(TOLERANCE, 0.0),
    )
    yield Kernel(caps, cache_write)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
KERNELS = tuple(_kernels())
