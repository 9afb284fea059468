"""Every opcode that has a handler is executed by the tests of opcodes/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable.platform.emulated.opcodes import HANDLERS


@pytest.mark.slow
def test_every_handler_is_executed(tmp_path: Path) -> None:
    """Runs these tests with a recorder around every handler; ci/test leaves them to this one."""
    here, executed = Path(__file__).parent, tmp_path / "executed.json"
    root = here.parent.parent
    path = os.pathsep.join([str(here.parent), str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "emulated_record", "-p", "no:cacheprovider", here / "opcodes"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "EXECUTED": str(executed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert sorted(set(HANDLERS) - set(json.loads(executed.read_text()))) == []
