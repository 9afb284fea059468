"""What an adapter adds to a call: python -m benchmarks.adapters [kernel ...], from ci/, on this machine's device.

The vendor's function is left out on both sides: a stand-in gives the same results at once, so what differs is the
adapter's own time. Its arguments are those that the adapter would pass, so nothing of it is installed. Microseconds a
call, the best of several rounds, inside a registered op, as adapters are called; that op's own call is not in it.
Copies of what the vendor returns into `out` and `lse`, which it does not write itself, are not made but timed apart:
they are work on tensors, on a GPU a launch each. "elsewhere" has q, `out` and `lse` at addresses that were not met yet:
an allocator lets the layers of a model take turns at few.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from portable import describe, detect
from portable.attention import load_kernels
from portable.backends.adapter import Adapter, Step
from portable.backends.convention import Convention
from portable.backends.selftest import plain_layers
from portable.backends.selftest_inputs import Inputs, Lens, inputs_of
from portable.backends.turns import Turns
from portable.backends.views import Aliases
from portable.kernel import ATTENTION, Kernel, Op
from portable.layer import Layer
from portable.platform.target import Target

GOAL = 4.0  # us
ARCHS = ("gfx942", "sm90", "sm100", "sm80")
ROUNDS, CALLS = 30, 300
DECODES: Lens = ((1, 18), (1, 33), (1, 7), (1, 64))
PROMPTS: Lens = ((5, 5), (19, 19))


def adapted() -> Iterator[tuple[Kernel, Adapter]]:
    """Kernels that an adapter makes; the one that splits a step in two makes several calls."""
    for kernel in load_kernels():
        owner = getattr(kernel.run, "__self__", None)
        if isinstance(owner, Adapter) and kernel.caps.op in ATTENTION:
            yield kernel, owner


def stand_in(
    convention: Convention, inputs: Inputs, layer: Layer
) -> tuple[Callable[..., Any], torch.Tensor, torch.Tensor]:
    """A function whose results have the right number and shapes, made before; and them as [T, H, D] and [H, T]."""
    tokens, heads, width = len(inputs.q), layer.num_heads, layer.v_head_dim
    requests = len(inputs.segment.host_query_lens)
    shapes = {"ht": (heads, tokens), "th": (tokens, heads), "bhs": (requests, heads, tokens // requests)}
    rows = torch.zeros((tokens, heads, width), dtype=layer.dtype, device=inputs.q.device)
    out = rows.unflatten(0, (requests, tokens // requests)) if convention.rows == "batch" else rows
    lse = torch.zeros(shapes.get(convention.lse.layout, (heads, tokens)), device=inputs.q.device)
    count, at = next(iter(convention.returns.items()), (1, None))
    results = tuple(lse if i == at else out for i in range(count))
    word = convention.names.get("lse")
    logs = lse.T if convention.lse.layout == "th" else lse.movedim(1, 0).flatten(1) if lse.dim() == 3 else lse
    return lambda **given: results if word is None or given[word] else out, rows, logs


def still(tensor: torch.Tensor) -> torch.Tensor:
    """Memory into which nothing is copied: a launch takes 6 to 10 us of an H100's host, more than all the rest.

    No subclass: to read the shape of one takes 0.15 us more.
    """
    found = tensor.detach()
    found.copy_ = lambda source: found  # type: ignore[method-assign, assignment, misc]
    return found


class Elsewhere(Aliases):
    """Those of tensors that are at a new address each time."""

    def of(self, tensor: torch.Tensor) -> Any:
        self._kept.clear()
        self._last.clear()
        return super().of(tensor)


def still_as(kept: Turns | None, dense: torch.Tensor) -> Turns | None:
    """The same views, which are made but not given: instead, that of `dense` as memory into which nothing is copied."""
    if kept is None:
        return None
    make = kept.aliases.make
    unchanged = still(make(dense))
    return Turns(Aliases(lambda other: (make(other), unchanged)[1]))


def measured(kernel: Kernel, adapter: Adapter, target: Target) -> dict[str, float]:
    """us that a call without and with an LSE adds, and the us of the copies that it makes besides."""
    layer, page_size = next(plain_layers(kernel, target))
    if kernel.caps.op is Op.MLA_DECODE:
        layer = replace(layer, num_heads=16)  # which no kernel pads
    convention = adapter.convention
    lens = PROMPTS if kernel.caps.op is Op.PREFILL else DECODES
    inputs = inputs_of(replace(kernel, prepare=None), lens, layer, page_size, target.device)
    function, rows, logs = stand_in(convention, inputs, layer)
    alone = type(adapter)(convention)
    alone.bind = lambda: function  # type: ignore[method-assign]
    segment = replace(inputs.segment, kernel=kernel)
    segment = replace(segment, prepared=alone.prepare(segment, layer))
    out = torch.empty((len(inputs.q), layer.num_heads, layer.v_head_dim), dtype=layer.dtype, device=inputs.q.device)
    lse = torch.empty((layer.num_heads, len(inputs.q)), device=inputs.q.device)
    step: Step = segment.prepared
    step = replace(step, lse_as=still_as(step.lse_as, lse))
    writes = convention.writes_out and step.takes_out
    if not writes:  # what q is grouped as nobody looks at
        step = replace(step, grouped=still_as(step.grouped, out))
    segment = replace(segment, prepared=step)
    fields = "grouped", "dense", "queries", "lse_as", "parts"
    kept: dict[str, Any] = {name: each for name in fields if (each := getattr(step, name)) is not None}
    given = dict(step.calls[0], **{word: None for word in convention.names.values() if word not in step.calls[0]})
    still_out = out if writes or step.grouped is not None else still(out)
    still_lse = lse if step.lse_as is not None else still(lse)
    call = partial(alone.run, inputs.q, inputs.kv, segment, layer, inputs.tensors, still_out)
    calls: dict[str, Callable[[], object]] = {"direct": lambda: function(**given), "out": partial(call, None)}
    if not writes:
        calls["out's copy"] = partial(out.copy_, rows)
    if "lse" in kernel.caps.features:
        calls |= {"out and lse": partial(call, still_lse), "lse's copy": partial(lse.copy_, logs)}
    elsewhere: dict[str, Any] = {
        name: Turns(Elsewhere(each.aliases.make, dense=each.aliases.dense)) for name, each in kept.items()
    }
    moved = replace(segment, prepared=replace(step, **elsewhere))
    call = partial(alone.run, inputs.q, inputs.kv, moved, layer, inputs.tensors, still_out)
    if kept:
        calls["elsewhere"] = partial(call, still_lse if "lse" in kernel.caps.features else None)
    took = best(calls, out.device)
    direct = took.pop("direct")
    return {name: each if "copy" in name else each - direct for name, each in took.items()}


_library = torch.library.Library("portable_benchmarks", "DEF")
_library.define("timed(Tensor at) -> ()")
_calls: list[Callable[[], object]] = []
_took: list[float] = []


def _timed(at: torch.Tensor) -> None:
    """A round of each call that waits, as the dispatcher calls an adapter: views are cheaper below autograd."""
    for call in _calls:
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        _took.append(time.perf_counter() - start)
        if at.is_cuda:
            torch.cuda.synchronize()


_library.impl("timed", _timed, "CompositeExplicitAutograd")


def best(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """us of each call, the least of rounds in turn, so that what disturbs a while disturbs all."""
    _calls[:] = calls.values()
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        _took.clear()
        with torch.no_grad():
            torch.ops.portable_benchmarks.timed(torch.empty(0, device=device))
        least = [min(pair) for pair in zip(least, _took, strict=True)]
    return {name: each / CALLS * 1e6 for name, each in zip(calls, least, strict=True)}


def blank(name: str) -> None:
    """Modules of a vendor that is not here, for what an adapter looks up beside its function."""
    parts = name.split(".")
    for i in range(len(parts)):
        sys.modules.setdefault(".".join(parts[: i + 1]), ModuleType(parts[i]))
    sys.modules[name].get_mla_metadata = lambda *given: (None, None)  # type: ignore[attr-defined]
    sizes = ((1, torch.int32),) * 6
    sys.modules[parts[0]].get_mla_metadata_info_v1 = lambda **given: sizes  # type: ignore[attr-defined]
    sys.modules[parts[0]].get_mla_metadata_v1 = lambda **given: None  # type: ignore[attr-defined]


def added(names: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """us that each adapter adds; what a vendor's absence keeps from being measured is told."""
    here, worst = detect(), 0.0
    print(f"us that an adapter adds to a call, on {here.device}; the goal is {GOAL:g}")
    for kernel, adapter in adapted():
        arch = next((arch for arch in ARCHS if not kernel.why_not_on(describe(arch))), None)
        if arch is None or (names and kernel.name not in names):
            continue
        if adapter.convention.module.split(".")[0] not in ("torch", "portable"):
            blank(adapter.convention.module)
        try:
            found = measured(kernel, adapter, replace(describe(arch), device=here.device))
        except (AttributeError, ImportError) as error:
            print(f"{kernel.name:45} left out: {error}")
            continue
        worst = max(worst, found["out"], found.get("out and lse", 0.0))
        print(f"{kernel.name:45} " + ", ".join(f"{value:5.2f} {name}" for name, value in found.items()), flush=True)
        yield kernel.name, {name: round(us, 2) for name, us in found.items()}
    print(f"worst {worst:.2f}")


if __name__ == "__main__":
    list(added(sys.argv[1:]))
