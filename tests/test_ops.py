"""The registered operations: valid for torch's own checks, and compiled once for every step."""

import numpy as np
import pytest
import torch

from portable import KV, Attention, Batch, Layer, LayerTensors, ops


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
