"""The lanes' results as one: what is proved where, and what the matrix does not let pass."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from portable.kernel import Kernel
from portable.matrix.lanes import DECLARED, LEVELS, Lane, Matrix, Rule
from portable.matrix.results import FAILED, SKIPPED, Results
from portable.packages import installed, known_packages
from portable.proof import committed, source_hash
from portable.sets import ANY

SCHEMA = 1
GATE = "cheap"  # the job that calls every hosted lane
EVERY = "any"  # the arch of a kernel that declares no list of them


class Evidence(NamedTuple):
    """That a kernel does on an architecture what it declares."""

    kernel: str
    arch: str
    level: str
    where: str  # the lane, or the committed file's device


class Proved(NamedTuple):
    """The best proof of a kernel on an architecture."""

    level: str | None
    where: tuple[str, ...]


Proofs = Mapping[str, Mapping[str, Proved]]  # by kernel and arch


def archs_of(kernel: Kernel, tables: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """The architectures that a kernel declares, of those that vendors list; `EVERY` where it declares all of a vendor.

    `tables` is vendor -> its architectures.

    >>> from portable.backends.reference import KERNELS
    >>> archs_of(KERNELS[0], {"toy": ["toy1"]})
    ('any',)
    """
    caps = kernel.caps
    if caps.vendors is ANY or caps.archs is ANY:
        return (EVERY,)
    found = [arch for vendor, archs in tables.items() if vendor in caps.vendors for arch in archs if arch in caps.archs]
    return tuple(found) or (EVERY,)


def evidence(
    matrix: Matrix,
    kernels: Iterable[Kernel],
    tables: Mapping[str, Collection[str]],
    lanes: Mapping[str, Results] | None,
    results: Path,
    passing: Collection[str] = (),
) -> Iterator[Evidence]:
    """Every proof that there is. Without `lanes`, each rule counts: as if its lane had passed.

    A rule that names no tests holds where its lane is one of `passing`. A committed run counts that had the releases
    of vendors' packages which are installed here.
    """
    here = releases()
    for kernel in kernels:
        for run in committed(results, kernel, here):
            yield Evidence(kernel.name, run["arch"], run["level"], f"{results.name}: {run['card']}")
        for rule in matrix.rules:
            if any(fnmatchcase(kernel.name, pattern) for pattern in rule.kernels):
                lane = matrix.lane(rule.lane)
                for arch in _archs(rule, lane, kernel, tables):
                    tests = [test.format(kernel=kernel.name, arch=arch) for test in rule.tests]
                    found = Results() if lanes is None else lanes.get(lane.name, Results())
                    if lanes is None or (all(map(found.passed, tests)) if tests else lane.name in passing):
                        yield Evidence(kernel.name, arch, rule.level, lane.name)
    own = {kernel.name: kernel for kernel in kernels}
    for name, found in (lanes or {}).items():
        level = matrix.lane(name).level
        for shown in found.shown:
            kernel_here = own.get(shown.kernel)
            stale = kernel_here is not None and shown.source and shown.source != source_hash(kernel_here)
            if level is not None and not shown.failed and not stale:
                yield Evidence(shown.kernel, shown.arch, level, name)


def proofs(kernels: Iterable[Kernel], tables: Mapping[str, Collection[str]], found: Iterable[Evidence]) -> Proofs:
    """The best level for each kernel and each architecture that it declares."""
    by_kernel: dict[str, list[Evidence]] = {}
    for each in found:
        by_kernel.setdefault(each.kernel, []).append(each)
    return {
        kernel.name: {
            arch: _proved([e for e in by_kernel.get(kernel.name, ()) if arch in (EVERY, e.arch)])
            for arch in archs_of(kernel, tables)
        }
        for kernel in kernels
    }


def merged(
    matrix: Matrix,
    lanes: Mapping[str, Results],
    kernels: tuple[Kernel, ...],
    tables: Mapping[str, Collection[str]],
    results: Path,
    jobs: Mapping[str, str] | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """One report of all lanes, as plain values: `failures` are sentences, and none means that the matrix passes.

    Args:
        lanes: name -> results, of the lanes that left any.
        kernels: those whose capabilities must be proved.
        tables: vendor -> its architectures.
        results: the folder of committed runs.
        jobs: what became of each lane's job, "success", "failure", "cancelled" or "skipped"; the lanes that are called
            as one are there under `GATE`. None: not known.
        partial: only some lanes ran, so what they all skipped may not be skipped by those that did not.
    """
    failures: list[str] = []
    notes: list[str] = []
    states = {lane.name: _state(lane, lanes.get(lane.name), jobs) for lane in matrix.lanes}
    passing = [name for name, state in states.items() if state == "passed"]
    for lane in matrix.lanes:
        state, found = states[lane.name], lanes.get(lane.name, Results())
        said = failures if lane.required else notes
        if state == "missing":
            said.append(f"lane {lane.name} left no results")
        if state == "failed" and not _wrong(found):
            said.append(f"lane {lane.name}: a step failed")
        said += (f"lane {lane.name}: {test.reason.splitlines()[0] if test.reason else 'failed'} ({name})"[:300]
                 for name, test in found.tests.items() if test.state == FAILED)  # fmt: skip
        said += (f"lane {lane.name}: {shown.kernel}: {wrong}"[:300] for shown in found.shown for wrong in shown.failed)
        said += (f"lane {lane.name}: {problem}" for problem in found.problems)
        notes += _other_versions(lane, found)
    skipped = list(skipped_everywhere(matrix, lanes))
    (notes if partial else failures).extend(f"skipped on every lane: {name} ({reason})" for name, reason in skipped)
    proved = proofs(kernels, tables, evidence(matrix, kernels, tables, lanes, results, passing))
    summed = summary(proved)
    return {
        "lanes": {
            lane.name: {
                "title": lane.title,
                "state": states[lane.name],
                "required": lane.required,
                "tests": lanes.get(lane.name, Results()).count(),
                "kernels": len(lanes.get(lane.name, Results()).shown),
                "versions": dict(lanes.get(lane.name, Results()).versions),
            }
            for lane in matrix.lanes
        },
        "skipped": [{"test": name, "reason": reason} for name, reason in skipped],
        "notes": notes,
        **summed,
        "failures": failures + summed["failures"],
    }


def summary(proved: Proofs) -> dict[str, Any]:
    """The proofs as plain values, and a failure for each declared capability that has none."""
    return {
        "schema": SCHEMA,
        "proofs": {
            kernel: {arch: {"level": found.level, "where": list(found.where)} for arch, found in archs.items()}
            for kernel, archs in proved.items()
        },
        "failures": [
            f"{kernel} on {arch} has no proof at any level"
            for kernel, archs in proved.items()
            for arch, found in archs.items()
            if found.level is None
        ],
    }


def skipped_everywhere(matrix: Matrix, lanes: Mapping[str, Results]) -> Iterator[tuple[str, str]]:
    """(test, reason) of every test that no lane ran and some lane skipped, but for those that the matrix excuses."""
    states: dict[str, set[str]] = {}
    reasons: dict[str, str] = {}
    for found in lanes.values():
        for name, test in found.tests.items():
            states.setdefault(name, set()).add(test.state)
            if test.state == SKIPPED:
                reasons[name] = test.reason
    for name, seen in sorted(states.items()):
        if seen == {SKIPPED} and not any(name.startswith(skip.tests) for skip in matrix.skips):
            yield name, reasons[name]


def vendor_archs() -> dict[str, tuple[str, ...]]:
    """vendor -> the architectures that its table lists."""
    detect = importlib.import_module("portable.platform.detect")
    return {name: tuple(vendor.ARCHS) for name, vendor in detect.vendors().items()}


def releases() -> dict[str, str]:
    """The vendors' packages of this machine, normalised name -> version; none of those that come with portable."""
    found = installed(known=[package for package in known_packages() if not package.bundled])
    return {name: package.version for name, package in found.items() if package.version}


def _archs(rule: Rule, lane: Lane, kernel: Kernel, tables: Mapping[str, Collection[str]]) -> Iterator[str]:
    declared = archs_of(kernel, tables)
    if rule.archs == (DECLARED,):
        yield from declared
        return
    for arch in rule.archs or lane.archs:
        if arch in declared or declared == (EVERY,):
            yield arch


def _proved(found: list[Evidence]) -> Proved:
    if not found:
        return Proved(None, ())
    best = max(found, key=lambda each: LEVELS.index(each.level)).level
    return Proved(best, tuple(dict.fromkeys(each.where for each in found if each.level == best)))


def _state(lane: Lane, found: Results | None, jobs: Mapping[str, str] | None) -> str:
    job = None if jobs is None else jobs.get(lane.name, jobs.get(GATE, "skipped") if lane.hosted else "skipped")
    if job == "skipped" or (job is None and found is None and not lane.hosted):
        return "not run"
    if job in ("failure", "cancelled") or (found is not None and _wrong(found)):
        return "failed"
    if lane.level is None:  # it proves nothing, and need not leave anything
        return "passed" if job == "success" or found is not None else "not run"
    return "passed" if found is not None and (found.tests or found.shown) else "missing"


def _wrong(found: Results) -> bool:
    failed = any(test.state == FAILED for test in found.tests.values())
    return failed or bool(found.problems) or any(shown.failed for shown in found.shown)


def _other_versions(lane: Lane, found: Results) -> Iterator[str]:
    for name, wanted in (("torch", lane.torch), ("triton", lane.triton)):
        have = found.versions.get(name)
        if wanted and have and not have.startswith(wanted):
            yield f"lane {lane.name} ran with {name} {have}; the matrix says {wanted}"
