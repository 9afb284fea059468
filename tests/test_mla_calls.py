"""What a call of MLA costs, and that torch sees it as one operation: bounded memory, one graph for every step."""

import weakref

import torch
from mla_cases import HEADS, NOPE, RANK, ROPE, V_DIM, make_step, mla_layer
from torch.utils._python_dispatch import TorchDispatchMode

from portable import LayerTensors, MlaAttention, ops

LAYER = mla_layer()


def attention(layer=LAYER, **more):
    return MlaAttention(layer, **{"page_size": 4, "device": "cpu", "workspace": 8, **more})


def close(found, right, tolerance):
    torch.testing.assert_close(found.double(), right, atol=tolerance, rtol=tolerance)


class Peak(TorchDispatchMode):
    """Bytes of the storages that are alive, at their most; what was there before does not count."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen = {tensor.untyped_storage()._cdata: 0 for tensor in before}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.gone, storage._cdata)
        return made

    def gone(self, key: int) -> None:
        self.now -= self.seen.pop(key)


def test_peak_memory_is_bounded_whatever_the_context():
    """128k tokens of context take what 8k take: three workspaces at most, since the kernel of a CPU copies K and V."""
    layer, peaks = mla_layer(torch.float32), []
    attn = attention(layer, page_size=64, workspace=4096, max_seq_len=1 << 18)
    for context in (8192, 131072):
        made = make_step(layer, [16], [context], page_size=64)
        plan = attn.plan(made.batch)
        assert len(plan.segments.prefills[0].context) == context // 4096
        q_nope, q_pe = made.q.split([NOPE, ROPE], -1)
        kv_c, k_pe = made.new.split([RANK, ROPE], -1)
        attn.write(kv_c, k_pe, made.pages, plan)
        out, slot = torch.empty(16, HEADS, V_DIM), attn._slots[0]  # a mode does not see into a registered operation
        with Peak(made.pages, made.q, made.new, *made.weights, out) as peak:
            slot.attend_latents((q_nope, q_pe, kv_c, k_pe), made.pages, made.weights, LayerTensors(), out, None)
        peaks.append(peak.most)
        close(out, made.right(layer)[0], 1e-5)
    assert peaks[1] < 1.05 * peaks[0] and peaks[1] < 3 * attn.workspace_bytes()
    assert peaks[1] > attn.workspace_bytes()  # the mode sees what is allocated


def test_the_operation_passes_opcheck():
    made = make_step(LAYER, [1, 9, 3], [9, 5, 0])
    attn = attention()
    plan = attn.plan(made.batch)
    kv_c, k_pe = made.new.split([RANK, ROPE], -1)
    attn.write(kv_c, k_pe, made.pages, plan)
    out = torch.zeros(13, HEADS, V_DIM, dtype=torch.float64)
    for lse in (None, torch.zeros(HEADS, 13)):
        given = (*made.q.split([NOPE, ROPE], -1), kv_c, k_pe, made.pages, *made.weights, None, out, lse, plan.handle)
        torch.library.opcheck(ops.mla_attend, given)


def test_compiled_once_for_every_step_without_a_graph_break():
    attn, graphs = attention(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def layer(q, latents, pages, weights, plan):
        (q_nope, q_pe), (kv_c, k_pe) = q.split([NOPE, ROPE], -1), latents.split([RANK, ROPE], -1)
        attn.write(kv_c, k_pe, pages, plan)
        return attn.run(q_nope * 1, q_pe, kv_c, k_pe, pages, plan, weights).out + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for queries, contexts in (((3, 4), (0, 4)), ((2, 2, 9), (5, 9, 20)), ((9, 12), (0, 7)), ((5, 2), (4, 0))):
        made = make_step(LAYER, queries, contexts)
        plan = attn.plan(made.batch)
        found = compiled(made.q, made.new, made.pages, made.weights, plan)
        close(found - 1, made.right(LAYER)[0], 1e-10)
    assert len(graphs) == 1
