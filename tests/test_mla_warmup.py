"""MLA's warm-up covers what random steps launch, on described devices: what Triton would compile, not compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from portable import Batch, Layer, LayerTensors, MlaAttention, MlaWeights, allocate_cache, describe
from portable.attention import Kernels
from portable.backends.hip import launch as cpp
from portable.backends.triton import launch, mla_decode_hopper
from portable.select import parse_requested

PAGE, LENS = 16, (1, 3, 70)
DEEPSEEK = Layer.mla(num_heads=16)
SMALL = Layer.mla(
    num_heads=3, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_dtype=torch.float8_e4m3fn
)

# a latent's row is a multiple of 16, and the parts of it are not
ODD = Layer.mla(num_heads=3, kv_lora_rank=72, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=32)


def attention(arch: str, layer: Layer) -> MlaAttention:
    """One whose kernels are chosen, and recorded, for a device that is not here."""
    attn = MlaAttention(layer, page_size=PAGE, device="cpu", max_reqs=8, max_tokens=256, max_seq_len=400, workspace=96)
    target = replace(describe(arch), device="cuda:0", compute_units=132)
    attn._kernels = Kernels(target, layer, parse_requested("triton"))
    return attn


def draw(attn: MlaAttention, rng: np.random.Generator) -> Batch:
    """Up to 8 requests, decodes and others in any number and order, over a table of any width."""
    queries = rng.choice(LENS, size=rng.integers(1, attn.max_reqs + 1))
    queries = queries[np.cumsum(queries) <= attn.max_tokens]
    if rng.random() < 0.7:
        queries = np.sort(queries)
    contexts = rng.integers(0, attn.max_seq_len - queries + 1) * (rng.random(len(queries)) < 0.8)
    width = rng.integers(-(-int((queries + contexts).max()) // PAGE), attn.max_seq_len // PAGE + 1)
    table = rng.integers(0, 40, (len(queries), width)).astype(np.int32)
    return Batch.from_lens(queries, queries + contexts, block_table=table, page_size=PAGE)


def run(attn: MlaAttention, batch: Batch, cache, weights: MlaWeights, rng: np.random.Generator) -> None:
    layer, tokens = attn.layer, batch.num_tokens
    plan = attn.plan(batch)
    q = torch.empty(tokens, layer.num_heads, layer.qk_head_dim, dtype=layer.dtype)
    latents = torch.empty(tokens, layer.latent_dim, dtype=layer.dtype)
    q_nope, q_pe = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    kv_c, k_pe = latents.split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
    if rng.random() < 0.5:
        q_nope, kv_c, k_pe = q_nope.contiguous(), kv_c.contiguous(), k_pe.contiguous()
    tensors = LayerTensors(k_scale=torch.ones(()) if layer.kv_dtype.itemsize == 1 else None)
    attn.write(kv_c, k_pe, cache, plan, tensors)
    attn.run(
        q_nope, q_pe, kv_c, k_pe, cache, plan, weights, tensors=tensors, return_lse=bool(rng.random() < 0.5)
    )  # fmt: skip


def kinds(calls) -> dict[object, str]:
    """What the launches are compiled for, with their kernels' names."""
    return {
        (id(call.kernel), call.kernel.kernel_of(call.arguments).kind(0, call.arguments)): call.kernel.kernel.fn.__name__
        for call in calls
    }


@pytest.mark.parametrize(
    ("arch", "layer"), [("gfx942", SMALL), ("gfx950", DEEPSEEK), ("sm90", DEEPSEEK), ("gfx942", ODD)]
)
def test_no_step_needs_what_the_warm_up_did_not_compile(arch, layer, monkeypatch):
    attn, rng, compiled = attention(arch, layer), np.random.default_rng(5), {}
    monkeypatch.setattr(launch, "warmup", lambda calls, device: compiled.update(kinds(calls)) or len(compiled))
    monkeypatch.setattr(cpp, "warmup", lambda functions, device: len(functions))  # of a captured step's metadata
    assert attn.warmup(query_lens=LENS) > 0
    cache = allocate_cache(layer, 40, PAGE, device="cpu")
    rows = torch.zeros(layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim), layer.kv_lora_rank)
    weights = MlaWeights.from_kv_b_proj(rows, layer)
    steps = [draw(attn, rng) for _ in range(60)]
    with launch.recorded(attn._kernels.target) as calls:
        for batch in steps:
            run(attn, batch, cache, weights, rng)
    needed = kinds(calls)
    assert len(calls) > 500
    assert not {name for key, name in needed.items() if key not in compiled}
    if arch == "sm90" and mla_decode_hopper.device is not None:
        assert {"attend_mla_hopper_kernel", "attend_mla_kernel", "attend_kernel"} <= set(needed.values())


def test_lengths_are_checked_and_nothing_is_compiled_on_a_cpu():
    attn = MlaAttention(DEEPSEEK, page_size=PAGE, device="cpu", max_tokens=8)
    assert attn.warmup(query_lens=[1]) == 0
    with pytest.raises(ValueError, match="query_lens holds 9; lengths are 1 to 8"):
        attn.warmup(query_lens=[9])


@pytest.mark.parametrize("query_lens", [None, (1, 4)])
def test_a_forced_reference_is_warm_for_all_that_it_decodes(query_lens):
    """Drafts on contexts whose lengths the host does not know among them, for which no prefill can be planned."""
    attn = MlaAttention(SMALL, page_size=PAGE, device="cpu", backend="reference", max_reqs=4, max_tokens=32)
    assert attn.warmup(query_lens=query_lens) == 0
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    plan = attn.plan(replace(Batch.from_lens([4, 4], [9, 30], block_table=table, page_size=PAGE), exact=False))
    assert [segment.kernel.name for segment in plan.segments.decodes] == ["reference.mla_decode"]
    assert not plan.segments.prefills
