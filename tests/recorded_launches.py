"""What a capture notices of the emulated device: launches of Triton and C++ kernels, and modules that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def noticed(capture: Any, patch: Any) -> Iterator[None]:
    """Within the block, launches are the capture's; Triton's are collected, in their order, in `capture.calls`."""
    if capture.recorder.target is None:
        yield
        return
    import triton

    from portable.backends.hip import launch as cpp
    from portable.backends.triton.launch import recorded
    from portable.platform.emulated import hip

    def compiling(*args: Any, **kwargs: Any) -> None:
        capture.load(kwargs["fn"].name if "fn" in kwargs else "of Triton")

    call, compiled = hip.Kernel.__call__, cpp._emulated.cache_info().misses

    def launch(kernel: Any, *args: Any) -> None:
        if cpp._emulated.cache_info().misses > compiled:
            capture.load("of C++")
        if capture.computing:
            return call(kernel, *args)
        capture.drain()
        capture.record(partial(_called, call, kernel), args, {})

    patch.setattr(triton.knobs.runtime, "jit_cache_hook", compiling)
    patch.setattr(triton.compiler.CompiledKernel, "__del__", lambda kernel: capture.unload(), raising=False)
    patch.setattr(hip.Kernel, "__call__", launch)
    with recorded(capture.recorder.target) as capture.calls:
        yield


def launch_of(call: Any) -> tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]:
    """What `record` takes for a launch that was collected."""
    return partial(_launched, call.kernel.kernel_of(call.arguments)), (call.grid, *call.arguments), {}


def _launched(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    kernel.launch(grid, *arguments)


def _called(call: Callable[..., None], kernel: Any, *args: Any) -> None:
    from portable.backends.emulation import emulating

    with emulating(kernel.code.arch):
        call(kernel, *args)
