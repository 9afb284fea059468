"""The lanes of CI: their file, the workflows that it makes, and what merging their results lets pass."""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from portable import cli
from portable.attention import load_kernels
from portable.conformance import command
from portable.kernel import Kernel, Op
from portable.matrix import jobs_of, lanes, report, results, workflows
from portable.matrix.results import Results, Shown
from portable.matrix.results import Test as Outcome

ROOT = Path(__file__).parents[1]
FILE = ROOT / "ci" / "matrix.toml"
TEXT = FILE.read_text(encoding="utf-8")
MATRIX = lanes.parse(TEXT)
KERNELS = load_kernels()
TABLES = report.vendor_archs()
REFERENCE = next(kernel for kernel in KERNELS if kernel.name == "reference.merge")
TRITON = next(kernel for kernel in KERNELS if kernel.name == "triton.merge")


# the committed file


def test_the_lanes_are_those_that_are_wanted() -> None:
    names = [lane.name for lane in MATRIX.lanes]
    assert set(names) > {"cpu", "emulated-gfx942", "emulated-gfx950", "compile", "mi300x", "mi355x", "rx7900"}
    assert {"h100", "b200"} < set(names)
    own = [lane.vendor for lane in MATRIX.lanes if not lane.hosted]
    assert own == sorted(own, key=lambda vendor: vendor != "amd"), "AMD's lanes come first"
    assert all(lane.hosted for lane in MATRIX.lanes[: names.index("mi300x")]), "cheap lanes come before all"
    declared = {arch for k in KERNELS for arch in report.archs_of(k, TABLES) if k.caps.provider in ("triton", "hip")}
    assert set(MATRIX.lane("compile").archs) == declared


def test_every_lane_that_runs_kernels_runs_the_whole_kit() -> None:
    """As the command line reads it, on the lane's device, with a report for the merge and a page for people."""
    for lane in MATRIX.lanes:
        if not lane.device:
            continue
        (line,) = (line for line in lane.run if line.startswith("portable conformance "))
        parser = argparse.ArgumentParser(allow_abbrev=False)
        command.add_arguments(parser)
        args = parser.parse_args(shlex.split(line)[2:])
        assert args.full and not args.kernel and not args.feature, lane.name
        assert args.device == (None if lane.devices else lane.device), lane.name
        assert (args.json, args.html) == ("$OUT/conformance.json", "$OUT/conformance.html"), lane.name


def test_hosted_lanes_have_the_versions_that_ci_has() -> None:
    pins = dict(re.findall(r"^(torch|triton)==(\S+)", (ROOT / "ci" / "constraints.txt").read_text(), re.MULTILINE))
    assert pins == {"torch": MATRIX.workflow.torch, "triton": MATRIX.workflow.triton}


def test_the_committed_workflows_are_what_the_lanes_make() -> None:
    pytest.importorskip("yaml")
    assert workflows.drift(MATRIX, "ci/matrix.toml", ROOT) == []


def test_the_workflows_are_valid() -> None:
    """By the schema that GitHub publishes, as check-jsonschema ships it."""
    pytest.importorskip("check_jsonschema")
    files = sorted((ROOT / workflows.FOLDER).glob("*.yml"))
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*checker, *map(str, files)], capture_output=True, text=True, timeout=60)
    assert len(files) == 2 and done.returncode == 0, done.stdout + done.stderr
    if actionlint := shutil.which("actionlint"):  # no package of pip's brings the original
        done = subprocess.run([actionlint, *map(str, files)], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_linter_knows_of_ones_own_runners() -> None:
    yaml = pytest.importorskip("yaml")
    (known,) = yaml.safe_load((ROOT / workflows.LINT).read_text())["self-hosted-runner"].values()
    flow = yaml.safe_load((ROOT / workflows.FOLDER / workflows.DEVICES).read_text())
    own = [job["runs-on"] for job in flow["jobs"].values() if "self-hosted" in job.get("runs-on", ())]
    assert {label for labels in own for label in labels} == {*known, "self-hosted"}


def test_no_capability_is_without_proof() -> None:
    """The rules and the committed runs, as if every lane passed."""
    proofs = report.proofs(KERNELS, TABLES, report.evidence(MATRIX, KERNELS, TABLES, None, ROOT / "ci" / "results"))
    assert report.summary(proofs)["failures"] == []


def test_every_rule_and_excuse_is_about_something() -> None:
    known = {kernel.name for kernel in KERNELS}
    for rule in MATRIX.rules:
        alone = lanes.Matrix(workflow=MATRIX.workflow, actions={}, lanes=MATRIX.lanes, rules=(rule,))
        proved = {e.kernel for e in report.evidence(alone, KERNELS, TABLES, None, Path("none"))}
        assert proved and proved <= known, rule
        for test in rule.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8"), test
    for skip in MATRIX.skips:
        path, _, name = skip.tests.partition("::")
        assert skip.why and f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_triton_kernel_is_compiled_where_the_lane_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the device functions that its module reaches is in the committed table, on every architecture of it."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    from compile_matrix import ARCHS, MLA_ALONE

    rows = json.loads((ROOT / "ci" / "results" / "compile-matrix.json").read_text())["rows"]
    compiled: dict[str, set[str]] = {}
    for key in rows:
        _, function, arch = key.split(" | ")
        compiled.setdefault(arch, set()).add(function.split()[0])
    assert compiled.keys() == {*ARCHS, *MLA_ALONE}
    for kernel in (kernel for kernel in KERNELS if kernel.caps.provider == "triton"):
        functions = device_functions(sys.modules[kernel.run.__module__], set())
        mla = kernel.caps.op is Op.MLA_DECODE
        for arch, made in compiled.items():
            if arch in kernel.caps.archs and (mla or arch in ARCHS):
                assert functions & made, f"{kernel} on {arch}: none of {sorted(functions)}"


def device_functions(module: ModuleType, seen: set[str]) -> set[str]:
    """The names of the compiled functions that a module and those that it takes names from hold."""
    seen.add(module.__name__)
    found = set()
    for value in vars(module).values():
        inner = getattr(value, "fn", value)
        if inner is not value and inspect.isfunction(inner):
            found.add(inner.__name__)
        home = value if inspect.ismodule(value) else sys.modules.get(str(getattr(inner, "__module__", "")))
        if home is not None and home.__name__.startswith("portable.backends.triton.") and home.__name__ not in seen:
            found |= device_functions(home, seen)
    return found


# the workflows


def test_nothing_that_a_fork_causes_reaches_ones_own_machines() -> None:
    yaml = pytest.importorskip("yaml")
    made = {name: yaml.safe_load(text) for name, text in workflows.workflows(MATRIX, "ci/matrix.toml").items()}
    for name, flow in made.items():
        triggers = flow.get("on") or flow[True]  # YAML 1.1 reads `on` as a truth
        assert flow["permissions"] == {"contents": "read"}
        assert not {"pull_request_target", "workflow_run", "issue_comment"} & triggers.keys()
        own = [job for job in flow["jobs"].values() if "self-hosted" in job.get("runs-on", ())]
        if name == workflows.HOSTED:
            assert not own and "pull_request" in triggers
        else:
            assert "pull_request" not in triggers and "merge_group" not in triggers
            assert len(own) == 5
            for job in own:
                assert job["needs"] == ["cheap"] and "github.event_name != 'pull_request'" in job["if"]
        for job in flow["jobs"].values():
            assert "permissions" not in job or job["permissions"] == {"contents": "read"}
            for step in job.get("steps", ()):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40))
                assert "actions/checkout" not in step.get("uses", "") or step["with"]["persist-credentials"] is False
                assert "${{" not in step.get("run", ""), "text of an event would become a command"
                assert "secrets" not in json.dumps(step)


def test_drift_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "matrix.toml").write_text(TEXT)
    assert cli.main(["matrix", "--check"]) == 1
    assert capsys.readouterr().out.count("is not there") == 3
    assert cli.main(["matrix", "--write"]) == 0
    assert cli.main(["matrix", "--check"]) == 0
    (tmp_path / "ci" / "matrix.toml").write_text(TEXT.replace('"MI300X"', '"MI300X, eight"'))
    capsys.readouterr()
    assert cli.main(["matrix", "--check"]) == 1
    assert capsys.readouterr().out == ".github/workflows/devices.yml is not what ci/matrix.toml makes\n"
    hosted_only = "\n\n".join(part for part in TEXT.split("\n\n") if "self-hosted" not in part)
    (tmp_path / "ci" / "matrix.toml").write_text(hosted_only)
    assert cli.main(["matrix", "--check"]) == 1
    said = capsys.readouterr().out
    assert "devices.yml is of no lane any more" in said and "actionlint.yaml is of no lane any more" in said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('name = "cpu"', 'name = "CPU"', "lane[CPU].name must be"),
        ('name = "h100"', 'name = "b200"', "and no other lane's"),
        ('level = "emulated"', 'level = "dreamt"', "it must be one of fake, compiled, emulated, measured"),
        ("minutes = 15", "minute = 15", "lane[lint] has a key 'minute'"),
        ('title = "MI300X"\n', "", "lane[mi300x] has no title"),
        ('lane = "compile" #', 'lane = "compiled" #', "lane is 'compiled'; the lanes are lint, cpu"),
        ('sha = "3d3c42e5', 'sha = "v7', "it must be a commit, 40 hex digits"),
        ('vendor = "nvidia"', 'vendor = "acme"', "of which [options] says nothing"),
        ('image = "pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel"\n', "", "has its own runner and no image"),
        ("[workflow]", "[flow]", "table 'flow' is not known"),
    ],
)
def test_a_wrong_file_is_refused_by_the_place(before: str, after: str, said: str) -> None:
    assert before in TEXT
    with pytest.raises(ValueError, match=re.escape(said)):
        lanes.parse(TEXT.replace(before, after))


def test_the_table_shows_every_lane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["matrix"]) == 0
    shown = capsys.readouterr().out
    assert all(lane.name in shown and lane.title in shown for lane in MATRIX.lanes)
    assert cli.main(["matrix", "--file", "nosuch.toml"]) == 2
    assert "there is no nosuch.toml" in capsys.readouterr().err


# merging


def merge(found: dict[str, Results], kernels: tuple[Kernel, ...] = (), **options: object) -> dict[str, object]:
    hosted = {lane.name: PASSED for lane in MATRIX.lanes if lane.hosted}
    jobs = dict.fromkeys(("cheap", *found), "success")
    return report.merged(MATRIX, {**hosted, **found}, kernels, TABLES, Path("none"), **{"jobs": jobs, **options})  # type: ignore[arg-type]


PASSED = Results({"tests/test_any.py::test_it": Outcome("passed")})


def outcomes(**states: str) -> Results:
    return Results({f"tests/test_a.py::{name}": Outcome(state, f"why {name}") for name, state in states.items()})


def test_what_is_skipped_on_every_lane_fails() -> None:
    """A test for one device, collected by another one's lane only, runs nowhere."""
    found = {"mi300x": outcomes(a="skipped", b="passed"), "h100": outcomes(a="skipped", b="skipped", c="passed")}
    assert merge(found)["failures"] == ["skipped on every lane: tests/test_a.py::a (why a)"]
    assert merge(found, partial=True)["failures"] == []
    assert merge(found, partial=True)["notes"] == ["skipped on every lane: tests/test_a.py::a (why a)"]
    found["mi355x"] = outcomes(a="passed")
    assert merge(found)["failures"] == []
    excused = {MATRIX.skips[0].tests + "x]": Outcome("skipped")}
    assert merge({"h100": Results(excused)})["failures"] == []


def test_a_lane_that_must_pass_and_does_not() -> None:
    assert merge({"mi300x": outcomes(a="failed")})["failures"] == ["lane mi300x: why a (tests/test_a.py::a)"]
    assert merge({"rx7900": outcomes(a="failed")})["failures"] == []
    assert merge({"rx7900": outcomes(a="failed")})["notes"] == ["lane rx7900: why a (tests/test_a.py::a)"]
    wrong = Results(shown=(Shown("triton.merge", "gfx942", ("lengths decode: out is wrong",)),))
    assert merge({"mi300x": wrong})["failures"] == ["lane mi300x: triton.merge: lengths decode: out is wrong"]
    jobs = {"cheap": "success", "mi300x": "failure", "mi355x": "success", "h100": "skipped", "b200": "skipped"}
    found = merge({}, jobs=jobs)
    assert found["failures"] == ["lane mi300x: a step failed", "lane mi355x left no results"]
    assert {name: lane["state"] for name, lane in found["lanes"].items() if name in jobs} == {  # type: ignore
        "mi300x": "failed", "mi355x": "missing", "h100": "not run", "b200": "not run",
    }  # fmt: skip


def test_a_folder_without_results_proves_nothing() -> None:
    """Not even what counts where a lane passed: the compiler's lane has no test of each kernel."""
    assert merge({}, (TRITON,))["failures"] == []
    found = merge({"compile": Results()}, (TRITON,), jobs=None, partial=True)
    assert found["lanes"]["compile"]["state"] == "missing"  # type: ignore[index]
    assert "lane compile left no results" in found["failures"]  # type: ignore[operator]
    assert "triton.merge on sm90 has no proof at any level" in found["failures"]  # type: ignore[operator]
    assert found["lanes"]["lint"]["state"] == "passed"  # type: ignore[index]
    alone = report.merged(MATRIX, {"cpu": PASSED}, (), TABLES, Path("none"), partial=True)
    assert alone["lanes"]["lint"]["state"] == "not run"


def test_a_capability_without_proof_fails() -> None:
    assert merge({}, (REFERENCE,))["failures"] == ["reference.merge on any has no proof at any level"]
    name = "tests/test_kernels.py::test_every_cell_that_a_kernel_accepts_is_right[reference.merge]"
    assert merge({"cpu": Results({name: Outcome("passed")})}, (REFERENCE,))["failures"] == []
    skipped = merge({"cpu": Results({name: Outcome("skipped")})}, (REFERENCE,), partial=True)
    assert skipped["failures"] == ["reference.merge on any has no proof at any level"]


def test_levels_come_from_what_ran() -> None:
    name = "tests/emulated/test_contract.py::test_every_cell_is_right[triton.merge-{}-0]"
    found = {
        "emulated-gfx942": Results({name.format("gfx942"): Outcome("passed")}),
        "emulated-gfx950": Results({name.format("gfx950"): Outcome("failed")}),
        "h100": Results(shown=(Shown("triton.merge", "sm90", ()),)),
    }
    proofs = merge(found, (TRITON,))["proofs"]["triton.merge"]  # type: ignore[index]
    assert proofs["gfx942"] == {"level": "emulated", "where": ["emulated-gfx942"]}
    assert proofs["gfx950"] == {"level": "compiled", "where": ["compile"]}
    assert proofs["sm90"] == {"level": "measured", "where": ["h100"]}
    stale = Results(shown=(Shown("triton.merge", "sm90", (), "another source"),))
    proofs = merge({"h100": stale}, (TRITON,))["proofs"]["triton.merge"]  # type: ignore[index]
    assert proofs["sm90"]["level"] == "compiled"
    failed = {"cheap": "failure"}
    assert len(merge({}, (TRITON,), jobs=failed)["failures"]) >= len(proofs)  # type: ignore[arg-type]


def test_a_committed_run_counts_while_the_source_is_the_same(tmp_path: Path) -> None:
    run = {"arch": "sm90", "card": "H100", "kernels": {"reference.merge": {"source": report.source_hash(REFERENCE)}}}
    (tmp_path / "contract-sm90.json").write_text(json.dumps(run))
    none = lanes.Matrix(workflow=MATRIX.workflow, actions={}, lanes=MATRIX.lanes)
    (found,) = report.evidence(none, [REFERENCE], TABLES, {}, tmp_path)
    assert (found.level, found.arch) == ("measured", "sm90")
    run["kernels"]["reference.merge"]["source"] = "0"  # type: ignore[index]
    (tmp_path / "contract-sm90.json").write_text(json.dumps(run))
    assert not list(report.evidence(none, [REFERENCE], TABLES, {}, tmp_path))


def test_a_committed_run_of_another_release_than_the_installed_one_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not {"torch", "triton"} & report.releases().keys()
    vendors = next(kernel for kernel in KERNELS if kernel.name == "vllm_flash_attn_3.varlen")
    proved = {vendors.name: {"source": report.source_hash(vendors)}}
    run = {"arch": "sm90", "card": "H100", "versions": {"vllm": "0.33.0"}, "kernels": proved}
    (tmp_path / "contract-sm90.json").write_text(json.dumps(run))
    none = lanes.Matrix(workflow=MATRIX.workflow, actions={}, lanes=MATRIX.lanes)
    for present, counts in (("0.33.0", True), ("0.34.0", False)):
        monkeypatch.setattr(report, "releases", lambda present=present: {"vllm": present})
        assert bool(list(report.evidence(none, [vendors], TABLES, {}, tmp_path))) == counts


def test_a_real_run_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """pytest's own XML and a report of the conformance kit, by the command that the workflow runs."""
    monkeypatch.chdir(ROOT)
    lane = tmp_path / "lanes" / "lane-cpu"
    lane.mkdir(parents=True)
    tests = "import pytest\n\ndef test_one(): pass\n\n@pytest.mark.skip(reason='no device')\ndef test_two(): pass\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "--junitxml", str(lane / "unit.xml"), "tests"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert cli.main(["conformance", "--kernel", "reference.merge", "--json", str(lane / "conformance.json")]) == 0
    (lane / "broken.json").write_text("{")
    found = results.read(lane)
    assert found.tests == {
        "tests/test_a.py::test_one": Outcome("passed"),
        "tests/test_a.py::test_two": Outcome("skipped", "no device"),
    }
    assert [(shown.kernel, shown.failed) for shown in found.shown] == [("reference.merge", ())]
    assert found.versions["torch"] and len(found.problems) == 1
    out, page = tmp_path / "report.json", tmp_path / "summary.md"
    argv = ["matrix", "--merge", str(tmp_path / "lanes"), "--partial", "--json", str(out), "--markdown", str(page)]
    capsys.readouterr()
    assert cli.main(argv) == 1
    assert "lane cpu: broken.json cannot be read" in capsys.readouterr().out
    merged = json.loads(out.read_text())
    assert merged["lanes"]["cpu"]["tests"] == {"passed": 1, "skipped": 1} and merged["lanes"]["cpu"]["kernels"] == 1
    assert merged["proofs"]["reference.merge"]["any"]["level"] == "measured"
    assert "| cpu | failed | 1 | 1 | 0 | 1 |" in page.read_text()


@pytest.mark.parametrize("left", ["reference.paged", "reference.merge"])
def test_a_run_that_was_cut_short_is_no_pass(tmp_path: Path, left: str) -> None:
    """Of a kernel that was not reached, and of one that was not ended, whether or not the job's end is known."""
    cell = {"group": "dtype", "value": "bf16", "status": "parity", "reason": ""}
    cells = [cell, {**cell, "status": "not run"}] if left == "reference.merge" else [cell]
    document = {
        "target": {"arch": "x86_64"},
        "asked": ["reference.merge", "reference.paged"][: 1 + (left == "reference.paged")],
        "kernels": [{"name": "reference.merge", "cells": cells}],
    }
    (tmp_path / "conformance.json").write_text(json.dumps(document))
    found = results.read(tmp_path)
    assert [shown.kernel for shown in found.shown] == ([] if left == "reference.merge" else ["reference.merge"])
    merged = merge({"mi300x": found}, jobs=None)
    assert merged["lanes"]["mi300x"]["state"] == "failed"  # type: ignore[index]
    (said,) = merged["failures"]  # type: ignore[misc]
    assert said.startswith("lane mi300x: conformance.json: ") and said.endswith(f"to their end: {left}")


def test_markup_of_a_lane_stays_text(tmp_path: Path) -> None:
    from portable.matrix import markdown

    found = merge({"mi300x": Results({"t.py::x": Outcome("failed", "<img src=x> [a](b) `c` | d\nsecond")})})
    text = "\n".join(markdown(found))
    line = next(line for line in text.splitlines() if "mi300x" in line)
    assert not set("<`[|") & set(line) and "second" not in line
    assert html.unescape(line).endswith("<img src=x> [a](b) `c` | d (t.py::x)")
    found = merge({}, tuple(kernel for kernel in KERNELS if kernel.name == "triton.cache_copy"))
    rows = [html.unescape(line) for line in markdown(found) if line.startswith("| triton")]
    assert rows and all(row.startswith("| triton.cache_copy | ") for row in rows), "a reader sees its name"


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": {}}', "3"])
def test_jobs_that_are_not_githubs_are_refused(text: str) -> None:
    if text == "[]":
        text = '["a"]'
    with pytest.raises(ValueError, match="--jobs is"):
        jobs_of(text)
