"""MLA decode and verify on a GPU, beside FlashMLA and FlashAttention 3: python ci/benchmarks/mla.py [--peers DIR]

`bench.py attention --stage DIR` gets the peers. Shapes are DeepSeek's, 512 + 64 latent columns in bf16 over pages of 64
tokens; rotations use other pages until 256 MB were touched. Metadata and work lists are made before the timing.

With --grid every kernel that is installed, adapters of vendors among them, over the shapes that a platform's `MEASURED`
is made of; each row ends with the kernel that is selected, and its time over that of the fastest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

from benchmarks.peers import unpacked  # noqa: E402
from benchmarks.timing import Job, Measure, contest, relative_error  # noqa: E402
from portable.attention import Kernels, available_kernels  # noqa: E402
from portable.kernel import KV, Kernel, Needs, Op, Segment  # noqa: E402
from portable.layer import Layer, LayerTensors  # noqa: E402
from portable.platform.detect import detect  # noqa: E402
from portable.ragged import next_power_of_2  # noqa: E402

PAGE = 64
POINTS = [(batch, keys) for batch in (1, 16, 128) for keys in (1024, 8192, 32768)]
GRID = [
    (heads, batch, keys, new, page)
    for page in (64, 16)
    for new in (1, 4)
    for heads in (16, 32, 64, 128)
    for batch in ((1, 4, 16, 64, 256) if new == 1 else (1, 16, 64))
    for keys in (1024, 4096, 16384, 65536)
    if batch * keys <= 1 << 22
]
Calls = list[Callable[[], object]]


class Problem:
    """Requests of `keys` cached tokens, the last `new` of which are queries; pages [n, size, 576], in random order."""

    def __init__(self, pool: torch.Tensor, heads: int, batch: int, keys: int, new: int = 1) -> None:
        self.layer = layer = Layer.mla(num_heads=heads)
        self.pages, self.page, self.batch, self.keys, self.new = pool, pool.shape[1], batch, keys, new
        query_len, seq_len, reqs = map(next_power_of_2, (new, keys, batch))
        self.needs = Needs(page_size=self.page, query_len=query_len, seq_len=seq_len, reqs=reqs)
        columns = -(-keys // self.page)
        count = min(
            32, max(1, math.ceil(256e6 / (batch * keys * layer.latent_dim * 2))), len(pool) // (batch * columns)
        )
        order = torch.randperm(len(pool), device=pool.device).to(torch.int32)
        self.tables = list(order[: count * batch * columns].view(count, batch, columns))
        shape = (batch * new, heads)
        kind: Any = {"dtype": layer.dtype, "device": pool.device}
        self.q = [torch.randn(*shape, layer.latent_dim, **kind) for _ in self.tables]
        self.out = [torch.empty(*shape, layer.kv_lora_rank, **kind) for _ in self.tables]
        self.seq_lens = torch.full((batch,), keys, dtype=torch.int32, device=pool.device)
        self.cu = torch.arange(batch + 1, dtype=torch.int32, device=pool.device) * new
        self.rows = sorted({b * new + j for b in (0, batch // 2, batch - 1) for j in range(new)})
        self.want = torch.stack([self._reference(row) for row in self.rows])

    def _reference(self, row: int) -> torch.Tensor:
        request, token = divmod(row, self.new)
        keys = self.pages[self.tables[0][request].long()].flatten(0, 1)[: self.keys - self.new + 1 + token].double()
        weights = torch.softmax(self.q[0][row].double() @ keys.T * self.layer.scale, -1)
        return weights @ keys[:, : self.layer.kv_lora_rank]

    def job(self, name: str, calls: Callable[[], Calls | None]) -> Job:
        return Job(name, calls, self.out, lambda _: relative_error(self.out[0][self.rows], self.want), 1.5e-2)

    def segment(self, kernel: Kernel, table: torch.Tensor) -> Segment:
        made = Segment(
            kernel=kernel,
            requests=slice(0, self.batch),
            tokens=slice(0, self.batch * self.new),
            cu_seqlens_q=self.cu,
            seq_lens=self.seq_lens,
            block_table=table,
            page_size=self.page,
            causal=True,
            max_query_len=self.new,
            max_seq_len=self.keys,
            host_query_lens=np.full(self.batch, self.new, np.int32),
            host_seq_lens=np.full(self.batch, self.keys, np.int32),
        )
        return made if kernel.prepare is None else replace(made, prepared=kernel.prepare(made, self.layer))

    def ours(self, kernel: Kernel) -> Calls:
        kv, tensors = KV(self.pages, None), LayerTensors()
        steps = [self.segment(kernel, table) for table in self.tables]
        return [
            partial(kernel.run, q, kv, step, self.layer, tensors, out, None)
            for q, step, out in zip(self.q, steps, self.out, strict=True)
        ]

    def fa3(self) -> Calls:
        """As vLLM drives it for MLA: the latent part of the queries apart."""
        ops, rank, rope = torch.ops._vllm_fa3_C, self.layer.kv_lora_rank, self.layer.qk_rope_head_dim
        pages = self.pages[:, :, None]
        none = (None,) * 4
        sizes = (self.batch, self.new, self.keys, self.layer.num_heads, 1, rope, rank)
        metadata = ops.get_scheduler_metadata(
            *sizes, self.layer.dtype, self.seq_lens, self.cu, *none, self.page, 0, True, -1, -1, False, 0, None, 0
        )

        def call(i: int) -> None:
            q = self.q[i]
            ops.fwd(
                q[..., rank:], pages[..., rank:], pages[..., :rank], None, None, q[..., :rank], self.out[i], self.cu,
                *(None,) * 3, self.seq_lens, self.new, self.keys, self.tables[i], *(None,) * 8, self.layer.scale, True,
                -1, -1, 0.0, True, metadata, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip

        return [partial(call, i) for i in range(len(self.q))]

    def flash_mla(self) -> Calls:
        """Its metadata are made by the first call."""
        heads, rank, metadata = self.layer.num_heads, self.layer.kv_lora_rank, [None, None]

        def call(i: int) -> None:
            metadata[:] = torch.ops._flashmla_C.dense_decode_fwd(
                self.q[i].view(self.batch, self.new, heads, -1), self.pages[:, :, None], rank, self.seq_lens,
                self.tables[i], self.layer.scale, self.new > 1, *metadata,
                self.out[i].view(self.batch, 1, self.new * heads, rank),
            )[2:4]  # fmt: skip

        return [partial(call, i) for i in range(len(self.q))]


def measured(problem: Problem, peers: set[str], budget: float) -> dict[str, Measure]:
    jobs = [problem.job(kernel.name, partial(problem.ours, kernel)) for kernel in able(problem)]
    jobs += [problem.job("fa3", problem.fa3)] if "fa3" in peers else []
    jobs += [problem.job("flash_mla", problem.flash_mla)] if "flashmla" in peers else []
    return contest(jobs, budget, 10.0, lambda name: True)


def able(problem: Problem) -> list[Kernel]:
    """The installed kernels that serve it, but for the reference."""
    every = [kernel for kernel in available_kernels() if kernel.caps.op is Op.MLA_DECODE]
    return [
        kernel
        for kernel in every
        if kernel.caps.provider != "reference" and not kernel.why_not(detect(), problem.layer, problem.needs)
    ]


def selected(problem: Problem, found: dict[str, Measure]) -> dict[str, Any]:
    """The kernel that a step of this shape gets, and its time over that of the fastest."""
    name = Kernels(detect(), problem.layer, None).choice(Op.MLA_DECODE, problem.needs).kernel.name
    best = min((each.us for each in found.values() if each.ok), default=math.nan)
    return {"kernel": name, "ratio": round(found[name].us / best, 3) if name in found else math.nan}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder that bench.py attention --stage filled")
    parser.add_argument("--grid", action="store_true", help="the shapes that selection is made of")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--budget", type=float, default=12, help="ms of timing for each contestant")
    args = parser.parse_args()
    torch.manual_seed(1)
    peers = set()
    for name in ("fa3", "flashmla") if args.peers else ():
        torch.ops.load_library(str(unpacked(args.peers / f"{name}.so.xz")))
        peers.add(name)
    pool = torch.empty(128 * 32768, 576, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 20):
        part.normal_()
    rows: dict[str, Any] = {}
    steps = [(heads, b, n, 1, PAGE) for heads in (16, 128) for b, n in POINTS]
    steps += [(16, 64, 8192, new, PAGE) for new in (1, 4)]
    with torch.no_grad():
        for heads, batch, keys, new, page in GRID if args.grid else steps:
            name = f"H{heads} q{new} page{page} b{batch} {keys}"
            problem = Problem(pool.view(-1, page, 576), heads, batch, keys, new)
            found = measured(problem, peers, args.budget)
            rows[name] = {who: asdict(each) for who, each in found.items()}
            shown: dict[str, Any] = {who: round(m.us, 1) if m.ok else m.failed or "wrong" for who, m in found.items()}
            if args.grid:
                shown["selected"] = rows[name]["selected"] = selected(problem, found)
            print(name, shown, flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
