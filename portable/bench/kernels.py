"""Attention kernels beside each other and beside their peers: decode by batch and context, prompts by length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from portable.attention import available_kernels
from portable.bench import peers, subjects
from portable.bench.problem import Pool, Problem, build
from portable.bench.timing import Job, contest
from portable.bench.workloads import Workload, decode
from portable.kernel import Kernel, Op
from portable.layer import Layer, UnsupportedError

if TYPE_CHECKING:
    from portable.platform.target import Target

REFERENCE = "reference"  # too slow to be beside anything
PAGE = 16
FREE = 0.5  # of a device's memory, that the caches of a row may take
Row = dict[str, Any]


def workloads(target: Target, quick: bool) -> Iterator[Workload]:
    """What is measured on a device; a row whose cache does not fit half of its memory is left out."""
    small = target.device == "cpu"
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float32 if small else torch.bfloat16)
    batches, contexts, prompts = [1, 8, 64, 256], [1024, 8192, 32768], [(1, 1024), (1, 4096), (1, 8192), (8, 2048)]
    if small:
        batches, contexts, prompts = [1, 8], [256, 1024], [(1, 128), (1, 512)]
    if quick:
        batches, contexts, prompts = batches[:2], contexts[:1], prompts[:1]
    for batch in batches:
        for context in contexts:
            work = decode(f"decode {batch} x {context}", layer, [context] * batch, PAGE)
            if target.memory is None or work.kv_bytes < FREE * target.memory:
                yield work
    for batch, length in prompts:
        lens = (length,) * batch
        yield Workload(name=f"prefill {batch} x {length}", layer=layer, query_lens=lens, seq_lens=lens, page_size=None)


def rows(
    target: Target, works: list[Workload], absent: dict[str, str], budget_ms: float, said: Callable[[str], None]
) -> Iterator[tuple[str, Row]]:
    """(name, row) of each workload: its bytes and operations, the selected kernel, and each contestant's times.

    Args:
        absent: gets the peers that are not here, with the reason.
        said: is told who is about to run.
    """
    device = torch.device(target.device)
    mine = [kernel for kernel in available_kernels(device) if kernel.caps.provider != REFERENCE]
    found = peers.load(device, absent)
    for number, work in enumerate(works):
        # a pool for each row: the memory of one context does not wait for the next
        problem = build(work, Pool(device, [work]))
        op = Op.PAGED if work.page_size else Op.PREFILL
        among = [kernel for kernel in mine if kernel.caps.op is op]
        begin = partial(_begin, said, work.name)
        with torch.no_grad():
            measured = contest(jobs(problem, among, found), budget_ms, 150.0 if number == 0 else 40.0, begin)
        yield (
            work.name,
            {
                "op": str(op),
                "batch": len(work.seq_lens),
                "context": max(work.seq_lens),
                "bytes": work.kv_bytes + problem.rotations[0].q.nbytes + problem.rotations[0].out.nbytes,
                "flops": work.flops,
                "selected": selected(problem, among, op),
                "contestants": {name: asdict(each) for name, each in measured.items()},
            },
        )


def jobs(problem: Problem, among: list[Kernel], found: dict[str, Any]) -> Iterator[Job]:
    outputs = [turn.out for turn in problem.rotations]
    for kernel in among:
        if not subjects.why_not(problem, kernel):
            yield Job(kernel.name, partial(subjects.calls, problem, kernel), outputs, problem.error, 1.5e-2)
    for name, (peer, function) in found.items():
        yield Job(name, partial(peers.calls, problem, peer, function), outputs, problem.error, peer.tolerance)


def selected(problem: Problem, among: list[Kernel], op: Op) -> str | None:
    """The kernel that an engine gets."""
    try:
        return subjects.chosen(problem, among, op, subjects.needs_of(problem)).name
    except UnsupportedError:
        return None


def share(row: Row, ceilings: dict[str, float], us: float) -> float:
    """The share of the device's own speed, of memory or of matrix products, whichever binds; NaN where not known.

    >>> share({"bytes": 2e6, "flops": 1e6}, {"copy TB/s": 1.0, "read TB/s": 2.0, "matmul TFLOP/s": 1.0}, 2.0)
    0.5
    """
    from portable.bench.ceilings import bandwidth

    if not ceilings or not us > 0:
        return math.nan
    least = max(row["bytes"] / bandwidth(ceilings), row["flops"] / ceilings["matmul TFLOP/s"]) * 1e-6
    return float(least / us)


def _begin(said: Callable[[str], None], row: str, who: str) -> bool:
    said(f"{row}: {who}")
    return True
