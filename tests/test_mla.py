"""The plan of MLA: who decodes, what each chunk of context holds, and that planning waits for no device."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_cases import mla_layer
from strategies import cases

from portable import Batch, Kernel, KernelCaps, Layer, MlaAttention, Op, UnsupportedError
from portable.mla import WORKSPACE_MIB, WORKSPACE_TOKENS, plan_mla, workspace_bytes, workspace_tokens
from portable.padding import pad
from portable.sets import ANY_SIZE, Sizes, multiple_of, one_of
from portable.shards import shard

LAYER = mla_layer()


class Chooser:
    """Kernels by name, which note the segment that they prepare; its decode kernel takes what `decode` says."""

    def __init__(self, decode: Sizes = ANY_SIZE, uniform: bool = False) -> None:
        self.decode, self.uniform, self.asked, self.made = decode, uniform, [], {}

    def __call__(self, op, needs):
        self.asked.append((op, needs))
        served = op is not Op.MLA_DECODE or needs.query_len in self.decode
        name = "vendor" if served else "reference"
        caps = KernelCaps(op=op, name=f"{name}.{op}", provider=name, uniform=self.uniform and served)
        return self.made.setdefault(caps.name, Kernel(caps, run=print, prepare=lambda s, _: (s.tokens, s.requests)))


def planned(batch, workspace=64, choose=None, **more):
    return plan_mla(batch, LAYER, choose or Chooser(), workspace=workspace, **more)


def step(query_lens, context_lens, page_size=16, **more):
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    width = -(-max([*seq_lens, 1]) // page_size)
    table = np.arange(len(seq_lens) * width).reshape(-1, width)
    return Batch.from_lens(query_lens, seq_lens, block_table=table, page_size=page_size, **more)


def chunks_of(segments):
    return [chunk for prefill in segments.prefills for chunk in prefill.context]


@given(cases(max_reqs=8), st.integers(1, 6), st.booleans(), st.integers(0, 2))
def test_each_token_has_one_segment_and_each_token_of_a_prefills_context_one_chunk(case, room, lse, padding):
    batch = pad(case.batch(), len(case.query_lens) + padding, sum(case.query_lens) + padding)
    workspace = room * case.page_size
    choose = Chooser()
    found = planned(batch, workspace, choose, lse=lse)
    kinds = [
        "decode" if 0 < q <= 8 and c else "prefill" for q, c in zip(case.query_lens, case.context_lens, strict=True)
    ]
    tokens = [*(s.tokens for s in found.decodes), *(p.tokens for p in found.prefills)]
    assert sorted(t for part in tokens for t in range(part.start, part.stop)) == list(range(batch.num_tokens))
    for segment, kind in [*((s, "decode") for s in found.decodes), *((p.new, "prefill") for p in found.prefills)]:
        live = [row for row in range(segment.requests.start, segment.requests.stop) if batch.query_lens[row]]
        assert live and {kinds[row] for row in live} == {kind}
        q = batch.query_lens[segment.requests]
        assert segment.cu_seqlens_q.tolist() == np.cumsum([0, *q]).tolist() and segment.max_query_len == max(q)
        keys = batch.host_seq_lens[segment.requests] if kind == "decode" else q
        assert segment.seq_lens.tolist() == segment.host_seq_lens.tolist() == keys.tolist()
        assert segment.max_seq_len == max(keys) and segment.causal is True
        assert (segment.block_table is None) == (kind == "prefill")
        assert segment.prepared == (segment.tokens, segment.requests)
    covered = []
    for prefill in found.prefills:
        for n, chunk in enumerate(prefill.context):
            gather, attend = chunk.gather, chunk.attend
            lens = gather.host_seq_lens
            assert lens[0] and lens[-1] and 0 < lens.sum() <= workspace
            assert torch.equal(gather.seq_lens, attend.seq_lens) and gather.seq_lens.tolist() == lens.tolist()
            assert attend.causal is False and attend.block_table is None and gather.requests == attend.requests
            assert prefill.tokens.start <= attend.tokens.start < attend.tokens.stop <= prefill.tokens.stop
            for i, row in enumerate(range(gather.requests.start, gather.requests.stop)):
                before = sum(r == row for r, _ in covered)
                assert before % case.page_size == 0 and (not before or i == 0 or not lens[i])  # only the first goes on
                pages = [case.block_table[row, (before + t) // case.page_size] for t in range(lens[i])]
                assert [gather.block_table[i, t // case.page_size] for t in range(lens[i])] == pages
                covered += [(row, before + t) for t in range(lens[i])]
            assert n == len(prefill.context) - 1 or (-(-lens // case.page_size)).sum() == room
    contexts = enumerate(zip(case.query_lens, case.context_lens, strict=True))
    right = [(row, t) for row, (q, c) in contexts if q and kinds[row] == "prefill" for t in range(c)]
    assert covered == right and found.has_context is bool(right)
    for op, needs in choose.asked:
        if op is Op.PREFILL:
            assert needs.page_size is None and needs.lse >= lse
            assert needs.causal or needs.lse  # a context is merged


def test_a_decode_makes_no_chunk():
    """T28: 5,000 tokens of a decode beside contexts of [300, 0, 50] made 20 chunks, 18 of them empty."""
    found = planned(step([1, 9, 9, 9], [5000, 300, 0, 50]), workspace=512)
    (chunk,) = chunks_of(found)
    assert chunk.gather.host_seq_lens.tolist() == [300, 0, 50] and chunk.gather.requests == slice(1, 4)
    assert found.decodes[0].host_seq_lens.tolist() == [5001]
    assert [c.gather.host_seq_lens.sum() for c in chunks_of(planned(step([1, 9], [5000, 300]), 256))] == [256, 44]


def test_a_row_without_new_tokens_among_prefills_has_no_chunk():
    choose = Chooser()
    (chunk,) = chunks_of(planned(step([20, 0, 20], [16, 300, 40]), choose=choose))
    assert chunk.gather.host_seq_lens.tolist() == [16, 0, 40] and chunk.attend.host_query_lens.tolist() == [20, 0, 20]
    lses = {needs.causal: needs.lse for op, needs in choose.asked if op is Op.PREFILL}
    assert lses == {True: True, False: True}  # what is merged tells its LSE


def test_one_long_context_beside_many_tiny_ones_fills_its_chunks():
    """T29, T31: divided evenly, a workspace of 512 held no page of each of 64 requests."""
    found = planned(step([9] * 65, [2000, *[8] * 64]), workspace=512)
    pages = -(-2000 // 16) + 64
    assert len(chunks_of(found)) == -(-pages // 32)


def test_heads_are_prepared_for_as_what_they_are_and_latents_as_the_cache_stores_them():
    layer, seen = dataclasses.replace(LAYER, kv_dtype=torch.float8_e4m3fn), []

    def choose(op, needs):
        caps = KernelCaps(op=op, name=f"vendor.{op}", provider="vendor")
        return Kernel(caps, run=print, prepare=lambda _, layer: seen.append((op, layer.kv_dtype)))

    plan_mla(step([1, 20], [7, 30]), layer, choose, workspace=64)
    assert seen == [
        (Op.MLA_DECODE, torch.float8_e4m3fn),
        (Op.PREFILL, LAYER.dtype),
        (Op.CACHE_GATHER, torch.float8_e4m3fn),
        (Op.PREFILL, LAYER.dtype),
    ]


def test_without_a_context_nothing_is_gathered_merged_or_asked_for_an_lse():
    choose = Chooser()
    found = planned(step([1, 9, 20], [7, 0, 0]), choose=choose)
    assert found.has_context is False and {op for op, _ in choose.asked} == {Op.MLA_DECODE, Op.PREFILL}  # T32, T33
    assert not any(needs.lse for _, needs in choose.asked)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_new_tokens_make_no_segments(rows):
    found = planned(step([0] * rows, [7] * rows))
    assert (found.decodes, found.prefills, found.has_context) == ((), (), False)


SINGLE, UP_TO_4 = one_of(1), multiple_of(1, up_to=4)


@pytest.mark.parametrize(
    ("decode", "uniform", "queries", "decoding"),
    [
        (SINGLE, False, [1, 1, 2, 8], 2),
        (UP_TO_4, False, [1, 3, 4, 5], 3),
        (ANY_SIZE, False, [1, 7, 8, 9], 3),  # eight are what an absorbed kernel is made for
        (ANY_SIZE, True, [3, 3, 1, 3], 2),  # the first other number ends a uniform run
        (one_of(), False, [1, 1, 2, 9], 3),  # nothing but the reference: it serves both paths, and decodes read less
    ],
)
def test_the_chosen_kernel_sets_the_threshold(decode, uniform, queries, decoding):
    found = planned(step(queries, [20] * 4), choose=Chooser(decode, uniform))
    assert [s.requests for s in found.decodes] == [slice(0, decoding)]
    assert [p.new.requests for p in found.prefills] == [slice(decoding, 4)]


@pytest.mark.parametrize(
    ("queries", "contexts", "pieces"),
    [
        ([1, 2, 3], [20, 30, 9], [slice(0, 1), slice(1, 2), slice(2, 3)]),
        ([3, 3, 0, 1, 1], [9] * 5, [slice(0, 2), slice(3, 5)]),
        ([2, 2, 20], [9] * 3, [slice(0, 2)]),
        ([1, 2, 20], [9, 9, 300], [slice(0, 1), slice(1, 2)]),
    ],
)
def test_a_kernel_for_equal_lengths_gets_no_others_though_the_longest_of_the_step_go_to_another(
    queries, contexts, pieces
):
    """The kernel of eight queries, and of the step's longest keys, takes any lengths; that of the decodes does not."""

    def choose(op, needs):
        uniform = op is Op.MLA_DECODE and needs.query_len <= 4 and needs.seq_len <= 64
        caps = KernelCaps(op=op, name=f"vendor.{op}.{uniform}", provider="vendor", uniform=uniform)
        return Kernel(caps, run=print)

    found = planned(step(queries, contexts), choose=choose)
    assert [segment.requests for segment in found.decodes] == pieces
    assert all(segment.kernel.caps.uniform for segment in found.decodes)
    assert [p.new.host_query_lens.tolist() for p in found.prefills] == [[n] for n in queries if n == 20]


def test_a_first_chunk_of_one_token_is_a_prefill():
    found = planned(step([1], [0]))
    assert not found.decodes and found.prefills[0].new.host_query_lens.tolist() == [1]


def test_bounds_serve_decodes_and_are_refused_for_a_prefill_on_a_context():
    """T22."""
    exact = step([1, 2, 9], [5, 30, 0])
    bounds = dataclasses.replace(exact, exact=False)
    assert len(planned(bounds).decodes) == 1
    with pytest.raises(ValueError, match="MLA's prefill on a context needs exact lengths"):
        planned(dataclasses.replace(step([9], [5]), exact=False))


def test_keys_that_do_not_end_with_the_new_tokens_are_all_in_the_pages():
    whole = Batch.from_lens([1, 1], [9, 40])
    mine = shard(whole, 2, 0, torch.zeros(2, 3, dtype=torch.int32), 16)
    assert [s.causal for s in planned(mine).decodes] == [False]
    longer = dataclasses.replace(step([9, 9], [5, 30]), self_attention=False, causal=False)
    (prefill,) = planned(longer).prefills
    assert prefill.new is None and prefill.tokens == slice(0, 18)
    assert sum(int(chunk.attend.host_seq_lens.sum()) for chunk in prefill.context) == 14 + 39
    with pytest.raises(UnsupportedError, match="a causal mask over keys that do not end with the new tokens"):
        planned(dataclasses.replace(longer, causal=True))


def test_a_context_without_pages_is_refused():
    assert len(planned(Batch.from_lens([3, 20], [3, 20])).prefills) == 1
    with pytest.raises(ValueError, match="block_table is None"):
        planned(Batch.from_lens([3], [5]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_planning_reads_no_tensor_and_changes_none(backend, no_sync):
    attn = MlaAttention(mla_layer(), page_size=4, device="cpu", backend=backend, workspace=8)
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    tensors = torch.tensor([0, 1, 2, 14, 19]).int(), torch.tensor([9, 4, 32, 5]).int(), torch.from_numpy(table)
    slots = torch.zeros(19, dtype=torch.int64)
    before = [tensor.clone() for tensor in (*tensors, slots)]
    with no_sync():
        batch = Batch.from_tensors(*tensors, slots, page_size=4)
        assert attn.plan(batch).segments.has_context
        attn.plan(pad(batch, 8, 24))
    assert all(torch.equal(a, b) for a, b in zip((*tensors, slots), before, strict=True))


# The workspace


def test_the_workspace_is_what_its_constants_say():
    """T30, F46: 128 heads of DeepSeek's widths in bfloat16."""
    layer = Layer.mla(num_heads=128)
    latents, heads = 576 * 2, 128 * (192 + 128) * 2
    assert workspace_bytes(layer, 1) == latents + heads == 83_072
    tokens = workspace_tokens(layer, 64)
    assert (WORKSPACE_MIB, tokens) == (1024, 12_864) and tokens % 64 == 0
    assert 1019 < workspace_bytes(layer, tokens) / 2**20 < WORKSPACE_MIB < workspace_bytes(layer, tokens + 128) / 2**20
    small = Layer.mla(num_heads=16)
    assert (WORKSPACE_TOKENS, workspace_tokens(small, 64)) == (65_536, 65_536)
    assert workspace_bytes(small, WORKSPACE_TOKENS) / 2**20 == 712
    assert workspace_tokens(small, 64, 1000) == 960  # whole pages
    attn = MlaAttention(mla_layer(torch.float32), page_size=16, device="cpu", workspace=1000)
    assert attn.workspace_bytes() == 992 * (16 + 4 + 3 * (12 + 6)) * 4


def test_a_workspace_without_a_page_is_refused_when_it_is_configured():
    """T31, F44."""
    with pytest.raises(ValueError, match="workspace is 15 tokens, less than a page of 16; give it at least one page"):
        MlaAttention(mla_layer(), page_size=16, device="cpu", workspace=15)
    assert MlaAttention(mla_layer(), page_size=16, device="cpu", workspace=16).workspace == 16


def test_sizes_may_be_integers_of_numpy():
    sizes = {"page_size": 4, "max_reqs": 5, "max_tokens": 24, "max_seq_len": 40, "workspace": 9, "num_pages": 30}
    attn = MlaAttention(LAYER, device="cpu", **{name: np.int64(size) for name, size in sizes.items()})
    assert attn.workspace == 8 and dataclasses.asdict(attn.limits) == {name: sizes[name] for name in list(sizes)[:4]}
    assert all(type(size) is int for size in (attn.workspace, attn.page_size, attn.max_seq_len))
    assert attn.plan(step([1, 9], [9, 5], page_size=4)).segments.has_context


@pytest.mark.parametrize("name", ["page_size", "max_reqs", "max_tokens", "max_seq_len"])
def test_sizes_below_one_and_other_families_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be an int of at least 1"):
        MlaAttention(mla_layer(), device="cpu", **{"page_size": 4, name: 0})
    with pytest.raises(ValueError, match=r"layer\.family is 'gqa'"):
        MlaAttention(Layer.gqa(num_heads=1, head_dim=8), page_size=4, device="cpu")
