"""`Graphs`: a replay gives what an eager run of the same step gives, whichever step was captured."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from addresses import CaptureError
from launched import captured, launches
from recording import RULES, Recorder

from portable import Attention, Batch, Layer, MlaAttention, MlaWeights
from portable.backends import reference, reference_steps
from portable.graphs import Graphs
from portable.kernel import GraphLevel
from portable.platform.graphs import using
from portable.sizes import Size, ladder
from portable.variants import draft

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
PAGES, PAGE, WIDTH = 60, 4, 8
LIMITS = {"page_size": PAGE, "device": "cpu", "max_reqs": 6, "max_tokens": 48, "max_seq_len": PAGE * WIDTH}


@pytest.fixture(params=RULES)
def recorder(request, monkeypatch):
    """A vendor's runtime, and the reference as kernels that it captures."""
    kernels = captured(*reference.KERNELS, *reference_steps.KERNELS)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    recorder = Recorder(RULES[request.param])
    with using(recorder):
        yield recorder


def step_of(rng, reqs, queries=1, longest=PAGE * WIDTH - 4):
    rows = int(rng.integers(1, reqs + 1))
    table = rng.permutation(PAGES)[: rows * WIDTH].reshape(rows, WIDTH)
    new = np.full(rows, queries)
    return Batch.from_lens(new, new + rng.integers(0, longest - queries + 1, rows), block_table=table, page_size=PAGE)


def pages():
    return tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2))


def inputs(tokens):
    return tuple(torch.randn(tokens, heads, 8) for heads in (4, 2, 2))


def test_replays_give_what_eager_runs_give(recorder):
    attn, caches = Attention(LAYER, **LIMITS), [pages() for _ in range(2)]  # two layers

    def fn(plans, q, k, v):
        for cache in caches:
            attn.write(k, v, cache, plans[0])
            q = q + attn.run(q, cache, plans[0]).out
        return q, q.sum((1, 2))

    graphs, rng = Graphs(fn, [attn], [*ladder(6), Size(3, 4), Size(4, 9, tokens=20)]), np.random.default_rng(0)
    for turn in range(40):
        step = step_of(rng, *((6,), (3, 4), (2, 5))[turn % 3])
        given = inputs(step.num_tokens)
        before = [tuple(part.clone() for part in cache) for cache in caches]
        out, sums = graphs(step, *given)
        wrote = [tuple(part.clone() for part in cache) for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            for part, was in zip(cache, old, strict=True):
                part.copy_(was)
        wanted, wanted_sums = fn((attn.plan(step, slot=7),), *given)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(sums, wanted_sums)
        for cache, mine in zip(caches, wrote, strict=True):
            assert all(torch.equal(part, other) for part, other in zip(cache, mine, strict=True))
    assert len(graphs.captured) > 4 and recorder.replays >= 40


def test_groups_share_a_graph_and_not_their_memory(recorder):
    """Two kinds of layers, and one kind over two KV groups: each plan has its own pages."""
    attn = Attention(LAYER, **LIMITS)
    other = Attention(Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, window=6, dtype=torch.float32), **LIMITS)
    kinds, cache, rng = (attn, attn, other), pages(), np.random.default_rng(1)

    def fn(plans, q):
        return torch.stack([each.run(q, cache, plan).out for each, plan in zip(kinds, plans, strict=True)], 1)

    graphs = Graphs(fn, kinds, ladder(6))
    for _ in range(8):
        step = step_of(rng, 6)
        table = torch.from_numpy(rng.permutation(PAGES)[: step.num_reqs * WIDTH].reshape(-1, WIDTH).astype(np.int32))
        steps = (step, step.with_group(table, None, PAGE), step)
        (q, _, _) = inputs(step.num_tokens)
        wanted = [each.run(q, cache, each.plan(one, slot=9)).out for each, one in zip(kinds, steps, strict=True)]
        torch.testing.assert_close(graphs(steps, q), torch.stack(wanted, 1))
    first = attn.plan(step, pad_to=6)
    kept = first.batch.block_table.clone()
    second = attn.update_block_table(first, table, slot=1)
    assert torch.equal(first.batch.block_table, kept) and second.write is None
    reach = -(-step.max_seq_len // PAGE)
    assert torch.equal(second.batch.block_table[: step.num_reqs, :reach], table[:, :reach])
    with pytest.raises(ValueError, match="slot 0 holds the plan itself"):
        attn.update_block_table(first, table, slot=0)
    eager = attn.update_block_table(attn.plan(step, slot=3), table, slot=4)
    torch.testing.assert_close(attn.run(q, cache, eager).out, wanted[1])


@pytest.mark.parametrize("latent", [False, True])
def test_a_drafters_loop_advances_within_the_graph(recorder, latent):
    """Three steps in one graph, against plans of each step on the host; kernels prepare each of them."""
    rng, size = np.random.default_rng(2), Size(4, ahead=2)
    if latent:
        layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
                          dtype=torch.float32)  # fmt: skip
        attn, cache = MlaAttention(layer, **LIMITS), torch.randn(PAGES, PAGE, 20)
        weights = MlaWeights.from_kv_b_proj(torch.randn(2 * 16, 16), layer)

        def layer_of(x, plan):
            parts = x[:, 0, :2].repeat(1, 8), x[:, 0, :4]
            attn.write(*parts, cache, plan)
            return attn.run(x, x[..., :4], *parts, cache, plan, weights).out
    else:
        attn, cache = Attention(LAYER, **LIMITS), pages()

        def layer_of(x, plan):
            attn.write(x[:, :2], x[:, 2:], cache, plan)
            return attn.run(x, cache, plan).out

    heads = 2 if latent else 4

    def loop(plans, x):
        outs, positions = [], []
        for turn in range(3):
            x = torch.tanh(layer_of(x, plans[0])) + 1
            outs.append(x)
            if turn < 2:
                positions.append(attn.advance(plans[0]))
        return torch.stack(outs, 1), torch.stack(positions, 1)

    graphs = Graphs(loop, [attn], [size])
    for _ in range(6):
        step = step_of(rng, 4)
        x = torch.randn(step.num_tokens, heads, 8)
        held = cache.clone() if latent else tuple(part.clone() for part in cache)
        out, positions = graphs(step, x)
        for part, was in zip((cache,) if latent else cache, (held,) if latent else held, strict=True):
            part.copy_(was)
        wanted = []
        for turn in range(3):
            now = step if not turn else draft(step, turn - 1)
            x = torch.tanh(layer_of(x, attn.plan(now, slot=5))) + 1
            wanted.append(x)
        torch.testing.assert_close(out, torch.stack(wanted, 1))
        assert positions.tolist() == [[length, length + 1] for length in step.host_seq_lens]
    plan, graph = attn.plan(step_of(rng, 4), pad_to=size), recorder.CUDAGraph()
    attn.advance(plan)
    with pytest.raises(RuntimeError, match="plan advanced before the capture began"), recorder.graph(graph):
        layer_of(torch.randn(4, heads, 8), plan)
    step = step_of(rng, 4)
    plan, x = attn.plan(step, pad_to=size), torch.zeros(4, heads, 8)
    x[: step.num_reqs] = torch.randn(step.num_reqs, heads, 8)
    with recorder.graph(recorder.CUDAGraph()):  # which computes nothing: the plan is where it was
        attn.advance(plan)
        layer_of(x, plan)
    again = layer_of(x, plan)[: step.num_reqs]
    torch.testing.assert_close(again, layer_of(x[: step.num_reqs], attn.plan(step, slot=5)))
    with pytest.raises(ValueError, match="a step that advances has one new token"):
        attn.advance(attn.plan(step_of(rng, 2, 2), pad_to=2))
    with pytest.raises(ValueError, match="the plan is of a step that is not padded"):
        attn.advance(attn.plan(step))
    long = Batch.from_lens([1], [PAGE * WIDTH - 1], block_table=np.arange(WIDTH)[None], page_size=PAGE)
    with pytest.raises(ValueError, match="sequences of 31 tokens and 2 more"):
        attn.plan(long, pad_to=size)


def test_an_lse_that_is_first_asked_for_behind_an_advance_is_of_the_step_then(recorder):
    attn, cache, size = Attention(LAYER, **LIMITS), pages(), Size(2, ahead=1)
    step = Batch.from_lens([1, 1], [8, 16], block_table=np.arange(16).reshape(2, 8), page_size=PAGE)
    plan, x = attn.plan(step, pad_to=size), torch.randn(2, 4, 8)
    attn.run(x, cache, plan)
    attn.advance(plan)
    out, lse = attn.run(x, cache, plan, return_lse=True)
    wanted = attn.run(x, cache, attn.plan(draft(step, 0), slot=1), return_lse=True)
    torch.testing.assert_close(out, wanted.out)
    torch.testing.assert_close(lse, wanted.lse)


def test_sizes_are_captured_ahead_from_the_largest_within_a_budget(recorder, caplog):
    attn, cache = Attention(LAYER, **LIMITS), pages()
    held = iter(range(0, 10**6, 700))
    recorder.memory_reserved = lambda device: next(held)
    graphs = Graphs(lambda plans, q: attn.run(q, cache, plans[0]).out, [attn], ladder(6), budget=1500)
    step = step_of(np.random.default_rng(3), 2)
    with caplog.at_level(logging.WARNING, "portable"):
        assert graphs.capture(step, inputs(step.num_tokens)[0]) == 1400 == graphs.nbytes
    assert graphs.captured == (Size(6), Size(4))
    assert "Size" not in caplog.text and "1 x 1 tokens takes 700 bytes, above the budget of 1500" in caplog.text
    before = recorder.replays
    for size in (1, 4):
        step = step_of(np.random.default_rng(size), 1) if size == 1 else Batch.from_lens(
            [1] * 4, [9] * 4, block_table=np.arange(12).reshape(4, 3), page_size=PAGE
        )  # fmt: skip
        (q, _, _) = inputs(step.num_tokens)
        torch.testing.assert_close(graphs(step, q), attn.run(q, cache, attn.plan(step, slot=2)).out)
    assert recorder.replays > before


def test_what_cannot_be_captured_is_told(recorder):
    attn, cache = Attention(LAYER, **LIMITS), pages()
    graphs = Graphs(lambda plans, q: attn.run(q, cache, plans[0]).out, [attn], [2, Size(3, 4)])
    rng = np.random.default_rng(4)
    with pytest.raises(
        ValueError, match="fits into none of 2 sizes; into the largest, 3 x 4 tokens, because it has 5 req"
    ):
        graphs(
            Batch.from_lens([1] * 5, [3] * 5, block_table=np.zeros((5, 1), int), page_size=PAGE), torch.zeros(5, 4, 8)
        )
    with pytest.raises(ValueError, match="steps has 2 entries; there are 1 attentions"):
        graphs([step_of(rng, 1)] * 2, torch.zeros(1, 4, 8))
    graphs(step_of(rng, 1), torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match=r"an input is torch.float32 \[1, 4, 7\]; the size was captured with"):
        graphs(step_of(rng, 1), torch.zeros(1, 4, 7))
    with pytest.raises(ValueError, match="0 inputs are given; the size was captured with 1"):
        graphs(step_of(rng, 1))
    for wrong in ([], [attn]):
        with pytest.raises(ValueError, match="is empty"):
            Graphs(lambda plans: torch.zeros(1), wrong, [] if wrong else [1])
    reads = Graphs(lambda plans, q: q * float(q.sum()), [attn], [2])
    with pytest.raises(CaptureError, match="waits for the device"):
        reads(step_of(rng, 1), torch.zeros(1, 4, 8))


def test_a_device_without_graphs_has_none():
    with pytest.raises(RuntimeError, match="cpu has no graphs"):
        Graphs(lambda plans: torch.zeros(1), [Attention(LAYER, **LIMITS)], [1])


def test_a_way_of_calling_that_was_not_met_before_the_capture_is_refused(monkeypatch):
    """Two kernels, of which one tells no LSE: `run` with return_lse has a preparation of its own."""
    kernels = tuple(launches(kernel, GraphLevel.ALWAYS) for kernel in (*reference.KERNELS, *reference_steps.KERNELS))
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    attn, cache, recorder = Attention(LAYER, **LIMITS), pages(), Recorder()
    chosen = attn._kernels
    with using(recorder):
        step = step_of(np.random.default_rng(5), 1)
        plan, q = attn.plan(step, pad_to=1), torch.randn(1, 4, 8)
        monkeypatch.setattr(chosen, "_choices", {})
        monkeypatch.setattr(
            "portable.attention.load_kernels",
            lambda: tuple(launches(kernel) for kernel in (*reference.KERNELS, *reference_steps.KERNELS)),
        )
        with pytest.raises(RuntimeError, match="the first call with return_lse is captured"), recorder.graph(
            recorder.CUDAGraph()
        ):  # fmt: skip
            attn.run(q, cache, plan, return_lse=True)
        attn.run(q, cache, plan, return_lse=True)
        graph = recorder.CUDAGraph()
        with recorder.graph(graph):
            lse = attn.run(q, cache, plan, return_lse=True).lse
        attn.plan(step, pad_to=1)
        graph.replay()
        torch.testing.assert_close(lse, attn.run(q, cache, attn.plan(step), return_lse=True).lse)
