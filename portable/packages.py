"""Which vendor packages this machine has, and whether each can be used; nothing is imported before it is needed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from portable.first_import import answer, fault

if TYPE_CHECKING:
    from portable.platform.target import Target
    from portable.select import Request

log = logging.getLogger("portable")


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version, and what keeps it from being used.

    The version is None for a module that is there without the distribution it should come from.

    >>> Package("1.2").problem is None, Package("1.2", lambda: "it is broken").problem
    (True, 'it is broken')
    """

    version: str | None
    found: str | Callable[[], str | None] | None = None  # the problem, or how to find it out

    @cached_property
    def problem(self) -> str | None:
        """The sentence that says why it cannot be used, or None; asking may import the package."""
        return self.found() if callable(self.found) else self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorPackage:
    """The facts of a package that kernels may need."""

    name: str  # the distribution, as kernels name it in `requires`
    module: str  # what is imported
    title: str  # what the project is called, where a message tells it from a namesake
    provider: str | None = None  # the provider of the kernels that need it; None: several may
    vendors: frozenset[str] = frozenset()  # whose devices it serves; empty: any
    bundled: bool = False  # portable, or torch on these devices, requires it, so it is there wherever portable is
    aliases: tuple[str, ...] = ()  # other distributions that install the same module
    marker: str | None = None  # a submodule that a namesake lacks
    extension: str | None = None  # a compiled module that comes with it,
    switch: tuple[str, str] | None = None  # unless this environment variable has this value
    chosen_by: tuple[str, str, bool] | None = None  # an environment variable, a value, and whether it must have it
    symbols: tuple[str, ...] = ()  # what kernels use, in the module or its submodules
    compiles: bool = False  # at its first call, for minutes: so it is tested where the caller is ready to wait
    find: Callable[[], Package] | None = None  # looks for what is no distribution of modules, such as a library


def known_packages() -> tuple[VendorPackage, ...]:
    """The packages whose facts the backends folder lists."""
    from portable.backends.packages import PACKAGES

    return PACKAGES


def compiles_late(name: str) -> bool:
    """Whether a distribution compiles its kernels at their first call.

    >>> compiles_late("torch")
    False
    """
    key = canonicalize_name(name)
    return any(package.compiles for package in known_packages() if canonicalize_name(package.name) == key)


def installed(
    target: Target | None = None, requested: Request | None = None, known: Sequence[VendorPackage] | None = None
) -> Mapping[str, Package]:
    """The packages of this machine by distribution name, looked up when asked for.

    Reading a `problem` imports the package, once per process, unless the target is of a vendor that it does not
    serve or the request names one provider for everything, and that is another.

    >>> "no-such-distribution" in installed()
    False
    """
    return _Installed(target, requested, known_packages() if known is None else known)


class _Installed(Mapping[str, Package]):
    def __init__(self, target: Target | None, requested: Request | None, known: Sequence[VendorPackage]) -> None:
        self._target, self._requested = target, requested
        self._known = {str(canonicalize_name(package.name)): package for package in known}
        self._found: dict[str, Package | None] = {}

    def __getitem__(self, name: str) -> Package:
        key = str(canonicalize_name(name))
        if key not in self._found:
            self._found[key] = self._look_up(key)
        package = self._found[key]
        if package is None:
            raise KeyError(name)
        return package

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._known if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _look_up(self, name: str) -> Package | None:
        package = self._known.get(name)
        if package is None:
            version = _version((name,))
            return None if version is None else Package(version)
        found = inspect(package)
        closed = why_closed(package, self._target, self._requested)
        return found if found is None or found.version is None or closed is None else Package(found.version, closed)


def why_closed(package: VendorPackage, target: Target | None, requested: Request | None) -> str | None:
    """The reason for which a package is not imported here, or None."""
    if target is not None and package.vendors and target.vendor not in package.vendors:
        return f"it serves {', '.join(sorted(package.vendors))}, not {target.vendor}"
    if package.provider is not None and requested is not None and requested.name is not None:
        asked = {name.partition(".")[0] for name in requested.names}
        if package.provider not in asked:
            return f"{requested.source} {requested.name!r} leaves it out"
    return None


def inspect(package: VendorPackage) -> Package | None:
    """A package on this machine, or None when it is not there; reading its `problem` imports it.

    A module without its distribution is a `Package` without a version: finding a module proves nothing, because
    other projects use the same names.
    """
    if package.find is not None:
        return package.find()
    version = _version((package.name,))
    module = _locate(package.module)
    if version is None:
        if module is None:
            return None
        if namesake := _namesake(package, module):
            return Package(None, namesake)
        version = _version(package.aliases)
        if version is None:
            return Package(
                None, f"module {package.module!r} at {module.origin} belongs to no distribution; install {package.name}"
            )
    return Package(version, lambda: _problem(package))


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        # a dist-info without a readable version is as good as none
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):
            version: str | None = importlib.metadata.version(name)
            if version:
                return version
    return None


def _locate(module: str) -> ModuleSpec | None:
    """The spec of a module that has a file, found without importing its parents."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # ValueError: a module put into sys.modules without a spec
        return None
    for i in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join((first, *rest[: i + 1]))
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec if spec is not None and spec.origin is not None else None


def _namesake(package: VendorPackage, module: ModuleSpec) -> str | None:
    if package.marker is None or _locate(f"{package.module}.{package.marker}") is not None:
        return None
    return f"module {package.module!r} at {module.origin} is not {package.title}; install {package.name}"


def _problem(package: VendorPackage) -> str | None:
    module = _locate(package.module)
    if module is not None and (namesake := _namesake(package, module)):
        return namesake
    if package.chosen_by is not None:
        variable, value, must = package.chosen_by
        if (os.environ.get(variable) == value) is not must:
            return f"{variable}={value} is {f'not set; it chooses {package.title}' if must else 'set'}"
    if package.extension is not None and _locate(package.extension) is None:
        variable, value = package.switch or ("", "")
        if not variable or os.environ.get(variable) != value:
            other = f", or set {variable}={value}" if variable else ""
            return f"its compiled module {package.extension} is not there; build {package.name} with it{other}"
    return _open(package)


WARNS, ENDS = 60.0, 600.0  # seconds of an import after which it is reported, and given up
MAIN_ONLY = "signal only works in main thread"

_opened: dict[VendorPackage, str | None] = {}
_lock = threading.RLock()


def _open(package: VendorPackage) -> str | None:
    """Import a package and look for its symbols, once per process; the sentence that says what failed, or None."""
    with _lock:
        if package not in _opened:
            problem, noise = _tried(package), io.StringIO()
            if problem is None:
                with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
                    problem = _in_time(package)
            _opened[package] = problem
            if noise.getvalue():
                log.debug("importing %s printed: %s", package.module, noise.getvalue().strip())
        return _opened[package]


def _tried(package: VendorPackage) -> str | None:
    """What another process found when it imported a package that this one has not imported; see `first_import`."""
    module = _locate(package.module)
    if module is None or package.bundled or package.module in sys.modules:
        return None
    file = Path(str(module.origin))
    changed = file.stat().st_mtime_ns if file.exists() else None  # of a checkout, whose version stays
    facts = (_version((package.name, *package.aliases)), _version(("torch",)), sys.version, str(file), changed)
    return fault(package.module, package.symbols, facts, WARNS, ENDS)


def first_import() -> None:
    """The other process."""
    answer(lambda module, symbols: _import(VendorPackage(name="", module=module, title="", symbols=tuple(symbols))))


def _in_time(package: VendorPackage) -> str | None:
    """`_import` in a thread, for a library that waits for a lock that nobody gives back must not hold this one up."""
    found: list[str | KeyboardInterrupt | None] = []

    def work() -> None:
        try:
            found.append(_import(package))
        except KeyboardInterrupt as error:
            found.append(error)

    thread = threading.Thread(target=work, name=f"import of {package.module}", daemon=True)
    thread.start()
    thread.join(WARNS)
    if thread.is_alive():
        log.warning("importing %s has taken %g s; does it wait for a lock?", package.module, WARNS)
        thread.join(ENDS - WARNS)
    if not found:
        return f"importing {package.module} did not end within {ENDS:g} s"
    if isinstance(found[0], KeyboardInterrupt):
        raise found[0]
    if found[0] is not None and MAIN_ONLY in found[0]:
        return _import(package)
    return found[0]


def _import(package: VendorPackage) -> str | None:
    try:
        module = importlib.import_module(package.module)
        absent = [symbol for symbol in package.symbols if not _has(module, symbol)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a library that leaves must not take the process along
        return " ".join(f"importing {package.module} raised {type(error).__name__}: {error}".split())
    return f"it has no {', '.join(f'{package.module}.{symbol}' for symbol in absent)}" if absent else None


def _has(module: object, symbol: str) -> bool:
    """Whether a dotted name is an attribute of a module or of one of its submodules, importing these."""
    path = getattr(module, "__name__", "")
    for name in symbol.split("."):
        path = f"{path}.{name}"
        if not hasattr(module, name) and _locate(path) is not None:
            importlib.import_module(path)
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True
