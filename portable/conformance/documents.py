"""Reports that are read again: a file that is none is said to be none in one line, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from portable.attention import load_kernels
from portable.conformance import report
from portable.conformance.report import SCHEMA, STATUSES
from portable.platform.target import Target

RIGHT = "it must be a report that `portable conformance --json FILE` wrote"
Fields = Mapping[str, "type | tuple[type, ...]"]

NUMBER, MAYBE = (int, float), (str, type(None))
REPORT: Fields = {
    "schema": int,
    "target": dict,
    "proof": str,
    "mode": str,
    "features": list,
    "versions": dict,
    "seconds": NUMBER,
    "kernels": list,
}
TARGET: Fields = {"arch": str, "name": str}
KERNEL: Fields = {
    "name": str,
    "op": str,
    "plugin": MAYBE,
    "source": MAYBE,
    "status": str,
    "seconds": NUMBER,
    "kinds": dict,
    "cells": list,
}
CELL: Fields = {
    "group": str,
    "value": str,
    "status": str,
    "reason": str,
    "kinds": list,
    "proof": MAYBE,
    "case": MAYBE,
    "figures": list,
}
WORDS: Mapping[type, str] = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth"}


def read(option: str, file: Path) -> dict[str, Any]:
    """The document in a file that an option names.

    Raises:
        ValueError: it cannot be read, or is no report of the kit.
    """

    def wrong(why: str) -> ValueError:
        return ValueError(f"{option}: {str(file)!r} {why}; {RIGHT}")

    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise wrong("is not text") from None
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror or error}") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        short = bool(text.strip()) and error.pos >= len(text.rstrip())
        raise wrong("is cut short" if short else f"is not JSON, from line {error.lineno} on") from None
    except (RecursionError, ValueError):  # nested too deep, a number of too many digits
        raise wrong("is not JSON that can be read") from None
    if why := next(problems(found), ""):
        raise wrong(f"is no report: {why}")
    document: dict[str, Any] = found
    return document


def comparable(
    earlier: Mapping[str, Any], target: Target, mode: str, features: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """name -> entry of the kernels in an earlier document that would give the same answers now; and all that it asked.

    Raises:
        ValueError: it is of another device, mode or version, or of other features, so that nothing of it can stay.
    """
    told, now = earlier["target"], report.versions(target)
    pairs = {
        "device": (f"{told['name']} ({told['arch']})", f"{target.name} ({target.arch})"),
        "proof": (earlier["proof"], report.proof_of(target)),
        "mode": (earlier["mode"], mode),
        "features": tuple(", ".join(sorted({*map(str, each)})) or "all" for each in (earlier["features"], features)),
        **{name: (earlier["versions"].get(name), now.get(name)) for name in {**earlier["versions"], **now}},
    }
    if differing := [f"{name} {then} there and {here} now" for name, (then, here) in pairs.items() if then != here]:
        raise ValueError(
            f"--resume goes on with a report of the same flags, device and versions, and the earlier one differs: "
            f"{'; '.join(differing)}. Give --json another file, or leave --resume out to write that one anew"
        )
    sources = {kernel.name: report.source_of(kernel) for kernel in load_kernels()}
    known = {
        kernel["name"]: {**kernel, "cells": [{**cell, "earlier": True} for cell in kernel["cells"]]}
        for kernel in earlier["kernels"]
        if kernel["source"] and kernel["source"] == sources.get(kernel["name"])
    }
    asked = (*earlier.get("asked", ()), *(kernel["name"] for kernel in earlier["kernels"]))
    return known, [name for name in dict.fromkeys(asked) if name in sources]


def problems(found: object) -> Iterator[str]:
    """What a report has that this one has not, the first first.

    >>> next(problems([1]))
    'it is a list'
    >>> next(problems({"schema": 1, "kernels": []}))
    "it has no 'target'"
    """
    yield from _shape("it", found, REPORT)
    assert isinstance(found, dict)
    if found["schema"] != SCHEMA:
        yield f"its schema is {found['schema']}, and {SCHEMA} can be read"
    yield from _shape("its target", found["target"], TARGET)
    for number, kernel in enumerate(found["kernels"]):
        yield from _shape(f"kernels[{number}]", kernel, KERNEL)
        for place, cell in enumerate(kernel["cells"]):
            name = f"kernels[{number}].cells[{place}]"
            yield from _shape(name, cell, CELL)
            if cell["status"] not in STATUSES:
                yield f"the status of {name} is {cell['status']!r}"
            if not all(_is_figure(figure) for figure in cell["figures"]):
                yield f"a figure of {name} is not (what, error, tolerance)"
    for name in ("asked", "unfinished"):
        if not _are_names(found.get(name, [])):
            yield f"{name!r} of it is no list of names"


def _shape(what: str, found: object, fields: Fields) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{what} is {_kind(found)}"
        return
    for name, kinds in fields.items():
        if name not in found:
            yield f"{what} has no {name!r}"
        elif not isinstance(found[name], kinds):
            yield f"{name!r} of {what} is {_kind(found[name])}"


def _kind(value: object) -> str:
    return WORDS.get(type(value), "a number")


def _are_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _is_figure(figure: object) -> bool:
    if not isinstance(figure, list) or len(figure) != 3:
        return False
    what, error, most = figure
    good = isinstance(what, str) and isinstance(error, (*NUMBER, type(None))) and isinstance(most, NUMBER)
    return good and most >= 0 and (error is None or error >= 0)  # which NaN is not
