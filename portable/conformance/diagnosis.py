"""Which fault a wrong result is of: the one whose own numbers it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Protocol

import torch

from portable.conformance import places
from portable.conformance.cells import Case
from portable.conformance.faults import answers
from portable.conformance.inputs import Inputs, was_untouched
from portable.conformance.lens import Lens
from portable.conformance.measure import error
from portable.conformance.oracle import expected

NEAR = 5  # tolerances within which a result is that of a fault: a fault may round where the right answer does not
ROUNDING = 0.02  # an error below this without a known fault is one of precision

Answer = tuple[torch.Tensor, "torch.Tensor | None"]


class Again(Protocol):
    """The kernel's calls behind a wrong one."""

    def blank(self) -> tuple[Inputs, Answer]:
        """The same call where memory without data holds zeros, not NaN."""

    def right(self, lens: Lens) -> bool:
        """Whether the case with other lengths is right."""


_suspects: ContextVar[list[str] | None] = ContextVar("suspects", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """What was found before is tried first inside: the wrong cells of a kernel have a fault in common."""
    token = _suspects.set([])
    try:
        yield
    finally:
        _suspects.reset(token)


def attention(
    case: Case, inputs: Inputs, got: Answer, want: Answer, size: torch.Tensor, tolerance: float, again: Again | None
) -> tuple[str, ...]:
    """The faults that give what a kernel gave, the closest first, or what can be seen of it without any; and where."""
    if was_untouched(got[0]).all() and got[0].numel():
        return ("out not written",)
    near, spoilt = NEAR * max(tolerance, 1e-6), places.spoilt(case.lens, got, want, size, tolerance)
    where = places.named(case.lens, spoilt, None if again is None else again.right)
    if found := _faults(case, inputs, got, want, size, near, again):
        return (*found, *where)
    out, lse = got
    wrong = [r for r, each in enumerate(spoilt) if each]
    if wrong and error(out, want[0], size) > near and another_scale(case, inputs, out, size, wrong) <= near:
        return (*where, "another scale than the layer's")
    most = max(error(out, want[0], size), error(lse, want[1]) if lse is not None and want[1] is not None else 0.0)
    return (*where, "precision") if most <= ROUNDING else where


def _faults(
    case: Case, inputs: Inputs, got: Answer, want: Answer, size: torch.Tensor, near: float, again: Again | None
) -> tuple[str, ...]:
    """The known faults that give these numbers, or what NaN says."""
    suspects = _suspects.get()
    if found := alike(case, inputs, got, want, size, near):
        return found
    if seen := unwritten(case, got, want):
        if seen[0] in READS and again is not None and not (suspects is not None and seen[0] in suspects):
            clean, zeros = again.blank()
            named = alike(case, clean, zeros, want, size, near)
            if suspects is not None and not named:
                suspects += seen
            return (*named, *seen)
        return seen
    return ()


def alike(case: Case, inputs: Inputs, got: Answer, want: Answer, size: torch.Tensor, near: float) -> tuple[str, ...]:
    """The faults whose own numbers these are: in all that is wrong, where the fault is wrong, and NaN where it is."""
    suspects = _suspects.get()
    found: list[tuple[float, str]] = []
    for name, fault in answers(case, inputs, suspects or ()):
        if found and suspects is not None and name not in suspects:
            break  # what was found before explains this as well
        apart, telling = 0.0, False
        for a, b, right, scale in zip(got, fault, want, (size, None), strict=True):
            if a is None or right is None:
                continue
            hidden = b.isnan()
            if not torch.equal(hidden, a.isnan()):
                apart = torch.inf
                break
            a, b, right = (part.masked_fill(hidden, 0) for part in (a, b, right))
            apart = max(apart, error(a, b, scale))
            telling |= error(b, right, scale) > near
        if telling and apart <= near:
            found.append((apart, name))
    names = tuple(name for _, name in sorted(found))
    if suspects is not None:
        suspects += [name for name in names if name not in suspects]
    return names


def another_scale(case: Case, inputs: Inputs, out: torch.Tensor, size: torch.Tensor, wrong: Sequence[int]) -> float:
    """The error beside the scale that explains the longest wrong request best, from an 8th to 8 times the layer's."""
    longest = max(wrong, key=lambda r: min(case.lens[r]))
    starts, ends = ([sum(pair[i] for pair in case.lens[:r]) for r in (longest, longest + 1)] for i in (0, 1))
    rows, keys = slice(*starts), slice(*ends)
    causal = case.causal if isinstance(case.causal, bool) else case.causal[longest : longest + 1]
    one = replace(case, lens=case.lens[longest : longest + 1], causal=causal)
    part = replace(inputs, q=inputs.q[rows], k=inputs.k[keys], v=inputs.v[keys])

    def off(power: float) -> float:
        return error(out[rows], expected(one, part, scale=case.layer.scale * 2**power)[0], size[rows])

    best, step = min((n / 4 for n in range(-12, 13)), key=off), 0.25
    for _ in range(12):  # 2^-12 of a power of two is closer than a 16-bit type tells
        step /= 2
        best = min((best - step, best, best + step), key=off)
    return off(best)


READS = ("reads past the end of a request", "reads memory that holds no data")


def unwritten(case: Case, got: Answer, want: Answer) -> tuple[str, ...]:
    """What NaN says: a pattern of it was in the memory to write into, and others all around what was to be read."""
    (out, lse), (_, right) = got, want
    assert right is not None
    left = was_untouched(out).flatten(1)  # [T, H * Dv]
    nan = out.isnan().flatten(1).any(1)  # [T]
    blind = (right == -torch.inf).all(0)
    if not nan.any():
        if lse is None or not lse.isnan().any():
            return ()
        if was_untouched(lse).any():
            return ("LSE not written",)
        return ("empty row LSE is NaN",) if not (lse.isnan() & (right != -torch.inf)).any() else ("LSE is NaN",)
    if not (nan & ~blind).any():
        return ("empty row not written" if left[nan].all() else "empty row NaN",)
    if left.any():
        return ("rows not written",) if torch.equal(left.all(1), left.any(1)) else ("parts of rows not written",)
    start = 0
    for queries, keys in case.lens:
        if nan[start : start + queries].any() and (case.page_size is None or keys % case.page_size == 0):
            return READS[1:]
        start += queries
    return READS[:1]
