"""Runs the contract test of every kernel of this machine, and keeps those that passed: python ci/prove.py [FILE]

A kernel that FILE holds already, proved from the same source on such a card, is not run again.
The file belongs in ci/results/: it counts as a measured lane in the README's table while the source stays the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHARDS = 4  # processes that share the cells of one kernel
sys.path[:0] = [str(ROOT)]

import contract_cells  # noqa: E402 - it imports portable

from portable import available_kernels, detect  # noqa: E402 - the checkout's, whatever is installed
from portable.attention import load_kernels  # noqa: E402
from portable.conformance import cells, report  # noqa: E402
from portable.proof import source_hash  # noqa: E402


def prove(name: str, at: int = 0, step: int = 1) -> tuple[str, int, int, float]:
    """(the kernel's name, cells that passed, that failed, seconds): its cells from `at` on, every `step`th."""
    target = detect()
    kernel = next(kernel for kernel in load_kernels() if kernel.name == name)
    start = time.perf_counter()
    passed, failed = contract_cells.run(kernel, list(cells.cases(kernel, target))[at::step], target.device)
    return name, passed, failed, time.perf_counter() - start


def main(path: str | None) -> int:
    target = detect()
    versions = report.versions(target)
    here = {"arch": target.arch, "card": target.name, "versions": versions}
    result: dict[str, Any] = here | {"kernels": {}}
    kernels = {kernel.name: kernel for kernel in available_kernels()}
    sources = {name: source_hash(kernel) for name, kernel in kernels.items()}
    if path and Path(path).exists():  # what this card proved from the same sources stays
        earlier = json.loads(Path(path).read_text(encoding="utf-8"))
        if {key: earlier.get(key) for key in here} == here:
            result["kernels"] = {
                name: it for name, it in earlier["kernels"].items() if it["source"] == sources.get(name)
            }
    proved = result["kernels"]
    todo = sorted((name for name in kernels if name not in proved), key=lambda name: not name.startswith("triton."))
    passed, failed, left = dict.fromkeys(todo, 0), dict.fromkeys(todo, 0), dict.fromkeys(todo, SHARDS)
    # most of the time is compilation: each kernel's cells are dealt to some processes, compiled kernels first
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 2), get_context("spawn")) as pool:
        jobs = [pool.submit(prove, name, at, SHARDS) for name in todo for at in range(SHARDS)]
        for done in as_completed(jobs):
            name, right, wrong, seconds = done.result()
            passed[name] += right
            failed[name] += wrong
            left[name] -= 1
            if left[name]:
                continue
            print(f"{name:28} {passed[name]:3} cells, {failed[name]} failed, {seconds:6.1f} s at last", flush=True)
            if not passed[name] and not failed[name]:
                failed[name] = 1
                print(f"{name}: the contract has no cell that it serves", flush=True)
            if passed[name] and not failed[name]:
                proved[name] = {"cells": passed[name], "source": sources[name]}
            if path:  # after each, so that a run that is cut short keeps what it has
                Path(path).write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(proved)} kernels, {sum(failed.values())} failures")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
