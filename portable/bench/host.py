"""What the host spends: planning a step, calling a layer, and replaying a step as a graph instead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable.attention import Attention
from portable.batch import Batch
from portable.bench import subjects
from portable.bench.problem import Pool, build
from portable.bench.timing import finish, host_microseconds
from portable.bench.workloads import decode
from portable.graphs import Graphs
from portable.layer import Layer
from portable.platform.graphs import runtime

if TYPE_CHECKING:
    from portable.platform.target import Target

PAGE, LAYERS = 16, 16  # layers of the step that is replayed
Found = dict[str, Any]


def layer_of(target: Target) -> Layer:
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    return Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)


def planning(target: Target, quick: bool) -> Found:
    """us of a Batch and its plan, by requests: decode steps, and steps of which a quarter are prompts of 256 tokens.

    With the selected kernels, and `core`, without what a kernel prepares for a step.
    """
    device = torch.device(target.device)
    rng = np.random.default_rng(0)
    found: Found = {}
    for backend in (None, "reference"):
        attn = Attention(
            layer_of(target), page_size=PAGE, device=device, max_reqs=1024, max_tokens=1 << 20, backend=backend
        )
        for kind in ("decode", "mixed"):
            for size in (64,) if quick else (64, 256, 1024):
                table = torch.from_numpy(rng.integers(0, 60000, (size, 512), dtype=np.int32)).to(device)
                lens = rng.integers(300, 8000, size, dtype=np.int32)
                new = np.ones(size, np.int32)
                if kind == "mixed":
                    new[-size // 4 :] = 256

                def step(attn: Any = attn, new: Any = new, lens: Any = lens, table: Any = table) -> object:
                    return attn.plan(Batch.from_lens(new, lens, block_table=table, page_size=PAGE, device=device))

                found[f"{kind} {size}{', core' if backend else ''}"] = _both(host_microseconds(step, device, 200))
    return found


def dispatch(target: Target) -> Found:
    """us of host time of one eager decode, with so few keys that the device is never waited for.

    `Kernel.run` is the selected kernel alone, `Attention.run` what a layer calls, `torch` one elementwise operation.
    """
    device, layer = torch.device(target.device), layer_of(target)
    found: Found = {}
    x = torch.zeros(8, device=device)
    with torch.no_grad():
        found["torch add"] = _both(host_microseconds(lambda: x.add_(1), device))
        for size in (1, 64):
            work = decode(f"host {size}", layer, [64] * size, PAGE)
            problem = build(work, Pool(device, [work]))
            turn = problem.rotations[0]
            attn = Attention(layer, page_size=PAGE, device=device, max_reqs=256)
            batch = Batch.from_lens(
                [1] * size, [64] * size, block_table=turn.block_table, page_size=PAGE, device=device
            )
            plan = attn.plan(batch)
            kernel = attn.choices["decode"].kernel
            run = subjects.calls(problem, kernel)[0]
            called = host_microseconds(partial(attn.run, turn.q, turn.kv, plan, out=turn.out), device)
            found[f"decode {size}"] = {
                "kernel": kernel.name,
                "Kernel.run": _both(host_microseconds(run, device)),
                "Attention.run": _both(called),
            }
    return found


def graphs(target: Target) -> Found:
    """ms of a decode step of some layers, planned each time: layer by layer, and as a graph that is replayed."""
    device, layer = torch.device(target.device), layer_of(target)
    if runtime(device) is None:
        return {"absent": f"{target.vendor} {target.arch} has no graphs"}
    found: Found = {}
    for size in (1, 64):
        work = decode(f"graph {size}", layer, [1024] * size, PAGE)
        problem = build(work, Pool(device, [work]))
        turn = problem.rotations[0]
        attn = Attention(layer, page_size=PAGE, device=device, max_reqs=size, max_tokens=size, max_seq_len=2048)

        def layers(plans: Any, q: torch.Tensor, attn: Attention = attn, turn: Any = turn) -> torch.Tensor:
            for _ in range(LAYERS):
                q = attn.run(q, turn.kv, plans[0]).out
            return q

        batch = Batch.from_lens([1] * size, [1024] * size, block_table=turn.block_table, page_size=PAGE, device=device)

        def step(
            attn: Attention = attn, batch: Batch = batch, q: torch.Tensor = turn.q, layers: Any = layers
        ) -> object:
            return layers((attn.plan(batch),), q)

        with torch.no_grad():
            eager = _milliseconds(step, device)
            try:
                replayed = _milliseconds(partial(Graphs(layers, [attn], [size], slot=1), batch, turn.q), device)
            except Exception as error:
                found[f"decode {size}"] = {"eager ms": eager, "failed": f"{type(error).__name__}: {error}"[:300]}
                continue
        found[f"decode {size}"] = {"eager ms": eager, "graph ms": replayed, "ratio": eager / replayed}
    return {"layers": LAYERS, **found}


def _milliseconds(step: Callable[[], object], device: torch.device, repeat: int = 20) -> float:
    times = []
    for _ in range(repeat + 3):
        finish((), device)
        begun = time.perf_counter()
        step()
        finish((), device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[3:])


def _both(times: tuple[float, float]) -> Found:
    return {"us": times[0], "low": times[1]}
