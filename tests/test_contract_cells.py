"""What `ci/` counts of a kernel's cells: those that fail are printed, and end nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

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


@pytest.mark.parametrize(("name", "code", "said"), [("reference.merge", 0, "3 cells"), ("nosuch.", 2, "begins with")])
def test_cells_for_a_checker_of_memory_run_on_a_cpu(name, code, said):
    """As `ci/card` calls it, from a checkout where nothing is installed."""
    command = [sys.executable, str(CI / "memcheck.py"), "3", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr
