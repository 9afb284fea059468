"""Names that the kit is asked for and does not have: what was meant, as near as it can be told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from portable.conformance.features import CALL, GROUPS, PAIRS, named, single, wide_axes
from portable.conformance.laws import Law
from portable.kernel import Kernel
from portable.platform.target import Target

MOST = 5  # names that are offered in place of one


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that hold this one, then those that are spelled almost like it.

    >>> near("paged", ["reference.paged", "reference.merge"]), near("softcap 1", ["sinks", "softcap 1.0"])
    (['reference.paged'], ['softcap 1.0'])
    """
    plain = {each.lower(): each for each in known}
    holding = [each for each in plain if name and name.lower() in each]
    spelled = difflib.get_close_matches(name.lower(), plain, MOST, 0.6)
    return [plain[each] for each in dict.fromkeys([*holding, *spelled])][:MOST]


def instead(name: str, known: Iterable[str]) -> str:
    """The nearest names as the start of a sentence; nothing where none is near."""
    found = near(name, known)
    return f"near it: {', '.join(map(repr, found))}; " if found else ""


def features(kernels: Sequence[Kernel], target: Target, full: bool) -> tuple[list[str], list[str]]:
    """The groups and the values that the report of these kernels may have."""
    groups, values = dict.fromkeys((CALL, PAIRS)), {str(law): None for law in Law if law is not Law.CONTRACT}
    for kernel in kernels:
        for axis, of in wide_axes(kernel, target, full).items():
            groups[GROUPS.get(axis, CALL)] = None
            values |= {named(axis, value): None for value in single(axis, of)}
    return list(groups), list(values)


def check_features(
    asked: Sequence[str], kernels: Sequence[Kernel], every: Sequence[Kernel], target: Target, full: bool
) -> None:
    """Raise a ValueError for a feature that none of `every` has, and where `kernels` have none of those asked for."""
    groups, values = features(kernels, target, full)
    hint = f"the groups are {', '.join(map(repr, groups))}"
    known = {name for names in features(every, target, full) for name in names}
    for name in asked:
        if name not in known:
            raise ValueError(f"--feature is {name!r}, no group or value; {instead(name, [*groups, *values])}{hint}")
    if asked and not any(name in groups or name in values for name in asked):
        said = " and ".join(map(repr, asked))
        raise ValueError(f"--feature is {said}, which these kernels do not have; {hint}")
