"""One process that answers for cells: this side asks, the other side runs them, a line of JSON each."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from portable.child import Child, EndedError, saying
from portable.conformance import report
from portable.conformance.features import Probe, Scope, probes
from portable.conformance.laws import Law
from portable.conformance.outcomes import FAILED, Judge, on
from portable.platform.target import Target

CHILD = "import sys; from portable.conformance.process import answer; answer(sys.argv[1:])"


class Process(Child):
    """The other side, as this one sees it."""

    def __init__(self, arguments: Sequence[str], stop: threading.Event) -> None:
        super().__init__(CHILD, arguments, {"OMP_NUM_THREADS": "1"})  # there are processes enough
        self.stop = stop

    def ask(self, kernel: str, cell: int) -> None:
        self.tell([kernel, cell])

    def next(self, limit: float) -> tuple[str, Any]:
        """What it says next; ("ended", why) where it has ended or says nothing in time; ("stopped", []) at a stop."""
        try:
            kind, what = self.hear(limit, self.stop.is_set) or ("stopped", [])
        except EndedError as error:
            return "ended", str(error)
        return kind, what


def answer(arguments: Sequence[str]) -> None:
    """The other side: [kernel, cell] a line comes in, [cell, seconds, whether it can go on] goes out.

    Whatever else prints goes to stderr.
    """
    from portable.attention import load_kernels
    from portable.conformance.diagnosis import remembering
    from portable.platform.detect import detect

    device, scope = arguments
    questions: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    with saying(questions.put) as say:
        target = detect(device)
        kernels = {kernel.name: kernel for kernel in load_kernels()}
        asked: dict[str, tuple[list[Probe], Judge]] = {}
        say(["ready", None])
        with on(target), remembering():
            while True:
                name, number = questions.get()
                if name not in asked:
                    found = list(probes(kernels[name], target, Scope(**json.loads(scope))))
                    asked[name] = found, Judge(kernels[name], target)
                probe, judge, start = asked[name][0][number], asked[name][1], time.perf_counter()
                outcome = judge(probe)
                usable = _usable(target, outcome.status == FAILED, probe.law is Law.FAR)
                said = report.of_outcome(outcome, report.proof_of(target))
                say(["cell", [said, time.perf_counter() - start, usable]])
                if not usable:
                    return


def _usable(target: Target, failed: bool, full: bool) -> bool:
    """Whether the device still answers after a cell; after a large one its memory is given back."""
    if target.device != "cpu" and (failed or full):
        import torch

        try:
            torch.accelerator.synchronize()
            torch.get_device_module(torch.device(target.device)).empty_cache()
        except RuntimeError:  # whatever the process runs from now on fails as well
            return False
    return True
