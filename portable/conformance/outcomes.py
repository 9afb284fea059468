"""What became of every cell: parity, refused with a reason, or failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from portable.conformance import diagnosis, laws
from portable.conformance.cells import Case
from portable.conformance.features import Probe, probes
from portable.conformance.laws import Law
from portable.conformance.measure import Departure, Figure, recorded
from portable.kernel import Kernel
from portable.platform.target import Target

PARITY, REFUSED, FAILED, ABSENT = "parity", "refused", "failed", "absent"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell with what was found. `absent` is what this machine cannot be asked, and no verdict on the kernel."""

    group: str
    value: str
    status: str
    reason: str = ""  # of a refusal, a failure or an absence
    kinds: tuple[str, ...] = ()  # the faults that give these numbers, the likeliest first
    figures: tuple[Figure, ...] = ()
    case: Case | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel and its cells."""

    kernel: Kernel
    outcomes: tuple[Outcome, ...]
    seconds: float

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def status(self) -> str:
        """`failed` where any cell is, else `parity` where any is."""
        return next((status for status in (FAILED, PARITY, REFUSED) if self.count(status)), ABSENT)


def row(
    kernel: Kernel,
    target: Target,
    pairs: int = 12,
    full: bool = False,
    advance: Callable[[Outcome], None] = lambda outcome: None,
) -> Row:
    """Every cell of a kernel on a target; the same case is run once.

    >>> from portable.backends.reference import KERNELS
    >>> from portable.platform.detect import detect
    >>> found = row(next(k for k in KERNELS if k.name == "reference.merge"), detect("cpu"))
    >>> found.status, found.count("failed")
    ('parity', 0)
    """
    start, outcomes = time.perf_counter(), list[Outcome]()
    known: dict[tuple[Case | None, Law], Outcome] = {}
    with on(target), diagnosis.remembering():
        for probe in probes(kernel, target, pairs, full):
            runs = probe.case is not None and not (probe.reasons or probe.fault)
            if runs and (probe.case, probe.law) in known:
                outcome = replace(known[probe.case, probe.law], group=probe.group, value=probe.value)
            else:
                outcome = judged(kernel, probe, target)
                if runs:
                    known[probe.case, probe.law] = outcome
            outcomes.append(outcome)
            advance(outcome)
    return Row(kernel, tuple(outcomes), time.perf_counter() - start)


def judged(kernel: Kernel, probe: Probe, target: Target) -> Outcome:
    """One cell, asked. Whatever a kernel raises for a case that its caps accept is a failure."""

    def outcome(status: str, reason: str = "", *kinds: str, figures: Iterable[Figure] = ()) -> Outcome:
        return Outcome(probe.group, probe.value, status, reason, kinds, tuple(figures), probe.case)

    if probe.fault:
        return outcome(FAILED, probe.fault, "declared, and not served")
    if probe.absent:
        return outcome(ABSENT, probe.absent)
    if probe.reasons:
        return outcome(REFUSED, "; ".join(probe.reasons))
    assert probe.case is not None
    with recorded() as figures:
        try:
            laws.check(probe.law, kernel, probe.case, target)
        except Departure as departure:
            return outcome(FAILED, str(departure), *departure.kinds, figures=figures)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            return outcome(FAILED, f"its caps accept this case, and it raised {raised}", "raised", figures=figures)
    return outcome(PARITY, figures=figures)


def on(target: Target) -> AbstractContextManager[object]:
    """Where a target's kernels run: on its device, or on the emulator of its architecture."""
    if target.emulated:
        from portable.platform.emulated import activate

        return activate(target.arch)
    if target.device == "cpu":
        return nullcontext()
    device = torch.device(target.device)
    made: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return made


def rows(
    kernels: Iterable[Kernel],
    target: Target,
    pairs: int,
    full: bool,
    advance: Callable[[Kernel, Outcome | None], None],
) -> Iterator[Row]:
    """A row for each kernel; `advance` hears of each cell, and of each kernel as it begins."""
    for kernel in kernels:
        advance(kernel, None)
        yield row(kernel, target, pairs, full, partial(advance, kernel))
