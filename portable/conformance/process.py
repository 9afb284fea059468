"""One process that answers for cells: this side asks, the other side runs them, a line of JSON each."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from portable.conformance import report
from portable.conformance.features import Probe, Scope, probes
from portable.conformance.laws import Law
from portable.conformance.outcomes import FAILED, Judge, on
from portable.platform.target import Target

START = 180.0  # seconds for a process to import what it needs and to open the device
CHILD = "import sys; from portable.conformance.process import answer; answer(sys.argv[1:])"


class Process:
    """The other side, as this one sees it."""

    def __init__(self, arguments: Sequence[str], stop: threading.Event) -> None:
        self.stop, self.noise = stop, tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environ.setdefault("OMP_NUM_THREADS", "1")  # there are processes enough
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.noise, env=environ, text=True,
            start_new_session=True,  # so that the processes that it starts end with it
        )  # fmt: skip
        self.said: queue.Queue[Any] = queue.Queue()
        self.reader = threading.Thread(target=_read, args=(self.process.stdout, self.said), daemon=True)
        self.reader.start()

    def ask(self, kernel: str, cell: int) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, which is heard next
            self.process.stdin.write(json.dumps([kernel, cell]) + "\n")
            self.process.stdin.flush()

    def hear(self, limit: float) -> tuple[str, Any]:
        """What it says next; ("ended", why) where it has ended or says nothing in time; ("stopped", None) at a stop."""
        end = time.perf_counter() + limit
        while not self.stop.is_set():
            try:
                heard = self.said.get(timeout=0.2)
            except queue.Empty:
                if time.perf_counter() > end:
                    return "ended", f"it did not end within {limit:g} s"
                continue
            if heard is None:
                self.noise.seek(max(0, self.noise.seek(0, os.SEEK_END) - 400))
                last = " ".join(self.noise.read().decode(errors="replace").split())[-300:] or "it wrote nothing"
                return "ended", f"its process ended with code {self.process.wait()}: {last}"
            return heard[0], heard[1]
        return "stopped", []

    def close(self) -> None:
        """End it and whatever it started."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)  # one that waits for a device cannot be ended before that answers
        self.reader.join(1)  # it holds the stream until nobody writes to it any more
        for stream in (self.process.stdin, None if self.reader.is_alive() else self.process.stdout, self.noise):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


def _read(stream: IO[str], said: queue.Queue[Any]) -> None:
    with suppress(ValueError, OSError):  # closed meanwhile, or cut within a line
        for line in stream:
            said.put(json.loads(line))
    said.put(None)


def answer(arguments: Sequence[str]) -> None:
    """The other side: [kernel, cell] a line comes in, [cell, seconds, whether it can go on] goes out.

    Whatever else prints goes to stderr.
    """
    from portable.attention import load_kernels
    from portable.conformance.diagnosis import remembering
    from portable.platform.detect import detect

    device, scope = arguments
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def say(kind: str, what: Any = None) -> None:
            print(json.dumps([kind, what]), file=out, flush=True)

        target = detect(device)
        kernels = {kernel.name: kernel for kernel in load_kernels()}
        asked: dict[str, tuple[list[Probe], Judge]] = {}
        say("ready")
        with on(target), remembering():
            for line in sys.stdin:
                name, number = json.loads(line)
                if name not in asked:
                    found = list(probes(kernels[name], target, Scope(**json.loads(scope))))
                    asked[name] = found, Judge(kernels[name], target)
                probe, judge, start = asked[name][0][number], asked[name][1], time.perf_counter()
                outcome = judge(probe)
                usable = _usable(target, outcome.status == FAILED, probe.law is Law.FAR)
                said = report.of_outcome(outcome, report.proof_of(target))
                say("cell", [said, time.perf_counter() - start, usable])
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
