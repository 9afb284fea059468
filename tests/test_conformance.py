"""The kit as a platform maintainer runs it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from portable import cli
from portable.attention import load_kernels
from portable.backends.reference import KERNELS
from portable.conformance import (
    apart,
    cells,
    contract,
    features,
    laws,
    process,
    replay,
    report,
)
from portable.conformance.command import conform
from portable.conformance.features import QUICK
from portable.conformance.page import page
from portable.kernel import Kernel, Op
from portable.platform.detect import describe, detect, vendors
from portable.proof import committed

ROOT = Path(__file__).parent.parent


def conformance(*flags: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "portable", "conformance", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)


def test_every_kernel_of_a_cpu_passes_the_quick_kit(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = conformance("--quick", "--device", "cpu", "--json", str(tmp_path / "report.json"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{len(report_of(tmp_path)['kernels'])} kernels, ")
    found = report_of(tmp_path)
    assert found["counts"]["failed"] == 0
    # of the processor, which others on the machine do not lengthen by waiting
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    for kernel in found["kernels"]:
        assert kernel["status"] == "parity"
        for cell in kernel["cells"]:
            assert (cell["status"] in ("refused", "absent")) == bool(cell["reason"]), (kernel["name"], cell)
            assert cell["proof"] == ("measured" if cell["status"] == "parity" else None)


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernel", "nobody"], "'nobody' is no kernel or provider; the providers are "),
        (["--kernel", "tritn"], "'tritn' is no kernel or provider; near it: 'triton'"),
        (
            ["--kernel", "reference.merge", "--device", "cpu", "--feature", "softcap 1.0"],
            "--feature is 'softcap 1.0', which these kernels do not have; the groups are 'call', ",
        ),
        (["--kernel", "index_put"], "near it: 'torch.index_put'; "),
        (["--kernel", "triton.paged", "--device", "cpu"], "none of these kernels runs on cpu"),
        (["--quick", "--full"], "not allowed with argument"),
        (
            ["--kernel", "reference.merge", "--device", "cpu", "--feature", "sinks", "--feature", "3 part"],
            "--feature is '3 part', no group or value; near it: '3 parts', '9 parts', '2 parts'; "
            "the groups are 'call', 'in pairs', ",
        ),
        (
            ["--kernel", "reference.merge", "--device", "cpu", "--feature", "nosuch"],
            "--feature is 'nosuch', no group or value; the groups are 'call', ",
        ),
        (["--json", "nowhere/report.json"], "--json is 'nowhere/report.json', in a folder that does not exist"),
        (["--jobs", "-1"], "--jobs is -1; it must be at least 0"),
        (["--limit", "-1"], "--limit is -1; it must be at least 0 seconds"),
        (["--limit", "nan"], "--limit is nan; it must be at least 0 seconds"),
        (["--timeout", "0"], "--timeout is 0; it must be more than 0 seconds"),
        (["--jobs", "0", "--limit", "9"], "--jobs is 0; --limit and --resume need processes"),
        (["--resume", "--json", "-"], "--resume needs the file of an earlier run as --json"),
    ],
)
def test_what_cannot_be_run_is_one_line(flags, message, capsys):
    assert cli.main(["conformance", *flags]) == cli.USER_ERROR
    assert message in capsys.readouterr().err


# What a plug-in says is shown as text, whatever it is.
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{1}{2}$ & {{ 7 * 7 }}"


class Parsed(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def hostile_page() -> str:
    def base_2(outs, lses, sinks, out, lse):
        right.run(outs, lses, sinks, out, lse)
        lse.mul_(1.5)
        raise ValueError(HOSTILE)

    right = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    caps = replace(right.caps, name=HOSTILE, provider=HOSTILE)
    kernels = [replace(right, caps=caps, run=base_2, plugin=HOSTILE), right]
    found = conform(kernels, detect("cpu"), not_offered={HOSTILE: (HOSTILE,)}, features=("in place", "parts"), jobs=0)
    return page(found)


def test_the_page_escapes_what_a_plug_in_says(hostile_page):
    parsed = Parsed(hostile_page)
    assert not parsed.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert parsed.text.count(HOSTILE) >= 6  # the name in four places, the plug-in, the reason that it gives
    assert "49" not in parsed.text.split(HOSTILE)[1][:20]


def test_the_page_needs_no_other_file(hostile_page):
    addresses = {
        value for name, value in Parsed(hostile_page).attributes if name in ("src", "href", "xlink:href", "srcset")
    }
    assert all(address.startswith("#") for address in addresses), addresses
    assert not re.findall(r"url\((?!#)|@import", hostile_page)
    assert "default-src 'none'" in hostile_page


def test_the_page_shows_each_kernel_cell_and_reason(hostile_page):
    parsed = Parsed(hostile_page)
    assert "1 of 2 kernels failed" in parsed.text
    said = [value for name, value in parsed.attributes if name == "data-why"]
    assert any("it raised ValueError" in text for text in said)
    assert any("parity, measured; out" in text for text in said)
    assert "tolerance" in parsed.text  # of the plot's axis


def test_the_page_shows_other_reports_of_the_same_source():
    merge = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    found = conform([merge], detect("cpu"), features=("2 parts",))
    other = {**found, "target": {**found["target"], "arch": "toy90"}, "proof": "emulated"}
    assert "toy90, emulated" in page(found, [other])
    stale = {**other, "kernels": [{**kernel, "source": "another"} for kernel in other["kernels"]]}
    assert "toy90" not in page(found, [stale])


def test_a_feature_that_is_declared_and_refused_is_a_failure(monkeypatch):
    why_not = Kernel.why_not

    def without_sinks(kernel, target, layer, needs):
        return (*why_not(kernel, target, layer, needs), *(["not today"] if layer.sinks else []))

    monkeypatch.setattr(Kernel, "why_not", without_sinks)
    kernel = next(kernel for kernel in KERNELS if kernel.caps.op is Op.PREFILL)
    found = conform([kernel], detect("cpu"), features=("sinks", "softcap 1.0"))
    said = {cell["value"]: (cell["status"], cell["reason"]) for cell in found["kernels"][0]["cells"]}
    assert said["softcap 1.0"] == ("parity", "")
    assert said["sinks"] == ("failed", "it declares sinks, and refuses every case of it: not today")


def test_without_its_packages_the_page_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"--html needs matplotlib; pip install 'portable-attention\[conformance\]'"):
        page({"kernels": []})


ENDS = """
import os, sys, time
from dataclasses import replace
import portable.attention
from portable.backends.reference import KERNELS
right = next(kernel for kernel in KERNELS if kernel.name == "reference.merge")
def run(outs, lses, sinks, out, lse):
    if len(outs) == 3:
        os._exit(7)
    if len(outs) == 9:
        time.sleep(60)
    print("noise")
    right.run(outs, lses, sinks, out, lse)
portable.attention.load_kernels = lambda: (replace(right, run=run),)
from portable.conformance.process import answer
answer(sys.argv[1:])
"""


def test_a_plug_in_that_exits_fails_and_has_a_process_of_its_own(monkeypatch):
    right = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)

    def leave(*arguments):
        raise SystemExit(0)

    found = conform([replace(right, run=leave)], detect("cpu"), features=("2 parts",))
    assert [cell["status"] for cell in found["kernels"][0]["cells"]] == ["failed"]
    assert found["kernels"][0]["cells"][0]["reason"].endswith("it raised SystemExit: 0")

    asked = []
    monkeypatch.setattr(apart, "rows", lambda *arguments: asked.append(arguments[4]) or iter(()))
    conform([replace(right, plugin="acme")], detect("cpu"), features=("2 parts",))
    assert asked == [1]


def test_a_kernel_that_ends_its_process_or_hangs_fails_and_the_others_run(monkeypatch):
    monkeypatch.setattr(process, "CHILD", ENDS)
    right = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    features = ("2 parts", "3 parts", "9 parts", "sinks")
    found = conform([right], detect("cpu"), jobs=1, timeout=2, features=features)
    said = {cell["value"]: (cell["status"], cell["reason"]) for cell in found["kernels"][0]["cells"]}
    assert said["2 parts"] == said["sinks"] == ("parity", "")
    assert said["3 parts"][0] == "failed" and said["3 parts"][1].startswith("it ended its process with code 7: noise")
    assert said["9 parts"] == ("failed", "it did not end within 2 s")
    assert found["kernels"][0]["kinds"] == {"crashed": 2}

    monkeypatch.setattr(apart, "ENDINGS", 1)  # the rest of a kernel that ends so many is left
    found = conform([right], detect("cpu"), jobs=1, timeout=2, features=features[1:])
    assert [cell["status"] for cell in found["kernels"][0]["cells"]].count("failed") == 1
    assert {cell["status"] for cell in found["kernels"][0]["cells"]} <= {"failed", "not run", "parity"}


@pytest.mark.parametrize("kernel", load_kernels(), ids=lambda kernel: kernel.name)
def test_every_kernel_serves_a_case_of_the_report_on_a_device_of_its_own(kernel):
    """A kernel of few shapes, such as values much wider than keys, would fail as one that serves nothing."""
    every = (describe(arch) for vendor in vendors().values() for arch in vendor.ARCHS)
    target = next(target for target in every if not kernel.why_not_on(target))
    assert not next(features.probes(kernel, target)).fault


def test_cells_for_which_no_process_starts_fail_and_say_so(monkeypatch):
    def full(*arguments):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(apart, "Process", full)
    merge = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    found = conform([merge], detect("cpu"), jobs=1, features=("sinks",))
    failed = {cell["reason"] for cell in found["kernels"][0]["cells"] if cell["status"] == "failed"}
    assert failed == {"no process can be started: [Errno 11] Resource temporarily unavailable"}


def test_a_record_proves_a_kernel_while_its_source_is_the_same(tmp_path):
    merge = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    record = report.record(conform([merge], detect("cpu")))
    assert record["kernels"][merge.name]["cells"] == 43
    (tmp_path / "conformance-toy.json").write_text(json.dumps({**record, "arch": "toy90", "level": "emulated"}))
    assert [(run["arch"], run["level"]) for run in committed(tmp_path, merge)] == [("toy90", "emulated")]
    record["kernels"][merge.name]["source"] = "another"
    (tmp_path / "conformance-toy.json").write_text(json.dumps(record))
    assert not list(committed(tmp_path, merge))
    assert not report.record(conform([merge], detect("cpu"), features=("sinks",)))["kernels"]


@pytest.mark.parametrize("kernel", [k for k in load_kernels() if k.caps.provider == "reference"], ids=lambda k: k.name)
def test_each_value_of_a_feature_makes_a_case_of_its_own(kernel):
    """A value that another axis hides would be said to be proved by a case without it."""
    op, axes = kernel.caps.op, features.wide_axes(kernel, detect("cpu"), True)

    def why(cell):
        case = cells.case_of(op, cell)
        return None if case is None else kernel.why_not(detect("cpu"), case.layer, case.needs())

    base = cells.first(axes, lambda cell: why(cell) == ())
    for axis, values in axes.items():
        made = [cells.case_of(op, features.nearest(axes, base, axis, value, why)) for value in values]
        assert len(set(made)) == len(made), axis


def test_cells_are_dealt_once_and_those_that_fill_the_memory_to_one_process():
    target = detect("cpu")
    kernels = [kernel for kernel in KERNELS if kernel.caps.op in (Op.PAGED, Op.MLA_DECODE, Op.MERGE)]
    works = [apart.planned(kernel, target, QUICK, {}) for kernel in kernels]
    far, *rest = apart.dealt(works)
    assert [work.probes[number].law for work, number in far] == [laws.Law.FAR] * 2
    for work, number in (each for item in (far, *rest) for each in item):
        assert work.cells[number] is None
        work.fill(number, {"status": "parity"})
    assert all(work.ended for work in works)
    for work in works:
        assert [(c["group"], c["value"]) for c in work.cells] == [(p.group, p.value) for p in work.probes]


@contextmanager
def twice_before(step, device):
    """A capture as it is made: calls before it, whose results are thrown away."""
    step()
    step()
    yield step


@pytest.mark.parametrize("op", [Op.MERGE, Op.CACHE_WRITE, Op.CACHE_GATHER, Op.STATE_UPDATE])
def test_a_captured_call_leaves_what_one_call_leaves(op, monkeypatch):
    """Some write what they read: without its memory as it was, the call after those is wrong."""
    monkeypatch.setattr(replay, "replaying", twice_before)
    kernel = next(kernel for kernel in load_kernels() if kernel.caps.op is op and kernel.caps.provider == "reference")
    for case in cells.cases(kernel, detect("cpu"), most=8):
        contract.check(replace(kernel, run=replay.captured(kernel.run, "cpu")), case)


PYTEST = """
from dataclasses import replace
import pytest
import torch
from portable.backends.reference import KERNELS
from portable.conformance import command

def test_right(conformance):
    assert conformance("torch.index_put", device="cpu")["counts"]["failed"] == 0

def test_wrong(conformance, monkeypatch):
    right = next(kernel for kernel in KERNELS if kernel.name == "reference.merge")
    def run(outs, lses, sinks, out, lse):
        right.run(outs, lses, sinks, out, lse)
        lse.mul_(1.4426950408889634)
    monkeypatch.setattr(command, "load_kernels", lambda: (replace(right, run=run),))
    with pytest.raises(AssertionError, match="reference.merge: LSE base 2 explains"):
        conformance("reference.merge", device="cpu")
"""


def test_the_kit_is_a_plug_in_of_pytest(tmp_path):
    (tmp_path / "test_toy.py").write_text(PYTEST)
    flags = [
        "-p",
        "portable.conformance.pytest_plugin",
        "--conformance",
        "reference.merge",
        "--conformance-device",
        "cpu",
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *flags, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"reference\.merge PASSED", done.stdout), done.stdout
    assert "3 passed" in done.stdout


def test_an_emulated_device_runs_the_kit(tmp_path):
    pytest.importorskip("triton")
    flags = ["--device", "emulated:gfx942", "--kernel", "triton.cache_write", "--feature", "holes", "--feature", "16"]
    assert cli.main(["conformance", *flags, "--json", str(tmp_path / "report.json")]) == 0
    found = report_of(tmp_path)
    assert found["proof"] == "emulated" and found["target"]["arch"] == "gfx942"
    assert {cell["proof"] for kernel in found["kernels"] for cell in kernel["cells"]} == {"emulated"}


def test_the_law_of_a_second_device_asks_the_contract_there(monkeypatch):
    """No record is of a machine with two: here one is counted, and what would run there is written down."""
    kernel = next(kernel for kernel in load_kernels() if kernel.name == "triton.merge")
    target = replace(describe("sm90"), index=0, device="cuda:0")
    case, asked = next(cells.cases(kernel, target)), []
    monkeypatch.setattr(laws.contract, "check", lambda kernel, case, device: asked.append(device) or set())
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert laws.asked(laws.Law.DEVICE, kernel, case, target) == "this machine has one device"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert laws.asked(laws.Law.DEVICE, kernel, case, target) == (case, ())
    assert laws.check(laws.Law.DEVICE, kernel, case, target) == set() and asked == ["cuda:1"]
