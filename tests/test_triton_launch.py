"""Triton launches, on a pretended GPU: what is compiled and passed is Triton's; only the launch itself is recorded."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402

from portable.backends.triton import fast  # noqa: E402
from portable.backends.triton import launch as launching  # noqa: E402
from portable.backends.triton.launch import Bound, Typed, launch, recorded, target_of, warmup  # noqa: E402
from portable.platform.detect import describe  # noqa: E402


@triton.jit(do_not_specialize=["count"])
def kernel(a, b, stride, count, scale, pair, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):
    pass


class GPU:
    """Devices that a recorder stands for; every tensor is on `tensors`."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.tensors = 0
        self.current = 0
        self.capturing = False
        self.launches: list[tuple[object, int, int, tuple[object, ...]]] = []  # launcher, device, stream, arguments
        self.entered: list[int] = []
        self.loaded = 0

    @contextmanager
    def device(self, index):
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before

    def driver(self):
        gpu = self

        class Launcher:
            def __init__(self, source, metadata):
                self.code, self.pdl = metadata.hash, getattr(metadata, "launch_pdl", None)

            def __call__(
                self,
                gridX,
                gridY,
                gridZ,
                stream,
                function,
                kernel_metadata,
                launch_metadata,
                launch_enter_hook,
                launch_exit_hook,
                *args,
            ):
                if launch_enter_hook is not None:
                    launch_enter_hook(launch_metadata)
                plain = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in args)
                gpu.launches.append(
                    (self, gpu.current, stream, ((gridX, gridY, gridZ), function, kernel_metadata, plain))
                )

        class Loader:
            def get_device_properties(self, device):
                return {"max_shared_mem": 1 << 17, "warpSize": gpu.target.warp_size}

            def load_binary(self, name, binary, shared, device):
                gpu.loaded += 1
                return None, gpu.loaded, 32, 0, 1024

        class Driver(DriverBase):
            launcher_cls = Launcher

            def __init__(self):
                self.utils = Loader()

            is_active = classmethod(lambda cls: False)
            get_current_target = lambda self: gpu.target  # noqa: E731
            get_current_device = lambda self: gpu.current  # noqa: E731
            get_current_stream = lambda self, device=None: 100 + gpu.current  # noqa: E731
            get_active_torch_device = lambda self: torch.device("cpu")  # noqa: E731
            get_device_interface = lambda self: torch.cpu  # noqa: E731
            map_python_to_cpp_type = lambda self, kind: kind  # noqa: E731
            get_benchmarker = lambda self: None  # noqa: E731

        return Driver()


@contextmanager
def pretended(target=GPUTarget("cuda", 90, 32)):  # noqa: B008
    gpu = GPU(target)
    config = triton.runtime.driver
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_active", gpu.driver())
        patch.setattr(torch.Tensor, "get_device", lambda self: gpu.tensors)
        patch.setattr(torch.cuda, "device", gpu.device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
        patch.setattr(torch.version, "hip", "7.0" if target.backend == "hip" else None)
        patch.setattr(fast, "current_device", lambda: gpu.current)
        patch.setattr(fast, "raw_stream", lambda index: 100 + index)
        patch.setattr(launching, "_bound", {})
        patch.setattr(launching, "_known", {})
        kernel.device_caches.clear()
        yield gpu
        kernel.device_caches.clear()
        gc.collect()


def half(offset=0):
    return torch.empty(64, dtype=torch.float16)[offset:]


integers = st.sampled_from([1, 0, 16, 48, 7, -16, 2**31 - 1, 2**31, 2**40, 2**40 + 1])
tensors = st.builds(
    lambda dtype, offset: torch.empty(64, dtype=dtype)[offset:],
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    st.sampled_from([0, 1, 16]),
)
values = st.tuples(
    tensors,
    st.one_of(tensors, st.none()),
    integers,
    integers,
    st.one_of(st.floats(-2, 2), integers, st.booleans()),
    st.tuples(tensors, integers),
)


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)], ids=["sm90", "gfx942"])
def test_launches_are_those_of_triton(target):
    """Whatever changes from call to call, the compiled kernel, the arguments and the stream are as in kernel[grid]."""
    taken = Counter()
    with pretended(target) as gpu:

        @given(st.lists(values, min_size=2, max_size=4))
        @settings(max_examples=40)
        def each(calls):
            for arguments in calls * 2:
                gpu.launches.clear()
                kernel[(3, 2)](*arguments, BLOCK=64, num_warps=1, enable_fp_fusion=True)
                launch(kernel, (3, 2), *arguments, BLOCK=64, num_warps=1)
                (ours, device, stream, mine), (theirs, *_, wanted) = gpu.launches[1], gpu.launches[0]
                assert (ours.code, device, stream) == (theirs.code, 0, 100)
                assert mine[0] == wanted[0] and flat(mine[3]) == flat(wanted[3])
            taken.update(len(each.exact) for each in kernels())

        each()
    assert max(taken) > 1, "the short way was never taken"


def flat(value):
    if isinstance(value, tuple):
        return tuple(map(flat, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def kernels():
    return [each for bound in launching._bound.values() for each in bound._kernels.values()]


def call(offset=0, stride=128, count=5, **options):
    launch(kernel, (1,), half(offset), None, stride, count, 0.5, (half(), 3), BLOCK=64, **options)


def test_steps_do_not_compile():
    """What varies from step to step, an integer that is not specialised and a float, is one key."""
    with pretended() as gpu:
        for count in (1, 2, 16, 1000):
            call(count=count)
        (held,) = kernels()
        assert (len(held.exact), len(held.classes), gpu.loaded) == (1, 1, 1)


def test_a_step_beyond_32_bits_compiles():
    """An integer that is not specialised still has a type."""
    with pretended() as gpu:
        for count in (5, 2**31, 2**31 - 1, 2**40, -(2**31), -(2**31) - 1):
            call(count=count), call(count=count)
        narrow, wide = gpu.launches[0][0].code, gpu.launches[2][0].code
        assert [each[0].code for each in gpu.launches] == [narrow, narrow, wide, wide] * 3
        assert narrow != wide and gpu.loaded == 2


def test_storages_beyond_2_gib_are_apart_on_amd():
    """Triton uses 32-bit offsets for tensors within 2 GiB; the same address in a larger storage must not."""
    with pretended(GPUTarget("hip", "gfx942", 64)) as gpu:
        large = torch.from_numpy(np.zeros(2**31, np.int8))  # never touched, so it takes no memory
        small = torch.empty(64, dtype=torch.int8)
        for tensor in (small, large, small, large):
            launch(kernel, (1,), tensor, None, 1, 1, 0.5, (small, 3), BLOCK=64)
        ours = [each[0] for each in gpu.launches]
        assert ours[0] is ours[2] is not ours[1] is ours[3]


def test_second_device():
    """C46: the tensors' device is current during the launch, and its stream is used, cold and warm."""
    with pretended() as gpu:
        gpu.tensors = 1
        for _ in range(3):
            call()
        assert [each[1:3] for each in gpu.launches] == [(1, 101)] * 3
        assert set(gpu.entered) == {1} and gpu.current == 0
        gpu.tensors = 0
        call()
        assert gpu.launches[-1][1:3] == (0, 100)
        assert gpu.loaded == 2  # a module belongs to a device


def test_no_guard_on_the_current_device():
    with pretended() as gpu:
        call(), call()
        gpu.entered.clear()
        call()
        assert gpu.entered == []


def test_hooks_are_called():
    """A profiler's hook wants the launch's metadata, which only Triton makes."""
    seen = []
    with pretended() as gpu:
        call(), call()
        triton.knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            call()
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(seen.append)
        call()
        assert len(seen) == 1 and seen[0].get()["name"] == "kernel"
        assert len(gpu.launches) == 4


def test_options_pass_through():
    with pretended() as gpu:
        call(launch_pdl=True), call(launch_pdl=True), call()
        assert [each[0].pdl for each in gpu.launches] == [True, True, False]


def test_equal_constexprs_of_other_types_are_apart():
    with pretended():
        for flag in (1, True, 1.0):
            call(FLAG=flag)
        assert len(kernels()) == 3


def test_capture_wants_a_warm_kernel():
    with pretended() as gpu:
        gpu.capturing = True
        with pytest.raises(RuntimeError, match=r"kernel kernel was not compiled .* call warmup"):
            call()
        gpu.capturing = False
        call(stride=128)
        gpu.capturing = True
        call(stride=160)  # another multiple of 16: the same code
        with pytest.raises(RuntimeError, match="capture"):
            call(stride=1)
        assert len(gpu.launches) == 2


def test_warmup_is_enough_for_a_capture():
    """Recorded with meta tensors, compiled and loaded for the device, then captured with real ones."""
    with pretended() as gpu:
        target = replace(describe("sm90"), device="cuda:0")
        with recorded(target) as calls:
            meta = torch.empty(64, dtype=torch.float16, device="meta")
            assert target_of(meta) is target
            launch(kernel, (1,), meta, None, 128, 5, 0.5, (meta, 3), BLOCK=64)
        assert not gpu.launches and len(calls) == 1
        warmup(calls, torch.device("cuda", 0))
        assert (gpu.loaded, gpu.launches) == (1, [])
        gpu.capturing = True
        call()
        assert (gpu.loaded, len(gpu.launches)) == (1, 1)


def test_a_recording_is_its_threads_own():
    """What another thread launches meanwhile runs; what it keeps then launches later on."""
    recording, done, calls = threading.Event(), threading.Event(), []

    def warm():
        with recorded(describe("gfx942")) as found:
            recording.set()
            assert done.wait(60)
            call(stride=48)
            calls.extend(found)

    with pretended() as gpu:
        ours = replace(describe("sm90"), device="cuda:0")
        launching._targets[0] = ours
        typed = Typed(launching.bound(kernel, {"BLOCK": 64}))
        arguments = half(), None, 128, 5, 0.5, (half(), 3)
        thread = threading.Thread(target=warm)
        thread.start()
        assert recording.wait(60)
        try:
            call(), typed((1,), *arguments)
            with launching.reached([half()]):
                assert target_of(half()) is ours
            with recorded(ours) as inner:
                call()
            call()
        finally:
            done.set()
            thread.join()
            del launching._targets[0]
        assert len(gpu.launches) == 3 and len(inner) == 1
        assert [each.arguments[2] for each in calls] == [48]
        call(), typed((1,), *arguments)
        assert len(gpu.launches) == 5 and not launching._recordings


def test_nothing_is_kept_of_a_recording():
    """Whether a launch was first met before, in or after one, by name or kept, it then runs, and in it does not."""
    meta = torch.empty(64, dtype=torch.float16, device="meta")
    with pretended() as gpu:
        typed = Typed(launching.bound(kernel, {"BLOCK": 64}))
        rest = None, 128, 5, 0.5, (half(), 3)
        for turn in range(3):
            with recorded(describe("sm90")) as calls, recorded(describe("sm90")) as inner:
                typed((1,), meta, *rest), launch(kernel, (1,), meta, *rest, BLOCK=64)
                launch(kernel, (1,), meta, *rest[:-1], 7, BLOCK=64)
            assert (len(calls), len(inner), len(gpu.launches)) == (0, 3, 3 * turn)
            typed((1,), half(), *rest), launch(kernel, (1,), half(), *rest, BLOCK=64)
            launch(kernel, (1,), half(), *rest[:-1], 7, BLOCK=64)
        with pytest.raises(KeyError), recorded(describe("sm90")):
            raise KeyError
        typed((1,), half(), *rest)
        assert len(gpu.launches) == 10


def test_two_threads_share_what_is_compiled(monkeypatch):
    """Both find one `Bound` and one `Kernel` that a warm-up fills, whoever makes it last."""
    made, kinds = {}, (Bound, fast.Kernel)

    def meanwhile(kind, again):
        def make(*arguments):
            if kind not in made:
                made[kind] = None
                made[kind] = again(*arguments)  # another thread was faster
            return kind(*arguments)

        return make

    with pretended():
        monkeypatch.setattr(launching, "Bound", meanwhile(kinds[0], launching.bound))
        mine = launching.bound(kernel, {"BLOCK": 64})
        arguments = half(), None, 128, 5, 0.5, half()
        monkeypatch.setattr(launching, "Kernel", meanwhile(kinds[1], lambda *_: mine.kernel_of(arguments)))
        assert mine.kernel_of(arguments) is made[kinds[1]] and mine is made[kinds[0]]


@pytest.mark.parametrize("breaks", ["names", "attribute"])
def test_another_triton_launches_by_itself(monkeypatch, breaks):
    """Where Triton's private side does not look as it is known, its public one does all the work."""
    if breaks == "names":
        monkeypatch.setattr(fast, "LEADING", ("x", "y", "z", "stream", "function"))
    with pretended() as gpu:
        if breaks == "attribute":
            monkeypatch.setattr(fast, "compiled", lambda made: None)
        for _ in range(3):
            call()
        assert len(gpu.launches) == 3 and not kernels()[0].exact


def test_the_memory_of_integers_is_bounded(monkeypatch):
    monkeypatch.setattr(fast, "LIMIT", 8)
    with pretended() as gpu:
        for stride in range(16, 16 * 40, 16):
            call(stride=stride)
        assert len(kernels()[0].exact) <= 8 and gpu.loaded == 1


def test_a_bound_kernel_launches_the_same():
    with pretended() as gpu:
        bound = Bound(kernel, {"BLOCK": 64})
        call(), bound((1,), half(), None, 128, 5, 0.5, (half(), 3))
        first, second = gpu.launches
        assert first[0].code == second[0].code and first[3][0] == second[3][0]


def test_tensors_on_no_device_are_refused(monkeypatch):
    monkeypatch.delenv("PORTABLE_DEVICE", raising=False)
    with pytest.raises(ValueError, match=r"the tensors are on the CPU .* PORTABLE_DEVICE=emulated:gfx942"):
        call()
