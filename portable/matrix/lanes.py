"""The lanes of a CI matrix, read from TOML: which machines there are, what runs on them, and what passing proves."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

LEVELS = ("fake", "compiled", "emulated", "measured")  # of proof, the weakest first
DECLARED = "declared"  # the archs of a rule: all that a kernel declares
SELF_HOSTED = "self-hosted"
Table = TypeVar("Table", bound="Lane | Rule | Action | Workflow | Skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A step that a workflow takes from elsewhere, by commit."""

    uses: str  # "owner/name"
    sha: str  # 40 hex digits
    version: str  # the tag that the commit had, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """What all jobs share."""

    branch: str
    schedule: str  # of the lanes with devices, as cron writes it, UTC
    variable: str  # of the repository: a JSON list of the lanes that have a runner
    python: str  # of lanes without an image
    torch: str  # of lanes that name none
    triton: str
    runner: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One job on one kind of machine.

    >>> Lane(name="cpu", title="CPU", run=("pytest",), minutes=5).hosted
    True
    """

    name: str
    title: str
    run: tuple[str, ...]  # shell commands; what they write into $OUT is the lane's result
    minutes: int
    vendor: str = "any"
    archs: tuple[str, ...] = ()
    level: str | None = None  # what passing proves of a kernel on `archs`; None: nothing
    device: str = ""  # as `detect` takes it; empty: no kernel runs
    devices: int = 0
    runner: tuple[str, ...] = ()  # labels; none: the workflow's
    image: str = ""  # the container; none: the runner itself
    torch: str = ""
    triton: str = ""
    required: bool = True

    @property
    def hosted(self) -> bool:
        """Whether it runs on a machine that the forge lends, and not on one's own."""
        return SELF_HOSTED not in self.runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a lane proves of kernels: `level` on `archs`, where every entry of `tests` begins a test that passed there.

    Without `tests`, where the lane passed.
    """

    lane: str
    level: str
    kernels: tuple[str, ...]  # patterns of kernel names
    tests: tuple[str, ...] = ()  # beginnings of test names, with {kernel} and {arch} to fill in
    archs: tuple[str, ...] = ()  # none: the lane's


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tests that every lane may skip, and why."""

    tests: str  # the beginning of their names
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A whole file."""

    workflow: Workflow
    actions: Mapping[str, Action]
    lanes: tuple[Lane, ...]
    options: Mapping[str, str] = field(default_factory=dict)  # of containers, by vendor
    rules: tuple[Rule, ...] = ()
    skips: tuple[Skip, ...] = ()

    def lane(self, name: str) -> Lane:
        return next(lane for lane in self.lanes if lane.name == name)


def read(path: Path) -> Matrix:
    """A matrix from a TOML file; a ValueError names the table and the key that are wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; name the file of lanes with --file") from None
    return parse(text)


def parse(text: str) -> Matrix:
    """A matrix from the text of a TOML file."""
    data = _toml().loads(text)
    known = {"actions", "workflow", "options", "lane", "proof", "skip"}
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"table {unknown[0]!r} is not known; the tables are {', '.join(sorted(known))}")
    matrix = Matrix(
        workflow=_table(Workflow, data.get("workflow", {}), "workflow"),
        actions={name: _table(Action, each, f"actions.{name}") for name, each in data.get("actions", {}).items()},
        lanes=_tables(Lane, data.get("lane", []), "lane"),
        options=data.get("options", {}),
        rules=_tables(Rule, data.get("proof", []), "proof"),
        skips=_tables(Skip, data.get("skip", []), "skip"),
    )
    _check(matrix)
    return matrix


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError("reading TOML with Python 3.10 needs tomli; install portable-attention[matrix]") from None


def _tables(kind: type[Table], given: Sequence[Mapping[str, Any]], where: str) -> tuple[Table, ...]:
    return tuple(_table(kind, each, f"{where}[{each.get('name', number)}]") for number, each in enumerate(given))


def _table(kind: type[Table], given: Mapping[str, Any], where: str) -> Table:
    """A dataclass of a table: every key is a field, and every field without a default is there."""
    wanted = {each.name: each for each in fields(kind)}
    for key, value in given.items():
        if key not in wanted:
            raise ValueError(f"{where} has a key {key!r}; the keys are {', '.join(wanted)}")
        if not isinstance(value, str | int | bool | list):
            raise ValueError(f"{where}.{key} is {value!r}; it must be a string, a number or a list")
    if lost := [n for n, each in wanted.items() if n not in given and each.default is MISSING]:
        raise ValueError(f"{where} has no {lost[0]}")
    listed = {n for n, each in wanted.items() if "tuple" in str(each.type)}
    values = {key: tuple([value] if isinstance(value, str) else value) if key in listed else value
              for key, value in given.items()}  # fmt: skip
    made: Any = kind
    table: Table = made(**values)
    return table


def _check(matrix: Matrix) -> None:
    names = [lane.name for lane in matrix.lanes]
    for lane in matrix.lanes:
        where = f"lane[{lane.name}]"
        if not re.fullmatch(r"[a-z][a-z0-9-]*", lane.name) or names.count(lane.name) > 1:
            raise ValueError(f"{where}.name must be lower-case letters, digits and dashes, and no other lane's")
        if lane.level is not None and (lane.level not in LEVELS or not lane.archs):
            raise ValueError(f"{where}.level is {lane.level!r}; with archs it must be one of {', '.join(LEVELS)}")
        if not lane.hosted and not lane.image:
            raise ValueError(f"{where} has its own runner and no image; jobs on such machines run in a container")
        if lane.image and lane.vendor not in matrix.options:
            raise ValueError(f"{where}.vendor is {lane.vendor!r}, of which [options] says nothing")
    for number, rule in enumerate(matrix.rules):
        where = f"proof[{number}]"
        if rule.lane not in names:
            raise ValueError(f"{where}.lane is {rule.lane!r}; the lanes are {', '.join(names)}")
        if rule.level not in LEVELS:
            raise ValueError(f"{where}.level is {rule.level!r}; it must be one of {', '.join(LEVELS)}")
    for name, action in matrix.actions.items():
        if not re.fullmatch(r"[0-9a-f]{40}", action.sha):
            raise ValueError(f"actions.{name}.sha is {action.sha!r}; it must be a commit, 40 hex digits")
    for name in ("checkout", "python", "upload", "download"):
        if name not in matrix.actions:
            raise ValueError(f"[actions] has no {name}")
