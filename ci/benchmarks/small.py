"""The rows beside attention: merging two partial results, writing the cache, and the host's time in an eager decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import peers, subjects
from benchmarks.problem import Pool, Problem, build
from benchmarks.timing import Job, Measure, contest, host_microseconds, reason, relative_error
from benchmarks.workloads import decode
from portable import Attention, Batch, Layer
from portable.attention import load_kernels
from portable.kernel import KV, Kernel
from portable.layer import LayerTensors

Seen = Callable[[str], bool]
LAYER = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
PASSES = 4  # over all calls: for a second or two, a host took 25 us for a launch that took 16 before and after


def merge(
    kernels: list[Kernel], absent: dict[str, str], device: torch.device, tokens: int, seen: Seen
) -> dict[str, Measure]:
    """[8192, 32, 128] from two partial results, beside a copy of as many bytes."""
    bf16: Any = {"dtype": torch.bfloat16, "device": device}
    heads, width = LAYER.num_heads, LAYER.v_head_dim
    sets = []
    for _ in range(3):  # 600 MB
        a, b = (torch.randn(tokens, heads, width, **bf16) for _ in range(2))
        lse_a, lse_b = (torch.randn(heads, tokens, device=device) for _ in range(2))
        sets.append((torch.empty_like(a), torch.empty_like(lse_a), a, lse_a, b, lse_b))
    out, _, a, lse_a, b, lse_b = sets[0]
    weights = torch.softmax(torch.stack([lse_a, lse_b]).double(), 0).transpose(1, 2)[..., None]
    want = weights[0] * a.double() + weights[1] * b.double()
    runs: dict[str, Callable[..., object]] = {
        f"portable {kernel.name}": partial(_merge_by, kernel) for kernel in kernels
    }
    runs |= peers.merges(absent)
    outputs = [each for one in sets for each in one[:2]]
    jobs = [
        Job(
            name,
            partial(list, [partial(run, *s) for s in sets]),
            outputs,
            lambda _: relative_error(out, want),
            1e-2,
        )
        for name, run in runs.items()
    ]
    return contest([*jobs, copy_job(3 * a.nbytes + 3 * lse_a.nbytes, device)], 40.0, 100.0, seen)


def _merge_by(kernel: Kernel, out: torch.Tensor, lse: torch.Tensor, *parts: torch.Tensor) -> None:
    kernel.run(parts[::2], parts[1::2], None, out, lse)


def cache_write(
    kernels: list[Kernel], absent: dict[str, str], device: torch.device, tokens: int, page: int, seen: Seen
) -> dict[str, Measure]:
    """8,192 tokens of K and V, 8 heads of 128, into pages at random places, beside a copy of as many bytes."""
    bf16: Any = {"dtype": torch.bfloat16, "device": device}
    heads, width = LAYER.num_kv_heads, LAYER.qk_head_dim
    sets = []
    for _ in range(6):  # 400 MB of rows and slots
        pages = torch.randperm(4 * tokens // page, device=device)[: tokens // page]
        place = torch.arange(tokens, device=device)
        cache = KV(*(torch.empty(4 * tokens // page, page, heads, width, **bf16) for _ in range(2)))
        k, v = (torch.randn(tokens, heads, width, **bf16) for _ in range(2))
        sets.append((k, v, cache, pages[place // page] * page + place % page))
    k, v, cache, slots = sets[0]
    runs: dict[str, Callable[..., object]] = {
        f"portable {kernel.name}": lambda k, v, kv, slots, kernel=kernel: kernel.run(
            k, v, kv, slots, LAYER, LayerTensors()
        )
        for kernel in kernels
    }
    runs |= peers.cache_writes(absent) if device.type != "cpu" else {}

    def error(_: object) -> float:
        """0, or 1 where a slot is wrong or another one was written."""
        for new, pages in zip((k, v), cache, strict=True):
            assert pages is not None
            flat = pages.flatten(0, 1)
            if not torch.equal(flat[slots], new) or int(flat.isnan().any(-1).any(-1).sum()) != 3 * tokens:
                return 1.0
        return 0.0

    outputs = [pages for one in sets for pages in one[2] if pages is not None]
    jobs = [
        Job(name, partial(list, [partial(run, *s) for s in sets]), outputs, error, 1e-9) for name, run in runs.items()
    ]
    return contest([*jobs, copy_job(4 * k.nbytes, device)], 40.0, 100.0, seen)


def copy_job(moved: int, device: torch.device) -> Job:
    """A plain copy that reads and writes `moved` bytes in all."""
    pairs = [
        [torch.empty(moved // 4, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)] for _ in range(4)
    ]
    calls = [lambda to=to, source=source: to.copy_(source) for to, source in pairs]
    return Job("copy", lambda: calls, [pairs[0][0]], lambda _: relative_error(*pairs[0]), 1e-9)


def host(kernels: list[Kernel], found_peers: dict[str, peers.Peer], device: torch.device, seen: Seen) -> dict[str, Any]:
    """us of host time of an eager decode, 64 keys a request, so that the device is never waited for."""
    found: dict[str, Any] = {}
    for size in (1, 64, 256):
        work = decode(f"host {size}", LAYER, [64] * size, 16)
        problem = build(work, Pool(device, [work]))
        each: dict[str, Callable[[], dict[str, tuple[float, float]]]] = {
            f"decode {size} portable {kernel.name}": partial(_host_of, kernel, problem) for kernel in kernels
        }
        each |= {f"decode {size} {name}": partial(_host_of_peer, peer, problem) for name, peer in found_peers.items()}
        for name, measure in [*each.items()] * PASSES:
            if seen(name) and "failed" not in found.get(name, {}):
                try:
                    found[name] = _lower(found.get(name, {}), measure())
                except Exception as error:
                    found[name] = {"failed": reason(error)}
    return {name: times for name, times in found.items() if times}


def _lower(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Of each call, the pass with the lower median."""
    return {name: min(times, old.get(name, times)) for name, times in new.items()}


def _host_of_peer(peer: peers.Peer, problem: Problem) -> dict[str, tuple[float, float]]:
    calls = peers.calls(problem, peer)
    return {} if calls is None else {"call": host_microseconds(calls[0], problem.device)}


def _host_of(kernel: Kernel, problem: Problem) -> dict[str, tuple[float, float]]:
    if reasons := subjects.why_not(problem, kernel):
        raise ValueError("; ".join(reasons))
    turn = problem.rotations[0]
    device, lens = problem.device, problem.work.seq_lens
    call = subjects.calls(problem, kernel)[0]
    found = {"Kernel.run": host_microseconds(call, device)}
    if kernel in load_kernels():
        attn = Attention(LAYER, page_size=16, device=str(device), max_reqs=256, backend=f"paged={kernel.name}")
        batch = Batch.from_lens([1] * len(lens), list(lens), block_table=turn.block_table, page_size=16, device=device)
        plan = attn.plan(batch)
        found["Attention.run"] = host_microseconds(lambda: attn.run(turn.q, turn.kv, plan, out=turn.out), device)
        found["Attention.plan"] = host_microseconds(lambda: attn.plan(batch), device)
    return found
