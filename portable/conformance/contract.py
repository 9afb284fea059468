"""The contract that every kernel meets, as one check against float64 on data made to show each departure from it.

    for case in cases(kernel, target): check(kernel, case, device)

An error is |got - want| / (1 + size), per element, and at most the kernel's declared tolerance for the layer's dtype.
The size of an output is the sum of |weight x value| (rounding a weight costs that, whatever cancels), of an LSE |want|.
What is not data is NaN: the rest of each page, pages of nobody, gaps of strided views, `out` before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from portable.conformance import cache_check, diagnosis, places, recurrent, recurrent_check, steps
from portable.conformance.cells import Case
from portable.conformance.collect import check_collect
from portable.conformance.inputs import (
    Inputs,
    build,
    guarded,
    tensors_of,
    unchanged,
    untouched,
)
from portable.conformance.lens import Lens
from portable.conformance.measure import LSE_TOLERANCE, SEEN, Departure, error, require, tolerance, within
from portable.conformance.oracle import expected, size_of, visible_keys
from portable.kernel import ATTENTION, Kernel, Op
from portable.layer import UnsupportedError


def check(kernel: Kernel, case: Case, device: str = "cpu") -> set[str]:
    """Raise AssertionError where the kernel departs from the contract in this case; else the features it shows."""
    if case.op in ATTENTION:
        try:
            return check_attention(kernel, case, device)
        except UnsupportedError:  # of addresses, such as a multiple of 4 GiB within: while held here, others are taken
            return check_attention(kernel, case, device)
    if case.op in recurrent.AXES:
        recurrent_check.check(kernel, case, device)
        return set()
    checks: Mapping[Op, Callable[[Kernel, Case, str], None]] = {
        Op.MERGE: cache_check.check_merge,
        Op.CACHE_WRITE: cache_check.check_write,
        Op.CACHE_GATHER: cache_check.check_gather,
        Op.CACHE_COPY: cache_check.check_copy,
        Op.REFRESH: steps.check,
        Op.ADVANCE: steps.check,
        Op.COLLECT: check_collect,
    }
    checks[case.op](kernel, case, device)
    return set()


def check_attention(kernel: Kernel, case: Case, device: str) -> set[str]:
    layer, (inputs, features) = case.layer, telling(kernel, case, device)
    want, want_lse = expected(case, inputs)
    size = size_of(case, inputs)
    tokens, heads = inputs.q.shape[:2]
    out, out_guard = guarded((tokens, heads, inputs.v.shape[-1]), layer.dtype, case.strided, device)
    lse, lse_guard = guarded((tokens, heads) if case.strided else (heads, tokens), torch.float32, case.strided, device)
    lse = lse.T if case.strided else lse
    with unchanged(inputs.q, *inputs.kv, *inputs.tensors, *tensors_of(inputs.segment)):
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, lse if case.lse else None)

    again = Again(kernel, case, device, inputs.attempt)
    compare(kernel, case, inputs, out, lse if case.lse else None, (want, want_lse), size, again)
    out_guard("out")
    lse_guard("lse")
    return features


@dataclass(frozen=True, slots=True)
class Again:
    """Calls that tell more of a wrong one."""

    kernel: Kernel
    case: Case
    device: str
    attempt: int

    def blank(self) -> tuple[Inputs, tuple[torch.Tensor, torch.Tensor | None]]:
        """The same call where memory without data holds zeros, not NaN."""
        zeros = build(self.kernel, self.case, self.device, self.attempt, blank=0.0)
        return zeros, call(self.kernel, self.case, zeros)

    def right(self, lens: Lens) -> bool:
        """Whether the case with other lengths is right; a case of one request may be of more."""
        case, causal = self.case, self.case.causal
        other = replace(case, lens=lens, causal=causal if isinstance(causal, bool) else causal[:1] * len(lens))
        inputs, most = build(self.kernel, other, self.device), tolerance(self.kernel, other)
        try:
            got = call(self.kernel, other, inputs)
        except Exception:  # of a case that its caps may not accept
            return False
        want = expected(other, inputs)
        return not any(places.spoilt(lens, got, want, size_of(other, inputs), most))


def call(kernel: Kernel, case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call into new memory."""
    tokens, heads = inputs.q.shape[:2]
    out = untouched((tokens, heads, inputs.v.shape[-1]), case.layer.dtype, inputs.q.device)
    lse = untouched((heads, tokens), torch.float32, inputs.q.device) if case.lse else None
    kernel.run(inputs.q, inputs.kv, inputs.segment, case.layer, inputs.tensors, out, lse)
    return out, lse


def compare(
    kernel: Kernel,
    case: Case,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    want: tuple[torch.Tensor, torch.Tensor],
    size: torch.Tensor,
    again: diagnosis.Again | None = None,
) -> None:
    """Raise a Departure where a result is wrong, with the faults that give the same numbers."""
    most = tolerance(kernel, case)
    try:
        within("out", out, want[0], most, size)
        require((out[(want[0] == 0).all(-1)] == 0).all(), "a row without keys is not 0")
        if lse is not None:
            within("lse", lse, want[1], max(most, LSE_TOLERANCE))
    except Departure as departure:
        kinds = diagnosis.attention(case, inputs, (out, lse), want, size, most, again)
        raise Departure(departure.args[0], *kinds) from None


def telling(kernel: Kernel, case: Case, device: str) -> tuple[Inputs, set[str]]:
    """Inputs for which each feature of the case changes the result, so that a kernel that drops one cannot pass."""
    for attempt in range(100):
        inputs = build(kernel, case, device, attempt)
        want, size = expected(case, inputs)[0], size_of(case, inputs)
        shown = {name: error(changed, want, size) for name, changed in without_features(case, inputs).items()}
        if all(difference >= SEEN for difference in shown.values()):
            return inputs, set(shown)
    raise AssertionError(f"no data were found that show every feature by {SEEN}: {shown}")


def without_features(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The result without each feature that must matter, given which keys the rows see."""
    layer = case.layer
    counts, causal_counts, open_counts = (
        visible_keys(case.lens, case.causal if causal is None else causal, window)
        for causal, window in ((None, layer.window), (True, layer.window), (None, (None, None)))
    )
    many, some = max(counts, default=0) > 1, max(counts, default=0) > 0
    drop: dict[str, dict[str, Any]] = {}
    if open_counts != counts:
        drop["window"] = {"window": (None, None)}
    if causal_counts != counts:
        drop["noncausal"] = {"causal": True}
    if layer.softcap is not None and many:
        drop["softcap"] = {"softcap": None}
    if layer.alibi and many:
        drop["alibi"] = {"alibi": None}
    if layer.sinks and some:
        drop["sinks"] = {"sinks": None}
    if many:
        drop["scale"] = {"scale": layer.scale / 3}
    changed = {name: expected(case, inputs, **given)[0] for name, given in drop.items()}
    if case.scales != "none" and some:
        k_scale, v_scale = (1.0 if s is None else s.double().reshape(-1, 1) for s in inputs.tensors[2:4])
        changed["v_scale"] = expected(case, replace(inputs, v=inputs.v / v_scale))[0]
        if many:
            changed["k_scale"] = expected(case, replace(inputs, k=inputs.k / k_scale))[0]
    return changed
