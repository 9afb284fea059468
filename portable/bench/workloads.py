"""What is measured: batches as data. Lengths are tokens; a page of None is contiguous K/V."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from portable.layer import Layer

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch of one layer: a line of the record for each contestant."""

    name: str
    layer: Layer
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_size: int | None

    @property
    def visible(self) -> tuple[int, ...]:
        """Keys that a request's queries see at all."""
        left = self.layer.window[0]
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return tuple(k if left is None else min(k, q + left) for q, k in pairs)

    @property
    def kv_bytes(self) -> int:
        """K and V, read once."""
        layer = self.layer
        width = layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim) * layer.kv_dtype.itemsize
        return sum(self.visible) * width

    @property
    def flops(self) -> float:
        """Of the two matrix products, over visible keys only."""
        left = self.layer.window[0]
        reach = math.inf if left is None else left + 1
        pairs = 0.0
        for q, k in zip(self.query_lens, self.seq_lens, strict=True):
            pairs += q * (k - q) + q * (q + 1) / 2 if reach == math.inf else q * min(k, reach)
        return 2.0 * self.layer.num_heads * (self.layer.qk_head_dim + self.layer.v_head_dim) * pairs


def decode(name: str, layer: Layer, seq_lens: list[int], page: int, new: int = 1) -> Workload:
    return Workload(
        name=f"{name} page {page}",
        layer=layer,
        query_lens=(new,) * len(seq_lens),
        seq_lens=tuple(seq_lens),
        page_size=page,
    )


def log_uniform(count: int, least: int, most: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [round(math.exp(draw.uniform(math.log(least), math.log(most)))) for _ in range(count)]


def shrunk(work: Workload) -> Workload:
    """The same shape for a CPU: at most 3 requests and 40 keys; a request's query tokens stay fewer than its keys."""
    first = sorted({0, len(work.seq_lens) // 2, len(work.seq_lens) - 1})
    seq_lens = [min(40, work.seq_lens[i]) for i in first]
    query_lens = [min(work.query_lens[i], k) for i, k in zip(first, seq_lens, strict=True)]
    window = work.layer.window if work.layer.window[0] is None else (7, 0)
    layer = replace(work.layer, window=window)
    return replace(work, layer=layer, query_lens=tuple(query_lens), seq_lens=tuple(seq_lens))
