"""What `ci/` counts of a kernel's cells: those that fail are printed, and end nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from portable.backends import reference
from portable.conformance import cells
from portable.platform.detect import detect

CI = Path(__file__).parent.parent / "ci"
MERGE = next(kernel for kernel in reference.KERNELS if kernel.name == "reference.merge")


def test_a_cell_that_fails_is_printed_and_the_rest_go_on(monkeypatch, capsys):
    monkeypatch.syspath_prepend(CI)
    import contract_cells

    cases = list(islice(cells.cases(MERGE, detect("cpu")), 4))
    assert contract_cells.run(MERGE, cases, "cpu") == (4, 0)
    assert capsys.readouterr().out == ""
    calls = []

    def wrong(*given):
        calls.append(given)
        if len(calls) > 2:
            raise RuntimeError("no kernel image")
        MERGE.run(*given)

    assert contract_cells.run(replace(MERGE, run=wrong), cases, "cpu") == (2, 2)
    out = capsys.readouterr().out
    assert all(f"reference.merge: RuntimeError: no kernel image\n    {case}\n" in out for case in cases[2:])


def test_the_shares_of_a_kernel_are_all_its_cells(monkeypatch):
    monkeypatch.syspath_prepend(CI)
    import prove

    every = len(list(cells.cases(MERGE, detect())))
    assert sum(prove.prove("reference.merge", at, 3)[1] for at in range(3)) == every


def test_what_another_card_proved_is_not_this_one_s(tmp_path, monkeypatch):
    """An H200 is an sm90 as well, with the versions of an H100's record."""
    monkeypatch.syspath_prepend(CI)
    import prove
    from record_name import record_name

    file, there = tmp_path / "contract-sm90.json", replace(detect("cpu"), arch="sm90", name="NVIDIA H100 80GB HBM3")
    here = replace(there, name="NVIDIA H200", product="H200")
    monkeypatch.setattr(prove, "available_kernels", lambda: [MERGE])
    kept = {"reference.merge": {"cells": 1, "source": prove.source_hash(MERGE)}}
    earlier = {"arch": "sm90", "card": there.name, "versions": prove.report.versions(there), "kernels": kept}
    file.write_text(json.dumps(earlier))
    for target, name, again in ((there, "sm90", set()), (here, "sm90-h200", {"reference.merge"})):
        ran = set()

        class Pool:
            def __init__(self, *_):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def submit(self, _, name, *given, ran=ran):
                ran.add(name)
                return SimpleNamespace(result=lambda: (name, 1, 0, 0.0))

        monkeypatch.setattr(prove, "ProcessPoolExecutor", Pool)
        monkeypatch.setattr(prove, "as_completed", list)
        monkeypatch.setattr(prove, "detect", lambda target=target: target)
        assert prove.main(str(file)) == 0 and ran == again
        assert record_name(target, CI / "results") == name
    assert record_name(replace(here, arch="gfx942", product="MI300X"), tmp_path) == "gfx942"
    assert json.loads(file.read_text())["card"] == "NVIDIA H200"


@pytest.mark.parametrize(("name", "code", "said"), [("reference.merge", 0, "3 cells"), ("nosuch.", 2, "begins with")])
def test_cells_for_a_checker_of_memory_run_on_a_cpu(name, code, said):
    """As `ci/card` calls it, from a checkout where nothing is installed."""
    command = [sys.executable, str(CI / "memcheck.py"), "3", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr
