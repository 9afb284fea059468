"""The code object of a source: what was built before the release, else compiled on this machine, once."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

from portable.backends.hip import runtime
from portable.backends.hip.objects import Store
from portable.cache_dir import cache_dir
from portable.packages import Package

log = logging.getLogger("portable")
FOLDER = Path(__file__).parent
HIPIFIED = FOLDER / "amd"  # what ci/hipify.py made of the sources
OBJECTS = FOLDER / "objects"  # what ci/build_objects.py compiled for a wheel


def code(file: str, defines: tuple[str, ...], vendor: str, arch: str) -> bytes:
    """The object of a source with these defines.

    Raises:
        RuntimeError: it does not compile, or no compiler was found.
    """
    if (ready := OBJECTS / arch / name_of(file, defines, vendor)).is_file():
        return ready.read_bytes()
    if vendor == "amd":
        _unverified(file, arch)
    path, headers = sources(file, vendor)
    compiler, name = runtime.compiler_of(vendor), runtime.arch_of(vendor, arch)
    key = digest("\0".join((name_of(file, defines, vendor), name, compiler.version, *compiler.names.options)))
    store = Store(cache_dir() / "objects")
    return store.get(
        f"{file}-{arch}-{key}", lambda: compiler.compile(path.name, path.read_text(), headers, name, defines)
    )


@cache
def nvrtc_here() -> Package:
    """NVIDIA's compiler, or objects of its devices in place of it; it is loaded only where looking does not find it."""
    name = runtime.NVIDIA.compiler
    file = runtime.where(name)
    if file is None:  # the loader knows folders that no list names, such as those of a conda Python's RPATH
        with suppress(RuntimeError):
            runtime.library(name)
            file = runtime.where(name) or name
    if file is not None:
        return Package(Path(file).name.partition(".so.")[2] or "of no version")
    if any(OBJECTS.glob("sm*/*.co")):
        return Package("not needed: objects came with portable")
    return Package(None, f"{name} is neither beside torch nor on the library path, and no objects came with portable")


@cache
def _unverified(file: str, arch: str) -> None:
    log.warning(
        "no object of %s for %s, as wanted here, came with this installation: hipRTC compiles it, which is unverified: "
        "nobody has run that on such a device yet",
        file,
        arch,
    )


def name_of(file: str, defines: tuple[str, ...], vendor: str) -> str:
    """Of a prebuilt object: by what it was built from, so that one of another source is never loaded."""
    path, headers = sources(file, vendor)
    return f"{file}-{digest(chr(0).join((path.read_text(), *headers.values(), *defines)))}.co"


def sources(file: str, vendor: str) -> tuple[Path, dict[str, str]]:
    """A source as the vendor's compiler takes it, and the headers that it may include."""
    path = HIPIFIED / f"{file}.hip" if vendor == "amd" else FOLDER / f"{file}.cu"
    return path, {header.name: header.read_text() for header in sorted(path.parent.glob("*.h"))}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
