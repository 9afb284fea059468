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
Say = Callable[[Any], None]


class EndedError(Exception):
    """The process ended, or says nothing in time; the message is a sentence."""


class Child:
    """Python code in another process, which finds the modules that this one finds.

    Args:
        code: what it runs.
        arguments: its `sys.argv[1:]`.
        environ: variables that it has where this process has none of the name.
        told: whether `tell` is used; else it has nothing to read.

    >>> child = Child("print(1 + 1)")
    >>> child.hear(START)
    2
    >>> child.close()
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        told: bool = False,
    ) -> None:
        self.noise = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        places = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE if told else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=self.noise, text=True,
            env={**(environ or {}), **os.environ, **places},
            start_new_session=True,  # so that the processes that it starts end with it
        )  # fmt: skip
        self.said: queue.Queue[Any] = queue.Queue()
        self.reader = threading.Thread(target=_read, args=(self.process.stdout, self.said), daemon=True)
        self.reader.start()

    def tell(self, what: object) -> None:
        """A line of JSON for its standard input."""
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
            left = end - time.perf_counter()
            try:
                heard = self.said.get(timeout=max(0.0, min(0.2, left)))
            except queue.Empty:
                if left <= 0:
                    raise EndedError(f"it did not end within {limit:g} s") from None
                continue
            if heard is not _END:
                return heard
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            code = self.process.returncode
            how = "closed its output" if code is None else f"ended its process with code {code}"
            raise EndedError(f"it {how}: {self.last()}")
        return None

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
            with suppress(ValueError):  # printed before `saying` began, or cut
                said.put(json.loads(line))
    said.put(_END)


@contextmanager
def saying() -> Iterator[Say]:
    """The other side: what says a value. Whatever else prints within the block goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield lambda what: print(json.dumps(what), file=out, flush=True)
