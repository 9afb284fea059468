"""Kernels with a loop on the host, made into what a device's kernels are to a capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from recording import active
from torch.utils._python_dispatch import _disable_current_modes

from portable.kernel import GraphLevel, Kernel, Op, Segment


class Module:
    """The code of a wrapped kernel: loaded when it first runs, unloaded when nobody holds it."""

    def __init__(self, name: str) -> None:
        self.name, self.loaded = name, False

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        capture = active[-1] if active else None
        if capture is not None and not self.loaded:
            capture.load(self.name)
        self.loaded = True
        if capture is None:
            return function(*args)
        with _disable_current_modes():
            capture.drain()
            return capture.record(function, args, {})

    def __del__(self) -> None:
        if self.loaded and active:
            active[-1].unload()


def launches(kernel: Kernel, level: GraphLevel = GraphLevel.ALWAYS) -> Kernel:
    """A kernel with a loop on the host, as a device's: one launch, which reads its lengths from the device each time.

    Its host lengths are bounds to it, and a replay has those of the capture.
    """
    module = Module(kernel.name)

    def on_device(*args: Any) -> Any:
        return kernel.run(*(dataclasses.replace(arg, exact=False) if isinstance(arg, Segment) else arg for arg in args))

    def run(*args: Any) -> Any:
        return module.launch(on_device, *args)

    return dataclasses.replace(kernel, caps=dataclasses.replace(kernel.caps, graph=level), run=run, prepare=None)


def in_parts(kernel: Kernel) -> Kernel:
    """A kernel that reads as many parts of 8 keys as it has counted for the step."""

    def run(q: Any, kv: Any, segment: Segment, layer: Any, *results: Any) -> None:
        most = torch.minimum(segment.seq_lens, segment.prepared * 8)
        kernel.run(q, kv, dataclasses.replace(segment, seq_lens=most), layer, *results)

    return dataclasses.replace(kernel, run=run, prepare=lambda segment, layer: (segment.seq_lens + 7) // 8)


def captured(*kernels: Kernel) -> tuple[Kernel, ...]:
    """All of them as a device's kernels; those over pages count their parts for each step."""
    made = tuple(map(launches, kernels))
    return tuple(in_parts(each) if each.caps.op in (Op.PAGED, Op.MLA_DECODE) else each for each in made)
