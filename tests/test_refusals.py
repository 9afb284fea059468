"""What was once accepted and silently wrong: each is refused by name, or right."""

import dataclasses

import numpy as np
import pytest
import torch

from portable import KV, Attention, Batch, Layer, LayerTensors, Size, UnsupportedError
from portable.local_steps import local_host
from portable.validate import validate
from portable.variants import cross, draft, local, shard, tree, trim, verify


def make(**kwargs):
    layer = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32, **kwargs)
    return Attention(layer, page_size=4, device="cpu"), KV(torch.randn(16, 4, 1, 8), torch.randn(16, 4, 1, 8))


def int32(*rows):
    return torch.tensor(rows, dtype=torch.int32)


STEP = Batch.from_lens([1], [12], block_table=[[0, 1, 2]], page_size=4)
SHARD = shard(Batch.from_lens([1], [12]), 2, 0, int32([4, 5]), 4)
CROSS = cross(STEP, np.array([10]), int32([5, 6, 7]))


@pytest.mark.parametrize("kwargs", [dict(window=3), dict(alibi=True), dict(chunk=4)])
@pytest.mark.parametrize("step", [SHARD, CROSS], ids=["shard", "cross"])
def test_masks_by_position_need_whole_sequences(kwargs, step):
    with pytest.raises(UnsupportedError, match="not a whole sequence"):
        make(**kwargs)[0].plan(step)


def test_chunks_of_a_trimmed_step_would_start_elsewhere():
    trimmed = trim(Batch.from_lens([1], [13], block_table=[[0, 1, 2, 3]], page_size=4), left=7)
    with pytest.raises(UnsupportedError, match=r"layer.chunk is 8, so plan\(\) takes local itself: give it the plain"):
        make(chunk=8)[0].plan(trimmed)
    with pytest.raises(UnsupportedError, match="take local first"):
        local(trimmed, 8)
    for derived in (CROSS, SHARD):
        with pytest.raises(UnsupportedError, match="take local first"):
            local(derived, 4)


@pytest.mark.parametrize("step", [STEP, Batch.from_lens([5], [12], block_table=[[0, 1, 2]], page_size=4)])
def test_local_is_taken_once(step):
    attn, once = make(chunk=8)[0], local(step, 8)
    for padded in ({}, dict(pad_to=Size(1, 8))):
        with pytest.raises(UnsupportedError, match=r"layer.chunk is 8, so plan\(\) takes local itself"):
            attn.plan(once, **padded)
    for again in (once, local_host(step, 8)):
        with pytest.raises(UnsupportedError, match="a local one already, of chunk 8: give local the plain batch"):
            local(again, 4)


@pytest.mark.parametrize("derived", [CROSS, SHARD, trim(STEP, 3)], ids=["cross", "shard", "trimmed"])
def test_nothing_is_drafted_behind_a_derived_step(derived):
    for grow in (lambda: draft(derived, 0), lambda: verify(derived, 2)):
        with pytest.raises(UnsupportedError, match="derive from the draft step"):
            grow()


def test_only_self_attention_is_trimmed():
    with pytest.raises(UnsupportedError, match="no window behind them"):
        trim(CROSS, 3)


def test_a_negative_live_page_is_named_and_one_behind_is_free():
    with pytest.raises(ValueError, match=r"row 1: block_table\[1, 1\] is -1; a live page id is 0 or more"):
        Batch.from_lens([1, 1], [4, 7], block_table=[[2, -1], [3, -1]], page_size=4)
    inside = Batch.from_lens([1, 1], [4, 7], block_table=[[2, -1], [-1, 3]], page_size=4)
    with pytest.raises(ValueError, match=r"row 1: block_table\[1, 0\] is -1"):
        validate(inside)
    for backend in ("torch", "reference"):
        attn, cache = make()
        attn = Attention(attn.layer, page_size=4, device="cpu", backend=backend)
        with pytest.raises(ValueError, match="row 1: block_table holds page -1; the cache has pages 0 to 15"):
            attn.run(torch.randn(2, 2, 8), cache, attn.plan(inside))
    validate(Batch.from_lens([1], [4], block_table=[[2, -1]], page_size=4))


def test_a_host_table_for_another_device_is_looked_at_before_it_leaves(unpinned):
    with pytest.raises(ValueError, match=r"row 1: block_table\[1, 0\] is -1; a live page id is 0 or more"):
        Batch.from_lens([1, 1], [4, 7], block_table=[[2, -1], [-1, 3]], page_size=4, device="meta")
    assert not unpinned


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_pages_and_slots_past_the_cache_are_named(backend):
    attn, cache = make()
    attn = Attention(attn.layer, page_size=4, device="cpu", backend=backend)
    plan = attn.plan(Batch.from_lens([1], [1], block_table=[[99]], page_size=4))
    with pytest.raises(ValueError, match="slot_mapping holds 396; the cache has 64"):
        attn.write(torch.randn(1, 1, 8), torch.randn(1, 1, 8), cache, plan)
    with pytest.raises(ValueError, match="block_table"):
        attn.run(torch.randn(1, 2, 8), cache, plan)


def test_a_token_table_without_a_slot_or_a_row_is_named():
    tokens = torch.tensor([[8, 9, 10, -1]])
    with pytest.raises(ValueError, match="row 0: req_to_token holds slot -1"):
        Batch.from_token_table(tokens, torch.tensor([0]), [1], [4], page_size=4)
    with pytest.raises(ValueError, match="row 0: rows is 5; req_to_token has rows 0 to 0"):
        Batch.from_token_table(tokens, torch.tensor([5]), [1], [3], page_size=4)


@pytest.mark.parametrize("causal", [[False], None, 1, "no"])
def test_causal_is_a_bool_or_a_tensor(causal):
    with pytest.raises(ValueError, match="causal is"):
        Batch.from_lens([1], [4], causal=causal)
    assert Batch.from_lens([1], [4], causal=np.bool_(False)).causal is False


def test_contiguous_keys_need_exact_lengths():
    bounds = Batch.from_tensors(
        torch.tensor([0, 2, 4], dtype=torch.int32),
        torch.tensor([2, 2], dtype=torch.int32),
        None,
        None,
        page_size=4,
        host_seq_lens=[3, 2],
        exact=False,
    )
    with pytest.raises(ValueError, match="contiguous K/V needs exact lengths"):
        make()[0].plan(bounds)


def test_scales_are_checked_where_they_are_written():
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    attn = Attention(layer, page_size=4, device="cpu")
    pages = torch.zeros(4, 4, 2, 8).to(torch.float8_e4m3fn)
    plan = attn.plan(Batch.from_lens([1], [1], block_table=[[0]], page_size=4))
    with pytest.raises(ValueError, match=r"tensors.k_scale has 3 elements"):
        attn.write(*torch.randn(2, 1, 2, 8), (pages, pages.clone()), plan, LayerTensors(k_scale=torch.ones(3)))


def test_no_graph_of_autograd_grows_through_the_cache():
    attn, cache = make()
    plan = attn.plan(Batch.from_lens([1], [1], block_table=[[0]], page_size=4))
    k = torch.randn(1, 1, 8, requires_grad=True)
    attn.write(k, k, cache, plan)
    out = attn.run(torch.randn(1, 2, 8, requires_grad=True), cache, plan, k=k, v=k).out
    assert cache.k.grad_fn is None and not cache.k.requires_grad and out.grad_fn is None


def test_arguments_of_another_kind_are_named():
    attn, cache = make()
    plan = attn.plan(STEP)
    q = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match="k is None; k and v come together"):
        attn.run(q, cache, plan, v=torch.randn(1, 1, 8))
    with pytest.raises(ValueError, match="cache is a Tensor"):
        attn.run(q, cache.k, plan)
    with pytest.raises(ValueError, match="block_table is ragged"):
        Batch.from_lens([1, 1], [1, 5], block_table=[[1], [2, 3]], page_size=4)
    parents = torch.tensor([[-1]])
    with pytest.raises(ValueError, match=r"slots has dtype torch\.float32"):
        tree(STEP, parents, torch.tensor([[3.0]]), 1)
    with pytest.raises(ValueError, match="row 0: slots holds -1"):
        tree(STEP, parents, torch.tensor([[-1]]), 1)
    assert dataclasses.is_dataclass(tree(STEP, parents, torch.tensor([[60]]), 1))
