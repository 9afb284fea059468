"""Ragged batches against float64: 1 to 300 requests of 0 to 40,000 keys on a GPU, few and short ones elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import portable
from portable.backends.reference import attend
from portable.conformance import inputs
from portable.conformance.measure import LSE_TOLERANCE, error
from portable.kernel import KV, GraphLevel, Kernel, Needs, Op, Segment
from portable.layer import Layer, LayerTensors

pytest.importorskip("triton")

from portable.backends.triton import KERNELS as TRITON
from portable.platform.detect import describe
from portable.platform.emulated import activate

LAYERS = {
    "gqa": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    "window": {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "window": 128, "sinks": True},
    "invariant": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "batch_invariant": True},
    "softcap": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80, "softcap": 20.0},
}
KERNELS = {kernel.name: kernel for kernel in TRITON if kernel.caps.op in (Op.PREFILL, Op.PAGED)}
ARCHS = ("gfx942", "gfx950", "gfx1100", "sm90", "sm100")  # of which CI has a lane
NEEDS = Needs(page_size=16, query_len=512, seq_len=40_000)
SERVED = [
    (kernel, name)
    for kernel in KERNELS.values()
    for name, layer in LAYERS.items()
    if not all(kernel.why_not(describe(arch), Layer.gqa(**layer, dtype=torch.bfloat16), NEEDS) for arch in ARCHS)
]
served = pytest.mark.parametrize(("kernel", "layer"), SERVED, ids=[f"{kernel.name}-{name}" for kernel, name in SERVED])
SHOWN = 4  # query tokens at each end of a request that are compared


def lengths(draw: random.Random, requests: int, most: int, queries: int) -> list[tuple[int, int]]:
    """(query tokens, keys) of each request: all magnitudes up to `most`; a tenth has no keys, a tenth no queries.

    Half of the rest has one query token, the others up to `queries`, now and then more than there are keys.
    """
    found = []
    for _ in range(requests):
        keys = draw.choice([0, *[int((most + 1) ** draw.random())] * 9])
        new = draw.choice([0, *[1] * 5, *[draw.randint(1, queries)] * 4])
        found.append((new if draw.random() < 0.05 else min(new, keys), keys))
    return found


@dataclass
class Step:
    """A batch, and its K and V packed."""

    lens: list[tuple[int, int]]
    q: torch.Tensor
    kv: KV
    k: torch.Tensor
    v: torch.Tensor
    segment: Segment
    tensors: LayerTensors


def build(kernel: Kernel, layer: Layer, lens: list[tuple[int, int]], page: int, exact: bool, device: str) -> Step:
    """Random numbers, in pages at random places of which the rest is NaN, or packed for a kernel without pages."""
    total, width = sum(keys for _, keys in lens), layer.qk_head_dim
    rows = [torch.randn(total, layer.num_kv_heads, width, device=device).to(layer.dtype) for _ in range(2)]
    table, kv = None, KV(*rows)
    if kernel.caps.op is Op.PAGED:
        counts = [-(-keys // page) for _, keys in lens]
        pages = torch.randperm(sum(counts) + 1)
        table = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32)
        places, first = [], 0
        for r, (count, (_, keys)) in enumerate(zip(counts, lens, strict=True)):
            table[r, :count] = pages[first : first + count]
            each = torch.arange(keys)
            places.append(pages[first + each // page] * page + each % page)
            first += count
        slots, table = torch.cat(places).to(device), table.to(device)
        shape = (len(pages), page, layer.num_kv_heads, width)
        kv = KV(*(torch.full(shape, torch.nan, dtype=layer.dtype, device=device) for _ in rows))
        for pool, new in zip(kv, rows, strict=True):
            pool.flatten(0, 1)[slots] = new
    made = inputs.segment(replace(kernel, prepare=None), tuple(lens), layer, table, page, device=device)
    if not exact:  # the host knows bounds: no request is longer than the longest
        bounds = np.full_like(made.host_seq_lens, made.max_seq_len)
        made = replace(made, exact=False, host_seq_lens=bounds)
    made = replace(made, kernel=kernel, prepared=kernel.prepare(made, layer) if kernel.prepare else None)
    q = torch.randn(sum(n for n, _ in lens), layer.num_heads, width, device=device).to(layer.dtype)
    sinks = torch.linspace(5, -1, layer.num_heads, device=device) if layer.sinks else None
    return Step(lens, q, kv, *rows, made, LayerTensors(sinks=sinks))


def check(kernel: Kernel, layer: Layer, step: Step) -> None:
    out, lse = outputs(layer, step)
    kernel.run(step.q, step.kv, step.segment, layer, step.tensors, out, lse)
    compare(kernel, layer, step, out, lse)


def outputs(layer: Layer, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full((layer.num_heads, len(step.q)), torch.nan, device=step.q.device)
    return torch.full_like(step.q, torch.nan), lse


def compare(kernel: Kernel, layer: Layer, step: Step, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Every output is finite, and the first and the last tokens of each request are right."""
    assert torch.isfinite(out).all() and not lse.isnan().any()
    most, found = kernel.caps.tolerance[layer.dtype], []
    for rows, part, size in expected(layer, step):
        found.append((error(out[rows], part.out, size), error(lse[:, rows], part.lse)))
        assert (out[rows][(part.out == 0).all(-1)] == 0).all()
    wrong = [max(each) for each in zip(*found, strict=True)] if found else [0.0, 0.0]
    assert wrong[0] <= most and wrong[1] <= max(most, LSE_TOLERANCE), f"{wrong} where {most} is tolerated"


def expected(layer: Layer, step: Step) -> Iterator[tuple[slice, object, torch.Tensor]]:
    """For some query tokens of each request: their rows, the right result, and the size of what is summed."""
    tokens = keys = 0
    for queries, length in step.lens:
        k, v = step.k[keys : keys + length], step.v[keys : keys + length]
        for begin, end in {(0, min(SHOWN, queries)), (max(0, queries - SHOWN), queries)}:
            if begin < end:
                rows = slice(tokens + begin, tokens + end)
                given = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
                given |= {"sinks": step.tensors.sinks, "first": length - queries + begin, "compute": torch.float64}
                part, size = (attend(step.q[rows], k, values, **given) for values in (v, v.abs()))
                yield rows, part, size.out
        tokens, keys = tokens + queries, keys + length


def one(kernel: Kernel, name: str, seed: int, on: str, requests: int, most: int, longest: int) -> None:
    """A batch of up to so many requests, of up to `most` keys and `longest` query tokens each, on a device."""
    draw = random.Random(f"{kernel.name} {name} {seed}")
    torch.manual_seed(seed)
    layer = Layer.gqa(**LAYERS[name], dtype=torch.bfloat16)
    count = draw.randint(1, requests)
    lens = lengths(draw, count, most, draw.choice([4, longest]))
    if reasons := kernel.why_not(portable.detect(on), layer, Needs(page_size=16, query_len=512, seq_len=most)):
        pytest.skip("; ".join(reasons))
    exact = draw.random() < 0.5 or kernel.caps.op is Op.PREFILL
    served = [page for page in (16, 16, 64, 1, 48) if kernel.caps.page_sizes.why_not("page_size", page) is None]
    page, device = draw.choice(served or [1]), "cpu" if on.startswith("emulated") else on
    check(kernel, layer, build(kernel, layer, lens, page, exact, device))


@pytest.mark.device
@pytest.mark.parametrize("seed", range(6))
@served
def test_ragged_batches_are_right_on_this_device(kernel, layer, seed):
    one(kernel, layer, seed, "cuda", 300, 40_000, 300)


@pytest.mark.device
@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in KERNELS.values() if kernel.caps.graph is GraphLevel.ALWAYS],
    ids=lambda kernel: kernel.name,
)
def test_a_captured_step_serves_other_lengths(kernel):
    """Planning and run are captured with lengths that the host knows; the graph is replayed with others, in place."""
    layer, draw = Layer.gqa(**LAYERS["gqa"], dtype=torch.bfloat16), random.Random(0)
    lens = [(40, 3000), (1, 900), (17, 17), (0, 50), (33, 20_000), (1, 0), (1, 4000)]
    first = build(kernel, layer, lens, 16, False, "cuda")
    out, lse = outputs(layer, first)
    kernel.run(first.q, first.kv, first.segment, layer, first.tensors, out, lse)  # compiled before the capture
    known = replace(first.segment, exact=True, host_seq_lens=np.array([keys for _, keys in lens], np.int32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernel.prepare is not None
        made = replace(known, prepared=kernel.prepare(known, layer))
        kernel.run(first.q, first.kv, made, layer, first.tensors, out, lse)
    for turn in range(3):
        queries = [new for new, _ in lens] if turn == 0 else draw.sample([new for new, _ in lens], len(lens))
        keys = [draw.randint(0, length) if turn else length for _, length in lens]
        made.seq_lens.copy_(torch.tensor(keys))
        made.cu_seqlens_q.copy_(torch.tensor([0, *np.cumsum(queries)]))
        starts = np.cumsum([0, *(length for _, length in lens)])
        of = [slice(start, start + length) for start, length in zip(starts, keys, strict=False)]
        if kernel.caps.op is Op.PREFILL:  # packed again, so the requests have other keys
            of = [slice(0, sum(keys))]
        k, v = (torch.cat([rows[each] for each in of]) for rows in (first.k, first.v))
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        compare(kernel, layer, replace(first, lens=list(zip(queries, keys, strict=True)), k=k, v=v), out, lse)


@pytest.mark.parametrize("arch, layer, seed", [("gfx942", "gqa", 0), ("gfx950", "window", 1), ("gfx942", "softcap", 2)])
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS.values() if "gfx942" in kernel.caps.archs], ids=lambda kernel: kernel.name
)
def test_ragged_batches_are_right_on_an_emulated_device(kernel, arch, layer, seed, monkeypatch):
    monkeypatch.setitem(LAYERS, layer, LAYERS[layer] | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24})
    with activate(arch):
        one(kernel, layer, seed, f"emulated:{arch}", 5, 90, 30)
