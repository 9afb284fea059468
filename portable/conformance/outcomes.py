"""What became of every cell: parity, refused with a reason, failed, or not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from portable.conformance import diagnosis, laws
from portable.conformance.cells import Case
from portable.conformance.features import QUICK, Probe, Scope, probes
from portable.conformance.laws import Law
from portable.conformance.measure import Departure, Figure, recorded
from portable.kernel import Kernel
from portable.platform.target import Target

PARITY, REFUSED, FAILED, ABSENT = "parity", "refused", "failed", "absent"
NOT_RUN = "not run"  # the time of the run was over


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
    scope: Scope = QUICK,
    advance: Callable[[Outcome], None] = lambda outcome: None,
) -> Row:
    """Every cell of a kernel on a target.

    >>> from portable.backends.reference import KERNELS
    >>> from portable.platform.detect import detect
    >>> found = row(next(k for k in KERNELS if k.name == "reference.merge"), detect("cpu"))
    >>> found.status, found.count("failed")
    ('parity', 0)
    """
    start, judge, outcomes = time.perf_counter(), Judge(kernel, target), []
    with on(target), diagnosis.remembering():
        for probe in probes(kernel, target, scope):
            outcomes.append(judge(probe))
            advance(outcomes[-1])
    return Row(kernel, tuple(outcomes), time.perf_counter() - start)


class Judge:
    """What becomes of a kernel's cells; a case that several cells have is run once."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self._known: dict[tuple[Case | None, Law], Outcome] = {}

    def __call__(self, probe: Probe) -> Outcome:
        if not probe.runs:
            return judged(self.kernel, probe, self.target)
        key = (probe.case, probe.law)
        if key not in self._known:
            self._known[key] = judged(self.kernel, probe, self.target)
        return replace(self._known[key], group=probe.group, value=probe.value)


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
        except (Exception, SystemExit) as error:
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
    scope: Scope,
    advance: Callable[[Kernel, Outcome | None], None],
) -> Iterator[Row]:
    """A row for each kernel; `advance` hears of each cell, and of each kernel at its end."""
    for kernel in kernels:
        made = row(kernel, target, scope, partial(advance, kernel))
        advance(kernel, None)
        yield made
