"""The stand-in for captured graphs records the launches of Triton kernels on an emulated device."""

from __future__ import annotations

import gc

import pytest
import torch
from recording import RULES, CaptureError, Recorder

triton = pytest.importorskip("triton")

from portable import KV, Layer, LayerTensors, detect  # noqa: E402
from portable.backends.triton.cache import KERNELS  # noqa: E402
from portable.kernel import Op  # noqa: E402

LAYER = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
WRITE = next(kernel for kernel in KERNELS if kernel.caps.op is Op.CACHE_WRITE)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")


def compiled():
    """What Triton holds of the kernel's compiled variants."""
    caches = WRITE.run.__globals__["_write"].device_caches
    return next(iter(caches.values()))[0]


def test_launches_are_replayed_between_torch_operations():
    recorder = Recorder(RULES["amd"], detect("emulated:gfx942"))
    kv, slots = KV(torch.zeros(3, 4, 1, 16), torch.zeros(3, 4, 1, 16)), torch.tensor([1, 6])
    k = torch.randn(2, 1, 16)

    def step():
        new = k * 2
        WRITE.run(new, new + 1, kv, slots, LAYER, LayerTensors())
        return kv.k.flatten(0, 1).index_select(0, slots.clamp(min=0))

    graph = recorder.CUDAGraph()
    step()
    compiled().clear()
    with pytest.raises(CaptureError, match="call warmup"), recorder.graph(graph):
        step()
    step()
    kv.k.zero_(), kv.v.zero_()
    graph = recorder.CUDAGraph()
    with recorder.graph(graph):
        read = step()
    assert not kv.k.any() and not kv.v.any()
    for places in ([1, 6], [11, 0], [-1, 3]):
        slots.copy_(torch.tensor(places))
        kv.k.zero_(), kv.v.zero_()
        graph.replay()
        for row, slot in enumerate(places):
            if slot >= 0:
                assert torch.equal(kv.k.flatten(0, 1)[slot], k[row] * 2) and torch.equal(read[row], k[row] * 2)
                assert torch.equal(kv.v.flatten(0, 1)[slot], k[row] * 2 + 1)
        assert int(kv.k.flatten(2).any(-1).sum()) == sum(slot >= 0 for slot in places)


def test_a_compiled_kernel_that_is_dropped_loses_the_capture():
    recorder = Recorder(RULES["amd"], detect("emulated:gfx942"))
    kv, slots, k = KV(torch.zeros(3, 4, 1, 16), torch.zeros(3, 4, 1, 16)), torch.tensor([1, 6]), torch.randn(2, 1, 16)
    WRITE.run(k, k, kv, slots, LAYER, LayerTensors())
    with pytest.raises(CaptureError, match="unloaded"), recorder.graph(recorder.CUDAGraph()):
        compiled().clear()
        gc.collect()
