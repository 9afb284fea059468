"""Gathers whose host knows bounds of the lengths: zeros behind the last key, where no page is looked up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from portable.attention import load_kernels
from portable.conformance.inputs import segment
from portable.kernel import KV, Kernel, Op
from portable.layer import Layer, LayerTensors
from portable.platform.emulated import activate

pytest.importorskip("triton")

GATHERS = [
    kernel
    for kernel in load_kernels()
    if kernel.caps.op is Op.CACHE_GATHER and kernel.caps.provider in ("triton", "hip")
]
SIZE = 4


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("width", [16, 24, 40])
@pytest.mark.parametrize("kernel", GATHERS, ids=lambda kernel: kernel.name)
def test_behind_the_last_key_are_zeros_and_no_page_is_looked_up(kernel: Kernel, width: int, arch: str):
    """A block table as wide as the true lengths ask, of a memory of its own: a look behind it is a fault."""
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=width, dtype=torch.float16)
    k, v = (torch.randn(6, SIZE, 2, width, dtype=torch.float16) for _ in range(2))
    true, bounds, table = [5, 0, 8], [7, 3, 30], torch.tensor([[3, 1], [-1, -1], [0, 5]], dtype=torch.int32)
    with activate(arch):
        part = segment(kernel, [(1, length) for length in bounds], layer, table, SIZE)
        part = replace(part, seq_lens=torch.tensor(true, dtype=torch.int32), exact=False, prepared=None)
        if kernel.prepare is not None:
            part = replace(part, prepared=kernel.prepare(part, layer))
        rows = [torch.full((sum(bounds), 2, width), torch.nan, dtype=torch.float16) for _ in range(2)]
        kernel.run(KV(k, v), part, layer, LayerTensors(), KV(*rows))
    for pages, found in zip((k, v), rows, strict=True):
        want = [pages[table[i].long()].flatten(0, 1)[:length] for i, length in enumerate(true) if length]
        assert torch.equal(found[: sum(true)], torch.cat(want)) and not found[sum(true) :].any()
