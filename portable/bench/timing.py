"""One workload's contestants, timed in turns: graph replay, medians, outputs poisoned and checked before and after.

Turns, because a card's clock, power and temperature drift: short rounds in which each is timed keep the drift out of
the ratios, and orders in which each follows every other spread what a busy neighbour does to the clock. In three
rounds of 13 ms, always behind the same neighbours, an H200 took 7% longer for one operator called by an adapter than
bare. What twelve rounds in such orders gain over twelve in alternating ones was not told apart.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portable.platform.graphs import runtime

ROUNDS = 12
FATAL = ("illegal memory", "misaligned", "launch failure", "device-side assert", "illegal instruction")


class Broken(Exception):
    """The device is lost to this process."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A contestant in one workload."""

    name: str
    calls: Callable[[], Sequence[Callable[[], object]] | None]  # for each rotation; made late; None: takes no part
    outputs: Sequence[torch.Tensor]  # what the calls write, unless they return it
    error: Callable[[object], float]  # of the first call's output, given what it returned
    tolerance: float


@dataclass(frozen=True, slots=True)
class Measure:
    """us per call, the relative error, or why there is none."""

    us: float = math.nan
    low: float = math.nan
    high: float = math.nan
    error: float = math.nan
    ok: bool = False
    first_seconds: float = math.nan  # the first call: what compiling costs
    failed: str = ""
    graph: bool = True  # replayed as one, and not call by call from the host


def contest(jobs: Iterable[Job], budget_ms: float, warm_ms: float, seen: Callable[[str], bool]) -> dict[str, Measure]:
    """Time every job; one that fails is reported and left out. `seen` is told who is about to run, and may refuse."""
    found: dict[str, Measure] = {}
    live: dict[str, tuple[Job, Replay, float, float]] = {}
    for job in jobs:
        if not seen(job.name):
            continue
        start = time.perf_counter()
        try:
            poison(job.outputs)
            if (calls := job.calls()) is None:
                continue
            result = calls[0]()
            finish(job.outputs)
            first = time.perf_counter() - start
            error = job.error(result)
            for call in calls[1:]:
                call()
            live[job.name] = job, replay_of(calls, job.outputs[0].device), error, first
        except Exception as problem:
            found[job.name] = Measure(failed=reason(problem))
    for number, (name, (_, replay, _, _)) in enumerate(live.items()):
        seen(name)
        replay.warm(warm_ms if number == 0 else 10.0)
    times: dict[str, list[float]] = {name: [] for name in live}
    for order in orders(list(live), ROUNDS):
        for name in order:
            seen(name)
            times[name] += live[name][1].time(budget_ms / ROUNDS)
    for name, (job, replay, error, first) in live.items():
        poison(job.outputs)
        replay.run()
        finish(job.outputs)
        error = worse(error, job.error(replay.result))
        low, high = min(times[name]), max(times[name])
        found[name] = Measure(
            statistics.median(times[name]),
            low,
            high,
            error,
            error < job.tolerance,
            first,
            graph=replay.graph is not None,
        )
    return found


def orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """An order for each round, such that each name follows every other about as often: a Williams design.

    >>> [*map("".join, orders("abcd", 4))]
    ['abdc', 'bcad', 'cdba', 'dacb']

    Source: E. J. Williams, "Experimental Designs Balanced for the Estimation of Residual Effects of Treatments" (1949).
    """
    count, zigzag = len(names), [0]
    for i in range(1, count):
        zigzag.append((zigzag[-1] + (i if i % 2 else -i)) % count)
    for turn in range(rounds if names else 0):
        order = [names[(place + turn) % count] for place in zigzag]
        yield order[::-1] if count % 2 and turn % 2 else order  # of an odd count, both directions are one design


def replay_of(calls: Sequence[Callable[[], object]], device: torch.device) -> Replay:
    """A graph of the calls, or the calls themselves where they cannot be captured: some read the device on the host."""
    try:
        return Replay(calls, device)
    except Exception as problem:
        reason(problem)  # a device that is lost ends the run
        return Replay(calls, device, capture=False)


class Replay:
    """All rotations as one graph, so that the host takes no part; plain calls where there can be none."""

    def __init__(self, calls: Sequence[Callable[[], object]], device: torch.device, capture: bool = True) -> None:
        self.calls, self.device, self.repeat = calls, device, 1
        self.graph: Any = None
        self.result: object = None  # of the first call, as the last run left it
        self.runtime: Any = runtime(device) if capture else None
        if self.runtime is None:
            return
        stream = self.runtime.Stream()
        stream.wait_stream(self.runtime.current_stream())
        self.graph = self.runtime.CUDAGraph()
        with self.runtime.stream(stream):
            calls[0]()  # what a first call on a stream sets up
            stream.synchronize()
            self.graph.capture_begin()
            try:
                self._run(calls)
            finally:
                self.graph.capture_end()
        self.runtime.synchronize()
        self.start, self.stop = (self.runtime.Event(enable_timing=True) for _ in range(2))
        self.run()
        one = self._once()
        self.repeat = max(1, math.ceil(0.5 / one))  # at least 0.5 ms between two events

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        self._run(self.calls)

    def _run(self, calls: Sequence[Callable[[], object]]) -> None:
        self.result, *_ = [call() for call in calls]

    def warm(self, milliseconds: float) -> None:
        if self.graph is not None:
            for _ in range(int(milliseconds / max(self._once(), 1e-3)) + 1):
                self.run()
            self.runtime.synchronize()

    def time(self, budget_ms: float) -> list[float]:
        """us per call, of as many samples as the budget holds, one at least."""
        first = self._once()
        rest = min(15, max(0, int(budget_ms / max(first, 1e-3)) - 1))
        return [1e3 * each / self.repeat / len(self.calls) for each in [first, *(self._once() for _ in range(rest))]]

    def _once(self) -> float:
        if self.graph is None:
            finish((), self.device)
            begun = time.perf_counter()
            self.run()
            finish((), self.device)
            return 1e3 * (time.perf_counter() - begun)
        self.start.record()
        for _ in range(self.repeat):
            self.graph.replay()
        self.stop.record()
        self.stop.synchronize()
        return max(float(self.start.elapsed_time(self.stop)), 1e-3)


def host_microseconds(call: Callable[[], object], device: torch.device, repeat: int = 2000) -> tuple[float, float]:
    """(median, lowest tenth) of the host's time in a call; the device is idle when each begins. At most 0.4 s.

    A first quarter does not count: a processor that was idle took 29 us where it later took 17.
    """
    times: list[float] = []
    end = time.perf_counter() + 0.4
    while len(times) < repeat and (len(times) < 8 or time.perf_counter() < end):
        finish((), device)
        begun = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begun))
    times = sorted(times[len(times) // 4 :])
    return times[len(times) // 2], times[len(times) // 10]


def poison(outputs: Sequence[torch.Tensor]) -> None:
    for each in outputs:
        each.view(torch.uint8).fill_(0xFF)  # NaN in every float format, fp8 included


def finish(outputs: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
    if (device or outputs[0].device).type != "cpu":
        torch.accelerator.synchronize()


def reason(problem: Exception) -> str:
    text = f"{type(problem).__name__}: {problem}"
    if any(sign in text for sign in FATAL):
        raise Broken(text[:400]) from problem
    return text[:400]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| of the whole, NaN where anything is not finite."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item() if torch.isfinite(got).all() else math.nan


def worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
