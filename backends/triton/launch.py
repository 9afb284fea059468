"""How every Triton kernel of this folder is launched: on the device of its tensors, or on an emulated one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import torch

from portable.backends.emulation import emulated_arch, emulating, reachable
from portable.backends.triton.fast import Kernel
from portable.platform.detect import detect
from portable.platform.target import Target


class Call(NamedTuple):
    """A launch that was recorded."""

    kernel: Bound
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


class _Recording(NamedTuple):
    target: Target
    calls: list[Call]


KEPT = 4096  # what each kind of launch keeps by the facts that it follows from

_bound: dict[tuple[Any, ...], Bound] = {}
_known: dict[tuple[Any, ...], Callable[..., None]] = {}  # by the arguments' types as well
_targets: dict[int, Target] = {}
_recordings: dict[int, _Recording] = {}  # by thread; a `threading.local` takes 0.07 us more where none is under way


def target_of(tensor: torch.Tensor) -> Target:
    """The device that a kernel with this argument runs on; for a CPU tensor the emulated one."""
    if _recordings and (recording := _recordings.get(get_ident())) is not None:
        return recording.target
    index = tensor.get_device()
    if index < 0:
        return _target(f"emulated:{emulated_arch()}")
    if index not in _targets:
        _targets[index] = detect(f"cuda:{index}")
    return _targets[index]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a `triton.jit` function on the device of its first tensor argument, whatever the current device is.

    Args:
        kernel: the function.
        grid: programs along one to three axes.
        arguments: all that are not constexprs, in order: tensors of one device, ints, floats, bools, None, and tuples
            of these.
        options: the constexprs, and Triton's options such as `num_warps` and `launch_pdl`.

    Raises:
        RuntimeError: a graph is being captured and the kernel was never compiled for such arguments.
        ValueError: the tensors are on the CPU and no device is emulated.
    """
    values = options.values()
    # 1, 1.0 and True are equal
    key = (id(kernel), *map(type, arguments), *options, *values, *map(type, values))
    known = _known.get(key)
    recording = _recordings and get_ident() in _recordings
    if known is not None and not recording:
        known(grid, *arguments)
        return
    made = bound(kernel, options)
    made(grid, *arguments)
    if not recording and tuple not in map(type, arguments):  # of a tuple, its parts' types count as well
        _known[key] = made.kernel_of(arguments).launch


def bound(kernel: Any, options: Mapping[str, Any]) -> Bound:
    """The one `Bound` of a kernel with these options: what was compiled for one step is there for the next."""
    values = options.values()
    named = (id(kernel), *options, *values, *map(type, values))
    found = _bound.get(named)
    if found is None:  # of two threads that make it, both take the one that a warm-up will find
        found = _bound.setdefault(named, Bound(kernel, options))
    return found


class Bound:
    """`launch` of one kernel with its options, for callers that keep it: a microsecond less of host time a launch."""

    __slots__ = ("_kernels", "kernel", "options")

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        _use_cache_dir()
        self.kernel, self.options = kernel, dict(options)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if _recordings and (recording := _recordings.get(get_ident())) is not None:
            recording.calls.append(Call(self, grid, arguments))
            return
        self.kernel_of(arguments).launch(grid, *arguments)

    def kernel_of(self, arguments: tuple[Any, ...]) -> Kernel:
        """For arguments of these types."""
        types: tuple[Any, ...] = tuple(map(type, arguments))
        if tuple in types:
            types = tuple(map(_type, arguments))
        found = self._kernels.get(types)
        if found is None:
            found = self._kernels.setdefault(types, Kernel(self.kernel, self.options, types, _on))
        return found

    def warmup(self, device: int, grid: tuple[int, ...], *arguments: Any) -> bool:
        """Compile and load for these arguments, which may be meta tensors, on a GPU; or -1, the emulated device.

        False where that was done before.
        """
        return self.kernel_of(arguments).warmup(device, grid, arguments)


class Typed:
    """A `Bound` for arguments of one set of types, those of its first launch, which are not looked at again.

    Where arguments are tuples that takes 2 to 4 us less. Whoever keeps it keeps it by whatever may be None.
    """

    __slots__ = ("_launch", "bound")

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._launch: Callable[..., None] | None = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if _recordings:  # perhaps this thread's: what is kept comes from a launch
            self.bound(grid, *arguments)
            return
        launch = self._launch
        if launch is None:
            launch = self._launch = self.bound.kernel_of(arguments).launch
        launch(grid, *arguments)


@contextmanager
def recorded(target: Target) -> Iterator[list[Call]]:
    """Within the block this thread's launches are collected and nothing runs.

    Its tensors may be meta tensors, and are `target`'s. Other threads launch as ever.
    """
    thread, mine = get_ident(), _Recording(target, [])
    before, _recordings[thread] = _recordings.get(thread), mine
    try:
        yield mine.calls
    finally:
        if before is None:
            del _recordings[thread]
        else:
            _recordings[thread] = before


@contextmanager
def reached(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block kernels may reach these tensors by addresses stored in others; only emulated devices must know.

    Args:
        tensors: of one device.
    """
    recording = _recordings and get_ident() in _recordings
    found = [tensor for tensor in tensors if tensor.device.type == "cpu"] if not recording else []
    with reachable(found) if found else nullcontext():
        yield


def warmup(calls: Iterable[Call], device: torch.device) -> int:
    """Compile and load, for a device, what recorded launches need, so that they can be captured; nothing runs.

    Returns the number of kernels that were not there.
    """
    index = torch.cuda.current_device() if device.type != "cpu" and device.index is None else device.index
    index = -1 if index is None else index
    return sum([call.kernel.warmup(index, call.grid, *call.arguments) for call in calls])


def _type(value: Any) -> Any:
    return tuple(map(_type, value)) if type(value) is tuple else type(value)


def _on(device: int) -> AbstractContextManager[Any]:
    """Makes a GPU the current device; -1, for CPU tensors, an emulated one."""
    return torch.cuda.device(device) if device >= 0 else emulating()


@cache
def _target(name: str) -> Target:
    return detect(name)


@cache
def _use_cache_dir() -> None:
    """Triton keeps what it compiled on disk: beside our other caches, unless it was told where."""
    if (folder := os.environ.get("PORTABLE_CACHE_DIR")) and "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
