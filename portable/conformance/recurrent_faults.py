"""What a wrong kernel of recurrent layers gives, for each fault that such kernels may have: outputs and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import silu

from portable.conformance.cells import Case
from portable.conformance.diagnosis import NEAR, ROUNDING
from portable.conformance.inputs import was_untouched
from portable.conformance.measure import error
from portable.kernel import Op
from portable.states import PrefillStates, SsmTensors

Answer = tuple[torch.Tensor, torch.Tensor]  # out of the rows' tokens, and the states that were to be stored
Given = tuple[list[Any], list[Any]]  # the arguments before `out`, and those behind it; see `recurrent_check.arguments`
Expected = Callable[[list[Any], list[Any]], Answer]


def kinds(
    case: Case, given: Given, expected: Expected, got: Answer, old: torch.Tensor, sizes: Answer, tolerances: Any
) -> tuple[str, ...]:
    """The faults that give what a kernel gave, the closest first; or what can be seen of it without any.

    Args:
        given: the arguments as they were before the call.
        old: what the states' slots held then.
        tolerances: of out, and of the states.
    """
    out, stored = got
    if out.numel() and was_untouched(out).all():
        return ("out not written",)
    want, found = expected(*given), list[tuple[float, str]]()
    for name, answer in answers(case, given, expected, old):
        apart = max(_apart(*each) for each in zip(got, answer, sizes, tolerances, strict=True))
        telling = max(_apart(*each) for each in zip(want, answer, sizes, tolerances, strict=True))
        if apart <= NEAR < telling:
            found.append((apart, name))
    if found:
        return tuple(name for _, name in sorted(found))
    if was_untouched(out).any():
        return ("rows not written",)
    if out.isnan().any() or stored.isnan().any():
        return ("reads memory that holds no data",)
    wrong = max(error(*each) for each in zip(got, want, sizes, strict=True))
    return ("precision",) if wrong <= ROUNDING else ()


def _apart(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, tolerance: float) -> float:
    """The error in tolerances; NaN must be where NaN is."""
    hidden = want.isnan()
    if not torch.equal(hidden, got.isnan()):
        return float("inf")
    got, want, size = (part.masked_fill(hidden, 0) for part in (got, want, size))
    return error(got, want, size) / max(tolerance, 1e-6)


def answers(case: Case, given: Given, expected: Expected, old: torch.Tensor) -> Iterator[tuple[str, Answer]]:
    """(fault, what a kernel with it gives) of each fault that can be told in this case."""
    before, after = given
    states, out_and_states = before[-1], expected(before, after)
    yield "state not stored", (out_and_states[0], old.double())
    yield "state not read", expected([*before[:-1], started(states, nobody=True)], after)
    if isinstance(states, PrefillStates):
        yield "initial slot read where there is no state", expected([*before[:-1], started(states)], after)
        yield "state carried into the next request", expected([*before[:-1], joined(states)], after)
    yield "state of another request", expected([*before[:-1], shifted(states)], after)
    if case.op is Op.CONV1D:
        yield from of_conv(before, after, expected)
    else:
        yield from of_scan(case, before, after, expected)


def started(states: Any, nobody: bool = False) -> Any:
    """Every request goes on from the slot that it names, or nobody does."""
    if isinstance(states, PrefillStates):
        return replace(states, has_initial=torch.full_like(states.has_initial, not nobody))
    return replace(states, initial_indices=torch.full_like(states.initial_indices, states.pad_slot))


def shifted(states: Any) -> Any:
    """Each request on the slot of the one before."""
    return replace(states, initial_indices=states.initial_indices.roll(1))


def joined(states: PrefillStates) -> PrefillStates:
    """All requests as one."""
    ends = states.cu_seqlens_q[[0, -1]]
    return replace(
        states, cu_seqlens_q=ends, has_initial=states.has_initial[:1], initial_indices=states.initial_indices[:1]
    )


def of_conv(before: list[Any], after: list[Any], expected: Expected) -> Iterator[tuple[str, Answer]]:
    x, weight, bias, pool, states = before
    (active,) = after
    if bias is not None:
        yield "bias dropped", expected([x, weight, None, pool, states], after)
    yield ("activation dropped" if active else "activation that is not asked"), expected(before, [not active])
    yield "weights in reverse order", expected([x, weight.flip(1), bias, pool, states], after)
    yield "state in reverse order", expected([x, weight, bias, pool.flip(1), states], after)
    out, stored = expected(before, after)
    yield "state stored in reverse order", (out, stored.flip(1))
    yield "state without the newest input", (out, torch.cat([stored[:, :1], stored[:, :-1]], 1))


def of_scan(case: Case, before: list[Any], after: list[Any], expected: Expected) -> Iterator[tuple[str, Answer]]:
    x, dt, b, c, z, pool, states = before
    layer, tensors = after

    def told(**changes: Any) -> Answer:
        return expected(before, [layer, tensors._replace(**changes)])

    if tensors.d is not None:
        yield "D dropped", told(d=None)
    if tensors.dt_bias is not None:
        yield "dt bias dropped", told(dt_bias=None)
    yield (
        ("softplus dropped" if tensors.dt_softplus else "softplus that is not asked"),
        told(dt_softplus=not tensors.dt_softplus),
    )
    limit = SsmTensors(tensors.a).dt_limit
    if tensors.dt_limit != limit:
        yield "dt limit dropped", told(dt_limit=limit)
    yield "decay dropped", told(a=torch.zeros_like(tensors.a))
    yield "decay's sign", told(a=-tensors.a)
    yield "A taken for its logarithm", told(a=-tensors.a.exp())
    yield "exp2 without log2(e)", told(a=tensors.a * 0.6931471805599453)
    yield "B and C swapped", expected([x, dt, c, b, z, pool, states], after)
    heads, groups = layer.num_heads, b.shape[1]
    if groups > 1:
        for name, of in (
            ("wrong group map", torch.arange(heads, device=b.device) % groups),
            ("every head in the first group", torch.zeros(heads, dtype=torch.int64, device=b.device)),
        ):
            yield name, expected([x, dt, b[:, of], c[:, of], z, pool, states], after)
    if z is None:
        return
    plain, stored = expected([x, dt, b, c, None, pool, states], after)
    gate = z[: len(plain)].double()
    yield "gate dropped", (plain, stored)
    yield "gate without its factor z", (plain * torch.sigmoid(gate), stored)
    yield "gate without its sigmoid", (plain * gate, stored)
    if tensors.d is not None:
        bare = expected([x, dt, b, c, None, pool, states], [layer, tensors._replace(d=None)])[0]
        yield "D beside the gate", (bare * silu(gate) + plain - bare, stored)
