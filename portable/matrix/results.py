"""What the lanes left behind: pytest's XML and conformance reports, one folder a lane."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from portable.conformance.report import partial

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


@dataclass(frozen=True, slots=True)
class Test:
    """One test in one lane."""

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """A kernel in a conformance report: what it did right on one architecture."""

    kernel: str
    arch: str
    failed: tuple[str, ...]  # of the cells that are wrong, what is
    source: str = ""  # digest of the kernel's source, where the report has one


@dataclass(frozen=True, slots=True)
class Results:
    """A lane's results."""

    tests: Mapping[str, Test] = field(default_factory=dict)  # by pytest's own name
    shown: tuple[Shown, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # files that could not be read, or that lack what was to be in them

    def count(self) -> dict[str, int]:
        """Tests by state."""
        return dict(Counter(test.state for test in self.tests.values()))

    def passed(self, beginning: str) -> bool:
        """Whether tests of a name that begins so passed, and none failed.

        >>> found = Results({"a.py::t[x]": Test("passed"), "a.py::t[y]": Test("failed")})
        >>> found.passed("a.py::t[x"), found.passed("a.py::")
        (True, False)
        """
        states = {test.state for name, test in self.tests.items() if name.startswith(beginning)}
        return PASSED in states and FAILED not in states


def read(folder: Path) -> Results:
    """All that a lane's folder holds; a file that cannot be read is a problem of the lane, and not an exception."""
    tests: dict[str, Test] = {}
    shown: list[Shown] = []
    versions: dict[str, str] = {}
    problems: list[str] = []
    for path in sorted(folder.rglob("*")):
        try:
            if path.suffix == ".xml":
                tests |= dict(junit(path.read_text(encoding="utf-8")))
            elif path.suffix == ".json":
                found = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(found, dict) and "kernels" in found and "target" in found:
                    shown += conformance(found)
                    problems += [f"{path.name}: {missing}"] if (missing := partial(found)) else []
                    versions |= found.get("versions") or {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as error:
            problems.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    return Results(tests, tuple(shown), versions, tuple(problems))


def junit(text: str) -> Iterator[tuple[str, Test]]:
    """(pytest's name, outcome) of every test in its XML.

    >>> cases = '<testcase classname="tests.test_a" name="t[1]"><skipped message="no device"/></testcase>'
    >>> dict(junit(f"<testsuites><testsuite>{cases}</testsuite></testsuites>"))
    {'tests/test_a.py::t[1]': Test(state='skipped', reason='no device')}
    """
    for case in ElementTree.fromstring(text).iter("testcase"):
        *path, last = case.get("classname", "").split(".")
        inner = [last] if last[:1].isupper() else []
        name = "/".join(path if inner else [*path, last]) + ".py"
        name = "::".join([name, *inner, case.get("name", "")])
        wrong, skipped = case.find("failure"), case.find("skipped")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            yield name, Test(FAILED, wrong.get("message", ""))
        elif skipped is not None:
            yield name, Test(SKIPPED, skipped.get("message", ""))
        else:
            yield name, Test(PASSED)


def conformance(report: Mapping[str, Any]) -> Iterator[Shown]:
    """The kernels of a report of `portable conformance --json`; a declared feature that is never served fails there.

    A kernel that was not asked for everything, or not in time, is in it only with what failed.
    """
    arch = report["target"]["arch"]
    for kernel in report["kernels"]:
        right = [cell for cell in kernel["cells"] if cell["status"] == "parity"]
        wrong = [cell for cell in kernel["cells"] if cell["status"] == "failed"]
        whole = not report.get("features") and all(cell["status"] != "not run" for cell in kernel["cells"])
        if wrong or (right and whole):
            failed = tuple(f"{cell['group']} {cell['value']}: {cell['reason']}" for cell in wrong)
            yield Shown(kernel["name"], arch, failed, kernel.get("source") or "")
