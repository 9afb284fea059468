"""A call as a graph that was captured: what replays it, on whatever memory its arguments have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from portable.conformance.inputs import storage_of


@contextmanager
def replaying(step: Callable[[], None], device: str) -> Iterator[Callable[[], None]]:
    """What replays a step that was captured; where a device has no graphs, what makes the same call again."""
    if device == "cpu":
        yield step
        return
    torch.accelerator.synchronize()
    module = torch.get_device_module(torch.device(device))
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:  # compiles, and fills what is filled once
        step()
    torch.accelerator.synchronize()
    graph = vars(module)["CUDAGraph"]()
    with vars(module)["graph"](graph):
        step()
    yield graph.replay
    torch.accelerator.synchronize()


def captured(run: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The same function as a graph that is captured with its arguments and replayed once."""

    def again(*given: Any) -> Any:
        memory = list(
            {each.untyped_storage().data_ptr(): storage_of(each, torch.uint8) for each in tensors_in(given)}.values()
        )
        before, returned = [each.clone() for each in memory], list[Any]()

        def step() -> None:
            returned.append(run(*given))

        with replaying(step, device) as replay:
            for each, old in zip(memory, before, strict=True):
                each.copy_(old)  # what the calls before the capture wrote
            replay()
        return returned[-1]

    return again


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))
