"""Derived steps: what they refuse to be derived from, and that planning has no loop over requests."""

import dataclasses
import sys

import numpy as np
import pytest
import torch

from portable import Attention, Batch, Layer, UnsupportedError
from portable.order import decode_threshold
from portable.padding import pad
from portable.validate import validate
from portable.variants import cross, dead_pages, draft, local, prefix, shard, tree, trim, verify

T = torch.tensor([[1, 2, 3], [1, 5, 6]], dtype=torch.int32)
STEP = Batch.from_lens([1, 1], [10, 9], block_table=T, page_size=4)


def sharded():
    return shard(Batch.from_lens([1, 1], [10, 9]), 2, 0, T, 4)


def crossed():
    return cross(STEP, np.array([10, 9]), T)


@pytest.mark.parametrize("make", [sharded, crossed], ids=["shard", "cross"])
@pytest.mark.parametrize("mask", [dict(window=3), dict(alibi=True), dict(chunk=4)], ids=str)
def test_a_mask_of_positions_needs_the_steps_own_keys(make, mask):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, **mask)
    with pytest.raises(UnsupportedError, match="window, ALiBi or chunks"):
        Attention(layer, page_size=4, device="cpu").plan(make())


@pytest.mark.parametrize(
    "derive",
    [
        lambda b: draft(b, 0),
        lambda b: verify(b, 1),
        lambda b: local(b, 4),
        lambda b: trim(b, 3),
        lambda b: shard(b, 2, 0, T, 4),
        lambda b: prefix(b, 4),
    ],
)
@pytest.mark.parametrize("make", [sharded, crossed], ids=["shard", "cross"])
def test_what_has_other_keys_than_its_own_is_not_derived_from(derive, make):
    with pytest.raises(UnsupportedError):
        derive(make())


@pytest.mark.parametrize("derive", [lambda b: draft(b, 0), lambda b: verify(b, 1), lambda b: shard(b, 2, 0, T, 4)])
def test_what_picks_pages_is_not_drafted_behind_or_sharded(derive):
    with pytest.raises(UnsupportedError):
        derive(local(STEP, 4))


def test_a_shard_of_a_step_that_is_not_causal_is_refused():
    with pytest.raises(UnsupportedError, match="not causal throughout"):
        shard(Batch.from_lens([2], [9], causal=False), 2, 0, T[:1], 4)


@pytest.mark.parametrize(
    "derive",
    [
        lambda b: local(b, 4),
        lambda b: prefix(b, 4),
        lambda b: shard(b, 2, 0, T, 4),
        lambda b: trim(b, 3),
        lambda b: dead_pages(b, 3),
    ],
)
def test_what_needs_exact_lengths_refuses_bounds(derive):
    with pytest.raises(ValueError, match=r"exact lengths; .* upper bounds"):
        derive(dataclasses.replace(STEP, exact=False))


OTHER = torch.tensor([[7, 8, 9], [7, 11, 12]], dtype=torch.int32)


@pytest.mark.parametrize(
    "derive",
    [
        lambda b: local(b, 4),
        lambda b: local(pad(b, 4, 4), 4),
        lambda b: pad(local(b, 4), 5, 5),
        lambda b: trim(b, 3),
        lambda b: trim(local(b, 8), 3),
        lambda b: prefix(b, 4).step,
        lambda b: prefix(trim(b, 9), 4).step,
    ],
    ids=range(7),
)
def test_a_derived_step_serves_a_second_group_as_if_derived_from_it(derive):
    direct = derive(STEP.with_group(OTHER, STEP.slot_mapping, 4))
    found = derive(STEP).with_group(OTHER, None, 4)
    assert torch.equal(found.block_table, direct.block_table)


def calls(make):
    n = 0

    def count(frame, event, arg):
        nonlocal n
        n += event in ("call", "c_call")

    make()
    sys.setprofile(count)
    try:
        make()
    finally:
        sys.setprofile(None)
    return n


def test_planning_takes_as_many_calls_for_many_requests_as_for_few():
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    attn = Attention(layer, page_size=4, device="cpu", max_reqs=4096, max_tokens=1 << 20, backend="reference")

    def steps(n):
        table = np.arange(16 * n, dtype=np.int32).reshape(n, 16)
        q, s = np.r_[np.ones(n // 2, np.int32), np.full(n - n // 2, 3, np.int32)], np.full(n, 60, np.int32)
        batch = Batch.from_lens(q, s, block_table=table, page_size=4)
        lens = Batch.from_lens(q, s)
        t = torch.from_numpy(table)
        return [
            lambda: attn.plan(Batch.from_lens(q, s, block_table=table, page_size=4)),
            lambda: local(batch, 16),
            lambda: draft(batch, 0),
            lambda: verify(batch, 2),
            lambda: trim(batch, 3),
            lambda: cross(batch, s, t),
            lambda: shard(lens, 2, 0, t, 4),
            lambda: pad(batch, n + 1, 3 * n),
            lambda: batch.csr(),
        ]

    for few, many in zip(steps(8), steps(512), strict=True):
        assert calls(few) == calls(many)


def test_a_cross_step_forgets_what_it_was_derived_from():
    found = cross(trim(STEP, 3), np.array([10, 9]), T).with_group(OTHER, None, 4)
    assert torch.equal(found.block_table, OTHER)


@pytest.mark.parametrize(
    "make", [lambda t, p: cross(STEP, np.array([4, 4]), t, p), lambda t, p: shard(STEP, 2, 0, t, p)]
)
@pytest.mark.parametrize(
    ("table", "page_size", "message"),
    [(T, 0, "page_size is 0"), (T.long(), 4, r"dtype torch\.int64"), (T.to("meta"), 4, "is on meta")],
)
def test_a_variants_own_table_is_checked(make, table, page_size, message):
    with pytest.raises(ValueError, match=message):
        make(table, page_size)


def test_what_does_not_fit_int32_is_named():
    with pytest.raises(ValueError, match="slots holds 2147483653"):
        tree(STEP, torch.tensor([[-1], [-1]]), torch.tensor([[5], [2**31 + 5]]), 1)
    with pytest.raises(ValueError, match="page ids are int32"):
        Batch.from_token_table(torch.tensor([[2**40]]), torch.tensor([0]), [1], [1], page_size=4)
    far = Batch.from_lens([1], [1], block_table=[[2**27]], page_size=64)
    with pytest.raises(ValueError, match="slot 8589934592 does not fit int32"):
        far.csr().of_tokens(1)
    with pytest.raises(ValueError, match=r"num_draft has shape \[3\]"):
        verify(STEP, np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="num_draft is -1"):
        decode_threshold(-1)


def test_an_engines_own_negative_page_is_named():
    batch = Batch.from_tensors(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([9], dtype=torch.int32),
        torch.tensor([[-1, 0, 3]], dtype=torch.int32),
        torch.tensor([12]),
        page_size=4,
    )
    with pytest.raises(ValueError, match=r"row 0: block_table\[0, 0\] is -1"):
        validate(batch)
