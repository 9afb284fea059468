"""A function of a `.cu` file, launched on the device of its tensors: a GPU of either vendor, or an emulated one."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from portable.backends.hip import runtime
from portable.backends.hip.objects import Store
from portable.cache_dir import cache_dir
from portable.platform.detect import detect
from portable.platform.target import Target

FOLDER = Path(__file__).parent
HIPIFIED = FOLDER / "amd"  # what ci/hipify.py made of the sources
OBJECTS = FOLDER / "objects"  # what ci/build_objects.py compiled for a wheel
THREADS = 256  # of a block: four waves of 64 lanes, eight of half as many

# torch's public ones cost 0.3 us more each; a build of torch without GPUs has neither
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


class _Packed(threading.local):
    """A thread's own arguments of a function, and the list that a launch takes them from."""

    def __init__(self, size: int, end: int) -> None:
        self.data = ctypes.create_string_buffer(size)
        self.size = ctypes.c_size_t(size)
        address = ctypes.cast(self.data, ctypes.c_void_p)
        pairs = (
            runtime.BUFFER_POINTER,
            address,
            runtime.BUFFER_SIZE,
            ctypes.cast(ctypes.pointer(self.size), ctypes.c_void_p),
            end,
        )
        self.extra = (ctypes.c_void_p * 5)(*pairs)


class Function:
    """A kernel of a source file.

    Args:
        file: "cache" for cache.cu.
        name: of the kernel.
        pointers: how many tensors it takes first.
        numbers: what follows, as `struct` writes it; a struct in C++ is its members.
        defines: the types and sizes that the source leaves open. Each set of them is compiled on its own, when it is
            first used: all that a source can be compiled to takes seconds, one of them a tenth of a second.
    """

    def __init__(self, file: str, name: str, pointers: int, numbers: str, **defines: str | int) -> None:
        self.file, self.name = file, name
        self.defines = tuple(f"{key}={value}" for key, value in defines.items())
        self.layout = struct.Struct(f"@{pointers}P{numbers}")
        self._pack = self.layout.pack_into
        self._on: dict[int, tuple[Any, Any, _Packed]] = {}  # by device: the C launch, the function, arguments

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor | None],
        *numbers: int | float,
    ) -> None:
        """Launch `grid` blocks of `THREADS` on the device of the first tensor, which is never None."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if device < 0:
            self._emulate(grid, tensors, numbers)
        elif device == current_device():
            self._launch(device, grid, tensors, numbers)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, tensors, numbers)

    def _launch(
        self,
        device: int,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: tuple[int | float, ...],
    ) -> None:
        launch, function, packed = self._on.get(device) or self.load(device)
        self._pack(packed.data, 0, *[0 if each is None else each.data_ptr() for each in tensors], *numbers)
        x, y = grid
        status = launch(function, x, y, 1, THREADS, 1, 1, 0, raw_stream(device), None, packed.extra)
        if status:
            runtime.driver_of(_target(device).vendor).check(status, f"launch of {self.name}")

    def load(self, device: int) -> tuple[Any, Any, _Packed]:
        """Compile where it was not, and load; a module cannot be loaded during a capture."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel {self.name} was not loaded before the capture of a graph began; run it once, or call warmup, "
                "before"
            )
        target = _target(device)
        driver = runtime.driver_of(target.vendor)
        with torch.cuda.device(device):
            function = driver.find(_module(self.file, self.defines, device), self.name)
        self._on[device] = driver.launch, function, _Packed(self.layout.size, driver.names.end)
        return self._on[device]

    def _emulate(
        self, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], numbers: tuple[int | float, ...]
    ) -> None:
        from portable.backends.emulation import emulated_arch, emulating

        arch = emulated_arch()
        kernel = _emulated(self.file, self.defines, arch)[self.name]
        data = self.layout.pack(*[0] * len(tensors), *numbers)
        arguments: list[Any] = list(tensors)
        for _, kind, offset, size in kernel.signature.parameters[len(tensors) :]:
            part = data[offset : offset + size]
            arguments.append(part if kind == "bytes" else _number(kind, part))
        with emulating(arch):
            kernel(grid, THREADS, *arguments)


def target_of(tensor: torch.Tensor) -> Target:
    """The device that a kernel with this argument runs on; for a CPU tensor the emulated one."""
    index = tensor.get_device()
    if index >= 0:
        return _target(index)
    from portable.backends.emulation import emulated_arch

    return detect(f"emulated:{emulated_arch()}")


def _number(kind: str, data: bytes) -> Any:
    return struct.unpack("f", data)[0] if kind == "fp32" else int.from_bytes(data, "little", signed=True)


@cache
def _target(device: int) -> Target:
    return detect(f"cuda:{device}")


@cache
def _module(file: str, defines: tuple[str, ...], device: int) -> ctypes.c_void_p:
    target = _target(device)
    return runtime.driver_of(target.vendor).load(code(file, defines, target.vendor, target.arch))


def code(file: str, defines: tuple[str, ...], vendor: str, arch: str) -> bytes:
    """The object of a source: what was built before the release, else compiled here, once per machine."""
    if (ready := OBJECTS / arch / name_of(file, defines, vendor)).is_file():
        return ready.read_bytes()
    path, headers = sources(file, vendor)
    compiler, name = runtime.compiler_of(vendor), runtime.arch_of(vendor, arch)
    key = digest("\0".join((name_of(file, defines, vendor), name, compiler.version, *compiler.names.options)))
    store = Store(cache_dir() / "objects")
    return store.get(
        f"{file}-{arch}-{key}", lambda: compiler.compile(path.name, path.read_text(), headers, name, defines)
    )


def name_of(file: str, defines: tuple[str, ...], vendor: str) -> str:
    """Of a prebuilt object: by what it was built from, so that one of another source is never loaded."""
    path, headers = sources(file, vendor)
    return f"{file}-{digest(chr(0).join((path.read_text(), *headers.values(), *defines)))}.co"


def sources(file: str, vendor: str) -> tuple[Path, dict[str, str]]:
    """A source as the vendor's compiler takes it, and the header that it includes."""
    path = HIPIFIED / f"{file}.hip" if vendor == "amd" else FOLDER / f"{file}.cu"
    header = HIPIFIED / "shim_hip.h" if vendor == "amd" else FOLDER / "shim.h"
    return path, {header.name: header.read_text()}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _emulated(file: str, defines: tuple[str, ...], arch: str) -> Any:
    from portable.platform.emulated import hip

    return hip.compile(HIPIFIED / f"{file}.hip", arch, [f"-D{each}" for each in defines])
