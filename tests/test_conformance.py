"""The kit as a platform maintainer runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable import cli

ROOT = Path(__file__).parent.parent


def conformance(*flags: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "portable", "conformance", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)


def test_every_kernel_of_a_cpu_passes_the_quick_kit(tmp_path):
    done = conformance("--quick", "--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{len(report_of(tmp_path)['kernels'])} kernels, ")
    found = report_of(tmp_path)
    assert found["counts"]["failed"] == 0
    assert found["seconds"] < 60
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
        (["--kernel", "nobody"], "'nobody' is no kernel or provider"),
        (["--kernel", "triton.paged", "--device", "cpu"], "none of these kernels runs on cpu"),
        (["--quick", "--full"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_run_is_one_line(flags, message, capsys):
    assert cli.main(["conformance", *flags]) == cli.USER_ERROR
    assert message in capsys.readouterr().err
