"""The workloads of the MLA benchmark: inputs, contestants, and what is right; here decode and verify."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.timing import Job, relative_error
from portable import Batch, MlaAttention
from portable.attention import Kernels, available_kernels
from portable.kernel import KV, Kernel, Needs, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.platform.detect import detect
from portable.platform.target import Target
from portable.ragged import next_power_of_2

TOUCHED, ROTATIONS, FEW = 256e6, 32, 8  # bytes of other pages, and the most sets of them
TOLERANCE = 1.5e-2
FLASHINFER = 128 << 20, 8 << 20  # bytes for partial results and for the work list, as its wrapper has them
NONE = LayerTensors()
Calls = list[Callable[[], object]]


class Shape(NamedTuple):
    """Requests of `keys` cached tokens, the last `new` of which are queries."""

    heads: int
    batch: int
    keys: int
    new: int = 1
    page: int = 64


def able(device: torch.device) -> list[Kernel]:
    """What may run here. PyTorch's own kernels copy the pages, so they take part on a CPU alone."""
    left_out = {"reference"} if device.type == "cpu" else {"reference", "torch"}
    return [kernel for kernel in available_kernels(device) if kernel.caps.provider not in left_out]


@cache
def chooser(target: Target, layer: Layer) -> Kernels:
    return Kernels(target, layer, None)


class Problem:
    """A workload; `op` of its kernels, `layer` and `needs` say which can serve it."""

    op: Op
    layer: Layer
    needs: Needs
    device: torch.device

    def jobs(self, kernels: Sequence[Kernel]) -> Iterator[Job]:
        """One for each kernel that can serve."""
        target = detect(self.device)
        for kernel in kernels:
            if kernel.caps.op is self.op and not kernel.why_not(target, self.layer, self.needs):
                yield self.job(kernel.name, partial(self.of, kernel))

    def job(self, name: str, calls: Callable[[], Calls]) -> Job:
        raise NotImplementedError

    def of(self, kernel: Kernel) -> Calls:
        raise NotImplementedError

    def selected(self) -> str:
        """The kernel that a step of this shape gets."""
        return chooser(detect(self.device), self.layer)(self.op, self.needs).name

    def dispatched(self) -> Iterator[Job]:
        """A planned step."""
        yield from ()

    def peers(self, found: Mapping[str, Any]) -> Iterator[Job]:
        """Vendors' operators, called as vLLM or their own package does."""
        yield from ()


class Decode(Problem):
    """Requests over pages in random order; `quick`: fewer rotations, and nothing but NaN is found wrong."""

    op = Op.MLA_DECODE

    def __init__(self, shape: Shape, pool: torch.Tensor, quick: bool = False) -> None:
        heads, batch, keys, new, page = self.shape = shape
        self.layer = layer = Layer.mla(num_heads=heads)
        self.device, self.quick = pool.device, quick
        query_len, seq_len, reqs = map(next_power_of_2, (new, keys, batch))
        self.needs = Needs(True, page, query_len, seq_len, reqs=reqs)
        self.pages = pool.view(-1, page, layer.latent_dim)
        columns = -(-keys // page)
        need, there = batch * columns, len(self.pages)
        wanted = math.ceil(TOUCHED / (batch * keys * layer.latent_dim * 2))
        count = max(1, min(FEW if quick else ROTATIONS, wanted, there // need))
        order = torch.randperm(there, device=pool.device).to(torch.int32)
        if there < need:  # a pool for compiling: pages are used again
            order = order.repeat(-(-need // there))
        self.tables = list(order[: count * need].view(count, batch, columns))
        kind: Any = {"dtype": layer.dtype, "device": pool.device}
        self.q = [torch.randn(batch * new, heads, layer.latent_dim, **kind) for _ in self.tables]
        self.out = [torch.empty(batch * new, heads, layer.kv_lora_rank, **kind) for _ in self.tables]
        self.seq_lens = torch.full((batch,), keys, dtype=torch.int32, device=pool.device)
        self.cu = torch.arange(batch + 1, dtype=torch.int32, device=pool.device) * new
        self.rows = sorted({b * new + j for b in (0, batch // 2, batch - 1) for j in range(new)})
        self.want = None if quick else torch.stack([self._right(row) for row in self.rows])

    def _right(self, row: int) -> torch.Tensor:
        request, token = divmod(row, self.shape.new)
        seen = self.shape.keys - self.shape.new + 1 + token
        keys = self.pages[self.tables[0][request].long()].flatten(0, 1)[:seen].double()
        weights = torch.softmax(self.q[0][row].double() @ keys.T * self.layer.scale, -1)
        return weights @ keys[:, : self.layer.kv_lora_rank]

    def _error(self, _: object) -> float:
        if self.want is None:
            return 0.0 if torch.isfinite(self.out[0]).all() else math.nan
        return relative_error(self.out[0][self.rows], self.want)

    def job(self, name: str, calls: Callable[[], Calls]) -> Job:
        return Job(name, calls, self.out, self._error, TOLERANCE)

    def _segment(self, kernel: Kernel, table: torch.Tensor) -> Segment:
        _, batch, keys, new, page = self.shape
        made = Segment(
            kernel=kernel,
            requests=slice(0, batch),
            tokens=slice(0, batch * new),
            cu_seqlens_q=self.cu,
            seq_lens=self.seq_lens,
            block_table=table,
            page_size=page,
            causal=True,
            max_query_len=new,
            max_seq_len=keys,
            host_query_lens=np.full(batch, new, np.int32),
            host_seq_lens=np.full(batch, keys, np.int32),
        )
        return made if kernel.prepare is None else replace(made, prepared=kernel.prepare(made, self.layer))

    def of(self, kernel: Kernel) -> Calls:
        return self._runs([self._segment(kernel, table) for table in self.tables])

    def _runs(self, steps: list[Segment]) -> Calls:
        kv = KV(self.pages, None)
        return [
            partial(step.kernel.run, q, kv, step, self.layer, NONE, out, None)
            for q, step, out in zip(self.q, steps, self.out, strict=True)
        ]

    def dispatched(self) -> Iterator[Job]:
        _, batch, keys, new, page = self.shape
        attn = MlaAttention(
            self.layer,
            page_size=page,
            device=self.device,
            max_reqs=batch,
            max_tokens=batch * new,
            max_seq_len=keys,
        )
        steps = []
        for table in self.tables:
            step = Batch.from_lens([new] * batch, [keys] * batch, block_table=table.cpu().numpy(), page_size=page,
                                   device=self.device)  # fmt: skip
            (segment,) = attn.plan(step).segments.decodes
            steps.append(segment)
        yield self.job("dispatched", lambda: self._runs(steps))

    def peers(self, found: Mapping[str, Any]) -> Iterator[Job]:
        if "fa3" in found:
            yield self.job("fa3", self._fa3)
        if "flashmla" in found:
            yield self.job("flash_mla", self._flash_mla)
        if "flashinfer" in found:
            yield self.job("flashinfer", partial(self._flashinfer, found["flashinfer"]))

    def _fa3(self) -> Calls:
        """The latent part of the queries apart."""
        ops, rank, rope = torch.ops._vllm_fa3_C, self.layer.kv_lora_rank, self.layer.qk_rope_head_dim
        heads, batch, keys, new, page = self.shape
        pages = self.pages[:, :, None]
        sizes = (batch, new, keys, heads, 1, rope, rank)
        metadata = ops.get_scheduler_metadata(
            *sizes, self.layer.dtype, self.seq_lens, self.cu, *(None,) * 4, page, 0, True, -1, -1, False, 0, None, 0
        )

        def call(i: int) -> None:
            q = self.q[i]
            ops.fwd(
                q[..., rank:], pages[..., rank:], pages[..., :rank], None, None, q[..., :rank], self.out[i], self.cu,
                *(None,) * 3, self.seq_lens, new, keys, self.tables[i], *(None,) * 8, self.layer.scale, True,
                -1, -1, 0.0, True, metadata, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip

        return [partial(call, i) for i in range(len(self.q))]

    def _flash_mla(self) -> Calls:
        """Its metadata are made by the first call."""
        heads, batch, _, new, _ = self.shape
        rank, metadata = self.layer.kv_lora_rank, [None, None]

        def call(i: int) -> None:
            metadata[:] = torch.ops._flashmla_C.dense_decode_fwd(
                self.q[i].view(batch, new, heads, -1), self.pages[:, :, None], rank, self.seq_lens, self.tables[i],
                self.layer.scale, new > 1, *metadata, self.out[i].view(batch, 1, new * heads, rank),
            )[2:4]  # fmt: skip

        return [partial(call, i) for i in range(len(self.q))]

    def _flashinfer(self, module: Any) -> Calls:
        """Planned once on the host, as its wrapper does: pages are all that differs between the calls."""
        heads, batch, _, new, page = self.shape
        rank, causal = self.layer.kv_lora_rank, new > 1
        partials, work = (torch.empty(size, dtype=torch.uint8, device=self.device) for size in FLASHINFER)
        host = torch.empty_like(work, device="cpu")
        pages = torch.arange(batch + 1, dtype=torch.int32) * self.tables[0].shape[1]
        lengths = self.cu.cpu(), pages, self.seq_lens.cpu()
        plan, used = module.plan(partials, work, host, *lengths, heads, rank, causal)
        work[:used] = host[:used]
        latents, ropes = self.pages[..., :rank], self.pages[..., rank:]

        def call(i: int) -> None:
            q = self.q[i]
            module.run(
                partials, work, plan, q[..., :rank], q[..., rank:], latents, ropes, self.tables[i].flatten(),
                self.out[i], None, int(causal), heads, page, self.layer.scale, False, 1.0, 1.0, None,
            )  # fmt: skip

        return [partial(call, i) for i in range(len(self.q))]
