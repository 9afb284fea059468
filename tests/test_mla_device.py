"""Whole MLA steps, of DeepSeek's widths on a GPU and small ones elsewhere: right, batch invariant, within memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mla_cases import mla_layer

import portable
from portable import Batch, Layer, LayerTensors, MlaAttention, MlaWeights
from portable.kernel import AttnOut

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.device))


def layer_on(device: str, **more: object) -> Layer:
    return mla_layer(torch.float32, **more) if device == "cpu" else Layer.mla(num_heads=16, **more)


@dataclass
class Cache:
    """A layer's pages, weights, and the histories of some requests there, the last tokens of which are the new ones."""

    layer: Layer
    attn: MlaAttention
    rows: list[tuple[int, int]]  # new tokens and context of each request
    seed: int = 0

    def __post_init__(self) -> None:
        layer, page_size, device = self.layer, self.attn.page_size, self.attn.device
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        counts = [-(-(new + context) // page_size) for new, context in self.rows]
        order = np.random.default_rng(self.seed).permutation(sum(counts) + 1).astype(np.int32)
        self.table = np.zeros((len(counts), max(counts)), np.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = order[sum(counts[:row]) :][:count]
        self.pages = normal(len(order), page_size, layer.latent_dim).to(layer.kv_dtype)
        self.starts, tokens = np.cumsum([0, *(new for new, _ in self.rows)]), sum(new for new, _ in self.rows)
        self.q = normal(tokens, layer.num_heads, layer.qk_head_dim).to(layer.dtype)
        self.new = normal(tokens, layer.latent_dim).to(layer.dtype)
        projection = normal(layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim), layer.kv_lora_rank)
        self.weights = MlaWeights.from_kv_b_proj(projection / layer.kv_lora_rank**0.5, layer)
        fp8 = layer.kv_dtype.itemsize == 1
        self.tensors = LayerTensors(k_scale=torch.full((), 0.5, device=device) if fp8 else None)

    def tokens_of(self, rows: list[int]) -> list[int]:
        return [token for row in rows for token in range(self.starts[row], self.starts[row + 1])]

    def run(self, attn: MlaAttention, rows: list[int] | None = None) -> AttnOut:
        rows, layer = [*range(len(self.rows))] if rows is None else rows, self.layer
        new, context = zip(*(self.rows[row] for row in rows), strict=True)
        lens, tokens = [n + c for n, c in zip(new, context, strict=True)], self.tokens_of(rows)
        batch = Batch.from_lens(
            new, lens, block_table=self.table[rows], page_size=attn.page_size, device=self.attn.device
        )
        plan = attn.plan(batch)
        kv_c, k_pe = self.new[tokens].split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
        q_nope, q_pe = self.q[tokens].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        attn.write(kv_c, k_pe, self.pages, plan, self.tensors)
        return attn.run(
            q_nope, q_pe, kv_c, k_pe, self.pages, plan, self.weights, tensors=self.tensors, return_lse=True
        )  # fmt: skip


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_random_steps_equal_the_reference(device, page_size, fp8):
    draw = random.Random(page_size)
    flavour = portable.detect(device).fp8
    layer = layer_on(
        device, kv_dtype=getattr(torch, f"float8_{flavour}" if flavour else "float8_e4m3fn") if fp8 else None
    )
    limits = {"page_size": page_size, "device": device, "workspace": 192, "max_reqs": 32}
    attn, oracle = MlaAttention(layer, **limits), MlaAttention(layer, **limits, backend="reference")
    for seed in range(2 if device == "cpu" else 6):
        rows = [
            (draw.choice((0, 1, 1, 4, 8, 9, 70)), draw.choice((0, 1, 63, 64, 500))) for _ in range(draw.randint(2, 9))
        ]
        cache = Cache(layer, attn, [*rows, (1, 65)], seed)
        found, right = cache.run(attn), cache.run(oracle)
        size = right.out.float().abs().max()
        assert (found.out.float() - right.out.float()).abs().max() < 2e-2 * size
        torch.testing.assert_close(found.lse, right.lse, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_the_bits_of_every_batch(device):
    layer = layer_on(device, batch_invariant=True)
    attn = MlaAttention(layer, page_size=64, device=device, workspace=256)
    rows = [(1, 700), (1, 5), (4, 90), (8, 33), (20, 600), (100, 50), (33, 0), (1, 1500), (300, 900)]
    cache = Cache(layer, attn, rows)
    whole = cache.run(attn)
    for order in (*([row] for row in range(len(rows))), [*range(len(rows))][::-1], [4, 8, 0], [1, 2, 7, 3]):
        found, tokens = cache.run(attn, order), cache.tokens_of(order)
        assert torch.equal(found.out, whole.out[tokens]) and torch.equal(found.lse, whole.lse[:, tokens]), order


@pytest.mark.device
def test_contexts_take_no_more_memory_than_the_workspace():
    """Beside it a chunk's own output; what a call allocates at its most is the same for 16k and for 128k tokens."""
    layer, peaks = Layer.mla(num_heads=16), []
    attn = MlaAttention(layer, page_size=64, device="cuda", max_seq_len=1 << 18, workspace=8192)
    for context in (16384, 131072):
        cache = Cache(layer, attn, [(512, context)])
        cache.run(attn)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache.run(attn)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del cache
    assert peaks[1] < 1.01 * peaks[0] and attn.workspace_bytes() < peaks[1] < 1.3 * attn.workspace_bytes()
