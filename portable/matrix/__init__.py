"""`portable matrix`: the lanes of CI as data, the workflows that they make, and their results as one report.

    portable matrix                      the lanes
    portable matrix --proofs             what is proved of every kernel if all lanes pass; exit code 1 for a gap
    portable matrix --write              .github/workflows from the lanes; --check compares
    portable matrix --merge FOLDER       the lanes' results, FOLDER/lane-NAME/*, as one; exit code 1 if it must not pass

The file of lanes is ci/matrix.toml, or another one with --file; its folder's results/ has committed runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.columns import table

if TYPE_CHECKING:
    from portable.matrix.lanes import Matrix

FILE = Path("ci/matrix.toml")
PREFIX = "lane-"  # of the folder of a lane's results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `portable matrix`."""
    add = parser.add_argument
    add("--file", type=Path, default=FILE, help=f"the lanes (default: {FILE})")
    add("--check", action="store_true", help="whether the workflows are those that the lanes make")
    add("--write", action="store_true", help="write the workflows below the current folder")
    add("--proofs", action="store_true", help="what the lanes prove of every kernel")
    add("--merge", type=Path, metavar="FOLDER", help="merge the results of lanes that ran")
    add("--partial", action="store_true", help="with --merge: lanes with devices did not run")
    add("--jobs", metavar="JSON", help="with --merge: what became of the jobs, as GitHub's `needs` has it")
    add("--json", type=Path, metavar="FILE", help="with --merge or --proofs: write the report")
    add("--markdown", type=Path, metavar="FILE", help="with --merge: append the report for people to a file")


def run(args: argparse.Namespace) -> int:
    """Do what the flags say; 1 where something does not match or must not pass."""
    from portable.matrix import lanes, workflows

    matrix, source = lanes.read(args.file), args.file.as_posix()
    if args.write:
        for name, text in workflows.files(matrix, source).items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
            print(f"{name}: written")
        return 0
    if args.check:
        found = workflows.drift(matrix, source, Path())
        print("\n".join(found) or "the workflows are what the lanes make")
        return int(bool(found))
    if args.proofs or args.merge:
        return _report(matrix, args)
    print("\n".join(table([["lane", "runs on", "archs", "level", "", "title"], *lane_rows(matrix)])))
    return 0


def _report(matrix: Matrix, args: argparse.Namespace) -> int:
    from portable.attention import load_kernels
    from portable.matrix import report, results

    committed, tables = args.file.parent / "results", report.vendor_archs()
    kernels = tuple(kernel for kernel in load_kernels() if kernel.plugin is None)
    if args.merge:
        if not args.merge.is_dir():
            raise ValueError(f"--merge is {str(args.merge)!r}; it must be a folder of lanes' results")
        known = {lane.name for lane in matrix.lanes}
        folders = {path.name.removeprefix(PREFIX): path for path in sorted(args.merge.iterdir()) if path.is_dir()}
        if strange := sorted(folders.keys() - known):
            raise ValueError(f"{folders[strange[0]]} is of no lane; the lanes are {', '.join(sorted(known))}")
        read = {name: results.read(path) for name, path in folders.items()}
        found = report.merged(matrix, read, kernels, tables, committed, jobs_of(args.jobs), args.partial)
    else:
        every = report.evidence(matrix, kernels, tables, None, committed)
        found = report.summary(report.proofs(kernels, tables, every))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(render(found))
    print(text)
    if args.markdown:
        with args.markdown.open("a", encoding="utf-8") as file:
            file.write("\n".join(markdown(found)) + "\n")
    return int(bool(found["failures"]))


def jobs_of(text: str | None) -> dict[str, str] | None:
    """The result of each job, from GitHub's `needs` as JSON.

    >>> jobs_of('{"cpu": {"result": "success", "outputs": {}}}')
    {'cpu': 'success'}
    """
    if text is None:
        return None
    try:
        return {name: str(job["result"]) for name, job in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"--jobs is {text[:80]!r}; it must be a JSON object of jobs with their results") from None


def lane_rows(matrix: Matrix) -> list[list[str]]:
    rows = []
    for lane in matrix.lanes:
        where = ", ".join(lane.runner or matrix.workflow.runner)
        rows.append([lane.name, where, ", ".join(lane.archs), lane.level or "-",
                     "required" if lane.required else "optional", lane.title])  # fmt: skip
    return rows


def render(found: dict[str, Any]) -> Iterator[str]:
    """A report as text for people."""
    if "lanes" in found:
        rows = [
            [
                name,
                lane["state"],
                *(str(lane["tests"].get(s, 0)) for s in ("passed", "skipped", "failed")),
                lane["title"],
            ]
            for name, lane in found["lanes"].items()
        ]
        yield from table([["lane", "state", "passed", "skipped", "failed", "title"], *rows])
        yield ""
    rows = [[kernel, *each] for kernel, archs in found["proofs"].items() for each in _levels(archs)]
    yield from table([["kernel", "proof", "on", "by"], *rows])
    for title in ("notes", "failures"):
        if found.get(title):
            yield from ("", f"{title}:", *(f"    {each}" for each in found[title]))


def markdown(found: dict[str, Any]) -> Iterator[str]:
    """A report of lanes for GitHub's summary of a run; what fails comes first."""
    for title in ("failures", "notes"):
        if found[title]:
            yield from (f"### {title.capitalize()}", "", *(f"- {_escaped(each)}" for each in found[title]), "")
    yield from ("### Lanes", "", "| lane | state | passed | skipped | failed | kernels |", "|---|---|--:|--:|--:|--:|")
    for name, lane in found["lanes"].items():
        counts = " | ".join(str(lane["tests"].get(state, 0)) for state in ("passed", "skipped", "failed"))
        yield f"| {name} | {lane['state']} | {counts} | {lane['kernels']} |"
    yield from ("", "### Proof", "", "| kernel | level | on | by |", "|---|---|---|---|")
    for kernel, archs in found["proofs"].items():
        for level, on, by in _levels(archs):
            yield f"| {_escaped(kernel)} | {level} | {on} | {_escaped(by)} |"


def _levels(archs: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(level, architectures, by what), a row for each level and its proof."""
    rows: dict[tuple[str, str], list[str]] = {}
    for arch, proof in archs.items():
        rows.setdefault((proof["level"] or "NONE", ", ".join(proof["where"]) or "-"), []).append(arch)
    for (level, by), names in rows.items():
        yield level, ", ".join(names), by


def _escaped(text: str) -> str:
    """Text of a lane in Markdown: no markup of its own.

    >>> _escaped("a_b & <c>")
    'a&#95;b &#38; &#60;c&#62;'
    """
    return " ".join(text.translate({ord(char): f"&#{ord(char)};" for char in "\\`*_[]<>|&"}).split())
