"""Where a kernel's proof holds: while the source that it was proved from is unchanged."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable.kernel import Kernel


def source_hash(kernel: Kernel) -> str:
    """sha256 of the file that holds a kernel's function, and of the backend files whose names reach it.

    >>> from portable.backends.reference import KERNELS
    >>> len(source_hash(KERNELS[0]))
    64
    """
    module = inspect.getmodule(kernel.run)
    assert module is not None, f"{kernel} has no source file"
    digest = hashlib.sha256()
    for name in sorted(_reached(module.__name__, {module.__name__})):
        file = Path(str(sys.modules[name].__file__))
        for each in (file, *sorted(file.parent.glob("*.cu")), *sorted(file.parent.glob("*.h"))):
            digest.update(each.read_bytes())
    return digest.hexdigest()


def committed(results: Path, kernel: Kernel) -> Iterator[dict[str, Any]]:
    """The runs in a folder that proved the kernel's present source, each with its `level` of proof.

    `conformance-*.json` are records of the conformance kit, `contract-*.json` of the contract alone, on a device.
    """
    for file in sorted(file for kit in ("conformance", "contract") for file in results.glob(f"{kit}-*.json")):
        run: dict[str, Any] = {"level": "measured", **json.loads(file.read_text(encoding="utf-8"))}
        found = run["kernels"].get(kernel.name)
        if found and found["source"] == source_hash(kernel):
            yield run


def _reached(name: str, seen: set[str]) -> set[str]:
    """The modules that a module takes names from, and those that they do."""
    for value in vars(sys.modules[name]).values():
        other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(other, str) and other not in seen and other.startswith(("portable.backends.", "portable.merge")):
            seen.add(other)
            _reached(other, seen)
    return seen
