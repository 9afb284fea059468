"""Every opcode that has a handler is executed by the tests of this folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable.platform.emulated.opcodes import HANDLERS

FAMILIES = [
    *("isa", "scalar", "control", "crosslane", "integer", "floating", "division"),
    *("packed", "convert", "scaled", "matrix", "memory", "lds", "atomics", "indexed"),
]


@pytest.mark.slow
def test_every_handler_is_executed(tmp_path: Path) -> None:
    """Runs the opcodes' tests once more, with a recorder around every handler."""
    here, executed = Path(__file__).parent, tmp_path / "executed.json"
    files = [str(here / f"test_{family}.py") for family in FAMILIES]
    root = here.parent.parent
    path = os.pathsep.join([str(here.parent), str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "emulated_record", "-p", "no:cacheprovider", *files],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "EXECUTED": str(executed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(set(HANDLERS) - set(json.loads(executed.read_text()))) == []
