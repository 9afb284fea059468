"""Where a kernel's proof holds: while the source that it was proved from is unchanged."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.utils import canonicalize_name

from portable.kernel import Kernel

BACKENDS = "portable.backends."


def source_hash(kernel: Kernel) -> str:
    """sha256 of the source that a kernel's function runs.

    Of portable: the file that holds the function, and the backend files whose names reach it. A method's object is made
    elsewhere, so the modules that list the kernel count as well. Of other packages: every file, and for a plug-in what
    `Kernel.plugin` says.

    >>> from portable.backends.reference import KERNELS
    >>> len(source_hash(KERNELS[0]))
    64
    """
    digest, reached = hashlib.sha256(), set[str]()
    for name in _homes(kernel):
        _reached(name, reached)
    for name in sorted(reached):
        file = Path(str(sys.modules[name].__file__))
        for each in (file, *sorted(file.parent.glob("*.cu")), *sorted(file.parent.glob("*.h"))):
            digest.update(each.read_bytes())
    for package in sorted(packages_of(kernel)):
        digest.update(package_hash(package).encode())
    if kernel.plugin is not None:
        digest.update(kernel.plugin.encode())
    return digest.hexdigest()


def packages_of(kernel: Kernel) -> set[str]:
    """The packages other than portable that a kernel's functions are in."""
    modules = map(_module, (kernel.run, kernel.prepare))
    return {module.__name__.partition(".")[0] for module in modules if module is not None} - {"portable"}


def package_hash(package: str) -> str:
    """sha256 of the files of an imported package, with their names, or of the one file of a module.

    Compiled ones count: a package is rebuilt without a new version. What Python derives from a source does not.

    >>> len(package_hash("packaging"))
    64
    """
    digest, module = hashlib.sha256(), sys.modules.get(package)
    for folder in map(Path, getattr(module, "__path__", ())):
        for file in sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
            digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    file_of = getattr(module, "__file__", None)
    if file_of is not None and not hasattr(module, "__path__"):
        digest.update(Path(file_of).read_bytes())
    return digest.hexdigest()


def committed(results: Path, kernel: Kernel, releases: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The runs in a folder that proved the kernel's present source, each with its `level` of proof.

    `conformance-*.json` are records of the conformance kit, `contract-*.json` of the contract alone, on a device.
    `releases` are present versions of vendors' packages, by normalised name: a run with another of one that the kernel
    requires, or that does not say which it had, proved nothing of the present.
    """
    needed = {canonicalize_name(name) for name, _ in kernel.caps.requires}
    present = {name: version for name, version in (releases or {}).items() if name in needed}
    for file in sorted(file for kit in ("conformance", "contract") for file in results.glob(f"{kit}-*.json")):
        run: dict[str, Any] = {"level": "measured", **json.loads(file.read_text(encoding="utf-8"))}
        found = run["kernels"].get(kernel.name)
        same = present.items() <= run.get("versions", {}).items()
        if found and same and found["source"] == source_hash(kernel):
            yield run


def _homes(kernel: Kernel) -> Iterator[str]:
    """The modules that what a kernel runs is found from."""
    module = _module(kernel.run)
    assert module is not None, f"{kernel} has no source file"
    yield module.__name__
    if inspect.ismethod(kernel.run):
        for name, other in sorted(sys.modules.items()):
            if name.startswith(BACKENDS) and any(kernel.name == each.name for each in vars(other).get("KERNELS", ())):
                yield name


def _module(function: object) -> ModuleType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return None if function is None else inspect.getmodule(function)


def _reached(name: str, seen: set[str]) -> None:
    """Adds a module of portable to `seen`, and the backend modules that it or another package's takes names from."""
    if name.startswith("portable."):
        seen.add(name)
    for value in vars(sys.modules[name]).values():
        other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(other, str) and other not in seen and other.startswith((BACKENDS, "portable.merge")):
            _reached(other, seen)
