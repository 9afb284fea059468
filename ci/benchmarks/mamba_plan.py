"""Planning a step of recurrent layers beside a loop over its requests: python ci/benchmarks/mamba_plan.py [--json FILE]

The loop finds the chunks of a step of prefills a request at a time, with its lengths read from host tensors, as engines
did; portable makes the whole plan of the same step, chunks included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from portable import Batch, Layer
from portable.mamba import plan_mamba

SIZES = (64, 256, 1024)
CHUNK = 256
TURNS = 40


def loop(context_lens: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Where chunks start, their rows and the last one of each row: cut on absolute multiples, one request at a time."""
    starts, rows, last, at = [], [], [], 0
    for row in range(len(context_lens)):
        context = int(context_lens[row])
        new = int(cu_seqlens[row + 1]) - int(cu_seqlens[row])
        while new:
            size = min(CHUNK - context % CHUNK, new)
            starts.append(at)
            rows.append(row)
            at, context, new = at + size, context + size, new - size
        last.append(len(starts) - 1)
    return [*starts, at], rows, last


def steps(size: int) -> dict[str, tuple[Batch, np.ndarray[Any, np.dtype[np.int32]]]]:
    """A step of prefills on contexts, and one of decodes, with a slot for each request."""
    rng = np.random.default_rng(size)
    context = rng.integers(1, 30000, size, dtype=np.int32)
    new = rng.integers(2, 512, size, dtype=np.int32)
    table = rng.permutation(size).astype(np.int32)[:, None]
    ones = np.ones_like(new)
    return {
        "prefills": (Batch.from_lens(new, context + new), table),
        "decodes": (Batch.from_lens(ones, context), table),
    }


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """The median over turns of the best of five calls; they take turns, so that what slows the machine slows all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, found in zip(calls, times, strict=True):
            found.append(min(timeit.repeat(call, number=1, repeat=5)))
    return [statistics.median(found) * 1e6 for found in times]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    layer = Layer.mamba2(num_heads=80, chunk=CHUNK)
    found: dict[str, Any] = {"decodes": {}, "prefills": {}, "loop": {}}
    made = {size: steps(size) for size in SIZES}
    for size in SIZES:
        batch, _ = made[size]["prefills"]
        context, cu = torch.from_numpy(batch.context_lens), torch.from_numpy(batch.host_cu_seqlens_q)
        plan = plan_mamba(batch, layer, made[size]["prefills"][1]).prefill
        assert plan is not None
        found_by_loop = loop(context, cu)
        assert found_by_loop == (plan.cu_chunks.tolist(), plan.chunk_requests.tolist(), plan.last_chunks.tolist())
        calls = [partial(plan_mamba, step, layer, table) for step, table in made[size].values()]
        times = microseconds(*calls, partial(loop, context, cu))
        for kind, value in zip(("prefills", "decodes", "loop"), times, strict=True):
            found[kind][size] = value
    for kind, values in found.items():
        print(f"{kind:8} us:", {size: round(value) for size, value in values.items()})
    faster = found["loop"][1024] / found["prefills"][1024]
    flat = {kind: found[kind][1024] / found[kind][64] for kind in ("prefills", "decodes")}
    print(f"1,024 prefills: {faster:.1f}x faster than the loop over their chunks (goal: 10x)")
    for kind, times in flat.items():
        print(f"1,024 {kind}: {times:.2f}x the time of 64 (goal: at most 2x)")
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        result = {"versions": versions, "machine": platform.machine(), "microseconds": found}
        result |= {"faster_than_loop": faster, "ratio_1024_to_64": flat}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
