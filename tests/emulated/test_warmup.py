"""Warm-up: the steps that follow compile nothing, whatever their lengths, tables and order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from portable import KV, Attention, Batch, Layer, allocate_cache  # noqa: E402
from portable.backends.triton.launch import recorded, warmup  # noqa: E402
from portable.kernel import Op  # noqa: E402

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
PAGE = 16


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")


def attention(**limits):
    return Attention(LAYER, page_size=PAGE, backend="triton", **limits)


def draw(attn, rng, lens):
    """A step of up to 8 requests, decodes and others in any number and order, over a table of any width."""
    queries = rng.choice(lens, size=rng.integers(1, attn.max_reqs + 1))
    queries = queries[np.cumsum(queries) <= attn.max_tokens]
    if rng.random() < 0.7:
        queries = np.sort(queries)
    contexts = rng.integers(0, attn.max_seq_len - queries + 1) * (rng.random(len(queries)) < 0.8)
    width = -(-int((queries + contexts).max()) // PAGE)
    width = rng.integers(width, attn.max_seq_len // PAGE + 1)
    table = rng.integers(0, 40, (len(queries), width)).astype(np.int32)
    return Batch.from_lens(queries, queries + contexts, block_table=table, page_size=PAGE)


def run(attn, batch, cache, rng):
    plan = attn.plan(batch)
    tokens = batch.num_tokens
    q = torch.randn(tokens, 4, 32).bfloat16()
    k, v = torch.randn(2, tokens, 2, 32).bfloat16()
    attn.write(k, v, cache, plan)
    new = {"k": k, "v": v} if rng.random() < 0.5 else {}
    return attn.run(q, cache, plan, return_lse=bool(rng.random() < 0.5), **new)


def test_steps_compile_nothing_after_it():
    attn, rng = attention(max_reqs=8, max_tokens=40, max_seq_len=272), np.random.default_rng(5)
    lens = (1, 3, 16)
    cache = allocate_cache(LAYER, 40, PAGE)
    assert attn.warmup(query_lens=lens) > 10
    assert attn.warmup(query_lens=lens) == 0
    steps = [draw(attn, rng, lens) for _ in range(100)]
    with recorded(attn.target) as calls:
        for batch in steps:
            run(attn, batch, cache, rng)
    assert len(calls) > 300
    assert warmup(calls, torch.device("cpu")) == 0
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs)
    try:
        run(attn, Batch.from_lens([1, 1], [5, 40], block_table=[[1, 0, 0], [2, 3, 4]], page_size=PAGE), cache, rng)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


def test_decodes_alone_take_few_kernels_and_lengths_are_checked():
    attn = attention(max_reqs=4, max_tokens=8, max_seq_len=64)
    with pytest.raises(ValueError, match="query_lens holds 9; lengths are 1 to 8"):
        attn.warmup(query_lens=[9])
    cache = KV(*(each.transpose(1, 2).contiguous().transpose(1, 2) for each in allocate_cache(LAYER, 4, PAGE)))
    made = attn.warmup(query_lens=[1], return_lse=False, cache=cache)
    assert made < 12
    assert attn.choices["decode"].kernel.caps.op is Op.PAGED
