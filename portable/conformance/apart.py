"""Kernels in processes of their own: one that ends its process, hangs or spoils the device fails, and the rest run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from portable.conformance import report
from portable.conformance.features import Scope, probes
from portable.conformance.outcomes import FAILED, Judge, on
from portable.kernel import Kernel
from portable.platform.target import Target

START = 180.0  # seconds for a process to import what it needs and to open the device
ENDINGS = 3  # processes that a kernel may end before the rest of its cells is given up
CHILD = "import sys; from portable.conformance.apart import answer; answer(sys.argv[1:])"

Cell = dict[str, Any]
Heard = Callable[[Kernel, "Cell | None"], None]


def rows(
    kernels: Sequence[Kernel], target: Target, device: str, scope: Scope, jobs: int, each: float, heard: Heard
) -> Iterator[dict[str, Any]]:
    """The entries of kernels in a document as they end, `jobs` processes at a time; a cell may take `each` seconds."""

    def one(kernel: Kernel) -> dict[str, Any]:
        made = entry(kernel, target, device, scope, each, lambda cell: heard(kernel, cell))
        heard(kernel, None)
        return made

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, kernel) for kernel in kernels]):
            yield done.result()


def entry(
    kernel: Kernel, target: Target, device: str, scope: Scope, each: float, heard: Callable[[Cell], None]
) -> dict[str, Any]:
    """One kernel's, from as many processes as it takes."""
    cells: list[Cell] = []
    endings, seconds = 0, 0.0
    while True:
        asked, ended = None, ""
        for kind, said in _process([device, kernel.name, json.dumps(asdict(scope)), str(len(cells))], each):
            if kind == "cell":
                cells.append(said)
                heard(said)
                asked = None
            elif kind == "asks":
                asked = said
            elif kind == "done":
                seconds += said
            else:
                ended = said
        if not ended:
            break
        endings += 1
        lost = {"group": "call", "value": "its process", "case": None, **(asked or {})}
        cells.append({**lost, "status": FAILED, "reason": ended, "kinds": ["crashed"], "proof": None, "figures": []})
        heard(cells[-1])
        if asked is None or endings == ENDINGS:
            break
    return report.entry(kernel, cells, seconds)


def answer(arguments: Sequence[str]) -> None:
    """The other side: the cells of a kernel from one on, a line of JSON each. Whatever else prints goes to stderr."""
    import time

    from portable.attention import load_kernels
    from portable.conformance.diagnosis import remembering
    from portable.platform.detect import detect

    device, name, scope, begin = arguments
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def say(kind: str, what: Any) -> None:
            print(json.dumps([kind, what]), file=out, flush=True)

        target = detect(device)
        kernel = next(kernel for kernel in load_kernels() if kernel.name == name)
        start, judge = time.perf_counter(), Judge(kernel, target)
        with on(target), remembering():
            for number, probe in enumerate(probes(kernel, target, Scope(**json.loads(scope)))):
                if number < int(begin):
                    continue
                case = None if probe.case is None else report.spelled(probe.case)
                say("asks", {"group": probe.group, "value": probe.value, "case": case})
                say("cell", report.of_outcome(judge(probe), report.proof_of(target)))
        say("done", time.perf_counter() - start)


def _process(arguments: Sequence[str], each: float) -> Iterator[tuple[str, Any]]:
    """What one process says, and ("ended", why) at its end unless it was done."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=noise, env=environ, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        said: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, said), daemon=True).start()
        limit = START
        try:
            while True:
                try:
                    heard = said.get(timeout=limit)
                except queue.Empty:
                    yield "ended", f"it did not end within {limit:g} s"
                    return
                if heard is None:
                    noise.seek(max(0, noise.seek(0, os.SEEK_END) - 400))
                    last = " ".join(noise.read().decode(errors="replace").split())[-300:] or "it wrote nothing"
                    yield "ended", f"its process ended with code {process.wait()}: {last}"
                    return
                yield heard[0], heard[1]
                if heard[0] == "done":
                    return
                limit = each
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _read(stream: IO[str], said: queue.Queue[Any]) -> None:
    with suppress(ValueError, OSError):  # closed meanwhile, or cut within a line
        for line in stream:
            said.put(json.loads(line))
    said.put(None)
