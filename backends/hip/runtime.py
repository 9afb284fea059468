"""The two vendors' C interfaces for compiling, loading and launching device code, which mirror each other by name.

Called through ctypes: the libraries are those that torch has in the process, so that nothing is installed and no
second runtime is loaded. Wrapper packages exist for each vendor, but none for both, and they cost more than a call.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

CONFIG = struct.Struct("@7I4xP")
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # keys of the "extra" list of a launch: packed arguments, and their bytes


@dataclass(frozen=True, slots=True)
class Names:
    """How a vendor calls what the other one has as well."""

    compiler: str  # library, without version
    compiler_prefix: str
    code: str  # what follows Get in the name of the function that gives the object, and Size in that of its size
    driver: str
    load: str
    find: str
    launch: str
    error: str
    end: int  # of the "extra" list
    options: tuple[str, ...]  # {arch} is the architecture as the compiler names it


NVIDIA = Names(
    compiler="libnvrtc.so",
    compiler_prefix="nvrtc",
    code="CUBIN",
    driver="libcuda.so",
    load="cuModuleLoadData",
    find="cuModuleGetFunction",
    launch="cuLaunchKernelEx",  # since CUDA 11.8
    error="cuGetErrorString",
    end=0,
    options=("--gpu-architecture={arch}", "--std=c++17"),
)
AMD = Names(
    compiler="libhiprtc.so",
    compiler_prefix="hiprtc",
    code="Code",
    driver="libamdhip64.so",
    load="hipModuleLoadData",
    find="hipModuleGetFunction",
    launch="hipModuleLaunchKernel",
    error="hipGetErrorString",
    end=3,
    options=("--offload-arch={arch}", "-std=c++17", "-O3"),
)


class Compiler:
    """NVRTC or hipRTC.

    Raises:
        RuntimeError: it is not there.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self._library = library(names.compiler)
        major, minor = c_int(), c_int()
        self._call("Version", byref(major), byref(minor))
        self.version = f"{names.compiler_prefix} {major.value}.{minor.value}"

    def compile(
        self, name: str, text: str, headers: Mapping[str, str], arch: str, defines: Sequence[str] = ()
    ) -> bytes:
        """The code object of a source.

        Raises:
            RuntimeError: it does not compile; the compiler's words follow.
        """
        program = c_void_p()
        texts, included = (_strings([*each]) for each in (headers.values(), headers))
        self._call("CreateProgram", byref(program), text.encode(), name.encode(), len(headers), texts, included)
        try:
            options = [*(each.format(arch=arch) for each in self.names.options), *(f"-D{each}" for each in defines)]
            status = self._function("CompileProgram")(program, len(options), _strings(options))
            if status:
                raise RuntimeError(f"{name} does not compile for {arch}: {self._read(program, 'ProgramLog').decode()}")
            return self._read(program, self.names.code)
        finally:
            self._call("DestroyProgram", byref(program))

    def _read(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"Get{what}Size", program, byref(size))
        data = create_string_buffer(size.value)
        self._call(f"Get{what}", program, data)
        return data.raw

    def _function(self, name: str) -> Any:
        return getattr(self._library, self.names.compiler_prefix + name)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := self._function(name)(*arguments):
            raise RuntimeError(f"{self.names.compiler_prefix}{name} returned {status}")


class Driver:
    """Loads code objects into the current device, and launches.

    `launch(config, function, None, extra)` is the C function itself where it takes its configuration as a struct: grid
    and block of three uint32 each, bytes of shared memory, the stream at byte 32, and attributes, none. ctypes takes
    0.3 us for its 4 arguments and 0.7 to 2 us for the 11 of the older one. It returns 0 or an error for `check`.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self._library = library(names.driver)
        self.launch: Callable[..., int] = getattr(self._library, names.launch)
        if names is AMD:
            self.launch = self._launch_by_numbers

    def _launch_by_numbers(self, config: Any, function: Any, parameters: None, extra: Any) -> int:
        *sizes, stream = CONFIG.unpack_from(config._obj)
        launch = getattr(self._library, self.names.launch)
        return int(launch(function, *sizes, c_void_p(stream), parameters, extra))

    def load(self, code: bytes) -> c_void_p:
        """A module of the current device; it is never unloaded, since a captured graph may hold its kernels."""
        module = c_void_p()
        self.check(getattr(self._library, self.names.load)(byref(module), code), self.names.load)
        return module

    def find(self, module: c_void_p, name: str) -> c_void_p:
        function = c_void_p()
        self.check(getattr(self._library, self.names.find)(byref(function), module, name.encode()), f"kernel {name}")
        return function

    def check(self, status: int, doing: str) -> None:
        if not status:
            return
        ask = getattr(self._library, self.names.error)
        text = c_char_p()
        if self.names is NVIDIA:
            ask(status, byref(text))
        else:
            ask.restype = c_char_p
            text = c_char_p(ask(status))
        raise RuntimeError(f"{doing}: error {status}, {(text.value or b'unknown').decode()}")


def names_of(vendor: str) -> Names:
    return AMD if vendor == "amd" else NVIDIA


def arch_of(vendor: str, arch: str) -> str:
    """The name that the vendor's compiler takes.

    >>> arch_of("nvidia", "sm90"), arch_of("amd", "gfx942")
    ('sm_90', 'gfx942')
    """
    return arch if vendor == "amd" else arch.replace("sm", "sm_")


@cache
def compiler_of(vendor: str) -> Compiler:
    return Compiler(names_of(vendor))


@cache
def driver_of(vendor: str) -> Driver:
    return Driver(names_of(vendor))


def library(name: str) -> ctypes.CDLL:
    """The library of this name that is in the process, or of torch's own packages, or of the machine.

    Raises:
        RuntimeError: there is none.
    """
    tried = [*loaded(name), *_beside_torch(name), *_versions(name)]
    for path in tried:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(f"{name} was not found: not in this process, not beside torch, not on the library path")


def where(name: str, linker: Path = Path("/etc/ld.so.cache")) -> str | None:
    """The file that `library` would load, by looking alone: it takes 1 ms, and nothing is loaded or run."""
    found = [*loaded(name), *_beside_torch(name)]
    paths = linker.read_bytes().split(b"\0") if linker.is_file() else []
    for each in _versions(name):
        found += [f"{folder}/{each}" for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        found += [path.decode() for path in paths if path.endswith(f"/{each}".encode())]
    return next((path for path in found if Path(path).is_file()), None)


def loaded(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Files of this name that the process has mapped."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = (line[line.index("/") :] for line in lines if "/" in line)
    # torch's own copies may have a hash in their names: libamdhip64-1a2b3c4d.so
    named = re.compile(rf"{re.escape(name.removesuffix('.so'))}(-[0-9a-f]{{8}})?\.so[.\d]*")
    return sorted({path for path in paths if named.fullmatch(Path(path).name)})


def _beside_torch(name: str) -> list[str]:
    site = Path(torch.__file__).parents[1]
    roots = (site / "torch" / "lib", *sorted((site / "nvidia").glob("*/lib")))
    return [str(path) for root in roots for path in sorted(root.glob(f"{name}*"), reverse=True)]


def _versions(name: str) -> list[str]:
    major = (torch.version.cuda or torch.version.hip or "").split(".")[0]
    return [name, *([f"{name}.{major}"] if major else []), f"{name}.1"] if sys.platform == "linux" else []


def _strings(texts: Sequence[str]) -> Any:
    return (c_char_p * max(1, len(texts)))(*(text.encode() for text in texts))
