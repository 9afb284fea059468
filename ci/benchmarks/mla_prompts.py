"""The MLA benchmark's prompts, and the write of latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.mla_problems import FEW, NONE, TOLERANCE, Calls, Problem
from benchmarks.timing import Job, relative_error
from portable import Batch, MlaAttention
from portable.kernel import KV, Kernel, Needs, Op, Segment
from portable.layer import Layer
from portable.ragged import next_power_of_2


class Prompt(Problem):
    """P3: one causal prompt of up-projected heads, 192 wide with values of 128."""

    op = Op.PREFILL

    def __init__(self, heads: int, tokens: int, pool: torch.Tensor) -> None:
        self.layer = Layer.mla(num_heads=heads)
        self.tokens, self.device = tokens, pool.device
        self.needs = Needs(True, None, next_power_of_2(tokens), next_power_of_2(tokens))
        kind: Any = {"dtype": self.layer.dtype, "device": pool.device}
        self.sets = [[torch.randn(tokens, heads, width, **kind) for width in (192, 192, 128)] for _ in range(2)]
        self.out = [torch.empty(tokens, heads, 128, **kind) for _ in self.sets]
        self.lens = torch.full((1,), tokens, dtype=torch.int32, device=pool.device)
        self.cu = torch.tensor([0, tokens], dtype=torch.int32, device=pool.device)
        self.rows = sorted({0, min(127, tokens - 1), tokens // 3, tokens - 1})
        q, k, v = (each.double() for each in (self.sets[0][0][self.rows], *self.sets[0][1:]))
        right = []
        for query, row in zip(q, self.rows, strict=True):
            weights = torch.softmax(torch.einsum("hd,khd->hk", query, k[: row + 1]) * self.layer.scale, -1)
            right.append(torch.einsum("hk,khd->hd", weights, v[: row + 1]))
        self.want = torch.stack(right)

    def jobs(self, kernels: Sequence[Kernel]) -> Iterator[Job]:
        """Of a vendor the first that can serve: FlashAttention 3's others pad V, and take 74 GiB for parts."""
        names = {kernel.name: kernel.caps.provider for kernel in kernels}
        met = set()
        for job in super().jobs(kernels):
            provider = names[job.name]
            if provider == "triton" or provider not in met:
                met.add(provider)
                yield job

    def job(self, name: str, calls: Callable[[], Calls]) -> Job:
        return Job(name, calls, self.out, lambda _: relative_error(self.out[0][self.rows], self.want), TOLERANCE)

    def of(self, kernel: Kernel) -> Calls:
        lens = np.array([self.tokens], np.int32)
        made = Segment(
            kernel=kernel,
            requests=slice(0, 1),
            tokens=slice(0, self.tokens),
            cu_seqlens_q=self.cu,
            seq_lens=self.lens,
            block_table=None,
            page_size=64,
            causal=True,
            max_query_len=self.tokens,
            max_seq_len=self.tokens,
            host_query_lens=lens,
            host_seq_lens=lens,
        )
        return self._runs(made if kernel.prepare is None else replace(made, prepared=kernel.prepare(made, self.layer)))

    def _runs(self, step: Segment) -> Calls:
        return [
            partial(step.kernel.run, q, KV(k, v), step, self.layer, NONE, out, None)
            for (q, k, v), out in zip(self.sets, self.out, strict=True)
        ]

    def dispatched(self) -> Iterator[Job]:
        attn = MlaAttention(
            self.layer, page_size=64, device=self.device, max_tokens=self.tokens, max_seq_len=self.tokens
        )
        (prefill,) = attn.plan(Batch.from_lens([self.tokens], [self.tokens], device=self.device)).segments.prefills
        step = prefill.new
        assert step is not None
        yield self.job("dispatched", lambda: self._runs(step))

    def peers(self, found: Mapping[str, Any]) -> Iterator[Job]:
        if "fa3" in found:
            yield self.job("fa3", self._fa3)

    def _fa3(self) -> Calls:
        def call(i: int) -> None:
            torch.ops._vllm_fa3_C.fwd(
                *self.sets[i], None, None, None, self.out[i], self.cu, self.cu, None, None, None, self.tokens,
                self.tokens, *(None,) * 9, self.layer.scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None
            )  # fmt: skip

        return [partial(call, i) for i in range(len(self.sets))]


class Write(Problem):
    """Latents and rope parts of so many tokens to random pages, beside a copy of as many bytes."""

    op = Op.CACHE_WRITE

    def __init__(self, tokens: int, pool: torch.Tensor) -> None:
        device = self.device = pool.device
        self.layer, self.needs = Layer.mla(num_heads=16), Needs(page_size=64)
        kind: Any = {"dtype": self.layer.dtype, "device": device}
        pages, at = 4 * tokens // 64, torch.arange(tokens, device=device)
        self.slots = [torch.randperm(pages, device=device)[at // 64] * 64 + at % 64 for _ in range(FEW)]
        self.new = [torch.randn(tokens, self.layer.latent_dim, **kind).split([512, 64], -1) for _ in range(FEW)]
        self.new = [(kv_c.contiguous(), k_pe.contiguous()) for kv_c, k_pe in self.new]
        self.caches = [torch.zeros(pages, 64, self.layer.latent_dim, **kind) for _ in range(FEW)]
        self.rows = [torch.cat(each, -1) for each in self.new]
        self.copies = [torch.empty_like(each) for each in self.rows]

    def job(self, name: str, calls: Callable[[], Calls]) -> Job:
        return Job(name, calls, self.caches, self._error, 1e-3)

    def _error(self, _: object) -> float:
        return relative_error(self.caches[0].flatten(0, 1)[self.slots[0]], self.rows[0])

    def of(self, kernel: Kernel) -> Calls:
        each = zip(self.new, self.caches, self.slots, strict=True)
        return [partial(kernel.run, *new, KV(cache, None), slots, self.layer, NONE) for new, cache, slots in each]

    def peers(self, found: Mapping[str, Any]) -> Iterator[Job]:
        pairs = zip(self.copies, self.rows, strict=True)
        copies: Calls = [partial(to.copy_, source) for to, source in pairs]
        yield Job("copy", lambda: copies, self.copies, lambda _: relative_error(self.copies[0], self.rows[0]), 1e-3)
        yield self.job("index_copy", self._index_copies)

    def _index_copies(self) -> Calls:
        def call(i: int) -> None:
            self.caches[i].flatten(0, 1).index_copy_(0, self.slots[i], torch.cat(self.new[i], -1))

        return [partial(call, i) for i in range(FEW)]
