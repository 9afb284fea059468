"""What each row must reach, as data, and a result as a table beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Result = dict[str, Any]
HOST_US = 20  # an eager decode call


class Found(NamedTuple):
    """The compared number, and what it is made of."""

    value: float
    mine: str
    other: str
    row: str  # the workload that decides
    who: str  # the contestant of ours


@dataclass(frozen=True, slots=True)
class Goal:
    """A row: the number that is compared, and from which value on it is reached."""

    row: str
    of: Callable[[Result], Found | None]
    unit: str  # of the compared number
    must: float
    aim: float
    more_is_better: bool
    card: str = ""  # whose bounds these are, where they are times; a ratio within one run holds on any

    def judges(self, result: Result) -> bool:
        return self.card in result["machine"].get("card", "")

    def met(self, value: float, bound: float) -> bool:
        return value >= bound if self.more_is_better else value <= bound


def us(result: Result, row: str, who: str) -> tuple[float, str]:
    """The fastest contestant whose name begins with `who` and whose output was right: (us, name); NaN for none."""
    each = result["rows"].get(row, {"contestants": {}})["contestants"].items()
    right = [(found["us"], name) for name, found in each if name.startswith(who) and found["ok"]]
    return min(right, default=(math.nan, ""))


def ours(result: Result, row: str) -> tuple[float, str]:
    """What a user gets, the selected kernel: (us, name); the fastest of ours in results that do not name it."""
    return us(result, row, result["rows"].get(row, {}).get("selected") or "portable ")


def best_peer(result: Result, row: str) -> tuple[float, str]:
    each = result["rows"].get(row, {"contestants": {}})["contestants"].items()
    right = [
        (found["us"], name)
        for name, found in each
        if not name.startswith("portable ") and name != "copy" and found["ok"]
    ]
    return min(right, default=(math.nan, ""))


def beside(peer: str, *rows: str) -> Callable[[Result], Found | None]:
    """The speed beside a peer, 1 = as fast: at the point where it is lowest."""

    def of(result: Result) -> Found | None:
        found = []
        for row in rows:
            (mine, who), (other, name) = ours(result, row), us(result, row, peer)
            if not math.isnan(mine + other):
                where = f" at {row.split(' page ')[0]}" if len(rows) > 1 else ""
                found.append(Found(other / mine, f"{mine:.4g} us{where}", f"{other:.4g} us ({name})", row, who))
        return min(found, default=None)

    return of


def alone(*rows: str) -> Callable[[Result], Found | None]:
    """us, at the fastest page size, and the best peer's at its own."""

    def of(result: Result) -> Found | None:
        mine = [(*ours(result, row), row) for row in rows]
        mine = [each for each in mine if not math.isnan(each[0])]
        others = [each for row in rows if not math.isnan((each := best_peer(result, row))[0])]
        if not mine:
            return None
        time, who, row = min(mine)
        other = "{:.4g} us ({})".format(*min(others)) if others else ""
        return Found(time, f"{time:.4g} us", other, row, who)

    return of


def between(row: str, base: str, peer: str) -> Callable[[Result], Found | None]:
    """Our time of a row as a multiple of our own time of another one."""

    def of(result: Result) -> Found | None:
        (mine, who), (first, _) = ours(result, row), ours(result, base)
        other, other_first = us(result, row, peer)[0], us(result, base, peer.removesuffix(" fp8 q"))[0]
        if math.isnan(mine + first):
            return None
        theirs = "" if math.isnan(other + other_first) else f"{other:.4g} us, {other / other_first:.2f}x ({peer})"
        return Found(mine / first, f"{mine:.4g} us beside {first:.4g}", theirs, row, who)

    return of


def roof(result: Result, row: str, time: float) -> float:
    """The share of the card's own speed, of reads or of the matrix product, whichever binds; NaN where unknown."""
    found, ceilings = result["rows"][row], result["ceilings"]
    if "bytes" not in found or "read TB/s" not in ceilings:
        return math.nan
    least: float = max(found["bytes"] / ceilings["read TB/s"], found["flops"] / ceilings["matmul TFLOP/s"]) * 1e-6
    return least / time


def points(tag: str, page: int, sizes: str) -> tuple[str, ...]:
    return tuple(f"{tag} {size}k page {page}" for size in sizes.split())


GRID = "1x32 8x8 8x32 64x1 64x8 64x32 256x1 256x8 256x32"
GOALS: tuple[Goal, ...] = (
    Goal("D1 decode 32/8 d128, KV >= 128 MiB, page 16", beside("fa3", *points("D1", 16, GRID)), "x", 0.95, 1.0, True),
    Goal("D1 decode 32/8 d128, KV >= 128 MiB, page 64", beside("fa3", *points("D1", 64, GRID)), "x", 0.95, 1.0, True),
    Goal("D2 decode 64/8 d128", beside("fa3", *points("D2", 16, "1x32 64x1 64x8 64x32")), "x", 0.95, 1.0, True),
    Goal("D3 decode 64/8 d64", beside("fa3", *points("D3", 16, "8x8 64x1 64x8 256x1 256x8")), "x", 0.95, 1.0, True),
    Goal("decode 1x1k", alone("D1 1x1k page 16", "D1 1x1k page 64"), "us", 8.7, 7.0, False, "H100"),
    Goal("decode 1x8k", alone("D1 1x8k page 16", "D1 1x8k page 64"), "us", 19.5, 18.0, False, "H100"),
    Goal("ragged 64 beside FA3, page 16", beside("fa3", "ragged 64 page 16"), "x", 1.0, 1.0, True),
    Goal("ragged 64 beside FA3, page 64", beside("fa3", "ragged 64 page 64"), "x", 1.0, 1.0, True),
    Goal("ragged 256 beside FA3, page 16", beside("fa3", "ragged 256 page 16"), "x", 1.0, 1.0, True),
    Goal("ragged 256 beside FA3, page 64", beside("fa3", "ragged 256 page 64"), "x", 1.0, 1.0, True),
    Goal(
        "ragged 64 beside equal lengths",
        between("ragged 64 page 16", "equal 64 page 16", "fa3"),
        "x",
        1.08,
        1.03,
        False,
    ),
    Goal(
        "ragged 256 beside equal lengths",
        between("ragged 256 page 16", "equal 256 page 16", "fa3"),
        "x",
        1.03,
        1.03,
        False,
    ),
    Goal("verify 4 beside 1 token", between("verify 4 page 16", "verify 1 page 16", "fa3"), "x", 1.03, 1.0, False),
    Goal("verify 8 beside 1 token", between("verify 8 page 16", "verify 1 page 16", "fa3"), "x", 1.05, 1.01, False),
    Goal("P1a prefill 1x8192", beside("fa3", "P1a 1x8192"), "x", 0.72, 0.90, True),
    Goal("P1b prefill 8x2048", beside("fa3", "P1b 8x2048"), "x", 0.72, 0.90, True),
    Goal("P1c prefill, 16 mixed", beside("fa3", "P1c mixed 16"), "x", 0.72, 0.90, True),
    Goal("P2 chunked prefill, page 16", beside("fa3", "P2 4x512 on 8k page 16"), "x", 0.65, 0.85, True),
    Goal("P2 chunked prefill, page 64", beside("fa3", "P2 4x512 on 8k page 64"), "x", 0.65, 0.85, True),
    Goal("D5 mixed batch, page 16", beside("fa3", "D5 60 decodes, 4 prefills page 16"), "x", 0.93, 1.0, True),
    Goal("D5 mixed batch, page 64", beside("fa3", "D5 60 decodes, 4 prefills page 64"), "x", 0.93, 1.0, True),
    Goal(
        "fp8 cache beside bf16, page 64",
        between("fp8 64x8k page 64", "bf16 64x8k page 64", "fa3 fp8 q"),
        "x",
        0.62,
        0.55,
        False,
    ),
    Goal(
        "sinks and window 128, 64/8 d64",
        alone("sinks, window 128 page 16", "sinks, window 128 page 64"),
        "us",
        13.7,
        10.0,
        False,
        "H100",
    ),
    Goal("merge 8192x32x128 beside a copy", beside("copy", "merge"), "x", 0.95, 1.0, True),
    Goal("cache write 8192x8x128 beside a copy", beside("copy", "cache write page 16"), "x", 0.90, 0.95, True),
)


def rows(result: Result) -> Iterator[tuple[Goal, Found | None]]:
    for goal in GOALS:
        yield goal, goal.of(result)


def markdown(result: Result) -> str:
    """A row for each goal that the result holds."""
    text = "| workload | portable | best peer here | compared | must | aim | |\n|---|--:|--:|--:|--:|--:|---|\n"
    for goal, found in rows(result):
        if found is not None:
            state = (
                "aim" if goal.met(found.value, goal.aim) else "reached" if goal.met(found.value, goal.must) else "short"
            )
            number = f"{found.value:.3f}x" if goal.unit == "x" else f"{found.value:.2f} us"
            unit = goal.unit if goal.unit == "x" else f" {goal.unit}"
            bounds = f"{number} | {goal.must:g}{unit} | {goal.aim:g}{unit}"
            if not goal.judges(result):
                bounds, state = f"{number} | | ", f"not judged: bounds of an {goal.card}"
            text += f"| {goal.row} | {found.mine} | {found.other} | {bounds} | {state} |\n"
    for size in (1, 64, 256):
        times = {name: each for name, each in result["host"].items() if name.startswith(f"decode {size} portable ")}
        for each in (found for found in times.values() if "Kernel.run" in found):
            median = each["Kernel.run"][0]
            others = [f"{each[what][0]:.1f} us (`{what}`)" for what in ("Attention.run",) if what in each]
            others += [
                f"{found['call'][0]:.1f} us ({name.split()[-1]})"
                for name, found in result["host"].items()
                if name == f"decode {size} fa3" and "call" in found
            ]
            state = "reached" if median <= HOST_US else "short"
            head = f"host time of a kernel's call, decode of {size}"
            text += f"| {head} | {median:.1f} us | {', '.join(others)} | | {HOST_US} us | | {state} |\n"
    return text


def details(result: Result) -> str:
    """Every workload: each contestant's us, and the share of the roof that ours reaches."""
    text = "| workload | roof | contestants, us (ours: share of the roof) |\n|---|--:|---|\n"
    for name, row in result["rows"].items():
        least = roof(result, name, 1.0)
        parts = []
        for who, found in sorted(row["contestants"].items(), key=lambda each: each[1]["us"]):
            if found["failed"] or not found["ok"]:
                parts.append(f"{who} {found['failed'][:60] or 'WRONG'}")
                continue
            share = f" ({least / found['us']:.0%})" if who.startswith("portable ") and not math.isnan(least) else ""
            parts.append(f"{who} {found['us']:.4g}{share}")
        text += f"| {name} | {'' if math.isnan(least) else f'{least:.1f}'} | {', '.join(parts)} |\n"
    return text
