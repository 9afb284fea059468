"""Runs the contract test of every kernel on this machine's device, and keeps what passed: python ci/prove.py [FILE]

The file belongs in ci/results/: it counts as a measured lane in the README's table while the source stays the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from portable import Kernel, detect  # noqa: E402 - the checkout's, whatever is installed
from portable.attention import load_kernels  # noqa: E402


def source_hash(kernel: Kernel) -> str:
    """sha256 of the file that holds a kernel's function, and of the backend files that it takes names from."""
    module = inspect.getmodule(kernel.run)
    assert module is not None, f"{kernel} has no source file"
    sources = {getattr(value, "__module__", None) for value in vars(module).values()} | {module.__name__}
    used = sorted(name for name in sources if name and name.startswith(("portable.backends.", "portable.merge")))
    digest = hashlib.sha256()
    for name in used:
        digest.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return digest.hexdigest()


def main(path: str | None) -> int:
    import cells
    import contract

    target = detect()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "runtime": target.runtime}
    proved: dict[str, Any] = {}
    failures = 0
    for kernel in load_kernels():
        start, passed = time.perf_counter(), 0
        for case in cells.cases(kernel, target):
            try:
                contract.check(kernel, case, target.device)
                passed += 1
            except Exception as error:
                failures += 1
                print(f"{kernel.name}: {type(error).__name__}: {error}\n    {case}")
        print(f"{kernel.name:24} {passed:3} cells, {time.perf_counter() - start:6.1f} s", flush=True)
        if passed:
            proved[kernel.name] = {"cells": passed, "source": source_hash(kernel)}
    print(f"{target.name}: {len(proved)} kernels, {failures} failures")
    if path and not failures:
        result = {"arch": target.arch, "card": target.name, "versions": versions, "kernels": proved}
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
