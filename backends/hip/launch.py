"""A function of a `.cu` file, launched on the device of its tensors: a GPU of either vendor, or an emulated one."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from portable.backends.hip import runtime
from portable.backends.hip.sources import HIPIFIED, code
from portable.platform.detect import detect
from portable.platform.target import Target
from portable.ragged import cdiv

THREADS = 256  # of a block: four waves of 64 lanes, eight of half as many
REMEMBERED = 4096  # prepared launches of a thread: with one more it starts afresh
CONFIG = "I28sN24x"  # blocks; the rest of grid and block; stream; no attributes: `runtime.Driver`. 64 bytes in all

# launch(x, *values): x blocks, or rows of blocks; addresses of tensors, then numbers
Launch = Callable[..., None]

# torch's public ones cost 0.3 us more each; a build of torch without GPUs has neither
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


T = TypeVar("T")


class Launches(threading.local, Generic[T]):
    """A thread's launches, each with a buffer of its own, by what they were prepared for.

    Where the thread records there are none: `recorded` puts them away, which costs a launch nothing.
    """

    every: ClassVar[list[Launches[Any]]] = []

    def __new__(cls) -> Launches[T]:
        made = super().__new__(cls)
        cls.every.append(made)
        return made

    def __init__(self) -> None:  # in each thread that looks
        self.known: dict[Any, T] = {}

    def keep(self, key: Any, launch: T) -> None:
        if len(self.known) >= REMEMBERED:
            self.known.clear()
        self.known[key] = launch


class _Thread(threading.local):
    """What a thread records: the device that launches are for, and the functions launched."""

    recording: tuple[Target, list[Function]] | None = None


_thread = _Thread()


class Function:
    """A kernel of a source file.

    Args:
        file: "cache" for cache.cu.
        name: of the kernel.
        changing: the arguments that each launch brings, as `struct` writes them: "8Ni" is 8 tensors, then an int;
            "16s" is 16 bytes of some that are packed already. P, the other form of an address, takes 0.02 us more.
        fixed: those that follow, and stay the same for a prepared launch; a struct in C++ is its members.
        defines: the types and sizes that the source leaves open. Each set of them is compiled on its own, when it is
            first used: all that a source can be compiled to takes seconds, one of them a tenth of a second.
    """

    def __init__(self, file: str, name: str, changing: str, fixed: str, **defines: str | int) -> None:
        self.file, self.name = file, name
        self.defines = tuple(f"{key}={value}" for key, value in defines.items())
        self.layout = struct.Struct(f"@{changing}{fixed}")
        self._each_time = struct.Struct(f"@{CONFIG}{changing}")
        self._nothing = struct.unpack(f"@{changing}", bytes(struct.calcsize(f"@{changing}")))
        self._functions: dict[int, tuple[runtime.Driver, ctypes.c_void_p]] = {}  # by device

    def foresee(self) -> None:
        """Have a warm-up compile it: other steps of the layer take it in the place of one that is launched."""
        if _thread.recording is not None:
            _thread.recording[1].append(self)

    def prepare(
        self,
        tensors: Sequence[torch.Tensor | None],
        fixed: Sequence[int | float],
        y: int = 1,
        z: int = 1,
        threads: int = THREADS,
        reached: Sequence[torch.Tensor] = (),
    ) -> Launch:
        """A launch for the calling thread that packs its fixed numbers once.

        On a GPU it is for any tensors of the device of the first, as often as wanted; on the emulated one for these,
        once. `reached` are those that the kernel finds by addresses stored in others.
        """
        if _thread.recording is not None:
            _thread.recording[1].append(self)
            return lambda *_: None
        assert tensors[0] is not None
        device = tensors[0].get_device()
        if device < 0:
            return self._emulated(tensors, fixed, y, z, threads, reached)
        driver, function = self._functions.get(device) or self.load(device)
        start = struct.calcsize(f"@{CONFIG}")
        data = ctypes.create_string_buffer(start + self.layout.size)
        self.layout.pack_into(data, start, *self._nothing, *fixed)
        size = ctypes.c_size_t(self.layout.size)
        address = ctypes.addressof(data)
        extra = (ctypes.c_void_p * 5)(
            runtime.BUFFER_POINTER, address + start, runtime.BUFFER_SIZE, ctypes.addressof(size), driver.names.end
        )
        alone, rest = torch.cuda.device_count() == 1, struct.pack("@6I4x", y, z, threads, 1, 1, 0)

        def fail(status: int, kept: Any = (extra, size)) -> None:  # `extra` points to both
            driver.check(status, f"launch of {self.name}")

        # what ctypes need not convert anew
        what = ctypes.c_void_p.from_param(function.value)
        call = driver.launch, ctypes.byref(data), what, ctypes.byref(extra)
        return _maker(len(self._nothing))(self._each_time.pack_into, data, rest, *call, device, alone, fail)

    def load(self, device: int) -> tuple[runtime.Driver, ctypes.c_void_p]:
        """Compile where it was not, and load; a module cannot be loaded during a capture."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel {self.name} was not loaded before the capture of a graph began; run it once, or call warmup, "
                "before"
            )
        driver = runtime.driver_of(target_on(device).vendor)
        with torch.cuda.device(device):
            self._functions[device] = driver, driver.find(_module(self.file, self.defines, device), self.name)
        return self._functions[device]

    def _emulated(
        self,
        tensors: Sequence[torch.Tensor | None],
        fixed: Sequence[int | float],
        y: int,
        z: int,
        threads: int,
        reached: Sequence[torch.Tensor],
    ) -> Launch:
        from portable.backends.emulation import emulated_arch, emulating, reachable

        arch, count = emulated_arch(), len(tensors)

        def launch(x: int, *values: int | bytes) -> None:
            kernel = _emulated(self.file, self.defines, arch)[self.name]
            data = self.layout.pack(*values, *fixed)
            given = list(struct.unpack_from(f"@{count}N", data))
            assert given == addresses(*tensors), "a GPU would get other tensors"
            arguments: list[Any] = list(tensors)
            for _, kind, offset, size in kernel.signature.parameters[count:]:
                part = data[offset : offset + size]
                arguments.append(part if kind == "bytes" else _number(kind, part))
            with emulating(arch), reachable(reached):
                kernel((x, y, z), threads, *arguments)

        return launch


LAUNCH = """
def make(pack, data, rest, call, where, what, arguments, device, alone, fail):
    def launch(x, {values}):
        if alone or current_device() == device:
            pack(data, 0, x, rest, raw_stream(device), {values})
            status = call(where, what, None, arguments)
            if status:
                fail(status)
        else:
            with torch.cuda.device(device):
                launch(x, {values})
    return launch
"""


@cache
def _maker(count: int) -> Callable[..., Launch]:
    """Makes launches that bring so many values; `*values` instead would take 0.1 us more."""
    made: dict[str, Any] = {}
    exec(LAUNCH.format(values=", ".join(f"v{n}" for n in range(count))), globals(), made)
    return made["make"]  # type: ignore[no-any-return]


def checks() -> dict[str, int]:
    """What a debug build of the cache's kernels defines besides: a slot or a page past the end ends the launch.

    Asked when a launch is prepared, and not when it is used again. Checked code is compiled on this machine.
    """
    return {"CHECKED": 1} if os.environ.get("PORTABLE_DEBUG", "0") not in ("", "0") else {}


def nothing() -> None:
    """In place of a launch, or of a reference to pages."""


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """What a launch takes for tensors."""
    return [0 if each is None else each.data_ptr() for each in tensors]


def row_strides(new: torch.Tensor) -> tuple[int, int]:
    """The strides of tokens and heads; of a dense tensor those that more tokens or heads would have.

    >>> row_strides(torch.zeros(1, 1, 8).as_strided((1, 1, 8), (99, 7, 1))), row_strides(torch.zeros(2, 3, 8)[:, :2])
    ((8, 8), (24, 8))
    """
    if new.is_contiguous():
        return new.shape[1:].numel(), new.shape[2] if new.dim() == 3 else 0
    return new.stride(0), new.stride(1) if new.dim() == 3 else 0


def floats(values: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks or scales as the kernels read them; whoever launches holds on to them until then."""
    return values if values is None or values.dtype is torch.float32 else values.float()


def rows_key(new: torch.Tensor) -> object:
    """What `row_strides` depends on beside the widths that a layer has: of a dense tensor nothing.

    >>> rows_key(torch.zeros(1, 2, 8)), rows_key(torch.zeros(2, 3, 8)[:, :2])
    (True, (24, 8, 1))
    """
    return new.is_contiguous() or new.stride()  # strides take twice the time


def scale_step(scale: torch.Tensor | None) -> int:
    """From a head's scale to the next one's; 0 where they share one."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


@contextmanager
def recorded(target: Target) -> Iterator[list[Function]]:
    """Within the block the thread's launches are listed and nothing runs: tensors may be meta, and are `target`'s."""
    functions: list[Function] = []
    before, kept = _thread.recording, {each: each.known for each in Launches.every}
    _thread.recording = target, functions
    for each in kept:
        each.known = {}  # a launch that was kept would run, without rows; one that is recorded never would
    try:
        yield functions
    finally:
        _thread.recording = before
        for each in Launches.every:
            each.known = kept.get(each, {})


def warmup(functions: Iterable[Function], device: torch.device) -> int:
    """Compile and load what recorded launches need, so that they can be captured; how many were not there."""
    if device.type == "cpu":
        from portable.backends.emulation import emulated_arch

        arch, before = emulated_arch(), _emulated.cache_info().misses
        for function in functions:
            _emulated(function.file, function.defines, arch)
        return _emulated.cache_info().misses - before
    index = torch.cuda.current_device() if device.index is None else device.index
    new = {function for function in functions if index not in function._functions}
    for function in new:
        function.load(index)
    return len(new)


def target_of(tensor: torch.Tensor) -> Target:
    """The device that a kernel with this argument runs on; for a CPU tensor the emulated one."""
    if _thread.recording is not None:
        return _thread.recording[0]
    index = tensor.get_device()
    if index >= 0:
        return target_on(index)
    from portable.backends.emulation import emulated_arch

    return detect(f"emulated:{emulated_arch()}")


@cache
def target_on(device: int) -> Target:
    return detect(f"cuda:{device}")


def divide(divisor: int) -> tuple[int, int, int]:
    """A `Divide` of the sources.

    >>> d, m, s = divide(48)
    >>> [(2 * n * m >> 32) >> s for n in (47, 48, 2**31 - 1)], (2**31 - 1) // d
    ([0, 1, 44739242], 44739242)
    """
    shift = (divisor - 1).bit_length()
    return divisor, (1 << 31 + shift) // divisor + 1, shift


class Items(NamedTuple):
    """How the chunks of 16 bytes of a token's heads are spread over threads: `Items` of the sources."""

    pairs: int  # of (head, chunk)
    chunks: int  # of a head
    elements: int  # of a chunk
    tokens: int  # of a block
    slices: int  # blocks that share a token

    def numbers(self, tokens: int | None = None) -> tuple[int, ...]:
        """As the sources take them; a block may take fewer tokens."""
        return *divide(self.pairs), *divide(self.chunks), self.tokens if tokens is None else tokens, self.elements


def items(heads: int, width: int, dtype: torch.dtype, each: int = 1, threads: int = THREADS) -> Items:
    """
    Args:
        each: chunks of a head that a thread takes; `chunks` then counts those of a head that are a thread's first.
        threads: of a block.

    >>> items(8, 128, torch.bfloat16), items(8, 128, torch.bfloat16, 2, 128)[:4]
    (Items(pairs=128, chunks=16, elements=8, tokens=2, slices=1), (64, 8, 8, 2))
    """
    elements = 16 // dtype.itemsize
    chunks = max(1, cdiv(width, elements * each))
    return Items(heads * chunks, chunks, elements, max(1, threads // (heads * chunks)), cdiv(heads * chunks, threads))


def _number(kind: str, data: bytes) -> Any:
    return struct.unpack("f", data)[0] if kind == "fp32" else int.from_bytes(data, "little", signed=kind[0] == "i")


@cache
def _module(file: str, defines: tuple[str, ...], device: int) -> ctypes.c_void_p:
    target = target_on(device)
    return runtime.driver_of(target.vendor).load(code(file, defines, target.vendor, target.arch))


@cache
def _emulated(file: str, defines: tuple[str, ...], arch: str) -> Any:
    from portable.platform.emulated import hip

    return hip.compile(HIPIFIED / f"{file}.hip", arch, [f"-D{each}" for each in defines])
