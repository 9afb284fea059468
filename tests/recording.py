"""A stand-in on the CPU for a GPU's captured graphs, which makes stale metadata fail where there is no GPU.

`Recorder` has the members of `torch.cuda` that a capture uses. What is recorded is what a GPU's runtime would see:
torch operations, launches of Triton and C++ kernels on an emulated device, and kernels of `launched.py`, each with the
addresses of its tensors and with its numbers as they were. A replay runs none of the host code again. It reads the
memory at those addresses, and refuses addresses that were freed since. Memory allocated during the capture is the
graph's pool: every replay begins by filling it with NaN, integers with their greatest value. A capture itself computes
nothing: what it wrote is as before when it ends.

Replays of graphs that share a pool may destroy each other's results, as on a GPU: the memory of a graph that nobody
held when another was captured into the pool is filled by the other one's replays too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import recorded_launches as emulated
import torch
from addresses import Address, CaptureError, holders, leaves_of, mapped, read, spoil, tensors_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


@dataclass(frozen=True, slots=True)
class Rules:
    """What a vendor's runtime lets a capture do; both refuse what waits for the device."""

    loads: bool = False  # a module may be compiled or loaded
    unloads: bool = True  # a module may be unloaded; else the capture is lost, and found to be at its end
    pageable: bool = False  # memory of the host that is not pinned may be copied to the device


RULES = {
    "nvidia": Rules(),
    # unloading is error 900, and a compiled kernel that nobody holds is unloaded by the garbage collector
    "amd": Rules(unloads=False),
}
SYNCS = ("tolist", "numpy", "cpu", "__array__")  # of a tensor; others reach torch's dispatcher
READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose")
UNINITIALISED = ("aten::empty", "aten::new_empty")
SHAPES = ("aten::nonzero", "aten::masked_select", "aten::repeat_interleave.Tensor", "aten::unique", "aten::_unique2")


class Operation(NamedTuple):
    """One launch; `results` are where what it returns belongs, None for what needs no copy."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Address | None, ...]


class Pool:
    """Memory of graphs that are never replayed at once."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []


class Recorder:
    """`torch.cuda`, as far as a capture uses it, for the tensors of the CPU.

    Args:
        rules: of a vendor, out of RULES.
        target: the emulated device whose launches are recorded; None: there are none.
    """

    def __init__(self, rules: Rules = RULES["amd"], target: Any = None) -> None:
        self.rules, self.target = rules, target
        self.current: _Capture | None = None
        self.stream = "the caller's"
        self.replays = 0
        self.CUDAGraph = partial(Graph, self)

    def graph_pool_handle(self) -> Pool:
        return Pool()

    def is_current_stream_capturing(self) -> bool:
        return self.current is not None

    def synchronize(self, *args: object) -> None:
        if self.current is not None:
            raise CaptureError("synchronize waits for the device, which a capture does not run")

    def current_stream(self, device: object = None) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def graph(self, graph: Graph, pool: Pool | None = None, **options: Any) -> Iterator[None]:
        """Capture what the block launches; as torch's, it stays on its own stream where the capture fails."""
        before, self.stream = self.stream, "the capture's"
        graph.capture_begin(pool, **options)
        try:
            yield
        except BaseException:
            graph.abandon()
            raise
        graph.capture_end()
        self.stream = before


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, recorder: Recorder, keep_graph: bool = False) -> None:
        self.recorder = recorder
        self.operations: list[Operation] = []
        self.memory: dict[int, tuple[Any, torch.dtype]] = {}  # of the pool, by storage
        self.numbers: dict[int, Any] = {}  # storages of constants
        self.dead: list[tuple[Any, torch.dtype]] = []  # of other graphs, which this one may be given
        self._pool: Pool | None = None
        self._capture: _Capture | None = None

    def pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        if self.recorder.current is not None:
            raise CaptureError("another capture is under way")
        self._pool = pool or Pool()
        for other in self._pool.graphs:
            self.dead += [entry for entry in other.memory.values() if holders(entry[0]) == 0]
        self._pool.graphs.append(self)
        self._capture = _Capture(self)
        self._capture.begin()

    def capture_end(self) -> None:
        assert self._capture is not None
        capture, self._capture = self._capture, None
        capture.end()
        if capture.lost:
            raise CaptureError(f"the capture is lost: {capture.lost} during it")

    def abandon(self) -> None:
        if self._capture is not None:
            self._capture.end()
            self._capture = None

    def reset(self) -> None:
        self.operations.clear()
        self.memory.clear()
        self.numbers.clear()
        self.dead.clear()

    def replay(self) -> None:
        """Run the recorded operations on what their addresses hold now."""
        if self.recorder.current is not None:
            raise CaptureError("a graph is replayed during a capture")
        self.recorder.replays += 1
        with torch.inference_mode(), _disable_current_modes():
            for storage, dtype in (*self.memory.values(), *self.dead):
                spoil(storage, dtype)
            for operation in self.operations:
                arguments, named = (mapped(part, read) for part in operation[1:3])
                found = operation.function(*arguments, **named)
                for where, value in zip(operation.results, leaves_of(found), strict=True):
                    if where is not None:
                        where.read().copy_(value)


class _Capture(TorchDispatchMode):
    """What is under way between a graph's capture_begin and capture_end."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.recorder = graph, graph.recorder
        self.lost, self.computing = "", False
        self.before: dict[int, tuple[Any, Any]] = {}  # storages of others, and what they held
        self.host: list[StorageWeakRef] = []  # of numpy's arrays, made during the capture
        self.calls: list[Any] = []
        self.stack: Any = None

    def begin(self) -> None:
        self.recorder.current = self
        gc.disable()  # what it would unload, and when, is not the capture's doing
        active.append(self)
        self.stack = self._watched()
        self.stack.__enter__()
        self.__enter__()

    def end(self) -> None:
        try:
            self.drain()
        finally:
            self.__exit__(None, None, None)
            self.stack.__exit__(None, None, None)
            active.remove(self)
            gc.enable()
            self.recorder.current = None
            for storage, held in self.before.values():
                storage.copy_(held)
            for storage, dtype in self.graph.memory.values():
                spoil(storage, dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "portable":  # host code around kernels: what it launches is recorded, not itself
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        self._refuse(func.name(), args, kwargs)
        self.drain()
        return self.record(func, args, kwargs)

    def _refuse(self, name: str, args: Any, kwargs: Any) -> None:
        masks = name.startswith(("aten::index.Tensor", "aten::index_put")) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or name.startswith(SHAPES) or masks:
            raise CaptureError(f"{name} waits for the device, which a capture does not run")
        if name == "aten::lift_fresh" and not args[0].dim():  # a number, as in `x[0] = 1`: a launch holds it
            self.graph.numbers[args[0].untyped_storage()._cdata] = args[0].untyped_storage()
            return
        host = name == "aten::lift_fresh" or any(self._of_host(each) for each in tensors_of((args, kwargs)))
        if host:
            self._pageable(name)

    def _pageable(self, name: str) -> None:
        if not self.recorder.rules.pageable:
            raise CaptureError(f"{name} copies memory of the host that is not pinned, which a capture refuses")

    def _of_host(self, tensor: torch.Tensor) -> bool:
        return any(ref.cdata == tensor.untyped_storage()._cdata for ref in self.host)

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a launch, and compute it to know its results; other people's memory is put back at the end."""
        with _disable_current_modes():
            return self._record(function, args, kwargs)

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given, named = mapped(tuple(args), self._address), mapped(dict(kwargs), self._address)
        self.computing = True
        found = function(*args, **kwargs)
        self.computing = False
        known = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        made, name = [], function.name() if hasattr(function, "name") else ""
        for value in leaves_of(found):  # what is not new is a view, or was written in place
            new = isinstance(value, torch.Tensor) and (storage := value.untyped_storage())._cdata not in known
            if new:
                self.graph.memory.setdefault(storage._cdata, (storage, value.dtype))
            made.append(self._address(value) if new and not name.startswith(UNINITIALISED) else None)
        if any(made) or getattr(getattr(function, "_schema", None), "is_mutable", True):
            self.graph.operations.append(Operation(function, given, named, tuple(made)))
        return found

    def _address(self, tensor: torch.Tensor) -> Address:
        storage = tensor.untyped_storage()
        key = storage._cdata
        place: Any = storage
        if key not in self.graph.memory and key not in self.graph.numbers:
            if key not in self.before:
                self.before[key] = storage, storage.clone()
            place = StorageWeakRef(storage)
        return Address(place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def drain(self) -> None:
        """The Triton launches since the last operation."""
        while self.calls:
            call = self.calls.pop(0)
            self.record(*emulated.launch_of(call))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Python's ways to read a tensor refuse, and what loads and unloads modules is noticed."""
        made = {name: getattr(torch, name) for name in ("from_numpy", "tensor", "as_tensor")}

        def making(name: str) -> Callable[..., torch.Tensor]:
            def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                if isinstance(data, torch.Tensor) or self.computing:
                    return made[name](data, *args, **kwargs)
                if name != "from_numpy":
                    self._pageable(f"torch.{name}")
                tensor = made[name](data, *args, **kwargs)
                self.host.append(StorageWeakRef(tensor.untyped_storage()))
                return tensor

            return make

        with pytest.MonkeyPatch.context() as patch:
            for name in SYNCS:
                patch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
            for name in made:
                patch.setattr(torch, name, making(name))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # libraries ask it
            with emulated.noticed(self, patch):
                yield

    def _refusing(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.computing or self._of_host(tensor):
                return usual(tensor, *args, **kwargs)
            raise CaptureError(f"Tensor.{name} waits for the device, which a capture does not run")

        return reading

    def load(self, name: str) -> None:
        """A module is compiled or loaded."""
        if not self.recorder.rules.loads:
            raise CaptureError(f"kernel {name} is loaded during a capture; run it once, or call warmup, before")

    def unload(self) -> None:
        """A module is unloaded."""
        if not self.recorder.rules.unloads:
            self.lost = "a module was unloaded"


active: list[_Capture] = []
