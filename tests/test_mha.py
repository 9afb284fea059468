"""The plan of a step: which requests each kernel gets, and that planning neither reads the device nor writes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases

from portable import KV, Attention, Batch, Kernel, KernelCaps, Layer, Op
from portable.mha import plan_segments
from portable.padding import pad

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


class Chooser:
    """Remembers what was asked; its kernels note the segment that they prepare."""

    def __init__(self):
        self.asked = []

    def __call__(self, op, needs):
        self.asked.append((op, needs))
        return Kernel(KernelCaps(op=op, name=f"fake.{op}", provider="fake"), run=print, prepare=lambda s, _: s.requests)


def planned(batch, *, contiguous=True, lse=False, layer=LAYER):
    choose = Chooser()
    return plan_segments(batch, layer, choose, contiguous=contiguous, lse=lse), choose.asked


def kind_of(q, context):
    return None if q == 0 else "first" if context == 0 else "extend" if q > 1 else "decode"


def in_order(kinds):
    live = [("decode", "extend", "first").index(kind) for kind in kinds if kind]
    return live == sorted(live)


@given(cases(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_each_new_token_has_one_segment_with_its_own_numbers(case, contiguous, lse, sort, padding):
    if sort:
        rank = {"decode": 0, "extend": 1, "first": 2, None: 3}
        kinds = [kind_of(q, c) for q, c in zip(case.query_lens, case.context_lens, strict=True)]
        rows = sorted(range(len(kinds)), key=lambda row: rank[kinds[row]])
        case = dataclasses.replace(
            case,
            query_lens=[case.query_lens[row] for row in rows],
            seq_lens=[case.seq_lens[row] for row in rows],
            block_table=np.ascontiguousarray(case.block_table[rows]),
        )
    kinds = [kind_of(q, c) for q, c in zip(case.query_lens, case.context_lens, strict=True)]
    batch = pad(case.batch(), len(kinds) + padding, sum(case.query_lens) + padding)
    segments, asked = planned(batch, contiguous=contiguous, lse=lse)
    assert [row for s in segments for row in range(s.requests.start, s.requests.stop) if batch.query_lens[row]] == [
        row for row, q in enumerate(case.query_lens) if q
    ]
    assert [t for s in segments for t in range(s.tokens.start, s.tokens.stop)] == list(range(batch.num_tokens))
    for segment, (op, needs) in zip(segments, asked, strict=True):
        rows = range(segment.requests.start, segment.requests.stop)
        q, s = batch.query_lens[segment.requests].tolist(), batch.host_seq_lens[segment.requests].tolist()
        found = {kinds[row] for row in rows if row < len(kinds)} - {None}
        if in_order(kinds):
            assert len(found) == 1
            whole = found == {"first"} and q == s
            assert op is (Op.PREFILL if contiguous and whole else Op.PAGED)
        else:
            assert op is Op.PAGED and len(segments) == 1
        assert segment.cu_seqlens_q.tolist() == np.cumsum([0, *q]).tolist()
        assert segment.seq_lens.tolist() == s == segment.host_seq_lens.tolist()
        assert segment.host_query_lens.tolist() == q
        assert segment.cu_seqlens_q.dtype == segment.seq_lens.dtype == torch.int32
        assert (segment.max_query_len, segment.max_seq_len) == (max(q), max(s))
        assert type(segment.max_query_len) is type(segment.max_seq_len) is int
        assert segment.page_size == case.page_size and segment.exact and segment.causal is True
        assert segment.prepared == segment.requests and segment.kernel.caps.op is op
        assert needs.page_size == (case.page_size if op is Op.PAGED else None)
        assert needs.lse is lse and needs.causal is True
        for bucket, number in ((needs.query_len, max(q)), (needs.seq_len, max(s))):
            assert bucket // 2 < number <= bucket and bucket & (bucket - 1) == 0
        if op is Op.PAGED:
            assert torch.equal(segment.block_table, batch.block_table[segment.requests])
        else:
            assert segment.block_table is None


def test_a_kernel_for_equal_lengths_gets_one_run_of_them_at_a_time():
    def choose(op, needs):
        caps = KernelCaps(op=op, name=f"fake.{op}", provider="fake", uniform=needs.query_len <= 4)
        return Kernel(caps, run=print)

    def pieces(query_lens, context_lens, contiguous=True):
        lens = np.add(query_lens, context_lens)
        table = np.zeros((len(lens), 9), np.int32)
        batch = Batch.from_lens(query_lens, lens, block_table=table, page_size=4)
        return [
            (segment.kernel.caps.op, segment.host_query_lens.tolist())
            for segment in plan_segments(batch, LAYER, choose, contiguous=contiguous, lse=False)
        ]

    assert pieces([2, 2, 3, 0], [7] * 4) == [(Op.PAGED, [2, 2]), (Op.PAGED, [3])]
    assert pieces([2, 3, 9], [7] * 3) == [(Op.PAGED, [2, 3, 9])]  # which another kernel serves
    assert pieces([1, 1, 2, 3], [7, 7, 0, 0]) == [(Op.PAGED, [1, 1]), (Op.PREFILL, [2, 3])]
    assert pieces([1, 1, 2, 3], [7, 7, 0, 0], False) == [(Op.PAGED, [1, 1]), (Op.PAGED, [2]), (Op.PAGED, [3])]


def test_contiguous_keys_are_prepared_for_as_what_they_are_whatever_the_cache_stores():
    layer = dataclasses.replace(LAYER, kv_dtype=torch.float8_e4m3fn)

    def choose(op, needs):
        return Kernel(KernelCaps(op=op, name=f"fake.{op}", provider="fake"), run=print, prepare=lambda _, seen: seen)

    batch = Batch.from_lens([1, 9], [7, 9], block_table=np.zeros((2, 3), np.int32), page_size=4)
    paged, contiguous = plan_segments(batch, layer, choose, contiguous=True, lse=False)
    assert (paged.kernel.caps.op, contiguous.kernel.caps.op) == (Op.PAGED, Op.PREFILL)
    assert paged.prepared == layer and contiguous.prepared == LAYER


@given(cases())
def test_without_a_cache_all_requests_make_one_contiguous_segment(case):
    batch = pad(
        Batch.from_lens(case.query_lens, case.seq_lens), len(case.query_lens) + 1, sum(case.query_lens), seq_len=1
    )
    segments, asked = planned(batch, contiguous=False)
    assert [op for op, _ in asked] == ([Op.PREFILL] if batch.num_tokens else [])
    for segment in segments:
        assert segment.requests == slice(0, len(case.query_lens)) and segment.block_table is None
        assert segment.seq_lens.tolist() == case.seq_lens


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("table", [False, True])
def test_no_new_tokens_make_no_segments(rows, table):
    pages = np.zeros((rows, 2), np.int32) if table else None
    batch = Batch.from_lens([0] * rows, [7] * rows, block_table=pages, page_size=4)
    assert planned(batch) == ((), [])


def test_a_row_without_new_tokens_among_first_chunks_takes_them_to_the_pages():
    """Its context has no place in the step's contiguous K/V."""
    batch = Batch.from_lens([3, 0, 2], [3, 9, 2], block_table=np.arange(9).reshape(3, 3), page_size=4)
    assert [op for op, _ in planned(batch)[1]] == [Op.PAGED]
    empty = Batch.from_lens([3, 0, 2], [3, 0, 2], block_table=np.arange(9).reshape(3, 3), page_size=4)
    assert [op for op, _ in planned(empty)[1]] == [Op.PREFILL]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_and_they_attend_as_without_it(backend):
    attn = Attention(LAYER, page_size=4, device="cpu", backend=backend)
    table = np.arange(9).reshape(3, 3)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    outs = []
    for rows in ([0, 1, 2], [0, 2]):
        lens = np.array([3, 0, 2]), np.array([3, 9, 2])
        batch = Batch.from_lens(lens[0][rows], lens[1][rows], block_table=table[rows], page_size=4)
        cache = KV(*torch.full((2, 9, 4, 2, 8), torch.nan))
        plan = attn.plan(batch)
        attn.write(k, v, cache, plan)
        outs.append(attn.run(q, cache, plan, k=k, v=v).out)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    ("layer_causal", "batch_causal", "needs_causal", "segment_causal"),
    [
        (True, True, True, [True, True]),
        (True, False, False, [False, False]),
        (False, True, False, [False, False]),
        (True, torch.tensor([True, True, False]), False, [True, False]),
        (False, torch.tensor([True, True, False]), False, [False, False]),
    ],
)
def test_a_mask_is_causal_where_layer_and_request_both_say_so(layer_causal, batch_causal, needs_causal, segment_causal):
    batch = Batch.from_lens(
        [1, 4, 5], [9, 9, 9], block_table=np.zeros((3, 3), np.int32), page_size=4, causal=batch_causal
    )
    segments, asked = planned(batch, layer=dataclasses.replace(LAYER, causal=layer_causal))
    assert {needs.causal for _, needs in asked} == {needs_causal} and len(segments) == 2
    extend = segments[1].causal
    assert (extend.tolist() if isinstance(extend, torch.Tensor) else [extend] * 2) == segment_causal


def bounded(case, batch, bounds):
    return Batch.from_tensors(
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        batch.slot_mapping,
        page_size=case.page_size,
        host_seq_lens=bounds,
        exact=False,
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@settings(max_examples=25)
@given(case=cases(), data=st.data())
def test_upper_bounds_change_no_result(backend, case, data):
    """Of requests with a context the host may know no more than that; unused pages hold NaN."""
    attn, batch = Attention(LAYER, page_size=case.page_size, device="cpu", backend=backend), case.batch()
    room = case.block_table.shape[1] * case.page_size
    bounds = [
        data.draw(st.integers(s, room)) if s > q else s for q, s in zip(case.query_lens, case.seq_lens, strict=True)
    ]
    cache = KV(*torch.full((2, case.num_pages, case.page_size, 2, 8), torch.nan))
    for row, s in enumerate(case.seq_lens):
        for position in range(s):
            page, offset = divmod(case.slot(row, position), case.page_size)
            for part in cache:
                part[page, offset] = torch.randn(2, 8)
    q = torch.randn(batch.num_tokens, 4, 8)
    right = attn.run(q, cache, attn.plan(batch)).out
    plan = attn.plan(bounded(case, batch, bounds))
    assert not any(segment.exact for part in plan.segments for segment in part)
    torch.testing.assert_close(attn.run(q, cache, plan).out, right, atol=1e-6, rtol=1e-6)


def mixed_step():
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    return table, ([1, 1, 4, 5], [9, 4, 12, 5])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_planning_reads_no_tensor_and_changes_none(backend, no_sync):
    table, lens = mixed_step()
    attn = Attention(LAYER, page_size=4, device="cpu", backend=backend)
    tensors = torch.tensor([0, 1, 2, 6, 11]).int(), torch.tensor(lens[1]).int(), torch.from_numpy(table)
    slots = torch.zeros(11, dtype=torch.int64)
    before = [tensor.clone() for tensor in (*tensors, slots)]
    with no_sync():
        batch = Batch.from_tensors(*tensors, slots, page_size=4)
        attn.plan(batch)
        attn.plan(Batch.from_tensors(*tensors, slots, page_size=4, host_seq_lens=lens[1], exact=False))
        attn.plan(pad(batch, 8, 16))
        attn.plan(Batch.from_lens(*lens, block_table=table, page_size=4))
        attn.plan(Batch.from_lens([3, 1], [3, 5], block_table=table[:2], page_size=4, causal=torch.ones(2).bool()))
    assert all(torch.equal(a, b) for a, b in zip((*tensors, slots), before, strict=True))


def test_one_step_serves_layers_of_two_groups():
    """Plans of two pools, from one batch; each reads its own pages."""
    table, lens = mixed_step()
    batch = Batch.from_lens(*lens, block_table=table, page_size=4)
    other = torch.from_numpy(np.ascontiguousarray(table[::-1])).repeat(1, 2)
    group = batch.with_group(other, None, 2)
    (first, *_), (second, *_) = planned(batch)[0], planned(group)[0]
    assert (first.page_size, second.page_size) == (4, 2)
    assert torch.equal(second.block_table, other[second.requests])
    assert first.seq_lens.data_ptr() == second.seq_lens.data_ptr()
