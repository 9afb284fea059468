"""MLA end to end: both algorithms, in chunks of any size, equal up-projecting every latent of every request."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from mla_cases import HEADS, NOPE, RANK, ROPE, V_DIM, Step, make_step, mla_layer

from portable import (
    KV,
    Attention,
    Batch,
    Layer,
    LayerTensors,
    MlaAttention,
    MlaWeights,
    Op,
    allocate_cache,
    merge_states,
    mla,
)
from portable.backends.pages import FP8
from portable.mla_slot import MlaSlot
from portable.padding import pad
from portable.parts import prefix
from portable.shards import shard, shard_lens

LAYER = mla_layer()


def attention(layer=LAYER, **more):
    return MlaAttention(layer, **{"page_size": 4, "device": "cpu", "workspace": 8, **more})


def close(found, right, tolerance):
    torch.testing.assert_close(found.double(), right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_500_random_steps_in_chunks_equal_the_oracle_and_the_step_unchunked(backend):
    """F40, F45: contexts of all lengths, zeros among them, in any order; float64 to 1e-10."""
    draw = random.Random(0)
    for n in range(500 if backend == "torch" else 50):
        rows = [(draw.choice((0, 1, 1, 3, 9, 17)), draw.choice((0, 0, 1, 5, 40))) for _ in range(draw.randint(0, 7))]
        if n % 2:
            rows.sort(key=lambda row: (not row[1], row[0] > 8))
        page_size = draw.choice((1, 3, 4))
        made = make_step(LAYER, *([row[i] for row in rows] for i in range(2)), page_size=page_size, seed=n)
        right, right_lse = made.right(LAYER)
        for workspace in (page_size * draw.choice((1, 2, 5)), None):
            attn = attention(page_size=page_size, workspace=workspace, backend=backend)
            found = made.run(attn, return_lse=n % 3 == 0)
            close(found.out, right, 1e-10)
            if found.lse is not None:
                close(found.lse, right_lse, 1e-6)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1, 20, 3, 20], [5000, 300, 0, 50]),
        ([12] * 34, [900, *[3] * 33]),
        ([1, 1, 8, 5, 9, 30, 30], [7, 4, 1, 64, 9, 0, 0]),
    ],
    ids=["a long decode beside prefills", "one long context beside many tiny ones", "one of each"],
)
def test_steps_that_went_wrong_elsewhere(query_lens, context_lens):
    made = make_step(LAYER, query_lens, context_lens, page_size=16)
    close(made.run(attention(page_size=16, workspace=512)).out, made.right(LAYER)[0], 1e-10)


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False] * 3)])
def test_requests_without_a_causal_mask(causal):
    made = make_step(LAYER, [1, 4, 9, 20, 5, 12], [9, 30, 7, 40, 0, 0], causal=causal)
    for backend in ("torch", "reference"):
        close(made.run(attention(backend=backend)).out, made.right(LAYER)[0], 1e-10)


def test_an_absorbed_decode_equals_an_up_projected_prefill(monkeypatch):
    """F39."""
    made = make_step(LAYER, [2, 5, 8], [30, 1, 12])
    attn = attention()
    decoded = made.run(attn, return_lse=True)
    assert not attn.plan(made.batch).segments.prefills
    monkeypatch.setattr(mla, "decode_threshold", lambda *_: (1, False))
    attn = attention()
    prefilled = made.run(attn, return_lse=True)
    assert not attn.plan(made.batch).segments.decodes
    close(decoded.out, prefilled.out, 1e-10)
    close(decoded.lse, prefilled.lse.double(), 1e-6)


def some_of(made: Step, rows: list[int]) -> tuple[Step, list[int]]:
    """The step of some requests on the same pages, and their tokens in the whole."""
    cu, queries, lens = made.batch.host_cu_seqlens_q, made.batch.query_lens, made.batch.host_seq_lens
    tokens = [t for row in rows for t in range(cu[row], cu[row + 1])]
    table = made.batch.block_table.numpy()[rows]
    batch = Batch.from_lens(queries[rows], lens[rows], block_table=table, page_size=made.batch.page_size)
    return dataclasses.replace(made, batch=batch, q=made.q[tokens], new=made.new[tokens]), tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_a_batch_invariant_layer_a_request_has_the_bits_of_every_batch(dtype):
    """Alone, and behind the others in another order; the same products in one piece differ in some draws."""
    layer, draw, chunks = mla_layer(dtype, batch_invariant=True), random.Random(1), 0
    for n in range(25):
        rows = [(draw.choice((1, 1, 3, 9, 17)), draw.choice((0, 1, 5, 40, 70))) for _ in range(draw.randint(2, 6))]
        made = make_step(layer, *([row[i] for row in rows] for i in range(2)), seed=n)
        attn = attention(layer, workspace=20)
        whole = made.run(attn, return_lse=True)
        chunks += sum(len(prefill.context) for prefill in attn._slots[0].plan.segments.prefills)
        close(whole.out, made.right(layer)[0], 0.15 if dtype is torch.bfloat16 else 1e-4)
        for order in (*([r] for r in range(len(rows))), [*range(len(rows))][::-1]):
            part, tokens = some_of(made, order)
            found = part.run(attn, return_lse=True)
            assert torch.equal(found.out, whole.out[tokens]) and torch.equal(found.lse, whole.lse[:, tokens])
    assert chunks > 60


@pytest.mark.parametrize("queries", range(1, 9))
def test_each_token_of_a_verify_step_has_its_own_limit(queries):
    """C32: 16 heads of 512 + 64, lengths 8 and 33; of three queries on 8 keys the first sees 6."""
    layer = mla_layer(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64)
    made = make_step(layer, [queries] * 2, [8 - min(queries, 7), 33 - queries], page_size=16)
    attn = attention(layer, page_size=16, workspace=16)
    found = made.run(attn).out
    assert len(attn.plan(made.batch).segments.decodes) == 1
    close(found, made.right(layer)[0], 1e-10)
    assert len(found.flatten(1).unique(dim=0)) == 2 * queries


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, torch.float16, *sorted(FP8, key=str)], ids=str)
def test_caches_of_every_type_and_page_size(kv_dtype, page_size):
    """Concat and write, decode and gather: quantised latents are used as what they stand for."""
    layer = mla_layer(torch.float32, kv_dtype=kv_dtype)
    scale = 0.25 if kv_dtype in FP8 else None
    made = make_step(layer, [1, 2, 11, 20], [9, 300, 40, 0], page_size=page_size, k_scale=scale)
    attn = attention(layer, page_size=page_size, workspace=max(256, page_size))
    found = made.run(attn)
    for row, (start, context) in enumerate(zip(made.batch.host_cu_seqlens_q, made.batch.context_lens, strict=False)):
        kept = made.latents[row][context:]
        slots = made.batch.slot_mapping[start : start + len(kept)]
        stored = made.pages[slots // page_size, slots % page_size].float() * (scale or 1)
        torch.testing.assert_close(stored, kept, atol=0.2, rtol=0.15 if scale else 0.01)
        if row < 2:  # a decode reads its new tokens from the pages, a prefill has them as they were
            kept.copy_(stored)
    close(found.out, made.right(layer)[0], 2e-5)


def test_written_pages_are_the_two_parts_of_a_row_and_nothing_else():
    layer = mla_layer(torch.float32)
    attn = attention(layer)
    cache = allocate_cache(layer, num_pages=6, page_size=4, device="cpu")
    assert cache.v is None and cache.k.shape == (6, 4, RANK + ROPE)
    batch = Batch.from_lens([3, 2], [3, 6], block_table=[[5, 0], [2, 1]], page_size=4)
    kv_c, k_pe = torch.randn(5, RANK), torch.randn(5, ROPE)
    attn.write(kv_c, k_pe, cache, attn.plan(batch))
    rows = torch.cat([kv_c, k_pe], 1)
    assert torch.equal(cache.k[5, :3], rows[:3]) and torch.equal(cache.k[1, :2], rows[3:] * 1)
    cache.k[5, :3] = cache.k[1, :2] = 0
    assert not cache.k.any()


def test_out_may_be_strided_and_padding_is_empty():
    made = make_step(LAYER, [1, 12, 3], [9, 5, 0])
    right, right_lse = made.right(LAYER)
    tokens = made.batch.num_tokens
    more = Step(**{**vars(made), "batch": pad(made.batch, 6, tokens + 3)})
    more.q, more.new = (
        torch.nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, 3), value=torch.nan) for t in (more.q, more.new)
    )
    out = torch.full((tokens + 3, HEADS + 1, V_DIM + 2), torch.nan, dtype=torch.float64)[:, 1:, :V_DIM]
    found = more.run(attention(), return_lse=True, out=out)
    assert found.out is out
    close(out[:tokens], right, 1e-10)
    close(found.lse[:, :tokens], right_lse, 1e-6)
    assert not out[tokens:].any() and torch.isneginf(found.lse[:, tokens:]).all()


def side_by_side(tensor):
    """What a kernel reads and writes that never looks at the last stride."""
    return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))


def of_dense_rows(kernel):
    """The kernel as one that takes the elements of a head of its outputs to be side by side, whatever they are."""

    def attend(q, kv, segment, layer, tensors, out, lse):
        kernel.run(q, kv, segment, layer, tensors, side_by_side(out), lse)

    def merge(outs, lses, sinks, out, lse):
        kernel.run(tuple(map(side_by_side, outs)), lses, sinks, side_by_side(out), lse)

    return dataclasses.replace(kernel, run=merge if kernel.caps.op is Op.MERGE else attend)


@pytest.mark.parametrize("shared", [0, 8], ids=["a step", "a step in parts"])
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1)], ids=["of tokens", "of dims"])
def test_an_out_of_any_strides_is_filled_by_kernels_that_write_dense_rows(order, shared):
    made, attn = make_step(LAYER, [1, 9], [9, 30]), attention()
    made.batch.block_table[1, : shared // 4] = made.batch.block_table[0, : shared // 4]
    made.latents[1][:shared] = made.latents[0][:shared]
    right = made.right(LAYER)[0]

    def choose(op, needs):
        kernel = attn._kernels(op, needs)
        return of_dense_rows(kernel) if op in (Op.PREFILL, Op.MERGE) else kernel

    attn._slots[0] = MlaSlot(LAYER, choose, workspace=8)
    if shared:
        made.batch = prefix(made.batch, shared)
    shape = 10, HEADS, V_DIM
    out = torch.empty([shape[d] for d in order], dtype=torch.float64).permute([order.index(d) for d in range(3)])
    assert out.stride(-1) != 1 and made.run(attn, out=out).out is out
    close(out, right, 1e-10)


def test_ranks_that_share_a_context_merge_to_the_whole():
    """F56: a decode over keys spread over two ranks."""
    made = make_step(LAYER, [1, 1, 1], [8, 1, 32], page_size=4)
    right = made.right(LAYER)[0]
    parts = []
    for rank in range(2):
        lens = shard_lens(np.array([9, 2, 33]), 2, rank)
        table = torch.arange(3 * 5, dtype=torch.int32).view(3, 5)
        pages = torch.full((15, 4, RANK + ROPE), torch.nan, dtype=torch.float64)
        for row, (n, latents) in enumerate(zip(lens, made.latents, strict=True)):
            flat = pages[table[row].long()].flatten(0, 1)
            flat[:n] = latents[rank::2][:n]
            pages[table[row].long()] = flat.view(5, 4, -1)
        attn = attention()
        plan = attn.plan(shard(Batch.from_lens([1, 1, 1], [9, 2, 33]), 2, rank, table, 4))
        q_nope, q_pe = made.q.split([NOPE, ROPE], -1)
        kv_c, k_pe = made.new.split([RANK, ROPE], -1)
        parts.append(attn.run(q_nope, q_pe, kv_c, k_pe, pages, plan, made.weights, return_lse=True))
    outs, lses = zip(*parts, strict=True)
    close(merge_states(outs, lses).out, right, 1e-6)


def test_a_batch_without_a_cache_attends_to_its_own_tokens():
    made = make_step(LAYER, [5, 0, 9], [0, 0, 0])
    attn = attention()
    plan = attn.plan(Batch.from_lens([5, 0, 9], [5, 0, 9]))
    kv_c, k_pe = made.new.split([RANK, ROPE], -1)
    found = attn.run(*made.q.split([NOPE, ROPE], -1), kv_c, k_pe, None, plan, made.weights)
    close(found.out, made.right(LAYER)[0], 1e-10)
    with pytest.raises(ValueError, match="the plan writes nothing"):
        attn.write(kv_c, k_pe, made.pages, plan)


# Refusals


def test_what_does_not_fit_is_named():
    made = make_step(LAYER, [1, 9], [9, 5])
    attn = attention()
    plan = attn.plan(made.batch)
    q_nope, q_pe = made.q.split([NOPE, ROPE], -1)
    kv_c, k_pe = made.new.split([RANK, ROPE], -1)
    given = {"q_nope": q_nope, "q_pe": q_pe, "kv_c": kv_c, "k_pe": k_pe, "cache": made.pages, "plan": plan}
    given["weights"] = made.weights
    for changes, message in (
        ({"q_nope": q_nope[1:]}, r"q_nope has shape \[9, 3, 8\]; it must be \[10, 3, 8\]"),
        ({"q_pe": q_pe.float()}, "q_pe is float32; the layer says float64"),
        ({"kv_c": made.new}, r"kv_c has shape \[10, 20\]"),
        ({"k_pe": k_pe[:, None]}, r"k_pe has shape \[10, 1, 4\]"),
        ({"cache": made.pages[..., :-1]}, "cache k has shape"),
        ({"cache": KV(made.pages, made.pages)}, "of MLA it is one tensor"),
        ({"cache": None}, "cache is None"),
        ({"weights": MlaWeights(*made.weights[::-1])}, "weights.w_uk has shape"),
        ({"tensors": LayerTensors(k_scale=torch.ones(3))}, r"tensors.k_scale has shape \[3\]"),
        *(
            ({"tensors": LayerTensors(**{name: torch.ones(3)})}, rf"tensors\.{name} is given; an MLA layer has")
            for name in ("sinks", "alibi", "v_scale", "q_scale")
        ),
        ({"out": torch.empty(1, 3, 6, dtype=torch.float64).expand(10, 3, 6)}, r"out has strides \[0, 6, 1\]; its rows"),
        ({"plan": dataclasses.replace(plan)}, "plan is stale or another object's"),
    ):
        with pytest.raises(ValueError, match=message):
            attn.run(**{**given, **changes})
    with pytest.raises(ValueError, match=r"tensors\.v_scale is given"):
        attn.write(kv_c, k_pe, made.pages, plan, LayerTensors(v_scale=torch.ones(())))
    for step, message in (
        (made.batch.with_group(made.batch.block_table.repeat(1, 4), None, 2), "page_size 2"),
        (Batch.from_lens([1] * 300, [1] * 300), "300 requests, above the 256"),
    ):
        with pytest.raises(ValueError, match=message):
            attn.plan(step)
    with pytest.raises(ValueError, match="serves 'gqa' layers"):
        Attention(LAYER, page_size=4, device="cpu")


def test_an_expanded_out_is_named_behind_one_that_is_not():
    made, attn = make_step(LAYER, [1, 9], [9, 5]), attention()
    made.run(attn, out=torch.empty(10, HEADS, V_DIM, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"out has strides \[0, 6, 1\]"):
        made.run(attn, out=torch.empty(1, HEADS, V_DIM, dtype=torch.float64).expand(10, -1, -1))


def test_a_scale_that_kernels_do_not_read_is_named_in_write_and_run():
    layer = mla_layer(torch.float32, kv_dtype=torch.float8_e4m3fn)
    made, attn = make_step(layer, [1, 9], [9, 5], k_scale=0.25), attention(layer)
    made.run(attn)
    plan, (kv_c, k_pe) = attn.plan(made.batch), made.new.split([RANK, ROPE], -1)
    for dtype in (torch.float64, torch.float8_e4m3fn):
        tensors, message = LayerTensors(k_scale=torch.ones(()).to(dtype)), "tensors.k_scale is .*; it must be float32"
        with pytest.raises(ValueError, match=message):
            attn.write(kv_c, k_pe, made.pages, plan, tensors)
        with pytest.raises(ValueError, match=message):
            attn.run(*made.q.split([NOPE, ROPE], -1), kv_c, k_pe, made.pages, plan, made.weights, tensors=tensors)


@pytest.mark.parametrize("page", [-1, 1000])
def test_a_page_that_is_not_in_the_cache_names_its_row(page):
    for backend in ("torch", "reference"):
        made = make_step(LAYER, [1, 9, 9], [9, 0, 9])
        attn = attention(backend=backend)
        kv_c, k_pe = made.new.split([RANK, ROPE], -1)
        made.batch.block_table[2, 0] = page
        plan = attn.plan(made.batch)
        with pytest.raises(ValueError, match=f"row 2: block_table holds page {page}"):
            attn.run(*made.q.split([NOPE, ROPE], -1), kv_c, k_pe, made.pages, plan, made.weights)


def test_explain_shows_every_operation():
    text = str(attention(Layer.mla(num_heads=16), page_size=16, workspace=None).explain())
    for op in ("prefill", "mla_decode (decode", "merge", "cache_write", "cache_gather"):
        assert f"\n{op}" in text, op


def test_a_merge_writes_out_in_place_and_its_lse_elsewhere():
    """Threads that share a row each read its LSE: one that has written it already would be read by another."""
    attn, merges = attention(), []

    def choose(op, needs):
        kernel = attn._kernels(op, needs)
        if op is not Op.MERGE:
            return kernel

        def run(outs, lses, sinks, out, lse):
            merges.append((out.data_ptr() == outs[0].data_ptr(), lse.data_ptr() in [part.data_ptr() for part in lses]))
            kernel.run(outs, lses, sinks, out, lse)

        return dataclasses.replace(kernel, run=run)

    made = make_step(LAYER, [1, 9, 20], [9, 30, 5])
    attn._slots[0] = MlaSlot(LAYER, choose, workspace=8)
    close(made.run(attn).out, made.right(LAYER)[0], 1e-10)
    assert merges == [(True, False)] * 5
