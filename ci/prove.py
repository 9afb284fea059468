"""Runs the contract test of every kernel of this machine, and keeps those that passed: python ci/prove.py [FILE]

The file belongs in ci/results/: it counts as a measured lane in the README's table while the source stays the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from portable import Kernel, available_kernels, detect  # noqa: E402 - the checkout's, whatever is installed
from portable.attention import load_kernels  # noqa: E402


def source_hash(kernel: Kernel) -> str:
    """sha256 of the file that holds a kernel's function, and of the backend files whose names reach it."""
    module = inspect.getmodule(kernel.run)
    assert module is not None, f"{kernel} has no source file"
    digest = hashlib.sha256()
    for name in sorted(_reached(module.__name__, {module.__name__})):
        file = Path(str(sys.modules[name].__file__))
        for each in (file, *sorted(file.parent.glob("*.cu")), *sorted(file.parent.glob("*.h"))):
            digest.update(each.read_bytes())
    return digest.hexdigest()


def _reached(name: str, seen: set[str]) -> set[str]:
    """The modules that a module takes names from, and those that they do."""
    for value in vars(sys.modules[name]).values():
        other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(other, str) and other not in seen and other.startswith(("portable.backends.", "portable.merge")):
            seen.add(other)
            _reached(other, seen)
    return seen


def prove(name: str) -> tuple[str, int, int, float]:
    """(the kernel's name, cells that passed, that failed, seconds), on this machine's device."""
    import cells
    import contract

    target = detect()
    kernel = next(kernel for kernel in load_kernels() if kernel.name == name)
    start, passed, failed = time.perf_counter(), 0, 0
    for case in cells.cases(kernel, target):
        try:
            contract.check(kernel, case, target.device)
            passed += 1
        except Exception as error:
            failed += 1
            print(f"{kernel.name}: {type(error).__name__}: {error}\n    {case}")
    return name, passed, failed, time.perf_counter() - start


def main(path: str | None) -> int:
    target = detect()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "runtime": target.runtime}
    versions |= {package: version(package) for package in ("triton",) if find_spec(package)}
    kernels = {kernel.name: kernel for kernel in available_kernels()}
    proved: dict[str, Any] = {}
    failures = 0
    # most of the time is compilation: a process per kernel, some at a time
    with ProcessPoolExecutor(max(1, min(12, (os.cpu_count() or 1) // 2)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(prove, name) for name in kernels]):
            name, passed, failed, seconds = done.result()
            failures += failed
            print(f"{name:28} {passed:3} cells, {failed} failed, {seconds:6.1f} s", flush=True)
            if passed and not failed:
                proved[name] = {"cells": passed, "source": source_hash(kernels[name])}
            if path:  # after each, so that a run that is cut short keeps what it has
                result = {"arch": target.arch, "card": target.name, "versions": versions, "kernels": proved}
                Path(path).write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(proved)} kernels, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
