"""ci/setup.sh says in a line what a machine lacks, and leaves nothing behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def machine(tmp_path):
    """A checkout's scripts, and a PATH of the system's tools on which Python can be replaced."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in (
        "bash",
        "dirname",
        "head",
        "sed",
        "awk",
        "df",
        "mkdir",
        "cat",
        "cksum",
        "tr",
        "ls",
        "date",
        "grep",
        "uname",
    ):
        os.symlink(shutil.which(tool), tools / tool)
    return tmp_path, tools


def stub(path, script):
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def set_up(machine, **environment):
    folder, tools = machine
    variables = {"PATH": str(tools), "HOME": str(folder), **environment}
    command = ["bash", "-c", "set -uo pipefail; . ci/setup.sh"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def test_a_machine_without_a_new_python_is_told_which_one_it_has(machine):
    stub(machine[1] / "python3", 'case "$1" in --version) echo Python 3.8.1;; *) exit 1;; esac')
    done = set_up(machine)
    assert done.returncode == 1 and not (machine[0] / ".venv").exists()
    assert "error: Python 3.10 or newer is needed; found: Python 3.8.1." in done.stderr


def test_a_named_interpreter_that_will_not_do_is_never_passed_over(machine):
    stub(machine[1] / "python3", "exit 0")
    done = set_up(machine, PYTHON="/no/such/python")
    assert done.returncode == 1 and "error: PYTHON=/no/such/python is not Python 3.10 or newer" in done.stderr


def test_a_full_disk_is_told_before_anything_is_made(machine):
    stub(machine[1] / "python3", 'case "$*" in *torch*) exit 1;; *) exit 0;; esac')
    stub(machine[1] / "df", "echo header; echo disk 1 1 0 0% /")
    done = set_up(machine)
    assert done.returncode == 1 and not (machine[0] / ".venv").exists()
    assert "error: 4 GB of free disk are needed" in done.stderr and "has 0 GB" in done.stderr


def test_a_folder_that_is_somebody_elses_is_not_emptied(machine):
    stub(machine[1] / "python3", 'case "$*" in *torch*) exit 1;; *) exit 0;; esac')
    stub(machine[1] / "df", "echo header; echo disk 1 1 99000000 0% /")
    theirs = machine[0] / "theirs"
    theirs.mkdir()
    (theirs / "data").write_text("keep")
    done = set_up(machine, PORTABLE_VENV=str(theirs))
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert (theirs / "data").read_text() == "keep"
