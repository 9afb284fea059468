"""Variants through Attention: what runs equals the oracle on the keys that each query should see."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masks import expected, seen, slot
from strategies import cases

from portable import KV, Attention, Batch, Layer, LayerTensors, UnsupportedError, merge_states
from portable.backends.reference import attend as oracle
from portable.padding import pad
from portable.variants import cross, local, prefix, shard, tree, trim

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_layer(**kwargs):
    return Layer.gqa(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, **kwargs)


def pool(num_pages, page_size, live=None):
    """Pages of random numbers, NaN where `live` [num_slots] is False."""
    pages = torch.randn(2, num_pages * page_size, KV_HEADS, DIM)
    if live is not None:
        pages[:, ~torch.from_numpy(live)] = torch.nan
    k, v = pages.view(2, num_pages, page_size, KV_HEADS, DIM)
    return KV(k, v)


def right(q, cache, mask, layer, sinks=None):
    """The oracle, a token at a time, over the slots that its row of the mask holds: out [T, H, D], lse [H, T]."""
    k, v = (t.flatten(0, 1) for t in cache)
    parts = [
        oracle(q[t : t + 1], k[m], v[m], scale=layer.scale, causal=False, sinks=sinks, compute=torch.float64)
        for t, m in enumerate(torch.from_numpy(mask.astype(bool)))
    ]
    out = torch.cat([*(p.out for p in parts), torch.empty(0, HEADS, DIM)])
    return out.float(), torch.cat([*(p.lse for p in parts), torch.empty(HEADS, 0)], 1).float()


def agree(found, out, lse):
    torch.testing.assert_close(found.out, out, atol=2e-5, rtol=1e-5)
    if found.lse is not None:
        torch.testing.assert_close(found.lse, lse, atol=2e-5, rtol=1e-5)


@given(case=cases(), pages=st.integers(1, 3), sinks=st.booleans(), lse=st.booleans())
def test_a_layer_with_chunks_runs_the_local_mask(case, pages, sinks, lse):
    chunk = pages * case.page_size
    layer = make_layer(chunk=chunk, sinks=sinks)
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    batch = case.batch()
    mask = expected(batch, case.num_pages * case.page_size, lambda _, q, k: k <= q and k // chunk == q // chunk)
    cache = pool(case.num_pages, case.page_size, mask.any(0))
    q, s = torch.randn(batch.num_tokens, HEADS, DIM), torch.randn(HEADS) if sinks else None
    found = attn.run(q, cache, attn.plan(batch), tensors=LayerTensors(sinks=s), return_lse=lse)
    agree(found, *right(q, cache, mask, layer, s))


@given(case=cases(), data=st.data(), sinks=st.booleans(), lse=st.booleans(), extra=st.integers(0, 2))
def test_a_draft_tree_equals_the_dense_mask_at_any_page_size(case, data, sinks, lse, extra):
    batch = case.batch()
    rows, nodes = batch.num_reqs, data.draw(st.integers(1, 5))
    parents = np.array([[data.draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(rows)], int)
    parents = parents.reshape(rows, nodes)
    more = -(-rows * nodes // case.page_size)
    base, total = case.num_pages * case.page_size, (case.num_pages + more) * case.page_size
    where = base + np.arange(rows * nodes)[::-1].copy().reshape(rows, nodes)
    parts = tree(batch, torch.from_numpy(parents), torch.from_numpy(where), depth=nodes)
    mask = sum(seen(part, total) for part in parts.batches)
    layer = make_layer(sinks=sinks)
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    cache = pool(case.num_pages + more, case.page_size, mask.any(0))
    tokens = parts.step.num_tokens
    q, s = torch.randn(tokens, HEADS, DIM), torch.randn(HEADS) if sinks else None
    plan = attn.plan(parts)
    k, v = torch.randn(2, tokens, KV_HEADS, DIM)
    attn.write(k, v, cache, plan)
    assert torch.equal(cache.k.flatten(0, 1)[parts.step.slot_mapping], k)
    found = attn.run(q, cache, plan, tensors=LayerTensors(sinks=s), return_lse=lse)
    agree(found, *right(q, cache, mask, layer, s))


@given(case=cases(), pages=st.integers(1, 2), sinks=st.booleans())
def test_a_shared_prefix_runs_as_the_step_does(case, pages, sinks):
    length = pages * case.page_size
    width = max([-(-(s + length) // case.page_size) for s in case.seq_lens] or [pages])
    table = pages + np.arange(len(case.seq_lens) * width).reshape(len(case.seq_lens), width)
    table[:, :pages] = np.arange(pages)
    lens = [s + length for s in case.seq_lens]
    batch = Batch.from_lens(case.query_lens, lens, block_table=table, page_size=case.page_size)
    layer = make_layer(sinks=sinks)
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    num_pages = pages + table.size
    cache = pool(num_pages, case.page_size)
    q, s = torch.randn(batch.num_tokens, HEADS, DIM), torch.randn(HEADS) if sinks else None
    tensors = LayerTensors(sinks=s)
    whole = attn.run(q, cache, attn.plan(batch), tensors=tensors, return_lse=True)
    found = attn.run(q, cache, attn.plan(prefix(batch, length)), tensors=tensors, return_lse=True)
    agree(found, whole.out, whole.lse)


@given(case=cases(), world=st.integers(1, 3), interleave=st.integers(1, 4))
def test_ranks_merge_to_the_whole(case, world, interleave):
    layer = make_layer()
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    batch = case.batch()
    cache = pool(case.num_pages, case.page_size)
    q = torch.randn(batch.num_tokens, HEADS, DIM)
    whole = attn.run(q, cache, attn.plan(batch), return_lse=True)
    lens = Batch.from_lens(case.query_lens, case.seq_lens)
    ranks = []
    for rank in range(world):
        table = torch.from_numpy(case.block_table)
        mine = pool(case.num_pages, case.page_size, np.zeros(case.num_pages * case.page_size, bool))
        for row, s in enumerate(case.seq_lens):
            held = [p for p in range(s) if p // interleave % world == rank]
            for place, position in enumerate(held):
                for there, here in zip(mine, cache, strict=True):
                    there.view(-1, KV_HEADS, DIM)[slot(batch, row, place)] = here.view(-1, KV_HEADS, DIM)[
                        slot(batch, row, position)
                    ]
        plan = attn.plan(shard(lens, world, rank, table, case.page_size, interleave))
        ranks.append(attn.run(q, mine, plan, return_lse=True))
    found = merge_states([r.out for r in ranks], [r.lse for r in ranks])
    agree(found, whole.out, whole.lse)


@given(case=cases(), data=st.data())
def test_cross_attention_is_the_same_whatever_the_step(case, data):
    layer = make_layer(causal=False)
    attn = Attention(layer, page_size=4, device="cpu")
    lens = np.array([data.draw(st.integers(0, 9)) for _ in case.seq_lens], np.int32)
    table = np.arange(3 * len(lens), dtype=np.int32).reshape(len(lens), 3)
    crossed = cross(case.batch(), lens, torch.from_numpy(table), page_size=4)
    mask = seen(crossed, max(1, table.size) * 4)
    cache = pool(max(1, table.size), 4, mask.any(0))
    q = torch.randn(crossed.num_tokens, HEADS, DIM)
    found = attn.run(q, cache, attn.plan(crossed), return_lse=True)
    agree(found, *right(q, cache, mask, layer))


@given(case=cases(), left=st.integers(0, 12))
def test_trimmed_pages_are_never_read(case, left):
    layer = make_layer(window=(left, 0))
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    batch, slots = case.batch(), case.num_pages * case.page_size
    mask = expected(batch, slots, lambda _, q, k: q - left <= k <= q)
    live = seen(trim(batch, left), slots).any(0)
    cache = pool(case.num_pages, case.page_size, live)
    q = torch.randn(batch.num_tokens, HEADS, DIM)
    found = attn.run(q, cache, attn.plan(trim(batch, left)))
    agree(found, *right(q, cache, mask, layer))


def test_padded_parts_give_zeros_for_padding():
    batch = pad(Batch.from_lens([1], [7], block_table=[[4, 2]], page_size=4), 2, 3)
    parents, where = torch.tensor([[-1, 0], [-1, -1]]), torch.tensor([[30, 31], [0, 0]])
    parts = tree(batch, parents, where, depth=2)
    attn = Attention(make_layer(), page_size=4, device="cpu")
    found = attn.run(torch.randn(4, HEADS, DIM), pool(8, 4), attn.plan(parts), return_lse=True)
    assert not found.out[2:].any() and (found.lse[:, 2:] == -torch.inf).all()
    assert found.out[:2].any(-1).all()


def test_parts_need_a_mask_without_positions():
    batch = Batch.from_lens([1], [7], block_table=[[4, 2]], page_size=4)
    parts = prefix(batch, 4)
    for kwargs in (dict(window=3), dict(alibi=True), dict(chunk=4)):
        with pytest.raises(UnsupportedError, match="not a whole sequence"):
            Attention(make_layer(**kwargs), page_size=4, device="cpu").plan(parts)


def test_pages_of_one_token_need_equal_steps_in_the_pool():
    batch = Batch.from_lens([1], [7], block_table=[[1, 0]], page_size=4)
    parts = tree(batch, torch.tensor([[-1]]), torch.tensor([[9]]), depth=1)
    attn = Attention(make_layer(), page_size=4, device="cpu")
    apart = torch.randn(3, 2, 4, KV_HEADS, DIM)  # pages of K and V in turn
    k, v = apart.unbind(1)
    with pytest.raises(ValueError, match=r"cache k has strides .* need equal steps"):
        attn.run(torch.randn(1, HEADS, DIM), KV(k, v), attn.plan(parts))


def test_a_step_of_parts_writes_once():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    batch = Batch.from_lens([1], [7], block_table=[[1, 0]], page_size=4)
    crossed = cross(batch, np.array([3]), torch.tensor([[2]], dtype=torch.int32))
    with pytest.raises(ValueError, match="the plan writes nothing"):
        attn.write(torch.zeros(1, KV_HEADS, DIM), torch.zeros(1, KV_HEADS, DIM), pool(3, 4), attn.plan(crossed))
    assert local(batch, 4).slot_mapping is batch.slot_mapping
