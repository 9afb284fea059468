"""Whether a vendor's kernel may be offered on a device: what its self-test found, kept in memory and on disk.

On a GPU, and of a plug-in's kernel anywhere, the test runs in a process of its own, with a context of its own on the
device: a fault may end the process, hang, or leave the device unusable. That takes seconds, once: the verdict holds for
the versions of the kernel's packages, of torch and of portable, the architecture and the product, and for a plug-in's
source, and is read from disk from then on. Where no process can be had, the test runs in a thread of this one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable.cache_dir import cache_dir
from portable.child import START, Child, EndedError
from portable.kernel import Kernel
from portable.packages import Package, compiles_late
from portable.plugins import heard

if TYPE_CHECKING:
    from portable.platform.target import Target

log = logging.getLogger("portable")

OURS = frozenset({"triton"})  # what our own kernels need
READY = "ready"
EACH = 60.0  # seconds for the test of one kernel
CHILD = "import sys; from portable.attention import self_test; self_test(sys.argv[1], sys.argv[2:])"

Test = Callable[[Kernel, "Target"], "str | None"]  # what a kernel does wrong on a target, or None

_known: dict[str, str | None] = {}  # key -> fault
_lock = threading.RLock()


class Verdicts:
    """The verdicts on one target's kernels, found when asked for.

    Args:
        target: the device.
        installed: the packages of this machine, for their versions.
        test: the self-test.
        kernels: those that another process finds by name; others are tested in this one.
    """

    def __init__(
        self, target: Target, installed: Mapping[str, str | Package], test: Test, kernels: Iterable[Kernel] = ()
    ) -> None:
        self.target, self.installed, self.test = target, installed, test
        self.kernels = tuple(kernels)

    def __call__(self, kernel: Kernel) -> str | None:
        """Why a kernel is not to be used, or None. What compiles for minutes at its first call waits for `settle`."""
        return self.settle(kernel) if not _late(kernel) else self._told(self._remembered(kernel)[1])

    def settle(self, kernel: Kernel, each: float = EACH) -> str | None:
        """As a call, and a kernel without a verdict is tested now, whatever it compiles, within `each` seconds."""
        if not is_vendors(kernel):
            return None
        with _lock:
            found, fault = self._remembered(kernel)
            if not found:
                fault = self._tested(kernel, each)
            return self._told(fault)

    def _told(self, fault: str | None) -> str | None:
        return None if fault is None else f"its self-test failed: {fault}"

    def _remembered(self, kernel: Kernel) -> tuple[bool, str | None]:
        """Whether there is a verdict, and the fault that it names."""
        if not is_vendors(kernel):
            return True, None
        key = self._key(kernel)
        if key not in _known:
            with suppress(OSError, ValueError, KeyError, TypeError):
                kept = json.loads(_file(kernel, key).read_text(encoding="utf-8"))
                if kept["key"] == key and (kept["fault"] is None or isinstance(kept["fault"], str)):
                    _known[key] = kept["fault"]
        return key in _known, _known.get(key)

    def _tested(self, kernel: Kernel, each: float) -> str | None:
        alike = [kernel]
        if any(kernel is known for known in self.kernels):  # those of the same packages share a process
            alike += [
                other
                for other in self.kernels
                if other is not kernel
                and other.caps.requires == kernel.caps.requires
                and not other.why_not_on(self.target)
                and not self._remembered(other)[0]
            ]
            if self.target.device != "cpu" or kernel.plugin is not None:
                device = spelled(self.target)
                log.info("self-test of %s on %s", ", ".join(k.name for k in alike), device)
                faults = dict(apart(device, [k.name for k in alike], each))
                for each_kernel in alike:
                    if each_kernel.name in faults:
                        self._keep(each_kernel, faults[each_kernel.name])
                if kernel.name in faults:
                    return faults[kernel.name]
        fault = self._here(kernel, each)
        self._keep(kernel, fault)
        return fault

    def _here(self, kernel: Kernel, each: float) -> str | None:
        """The fault, found in this process; a thread that hangs is left behind."""
        found: list[str | KeyboardInterrupt | None] = []

        def work() -> None:
            try:
                found.append(self.test(kernel, self.target))
            except KeyboardInterrupt as error:
                found.append(error)

        thread = threading.Thread(target=work, name=f"self-test of {kernel.name}", daemon=True)
        with heard():
            thread.start()
            thread.join(each)
        if not found:
            return f"it did not end within {each:g} s"
        if isinstance(found[0], KeyboardInterrupt):
            raise found[0]
        return found[0]

    def _keep(self, kernel: Kernel, fault: str | None) -> None:
        """In memory, and on disk where it can be written; a file appears whole or not at all."""
        key = self._key(kernel)
        _known[key] = fault
        if fault is not None:
            log.warning("%s is not used on %s: its self-test failed: %s", kernel.name, self.target.device, fault)
        file = _file(kernel, key)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"key": key, "fault": fault}), encoding="utf-8")
            part.replace(file)

    def _key(self, kernel: Kernel) -> str:
        """All that a verdict depends on."""
        target = self.target
        versions = {}
        for name, _ in kernel.caps.requires:
            found = self.installed.get(name)
            versions[name] = found.version if isinstance(found, Package) else found
        facts = {
            "kernel": kernel.name,
            "plug-in": kernel.plugin,
            "packages": versions,
            "torch": torch.__version__,
            "runtime": target.runtime,
            "arch": target.arch,
            "device": target.product or target.name,
            "portable": _portable(),
        }
        return json.dumps(facts, sort_keys=True)


def spelled(target: Target) -> str:
    """How another process asks for a target.

    >>> from portable.platform.detect import detect
    >>> spelled(detect("cpu"))
    'cpu'
    """
    if target.emulated:
        return f"emulated:{target.arch}"
    stands_in = target.device == "cpu" and target.vendor != "cpu"
    return f"{target.vendor}:{target.index}" if stands_in else target.device


def is_vendors(kernel: Kernel) -> bool:
    """Whether a kernel is a plug-in's, or calls a package, that is not ours to prove."""
    return kernel.plugin is not None or any(name not in OURS for name, _ in kernel.caps.requires)


def _late(kernel: Kernel) -> bool:
    return any(compiles_late(name) for name, _ in kernel.caps.requires)


def _file(kernel: Kernel, key: str) -> Path:
    return cache_dir() / "self-test" / f"{kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@cache
def _portable() -> str:
    """The version of portable, and a digest of the code between it and the vendors, which a checkout changes."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "backends").rglob("*.py")):
        if "triton" not in file.parts:
            digest.update(file.read_bytes())
    return f"{sys.modules['portable'].__version__}-{digest.hexdigest()[:16]}"


def apart(device: str, names: list[str], each: float = EACH) -> Iterator[tuple[str, str | None]]:
    """(kernel name, fault) of the kernels, tested in another process; none where no such process can be had.

    A kernel that ends the process, or hangs, has that as its fault, and the next one gets a new process.
    """
    while names:
        done = 0
        for fault in _one_process(device, names, each):
            yield names[done], fault
            done += 1
        if not done:
            return
        names = names[done:]


def _one_process(device: str, names: list[str], each: float) -> Iterator[str | None]:
    """The faults of the first kernels, to the first that fails; nothing where no test began."""
    try:
        child = Child(CHILD, [device, *names])
    except OSError as error:
        log.info("no process for the self-test: %s", error)
        return
    with closing(child):
        try:
            child.hear(START)
        except EndedError as error:
            log.info("no process for the self-test: %s", error)
            return
        try:
            for _ in names:
                fault = child.hear(each)["fault"]
                yield fault
                if fault is not None:
                    return  # it may have left the device unusable
        except EndedError as error:
            yield str(error)


def answer(faults: Iterable[str | None], say: Callable[[Any], None]) -> None:
    """The other side of `apart`, once all is ready: a line for that and one for each kernel."""
    say(READY)
    for fault in faults:
        say({"fault": fault})
