"""On a machine with a GPU: emulated launches and the GPU's own, in turn, each run where they should."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from portable.platform.emulated import activate  # noqa: E402


@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def run(device, factor):
    x = torch.arange(100, dtype=torch.float32, device=device)
    y = torch.zeros_like(x)
    scale[(2,)](x, y, 100, factor, BLOCK=64)
    assert torch.equal(y, x * factor)


@pytest.mark.device
def test_emulated_and_real_launches_take_turns():
    run("cuda", 2.0)
    archs = []
    for arch in ("gfx942", "gfx950", "gfx942"):
        with activate(arch) as device:
            run("cpu", 3.0)
            archs.append(device.launches[-1].arch)
        run("cuda", 4.0)
    assert archs == ["gfx942", "gfx950", "gfx942"]
