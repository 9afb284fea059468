"""Batch: what it derives, what it refuses, and that it changes nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import cases

from portable import Batch
from portable.ragged import cdiv


@given(cases())
def test_slots_and_dtypes_equal_the_loop(case):
    before = case.block_table.tobytes()
    batch = case.batch()
    slots = [
        int(case.block_table[i, p // case.page_size]) * case.page_size + p % case.page_size
        for i, (q, s) in enumerate(zip(case.query_lens, case.seq_lens, strict=True))
        for p in range(s - q, s)
    ]
    assert batch.slot_mapping.tolist() == slots
    assert batch.slot_mapping.dtype == torch.int64
    assert {batch.cu_seqlens_q.dtype, batch.seq_lens.dtype, batch.block_table.dtype} == {torch.int32}
    assert batch.cu_seqlens_q.tolist() == np.cumsum([0, *case.query_lens]).tolist()
    assert batch.context_lens.tolist() == [s - q for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    assert (batch.num_reqs, batch.num_tokens) == (len(case.query_lens), sum(case.query_lens))
    assert batch.max_query_len == max(case.query_lens, default=0)
    assert case.block_table.tobytes() == before


@given(cases())
def test_a_device_table_gives_the_slots_of_a_host_table(case):
    batch = case.batch()
    requests = torch.from_numpy(np.repeat(np.arange(batch.num_reqs), batch.query_lens))
    context = torch.from_numpy(batch.context_lens)
    positions = torch.arange(batch.num_tokens) - batch.cu_seqlens_q[requests] + context[requests]
    from portable.paging import slot_mapping

    assert torch.equal(slot_mapping(batch.block_table, requests, positions, case.page_size), batch.slot_mapping)


@given(cases(ordered=True))
def test_split_of_an_ordered_batch_equals_the_definition(case):
    batch = case.batch()
    split = batch.split()
    assert [split[0].start, *(region.stop for region in split)][-1] == batch.num_reqs
    assert split.decodes.stop == split.extends.start and split.extends.stop == split.prefills.start
    assert split.prefills.stop == split.pads.start
    for region, fits in (
        (split.decodes, lambda q, c: q <= 1 and c > 0),
        (split.extends, lambda q, c: q > 1 and c > 0),
        (split.prefills, lambda q, c: c == 0),
        (split.pads, lambda q, c: False),
    ):
        rows = zip(batch.query_lens[region], batch.context_lens[region], strict=True)
        assert all(q == 0 or fits(q, c) for q, c in rows)
    live = np.flatnonzero(batch.query_lens)
    assert split.pads.start == (live[-1] + 1 if live.size else 0)


@pytest.mark.parametrize(
    ("query_lens", "contexts", "threshold", "expected"),
    [
        ([1, 1, 7, 0, 0], [3, 4, 0, 0, 0], 1, (2, 0, 1, 2)),
        ([1, 0, 5, 3], [3, 4, 2, 2], 1, (2, 2, 0, 0)),
        ([0, 0, 0], [0, 0, 0], 1, (0, 0, 0, 3)),
        ([4, 4, 0], [9, 9, 0], 4, (2, 0, 0, 1)),
        ([2, 2, 2, 0], [1, 0, 0, 0], 1, (0, 1, 2, 1)),
    ],
)
def test_split_tolerates_rows_without_tokens(query_lens, contexts, threshold, expected):
    split = Batch.from_lens(query_lens, [q + c for q, c in zip(query_lens, contexts, strict=True)]).split(threshold)
    assert tuple(region.stop - region.start for region in split) == expected


def test_a_batch_out_of_order_is_a_typed_error_naming_the_request():
    batch = Batch.from_lens([5, 1], [5, 33])
    assert not batch.is_ordered()
    with pytest.raises(ValueError, match=r"request 1 \(query_len 1, context 32\)"):
        batch.split()


def test_an_empty_batch_is_a_batch():
    batch = Batch.from_lens([], [], block_table=np.zeros((0, 4), np.int32), page_size=16)
    assert (batch.num_reqs, batch.num_tokens, batch.max_seq_len) == (0, 0, 0)
    assert batch.cu_seqlens_q.tolist() == [0] and batch.slot_mapping.shape == (0,)
    assert all(region == slice(0, 0) for region in batch.split())


def test_a_batch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Batch.from_lens([1], [1]).num_tokens = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(query_lens=[1, 5], seq_lens=[1, 4]), "row 1: seq_len 4 is less than query_len 5"),
        (dict(query_lens=[1], seq_lens=[1, 2]), "query_lens has 1 rows and seq_lens 2"),
        (dict(query_lens=[-1], seq_lens=[1]), r"query_lens\[0\] is -1"),
        (dict(query_lens=[1], seq_lens=[2**31]), r"seq_lens\[0\] is 2147483648"),
        (dict(query_lens=[1.5], seq_lens=[2]), "query_lens has dtype float64"),
        (dict(query_lens=[[1]], seq_lens=[[2]]), r"query_lens has shape \[1, 1\]"),
        (dict(query_lens=[1], seq_lens=[9], block_table=[[0, 1]], page_size=4), "seq_len 9 needs 3 pages of 4 tokens"),
        (dict(query_lens=[1], seq_lens=[1], block_table=[0], page_size=4), r"block_table has shape \[1\]"),
        (dict(query_lens=[1], seq_lens=[1], block_table=[[0.5]], page_size=4), "block_table has dtype float64"),
        (dict(query_lens=[1], seq_lens=[1], block_table=[[-3]], page_size=4), "row 0: .*negative page id -3"),
        (dict(query_lens=[1], seq_lens=[1], page_size=0), "page_size is 0"),
        (dict(query_lens=[1], seq_lens=[1], causal=torch.ones(2, dtype=torch.bool)), r"causal has shape \[2\]"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch.from_lens(**arguments)


def test_slots_past_32_bits_do_not_wrap():
    page, size = 2**27, 64
    batch = Batch.from_lens([1], [size], block_table=np.array([[page]]), page_size=size)
    assert batch.slot_mapping.tolist() == [page * size + size - 1]
    assert cdiv(2**40 + 1, 2**20) == 2**20 + 1
