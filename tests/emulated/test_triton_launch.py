"""Launches on emulated devices: by name or by an active one, and the order of programs over XCDs."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from portable.backends.triton.launch import launch, recorded, target_of, warmup  # noqa: E402
from portable.backends.triton.xcd import order, xcd_order  # noqa: E402
from portable.platform import emulated  # noqa: E402
from portable.platform.detect import detect  # noqa: E402


@triton.jit
def ordered(out, items, GROUPS: tl.constexpr, XCDS: tl.constexpr):
    program = tl.program_id(0)
    group, item = xcd_order(program, items, GROUPS, XCDS)
    tl.store(out + 2 * program, group)
    tl.store(out + 2 * program + 1, item)


@triton.jit(do_not_specialize=["count"])
def strided_copy(source, to, stride, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at * stride, at < count, 0.0), at < count)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("groups", "xcds", "items"), [(8, 8, 1), (10, 8, 3), (3, 8, 2), (7, 6, 2), (5, 1, 3), (4, 4, 2)]
)
def test_xcd_order(arch, groups, xcds, items):
    out = torch.full((groups * items, 2), -1, dtype=torch.int32)
    with emulated.activate(arch):
        launch(ordered, (groups * items,), out, items, GROUPS=groups, XCDS=xcds, num_warps=1)
    wanted = [order(program, items, groups, xcds) for program in range(groups * items)]
    assert [tuple(row) for row in out.tolist()] == wanted


def test_devices_and_arguments_that_change(monkeypatch):
    """One launch site, two archs, active or named in the environment; strides, counts and alignments that change."""
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx950")
    source = torch.arange(200.0)

    def check():
        for start, stride, count in ((0, 1, 16), (1, 1, 3), (0, 16, 8), (3, 7, 1)):
            to = torch.full((17,), -1.0)
            launch(strided_copy, (1,), source[start:], to, stride, count, BLOCK=16, num_warps=1)
            assert to.tolist() == [*source[start::stride][:count].tolist(), *[-1.0] * (17 - count)]

    check()
    assert target_of(source).arch == "gfx950"
    with emulated.activate("gfx942") as emulation:
        check()
        assert target_of(source).arch == "gfx942"
    assert [each.arch for each in emulation.launches] == ["gfx942"] * 4


def test_warmup_runs_nothing():
    source, to = torch.ones(16), torch.zeros(16)
    with recorded(detect("emulated:gfx942")) as calls:
        launch(strided_copy, (1,), source, to, 1, 16, BLOCK=16, num_warps=1)
    with emulated.activate("gfx942") as emulation:
        warmup(calls, torch.device("cpu"))
        assert not emulation.launches
    assert len(calls) == 1 and not to.any()
