"""What the card itself does, measured in the same run: reading, copying, a matrix product, an empty node."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.timing import Job, contest

MIB = 1 << 20
Seen = Callable[[str], bool]
SHAPES = ((8192, 16, 16), (4096, 8, 8), (2048, 4, 4), (1024, 1, 4))  # elements a step, steps, warps
triton: Any = None  # a machine without it measures its copies and its matrix product
with suppress(ImportError):
    import triton  # type: ignore[no-redef]
    import triton.language as tl
if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def read(x, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
        program = tl.program_id(0).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(STEPS):
            total += tl.load(x + (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
        tl.store(sums + program, tl.sum(total))


def ceilings(device: torch.device, seen: Seen, large: int = 4096, small: int = 8192) -> dict[str, Any]:
    """TB/s of reads and copies (read and written bytes), TFLOP/s of a matrix product, us of reads by size in MiB.

    `large` MiB are read and copied; the matrices are `small` x `small`, of random bf16.
    """
    found = memory(device, seen, large)
    a, b, c = (torch.randn(small, small, dtype=torch.bfloat16, device=device) for _ in range(3))
    product = fastest({"matmul": [lambda: torch.mm(a, b, out=c)]}, c, seen, 100.0)
    return found | {"matmul TFLOP/s": 2e-6 * small**3 / product}


def memory(device: torch.device, seen: Seen, large: int) -> dict[str, float]:
    found: dict[str, float] = {}
    x = torch.empty(large * MIB // 2, dtype=torch.bfloat16, device=device).normal_()
    y = torch.empty_like(x)
    # a graph's copy node is slower at this size than a kernel that copies: 2.4 and 3.0 TB/s on an H100
    ways: dict[str, list[Callable[[], object]]] = {"copy": [lambda: y.copy_(x)], "x": [lambda: torch.mul(x, 1, out=y)]}
    found["copy TB/s"] = 4e-6 * len(x) / fastest(ways, y, seen)
    pairs = list(zip(y.split(32 * MIB), x.split(32 * MIB), strict=True))[:8]  # 64 MiB each
    turns: list[Callable[[], object]] = [partial(to.copy_, source) for to, source in pairs]
    found["copy 64 MiB TB/s"] = 4e-6 * len(pairs[0][0]) / fastest({"copy": turns}, y, seen)
    if triton is not None and device.type != "cpu":
        sums = torch.empty(4 * MIB, device=device)
        for size in (1, 4, 16, 32, 128, 256, 1024, large):
            found[f"read {size} MiB us"] = fastest(rotations(x, size * MIB // 2, sums), sums, seen)
        found["read TB/s"] = large * MIB * 1e-6 / found[f"read {large} MiB us"]
        found["empty node us"] = fastest({"empty": [lambda: read[(1,)](x, sums, 1024, 1)] * 20}, sums, seen)
    return found


def rotations(x: torch.Tensor, count: int, sums: torch.Tensor) -> dict[str, list[Callable[[], object]]]:
    """By launch shape, reads of `count` elements at up to 32 places, 256 MiB in all."""
    turns = max(1, min(32, 128 * MIB // count))
    found: dict[str, list[Callable[[], object]]] = {}
    for block, steps, warps in SHAPES:
        if grid := count // (block * steps):

            def turn(i: int, grid: int = grid, block: int = block, steps: int = steps, warps: int = warps) -> None:
                read[(grid,)](x[i * count :], sums, block, steps, num_warps=warps)

            found[f"{block}x{steps}"] = [partial(turn, i) for i in range(turns)]
    return found


def fastest(
    calls: dict[str, list[Callable[[], object]]],
    output: torch.Tensor,
    seen: Seen,
    budget: float = 20.0,
) -> float:
    """us of the fastest."""
    jobs = [Job(name, partial(list, each), [output[:1]], lambda _: 0.0, 1.0) for name, each in calls.items()]
    times = [each.us for each in contest(jobs, budget, 10.0, seen).values()]
    return min((each for each in times if not math.isnan(each)), default=math.nan)
