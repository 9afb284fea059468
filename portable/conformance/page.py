"""The report as one HTML page without a script or another file; whatever a plug-in says is escaped."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from portable.conformance.features import ORDER, PAIRS
from portable.conformance.outcomes import NOT_RUN
from portable.conformance.plots import errors
from portable.conformance.report import STATUSES, partial
from portable.explain import spell_target
from portable.platform.target import Target

TEMPLATE = Path(__file__).with_name("page.html")


def needs() -> None:
    """Raise an ImportError that says what to install unless jinja2 and matplotlib are here."""
    for name in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"--html needs {name}; pip install 'portable-attention[conformance]'") from error


def page(found: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of a document of `portable.conformance.report`, with the kernels of other documents beside its own.

    A kernel of another document counts while its source is the same as here; one that is not here counts as it is.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
    """
    needs()
    kernels = [*placed(found, {}), *(k for other in others for k in placed(other, sources(found)))]
    names = list(dict.fromkeys(kernel["name"] for kernel in kernels))
    kernels.sort(key=lambda kernel: names.index(kernel["name"]))  # where a kernel ran as well is below it
    jinja2 = importlib.import_module("jinja2")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    made: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        found=found,
        device=spell_target(Target(**found["target"])),
        kernels=kernels,
        names=names,
        counts={s: sum(cell["status"] == s for kernel in kernels for cell in kernel["cells"]) for s in STATUSES},
        places=list(dict.fromkeys(kernel["place"] for kernel in kernels)),
        operations=list(operations(kernels)),
        failed=[kernel for kernel in kernels if kernel["status"] == "failed"],
        partial=[said for each in (found, *others) if (said := _partial(each, found))],
        statuses=STATUSES,
        why=why,
        style=lambda status: "unrun" if status == NOT_RUN else status,
        plot=importlib.import_module("markupsafe").Markup(errors(kernels)),
    )
    return made


def _partial(each: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What a document lacks; another one's begins with where it ran."""
    said = partial(each)
    return f"report of {place_of(each)}: {said}" if said and each is not found else said


def place_of(found: Mapping[str, Any]) -> str:
    return f"{found['target']['arch']}, {found['proof']}"


def sources(found: Mapping[str, Any]) -> dict[str, str | None]:
    return {kernel["name"]: kernel["source"] for kernel in found["kernels"]}


def placed(found: Mapping[str, Any], known: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """The kernels of a document with where they ran, less those whose source is another than the known one."""
    place = place_of(found)
    for kernel in found["kernels"]:
        if known.get(kernel["name"], kernel["source"]) == kernel["source"]:
            yield {**kernel, "place": place, "proof": found["proof"]}


def operations(kernels: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A table for each operation: the groups that its kernels have, and each kernel's cells by group."""
    for op in dict.fromkeys(kernel["op"] for kernel in kernels):
        rows = [kernel for kernel in kernels if kernel["op"] == op]
        present = {cell["group"] for kernel in rows for cell in kernel["cells"]}
        groups = [group for group in ORDER if group in present] + sorted(present - {*ORDER})
        yield {
            "name": op.replace("_", " "),
            "groups": groups,
            "rows": [
                {**kernel, "groups": [_sorted(c for c in kernel["cells"] if c["group"] == group) for group in groups]}
                for kernel in rows
            ],
            "pairs": PAIRS,
        }


def _sorted(cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Numbers by their size; other values as they come."""
    made = list(cells)
    numbers = [re.match(r"\d+", cell["value"]) for cell in made]
    if not all(numbers):
        return made
    return sorted(made, key=lambda cell: [int(number) for number in re.findall(r"\d+", cell["value"])])


def why(cell: Mapping[str, Any]) -> str:
    """What a cell says when it is pointed at.

    >>> why({"status": "parity", "proof": "measured", "reason": "", "figures": [["out", 2e-07, 1e-05]], "value": "64"})
    '64: parity, measured; out 2e-07 of 1e-05'
    """
    figures = "".join(
        f"; {what} {'not finite' if error is None else f'{error:.2g}'} of {tolerance:g}"
        for what, error, tolerance in cell["figures"]
    )
    proof = f", {cell['proof']}" if cell["proof"] else ""
    word = {"absent": "not asked here"}.get(cell["status"], cell["status"])
    return f"{cell['value']}: {word}{proof}{': ' + cell['reason'] if cell['reason'] else figures}"
