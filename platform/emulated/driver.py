"""Triton's active driver for an emulated device: `kernel[grid](cpu_tensors)` compiles for it and runs here.

What Triton must offer is its runtime's `driver.set_active`, the `kernel_load_start_hook` knob, through which the
assembly arrives, and one private attribute, the driver that was active before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from portable.platform.emulated.arguments import Arguments
from portable.platform.emulated.isa import Code, decode
from portable.platform.emulated.machine import BUDGET, LDS_BYTES, launch
from portable.platform.emulated.unwritten import Unwritten
from portable.platform.emulated.waves import LANES

# Triton keeps compiled kernels by device index: each architecture has its own, and none is a real GPU's.
DEVICES = {"gfx942": 942, "gfx950": 950}
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
MAX_THREADS = 1024  # of a workgroup

_codes: dict[str, Code] = {}  # by the compiled kernel's hash, which is also what Triton calls its function
_pending: list[str] = []  # the hash of the kernel that is being loaded
_lock = threading.Lock()
_current: Emulation | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; `arch` is what the executed code says that it was compiled for."""

    name: str
    arch: str
    grid: tuple[int, int, int]
    instructions: int  # executed, summed over waves


@dataclass(slots=True)
class Emulation:
    """What `activate` yields.

    `reachable` takes the CPU tensors that kernels reach only through addresses stored in others. A view that a kernel
    is given is bounded by its own elements; with `whole` it leads to all of its storage.
    """

    arch: str
    budget: int = BUDGET  # steps of a batch of workgroups before a kernel counts as stuck
    whole: bool = False
    processes: int = 1  # that share a launch's workgroups
    launches: list[Launch] = field(default_factory=list)
    reachable: list[Any] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    _unwritten: Unwritten = field(default_factory=Unwritten)

    @property
    def instructions(self) -> int:
        """Executed by all launches."""
        return sum(each.instructions for each in self.launches)

    def uninitialised(self, tensor: Any) -> Any:
        """Declare that a CPU tensor holds no values yet, and return it: a kernel that reads a byte of it is reported.

        Each byte counts as written after a kernel has written it, and all of them after torch has changed any.

        Raises:
            ValueError: the tensor is not on the CPU, or an inference tensor, whose changes torch does not count.
        """
        return self._unwritten.add(tensor)

    def arguments(self) -> Arguments:
        """Of the next launch, to be filled."""
        return Arguments(self._unwritten.written(), self.whole)

    def run(
        self, code: Code, grid: Sequence[int], block: Sequence[int], arguments: Arguments, lds_bytes: int = 0
    ) -> Launch:
        """Launch a kernel over workgroups of `block` threads, and record that; `machine.launch` says what may go wrong.

        Raises:
            RuntimeError: the code was compiled for another architecture.
        """
        if code.arch != self.arch:
            raise RuntimeError(f"{code.name} was compiled for {code.arch}, and the emulated device is {self.arch}")
        for number, tensor in enumerate(self.reachable):
            arguments.pointer(f"reachable[{number}]", tensor)
        x, y, z = grid
        packed, buffers = arguments.packed(), arguments.buffers
        executed = launch(code, grid, block, packed, buffers, lds_bytes, self.budget, processes=self.processes)
        self.launches.append(Launch(code.name, code.arch, (x, y, z), executed))
        return self.launches[-1]


@contextmanager
def activate(arch: str, budget: int = BUDGET, processes: int | None = None) -> Iterator[Emulation]:
    """Make an emulated "gfx942" or "gfx950" Triton's active device, in this thread, until the end of the block.

    Args:
        budget: steps that a batch of workgroups may take before a kernel counts as stuck.
        processes: that share the workgroups of a long launch; by default two, but one where pytest-xdist has made
            this process, so that there are as many already. There are no more than this machine has processors.

    >>> with activate("gfx90a"):
    ...     pass
    Traceback (most recent call last):
    ValueError: arch 'gfx90a' is not one of gfx942, gfx950

    Raises:
        ValueError: an architecture without emulation, or less than one process.
        RuntimeError: an emulated device is active already, or this version of Triton cannot be hooked.
    """
    global _current
    if arch not in DEVICES:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(DEVICES)}")
    if processes is None:
        processes = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    for name, count in (("processes", processes), ("budget", budget)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count} is not a whole number of at least 1")
    config, hook = _triton()
    driver, emulation = _driver(arch), Emulation(arch, budget, processes=min(processes, os.cpu_count() or 1))
    with _lock:
        if _current is not None:
            where = "this" if _current.thread == emulation.thread else "another"
            raise RuntimeError(f"an emulated {_current.arch} is active already, in {where} thread")
        _current = emulation
    previous = config._active
    hook.add(_loading)
    config.set_active(driver)
    try:
        yield emulation
    finally:
        config.set_active(previous)
        hook.remove(_loading)
        _current = None


def _triton() -> tuple[Any, Any]:
    """Triton's driver configuration and its hook for kernels that are loaded."""
    import triton
    from triton.runtime import driver

    hook = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "kernel_load_start_hook", None)
    if not hasattr(hook, "add") or not hasattr(driver, "_active"):
        raise RuntimeError(f"triton {triton.__version__} cannot be hooked: 3.6.0 and 3.9.0 were seen to work")
    return driver, hook


def _loading(module: object, function: object, name: str, files: Mapping[str, str], key: str) -> None:
    """Triton is about to load a compiled kernel: decode its assembly, once."""
    _pending.clear()
    for file, path in files.items():
        if file.endswith(".amdgcn"):
            if key not in _codes:
                _codes[key] = decode(Path(path).read_text(), name)
            _pending.append(key)


def current() -> Emulation:
    """The active one of this thread.

    Raises:
        RuntimeError: there is none, or it belongs to another thread.
    """
    if _current is None:
        raise RuntimeError("no emulated device is active: launch inside `with activate(arch)`")
    if _current.thread != threading.get_ident():
        raise RuntimeError(f"the emulated {_current.arch} was activated in another thread")
    return _current


class Loader:
    """What Triton calls a driver's `utils`."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, Any]:
        """Triton checks shared memory against these, and heuristics read the rest; clocks are of no device."""
        return {
            "max_shared_mem": LDS_BYTES[self.arch],
            "multiprocessor_count": COMPUTE_UNITS[self.arch],
            "warpSize": LANES,
            "max_num_regs": 512,
            "arch": self.arch,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, str, int, int, int]:
        """Module, function, registers, spills, threads.

        The module is None, so that Triton has nothing to unload: it would ask the driver that is active when the
        kernel is freed, which may be a GPU's.
        """
        if not _pending:
            import triton

            raise RuntimeError(f"triton {triton.__version__} gave no assembly of {name}: it cannot be hooked")
        key = _pending.pop()
        facts = _codes[key].facts
        return None, key, int(facts.get("next_free_vgpr", 0)), 0, MAX_THREADS


class Launcher:
    """What Triton makes for each compiled kernel, and calls with the grid and the arguments."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature: Mapping[str, Any] = source.signature
        self.metadata = metadata

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: str,
        packed: object,
        described: object,
        enter: Callable[[object], None] | None,
        leave: Callable[[object], None] | None,
        *arguments: Any,
    ) -> None:
        emulation, code = current(), _codes[function]
        given = emulation.arguments()
        for (name, kind), value in zip(self.signature.items(), arguments, strict=True):
            given.add(name, kind, value)
        for what in ("global_scratch", "profile_scratch"):
            size = x * y * z * (getattr(self.metadata, f"{what}_size", 0) or 0)
            given.add(what, "*", np.zeros(size, np.uint8) if size else None)
        if enter is not None:
            enter(described)
        if x * y * z:
            emulation.run(code, (x, y, z), (self.metadata.num_warps * LANES, 1, 1), given, self.metadata.shared)
        if leave is not None:
            leave(described)


def _driver(arch: str) -> Any:
    """An object of Triton's driver interface."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class EmulatedDriver(DriverBase):  # type: ignore[misc]
        launcher_cls = Launcher

        def __init__(self) -> None:
            self.utils = Loader(arch)

        @classmethod
        def is_active(cls) -> bool:
            return False  # Triton never chooses it by itself

        def get_current_target(self) -> Any:
            return GPUTarget("hip", arch, LANES)

        def get_current_device(self) -> int:
            current()
            return DEVICES[arch]

        def set_current_device(self, device: int) -> None:
            if device != DEVICES[arch]:
                raise ValueError(f"device {device} is not the emulated {arch}, {DEVICES[arch]}")

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_benchmarker(self) -> Callable[..., Sequence[float]]:
            return count

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(0, dtype=torch.int32)

        def clear_cache(self, cache: torch.Tensor) -> None:
            pass

    return EmulatedDriver()


def count(call: Callable[[], object], quantiles: Sequence[float] | None = None, **options: Any) -> list[float]:
    """What an autotuner measures here: the instructions that a call executes. It is no time, but never differs."""
    emulation = current()
    before = emulation.instructions
    call()
    return [float(emulation.instructions - before)] * len(quantiles or (0.5,))
