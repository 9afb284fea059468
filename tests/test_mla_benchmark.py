"""The MLA benchmark, as far as a CPU carries it: every kind of row is right, dispatched, and in the file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from benchmarks import mla  # noqa: E402
from benchmarks.mla_problems import Decode, Shape  # noqa: E402
from benchmarks.mla_prompts import Prompt, Write  # noqa: E402
from benchmarks.timing import contest  # noqa: E402

from portable.attention import load_kernels  # noqa: E402


def test_every_kind_of_row_is_measured(tmp_path, capsys, monkeypatch):
    file = tmp_path / "mla.json"
    monkeypatch.setattr(mla, "GRID", mla.GRID[:3])
    given = ["--device", "cpu", "--shrink", "4096", "--budget", "0.1", "--grid", "--out", str(file)]
    mla.main([*given, "--only", "H16 q4 page64,P3 H16,write"])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found["rows"]) == ["X q4", "P3 H16 4096 192/128", "cache write 8192x576"]
    assert all(times["dispatched"] > 0 for times in list(found["rows"].values())[:2])
    assert set(found["rows"]["cache write 8192x576"]) == {"torch.index_put", "copy", "index_copy"}
    assert len(found["grid"]) == 3 and all(re.fullmatch(r"H16 q4 page64 b\d+ \d+", name) for name in found["grid"])
    assert set(found["selected"]) == {*found["rows"], *found["grid"]}
    assert "6 dispatched" in capsys.readouterr().out


@pytest.mark.parametrize("problem", [Decode, Prompt, Write])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_result_does_not_count(problem, wrong):
    pool = mla.latents(1 << 12, torch.device("cpu"))
    given = {Decode: (Shape(4, 2, 100, 3),), Prompt: (2, 50), Write: (128,)}[problem]
    made = problem(*given, pool)
    jobs = list(made.jobs([kernel for kernel in load_kernels() if kernel.caps.provider == "torch"]))
    if wrong:
        calls = jobs[0].calls
        outputs = jobs[0].outputs

        def bent():
            first, *rest = calls()
            return [lambda: (first(), outputs[0].mul_(1.1)), *rest]

        jobs = [jobs[0].__class__(jobs[0].name, bent, outputs, jobs[0].error, jobs[0].tolerance)]
    found = contest(jobs, 0.1, 0.0, lambda name: True)
    assert found and all(measure.ok is not wrong for measure in found.values())


def test_the_grid_holds_every_shape_that_selection_was_made_of():
    record = json.loads((ROOT / "ci" / "results" / "mla-sm90.json").read_text(encoding="utf-8"))["grid"]
    assert {row.name for row in mla.rows(True, 1) if row.quick} == set(record)
