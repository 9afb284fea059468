"""The whole path on an emulated device: `PORTABLE_DEVICE` alone makes Triton's AMD code serve a step."""

from __future__ import annotations

import pytest
import torch

from portable import Attention, Batch, Layer, MlaAttention, allocate_cache, copies, detect
from portable.cache import allocate_states
from portable.kernel import KV, AttnOut
from portable.layer import LayerTensors
from portable.mamba_run import Mamba
from portable.platform.emulated.driver import DEVICES
from portable.states import SsmTensors

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


def test_any_strides_of_what_a_caller_gives(monkeypatch):
    """Queries, new tokens, results, sinks and scales that are not side by side; the kernels read and write rows."""
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    layer = Layer.gqa(
        num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fnuz, sinks=True
    )
    attn = Attention(layer, page_size=4, backend="triton")
    plan = attn.plan(Batch.from_lens([1, 3], [9, 3], block_table=[[3, 4, 5], [6, 0, 0]], page_size=4))
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, heads, 16).bfloat16() for heads in (4, 2, 2))
    sinks, scales, pages = torch.randn(4, 3), torch.rand(2, 2) + 0.5, torch.randn(2, 8, 4, 2, 16)

    def columns(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(1, 2).contiguous().transpose(1, 2)

    found = []
    for apart in (False, True):
        cache = KV(*(each.to(layer.kv_dtype) for each in pages))
        given = LayerTensors(sinks[:, 1], k_scale=scales[:, 1], v_scale=scales[:, 0])
        rows, new, out = q, KV(k, v), torch.empty(4, 4, 16).bfloat16()
        if apart:
            rows, new, out = columns(q), KV(columns(k), columns(v)), columns(out)
            given = given._replace(k_scale=given.k_scale[None], v_scale=given.v_scale[:, None])
        else:
            given = LayerTensors(*(each if each is None else each.contiguous() for each in given))
        attn.write(*new, cache, plan, given)
        attn.run(rows, cache, plan, k=new.k, v=new.v, tensors=given, out=out)
        found.append((out, *(each.view(torch.uint8) for each in cache)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_pairs_of_pages_in_any_strides(monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    copies._kernels.cache_clear()
    monkeypatch.setattr(copies, "detect", lambda _: detect())
    layer = Layer.gqa(num_heads=2, head_dim=16, dtype=torch.bfloat16)
    pool = KV(*torch.randn(2, 8, 4, 2, 16).bfloat16())
    want = [pages.clone() for pages in pool]
    for pages in want:
        pages[5:] = pages[1:4]
    try:
        assert copies._kernels(pool.k.device, layer)
        copies.copy_pages(layer, pool, pool, torch.stack([torch.arange(1, 4), torch.arange(5, 8)]).T)
    finally:
        copies._kernels.cache_clear()
    assert all(torch.equal(one, other) for one, other in zip(pool, want, strict=True))


def test_recurrent_layers_take_any_strides(monkeypatch):
    """A decode and a prefill, with everything but the pools in columns, or one number for all heads."""
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    layer = Layer.mamba2(num_heads=4, head_dim=8, state_dim=16, chunk=8, dtype=torch.float32)
    mamba = Mamba(layer, backend="triton")
    plan = mamba.plan(Batch.from_lens([1, 5], [4, 5]), [[3], [1]])
    torch.manual_seed(0)
    conv = torch.randn(6, layer.conv_channels), torch.randn(layer.conv_channels, 4), torch.randn(layer.conv_channels)
    scan = [torch.randn(6, *shape) for shape in ((4, 8), (4,), (1, 16), (1, 16), (4, 8))]
    states = allocate_states(layer, 4, "cpu")
    heads = SsmTensors(-torch.rand(1).expand(4), torch.randn(1).expand(4), torch.randn(1).expand(4))

    def columns(rows: torch.Tensor) -> torch.Tensor:
        return rows.mT.contiguous().mT

    found = []
    for apart in (False, True):
        pools = [torch.ones_like(pool) for pool in states]
        x, weight, bias = conv
        new, out, given = scan, torch.empty(6, 4, 8), heads
        if apart:
            x, weight, bias = columns(x), columns(weight), torch.stack([bias, bias], 1)[:, 0]
            new, out = [columns(each) for each in scan], columns(out)
        else:
            given = SsmTensors(*(each.contiguous() for each in heads[:3]))
        convolved = mamba.conv(x, pools[0], plan, weight, bias, out=columns(torch.empty(x.shape)) if apart else None)
        mamba.run(*new[:4], pools[1], plan, given, z=new[4], out=out)
        found.append((convolved, out, *pools))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_latents_of_any_strides_are_written(monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    layer = Layer.mla(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    attn = MlaAttention(layer, page_size=4, backend="triton")
    plan = attn.plan(Batch.from_lens([1, 2], [3, 2], block_table=[[3], [1]], page_size=4))
    pages = allocate_cache(layer, 4, 4, device="cpu").k
    latents = torch.randn(3, 48).bfloat16()
    new, roped = (half.mT.contiguous().mT for half in latents.split([32, 16], 1))
    attn.write(new, roped, pages, plan)
    assert torch.equal(pages.view(16, 48)[[3 * 4 + 2, 4, 5]], latents)
