"""A process of its own: what it says is heard, what it prints is not, and its end is a sentence."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from portable.child import START, Child, EndedError

SAYS = """
import os, subprocess, sys
from portable.child import saying
print("a banner"); os.write(1, b"{half a value\\n")
with saying() as say:
    print("noise"); os.write(1, b"[1]\\n"); subprocess.run(["echo", "more"])
    say({"said": sys.argv[1:]})
    for line in sys.stdin:
        say(["heard", line.strip()])
"""


def test_what_it_says_is_heard_and_what_it_prints_is_not() -> None:
    with closing(Child(SAYS, ["a", "b"], told=True)) as child:
        assert child.hear(START) == {"said": ["a", "b"]}
        child.tell([1, "x"])
        assert child.hear(START) == ["heard", '[1, "x"]']
        assert child.last() == "noise [1] more"
        assert child.hear(START, lambda: True) is None


def test_it_has_nothing_to_read_unless_it_is_told() -> None:
    """A library that asks a question gets no answer, and does not wait for one."""
    with closing(Child(SAYS)) as child:
        assert child.hear(START) == {"said": []}
        with pytest.raises(EndedError, match="it ended its process with code 0: noise"):
            child.hear(START)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.write(2, b'one\\ntwo'); os._exit(7)", "it ended its process with code 7: one two"),
        ("import os; os.abort()", "it ended its process with code -6: it wrote nothing"),
        ("import time; time.sleep(60)", "it did not end within 2 s"),
        ("import os, time; os.close(1); time.sleep(60)", "it closed its output: it wrote nothing"),
    ],
)
def test_an_end_is_a_sentence(code: str, said: str) -> None:
    limit = 2.0 if "within" in said else START
    with closing(Child(code)) as child, pytest.raises(EndedError) as error:
        child.hear(limit)
    assert str(error.value) == said


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
    child = Child(code, told=True)
    other = child.hear(START)
    os.kill(other, 0)
    start = time.perf_counter()
    child.close()
    assert time.perf_counter() - start < 10
    for _ in range(100):  # until init has taken it away
        if not _runs(other):
            return
        time.sleep(0.1)
    os.kill(other, signal.SIGKILL)
    raise AssertionError("it runs on")


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_its_variables_are_ours_and_then_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_A", "1")
    monkeypatch.delenv("PORTABLE_B", raising=False)
    code = "import json, os; print(json.dumps([os.environ['PORTABLE_A'], os.environ['PORTABLE_B']]))"
    with closing(Child(code, environ={"PORTABLE_A": "2", "PORTABLE_B": "2"})) as child:
        assert child.hear(START) == ["1", "2"]
