"""The tensors of a workload, in rotations that touch different pages, and its float64 reference on sampled rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portable.bench.timing import relative_error
from portable.bench.workloads import FP8, Workload
from portable.kernel import KV
from portable.layer import LayerTensors

K_SCALE, V_SCALE = 0.75, 1.5
COLD = 256e6  # bytes that a graph touches before it comes back to a page: the L2 of an H100 holds 50 MB


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    q: torch.Tensor  # [T, H, D]
    kv: KV
    block_table: torch.Tensor | None  # [B, W] i32
    out: torch.Tensor  # [T, H, Dv]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What a contestant is given."""

    work: Workload
    tensors: LayerTensors
    rotations: Sequence[Rotation]
    cu_seqlens_q: torch.Tensor  # [B + 1] i32
    seq_lens: torch.Tensor  # [B] i32
    rows: Sequence[int]  # query tokens of the first rotation that the reference knows
    want: torch.Tensor  # [len(rows), H, Dv] f64

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def max_query_len(self) -> int:
        return max(self.work.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.work.seq_lens)

    def error(self, result: object = None) -> float:
        """Of the first rotation's output, or of what a call returned instead; every element must be finite."""
        out = result if isinstance(result, torch.Tensor) else self.rotations[0].out
        return relative_error(out[list(self.rows)], self.want) if torch.isfinite(out).all() else math.nan


class Pool:
    """K and V of every paged workload, allocated once: views of it are caches of any page size and width."""

    def __init__(self, device: torch.device, works: Sequence[Workload]) -> None:
        """Large enough for the rotations of each of `works`."""
        self.device = device
        self.sizes: dict[torch.dtype, int] = {}  # bytes of each of K and V
        for work in works:
            if work.page_size:
                dtype = work.layer.kv_dtype
                self.sizes[dtype] = max(self.sizes.get(dtype, 0), paged_tokens(work) * bytes_per_token(work))
        self.parts: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def pages(self, work: Workload) -> KV:
        """[pages, page_size, Hkv, D] over the whole pool."""
        layer = work.layer
        if layer.kv_dtype not in self.parts:
            self.parts[layer.kv_dtype] = (self._filled(layer.kv_dtype), self._filled(layer.kv_dtype))
        assert work.page_size is not None
        shape = (work.page_size, layer.num_kv_heads, layer.qk_head_dim)
        k, v = (part[: part.numel() // math.prod(shape) * math.prod(shape)] for part in self.parts[layer.kv_dtype])
        return KV(k.view(-1, *shape), v.view(-1, *shape))

    def _filled(self, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(self.sizes[dtype] // dtype.itemsize, dtype=dtype, device=self.device)
        for part in whole.split(1 << 27):
            values = torch.empty(len(part), dtype=torch.bfloat16, device=self.device).normal_()
            part.copy_(values / K_SCALE if dtype == FP8 else values)
        return whole


def rotations(work: Workload) -> int:
    """Enough to touch 256 MB, at most 32; contiguous K/V, far larger than the L2 with Q and the output, take 2."""
    return min(32, max(1, math.ceil(COLD / work.kv_bytes))) if work.page_size else 2


def paged_tokens(work: Workload) -> int:
    assert work.page_size is not None
    return rotations(work) * sum(-(-k // work.page_size) * work.page_size for k in work.seq_lens)


def bytes_per_token(work: Workload) -> int:
    return work.layer.num_kv_heads * work.layer.qk_head_dim * work.layer.kv_dtype.itemsize


def build(work: Workload, pool: Pool) -> Problem:
    """Random bf16 queries and pages; a random page for every place of every block table."""
    layer, device = work.layer, pool.device
    num_tokens = sum(work.query_lens)
    count = rotations(work)
    many: Any = {"dtype": layer.dtype, "device": device}
    if work.page_size:
        pages = pool.pages(work)
        caches = [pages] * count
        tables = block_tables(work, len(pages.k), count, device)
    else:
        shape = (sum(work.seq_lens), layer.num_kv_heads)
        widths = (layer.qk_head_dim, layer.v_head_dim)
        caches = [KV(*(torch.randn(*shape, width, **many) for width in widths)) for _ in range(count)]
        tables = [None] * count
    scales = [torch.tensor(s, device=device) for s in (K_SCALE, V_SCALE)] if layer.kv_dtype == FP8 else [None, None]
    sinks = None
    if layer.sinks:  # as heavy as all the visible keys together, so that one left out shows
        sinks = (torch.randn(layer.num_heads, device=device) + math.log(max(work.visible))).bfloat16().float()
    heads = (num_tokens, layer.num_heads)
    return sampled(
        work,
        LayerTensors(sinks=sinks, k_scale=scales[0], v_scale=scales[1]),
        [
            Rotation(
                torch.randn(*heads, layer.qk_head_dim, **many),
                kv,
                table,
                torch.empty(*heads, layer.v_head_dim, **many),
            )
            for kv, table in zip(caches, tables, strict=True)
        ],
    )


def block_tables(work: Workload, num_pages: int, count: int, device: torch.device) -> list[torch.Tensor | None]:
    """[B, W] i32 each; a page has one owner in a table, and another in the next one where the pool is large enough."""
    assert work.page_size is not None
    needed = torch.tensor([-(-k // work.page_size) for k in work.seq_lens], device=device)
    width = int(needed.max())
    live = torch.arange(width, device=device) < needed[:, None]
    order = torch.randperm(num_pages, device=device).to(torch.int32)
    tables: list[torch.Tensor | None] = []
    for number in range(count):
        first = number * int(needed.sum())
        table = torch.zeros(len(needed), width, dtype=torch.int32, device=device)
        table[live] = order[(first + torch.arange(int(needed.sum()), device=device)) % num_pages]
        tables.append(table)
    return tables


def sampled(work: Workload, tensors: LayerTensors, turns: Sequence[Rotation]) -> Problem:
    """With the reference of the first rotation: some requests, and of each its first, middle and last query token."""
    device = turns[0].q.device
    count = len(work.seq_lens)
    by_length = sorted(range(count), key=work.seq_lens.__getitem__)
    starts = [0]
    for q in work.query_lens:
        starts.append(starts[-1] + q)
    chosen = sorted({0, count // 2, count - 1, by_length[0], by_length[-1]})
    rows, want = [], []
    for request in chosen:
        q, k = work.query_lens[request], work.seq_lens[request]
        keys, values = (
            keys_of(part, work, turns[0], request, scale)
            for part, scale in zip(turns[0].kv, (tensors.k_scale, tensors.v_scale), strict=True)
        )
        for token in sorted({0, 1, q // 2, q - 1} & set(range(q))):
            rows.append(starts[request] + token)
            last = k - q + token + 1
            left = work.layer.window[0]
            first = 0 if left is None else max(0, last - 1 - left)
            want.append(attend(turns[0].q[rows[-1]], keys[first:last], values[first:last], work, tensors))
    return Problem(
        work,
        tensors,
        turns,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(work.seq_lens, dtype=torch.int32, device=device),
        rows,
        torch.stack(want),
    )


def keys_of(
    part: torch.Tensor | None, work: Workload, turn: Rotation, request: int, scale: torch.Tensor | None
) -> torch.Tensor:
    """[Sk, Hkv, D] of one request, as the kernel must understand them."""
    assert part is not None
    length = work.seq_lens[request]
    if turn.block_table is None:
        start = sum(work.seq_lens[:request])
        return part[start : start + length]
    count = -(-length // part.shape[1])
    pages = turn.block_table[request, :count].long()
    found = part.view(torch.uint8)[pages].view(part.dtype) if part.dtype == FP8 else part[pages]
    found = found.flatten(0, 1)[:length]
    return found if scale is None else found.float() * scale


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Workload, tensors: LayerTensors) -> torch.Tensor:
    """q [H, D], k and v [Sk, Hkv, D] to [H, Dv], all in float64."""
    heads, kv_heads = work.layer.num_heads, work.layer.num_kv_heads
    scores = (
        torch.einsum("kgd,nkd->kgn", q.double().view(kv_heads, heads // kv_heads, -1), k.double()) * work.layer.scale
    )
    if tensors.sinks is not None:
        scores = torch.cat([scores, tensors.sinks.double().view(kv_heads, -1, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : len(k)]
    return torch.einsum("kgn,nkd->kgd", weights, v.double()).reshape(heads, -1)
