"""Plans of padded steps: the values of an eager build, at addresses that never move, and nothing else touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import launches
from recording import Recorder

from portable import KV, Attention, Batch, Layer, MlaAttention, MlaWeights, UnsupportedError
from portable.backends import reference, reference_steps
from portable.kernel import GraphLevel, Op
from portable.padding import padded
from portable.platform.graphs import tensors, using
from portable.sizes import Size, ladder, least
from portable.variants import local, local_capacity, local_size, prefix, tree

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
PAGES, PAGE, WIDTH = 60, 4, 8
LIMITS = {"page_size": PAGE, "device": "cpu", "max_reqs": 6, "max_tokens": 48, "max_seq_len": PAGE * WIDTH}
ORACLES = (*reference.KERNELS, *reference_steps.KERNELS)
FIELDS = ("cu_seqlens_q", "seq_lens", "slot_mapping", "block_table")


@pytest.fixture
def device_kernels(monkeypatch):
    """The reference, as kernels that a graph may hold."""
    kernels = tuple(launches(kernel) for kernel in ORACLES)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)


@st.composite
def sizes_and_steps(draw):
    """A size, and steps that fit into it: (new tokens, context) of each request."""
    reqs, queries = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    tokens = draw(st.none() | st.integers(queries, reqs * queries))
    size = Size(reqs, queries, tokens)

    def step(seed):
        rng = np.random.default_rng(seed)
        rows, left = [], size.padded_tokens
        for _ in range(rng.integers(0, reqs + 1)):
            new = queries if size.uniform else min(int(rng.integers(0, queries + 1)), left)
            left -= new
            rows.append((new, int(rng.integers(0, PAGE * WIDTH - new + 1))))
        return rows

    return size, [step(seed) for seed in draw(st.lists(st.integers(0, 2**30), min_size=1, max_size=6))]


def batch_of(rows, width=WIDTH, seed=0):
    table = np.random.default_rng(seed).permutation(PAGES)[: len(rows) * width].reshape(len(rows), width)
    return Batch.from_lens([q for q, _ in rows], [q + c for q, c in rows], block_table=table, page_size=PAGE)


def addresses(plan):
    return [getattr(plan.batch, name).data_ptr() for name in FIELDS]


@pytest.mark.parametrize("recorder", [False, True])
def test_a_plan_has_the_values_of_an_eager_build_where_the_last_one_had_them(device_kernels, recorder):
    attn = Attention(LAYER, **LIMITS)
    seen = {}

    @settings(max_examples=40)
    @given(sizes_and_steps())
    def check(case):
        size, steps = case
        for seed, rows in enumerate(steps):
            batch = batch_of(
                rows, width=WIDTH - seed % 2 if all(q + c <= PAGE * (WIDTH - 1) for q, c in rows) else WIDTH
            )
            plan = attn.plan(batch, pad_to=size)
            wide = padded(batch, size)
            for name in FIELDS:
                there, wanted = getattr(plan.batch, name), getattr(wide, name)
                if name == "block_table":
                    assert not there[:, wanted.shape[1] :].any()
                    there = there[:, : wanted.shape[1]]
                assert torch.equal(there, wanted), name
            assert seen.setdefault(size, addresses(plan)) == addresses(plan)
            assert plan.num_tokens == batch.num_tokens and plan.size == size

    if recorder:
        with using(Recorder()):
            check()
    else:
        check()


@given(sizes_and_steps())
def test_padding_has_no_keys_and_every_token_is_some_rows(case):
    size, steps = case
    for rows in steps:
        wide = padded(batch_of(rows), size)
        live = len(rows)
        assert wide.host_cu_seqlens_q[-1] == size.padded_tokens == len(wide.slot_mapping)
        assert (wide.query_lens >= 0).all() and wide.query_lens.max(initial=0) <= size.queries
        assert not wide.host_seq_lens[live:].any()
        assert (wide.slot_mapping[sum(q for q, _ in rows) :] == -1).all()
        if size.uniform:
            assert (wide.query_lens == size.queries).all()


def test_padded_tokens_get_zero_and_write_nothing(device_kernels):
    """Padding is NaN in q, k and v; pages that nothing was written to are NaN as well."""
    attn, plain = Attention(LAYER, **LIMITS), Attention(LAYER, **LIMITS)

    @settings(max_examples=15)
    @given(sizes_and_steps(), st.booleans())
    def check(case, return_lse):
        size, steps = case
        for rows in steps[:2]:
            batch, tokens = batch_of(rows), size.padded_tokens
            live = batch.num_tokens
            q, k, v = (torch.full((tokens, heads, 8), torch.nan) for heads in (4, 2, 2))
            for x in (q, k, v):
                x[:live] = torch.randn(x[:live].shape)
            cache = KV(*(torch.full((PAGES, PAGE, 2, 8), torch.nan) for _ in range(2)))
            before = Batch.from_lens(
                batch.host_seq_lens, batch.host_seq_lens, block_table=batch.block_table, page_size=PAGE
            )
            for part in cache:
                part.view(-1, 2, 8)[before.slot_mapping] = torch.randn(before.num_tokens, 2, 8)
            again = KV(*(part.clone() for part in cache))
            plan = attn.plan(batch, pad_to=size)
            attn.write(k, v, cache, plan)
            out, lse = attn.run(q, cache, plan, return_lse=return_lse)
            other = plain.plan(batch)
            plain.write(k[:live], v[:live], again, other)
            wanted = plain.run(q[:live], again, other, return_lse=return_lse)
            assert torch.equal(out[:live], wanted.out) and not out[live:].any()
            if return_lse:
                assert torch.equal(lse[:, :live], wanted.lse) and (lse[:, live:] == -torch.inf).all()
            for mine, theirs in zip(cache, again, strict=True):
                assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))

    check()


def test_what_a_graph_freezes_is_told_and_is_the_most_of_the_size(device_kernels):
    attn = Attention(LAYER, **LIMITS)
    small, large = (attn.plan(batch_of([(1, c)]), pad_to=4).baked for c in (0, 31))
    assert small == large
    assert large == {
        "num_reqs": 4, "num_tokens": 4, "max_query_len": 1, "max_seq_len": 32, "page_size": 4, "block_table_width": 8,
    }  # fmt: skip
    short = attn.plan(batch_of([(2, 1)], width=2), pad_to=Size(4, 2, seq_len=8))
    assert short.baked["max_seq_len"] == 8 and short.baked["block_table_width"] == 2
    assert short.level is GraphLevel.ALWAYS
    assert attn.plan(batch_of([(1, 3)])).baked == {}


def test_slots_do_not_touch_each_other(device_kernels):
    attn = Attention(LAYER, **LIMITS)
    first = attn.plan(batch_of([(1, 9), (1, 3)]), pad_to=4, slot=0)
    kept = [getattr(first.batch, name).clone() for name in FIELDS]
    second = attn.plan(batch_of([(1, 20)], seed=1), pad_to=4, slot=1)
    assert not set(addresses(first)) & set(addresses(second))
    for name, value in zip(FIELDS, kept, strict=True):
        assert torch.equal(getattr(first.batch, name), value)


def in_scratch(kernel):
    """Attention that leaves its result in scratch of the plan, and copies it out by a second launch."""
    first, second = launches(kernel), launches(replace(kernel, run=lambda come, to: to.copy_(come)))

    def prepare(segment, layer):
        return torch.empty(segment.tokens.stop - segment.tokens.start, layer.num_heads, layer.v_head_dim)

    def run(q, kv, segment, layer, given, out, lse):
        first.run(q, kv, segment, layer, given, segment.prepared, lse)
        second.run(segment.prepared, out)

    return replace(first, run=run, prepare=prepare)


@pytest.mark.parametrize("slots", [(0, 1), (0, 0)])
def test_two_streams_may_run_steps_of_two_slots_and_not_of_one(monkeypatch, slots):
    """Two captured steps whose launches alternate: of one slot, what one leaves in scratch is the other's."""
    kernels = [in_scratch(each) if each.caps.op is Op.PAGED else launches(each) for each in ORACLES]
    monkeypatch.setattr("portable.attention.load_kernels", lambda: tuple(kernels))
    recorder, attn = Recorder(), Attention(LAYER, **LIMITS)
    caches = [tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2)) for _ in range(2)]
    q, outs, batch = torch.randn(4, 4, 8), torch.zeros(2, 4, 4, 8), batch_of([(1, 9), (1, 3)])
    with using(recorder):
        graphs, held = [recorder.CUDAGraph() for _ in slots], []
        for graph, slot, cache, out in zip(graphs, slots, caches, outs, strict=True):
            plan = attn.plan(batch, pad_to=4, slot=slot)
            attn.run(q, cache, plan, out=out)
            with recorder.graph(graph):
                attn.run(q, cache, plan, out=out)
            held.append({(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors(plan.segments)})
        both = recorder.CUDAGraph()
        both.operations = [each for pair in zip(*(graph.operations for graph in graphs), strict=True) for each in pair]
        both.replay()
    apart = all(end <= other or last <= start for start, end in held[0] for other, last in held[1])
    wanted = torch.stack([attn.run(q[:2], cache, attn.plan(batch, slot=9)).out for cache in caches])
    assert apart is torch.allclose(outs[:, :2], wanted) is (slots == (0, 1))


def test_a_chunked_layer_is_padded_as_the_requests_that_its_chunks_make(device_kernels):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, chunk=8, dtype=torch.float32)
    attn, plain = Attention(layer, **LIMITS), Attention(layer, **LIMITS)
    cache = tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2))
    for size, rows in (
        (Size(4), [(1, 7), (1, 8), (1, 30)]), (Size(3, 5), [(5, 6)] * 2), (Size(3, 9, tokens=20), [(9, 3), (1, 15)]),
    ):  # fmt: skip
        batch = batch_of(rows)
        plan, q = attn.plan(batch, pad_to=size), torch.randn(size.padded_tokens, 4, 8)
        inner = local_size(size, 8)
        assert inner.reqs == local_capacity(size.reqs, size.padded_tokens, 8) and inner.why_not(local(batch, 8)) is None
        out, live = attn.run(q, cache, plan).out, batch.num_tokens
        assert torch.equal(out[:live], plain.run(q[:live], cache, plain.plan(batch)).out) and not out[live:].any()


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        ([(1, 4), (2, 7)], 3, "does not fit into 3 x 2 tokens: row 0 has 1 new tokens, where each has 2"),
        ([(1, 4)] * 3, Size(2, 4), "does not fit into 2 x 4 tokens: it has 3 requests, above 2"),
        ([(1, 20)], Size(3, seq_len=16), "sequences up to 16: it has a sequence of 21 tokens, above 16"),
    ],
)
def test_a_step_of_chunks_fits_where_the_step_does(device_kernels, chunk, rows, size, message):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, chunk=chunk, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        Attention(layer, **LIMITS).plan(batch_of(rows), pad_to=size)


def test_latents_are_padded_for_decodes_alone(device_kernels):
    layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
                      dtype=torch.float32)  # fmt: skip
    attn, plain = MlaAttention(layer, **LIMITS), MlaAttention(layer, **LIMITS)
    weights = MlaWeights.from_kv_b_proj(torch.randn(2 * 14, 16), layer)
    pages = torch.randn(PAGES, PAGE, 20)
    where = set()
    for rows in ([(2, 9), (2, 3)], [(2, 30)], []):
        batch = batch_of(rows)
        plan, live = attn.plan(batch, pad_to=Size(3, 2)), batch.num_tokens
        x = [torch.randn(6, *shape) for shape in ((2, 8), (2, 4), (16,), (4,))]
        out, lse = attn.run(*x, pages, plan, weights, return_lse=True)
        wanted = plain.run(*(t[:live] for t in x), pages, plain.plan(batch), weights, return_lse=True)
        torch.testing.assert_close(out[:live], wanted.out)
        torch.testing.assert_close(lse[:, :live], wanted.lse)
        assert not out[live:].any() and (lse[:, live:] == -torch.inf).all()
        where.add(tuple(addresses(plan)))
    assert len(where) == 1
    with pytest.raises(UnsupportedError, match="pad_to has requests of 9 new tokens; MLA is captured up to 8"):
        attn.plan(batch_of([(9, 3)]), pad_to=2)


def test_a_kernel_that_wants_keys_for_padding_gets_them_and_its_output_is_masked(monkeypatch):
    kernels = tuple(launches(kernel, GraphLevel.UNIFORM) for kernel in ORACLES)
    kernels = tuple(replace(kernel, caps=replace(kernel.caps, padded_seq_len=1)) for kernel in kernels)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    attn, batch = Attention(LAYER, **LIMITS), batch_of([(1, 9)])
    plan = attn.plan(batch, pad_to=3)
    assert plan.batch.seq_lens.tolist() == [10, 1, 1]
    out, lse = attn.run(torch.randn(3, 4, 8), tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2)), plan,
                        return_lse=True)  # fmt: skip
    assert out[0].all() and not out[1:].any() and (lse[:, 1:] == -torch.inf).all()


def test_only_a_kernel_of_enough_level_is_chosen(monkeypatch):
    kernels = tuple(launches(kernel, GraphLevel.UNIFORM) for kernel in ORACLES)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    attn = Attention(LAYER, **LIMITS)
    assert attn.plan(batch_of([(2, 3)]), pad_to=3).level is GraphLevel.UNIFORM
    with pytest.raises(UnsupportedError, match="graph level VARLEN is above UNIFORM"):
        attn.plan(batch_of([(2, 3)]), pad_to=Size(3, 2, tokens=4))


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        ([(1, 3)] * 3, 2, "the step does not fit into 2 x 1 tokens: it has 3 requests, above 2"),
        ([(2, 3), (1, 3)], 2, "row 1 has 1 new tokens, where each has 2"),
        ([(3, 3)], Size(2, 2), "it has a request of 3 new tokens, above 2"),
        ([(3, 3), (2, 1)], Size(2, 3, tokens=4), "it has 5 tokens, above 4"),
        ([(1, 9)], Size(1, seq_len=9), "it has a sequence of 10 tokens, above 9"),
        ([(1, 3)], 7, "pad_to has 7 requests, above the 6 that this Attention was made for"),
        ([(1, 3)], Size(6, 9), "pad_to has 54 tokens, above the 48"),
        ([(1, 3)], Size(6, seq_len=33), "pad_to has 33 tokens in one sequence, above the 32"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(device_kernels, rows, size, message):
    with pytest.raises(ValueError, match=message):
        Attention(LAYER, **LIMITS).plan(batch_of(rows), pad_to=size)


def test_sizes_are_checked_and_the_least_is_taken():
    for wrong, message in (({"reqs": 0}, "reqs is 0"), ({"reqs": 1, "queries": 3, "tokens": 2}, "tokens is 2")):
        with pytest.raises(ValueError, match=message):
            Size(**wrong)
    steps = [*ladder(6), Size(6, 4), Size(6, 8, tokens=12), Size(2, seq_len=8)]
    for rows, wanted in (([(1, 3)] * 3, Size(4)), ([(1, 3)], Size(1)), ([(4, 1)], Size(6, 8, tokens=12)),
                         ([(1, 3), (2, 1)], Size(6, 8, tokens=12)), ([(4, 3)] * 4, Size(6, 4)), ([(9, 1)], None),
                         ([(1, 3)] * 2, Size(2, seq_len=8)), ([(1, 20)] * 2, Size(2))):  # fmt: skip
        assert least(steps, batch_of(rows)) == wanted


def test_a_plan_during_a_capture_is_refused(device_kernels):
    recorder = Recorder()
    with using(recorder):
        attn = Attention(LAYER, **LIMITS)
        batch, graph = batch_of([(1, 3)]), recorder.CUDAGraph()
        attn.plan(batch, pad_to=2)
        refused = pytest.raises(RuntimeError, match="plan was called while a graph is captured")
        with refused, recorder.graph(graph):
            attn.plan(batch, pad_to=2)


def test_what_a_step_in_parts_is_told_to_be_instead_can_be_planned(device_kernels):
    """A prefix as the batch that it was made of, a tree as a chain, and a prompt beside decodes in one batch."""
    attn, cache = Attention(LAYER, **LIMITS), tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2))
    shared = Batch.from_lens([1, 1, 1], [10, 9, 12], block_table=[[3, 7, 1], [3, 7, 2], [3, 7, 4]], page_size=PAGE)
    parents, slots = torch.tensor([[-1, 0, 1]] * 3), torch.tensor([[80, 81, 82], [90, 91, 92], [100, 101, 102]])
    drafts = tree(shared, parents, slots, depth=3)
    told = r"write plan\(step\), without pad_to.*plan\(batch, pad_to=n\).*Size\(reqs, queries, tokens=t\)"
    for parts in (prefix(shared, 8), drafts):
        for pad_to in (4, Size(4, 8, tokens=16)):
            with pytest.raises(UnsupportedError, match=told):
                attn.plan(parts, pad_to=pad_to)
    tables = [[3, 7, 20 + row, 30 + row] for row in range(3)]
    chain = Batch.from_lens([1 + 2] * 3, [12, 11, 14], block_table=tables, page_size=PAGE)
    both = Batch.from_lens([1, 1, 6], [10, 9, 6], block_table=[[3, 7, 1], [3, 7, 2], [5, 6, 8]], page_size=PAGE)
    for step, parts, pad_to in (
        (shared, prefix(shared, 8), 4), (chain, chain, 4), (both, both, Size(4, 8, tokens=16))
    ):  # fmt: skip
        tokens = step.num_tokens
        plan = attn.plan(step, pad_to=pad_to)
        q = torch.randn(plan.size.padded_tokens, 4, 8)
        out = attn.run(q, cache, plan).out
        torch.testing.assert_close(out[:tokens], attn.run(q[:tokens], cache, attn.plan(parts, slot=1)).out)
        assert not out[tokens:].any()
