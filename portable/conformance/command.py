"""`portable conformance`: every kernel that a device offers against float64, feature by feature."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from portable.attention import load_kernels, verdicts_on
from portable.conformance import apart, report
from portable.conformance.features import FULL, QUICK
from portable.conformance.outcomes import FAILED, Outcome, rows
from portable.kernel import Kernel
from portable.packages import installed
from portable.platform.detect import detect
from portable.platform.target import Target
from portable.select import why_not_here

Advance = Callable[[Kernel, "Outcome | dict[str, Any] | None"], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `portable conformance`."""
    add = parser.add_argument
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="each feature, and 12 combinations of a kernel (default)")
    mode.add_argument("--full", action="store_true", help="40 combinations, and on a GPU lengths to 32k")
    add("--kernel", action="append", metavar="NAME", help="a kernel or provider; may be given again (default: all)")
    add("--feature", action="append", default=[], metavar="NAME", help="a group or value of the report (default: all)")
    add("--device", help="a device, or emulated:ARCH (default: PORTABLE_DEVICE, or the best of this machine)")
    add("--jobs", type=int, metavar="N", help="processes; 0: this one, which a kernel can end (default: 4 on a GPU)")
    add("--timeout", type=float, default=120, metavar="S", help="seconds for a cell, with --jobs (default: 120)")
    add("--json", metavar="FILE", help="write the report as JSON; - prints it, and nothing else")
    add("--html", metavar="FILE", help="write the report as one page")
    add(
        "--with",
        action="append",
        default=[],
        metavar="FILE",
        dest="others",
        help="a JSON report to show on the page too",
    )


def run(args: argparse.Namespace) -> int:
    """Run the kit as the flags say: 0 where nothing failed, 1 where anything did; a ValueError for bad flags."""
    from portable.cli import show

    mode, target = "full" if args.full else "quick", detect(args.device)
    if args.jobs is not None and args.jobs < 0:
        raise ValueError(f"--jobs is {args.jobs}; it must be at least 0")
    for flag, file in (("--json", args.json), ("--html", args.html)):
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{flag} is {file!r}, in a folder that does not exist")
    page = importlib.import_module("portable.conformance.page") if args.html else None
    if page is not None:
        page.needs()
    others = [json.loads(Path(file).read_text(encoding="utf-8")) for file in args.others]
    kernels, not_offered = offered(target, args.kernel)
    file = Path(args.json) if args.json and args.json != "-" else None

    def kept(document: dict[str, Any]) -> None:
        if file is not None:  # as it goes, so that a run that is cut short keeps what it has
            file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    found = conform(kernels, target, mode, not_offered, args.jobs, args.timeout, args.device, args.feature, kept)
    if args.feature and not any(kernel["cells"] for kernel in found["kernels"]):
        raise ValueError(f"no group or value of these kernels is named {' or '.join(map(repr, args.feature))}")
    if args.json == "-":
        print(json.dumps(found, indent=1))
    else:
        kept(found)
        show(report.text(found))
    if page is not None:
        Path(args.html).write_text(page.page(found, others), encoding="utf-8")
    return 1 if found["counts"][FAILED] else 0


def offered(
    target: Target, names: Sequence[str] | None = None, kernels: Sequence[Kernel] | None = None
) -> tuple[list[Kernel], dict[str, tuple[str, ...]]]:
    """The kernels that the device offers, and why it does not offer the others of its vendor.

    Args:
        names: kernels or providers; None: all.

    Raises:
        ValueError: no kernel has a name, or those that have cannot run on the device.

    >>> from portable.platform.detect import detect
    >>> [kernel.name for kernel in offered(detect("cpu"), ["reference.merge"])[0]]
    ['reference.merge']
    """
    every = load_kernels() if kernels is None else kernels
    packages = installed(target, None)
    verdict = verdicts_on(target, packages)
    for name in names or ():
        if not any(name in (kernel.name, kernel.caps.provider) for kernel in every):
            known = ", ".join(dict.fromkeys(kernel.caps.provider for kernel in every))
            raise ValueError(f"{name!r} is no kernel or provider; the providers are {known}")
    chosen = [k for k in every if names is None or k.name in names or k.caps.provider in names]
    reasons = {kernel.name: why_not_here(kernel, target, packages, verdict) for kernel in chosen}
    able = [kernel for kernel in chosen if not reasons[kernel.name]]
    if not able:
        listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise ValueError(f"none of these kernels runs on {target.vendor} {target.arch}: {listed}")
    return able, {
        kernel.name: reasons[kernel.name]
        for kernel in chosen
        if reasons[kernel.name] and (names or target.vendor in kernel.caps.vendors)
    }


def conform(
    kernels: Sequence[Kernel],
    target: Target,
    mode: str = "quick",
    not_offered: Mapping[str, Sequence[str]] | None = None,
    jobs: int | None = None,
    timeout: float = 120,
    device: str | None = None,
    features: Sequence[str] = (),
    kept: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document of a run, with a bar on a terminal as it goes; see `portable.conformance.report`.

    Args:
        jobs: processes for the kernels, which are found by name in each; 0: this one. None: 4 on a GPU, else 0.
        timeout: seconds that a cell may take in a process of its own.
        device: how another process finds the target; None: by its own name.
        kept: hears of the document so far whenever a kernel ends.
        features: only these groups or values of the report, as it names them; none: all.
    """
    start, found = time.perf_counter(), list[dict[str, Any]]()
    order = [kernel.name for kernel in kernels]
    scope = replace(FULL if mode == "full" else QUICK, features=tuple(features))
    jobs = (0 if target.device == "cpu" else 4) if jobs is None else jobs
    with progress(len(kernels)) as advance:
        if jobs:
            where = device or (f"emulated:{target.arch}" if target.emulated else target.device)
            made = apart.rows(kernels, target, where, scope, jobs, timeout, advance)
        else:
            made = (report.of_row(row, target) for row in rows(kernels, target, scope, advance))
        for entry in made:
            found.append(entry)
            found.sort(key=lambda entry: order.index(entry["name"]))
            kept(report.document(target, found, not_offered or {}, mode, time.perf_counter() - start))
    return report.document(target, found, not_offered or {}, mode, time.perf_counter() - start)


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """What to call as each cell and each kernel ends: a bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda kernel, outcome: None
        return
    ended = cells = failed = 0
    try:
        rich = importlib.import_module("rich.progress")
    except ModuleNotFoundError:
        rich = None

    def advance(kernel: Kernel, outcome: Outcome | dict[str, Any] | None) -> None:
        nonlocal ended, cells, failed
        ended += outcome is None
        cells += outcome is not None
        failed += outcome is not None and (outcome["status"] if isinstance(outcome, dict) else outcome.status) == FAILED
        what = f"{kernel.name}, {cells} cells" + (f", {failed} failed" if failed else "")
        show(what, ended)

    if rich is None:

        def show(what: str, done: int) -> None:
            print(f"\r\x1b[K{done}/{total} {what}", end="", file=sys.stderr, flush=True)

        try:
            yield advance
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return
    columns = (
        rich.BarColumn(),
        "{task.completed}/{task.total} kernels",
        rich.TimeElapsedColumn(),
        "{task.description}",
    )
    console = importlib.import_module("rich.console").Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(what: str, done: int) -> None:
            bar.update(task, description=what, completed=done)

        yield advance
