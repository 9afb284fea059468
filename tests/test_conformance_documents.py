"""Reports that are read again: those that are none, those of runs that ended early, and what goes on from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from portable import cli
from portable.backends.reference import KERNELS
from portable.conformance import command, documents, report
from portable.conformance.command import conform
from portable.conformance.page import page
from portable.kernel import Op
from portable.platform.detect import detect


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


BAD = {
    "is not JSON, from line 1 on": "no report",
    "is not JSON, from line 2 on": '{"schema": 1,\n}',
    "is cut short": '{"schema": 1, "kernels": [',
    "is no report: it is a list": "[]",
    "is no report: it is a number": "3",
    "is no report: it has no 'schema'": '{"arch": "sm90", "kernels": {}}',  # a record of the kit
    "is not JSON that can be read": "[" * 100_000,
}


@pytest.mark.parametrize("option", ["--with", "--resume"])
@pytest.mark.parametrize(("why", "text"), BAD.items(), ids=BAD)
def test_a_file_that_is_no_report_is_one_line(option, why, text, tmp_path, capsys):
    file = tmp_path / "report.json"
    file.write_text(text)
    given = ["--with", str(file)] if option == "--with" else ["--json", str(file), "--resume"]
    flags = ["--device", "cpu", "--kernel", "reference.merge", "--feature", "3 parts"]
    assert cli.main(["conformance", *flags, *given]) == cli.USER_ERROR
    said = capsys.readouterr().err
    right = "it must be a report that `portable conformance --json FILE` wrote"
    assert said == f"portable: error: {option}: {str(file)!r} {why}; {right}\n"
    assert file.read_text() == text


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    for file, why in ((tmp_path, "cannot be read: Is a directory"), (tmp_path / "no", "cannot be read: No such file")):
        assert cli.main(["conformance", "--device", "cpu", "--with", str(file)]) == cli.USER_ERROR
        assert f"--with: {str(file)!r} {why}" in capsys.readouterr().err
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    assert cli.main(["conformance", "--device", "cpu", "--with", str(tmp_path / "bytes")]) == cli.USER_ERROR
    assert "bytes' is not text; " in capsys.readouterr().err


def test_every_part_of_a_report_is_looked_at_before_it_is_used(merged):
    assert not list(documents.problems(merged))
    for at, fields in (((), documents.REPORT), (("target",), documents.TARGET), (FIRST, documents.KERNEL)):
        for name in fields:
            for change in (lambda part, name=name: part.pop(name), lambda part, name=name: part.update({name: object})):
                spoilt = json.loads(json.dumps(merged))
                change(_part(spoilt, at))
                assert repr(name) in next(documents.problems(spoilt))
    for name in documents.CELL:
        spoilt = json.loads(json.dumps(merged))
        del _part(spoilt, (*FIRST, "cells", 1))[name]
        assert next(documents.problems(spoilt)) == f"kernels[0].cells[1] has no {name!r}"
    for path, value, why in (
        (("schema",), 2, "its schema is 2, and 1 can be read"),
        ((*FIRST, "cells", 0, "status"), "good", "the status of kernels[0].cells[0] is 'good'"),
        ((*FIRST, "cells", 0, "figures"), [[1]], "a figure of kernels[0].cells[0] is not (what, error, tolerance)"),
        *(
            ((*FIRST, "cells", 0, "figures"), [bad], "a figure of kernels[0].cells[0] is not (what, error, tolerance)")
            for bad in (["out", 1, -1], ["out", 1, math.nan], ["out", math.nan, 1], ["out", -1, 1])
        ),
        (("asked",), [3], "'asked' of it is no list of names"),
    ):
        spoilt = json.loads(json.dumps(merged))
        _part(spoilt, path[:-1])[path[-1]] = value
        assert next(documents.problems(spoilt)) == why


FIRST = ("kernels", 0)


def _part(document, path):
    for name in path:
        document = document[name]
    return document


@pytest.fixture(scope="module")
def merged() -> dict:
    """A report of one kernel."""
    merge = next(kernel for kernel in KERNELS if kernel.caps.op is Op.MERGE)
    return conform([merge], detect("cpu"), features=("2 parts", "3 parts"))


def test_a_tolerance_of_nothing_is_drawn(merged):
    exact = json.loads(json.dumps(merged))
    _part(exact, (*FIRST, "cells", 0))["figures"] = [["out", 0, 0], ["lse", 0.1, 0], ["more", None, 0]]
    assert not list(documents.problems(exact))
    assert "<svg" in page(merged, [exact])


def test_an_earlier_report_that_nothing_can_stay_of_is_left_as_it_is(tmp_path, capsys):
    file = tmp_path / "report.json"
    kernel = ["conformance", "--device", "cpu", "--kernel", "reference.merge", "--json", str(file)]
    flags = [*kernel, "--feature", "3 parts", "--feature", "2 parts"]
    assert cli.main(flags) == 0
    found = report_of(tmp_path)
    for change, flags_now, why in (
        ({}, [*flags, "--full"], "mode quick there and full now. Give --json another file, or leave --resume out"),
        ({}, kernel, "features 2 parts, 3 parts there and all now. "),
        ({}, [*kernel, "--feature", "3 parts"], "features 2 parts, 3 parts there and 3 parts now. "),
        ({"proof": "emulated"}, flags, "proof emulated there and measured now. "),
        ({"target": {**found["target"], "arch": "toy90"}}, flags, "(toy90) there and "),
        ({"versions": {**found["versions"], "torch": "1.0"}}, flags, "torch 1.0 there and "),
        ({"versions": {**found["versions"], "toy": "1.0"}}, flags, "differs: toy 1.0 there and None now. "),
    ):
        text = json.dumps({**found, **change})
        file.write_text(text)
        assert cli.main([*flags_now, "--resume"]) == cli.USER_ERROR
        assert why in capsys.readouterr().err
        assert file.read_text() == text
    file.write_text(json.dumps(found))
    assert cli.main([*kernel, "--feature", "2 parts", "--feature", "3 parts", "--resume"]) == 0  # in another order
    assert report_of(tmp_path)["resumed"] == 2


def test_what_a_run_has_no_time_for_is_said_and_run_by_the_next(tmp_path, capsys):
    file, features = tmp_path / "report.json", ["--feature", "sinks", "--feature", "3 parts"]
    flags = ["conformance", "--device", "cpu", "--kernel", "reference.merge", *features, "--json", str(file)]
    assert cli.main([*flags, "--limit", "0"]) == 1
    assert "2 not run" in capsys.readouterr().out
    found = report_of(tmp_path)
    assert found["counts"]["not run"] == 2 and found["kernels"][0]["status"] == "not run"
    assert not report.record({**found, "features": []})["kernels"]

    found["kernels"][0]["cells"][0] |= {"status": "parity", "reason": "", "proof": "seen before"}
    file.write_text(json.dumps(found))
    assert cli.main([*flags, "--resume"]) == 0
    found = report_of(tmp_path)
    assert [cell["status"] for cell in found["kernels"][0]["cells"]] == ["parity", "parity"]
    assert [cell["proof"] for cell in found["kernels"][0]["cells"]] == ["seen before", "measured"]

    others = ["reference.prefill" if flag == "reference.merge" else flag for flag in flags]
    assert cli.main([*others, "--resume"]) == 0  # the kernels of the file stay in it
    assert [kernel["name"] for kernel in report_of(tmp_path)["kernels"]] == ["reference.prefill", "reference.merge"]

    found["kernels"][0] |= {"source": "another"}
    file.write_text(json.dumps(found))
    assert cli.main([*flags, "--resume"]) == 0
    assert {cell["proof"] for cell in report_of(tmp_path)["kernels"][0]["cells"]} == {"measured"}


def test_a_run_that_ends_early_is_partial_wherever_it_is_read(tmp_path, monkeypatch, capsys):
    file, page_file = tmp_path / "report.json", tmp_path / "report.html"
    only = ["conformance", "--device", "cpu", "--feature", "3 parts", "--feature", "verify", "--json", str(file)]
    only += ["--kernel", "reference.merge"]
    flags = [*only, "--kernel", "reference.prefill"]
    file.write_text("what another run left")
    started = command.rows

    def cut_short(*arguments):
        yield next(started(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "rows", cut_short)
        assert cli.main(flags) == cli.INTERRUPTED
    found = report_of(tmp_path)
    assert found["counts"]["parity"] and not found["counts"]["not run"] and not found["counts"]["failed"]
    assert not found["complete"] and found["unfinished"] == ["reference.prefill"]
    assert found["asked"] == ["reference.merge", "reference.prefill"]
    said = "1 of 2 kernels did not run to their end: reference.prefill"
    assert said in report.text(found)
    assert f"This run is partial: {said}." in page(found) and "Every kernel passes" not in page(found)
    assert 'class="partial"' in page(found)

    # what is run beside it is whole, and the file is not
    assert cli.main([*only, "--resume", "--html", str(page_file)]) == 1
    again = report_of(tmp_path)
    assert again["resumed"] == again["counts"]["parity"] == 1 and again["unfinished"] == ["reference.prefill"]
    assert said in capsys.readouterr().out and said in page_file.read_text()
    assert "cells of an earlier run of the same sources: 1" in page_file.read_text()

    assert cli.main([*flags, "--resume"]) == 0
    whole = report_of(tmp_path)
    assert whole["complete"] and whole["resumed"] == 1 and not whole["unfinished"]
    assert "partial" not in report.text(whole) and 'class="partial"' not in page(whole)
    there = {**found, "target": {**found["target"], "arch": "toy90"}}
    assert f"Report of toy90, measured: this run is partial: {said}." in page(whole, [there])

    monkeypatch.setattr(command, "rows", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(flags) == cli.INTERRUPTED  # before any kernel has ended
    assert report_of(tmp_path)["unfinished"] == ["reference.merge", "reference.prefill"]


def test_a_kernel_of_an_earlier_run_whose_source_has_changed_is_missing(tmp_path):
    file = tmp_path / "report.json"
    flags = ["conformance", "--device", "cpu", "--feature", "3 parts", "--feature", "verify", "--json", str(file)]
    assert cli.main([*flags, "--kernel", "reference.merge", "--kernel", "reference.prefill"]) == 0
    found = report_of(tmp_path)
    changed, other = found["kernels"]
    changed["source"] = "another"
    file.write_text(json.dumps(found))
    assert cli.main([*flags, "--kernel", other["name"], "--resume"]) == 1
    assert report_of(tmp_path)["unfinished"] == [changed["name"]]
