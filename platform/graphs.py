"""Captured graphs of a device: torch's own module for it, or what stands for it where tensors are on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_instead: Any = None  # a module like torch.cuda, for tensors of the CPU


@contextmanager
def using(runtime: Any) -> Iterator[None]:
    """Within the block graphs over tensors of the CPU are those of `runtime`, which has the members of `torch.cuda`."""
    global _instead
    before, _instead = _instead, runtime
    try:
        yield
    finally:
        _instead = before


def runtime(device: torch.device) -> Any:
    """The module that captures graphs of a device, `torch.cuda` of both vendors; None: there is none."""
    kind = device.type
    return _instead if kind == "cpu" else _of_kind(kind)


@cache
def _of_kind(kind: str) -> Any:
    module = torch.get_device_module(kind)
    return module if hasattr(module, "CUDAGraph") else None


def capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a graph."""
    module = runtime(device)
    return module is not None and bool(module.is_current_stream_capturing())


def current_stream(device: torch.device) -> Callable[[], Any]:
    """A function that gives a device's current stream; torch's own makes an object of it each time, in 4.5 us."""
    module: Any = torch.get_device_module(device)
    raw = torch._C._cuda_getCurrentRawStream if device.type == "cuda" else None
    if raw is None:
        return lambda: module.current_stream(device)
    known: dict[int, Any] = {}

    def current() -> Any:
        handle = raw(device.index)
        if handle not in known:
            known[handle] = module.current_stream(device)
        return known[handle]

    return current


@contextmanager
def recording(module: Any, graph: Any, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Capture what the block launches into a graph; a failure leaves the device as it was, and tells what it was.

    torch's own stays on the stream of a capture that the runtime gave up, its allocator and generator in the capture:
    the next random number is a RuntimeError (seen with 2.11). What it raises then hides what the block raised.
    """
    stream, reason = module.current_stream(device), None
    try:
        with module.graph(graph, pool=pool):
            try:
                yield
            except BaseException as error:
                reason = error
                raise
    except BaseException as error:
        module.set_stream(stream)
        with suppress(AttributeError, TypeError, RuntimeError):  # no such function, no pool, no end that is due
            torch._C._cuda_endAllocateToPool(device.index, pool)
        with suppress(RuntimeError), module.graph(module.CUDAGraph()):  # whose end resets the generator
            torch.zeros(1, device=device)
        module.set_stream(stream)
        if reason is None or reason is error:
            raise
        raise reason from error


@contextmanager
def plain() -> Iterator[None]:
    """What is made within the block may be written to later, inside of `torch.inference_mode` and outside."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that does device work by one launch, a copy from pinned memory too.

    The work is not done now. What it launches must be compiled. Where there are no graphs the function is the work. On
    an H100's host a copy and two kernels took 8 us so, where torch's copy and a graph of the kernels took 19.
    """
    module = runtime(device)
    return work if module is None else _captured(work, module, device)[1]


def repeatable(work: Callable[[], Result], device: torch.device) -> tuple[Result, Callable[[], None]]:
    """What device work gives, and a function that repeats the work into the same memory, by one launch.

    The work is run once before it is captured: what it launches is compiled then. Where there are no graphs it is run
    again, and what it gives is copied to where the first result is.

    >>> x = torch.zeros(2)
    >>> result, again = repeatable(lambda: (x + 1,), torch.device("cpu"))
    >>> x.fill_(4), again(), result[0].tolist()
    (tensor([4., 4.]), None, [5.0, 5.0])
    """
    module = runtime(device)
    with plain():
        result = work()
        if module is None:
            return result, lambda: _copy(result, work())
        result, again = _captured(work, module, device)
        again()
    return result, again


def _captured(work: Callable[[], Result], module: Any, device: torch.device) -> tuple[Result, Callable[[], None]]:
    graph = module.CUDAGraph()
    with plain(), recording(module, graph, device):
        result = work()
    return result, graph.replay


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in dataclasses, tuples, lists and dicts, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in tensors(part)] if isinstance(value, tuple | list) else []


def _copy(old: Any, new: Any) -> None:
    for to, come in zip(tensors(old), tensors(new), strict=True):
        to.copy_(come)
