"""The right answer of an attention case in float64, and what it would be if one thing were otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from portable.backends.reference import attend
from portable.conformance.cells import Case
from portable.conformance.inputs import Inputs
from portable.conformance.lens import Lens


class Request(NamedTuple):
    """One request of a case: its place, its numbers, and the keyword arguments of `attend`."""

    place: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    given: dict[str, Any]


Bend = Callable[[Request], Request]


def expected(
    case: Case, inputs: Inputs, bend: Bend = lambda request: request, **without: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, Dv] and lse [H, T] in float64, request by request.

    `without` overrides what a feature says, to leave it out; `bend` changes a request.
    """
    layer, tensors = case.layer, inputs.tensors
    outs, lses, tokens, keys = [], [], 0, 0
    for r, (queries, length) in enumerate(case.lens):
        rows, columns = slice(tokens, tokens + queries), slice(keys, keys + length)
        given: dict[str, Any] = {
            "scale": layer.scale,
            "causal": case.causal if isinstance(case.causal, bool) else case.causal[r],
            "window": layer.window,
            "softcap": layer.softcap,
            "sinks": tensors.sinks,
            "alibi": tensors.alibi,
            "first": None,
        }
        asked = bend(Request(r, inputs.q[rows], inputs.k[columns], inputs.v[columns], given | without))
        part = attend(asked.q, asked.k, asked.v, **asked.given, compute=torch.float64)
        assert part.lse is not None
        outs.append(part.out)
        lses.append(part.lse)
        tokens, keys = tokens + queries, keys + length
    return torch.cat(outs), torch.cat(lses, 1)


def size_of(case: Case, inputs: Inputs) -> torch.Tensor:
    """The sum of |weight x value|, as large as the output where nothing cancels."""
    return expected(case, replace(inputs, v=inputs.v.abs()))[0]


def visible_keys(lens: Lens, causal: bool | tuple[bool, ...], window: tuple[int | None, int | None]) -> list[int]:
    """How many keys each query sees."""
    left, right = window
    counts = []
    for r, (queries, keys) in enumerate(lens):
        bound = 0 if (causal if isinstance(causal, bool) else causal[r]) else right
        bound = bound if right is None or bound is None else min(bound, right)
        for here in range(keys - queries, keys):
            first = 0 if left is None else max(0, here - left)
            last = keys - 1 if bound is None else min(keys - 1, here + bound)
            counts.append(max(0, last - first + 1))
    return counts
