"""Attention end to end: write and run over pages equal the oracle on each request's whole history."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases

from portable import KV, Attention, Batch, Layer, LayerTensors, Op, UnsupportedError
from portable.backends.reference import attend as oracle

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 8


def make_layer(**kwargs):
    return Layer.gqa(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=V_DIM, dtype=torch.float32, **kwargs
    )


def poisoned_cache(case):
    """Pages of NaN: what is never written must never count."""
    shape = (case.num_pages, case.page_size, KV_HEADS)
    return KV(torch.full((*shape, DIM), torch.nan), torch.full((*shape, V_DIM), torch.nan))


def history(case, generator):
    """Keys and values of every token of every request."""
    return [
        KV(
            torch.randn(s, KV_HEADS, DIM, generator=generator),
            torch.randn(s, KV_HEADS, V_DIM, generator=generator),
        )
        for s in case.seq_lens
    ]


def packed(parts, width):
    return torch.cat([*parts, torch.empty(0, KV_HEADS, width)])


def run(attn, case, layer, tensors, *, contiguous=True, return_lse=False, seed=0):
    """Fill the context, then run the step of `case`; gives what was found and what is right."""
    generator = torch.Generator().manual_seed(seed)
    kvs, cache = history(case, generator), poisoned_cache(case)
    context = [s - q for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    before = Batch.from_lens(context, context, block_table=case.block_table, page_size=case.page_size)
    plan = attn.plan(before)
    attn.write(
        packed([kv.k[:c] for kv, c in zip(kvs, context, strict=True)], DIM),
        packed([kv.v[:c] for kv, c in zip(kvs, context, strict=True)], V_DIM),
        cache,
        plan,
    )
    plan = attn.plan(case.batch(causal=layer.causal))
    q = torch.randn(sum(case.query_lens), HEADS, DIM, generator=generator)
    k = packed([kv.k[c:] for kv, c in zip(kvs, context, strict=True)], DIM)
    v = packed([kv.v[c:] for kv, c in zip(kvs, context, strict=True)], V_DIM)
    attn.write(k, v, cache, plan)
    new = {"k": k, "v": v} if contiguous else {}
    found = attn.run(q, cache, plan, tensors=tensors, return_lse=return_lse, **new)
    right = [
        oracle(
            q[start : start + n],
            kv.k,
            kv.v,
            scale=layer.scale,
            causal=layer.causal,
            window=layer.window,
            softcap=layer.softcap,
            sinks=tensors.sinks,
            alibi=tensors.alibi,
            compute=torch.float64,
        )
        for kv, start, n in zip(kvs, plan.batch.host_cu_seqlens_q, case.query_lens, strict=False)
    ]
    out = torch.cat([*(part.out for part in right), torch.empty(0, HEADS, V_DIM)])
    lse = torch.cat([*(part.lse for part in right), torch.empty(HEADS, 0)], 1)
    return found, out.float(), lse.float()


@pytest.mark.parametrize("backend", ["torch", "reference"])
@given(
    case=cases(),
    window=st.sampled_from([(None, None), (0, 0), (5, 0), (None, 2), (3, 1)]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    alibi=st.booleans(),
    causal=st.booleans(),
    contiguous=st.booleans(),
    return_lse=st.booleans(),
)
def test_a_step_in_any_order_equals_the_oracle(
    backend, case, window, softcap, sinks, alibi, causal, contiguous, return_lse
):
    if backend == "torch":
        softcap, return_lse = None, False  # refused there, see below
    layer = make_layer(window=window, softcap=softcap, sinks=sinks, alibi=alibi, causal=causal)
    tensors = LayerTensors(sinks=torch.randn(HEADS) if sinks else None, alibi=torch.rand(HEADS) if alibi else None)
    attn = Attention(layer, page_size=case.page_size, device="cpu", backend=backend)
    found, out, lse = run(attn, case, layer, tensors, contiguous=contiguous, return_lse=return_lse)
    torch.testing.assert_close(found.out, out, atol=2e-5, rtol=1e-5)
    if return_lse:
        torch.testing.assert_close(found.lse, lse, atol=2e-5, rtol=1e-5)


@given(case=cases(ordered=True))
def test_one_plan_serves_every_way_of_calling_run(case):
    layer = make_layer()
    attn = Attention(layer, page_size=case.page_size, device="cpu")
    outs = [
        run(attn, case, layer, LayerTensors(), contiguous=contiguous, return_lse=lse)[0].out
        for contiguous in (True, False)
        for lse in (True, False)
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=2e-5, rtol=1e-5)


def test_the_default_on_a_cpu_is_fast_where_it_can_be_and_right_elsewhere():
    usual = Attention(make_layer(), page_size=16, device="cpu").choices
    assert {phase: choice.kernel.name for phase, choice in usual.items()} == {
        "decode": "torch.sdpa_paged",
        "extend": "torch.sdpa_paged",
        "prefill": "torch.sdpa",
        "cache_write": "torch.index_put",
    }
    capped = Attention(make_layer(softcap=30.0), page_size=16, device="cpu").choices["decode"]
    assert capped.kernel.name == "reference.paged"
    assert ("torch.sdpa_paged", ("softcap is not supported",)) in capped.rejected


def test_a_forced_backend_that_cannot_serve_fails_when_it_is_configured():
    with pytest.raises(UnsupportedError, match="softcap is not supported"):
        Attention(make_layer(softcap=30.0), page_size=16, device="cpu", backend="torch")


def test_a_batch_without_a_cache_attends_to_what_it_is_given():
    layer = make_layer(causal=False)
    attn = Attention(layer, page_size=1, device="cpu")
    plan = attn.plan(Batch.from_lens([2, 3], [4, 3], causal=False))
    q, k, v = torch.randn(5, HEADS, DIM), torch.randn(7, KV_HEADS, DIM), torch.randn(7, KV_HEADS, V_DIM)
    out = attn.run(q, None, plan, k=k, v=v).out
    right = [oracle(q[a], k[b], v[b], scale=layer.scale, causal=False).out for a, b in (
        (slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7)),
    )]  # fmt: skip
    torch.testing.assert_close(out, torch.cat(right), atol=2e-5, rtol=1e-5)


def test_out_may_be_a_strided_view_and_is_what_run_returns():
    layer = make_layer()
    attn = Attention(layer, page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([3], [3], block_table=[[1]], page_size=4))
    cache = KV(torch.zeros(2, 4, KV_HEADS, DIM), torch.zeros(2, 4, KV_HEADS, V_DIM))
    q, k, v = torch.randn(3, HEADS, DIM), torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, V_DIM)
    wide = torch.zeros(3, HEADS, 2 * V_DIM)
    view = wide[..., :V_DIM]
    assert attn.run(q, cache, plan, k=k, v=v, out=view).out is view
    torch.testing.assert_close(view, attn.run(q, cache, plan, k=k, v=v).out)
    assert not wide[..., V_DIM:].any()
    columns = torch.empty(3, V_DIM, HEADS).transpose(1, 2)  # elements of a head lie apart
    torch.testing.assert_close(attn.run(q, cache, plan, k=k, v=v, out=columns).out, view)
    with pytest.raises(ValueError, match=r"out has strides \[0, .*; its rows share memory or lie among each other"):
        attn.run(q, cache, plan, k=k, v=v, out=torch.empty(1, HEADS, V_DIM).expand(3, -1, -1))


def test_a_stale_plan_is_refused_and_slots_are_apart():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    batch = Batch.from_lens([1], [1], block_table=[[0]], page_size=4)
    first, other = attn.plan(batch), attn.plan(batch, slot=1)
    second = attn.plan(batch)
    cache = KV(torch.zeros(1, 4, KV_HEADS, DIM), torch.zeros(1, 4, KV_HEADS, V_DIM))
    q = torch.randn(1, HEADS, DIM)
    for live in (second, other):
        attn.run(q, cache, live)
    with pytest.raises(ValueError, match="plan is stale"):
        attn.run(q, cache, first)


def test_an_empty_step_runs():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([], [], block_table=torch.zeros(0, 1, dtype=torch.int32), page_size=4))
    cache = KV(torch.zeros(1, 4, KV_HEADS, DIM), torch.zeros(1, 4, KV_HEADS, V_DIM))
    attn.write(torch.zeros(0, KV_HEADS, DIM), torch.zeros(0, KV_HEADS, V_DIM), cache, plan)
    assert attn.run(torch.zeros(0, HEADS, DIM), cache, plan, return_lse=True).out.shape == (0, HEADS, V_DIM)


def test_attention_objects_die_with_their_last_reference():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    handle = attn.plan(Batch.from_lens([1], [1], block_table=[[0]], page_size=4)).handle
    from portable import ops

    gc.disable()
    try:
        del attn
        assert handle not in ops._slots
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(page_size=0), "page_size is 0"),
        (dict(page_size=4, max_reqs=0), "max_reqs is 0"),
        (dict(page_size=4, device="nonsense"), "nonsense"),
        (dict(page_size=4, backend="nonsense"), "nonsense"),
    ],
)
def test_what_cannot_be_configured_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(make_layer(), **{"device": "cpu", **arguments})


def test_other_families_and_chunks_inside_pages_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="chunk 8 is not a multiple of page_size 16"):
        Attention(make_layer(chunk=8), page_size=16, device="cpu")
    with pytest.raises(ValueError, match="'mla'"):
        Attention(Layer.mla(num_heads=4), page_size=4, device="cpu")


def bad_runs():
    good = {
        "q": torch.zeros(3, HEADS, DIM),
        "k": torch.zeros(3, KV_HEADS, DIM),
        "v": torch.zeros(3, KV_HEADS, V_DIM),
        "cache": (torch.zeros(2, 4, KV_HEADS, DIM), torch.zeros(2, 4, KV_HEADS, V_DIM)),
    }
    k, v = good["cache"]
    yield good | {"q": good["q"][:2]}, r"q has shape \[2, 4, 16\]; it must be \[3, 4, 16\]"
    yield good | {"q": good["q"].double()}, "q is float64; the layer says float32"
    yield good | {"k": good["k"][..., :8]}, r"k has shape \[3, 2, 8\]"
    yield good | {"v": None}, "v is None"
    yield good | {"cache": None}, "cache is None"
    yield good | {"cache": (k[:, :3], v)}, r"cache k has shape \[2, 3, 2, 16\]"
    yield good | {"cache": (k.bfloat16(), v)}, "cache k is bfloat16"
    yield good | {"cache": (k, None)}, "cache v is missing"
    yield good | {"cache": (k.mT.contiguous().mT, v)}, "last stride of 2"
    yield good | {"out": torch.zeros(3, HEADS, DIM)}, r"out has shape \[3, 4, 16\]"
    yield good | {"q": good["q"].to("meta")}, "q is on meta; the batch is on cpu"
    yield good | {"tensors": LayerTensors(sinks=torch.zeros(HEADS))}, "tensors.sinks is given"
    yield good | {"tensors": LayerTensors(k_scale=torch.zeros(3))}, "tensors.k_scale has 3 elements"
    yield good | {"tensors": LayerTensors(v_scale=torch.zeros(1).double())}, "tensors.v_scale is float64; it must be"


@pytest.mark.parametrize(("arguments", "message"), list(bad_runs()))
def test_arguments_that_do_not_fit_are_named(arguments, message):
    attn = Attention(make_layer(), page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([3], [3], block_table=[[1]], page_size=4))
    q, cache = arguments.pop("q"), arguments.pop("cache")
    if q.device.type == "meta":
        arguments["out"] = torch.zeros(3, HEADS, V_DIM)
        with pytest.raises(ValueError, match=message):
            from portable.check import check_run

            check_run(attn.layer, plan.parts, q, KV(*cache), None, LayerTensors(), arguments["out"])
        return
    with pytest.raises(ValueError, match=message):
        attn.run(q, cache, plan, **arguments)


# torch itself sends a call with a q on the meta device elsewhere
@pytest.mark.parametrize(("arguments", "message"), [run for run in bad_runs() if run[0]["q"].device.type == "cpu"])
def test_arguments_are_looked_at_behind_a_call_that_was_right(arguments, message):
    """What passed once is remembered, and only that; what it was given besides does not pass for another."""
    attn = Attention(make_layer(), page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([3], [3], block_table=[[1]], page_size=4))
    good = next(bad_runs())[0] | {"q": torch.zeros(3, HEADS, DIM)}
    with torch.no_grad():
        for _ in range(2):
            attn.run(plan=plan, **good)
            attn.write(good["k"], good["v"], good["cache"], plan)
        with pytest.raises(ValueError, match=message):
            attn.run(plan=plan, **arguments)
        attn.run(plan=plan, **good)


def test_what_passed_for_one_step_does_not_for_another():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    cache = KV(torch.zeros(2, 4, KV_HEADS, DIM), torch.zeros(2, 4, KV_HEADS, V_DIM))
    for tokens, others in ((3, 2), (2, 3), (3, 2)):
        plan = attn.plan(Batch.from_lens([tokens], [tokens], block_table=[[1]], page_size=4))
        attn.run(torch.zeros(tokens, HEADS, DIM), cache, plan)
        with pytest.raises(ValueError, match=rf"q has shape \[{others}, 4, 16\]; it must be \[{tokens}, 4, 16\]"):
            attn.run(torch.zeros(others, HEADS, DIM), cache, plan)


def test_a_run_leaves_the_mode_of_gradients_and_records_none():
    attn = Attention(make_layer(), page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([3], [3], block_table=[[1]], page_size=4))
    cache = KV(torch.zeros(2, 4, KV_HEADS, DIM), torch.zeros(2, 4, KV_HEADS, V_DIM))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = attn.run(torch.zeros(3, HEADS, DIM, requires_grad=True), cache, plan).out
            assert torch.is_grad_enabled() is grad and not out.requires_grad


def test_a_layer_with_sinks_needs_them():
    attn = Attention(make_layer(sinks=True), page_size=4, device="cpu")
    plan = attn.plan(Batch.from_lens([1], [1], block_table=[[0]], page_size=4))
    cache = KV(torch.zeros(1, 4, KV_HEADS, DIM), torch.zeros(1, 4, KV_HEADS, V_DIM))
    with pytest.raises(ValueError, match=r"tensors.sinks is None"):
        attn.run(torch.zeros(1, HEADS, DIM), cache, plan)


def test_steps_larger_than_configured_are_refused():
    attn = Attention(make_layer(), page_size=4, device="cpu", max_reqs=1, max_tokens=4, max_seq_len=8)
    for lens, message in (([1, 1], "2 requests, above the 1"), ([5], "5 tokens, above the 4")):
        with pytest.raises(ValueError, match=message):
            attn.plan(Batch.from_lens(lens, lens))
    with pytest.raises(ValueError, match="9 tokens in one sequence, above the 8"):
        attn.plan(Batch.from_lens([1], [9]))
    with pytest.raises(ValueError, match="page_size 8; this Attention was made for 4"):
        attn.plan(Batch.from_lens([1], [1], block_table=[[0]], page_size=8))


def test_a_cache_write_skips_padding_and_touches_nothing_else():
    layer = make_layer()
    attn = Attention(layer, page_size=4, device="cpu")
    kernel = attn.choices["cache_write"].kernel
    assert kernel.caps.op is Op.CACHE_WRITE
    cache = KV(torch.full((5, 4, KV_HEADS, DIM), torch.nan), torch.full((5, 4, KV_HEADS, V_DIM), torch.nan))
    k, v = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, V_DIM)
    for slots in ([3, -1, 17, -1], [-1, -1, -1, -1], [-1, 0, -1, 19]):
        before = [t.clone() for t in cache]
        kernel.run(k, v, cache, torch.tensor(slots), layer, LayerTensors())
        for new, old, rows in zip(cache, before, (k, v), strict=True):
            expected = old.view(20, KV_HEADS, -1).clone()
            for row, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot] = rows[row]
            assert torch.equal(new.view(20, KV_HEADS, -1).nan_to_num(7.5), expected.nan_to_num(7.5))
