"""A run of the kit as plain values, and as text.

The document: `schema`, `portable`, `target`, `proof` (the level of what ran: "measured" or "emulated"), `mode`,
`features` (those asked for; none: all), `versions`, `seconds`, `complete` (whether every kernel in `asked` ran to its
end; `unfinished` names those that did not), `resumed` (cells of an earlier run), `counts`, `kernels` and `not_offered`
(name -> reasons).
Of a kernel: `name`, `op`, `provider`, `plugin`, `source` (a digest), `status`, `seconds` (of its cells, in whatever
processes), `kinds` and `cells`; of a cell: `group`, `value`, `status` ("parity", "refused", "failed", "not run" or
"absent", which is what this machine cannot be asked), `reason`, `kinds`, `proof`, `case`, `figures`, each (what, error,
tolerance), infinite errors as null, and `earlier` where it is of the run that this one went on from. `kinds` names the
faults that give the wrong numbers of a cell, and of a kernel those that explain its cells, with how many each explains.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from portable.conformance.cells import Case
from portable.conformance.outcomes import ABSENT, FAILED, NOT_RUN, PARITY, REFUSED, Outcome, Row
from portable.explain import spell_target
from portable.kernel import Kernel
from portable.packages import installed
from portable.platform.target import Target
from portable.proof import source_hash

SCHEMA = 1
STATUSES = (PARITY, REFUSED, FAILED, NOT_RUN, ABSENT)


def document(
    target: Target,
    kernels: Sequence[dict[str, Any]],
    not_offered: Mapping[str, Sequence[str]],
    mode: str,
    seconds: float,
    features: Sequence[str] = (),
    asked: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A run as values that JSON has, from its kernels' entries.

    Args:
        asked: names of the kernels that are to be in it at the end; None: those that are.
    """
    cells = [cell for kernel in kernels for cell in kernel["cells"]]
    states = [cell["status"] for cell in cells]
    asked = [kernel["name"] for kernel in kernels] if asked is None else list(asked)
    left = unfinished(kernels, asked)
    return {
        "schema": SCHEMA,
        "portable": portable_version(),
        "target": asdict(target),
        "proof": proof_of(target),
        "mode": mode,
        "features": list(features),
        "versions": versions(target),
        "seconds": round(seconds, 2),
        "complete": not left,
        "asked": asked,
        "unfinished": left,
        "resumed": sum(bool(cell.get("earlier")) for cell in cells),
        "counts": {status: states.count(status) for status in STATUSES},
        "kernels": list(kernels),
        "not_offered": {name: list(reasons) for name, reasons in not_offered.items()},
    }


def unfinished(kernels: Sequence[Mapping[str, Any]], asked: Sequence[str]) -> list[str]:
    """The kernels that did not run, or not to their end."""
    whole = {k["name"] for k in kernels if all(cell["status"] != NOT_RUN for cell in k["cells"])}
    return [name for name in dict.fromkeys([*asked, *(kernel["name"] for kernel in kernels)]) if name not in whole]


def partial(found: Mapping[str, Any]) -> str:
    """What a document lacks that was to be in it, in a sentence; empty where it lacks nothing."""
    asked = found.get("asked", [])
    left = unfinished(found["kernels"], asked)
    if not left:
        return ""
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    count = len({*asked, *(kernel["name"] for kernel in found["kernels"])})
    return f"this run is partial: {len(left)} of {count} kernels did not run to their end: {', '.join(left[:5])}{more}"


def proof_of(target: Target) -> str:
    return "emulated" if target.emulated else "measured"


def portable_version() -> str:
    import portable

    return portable.__version__


def versions(target: Target) -> dict[str, str | None]:
    found = installed()
    given = {name: found[name].version for name in ("numpy", *found) if name in found and found[name].version}
    runtime = {} if target.runtime is None else {"built for": target.runtime}
    return {"python": platform.python_version(), "torch": torch.__version__, **given, **runtime}


def of_row(row: Row, target: Target) -> dict[str, Any]:
    """A row's entry in a document."""
    return entry(row.kernel, [of_outcome(outcome, proof_of(target)) for outcome in row.outcomes], row.seconds)


def entry(kernel: Kernel, cells: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """A kernel with its cells; `failed` where any is, else `not run`, else `parity`."""
    states = {cell["status"] for cell in cells}
    return {
        "name": kernel.name,
        "op": str(kernel.caps.op),
        "provider": kernel.caps.provider,
        "plugin": kernel.plugin,
        "source": source_of(kernel),
        "status": next((status for status in (FAILED, NOT_RUN, PARITY, REFUSED) if status in states), ABSENT),
        "seconds": round(seconds, 3),
        "kinds": kinds_of(cells),
        "cells": list(cells),
    }


def kinds_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The faults that explain the most failed cells, each with their number: from the best on, as few as do."""
    left = [cell["kinds"] for cell in cells if cell["status"] == FAILED and cell["kinds"]]
    found: dict[str, int] = {}
    while left:
        counts = Counter(kind for kinds in left for kind in kinds)
        ranks = {kind: sum(kinds.index(kind) for kinds in left if kind in kinds) for kind in counts}
        best = max(counts, key=lambda kind: counts[kind] - ranks[kind] / 8)  # the likeliest of a cell comes first in it
        found[best] = counts[best]
        left = [kinds for kinds in left if best not in kinds]
    return found


def source_of(kernel: Kernel) -> str | None:
    """The digest of a kernel's source; None where its function is in no file."""
    try:
        return source_hash(kernel)
    except (AssertionError, KeyError, OSError, TypeError):
        return None


def of_outcome(outcome: Outcome, proof: str) -> dict[str, Any]:
    return {
        "group": outcome.group,
        "value": outcome.value,
        "status": outcome.status,
        "reason": outcome.reason,
        "kinds": list(outcome.kinds),
        "proof": proof if outcome.status == PARITY else None,
        "case": None if outcome.case is None else spelled(outcome.case),
        "figures": [
            [figure.what, figure.error if math.isfinite(figure.error) else None, figure.tolerance]
            for figure in outcome.figures
        ],
    }


def spelled(case: Case) -> str:
    """A case in one line: its lengths, and what differs from the plainest case and layer."""
    plain = Case(op=case.op, layer=case.layer)
    parts = [f"{f.name}={getattr(case, f.name)!r}" for f in fields(Case)
             if f.name not in ("op", "layer") and getattr(case, f.name) != getattr(plain, f.name)]  # fmt: skip
    layer = [f"{f.name}={getattr(case.layer, f.name)!r}" for f in fields(case.layer)
             if f.name == "family" or getattr(case.layer, f.name) != f.default]  # fmt: skip
    return f"{', '.join(parts) or 'plain'}; layer {', '.join(layer)}"


def record(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a run proves, for a matrix's folder of results: each kernel that passed whole, with its source.

    Cells that were refused are proved by what a kernel declares, so only their number is kept.
    """
    kept = {}
    for kernel in found["kernels"]:
        counts = Counter(cell["status"] for cell in kernel["cells"])
        if kernel["status"] == PARITY and kernel["source"] and not found["features"]:
            told = {"cells": counts[PARITY], "refused": counts[REFUSED], "source": kernel["source"]}
            kept[kernel["name"]] = {**told, "seconds": round(kernel["seconds"], 1)}
    target = found["target"]
    return {
        "arch": target["arch"],
        "card": target["name"],
        "level": found["proof"],
        "mode": found["mode"],
        "seconds": found["seconds"],
        "versions": found["versions"],
        "kernels": kept,
    }


def text(found: Mapping[str, Any]) -> str:
    """A document for people: a line for each kernel, then each failure once, then why others were not offered."""
    return "\n".join(lines(found))


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    target = Target(**found["target"])
    yield f"device: {spell_target(target)}; what passed is {found['proof']}"
    width = max((len(kernel["name"]) for kernel in found["kernels"]), default=0)
    yield from ("", "kernels:")
    for kernel in found["kernels"]:
        counts = {status: sum(cell["status"] == status for cell in kernel["cells"]) for status in STATUSES}
        shown = f"{counts[PARITY]:4} parity {counts[REFUSED]:4} refused {counts[FAILED]:4} failed"
        unrun = f" {counts[NOT_RUN]:4} not run" if counts[NOT_RUN] else ""
        yield f"    {kernel['name']:{width}}  {kernel['status']:8}{shown}{unrun} {kernel['seconds']:7.1f} s"
    failures = [(kernel["name"], *each) for kernel in found["kernels"] for each in _failures(kernel["cells"])]
    if failures:
        yield from ("", "failures:")
        for name, where, reason in failures:
            yield f"    {name}: {where}: {reason}"
        yield from ("", "likely faults:")
        for kernel in found["kernels"]:
            for kind, count in kernel["kinds"].items():
                yield f"    {kernel['name']}: {kind} explains {count} of its failed cells"
    if found["not_offered"]:
        yield from ("", "not offered here:")
        for name, reasons in found["not_offered"].items():
            yield f"    {name}: {'; '.join(reasons)}"
    counts = found["counts"]
    yield ""
    if found["resumed"]:
        yield f"cells of an earlier run of the same sources: {found['resumed']}"
    if missing := partial(found):
        yield missing
    yield (
        f"{len(found['kernels'])} kernels, {sum(counts.values()) - counts[ABSENT]} cells: {counts[PARITY]} parity, "
        f"{counts[REFUSED]} refused, {counts[FAILED]} failed"
        f"{f', {counts[NOT_RUN]} not run' if counts[NOT_RUN] else ''}; {found['seconds']:.0f} s"
    )


def _failures(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(the cells, the reason) of each failure: cells that fail with the same words share a line."""
    by_reason: dict[str, list[str]] = {}
    for cell in cells:
        if cell["status"] == FAILED:
            by_reason.setdefault(cell["reason"], []).append(f"{cell['group']} {cell['value']}")
    for reason, where in by_reason.items():
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        yield ", ".join(where[:3]) + more, reason
