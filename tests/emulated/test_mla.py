"""MLA on an emulated device through the public API: decodes, a prefill on a context in two chunks, a first chunk."""

from __future__ import annotations

import pytest
import torch

from portable import Batch, Layer, MlaAttention, MlaWeights, allocate_cache
from portable.kernel import AttnOut
from portable.platform.emulated.driver import DEVICES

pytest.importorskip("triton")


def step(backend: str) -> tuple[AttnOut, set[str]]:
    torch.manual_seed(0)
    layer = Layer.mla(
        num_heads=2, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, dtype=torch.bfloat16
    )
    attn = MlaAttention(layer, page_size=16, workspace=16, backend=backend)
    cache = allocate_cache(layer, 12, 16, device="cpu")
    cache.k.copy_(torch.randn(cache.k.shape))
    table = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    plan = attn.plan(Batch.from_lens([1, 9, 5], [33, 29, 5], block_table=table, page_size=16))
    assert len(plan.segments.prefills[0].context) == 2
    weights = MlaWeights.from_kv_b_proj(torch.randn(2 * 64, 64) / 8, layer)
    latents, q = torch.randn(15, 96).bfloat16(), torch.randn(15, 2, 64).bfloat16()
    kv_c, k_pe = latents.split([64, 32], -1)
    attn.write(kv_c, k_pe, cache, plan)
    found = attn.run(*q.split([32, 32], -1), kv_c, k_pe, cache, plan, weights, return_lse=True)
    kernels = {plan.write, *(s.kernel for s in plan.segments.decodes)}
    for prefill in plan.segments.prefills:
        kernels |= {
            prefill.new.kernel,
            *(kernel for c in prefill.context for kernel in (c.gather.kernel, c.attend.kernel)),
        }
    return found, {kernel.name for kernel in kernels if kernel}


@pytest.mark.parametrize("arch", DEVICES)
def test_a_step_is_what_the_reference_says(arch, monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", f"emulated:{arch}")
    (got, kernels), (want, _) = step("triton"), step("reference")
    assert {"triton.cache_write", "triton.cache_gather", "triton.mla_decode", "triton.prefill"} == kernels
    torch.testing.assert_close(got.out, want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-3, rtol=2e-3)
