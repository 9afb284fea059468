"""How far a result is from what is right, and what a kernel that is too far off raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from portable.conformance.cells import Case
from portable.kernel import Kernel

SEEN = 0.15  # leaving a feature out changes the result by at least this error
MOST = 0.03  # so no tolerance may come near it
LSE_TOLERANCE = 2e-6  # the least that is asked of an LSE: it is float32 for every dtype
NOT_ITS_OWN = "memory written that is not its own"
STATE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Departure(AssertionError):
    """A kernel does not do what the contract says; not an `assert`, which `python -O` would leave out.

    `kinds` names the faults that are known to give the same numbers, the likeliest first.
    """

    def __init__(self, message: str, *kinds: str) -> None:
        super().__init__(message)
        self.kinds = kinds

    def __str__(self) -> str:
        likely = f"; likely fault: {' or '.join(self.kinds[:3])}" if self.kinds else ""
        return f"{self.args[0]}{likely}"


class Figure(NamedTuple):
    """One comparison with what is right."""

    what: str  # "out", "lse", "states"
    error: float
    tolerance: float


_figures: ContextVar[list[Figure] | None] = ContextVar("figures", default=None)


@contextmanager
def recorded() -> Iterator[list[Figure]]:
    """The figures of every comparison that is made inside, those of a failure as well."""
    figures: list[Figure] = []
    token = _figures.set(figures)
    try:
        yield figures
    finally:
        _figures.reset(token)


def require(holds: bool | torch.Tensor, message: str, *kinds: str) -> None:
    """Raise a Departure with the message unless something holds."""
    if not holds:
        raise Departure(message, *kinds)


def within(
    what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float, size: torch.Tensor | None = None
) -> None:
    """Raise a Departure where the error is above the tolerance."""
    wrong = error(got, want, size)
    if (figures := _figures.get()) is not None:
        figures.append(Figure(what, wrong, tolerance))
    require(wrong <= tolerance, f"{what} is wrong by {wrong:.3g}, the tolerance is {tolerance}")


def error(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | None = None) -> float:
    """The largest |got - want| / (1 + size), where size is |want| unless given.

    It is infinite where one is NaN or infinite and the other is not the same.

    >>> error(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 3.0]))
    0.125
    """
    got, want = got.double(), want.double()
    errors = (got - want).abs() / (1 + (want.abs() if size is None else size))
    errors = errors.nan_to_num(nan=torch.inf).masked_fill(~want.isfinite(), torch.inf).masked_fill(got == want, 0)
    return float(errors.max()) if errors.numel() else 0.0


def tolerance(kernel: Kernel, case: Case) -> float:
    """What the kernel declares for the layer's dtype; a Departure where it declares none, or one that hides faults."""
    declared = kernel.caps.tolerance.get(case.layer.dtype)
    if declared is None:
        raise Departure(f"{kernel} declares no tolerance for {case.layer.dtype}")
    require(declared <= MOST, f"{kernel} declares tolerance {declared}, above {MOST}: it would hide a dropped feature")
    return declared
