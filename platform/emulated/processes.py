"""The batches of a launch, run by this process and, where it pays, by others that it forks meanwhile.

A forked process has its own copy of all memory and sends back what it wrote, so workgroups must be independent.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from portable.platform.emulated.allocations import Allocations, Writes
from portable.platform.emulated.scheduler import ExecutionError

WORTH = 0.03  # seconds of work left for which to fork; that takes some 20 ms of both processes
TICKETS = 4096  # 8 bytes each: what a pipe holds at once


class Result(NamedTuple):
    """What one process has done; `failed` is the batch that raised `error`."""

    instructions: int
    writes: Writes
    failed: int = 0
    error: Exception | None = None


class Shared:
    """Batches 0 to `count`, each done by `run(batch, pulse)`, which counts instructions and calls `pulse` meanwhile.

    Batches begin in order, and none begins once one has failed: the first that fails is the same in any number of
    processes.
    """

    def __init__(
        self,
        name: str,
        count: int,
        run: Callable[[int, Callable[[], None] | None], int],
        allocations: Allocations,
        processes: int,
    ) -> None:
        self.name, self.count, self.run, self.allocations = name, count, run, allocations
        self.processes = processes if hasattr(os, "fork") else 1
        self.begun = 0
        self.tickets: int | None = None  # the pipe from which all processes draw what to do next, after a fork
        self.children: dict[int, int] = {}  # process -> the pipe with its result
        self.start = time.perf_counter()

    def all(self) -> int:
        """Returns the instructions executed.

        Raises:
            ExecutionError, MemoryFault: of the first batch that failed.
            ExecutionError: a process has ended before its time.
        """
        try:
            results = [self._work(None if self.processes == 1 else self._pulse)]
            for process, pipe in list(self.children.items()):
                results.append(self._result(process, pipe))
        finally:
            for process, pipe in self.children.items():
                os.close(pipe)
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            if self.tickets is not None:
                os.close(self.tickets)
        for each in results:
            self.allocations.replay(each.writes)
        failed = [each for each in results if each.error is not None]
        if failed and (error := min(failed, key=lambda each: each.failed).error):
            raise error
        return sum(each.instructions for each in results)

    def _work(self, pulse: Callable[[], None] | None) -> Result:
        instructions = 0
        while batches := self._next():
            for batch in batches:
                try:
                    instructions += self.run(batch, pulse)
                except Exception as error:
                    while self._next():  # so that no process begins another
                        pass
                    return Result(instructions, self.allocations.logged(), batch, error)
        return Result(instructions, self.allocations.logged())

    def _next(self) -> range:
        """The batches to do next; none if all have begun."""
        if self.tickets is None:
            self.begun += 1
            return range(self.begun - 1, min(self.begun, self.count))
        first = int.from_bytes(os.read(self.tickets, 8), "little")
        return range(first, min(first + self.per_ticket, self.count)) if first else range(0)

    def _pulse(self) -> None:
        """Fork if the batches that have not begun would take long, as the others have taken."""
        left = self.count - self.begun
        if self.tickets is None and left and (time.perf_counter() - self.start) / self.begun * left > WORTH:
            self._fork(left)

    def _fork(self, left: int) -> None:
        self.tickets, end = os.pipe()
        self.per_ticket = -(-left // TICKETS)
        os.write(end, b"".join(n.to_bytes(8, "little") for n in range(self.begun, self.count, self.per_ticket)))
        os.close(end)
        for _ in range(min(self.processes - 1, left)):
            pipe, end = os.pipe()
            with warnings.catch_warnings():  # of threads: this one's code alone goes on, and it waits for no other's
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                self._child(end)
            os.close(end)
            self.children[process] = pipe

    def _child(self, end: int) -> None:
        """Work, send the result, and end, whatever happens: nothing of the parent's may run twice."""
        try:
            self.allocations.log()
            result = self._work(None)
            try:
                data = pickle.dumps(result)
            except Exception as error:
                failure = ExecutionError(f"{type(error).__name__}: {error}, of {result.error!r}")
                data = pickle.dumps(result._replace(error=failure))
            with os.fdopen(end, "wb") as file:
                file.write(data)
        finally:
            os._exit(0)

    def _result(self, process: int, pipe: int) -> Result:
        """Waits for a process to end."""
        del self.children[process]
        try:
            with os.fdopen(pipe, "rb") as file:
                data = file.read()
        except BaseException:
            os.kill(process, signal.SIGKILL)
            raise
        finally:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        try:
            result: Any = pickle.loads(data)
        except Exception as error:
            how = f"killed by signal {-status}" if status < 0 else "ended"
            raise ExecutionError(
                f"{self.name}: the process {process} that ran some of its workgroups was {how} before they were done"
            ) from error
        assert isinstance(result, Result)
        return result
