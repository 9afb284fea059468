"""What a wrong attention kernel gives for each fault that kernels have been seen to have.

`FAULTS` names each fault, with a function that says what a kernel with it would return for a case: (out, lse), or None
where it cannot be told there. Those of what a kernel reads are in `reading`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from portable.conformance.cells import Case
from portable.conformance.inputs import Inputs
from portable.conformance.oracle import Request, expected
from portable.conformance.reading import READ
from portable.layer import default_scale

Answer = tuple[torch.Tensor, torch.Tensor]
Fault = Callable[[Case, Inputs], "Answer | None"]

LN2 = math.log(2)


def given(**changes: Any) -> Fault:
    """The fault of using other values than the layer's."""
    return lambda case, inputs: expected(case, inputs, **changes)


def scaled(factor: Callable[[Case, float], float]) -> Fault:
    return lambda case, inputs: expected(case, inputs, scale=factor(case, case.layer.scale))


def windowed(left: int, right: int) -> Fault:
    """A window with other edges; an open side stays open."""

    def fault(case: Case, inputs: Inputs) -> Answer | None:
        sides = case.layer.window
        moved = [None if side is None else side + by for side, by in zip(sides, (left, right), strict=True)]
        if moved == list(sides) or any(side is not None and side < 0 for side in moved):
            return None
        return expected(case, inputs, window=tuple(moved))

    return fault


def swapped_window(case: Case, inputs: Inputs) -> Answer | None:
    left, right = case.layer.window
    return None if left == right else expected(case, inputs, window=(right, left))


def sunk(change: Callable[[Case, torch.Tensor], torch.Tensor | None]) -> Fault:
    def fault(case: Case, inputs: Inputs) -> Answer | None:
        sinks = inputs.tensors.sinks
        return None if sinks is None else expected(case, inputs, sinks=change(case, sinks.double()))

    return fault


def sink_not_in_lse(case: Case, inputs: Inputs) -> Answer | None:
    if inputs.tensors.sinks is None:
        return None
    return expected(case, inputs)[0], expected(case, inputs, sinks=None)[1]


def sloped(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Fault:
    def fault(case: Case, inputs: Inputs) -> Answer | None:
        slopes = inputs.tensors.alibi
        return None if slopes is None else expected(case, inputs, alibi=change(slopes.double()))

    return fault


def softcap_after_mask(case: Case, inputs: Inputs) -> Answer | None:
    """-inf becomes -softcap: what is masked counts a little."""
    layer, tensors = case.layer, inputs.tensors
    if (cap := layer.softcap) is None:
        return None
    outs, lses = [], []

    def bend(request: Request) -> Request:
        queries, keys = len(request.q), len(request.k)
        group = layer.num_heads // request.k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (request.k, request.v))
        scores = torch.einsum("qhd,khd->hqk", request.q.double(), k) * layer.scale
        distance = torch.arange(keys - queries, keys, device=k.device)[:, None] - torch.arange(keys, device=k.device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        left, right = layer.window
        seen &= (distance <= (keys if left is None else left)) & (distance >= -(keys if right is None else right))
        if bool(request.given["causal"]):
            seen &= distance >= 0
        capped = cap * torch.tanh(scores.masked_fill(~seen, -torch.inf) / cap)
        if tensors.alibi is not None:
            capped = capped - tensors.alibi.double()[:, None, None] * distance.abs()
        logits = capped
        if tensors.sinks is not None:
            logits = torch.cat([capped, tensors.sinks.double()[:, None, None].expand(-1, queries, 1)], -1)
        lse = torch.logsumexp(logits, -1)
        outs.append(torch.einsum("hqk,khd->qhd", torch.exp(capped - lse[..., None]), v))
        lses.append(lse)
        return request

    expected(case, inputs, bend)
    return torch.cat(outs), torch.cat(lses, 1)


def softcap_before_scale(case: Case, inputs: Inputs) -> Answer | None:
    """scale x cap x tanh(q.k / cap), which is a cap of scale x cap."""
    layer = case.layer
    return None if layer.softcap is None else expected(case, inputs, softcap=layer.softcap * layer.scale)


def shifted(first: Callable[[Request], int]) -> Fault:
    """Queries at other positions."""

    def bend(request: Request) -> Request:
        return request._replace(given={**request.given, "first": first(request)})

    return lambda case, inputs: expected(case, inputs, bend)


def first_decides(case: Case, inputs: Inputs) -> Answer | None:
    return None if isinstance(case.causal, bool) else expected(case, inputs, causal=case.causal[0])


def shortened(by: Callable[[Case, Request], int], stay: bool = True) -> Fault:
    """Each request without its last keys; the queries where they were, or at the new end."""

    def fault(case: Case, inputs: Inputs) -> Answer | None:
        def bend(request: Request) -> Request:
            keys = len(request.k)
            kept = max(0, keys - by(case, request))
            first = keys - len(request.q) if stay else kept - len(request.q)
            given = {**request.given, "first": first}
            return request._replace(k=request.k[:kept], v=request.v[:kept], given=given)

        return expected(case, inputs, bend)

    return fault


def heads_mapped(order: Callable[[int, int], list[int]]) -> Fault:
    """Query heads on other KV heads."""

    def fault(case: Case, inputs: Inputs) -> Answer | None:
        heads, kv_heads = case.layer.num_heads, inputs.k.shape[1]
        if kv_heads == 1 or heads == kv_heads:
            return None
        chosen = torch.tensor(order(heads, kv_heads), device=inputs.k.device)
        return expected(case, replace(inputs, k=inputs.k[:, chosen], v=inputs.v[:, chosen]))

    return fault


def queries_interleaved(case: Case, inputs: Inputs) -> Answer | None:
    heads, kv_heads = case.layer.num_heads, inputs.k.shape[1]
    order = torch.arange(heads, device=inputs.q.device).reshape(kv_heads, -1).T.flatten()
    return None if kv_heads in (1, heads) else expected(case, replace(inputs, q=inputs.q[:, order]))


def keys_for_values(case: Case, inputs: Inputs) -> Answer | None:
    return expected(case, replace(inputs, v=inputs.k)) if inputs.k.shape == inputs.v.shape else None


def not_unpadded(case: Case, inputs: Inputs) -> Answer | None:
    """Rows of V's width padded to K's, and the padding left in the output."""
    out, lse = expected(case, inputs)
    wide = inputs.k.shape[-1]
    if out.shape[-1] >= wide:
        return None
    padded = torch.nn.functional.pad(out, (0, wide - out.shape[-1]))
    return padded.flatten()[: out.numel()].view(out.shape), lse


def lse_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(case: Case, inputs: Inputs) -> Answer | None:
        out, lse = expected(case, inputs)
        return out, change(lse)

    return fault


def empty_lse(value: float) -> Fault:
    return lse_of(lambda lse: lse.masked_fill(lse == -torch.inf, value))


def mean_of_empty(case: Case, inputs: Inputs) -> Answer | None:
    """A softmax over nothing but masked keys: each counts the same."""
    out, lse = expected(case, inputs)
    flat = expected(case, inputs, scale=1e-300, causal=False, window=(None, None), softcap=None, sinks=None, alibi=None)
    blind = (lse == -torch.inf).T[..., None]
    return torch.where(blind, flat[0], out), lse


def one_query_first(request: Request) -> int:
    return len(request.k) - len(request.q) - 1


FAULTS: dict[str, Fault] = {
    "scale missing": scaled(lambda case, scale: 1.0),
    "scale applied twice": scaled(lambda case, scale: scale * scale),
    "default scale in place of the layer's": scaled(lambda case, scale: default_scale(case.layer.qk_head_dim)),
    "exp2 without log2(e)": scaled(lambda case, scale: scale * LN2),
    "window dropped": given(window=(None, None)),
    "window off by one on the left": windowed(1, 0),
    "window off by one on the left, too narrow": windowed(-1, 0),
    "window off by one on the right": windowed(0, 1),
    "window off by one on the right, too narrow": windowed(0, -1),
    "window sides swapped": swapped_window,
    "top-left causal": shifted(lambda request: 0),
    "causal off by one": shifted(one_query_first),
    "causal off by one, sees the next key": shifted(lambda request: len(request.k) - len(request.q) + 1),
    "causal dropped": given(causal=False),
    "causal where it is not asked": given(causal=True),
    "causal of the first request for all": first_decides,
    "sink dropped": sunk(lambda case, sinks: None),
    "sink scaled": sunk(lambda case, sinks: sinks * case.layer.scale),
    "sink in base 2": sunk(lambda case, sinks: sinks * LN2),
    "sink counted twice": sunk(lambda case, sinks: sinks + LN2),
    "sink left out of the LSE": sink_not_in_lse,
    "softcap dropped": given(softcap=None),
    "softcap after mask": softcap_after_mask,
    "softcap before scale": softcap_before_scale,
    "ALiBi dropped": sloped(lambda slopes: None),
    "ALiBi sign": sloped(lambda slopes: -slopes),
    "ALiBi slopes of other heads": sloped(lambda slopes: slopes.flip(0)),
    "wrong GQA map": heads_mapped(lambda heads, kv: [h % kv for h in range(heads)]),
    "query heads interleaved": queries_interleaved,
    "every head on the first KV head": heads_mapped(lambda heads, kv: [0] * heads),
    "K read for V": keys_for_values,
    "V not unpadded": not_unpadded,
    "KV length one short": shortened(lambda case, request: 1),
    "KV length one short, queries moved": shortened(lambda case, request: 1, stay=False),
    "new tokens not seen": shortened(lambda case, request: len(request.q)),
    "page tail dropped": shortened(lambda case, request: len(request.k) % (case.page_size or 1)),
    "LSE base 2": lse_of(lambda lse: lse / LN2),
    "LSE layout transposed": lse_of(lambda lse: lse.T.contiguous().view(lse.shape)),
    "LSE negated": lse_of(torch.neg),
    "LSE without its logarithm": lse_of(torch.exp),
    "empty row LSE is 0": empty_lse(0.0),
    "empty row LSE is +inf": empty_lse(math.inf),
    "empty row holds the mean of V": mean_of_empty,
}


def answers(case: Case, inputs: Inputs, first: Collection[str] = ()) -> Iterator[tuple[str, Answer]]:
    """(name, what a kernel with the fault returns) of each fault that can be told in this case, `first` ahead."""
    layer = case.layer
    idle = {
        "window": layer.window == (None, None),
        "softcap": layer.softcap is None,
        "sink": not layer.sinks,
        "ALiBi": not layer.alibi,
    }
    for name in sorted((*FAULTS, *READ), key=lambda name: name not in first):
        if idle.get(name.partition(" ")[0], False):
            continue
        if name in FAULTS:
            found = FAULTS[name](case, inputs)
        else:
            rows = READ[name](case, inputs)
            found = None if rows is None else expected(case, rows)
        if found is not None:
            yield name, found
