"""Padding: rows and tokens behind a step that change nothing of it, and reach nothing alive."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_same_batch, cases

from portable import KV, Attention, Batch, Layer
from portable.padding import pad, unpad
from portable.view import View

LAYER = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)


def full_batch(case):
    """With everything that a batch may hold for each row."""
    rows = len(case.query_lens)
    return case.batch(causal=torch.arange(rows) % 2 == 0, is_prefilling=[True] * rows)


@given(cases(), st.integers(0, 3), st.integers(0, 4), st.sampled_from([0, 1]), st.integers(-1, 2))
def test_padding_is_what_it_says_and_comes_off_again(case, more, extra, seq_len, slot):
    batch = full_batch(case)
    if case.block_table.shape[1] == 0:
        seq_len = 0
    rows, tokens = batch.num_reqs + more, batch.num_tokens + extra
    padded = pad(batch, rows, tokens, seq_len=seq_len, page=2, slot=slot)
    assert padded.cu_seqlens_q.tolist() == batch.cu_seqlens_q.tolist() + [batch.num_tokens] * more
    assert padded.seq_lens.tolist() == case.seq_lens + [seq_len] * more
    assert padded.block_table.tolist() == case.block_table.tolist() + [[2] * case.block_table.shape[1]] * more
    assert padded.slot_mapping.tolist() == case.slots() + [slot] * extra
    assert padded.query_lens.tolist() == case.query_lens + [0] * more
    assert padded.host_seq_lens.tolist() == padded.seq_lens.tolist()
    assert padded.host_cu_seqlens_q.tolist() == padded.cu_seqlens_q.tolist()
    assert padded.max_seq_len >= max(padded.host_seq_lens, default=0)
    assert len(padded.causal) == len(padded.is_prefilling) == rows
    assert (padded.num_reqs, padded.num_tokens) == (batch.num_reqs, batch.num_tokens)
    assert (padded.padded_reqs, padded.padded_tokens) == (rows, tokens)
    for field in dataclasses.fields(Batch):
        a, b = getattr(padded, field.name), getattr(batch, field.name)
        if isinstance(b, torch.Tensor | np.ndarray):
            assert a.dtype == b.dtype, field.name
    assert_same_batch(unpad(padded), batch, ignore=("max_seq_len",) if seq_len else ())
    again = pad(padded, rows + 1, tokens + 2)
    assert_same_batch(unpad(again), batch, ignore=("max_seq_len",) if seq_len else ())
    assert_same_batch(batch, full_batch(case))


@given(cases())
def test_what_comes_off_leaves_views(case):
    batch = pad(full_batch(case), len(case.query_lens) + 2, sum(case.query_lens) + 2)
    bare = unpad(batch)
    for name in ("cu_seqlens_q", "seq_lens", "block_table", "slot_mapping", "causal"):
        assert getattr(bare, name).data_ptr() == getattr(batch, name).data_ptr() or not getattr(bare, name).numel()
    assert np.shares_memory(bare.host_cu_seqlens_q, batch.host_cu_seqlens_q)


@given(cases(ordered=True), st.integers(0, 3), st.integers(0, 4))
def test_padding_keeps_the_regions_and_stands_behind_them(case, more, extra):
    batch = case.batch()
    split = batch.split()
    padded = pad(batch, batch.num_reqs + more, batch.num_tokens + extra).split()
    assert (padded.decodes, padded.extends, padded.prefills) == (split.decodes, split.extends, split.prefills)
    assert padded.pads.num_reqs == split.pads.num_reqs + more and padded.pads.num_tokens == 0


def test_a_step_that_writes_nothing_keeps_its_padded_tokens():
    """A cross step, or a second group that only reads, under a captured size."""
    reads = Batch.from_lens([1, 1], [4, 2], block_table=[[5], [6]], page_size=4)
    padded = pad(dataclasses.replace(reads, slot_mapping=None), 4, 4)
    assert padded.slot_mapping is None and (padded.padded_reqs, padded.padded_tokens) == (4, 4)
    assert pad(Batch.from_lens([2], [2]), 2, 5).padded_tokens == 5


def test_padding_of_a_derived_step_derives_again():
    view = View(rows=np.array([0, 0]), first_page=np.array([0, 1]), width=1)
    step = Batch.from_lens([4, 1], [4, 1], block_table=[[6], [8]], page_size=4)
    padded = pad(dataclasses.replace(step, view=view), 3, 5)
    second = View(rows=np.arange(3), first_page=np.array([0, 0, 0]), width=1)
    assert view.then(second).rows.tolist() == [0, 0] and padded.view is view


@pytest.mark.parametrize(
    ("size", "kwargs", "message"),
    [
        ((1, 9), {}, "a batch of 2 rows and 3 tokens does not fit into 1 rows and 9 tokens"),
        ((9, 2), {}, "a batch of 2 rows and 3 tokens does not fit into 9 rows and 2 tokens"),
        ((3, 3), {"seq_len": -1}, "seq_len is -1; padding is at least 0 long"),
        ((3, 3), {"seq_len": 9}, "seq_len is 9; padding is .* fits into 2 pages of 4 tokens"),
    ],
)
def test_a_size_that_does_not_hold_the_step_is_refused(size, kwargs, message):
    batch = Batch.from_lens([1, 2], [5, 2], block_table=[[0, 1], [2, 3]], page_size=4)
    with pytest.raises(ValueError, match=message):
        pad(batch, *size, **kwargs)


def run(attn, batch, cache, q, k, v, *, contiguous=True, return_lse=False):
    plan = attn.plan(batch)
    if batch.slot_mapping is not None:
        attn.write(k, v, cache, plan)
    return attn.run(q, cache, plan, k=k if contiguous else None, v=v if contiguous else None, return_lse=return_lse)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@settings(max_examples=25)
@given(
    case=cases(),
    more=st.integers(0, 3),
    extra=st.integers(1, 4),
    seq_len=st.sampled_from([0, 1]),
    contiguous=st.booleans(),
)
def test_a_padded_step_gives_its_tokens_the_same_and_the_padding_zero(backend, case, more, extra, seq_len, contiguous):
    """Padding is NaN in q, k and v and stands on a page of NaN; -1 slots leave every page as it was."""
    attn = Attention(LAYER, page_size=case.page_size, device="cpu", backend=backend)
    batch, lse = case.batch(), backend == "reference"
    tokens, (heads, dim) = batch.num_tokens, (LAYER.num_heads, LAYER.qk_head_dim)
    q, k, v = (torch.randn(tokens, h, dim) for h in (heads, 1, 1))
    cache = KV(*torch.randn(2, case.num_pages + 1, case.page_size, 1, dim))
    for part in cache:
        part[case.num_pages] = torch.nan
    twin = KV(*(part.clone() for part in cache))
    right = run(attn, batch, cache, q, k, v, contiguous=contiguous, return_lse=lse)
    seq_len = seq_len if case.block_table.shape[1] else 0
    padded = pad(batch, batch.num_reqs + more, tokens + extra, seq_len=seq_len, page=case.num_pages)
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, extra), value=torch.nan) for x in (q, k, v)]
    found = run(attn, padded, twin, *wide, contiguous=contiguous, return_lse=lse)
    torch.testing.assert_close(found.out[:tokens], right.out, atol=1e-6, rtol=1e-6)
    assert (found.out[tokens:] == 0).all()
    if lse:
        torch.testing.assert_close(found.lse[:, :tokens], right.lse, atol=1e-6, rtol=1e-6)
        assert torch.isneginf(found.lse[:, tokens:]).all()
    for part, same in zip(cache, twin, strict=True):
        assert torch.equal(part.nan_to_num(7), same.nan_to_num(7))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("seq_len", [0, 1])
def test_padding_has_no_keys_in_contiguous_kv(backend, seq_len):
    attn = Attention(LAYER, page_size=4, device="cpu", backend=backend)
    q, k, v = torch.randn(6, 2, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    batch = Batch.from_lens([4, 2], [4, 2])
    right = run(attn, batch, None, q, k, v).out
    padded = pad(batch, 4, 9, seq_len=seq_len)
    wide = [torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 3)), k, v]
    found = run(attn, padded, None, *wide).out
    torch.testing.assert_close(found[:6], right)
    assert (found[6:] == 0).all()


def test_padding_reads_no_tensor(no_sync):
    batch = Batch.from_lens([1, 2], [5, 2], block_table=[[0, 1], [2, 3]], page_size=4, causal=torch.ones(2).bool())
    with no_sync():
        unpad(pad(batch, 4, 8, seq_len=1))


def test_padding_with_a_length_is_counted_in_the_longest():
    batch = Batch.from_lens([0], [0], block_table=[[0]], page_size=4)
    assert [pad(batch, 2, 1, seq_len=n).max_seq_len for n in (0, 1, 4)] == [0, 1, 4]
    assert pad(batch, 1, 1, seq_len=4).max_seq_len == 0
