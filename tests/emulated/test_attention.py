"""The whole path on an emulated device: `PORTABLE_DEVICE` alone makes Triton's AMD code serve a step."""

from __future__ import annotations

import pytest
import torch

from portable import Attention, Batch, Layer, allocate_cache, detect
from portable.kernel import AttnOut
from portable.platform.emulated.driver import DEVICES

pytest.importorskip("triton")


def step(backend: str) -> AttnOut:
    """A decode and an extend of two requests, with new tokens written first."""
    torch.manual_seed(0)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    attn = Attention(layer, page_size=16, backend=backend)
    cache = allocate_cache(layer, 16, 16, device="cpu")
    for pages in cache:
        assert pages is not None
        pages.copy_(torch.randn(pages.shape))
    plan = attn.plan(Batch.from_lens([1, 5], [33, 21], block_table=[[3, 4, 5], [6, 7, 8]], page_size=16))
    q, k, v = (torch.randn(6, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    attn.write(k, v, cache, plan)
    return attn.run(q, cache, plan, k=k, v=v, return_lse=True)


@pytest.mark.parametrize("arch", DEVICES)
def test_a_step_is_what_the_reference_says(arch, monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", f"emulated:{arch}")
    target = detect()
    assert (target.arch, target.emulated, target.device) == (arch, True, "cpu")
    got, want = step("triton"), step("reference")
    torch.testing.assert_close(got.out, want.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)
