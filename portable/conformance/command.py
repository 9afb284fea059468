"""`portable conformance`: every kernel that a device offers against float64, feature by feature."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portable.attention import load_kernels, verdicts_on
from portable.conformance import report
from portable.conformance.outcomes import FAILED, Outcome, rows
from portable.kernel import Kernel
from portable.packages import installed
from portable.platform.detect import detect
from portable.platform.target import Target
from portable.select import why_not_here

PAIRS = {"quick": 12, "full": 40}  # combined cases of a kernel, beside each value of each feature on its own

Advance = Callable[[Kernel, "Outcome | dict[str, Any] | None"], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `portable conformance`."""
    add = parser.add_argument
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="each feature, and 12 combinations of a kernel (default)")
    mode.add_argument("--full", action="store_true", help="40 combinations, and on a GPU lengths to 32k")
    add("--kernel", action="append", metavar="NAME", help="a kernel or provider; may be given again (default: all)")
    add("--device", help="a device, or emulated:ARCH (default: PORTABLE_DEVICE, or the best of this machine)")
    add("--jobs", type=int, metavar="N", help="processes; 0: this one, which a kernel can end (default: 4 on a GPU)")
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="seconds that a cell may take, with --jobs (120)",
    )
    add("--json", metavar="FILE", help="write the report as JSON; - prints it, and nothing else")
    add("--html", metavar="FILE", help="write the report as one page")


def run(args: argparse.Namespace) -> int:
    """Run the kit as the flags say: 0 where nothing failed, 1 where anything did; a ValueError for bad flags."""
    from portable.cli import show

    mode, target = "full" if args.full else "quick", detect(args.device)
    page = importlib.import_module("portable.conformance.page") if args.html else None
    kernels, not_offered = offered(target, args.kernel)
    found = conform(kernels, target, mode, not_offered, args.jobs, args.timeout, args.device)
    if args.json == "-":
        print(json.dumps(found, indent=1))
    else:
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show(report.text(found))
    if page is not None:
        Path(args.html).write_text(page.page(found), encoding="utf-8")
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
) -> dict[str, Any]:
    """The document of a run, with a bar on a terminal as it goes; see `portable.conformance.report`.

    Args:
        jobs: processes for the kernels, which are found by name in each; 0: this one. None: 4 on a GPU, else 0.
        timeout: seconds that a cell may take in a process of its own.
        device: how another process finds the target; None: by its own name.
    """
    start, pairs, full = time.perf_counter(), PAIRS[mode], mode == "full"
    jobs = (0 if target.device == "cpu" else 4) if jobs is None else jobs
    with progress(len(kernels)) as advance:
        if jobs:
            where = device or (f"emulated:{target.arch}" if target.emulated else target.device)
            found = list(apart.rows(kernels, target, where, pairs, full, jobs, timeout, advance))
        else:
            found = [report.of_row(row, target) for row in rows(kernels, target, pairs, full, advance)]
    return report.document(target, found, not_offered or {}, mode, time.perf_counter() - start)


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """What to call as each kernel begins and as each cell ends: a bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda kernel, outcome: None
        return
    begun = cells = failed = 0
    try:
        rich = importlib.import_module("rich.progress")
    except ModuleNotFoundError:
        rich = None

    def advance(kernel: Kernel, outcome: Outcome | dict[str, Any] | None) -> None:
        nonlocal begun, cells, failed
        begun += outcome is None
        cells += outcome is not None
        failed += outcome is not None and (outcome["status"] if isinstance(outcome, dict) else outcome.status) == FAILED
        what = f"{kernel.name}, {cells} cells" + (f", {failed} failed" if failed else "")
        show(what, begun - 1)

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
