"""The README: its table is what the kernels declare, and its example runs."""

import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def test_the_support_table_is_what_the_kernels_declare():
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "support_table.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_runs_as_it_stands(monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "cpu")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"## Use it\n(.*?)\n## ", text, re.DOTALL)[1]
    first = section.split("\nThe whole path")[0]
    code = "\n".join(line[4:] for line in first.splitlines() if line.startswith("    "))
    space = {}
    exec(code, space)
    assert space["out"].shape == (6, 32, 128) and torch.isfinite(space["out"]).all()
