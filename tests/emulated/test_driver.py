"""Triton's active driver: what is active, for whom, and what it records."""

import subprocess
import sys
import threading

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from portable.platform.emulated import activate  # noqa: E402
from portable.platform.emulated.machine import ExecutionError  # noqa: E402
from portable.platform.emulated.memory import MemoryFault  # noqa: E402


@triton.jit
def fill(out, value, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, value, mask=at < n)


@triton.jit
def gather(addresses, out, block: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(addresses + row).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, block)
    tl.store(out + row * block + at, tl.load(source + at))


@triton.jit
def pair(parts, out, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(parts[0] + at) * parts[1])


@triton.jit
def spin(flag, out):
    while tl.atomic_add(flag, 0) == 0:
        pass
    tl.store(out, 1)


@triton.jit
def product(a, b, out, k, size: tl.constexpr, step: tl.constexpr):
    """Keeps 2 * size * step floats of LDS a stage."""
    at, inner = tl.arange(0, size), tl.arange(0, step)
    total = tl.zeros((size, size), tl.float32)
    for first in range(0, k, step):
        left = tl.load(a + at[:, None] * k + (first + inner)[None, :])
        total += tl.dot(left, tl.load(b + (first + inner)[:, None] * size + at[None, :]))
    tl.store(out + at[:, None] * size + at[None, :], total)


def filled(n=100, value=3.0):
    out = torch.zeros(n)
    fill[(triton.cdiv(n, 64),)](out, value, n, block=64)
    assert (out == value).all()


def test_each_architecture_runs_its_own_code_within_one_process():
    seen = []
    for arch in ("gfx942", "gfx950", "gfx942"):
        with activate(arch) as emulation:
            filled()
        (launch,) = emulation.launches
        seen.append((launch.arch, launch.name, launch.grid))
        assert launch.instructions == emulation.instructions > 0
    assert seen == [(arch, "fill", (2, 1, 1)) for arch in ("gfx942", "gfx950", "gfx942")]


def test_the_driver_is_restored_even_after_an_error():
    from triton.runtime import driver

    before = driver._active
    with pytest.raises(ZeroDivisionError), activate("gfx942"):
        assert driver.active.get_current_target().arch == "gfx942"
        raise ZeroDivisionError
    assert driver._active is before
    with activate("gfx950"):
        filled()


def test_device_indices_are_no_gpus():
    from triton.runtime import driver

    found = []
    for arch in ("gfx942", "gfx950"):
        with activate(arch):
            found.append(driver.active.get_current_device())
            with pytest.raises(ValueError, match="device 0 is not the emulated"):
                driver.active.set_current_device(0)
    assert len(set(found)) == 2
    assert min(found) > 64


def test_nested_use_is_refused():
    with activate("gfx942") as emulation:
        nested = activate("gfx950")
        with pytest.raises(RuntimeError, match="an emulated gfx942 is active already, in this thread"):
            nested.__enter__()
        filled()
    assert len(emulation.launches) == 1


def test_other_threads_are_refused():
    errors = []

    def attempt(call):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    def other():
        with activate("gfx950"):
            pass

    with activate("gfx942"):
        for call in (filled, other):
            thread = threading.Thread(target=attempt, args=(call,))
            thread.start()
            thread.join()
        filled()
    assert "the emulated gfx942 was activated in another thread" in errors[0]
    assert "an emulated gfx942 is active already, in another thread" in errors[1]


def test_unknown_architectures_are_refused():
    with pytest.raises(ValueError, match="arch 'gfx90a' is not one of gfx942, gfx950"), activate("gfx90a"):
        pass


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_tensors_behind_addresses_must_be_declared(arch):
    rows = [torch.randn(64) for _ in range(3)]
    addresses = torch.tensor([row.data_ptr() for row in rows])
    out = torch.zeros(3, 64)
    with activate(arch) as emulation:
        with pytest.raises(MemoryFault, match="out-of-bounds read"):
            gather[(3,)](addresses, out, block=64)
        emulation.reachable.extend(rows)
        gather[(3,)](addresses, out, block=64)
    assert torch.equal(out, torch.stack(rows))


def test_views_are_bounded_by_their_storage():
    base = torch.zeros(128)
    with activate("gfx942"):
        fill[(1,)](base[32:], 2.0, 64, block=64)
        with pytest.raises(MemoryFault, match="'out'"):
            fill[(1,)](base[96:], 2.0, 64, block=64)
    assert base[32:96].eq(2).all()
    assert base[:32].eq(0).all()


def test_tuples_of_arguments_are_flattened():
    x, out = torch.randn(64), torch.zeros(64)
    with activate("gfx950"):
        pair[(1,)]((x, 2.5), out, block=64)
    assert torch.equal(out, x * 2.5)


def test_arguments_that_are_not_on_the_cpu_are_refused():
    message = "argument out is on meta; an emulated device takes CPU tensors"
    with activate("gfx942"), pytest.raises(ValueError, match=message):
        fill[(1,)](torch.empty(64, device="meta"), 1.0, 64, block=64)


def test_code_for_another_architecture_is_refused():
    out = torch.zeros(64)
    with activate("gfx942"):
        compiled = fill.warmup(out, 1.0, 64, block=64, grid=(1,))
    with activate("gfx950"), pytest.raises(RuntimeError, match="fill was compiled for gfx942, and the emulated device"):
        compiled[(1, 1, 1)](out, 1.0, 64, 64)
    with pytest.raises((RuntimeError, AttributeError)):  # whatever the machine's own driver says of it
        compiled[(1, 1, 1)](out, 1.0, 64, 64)
    with activate("gfx942"):
        compiled[(1, 1, 1)](out, 1.0, 64, 64)
    assert (out == 1).all()


def test_an_empty_grid_launches_nothing():
    with activate("gfx942") as emulation:
        fill[(0,)](torch.zeros(1), 1.0, 1, block=64)
    assert emulation.launches == []


def test_a_wait_for_another_workgroup_is_refused():
    flag, out = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    with activate("gfx942", budget=3000), pytest.raises(ExecutionError, match=r"spin.*steps without an end"):
        spin[(1,)](flag, out)
    message = r"^spin, line \d+ .*test_driver.py.*waits without end"
    with activate("gfx942"), pytest.raises(ExecutionError, match=message):
        spin[(1,)](flag, out)


def test_lds_beyond_the_architecture_is_an_out_of_resources_error():
    from triton.runtime.errors import OutOfResources

    a, b, out = torch.zeros(128, 512), torch.zeros(512, 128), torch.zeros(128, 128)
    for arch, stages, limit in (("gfx942", 2, 65536), ("gfx950", 3, 163840)):
        message = rf"Required: \d+, Hardware limit: {limit}"
        with activate(arch) as emulation, pytest.raises(OutOfResources, match=message):
            product[(1,)](a, b, out, 512, size=128, step=128, num_stages=stages)
        assert not emulation.launches


def test_autotuning_counts_instructions():
    tuned = triton.autotune([triton.Config({"block": 64}), triton.Config({"block": 1024})], key=["n"])(fill)
    out = torch.zeros(100)
    with activate("gfx942") as emulation:
        tuned[lambda meta: (triton.cdiv(100, meta["block"]),)](out, 1.0, 100)
        least = min(emulation.launches, key=lambda launch: launch.instructions)
        assert emulation.launches[-1] == least
    assert (out == 1).all()


def test_the_package_is_imported_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import portable.platform.emulated, portable.platform.emulated.machine, portable.platform.emulated.driver
"""
    subprocess.run([sys.executable, "-c", code], check=True)
