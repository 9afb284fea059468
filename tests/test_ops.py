"""The registered operations: valid for torch's own checks, and compiled once for every step."""

import numpy as np
import pytest
import torch
from mla_cases import NOPE, RANK, ROPE, make_step, mla_layer

from portable import (
    KV,
    Attention,
    Batch,
    Layer,
    LayerTensors,
    Mamba,
    MlaAttention,
    SsmTensors,
    allocate_states,
    ops,
)


def make(num_tokens=(3, 1), contexts=(0, 4), sinks=False):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, sinks=sinks)
    attn = Attention(layer, page_size=4, device="cpu")
    plan = attn.plan(step(num_tokens, contexts))
    return attn, plan, KV(torch.randn(32, 4, 2, 8), torch.randn(32, 4, 2, 8))


def step(num_tokens, contexts):
    lens = [q + c for q, c in zip(num_tokens, contexts, strict=True)]
    table = np.arange(8 * len(lens)).reshape(len(lens), 8)
    return Batch.from_lens(num_tokens, lens, block_table=table, page_size=4)


def new_tokens(plan):
    t = plan.batch.num_tokens
    return torch.randn(t, 4, 8), torch.randn(t, 2, 8), torch.randn(t, 2, 8)


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("with_lse", [True, False])
def test_attend_passes_opcheck(with_kv, with_lse):
    attn, plan, cache = make(sinks=True)
    q, k, v = new_tokens(plan)
    lse = torch.zeros(4, len(q)) if with_lse else None
    k, v = (k, v) if with_kv else (None, None)
    arguments = (q, *cache, k, v, *LayerTensors(sinks=torch.randn(4)), torch.zeros_like(q), lse, plan.handle)
    torch.library.opcheck(ops.attend, arguments)
    assert attn.layer.sinks


def test_cache_write_passes_opcheck():
    attn, plan, cache = make()
    k, v = new_tokens(plan)[1:]
    torch.library.opcheck(ops.cache_write, (k, v, *cache, *LayerTensors(), plan.handle))
    assert attn.layer.dtype == k.dtype


def test_compiled_once_for_every_step_without_a_graph_break():
    attn, _, cache = make()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v, plan):
        attn.write(k, v, cache, plan)
        return attn.run(q * 2, cache, plan, k=k, v=v).out + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for queries, contexts in (((3, 4), (0, 4)), ((5, 2), (1, 0)), ((2, 2, 2), (0, 0, 9)), ((6, 7), (0, 0))):
        plan = attn.plan(step(queries, contexts))
        q, k, v = new_tokens(plan)
        found = compiled(q, k, v, plan)
        torch.testing.assert_close(found, layer(q, k, v, plan))
    assert len(graphs) == 1


def test_a_dead_handle_is_named():
    attn, plan, cache = make()
    q, k, v = new_tokens(plan)
    handle = plan.handle
    del attn, plan
    with pytest.raises(ValueError, match=f"handle {handle} belongs to no plan that is alive"):
        ops.attend(q, *cache, k, v, *LayerTensors(), torch.empty_like(q), None, handle)


def with_meta(call, given, names):
    """The message for each argument that is on meta, of a call that passes with all on the CPU."""
    call(**given)
    said = {}
    for name in names:
        with pytest.raises(ValueError) as error:
            call(**{**given, name: given[name].to("meta")})
        said[name] = str(error.value)
    return said


def test_a_tensor_without_memory_among_others_is_named():
    """Torch calls the fake of an op then, and what it left in `out` was returned."""
    attn, plan, cache = make(sinks=True)
    q, k, v = new_tokens(plan)

    def run(k_cache=cache.k, v_cache=cache.v, sinks=None, q=q, k=k, v=v, out=None):
        attn.run(q, KV(k_cache, v_cache), plan, k=k, v=v, tensors=LayerTensors(sinks), out=out)

    given = {"q": q, "k_cache": cache.k, "v_cache": cache.v, "k": k, "v": v, "sinks": torch.ones(4)}
    spoken = {"k_cache": "cache k", "v_cache": "cache v", "sinks": "tensors.sinks"}
    for name, message in with_meta(run, {**given, "out": torch.empty(q.shape)}, (*given, "out")).items():
        assert message == f"{spoken.get(name, name)} is on meta; all tensors of a call must be on cpu"
    with pytest.raises(ValueError, match="q is on meta"):  # `out` is made as q is
        run(q=q.to("meta"), sinks=torch.ones(4))

    def write(k, v, k_cache, v_cache):
        attn.write(k, v, KV(k_cache, v_cache), plan)

    given = {name: given[name] for name in ("k", "v", "k_cache", "v_cache")}
    for name, message in with_meta(write, given, given).items():
        assert message.startswith(f"{spoken.get(name, name)} is on meta")


def test_a_tensor_of_latents_without_memory_is_named():
    layer = mla_layer()
    made, attn = make_step(layer, [1, 9], [9, 5]), MlaAttention(layer, page_size=4, device="cpu")
    plan = attn.plan(made.batch)
    given = dict(zip(("q_nope", "q_pe"), made.q.split([NOPE, ROPE], -1), strict=True))
    latents = dict(zip(("kv_c", "k_pe"), made.new.split([RANK, ROPE], -1), strict=True))
    spoken = {"cache": "cache k", "w_uk": "weights.w_uk", "w_uv": "weights.w_uv"}

    def run(w_uk, w_uv, **more):
        attn.run(**more, plan=plan, weights=type(made.weights)(w_uk, w_uv))

    given |= latents | {"cache": made.pages, **made.weights._asdict()}
    for name, message in with_meta(run, given, given).items():
        assert message == f"{spoken.get(name, name)} is on meta; all tensors of a call must be on cpu"
    given = latents | {"cache": made.pages}
    for name, message in with_meta(lambda **more: attn.write(**more, plan=plan), given, given).items():
        assert message == f"{spoken.get(name, name)} is on meta; all tensors of a call must be on cpu"


def test_a_tensor_of_states_without_memory_is_named():
    layer = Layer.mamba2(num_heads=2, head_dim=4, state_dim=4, dtype=torch.float32)
    attn = Mamba(layer, device="cpu")
    plan = attn.plan(Batch.from_lens([3], [3]), np.array([[1]], np.int32))
    x, bc = torch.randn(3, 2, 4), torch.randn(3, 1, 4)
    given = {"x": x, "dt": x[..., 0], "b": bc, "c": bc, "pool": allocate_states(layer, 2, device="cpu").ssm}

    def run(x, dt, b, c, pool, a):
        attn.run(x, dt, b, c, pool, plan, SsmTensors(a))

    given["a"] = -torch.ones(2)
    for name, message in with_meta(run, given, given).items():
        assert message == f"{'tensors.a' if name == 'a' else name} is on meta; all tensors of a call must be on cpu"
