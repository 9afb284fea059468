"""A run of `portable bench` as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from portable.bench.kernels import share
from portable.columns import table

Result = dict[str, Any]


def text(result: Result) -> Iterator[str]:
    """Every section that the run has."""
    machine = result["machine"]
    yield f"{machine['device']}; {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"
    ceilings = result.get("ceilings", {})
    if ceilings:
        yield "ceilings: " + ", ".join(f"{value:.3g} {name}" for name, value in ceilings.items())
    if rows := result.get("kernels"):
        yield ""
        head = ["workload", "contestant", "us", "beside the best", "share of peak", ""]
        yield from table([head, *(line for name, row in rows.items() for line in contestants(name, row, ceilings))])
    for section in ("planning", "dispatch", "graphs"):
        if found := result.get(section):
            yield from ("", f"{section}:", *(f"    {line}" for line in table(list(facts(found)))))
    if made := result.get("generate"):
        yield ""
        for name in ("portable", "transformers"):
            yield f"{name:14} {made[name]['tokens_per_second']:8.1f} tokens per second  ({made[name]['how']})"
        yield f"{'ratio':14} {made['ratio']:8.2f}  of {made['rounds']} rounds' medians, {made['device']}"
    if absent := result.get("absent"):
        yield from ("", "not here:", *(f"    {name}: {why}" for name, why in absent.items()))


def contestants(name: str, row: Result, ceilings: dict[str, float]) -> Iterator[list[str]]:
    """A line for each, the fastest first."""
    right = {who: each for who, each in row["contestants"].items() if each["ok"]}
    best = min((each["us"] for each in right.values()), default=math.nan)
    order = sorted(row["contestants"].items(), key=lambda item: (not item[1]["ok"], item[1]["us"]))
    for place, (who, each) in enumerate(order):
        first = name if place == 0 else ""
        chosen = "selected" if who == row["selected"] else ""
        if not each["ok"]:
            why = each["failed"] or f"wrong: error {each['error']:.2g}"
            yield [first, who, "-", "-", "-", " ".join((chosen, why[:100])).strip()]
            continue
        of_peak = share(row, ceilings, each["us"])
        how = ", ".join(filter(None, (chosen, "" if each["graph"] else "call by call")))
        yield [first, who, spell(each["us"]), f"{each['us'] / best:.2f}x",
               "-" if math.isnan(of_peak) else f"{of_peak:.0%}", how]  # fmt: skip


def facts(found: Result, before: str = "") -> Iterator[list[str]]:
    """(name, value) of nested values.

    >>> list(facts({"a": {"us": 1.5, "low": 1.0}, "b": "none"}))
    [['a', '1.5 us (1 at its lowest)'], ['b', 'none']]
    """
    for name, value in found.items():
        where = f"{before} {name}".strip()
        if isinstance(value, dict) and "us" in value:
            yield [where, f"{spell(value['us'])} us ({spell(value['low'])} at its lowest)"]
        elif isinstance(value, dict):
            yield from facts(value, where)
        else:
            yield [where, spell(value) if isinstance(value, float) else str(value)]


def spell(number: float) -> str:
    """Four digits, and no powers of ten.

    >>> spell(7.98765), spell(42861.3)
    ('7.988', '42,861')
    """
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
