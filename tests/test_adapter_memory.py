"""Adapters keep views of what they are given; none of them outlives a change of memory, of numbers or of the layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import aiter as fake_aiter
from fakes import flash_attn_2, flash_attn_3, flash_mla
from recording import RULES, Recorder

from portable.backends import aiter, flash_attn
from portable.backends import flash_mla as flash_mla_backend
from portable.backends.adapter import Adapter
from portable.conformance import cells
from portable.conformance.inputs import Inputs, build, segment
from portable.conformance.oracle import expected
from portable.kernel import KV, Kernel, LseForm, Op
from portable.layer import Layer, LayerTensors

NAMED = {kernel.name: kernel for kernel in (*flash_mla_backend.KERNELS, *flash_attn.KERNELS, *aiter.KERNELS)}
MLA = Layer.mla(num_heads=16, dtype=torch.bfloat16)
GQA = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
VLLM = "vllm.vllm_flash_attn"
# A kernel of each way in which views are kept, the module it calls, and the size of its pages.
KEPT = {
    "flash_mla.decode": (MLA, "flash_mla", flash_mla.module, 64),
    "vllm_flash_mla.decode": (MLA, flash_mla_backend.VLLM, lambda: flash_mla.module(flash_mla.Build(vllm=True)), 64),
    "vllm_flash_attn_3.mla_decode": (MLA, VLLM, flash_attn_3.vllm_module, 16),
    "vllm_flash_attn_3.mla_pieces": (MLA, VLLM, flash_attn_3.vllm_module, 64),
    "flash_attn.kvcache": (GQA, "flash_attn", lambda: flash_attn_2.module(flash_attn_2.CUDA), 256),
    "aiter.mla_decode": (MLA, "", lambda: None, 16),
}


@pytest.fixture(params=KEPT)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Layer, int]:
    layer, module, stand_in, page_size = KEPT[request.param]
    fake_aiter.install(monkeypatch, new=True)
    if module:
        monkeypatch.setitem(sys.modules, module, stand_in())
    return NAMED[request.param], layer, page_size


class Heap:
    """Memory that is handed out from its start again and again, as an allocator gives what was freed before."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1 << 22, dtype=torch.uint8)
        self.free()

    def free(self) -> None:
        self.used = 0

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * int(np.prod(shape))
        start, self.used = self.used, self.used + -(-size // 64) * 64
        assert self.used <= len(self.memory)
        return self.memory[start : start + size].view(dtype).view(shape)

    def holding(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.place(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def check(kernel: Kernel, case: cells.Case, given: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One layer of a step, into memory that holds NaN, beside float64."""
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    kernel.run(given.q, given.kv, given.segment, case.layer, given.tensors, out, lse)
    want, want_lse = expected(case, given)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-2, rtol=2e-2)


def steps(layer: Layer, page_size: int) -> Iterator[cells.Case]:
    """Decodes of one token, and of two; a row without keys; another number of requests; two masks in one step."""
    op = Op.MLA_DECODE if layer is MLA else Op.PAGED
    for lens in (((1, 40), (1, 7), (1, 19)), ((1, 41), (1, 8), (1, 0)), ((2, 40), (2, 9)), ((1, 3),), ((2, 9), (1, 4))):
        yield cells.Case(op=op, layer=layer, lens=lens, page_size=page_size)
    yield cells.Case(op=op, layer=layer, lens=((2, 40), (2, 9)), page_size=page_size, causal=(True, False))


def test_memory_that_is_freed_and_given_again_is_read_as_what_it_is_now(made: tuple[Kernel, Layer, int]) -> None:
    """Steps of other sizes, each of several layers, whose q, caches, `out` and `lse` all lie where others have lain."""
    kernel, layer, page_size = made
    heap = Heap()
    for _ in range(2):
        for case in steps(layer, page_size):
            inputs = build(kernel, case, "cpu")
            width = inputs.v.shape[-1]
            for turn in range(4):
                heap.free()
                q = heap.holding(inputs.q).copy_(torch.randn_like(inputs.q))
                kv = KV(*(None if part is None else heap.holding(part) for part in inputs.kv))
                rows, heads = q.shape[:2]
                out = heap.place((rows, heads, width), layer.dtype)
                lse = heap.place((heads, rows), torch.float32)
                if turn == 3:  # where no view can be kept
                    q = torch.cat([q, q], -1)[..., : q.shape[-1]]
                    out = torch.empty(rows, heads, 2 * width, dtype=layer.dtype)[..., :width]
                    lse = torch.empty(rows, heads).T
                check(kernel, case, replace(inputs, q=q, kv=kv), out, lse)


def test_layers_take_turns_at_the_same_queries_and_results(made: tuple[Kernel, Layer, int]) -> None:
    """Each with a cache of its own, which dies in the end and leaves its address to the next."""
    kernel, layer, page_size = made
    case = next(steps(layer, page_size))
    inputs = build(kernel, case, "cpu")
    out = torch.empty(*inputs.q.shape[:2], inputs.v.shape[-1], dtype=layer.dtype)
    lse = torch.empty(inputs.q.shape[1::-1])
    for attempt in range(3):
        layers = [build(kernel, case, "cpu", attempt=2 * attempt + i) for i in range(2)]
        for _ in range(2):
            for each in layers:
                inputs.q.copy_(each.q)
                check(kernel, case, replace(each, q=inputs.q, segment=inputs.segment), out, lse)


def test_what_lies_strided_where_dense_memory_lay_in_the_same_step_is_read_and_written_so(
    made: tuple[Kernel, Layer, int],
) -> None:
    """The layers of one step: q, `out` and `lse` begin where those of the layer before did, and lie otherwise."""
    kernel, layer, page_size = made
    for case in steps(layer, page_size):
        inputs = build(kernel, case, "cpu")
        rows, heads, wide = inputs.q.shape
        width = inputs.v.shape[-1]
        rooms = (
            torch.zeros(rows, heads, 2 * wide, dtype=layer.dtype),
            torch.zeros(rows, heads, 2 * width).to(layer.dtype),
        )
        logs = torch.zeros(heads * rows)
        for strided in (False, False, False, True, True, True, False):
            q, out = (room.view(-1)[: room.numel() // 2].view(rows, heads, -1) for room in rooms)
            lse = logs.view(heads, rows)
            if strided:
                q, out, lse = rooms[0][..., :wide], rooms[1][..., :width], logs.view(rows, heads).T
            check(kernel, case, replace(inputs, q=q.copy_(torch.randn_like(q))), out, lse)


LARGER = {
    "vllm_flash_attn_3.mla_pieces": (64, 128),
    "aiter.mla_decode": (16, 32),
    "vllm_flash_attn_3.mla_decode": (16, 8),
}


@pytest.mark.parametrize("made", LARGER, indirect=True)
def test_a_cache_that_takes_the_address_of_one_of_other_pages_or_dtype_is_its_own(
    made: tuple[Kernel, Layer, int], request: pytest.FixtureRequest
) -> None:
    """As many bytes at one address: pages of twice as many tokens, and numbers of another kind."""
    kernel, layer, _ = made
    heap = Heap()
    for page_size in LARGER[request.node.callspec.params["made"]] * 2:
        for dtype in (torch.bfloat16, torch.float16) if torch.float16 in kernel.caps.dtypes else (layer.dtype,):
            typed = replace(layer, dtype=dtype, kv_dtype=dtype)
            case = cells.Case(op=kernel.caps.op, layer=typed, lens=((1, 140), (1, 7)), page_size=page_size)
            inputs = build(kernel, case, "cpu")
            out, lse = inputs.q.new_empty(2, 16, 512), torch.empty(16, 2)
            for _ in range(3):
                heap.free()
                tokens = 1 << 11
                pages = heap.place((tokens // page_size, page_size, 576), dtype).zero_()
                pages[: len(inputs.kv.k)] = inputs.kv.k
                check(kernel, case, replace(inputs, kv=KV(pages, None)), out, lse)


def held(kernel: Kernel, inputs: Inputs) -> set[int]:
    """What a step's calls are given beside numbers: memory by its address, objects of the vendor by theirs."""
    given = [each for call in inputs.segment.prepared.calls for each in call.values()]
    tensors = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor) and each.numel()}
    return tensors | {id(each) for each in given if isinstance(each, flash_mla.SchedMeta)}


SCRATCH = ("aiter.decode", "aiter.decode_packed", "aiter.paged", "aiter.mla_decode", "flash_mla.decode")


@pytest.mark.parametrize("name", [*SCRATCH, "flash_attn_3.decode"])
def test_plans_of_two_slots_share_no_scratch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they may run at the same time on two streams; the layers of one plan share it and run in turn."""
    fake_aiter.install(monkeypatch, new=True)
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla.module())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3.module())
    kernel = NAMED[name]
    gqa = replace(GQA, qk_head_dim=128, v_head_dim=128, cache_layout=min(kernel.caps.cache_layouts))
    layer, page_size = (MLA, 64) if kernel.caps.op is Op.MLA_DECODE else (gqa, 16)
    case = cells.Case(op=kernel.caps.op, layer=layer, lens=((1, 300), (1, 7)), page_size=page_size)
    first, second = (build(kernel, case, "cpu") for _ in range(2))
    assert held(kernel, first) and not held(kernel, first) & held(kernel, second)


# What a captured graph would do, for stand-ins that, as a GPU's kernels, read no number on the host.


def latent_call(q, qv, k_cache, v_cache, page_table, return_softmax_lse, **rest):
    """Something of every argument: out [T, H, Dv], and what stands for its LSE [H, T]."""
    first = page_table[:, 0].long()
    out = qv * 2 + v_cache[first, 0] + q.sum(-1, keepdim=True) * k_cache[first, 0].sum(-1, keepdim=True)
    lse = (q.sum(-1) + k_cache[first, 0, 0, 0][:, None]).T.float()
    return (out, lse, None, None) if return_softmax_lse else out


def batch_call(q, k_cache, block_table, head_dim_v, out=None, **rest):
    first = k_cache[block_table[:, 0].long(), 0]
    got = q[..., :head_dim_v] * 2 + first[:, None, :, :head_dim_v]
    got = got if out is None else out.copy_(got)
    return got, q.sum(-1).transpose(1, 2).float() + first[:, :, :1]


@pytest.mark.parametrize("vendor", RULES)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("flash_attn_3.mla_decode", latent_call),
        ("flash_mla.decode", batch_call),
        ("vllm_flash_mla.decode", batch_call),
    ],
)
def test_a_captured_call_reads_and_writes_what_is_there_at_each_replay(vendor, name, call, monkeypatch):
    """Captured with views that were kept before; between replays an eager call has kept others."""
    adapter = NAMED[name].run.__self__
    alone = Adapter(replace(adapter.convention, zeroes_empty=True, lse=replace(adapter.convention.lse, empty="-inf")))
    alone.bind = lambda: call
    kernel = replace(NAMED[name], run=alone.run, prepare=alone.prepare)
    table = torch.tensor([[2, 0], [1, 3], [4, 0]], dtype=torch.int32)
    made = segment(kernel, ((1, 9), (1, 20), (1, 3)), MLA, table, 16)
    q, pages = torch.empty(3, 16, 576, dtype=torch.bfloat16), torch.zeros(5, 16, 576, dtype=torch.bfloat16)
    out, lse = torch.empty(3, 16, 512, dtype=torch.bfloat16), torch.empty(16, 3)

    def go() -> None:
        kernel.run(q, KV(pages, None), made, MLA, LayerTensors(), out, lse)

    def change() -> None:
        q.copy_(torch.randn_like(q))
        pages.copy_(torch.randn_like(pages))

    for _ in range(3):
        change()
        go()
    recorder = Recorder(RULES[vendor])
    graph = recorder.CUDAGraph()
    with recorder.graph(graph, None):
        go()
    for _ in range(3):
        change()
        go()
        want = out.clone(), lse.clone()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and out.isfinite().all()


def test_an_lse_by_request_is_right_where_rows_have_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied in place first is set in place after: sinks, and -inf without them."""

    def call(q, k, v, seq_lens, block_table, scale, **rest):
        shape = len(q), q.shape[2], q.shape[1]
        return torch.full_like(q, torch.nan), torch.full(shape, torch.nan)

    kernel = NAMED["flash_attn.ck_kvcache"]
    names = {name: name for name in ("q", "k", "v", "seq_lens", "block_table", "scale", "sinks")}
    convention = replace(kernel.run.__self__.convention, names=names, fixed={}, lse=LseForm("bhs", empty="nan"))
    for sinks in (True, False):
        layer = replace(GQA, sinks=sinks)
        alone = Adapter(convention)
        alone.bind = lambda: call
        case = cells.Case(op=Op.PAGED, layer=layer, lens=((1, 0), (1, 0)), page_size=16)
        mine = replace(kernel, run=alone.run, prepare=alone.prepare)
        inputs = build(mine, replace(case, lens=((1, 0), (1, 1))), "cpu")
        out, lse = torch.empty(2, 4, 16, dtype=torch.bfloat16), torch.empty(4, 2)
        for _ in range(3):
            out.fill_(torch.nan)
            mine.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, lse)
            assert not out[0].any() and out[1].isnan().all() and lse[:, 1].isnan().all()
            want = inputs.tensors.sinks if sinks else torch.full((4,), -torch.inf)
            assert torch.equal(lse[:, 0], want)


def ways(kernel: Kernel) -> set[str]:
    """What an adapter keeps views of: rows in a batch, queries in two parts, an LSE by request or by token."""
    convention = kernel.run.__self__.convention
    found = {convention.rows, convention.lse.layout, *({"qv"} & convention.names.keys())}
    return found & {"batch", "qv", "bhs", "th"}


def test_every_way_in_which_views_are_kept_is_shown_here() -> None:
    assert set().union(*map(ways, NAMED.values())) == set().union(*(ways(NAMED[name]) for name in KEPT))
