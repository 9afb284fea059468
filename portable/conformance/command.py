"""`portable conformance`: every kernel that a device offers against float64, feature by feature."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from portable.attention import load_kernels, verdicts_on
from portable.conformance import apart, documents, report
from portable.conformance.cells import runs_on
from portable.conformance.features import FULL, QUICK
from portable.conformance.names import check_features, instead
from portable.conformance.outcomes import FAILED, Outcome, rows
from portable.files import write_whole
from portable.kernel import ATTENTION, RECURRENT, Kernel
from portable.packages import installed
from portable.platform.detect import detect
from portable.platform.target import Target
from portable.select import why_not_here
from portable.verdicts import spelled

MOST_JOBS = 15  # processes on a GPU: each holds a context of about half a GiB there
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
    add("--jobs", type=int, metavar="N", help="processes; 0: this one, which a kernel can end (default: many on a GPU)")
    add("--timeout", type=float, default=120, metavar="S", help="seconds for a cell, with --jobs (default: 120)")
    add("--limit", type=float, metavar="S", help="seconds for the run; what is left then is not run, and no success")
    add("--json", metavar="FILE", help="write the report as JSON as it goes; - prints it, and nothing else")
    add("--resume", action="store_true", help="keep what passed in the file of --json, of the same sources")
    add("--record", metavar="FILE", help="write which kernels passed, as a matrix counts it, as JSON")
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
    """Run the kit as the flags say: 0 where all that was asked, of a resumed run too, ran and nothing failed, else 1.

    Raises:
        ValueError: flags that say nothing, or exclude each other.
    """
    from portable.cli import show

    mode, target = "full" if args.full else "quick", detect(args.device)
    if args.jobs is not None and args.jobs < 0:
        raise ValueError(f"--jobs is {args.jobs}; it must be at least 0")
    if args.limit is not None and not args.limit >= 0:
        raise ValueError(f"--limit is {args.limit:g}; it must be at least 0 seconds")
    if not args.timeout > 0:
        raise ValueError(f"--timeout is {args.timeout:g}; it must be more than 0 seconds")
    if args.jobs == 0 and (args.limit is not None or args.resume):
        raise ValueError("--jobs is 0; --limit and --resume need processes")
    for flag, file in (("--json", args.json), ("--html", args.html), ("--record", args.record)):
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{flag} is {file!r}, in a folder that does not exist")
    if args.resume and args.json in (None, "-"):
        raise ValueError("--resume needs the file of an earlier run as --json")
    page = importlib.import_module("portable.conformance.page") if args.html else None
    if page is not None:
        page.needs()
    others = [documents.read("--with", Path(file)) for file in args.others]
    file = Path(args.json) if args.json and args.json != "-" else None
    earlier = documents.read("--resume", file) if args.resume and file and file.exists() else None
    kernels, not_offered = offered(target, args.kernel)
    if args.feature:
        every = [kernel for kernel in load_kernels() if runs_on(kernel, target)]
        check_features(args.feature, kernels, every, target, args.full)

    def kept(document: dict[str, Any]) -> None:
        if file is not None:  # as it goes, so that a run that is cut short keeps what it has
            write_whole(file, json.dumps(document, indent=1) + "\n")

    found = conform(
        kernels,
        target,
        mode,
        not_offered,
        args.jobs,
        args.timeout,
        args.device,
        args.feature,
        kept,
        args.limit,
        earlier,
    )
    if args.feature and not any(kernel["cells"] for kernel in found["kernels"]):
        raise ValueError(
            f"--feature is {' and '.join(map(repr, args.feature))}, of which these kernels have no cell here"
        )
    if args.json == "-":
        print(json.dumps(found, indent=1))
    else:
        kept(found)
        show(report.text(found))
    if page is not None:
        Path(args.html).write_text(page.page(found, others), encoding="utf-8")
    if args.record:
        text = json.dumps(report.record(found), indent=2, sort_keys=True)
        Path(args.record).write_text(text + "\n", encoding="utf-8")
    return 1 if found["counts"][FAILED] or not found["complete"] else 0


def offered(
    target: Target, names: Sequence[str] | None = None, kernels: Sequence[Kernel] | None = None
) -> tuple[list[Kernel], dict[str, tuple[str, ...]]]:
    """The kernels that the device offers, and why it does not offer the others of its vendor.

    They come in the order of `names`, of each what takes long to compile first.

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
            providers = list(dict.fromkeys(kernel.caps.provider for kernel in every))
            hint = instead(name, [*providers, *(kernel.name for kernel in every)])
            raise ValueError(f"{name!r} is no kernel or provider; {hint}the providers are {', '.join(providers)}")
    chosen = [k for k in every if names is None or k.name in names or k.caps.provider in names]
    asked = set(names or ())  # by its own name: not self-tested first, for the kit shows each cell of what is wrong
    reasons = {
        kernel.name: why_not_here(kernel, target, packages, None if kernel.name in asked else verdict)
        for kernel in chosen
    }
    able = [kernel for kernel in chosen if not reasons[kernel.name]]
    able.sort(key=lambda k: (_place(k, names or ()), k.caps.op not in ATTENTION, k.caps.op not in RECURRENT))
    if not able:
        listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise ValueError(f"none of these kernels runs on {target.vendor} {target.arch}: {listed}")
    return able, {
        kernel.name: reasons[kernel.name]
        for kernel in chosen
        if reasons[kernel.name] and (names or target.vendor in kernel.caps.vendors)
    }


def _place(kernel: Kernel, names: Sequence[str]) -> int:
    return next((at for at, name in enumerate(names) if name in (kernel.name, kernel.caps.provider)), len(names))


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
    limit: float | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a run, with a bar on a terminal as it goes; see `portable.conformance.report`.

    Args:
        jobs: processes for the cells, whose kernels are found by name in each; 0: this one. None: on a GPU one a core,
            at most MOST_JOBS; elsewhere one where there is a limit, an earlier document or a plug-in, which might end
            or hang this one, else 0.
        timeout: seconds that a cell may take in a process of its own.
        device: how another process finds the target; None: by its own name.
        kept: hears of the document so far whenever a kernel ends, and of kernels that take long every few seconds.
        features: only these groups or values of the report, as it names them; none: all.
        limit: seconds for the run; cells that are left are "not run".
        earlier: the document of an earlier run of the same device, versions, mode and features, whose cells of parity
            stay where the source does; so do its other kernels.

    Raises:
        ValueError: the earlier run differs in more than its kernels' sources.
    """
    start = time.perf_counter()
    scope = replace(FULL if mode == "full" else QUICK, features=tuple(features))
    known, before = documents.comparable(earlier, target, mode, features) if earlier else ({}, [])
    found: dict[str, dict[str, Any]] = {kernel.name: {} for kernel in kernels} | known
    asked = list(dict.fromkeys([*(kernel.name for kernel in kernels), *before]))
    if jobs is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        apart_too = limit is not None or earlier is not None or any(kernel.plugin for kernel in kernels)
        jobs = min(cores, MOST_JOBS) if target.device != "cpu" else int(apart_too)

    def document() -> dict[str, Any]:
        seconds = time.perf_counter() - start + (earlier["seconds"] if earlier and known else 0)
        made = [entry for entry in found.values() if entry]
        return report.document(target, made, not_offered or {}, mode, seconds, features, asked)

    kept(document())  # what another run left there is not taken for this one's
    with progress(len(kernels)) as advance:
        if jobs:
            where = device or spelled(target)
            made = apart.rows(kernels, target, where, scope, jobs, timeout, advance, limit, known)
        else:
            made = (report.of_row(row, target) for row in rows(kernels, target, scope, advance))
        for entry in made:
            found[entry["name"]] = entry
            kept(document())
    return document()


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
