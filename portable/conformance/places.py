"""In which requests a result is wrong, whatever its numbers: a single one, those behind the others, those of many keys.

What it is named says more than the fault of a cell alone: faults of a stride, of a grid or of a second split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from portable.conformance.lens import Lens
from portable.conformance.measure import LSE_TOLERANCE, error

ALONE = "right unless there is one request"
BEHIND = 4  # requests that are right before those that are not: fewer tell nothing of a number
LEAST = 16  # keys; below that, a length is a case of its own

Right = Callable[[Lens], bool]  # whether the kernel is right for other lengths
Answer = tuple[torch.Tensor, "torch.Tensor | None"]


def spoilt(lens: Lens, got: Answer, want: Answer, size: torch.Tensor, tolerance: float) -> list[bool | None]:
    """Whether each request's rows are wrong; None where there are none, or they show nothing: they see no keys."""
    (out, lse), (right, right_lse), found, start = got, want, list[bool | None](), 0
    for queries, _ in lens:
        rows = slice(start, start := start + queries)
        wrong = error(out[rows], right[rows], size[rows]) > tolerance
        if lse is not None and right_lse is not None:
            wrong = wrong or error(lse[:, rows], right_lse[:, rows]) > max(tolerance, LSE_TOLERANCE)
        blind = right_lse is None or bool((right_lse[:, rows] == -torch.inf).all())
        found.append(None if not wrong and blind else wrong)
    return found


def named(lens: Lens, wrong: Sequence[bool | None], right: Right | None = None) -> tuple[str, ...]:
    """What the wrong requests have in common.

    >>> named(((1, 40), (1, 2049), (1, 2047), (1, 4096)), (False, True, False, True))
    ('wrong from 2048 keys on',)
    >>> named(((1, 9),) * 20, (False,) * 16 + (True,) * 4)
    ('wrong from the 17th request on',)
    >>> named(((1, 40),), (True,), lambda lens: len(lens) > 1)
    ('right unless there is one request',)
    """
    if len(lens) == 1:
        return tuple(_single(lens, right)) if right is not None else ()
    told = [(r, bool(each)) for r, each in enumerate(wrong) if each is not None]
    bad, good = ([r for r, each in told if each is which] for which in (True, False))
    if not bad or not good:
        return ()
    found = []
    if max(good) < min(bad) and len(good) >= BEHIND:
        found.append(f"wrong from the {min(bad) + 1}th request on")
    short, long = max(lens[r][1] for r in good), min(lens[r][1] for r in bad)
    if short < long >= LEAST:
        found.append(_from(short, long))
    return tuple(found)


def _single(lens: Lens, right: Right) -> list[str]:
    """One request tells nothing of others, so it is asked again: beside itself, and with half of its keys."""
    (queries, keys), found = lens[0], list[str]()
    if right(lens * 2):
        found.append(ALONE)
    if keys // 2 >= max(LEAST, queries) and right(((queries, keys // 2),)):
        found.append(_from(keys // 2, keys))
    return found


def _from(short: int, long: int) -> str:
    """A length that is too long, in the power of two that lies between where one does."""
    power = 1 << long.bit_length() - 1
    return f"wrong from {power if power > short else long} keys on"
