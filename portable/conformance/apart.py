"""Cells in processes of their own: one that ends its process, hangs or spoils the device fails, and the rest run.

The cells of all kernels are dealt to the processes a few at a time, those of a kernel that need the same code together:
on a GPU most of the time is compilation, whose results the processes share on disk.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from portable.child import START
from portable.conformance import report
from portable.conformance.features import Probe, Scope, probes
from portable.conformance.laws import Law
from portable.conformance.outcomes import FAILED, NOT_RUN, PARITY, Judge
from portable.conformance.process import Process
from portable.kernel import Kernel
from portable.platform.target import Target

ENDINGS = 3  # processes that a kernel may end before the rest of its cells is given up
TOGETHER = 4  # cells that are dealt at once
LOOK = 10.0  # seconds between two looks at kernels that have not ended
OUT_OF_TIME = "the run ended before it"
GIVEN_UP = f"{ENDINGS} processes ended in cells of this kernel before it"

Cell = dict[str, Any]
Heard = Callable[[Kernel, "Cell | None"], None]


@dataclass
class Work:
    """A kernel with its cells; None where one has no answer yet."""

    kernel: Kernel
    probes: list[Probe]
    cells: list[Cell | None]
    twins: dict[int, list[int]] = field(default_factory=dict)  # cell -> others of the same case and law
    endings: int = 0
    seconds: float = 0.0
    news: bool = True

    @property
    def ended(self) -> bool:
        return None not in self.cells

    def fill(self, number: int, cell: Cell, seconds: float = 0.0) -> None:
        """The answer of a cell, and so of its twins."""
        self.seconds += seconds
        for each in (number, *self.twins.get(number, ())):
            probe = self.probes[each]
            self.cells[each] = {**cell, "group": probe.group, "value": probe.value}
        self.news = True

    def entry(self) -> dict[str, Any]:
        self.news = False
        cells = [
            cell or of_probe(probe, NOT_RUN, OUT_OF_TIME) for probe, cell in zip(self.probes, self.cells, strict=True)
        ]
        return report.entry(self.kernel, cells, self.seconds)


Item = list[tuple[Work, int]]


def of_probe(probe: Probe, status: str, reason: str, *kinds: str) -> Cell:
    """A cell without a result."""
    case = None if probe.case is None else report.spelled(probe.case)
    told = {"status": status, "reason": reason, "kinds": list(kinds), "proof": None, "case": case, "figures": []}
    return {"group": probe.group, "value": probe.value, **told}


def rows(
    kernels: Sequence[Kernel],
    target: Target,
    device: str,
    scope: Scope,
    jobs: int,
    each: float,
    heard: Heard,
    limit: float | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The entries of kernels in a document as they end, from `jobs` processes; those that take long come often.

    Args:
        each: seconds that a cell may take.
        limit: seconds after which no cell is run any more; those that are left are "not run".
        known: name -> the entry of an earlier run of the same source, whose cells of parity are not run again.
    """
    end = float("inf") if limit is None else time.perf_counter() + limit
    works = [planned(kernel, target, scope, (known or {}).get(kernel.name, {})) for kernel in kernels]
    items, stop = deque(dealt(works)), threading.Event()
    hand = Hand(items, [device, json.dumps(asdict(scope))], each, heard, stop)
    hands = [threading.Thread(target=hand.work, daemon=True) for _ in range(min(jobs, len(items)))]
    for thread in hands:
        thread.start()
    look = time.perf_counter() + LOOK
    try:
        while works:
            over = time.perf_counter() >= end or not any(thread.is_alive() for thread in hands)
            for work in [work for work in works if over or work.ended]:
                works.remove(work)
                yield work.entry()
                heard(work.kernel, None)
            if time.perf_counter() >= look:
                look = time.perf_counter() + LOOK
                yield from [work.entry() for work in works if work.news]
            time.sleep(0.02)
    finally:
        stop.set()
        for thread in hands:
            thread.join()


def planned(kernel: Kernel, target: Target, scope: Scope, earlier: Mapping[str, Any]) -> Work:
    """A kernel's cells, with the answers that need no run: refusals, what is absent, and what is known."""
    asked, judge, first = list(probes(kernel, target, scope)), Judge(kernel, target), dict[Any, int]()
    work = Work(kernel, asked, [None] * len(asked), seconds=earlier.get("seconds", 0.0))
    old = {(c["group"], c["value"], c["case"]): c for c in earlier.get("cells", ()) if c["status"] == PARITY}
    for number, probe in enumerate(asked):
        if not probe.runs:
            work.cells[number] = report.of_outcome(judge(probe), report.proof_of(target))
            continue
        assert probe.case is not None
        work.cells[number] = old.get((probe.group, probe.value, report.spelled(probe.case)))
        same = first.setdefault((probe.case, probe.law), number)
        if same != number and work.cells[number] is None:
            if (cell := work.cells[same]) is None:
                work.twins.setdefault(same, []).append(number)
            else:
                work.cells[number] = {**cell, "group": probe.group, "value": probe.value}
    return work


def dealt(works: Sequence[Work]) -> Iterator[Item]:
    """The cells to run in the order of the kernels, a few at a time; those that fill the memory one after another."""

    def code(probe: Probe) -> str:
        """Cells that share it share most of their code."""
        layer = probe.case.layer if probe.case is not None else None
        return repr(layer and (layer.dtype, layer.kv_dtype, layer.qk_head_dim, layer.v_head_dim, layer.window))

    far: Item = []
    rest: list[Item] = []
    for work in works:
        twins = {number for many in work.twins.values() for number in many}
        todo = [n for n, cell in enumerate(work.cells) if cell is None and n not in twins]
        far += [(work, n) for n in todo if work.probes[n].law is Law.FAR]
        near = [n for n in todo if work.probes[n].law is not Law.FAR]
        near.sort(key=lambda n: code(work.probes[n]))
        rest += [[(work, n) for n in near[at : at + TOGETHER]] for at in range(0, len(near), TOGETHER)]
    yield from ([far] if far else [])
    yield from rest


@dataclass
class Hand:
    """What keeps one process busy, in as many threads as there are to be processes."""

    items: deque[Item]
    arguments: list[str]
    each: float
    heard: Heard
    stop: threading.Event

    def work(self) -> None:
        """Cell after cell while there are any; a process that ends is followed by another."""
        process: Process | None = None
        try:
            while self.items and not self.stop.is_set():
                try:
                    item = self.items.popleft()
                except IndexError:  # another was faster
                    return
                for work, number in item:
                    process = self.one(process, work, number)
        finally:
            if process is not None:
                process.close()

    def started(self) -> tuple[Process | None, str, Any]:
        """A process, and what it says first."""
        try:
            process = Process(self.arguments, self.stop)
        except OSError as error:
            return None, "ended", f"no process can be started: {error}"
        return process, *process.next(START)

    def one(self, process: Process | None, work: Work, number: int) -> Process | None:
        """Ask for one cell; the process for the next one, None where there is none."""
        if self.stop.is_set():
            return process
        if work.endings >= ENDINGS:
            work.fill(number, of_probe(work.probes[number], NOT_RUN, GIVEN_UP))
            return process
        said: Any = None
        kind = "ready"
        if process is None:
            process, kind, said = self.started()
        if process is not None and kind == "ready":
            process.ask(work.kernel.name, number)
            kind, said = process.next(self.each)
        usable = False
        if kind == "cell":
            cell, seconds, usable = said
            work.fill(number, cell, seconds)
        elif kind == "ended":
            work.endings += 1
            work.fill(number, of_probe(work.probes[number], FAILED, said, "crashed"))
        if work.cells[number] is not None:
            self.heard(work.kernel, work.cells[number])
        if usable:
            return process
        if process is not None:
            process.close()
        return None
