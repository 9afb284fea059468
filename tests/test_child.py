"""A process of its own: what it says is heard, what it prints is not, and its end is a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from portable.child import START, Child, EndedError

SAYS = """
import os, queue, subprocess, sys
from portable.child import saying
print("a banner", flush=True); os.write(1, b"1\\n\\xff\\n{half a value")
told = queue.Queue()
with saying(told.put) as say:
    print("noise"); os.write(1, b"[1]\\n"); subprocess.run(["echo", "more"])
    say({"said": sys.argv[1:]})
    assert sys.stdin.read() == ""
    say(["heard", told.get()])
"""
SAYING = "from portable.child import saying\nwith saying() as say:\n    "


def test_what_it_says_is_heard_and_what_it_prints_is_not() -> None:
    with closing(Child(SAYS, ["a", "b"])) as child:
        assert child.hear(START) == {"said": ["a", "b"]}
        child.tell([1, "x"])
        assert child.hear(START) == ["heard", [1, "x"]]
        assert child.last() == "noise [1] more"
        assert child.hear(START, lambda: True) is None
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
    child = Child(f"import subprocess, time\n{SAYING}say(subprocess.Popen(['sleep', '60']).pid); time.sleep(60)")
    other = child.hear(START)
    os.kill(other, 0)
    start = time.perf_counter()
    child.close()
    assert time.perf_counter() - start < 10
    _ends(other)


ENGINE = f"""
import os, time
from portable.child import START, Child
child = Child({f"import os, time{chr(10)}{SAYING}say(os.getpid()); time.sleep(60)"!r})
print(child.hear(START), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        other = int(engine.stdout.readline())
        os.kill(other, 0)
        engine.send_signal(how)
    _ends(other)


def test_its_end_is_heard_though_a_fork_of_it_holds_its_output() -> None:
    forks = "if os.fork() == 0: time.sleep(20)\n    else: say(2); os._exit(3)"
    with closing(Child(f"import os, time\n{SAYING}say(1)\n    {forks}")) as child:
        assert [child.hear(START), child.hear(START)] == [1, 2]
        start = time.perf_counter()
        with pytest.raises(EndedError, match="it ended its process with code 3"):
            child.hear(START)
    assert time.perf_counter() - start < 10


def test_it_finds_the_modules_that_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others: not those that lie in the current directory."""
    here, there = tmp_path / "here", tmp_path / f"a{os.pathsep}b"
    for folder, modules in ((here, ("json", "torch", "sitecustomize", "lying")), (there, ("standing",))):
        folder.mkdir()
        for name in modules:
            (folder / f"{name}.py").write_text("import os; os._exit(9)" if folder == here else "")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(there), *(os.path.abspath(path) for path in sys.path if path)])
    find = "import importlib.util as u; say([u.find_spec(name) is not None for name in ('standing', 'lying')])"
    for safe in ("", "1"):
        monkeypatch.setenv("PYTHONSAFEPATH", safe)
        with closing(Child(f"import json\n{SAYING}{find}")) as child:
            assert child.hear(START) == [True, False]


@pytest.mark.parametrize("executable", [None, ""])
def test_where_nothing_says_which_python_this_is_there_is_no_process(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match=f"sys.executable is {executable!r}; it must name"):
        Child("")


def _ends(process: int) -> None:
    for _ in range(100):  # until init has taken it away
        if not _runs(process):
            return
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
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
    code = f"import os\n{SAYING}say([os.environ['PORTABLE_A'], os.environ['PORTABLE_B']])"
    with closing(Child(code, environ={"PORTABLE_A": "2", "PORTABLE_B": "2"})) as child:
        assert child.hear(START) == ["1", "2"]
