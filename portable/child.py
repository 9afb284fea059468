"""A process of its own for what may end one, hang or spoil the device: it says lines of JSON, and this side listens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

START = 180.0  # seconds for a process to import what it needs and to open the device
LAST = 1.0  # seconds for what a process said before its end, where a fork of it holds its output open
MARK = "\x1e"  # before each value, as in JSON text sequences (RFC 7464): what others print has none
PATHS = "import sys; sys.path[:] = dict.fromkeys([*{}, *filter(None, sys.path)])\n"  # '' is the current directory
Say = Callable[[Any], None]


class EndedError(Exception):
    """The process ended, or says nothing in time; the message is a sentence."""


class Child:
    """Python code in another process, which finds the modules that this one finds.

    Args:
        code: what it runs.
        arguments: its `sys.argv[1:]`.
        environ: variables that it has where this process has none of the name.

    >>> child = Child("from portable.child import saying\\nwith saying() as say: say(1 + 1)")
    >>> child.hear(START)
    2
    >>> child.close()
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if not sys.executable:
            raise OSError(f"sys.executable is {sys.executable!r}; it must name the Python to run")
        # in the code, since an entry of PYTHONPATH cannot hold its separator; what is no str Python does not search
        paths = PATHS.format([path or os.getcwd() for path in sys.path if isinstance(path, str)])
        self.noise = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-c", paths + code, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.noise, encoding="utf-8", errors="replace",
            env={**(environ or {}), **os.environ},
            start_new_session=True,  # so that the processes that it starts end with it
        )  # fmt: skip
        self.said: queue.Queue[Any] = queue.Queue()
        self.reader = threading.Thread(target=_read, args=(self.process.stdout, self.said), daemon=True)
        self.reader.start()

    def tell(self, what: object) -> None:
        """A line of JSON, for the `told` of its `saying`."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, which is heard next
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def hear(self, limit: float, stopped: Callable[[], bool] = lambda: False) -> Any:
        """What it says next; None where `stopped` says so meanwhile.

        Raises:
            EndedError: it has ended, or says nothing within `limit` seconds.
        """
        end = time.perf_counter() + limit
        while not stopped():
            left, ended = end - time.perf_counter(), self.process.poll() is not None
            try:
                heard = self.said.get(timeout=LAST if ended else max(0.0, min(0.2, left)))
            except queue.Empty:
                if ended:
                    break
                if left <= 0:
                    raise EndedError(f"it did not end within {limit:g} s") from None
                continue
            if heard is _END:
                break
            return heard
        else:
            return None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.returncode
        how = "closed its output" if code is None else f"ended its process with code {code}"
        raise EndedError(f"it {how}: {self.last()}")

    def last(self) -> str:
        """The end of what it wrote beside what it said, in one line."""
        self.noise.seek(max(0, self.noise.seek(0, os.SEEK_END) - 400))
        return " ".join(self.noise.read().decode(errors="replace").split())[-300:] or "it wrote nothing"

    def close(self) -> None:
        """End it and whatever it started."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)  # one that waits for a device cannot be ended before that answers
        self.reader.join(1)  # it holds the stream until nobody writes to it any more
        for stream in (self.process.stdin, None if self.reader.is_alive() else self.process.stdout, self.noise):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


_END = object()


def _read(stream: IO[str], said: queue.Queue[Any]) -> None:
    with suppress(ValueError, OSError):  # closed meanwhile
        for line in stream:
            _, marked, value = line.rpartition(MARK)
            with suppress(ValueError):  # cut
                if marked:
                    said.put(json.loads(value))
    said.put(_END)


@contextmanager
def saying(told: Callable[[Any], object] = lambda what: None) -> Iterator[Say]:
    """The other side: what says a value; `told` is called with what it is told, in another thread.

    Whatever else prints within the block goes to stderr, and whatever else reads finds nothing. The process ends with
    the one that started it, however that ends.
    """
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_obey, args=(lines, told), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield lambda what: print(MARK + json.dumps(what), file=out, flush=True)


def _obey(lines: IO[str], told: Callable[[Any], object]) -> None:
    for line in lines:
        told(json.loads(line))
    os._exit(1)  # nobody hears it any more
