"""What the device itself does, measured in the same run: how fast it copies and reads memory, and multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from portable.bench.timing import Job, contest

MIB = 1 << 20
Calls = list[Callable[[], object]]


def ceilings(device: torch.device, dtype: torch.dtype, mib: int, size: int) -> dict[str, float]:
    """TB/s of copies (read and written bytes) and of reads, and TFLOP/s of a matrix product; NaN where it fails.

    Args:
        mib: of memory that is copied and read; more than any cache holds.
        size: of the square matrices.

    >>> found = ceilings(torch.device("cpu"), torch.float32, 1, 64)
    >>> sorted(found), min(found.values()) > 0
    (['copy TB/s', 'matmul TFLOP/s', 'read TB/s'], True)
    """
    x = torch.empty(mib * MIB // 4, dtype=torch.float32, device=device).normal_()
    y = torch.empty_like(x)
    total = torch.empty((), device=device)
    copy = fastest({"copy": [lambda: y.copy_(x)], "times": [lambda: torch.mul(x, 1, out=y)]}, y)
    read = fastest({"sum": [lambda: torch.sum(x, 0, out=total)], "most": [lambda: torch.amax(x, 0, out=total)]}, total)
    a, b, c = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    product = fastest({"matmul": [lambda: torch.mm(a, b, out=c)]}, c, 100.0)
    return {
        "copy TB/s": 2e-6 * x.nbytes / copy,
        "read TB/s": 1e-6 * x.nbytes / read,
        "matmul TFLOP/s": 2e-6 * size**3 / product,
    }


def bandwidth(found: dict[str, float]) -> float:
    """TB/s that memory gives at most, of what was measured."""
    return max((found[name] for name in ("copy TB/s", "read TB/s") if not math.isnan(found[name])), default=math.nan)


def fastest(ways: dict[str, Calls], output: torch.Tensor, budget_ms: float = 20.0) -> float:
    """us of the fastest of some ways to do the same; NaN where none works."""
    jobs = [Job(name, partial(list, calls), [output.view(-1)[:1]], lambda _: 0.0, 1.0) for name, calls in ways.items()]
    times = [each.us for each in contest(jobs, budget_ms, 10.0, lambda _: True).values()]
    return min((each for each in times if not math.isnan(each)), default=math.nan)
