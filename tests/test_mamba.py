"""The plan of recurrent layers: what is read and written where, against a plain loop over requests and tokens."""

from __future__ import annotations

import dataclasses
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.backends import reference_steps
from portable.batch import Batch
from portable.layer import Layer
from portable.mamba import plan_mamba
from portable.mamba_decodes import plan_decodes
from portable.mamba_memory import StateMemory
from portable.mamba_places import Places, located, slots_at
from portable.padding import pad, pad_host
from portable.upload import stage

LAYER = Layer.mamba2(num_heads=2, chunk=4)
PAD = -1


def table_of(rows, columns=30):
    """Slots that are all different: row 0 has 100, 101, ..., row 1 200, 201, ..."""
    return np.arange(columns)[None, :] + 100 * np.arange(1, rows + 1)[:, None]


def state_memory(reqs, tokens, queries, launched=None):
    """Memory on the CPU, which lists its launches."""

    def collect(*args):
        if launched is not None:
            launched.append(args)
        return reference_steps.collect(*args)

    return StateMemory(torch.device("cpu"), reqs, tokens, queries, collect)


def lens(*rows):
    """A batch of (context, new tokens)."""
    context, new = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Batch.from_lens(new, context + new)


@st.composite
def steps(draw):
    """Decodes, then prefills on contexts, rows without tokens, and first chunks; and how they are planned."""
    drafts = draw(st.integers(0, 3))
    context, new = st.integers(1, 40), st.integers(2 + drafts, 30)
    decodes = draw(st.lists(st.tuples(context, st.integers(1, 1 + drafts)), max_size=4))
    extends = draw(st.lists(st.tuples(context, new), max_size=4))
    firsts = draw(st.lists(st.tuples(st.just(0), st.integers(1, 30)), max_size=4))
    idle = draw(st.lists(st.tuples(st.integers(0, 40), st.just(0)), max_size=2)) if extends and firsts else []
    rows = decodes + extends + idle + firsts  # without prefills on both sides, those would be padding
    if not rows:
        rows = [(0, 5)]
    return rows, len(decodes), drafts


@given(steps(), st.sampled_from(["none", "align", "all"]), st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 9),
       st.randoms(use_true_random=False))  # fmt: skip
def test_a_plan_reads_and_stores_what_a_loop_over_tokens_says(step, mode, block, chunk, random):
    rows, num_decodes, drafts = step
    kept = np.array([random.randint(1, 1 + drafts) for _ in rows])
    ran = np.array([random.choice([-1, random.randint(0, 5)]) for _ in rows])
    table = table_of(len(rows), 90)
    layer = Layer.mamba2(num_heads=2, chunk=chunk)
    plan = plan_mamba(lens(*rows), layer, table, mode=mode, block_size=block, num_draft=drafts, num_accepted=kept,
                      running=ran, conv_block=4)  # fmt: skip

    def column(tokens):
        return 0 if mode == "none" else max(0, (tokens - 1) // block)

    def initial(row):
        context, new = rows[row]
        usual = column(context) if mode == "all" else column(context + new)
        return table[row, (usual if ran[row] < 0 else ran[row]) + kept[row] - 1]

    if num_decodes:
        decode = plan.decode
        assert decode.initial_indices.tolist() == [initial(row) for row in range(num_decodes)]
        assert decode.state_indices.tolist() == [
            [table[row, column(context + new) + j] if j < new else PAD for j in range(1 + drafts)]
            for row, (context, new) in enumerate(rows[:num_decodes])
        ]
        assert decode.cu_seqlens_q.diff().tolist() == [new for _, new in rows[:num_decodes]]
        assert (decode.num_accepted is None) == (not drafts)
    else:
        assert plan.decode is None
    prefill = plan.prefill
    if num_decodes == len(rows):
        assert prefill is None
        return
    stored, chunks, blocks, at, last = [], [], [], 0, []
    for row, (context, new) in enumerate(rows[num_decodes:]):
        if not new:
            last.append(-1)
            continue
        end = context + new
        ends = {end} | {x for x in range(context + 1, end) if x % chunk == 0}
        kept_at = {end: column(end)}
        if mode == "all":
            kept_at |= {x: x // block - 1 for x in range(context + 1, end + 1) if x % block == 0}
        elif mode == "align" and end // block > context // block:
            kept_at[end // block * block] = end // block - 1
        ends |= set(kept_at)
        chunks += [(row, at + x - context) for x in sorted(ends)]
        stored += [table[row + num_decodes, kept_at[x]] if x in kept_at else PAD for x in sorted(ends)]
        blocks += [(row, j) for j in range(-(-new // 4))]
        at += new
        last.append(len(chunks) - 1)
    assert prefill.chunk_requests.tolist() == [row for row, _ in chunks]
    assert prefill.cu_chunks.tolist() == [0, *(end for _, end in chunks)]
    assert prefill.chunk_state_indices.tolist() == stored
    assert prefill.last_chunks.tolist() == last
    assert list(zip(prefill.conv_requests.tolist(), prefill.conv_offsets.tolist(), strict=True)) == blocks
    assert prefill.has_initial.tolist() == [context > 0 and new > 0 for context, new in rows[num_decodes:]]
    assert prefill.initial_indices.tolist() == [
        initial(row) if all(rows[row]) else PAD for row in range(num_decodes, len(rows))
    ]
    assert prefill.state_indices.tolist() == [PAD if i < 0 else stored[i] for i in last]


def test_a_first_chunk_of_one_token_is_a_prefill_and_starts_from_zero():
    plan = plan_mamba(lens((5, 1), (0, 1)), LAYER, table_of(2))
    assert plan.decode.requests == slice(0, 1)
    assert plan.prefill.requests == slice(1, 2)
    assert plan.prefill.has_initial.tolist() == [False]
    assert plan.prefill.initial_indices.tolist() == [PAD]


def test_a_short_chunk_of_a_prompt_is_a_prefill_beside_drafts_only_where_the_batch_says_so():
    lengths = [3, 3], [9, 9]
    told = Batch.from_lens(*lengths, is_prefilling=[False, True])
    assert plan_mamba(told, LAYER, table_of(2), num_draft=2).prefill.requests == slice(1, 2)
    assert plan_mamba(Batch.from_lens(*lengths), LAYER, table_of(2), num_draft=2).prefill is None


def test_the_tokens_of_prefills_count_from_their_own_start_in_a_padded_batch():
    batch = pad(lens((3, 1), (2, 1), (4, 5), (0, 5)), 7, 12)
    plan = plan_mamba(batch, LAYER, table_of(4))
    assert plan.prefill.cu_seqlens_q.tolist() == [0, 5, 10]  # not the end of the padding: [12, 12, 12] - 2
    assert plan.prefill.tokens == slice(2, 12)
    assert plan.decode.requests == slice(0, 2)


def test_rows_without_tokens_have_no_chunk():
    """The row between has a context in the middle of a chunk, and nothing new."""
    plan = plan_mamba(lens((3, 6), (5, 0), (0, 2)), LAYER, table_of(3), conv_block=4)
    assert plan.prefill.last_chunks.tolist() == [2, -1, 3]
    assert plan.prefill.cu_chunks.tolist() == [0, 1, 5, 6, 8]
    assert plan.prefill.state_indices.tolist() == [100, PAD, 300]
    assert plan.prefill.conv_requests.tolist() == [0, 0, 2]


def test_the_blocks_of_the_convolution():
    plan = plan_mamba(lens((0, 3), (0, 17)), LAYER, table_of(2), conv_block=8)
    assert plan.prefill.conv_requests.tolist() == [0, 1, 1, 1]
    assert plan.prefill.conv_offsets.tolist() == [0, 0, 1, 2]


def test_a_state_is_stored_when_its_block_is_complete_and_not_before():
    """Blocks of 8, chunks of a prompt of 7 and 4 tokens: the second one is cut behind its first token."""
    first = plan_mamba(lens((0, 7)), LAYER, table_of(1), mode="align", block_size=8).prefill
    second = plan_mamba(lens((7, 4)), LAYER, table_of(1), mode="align", block_size=8, running=[0]).prefill
    assert first.chunk_state_indices.tolist() == [PAD, 100]
    assert second.cu_chunks.tolist() == [0, 1, 4]
    assert second.initial_indices.tolist() == [100]  # the running state, not yet the block's
    assert second.chunk_state_indices.tolist() == [100, 101]


def test_blocks_of_the_first_last_and_computed_tokens():
    plan = plan_mamba(pad(lens((8, 1), (9, 1), (7, 2), (0, 9)), 5, 14), LAYER, table_of(5), mode="all", block_size=8)
    assert [column.tolist() for column in plan.blocks] == [[0, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert plan_mamba(lens((8, 1)), LAYER, table_of(1)).blocks is None


def test_a_checkpoint_forces_a_cut():
    batch = lens((2, 1), (3, 9), (0, 6))
    plan = plan_mamba(batch, LAYER, table_of(3), checkpoints=[-1, 6, -1]).prefill
    assert plan.cu_chunks.tolist() == [0, 1, 3, 5, 9, 13, 15]
    assert plan.checkpoint_chunks.tolist() == [1, -1]
    assert plan.chunk_state_indices.tolist() == [PAD, PAD, PAD, 200, PAD, 300]  # without blocks there is no slot for it
    plan = plan_mamba(batch, LAYER, table_of(3), mode="align", block_size=3, checkpoints=[-1, 6, -1]).prefill
    assert plan.chunk_state_indices[plan.checkpoint_chunks[0]] == 201


@pytest.mark.parametrize("pad_slot", [-1, 0])
def test_padded_rows_reach_no_live_slot(pad_slot):
    """Three decodes of four rows, and a stale slot of a live request in the table's last row."""
    batch = pad(lens((9, 1), (3, 1), (5, 1)), 4, 4)
    table = np.array([[5], [2], [7], [2]], np.int32)
    decode = plan_mamba(batch, LAYER, table, pad_slot=pad_slot).decode
    assert decode.initial_indices.tolist() == [5, 2, 7, pad_slot]
    assert decode.state_indices.tolist() == [[5], [2], [7], [pad_slot]]
    assert decode.cu_seqlens_q.tolist() == [0, 1, 2, 3, 3]


def test_captured_buffers_stay_where_they_are_and_are_refilled_behind_the_live_rows():
    memory = state_memory(reqs=8, tokens=24, queries=3)
    given = {"memory": memory, "num_draft": 2, "mode": "all", "block_size": 4}

    def plan(rows, count):
        size = len(rows)
        return plan_mamba(pad(lens(*rows), 8, 24), LAYER, table_of(size), num_accepted=[count] * size, **given)

    def tensors(plan):
        decode = plan.decode
        return [decode.cu_seqlens_q, decode.initial_indices, decode.state_indices, decode.num_accepted, *plan.blocks]

    many = tensors(plan([(9, 3)] * 7, 3))
    fresh = plan_mamba(pad(lens((5, 2)), 8, 24), LAYER, table_of(1), num_draft=2, mode="all", block_size=4,
                       num_accepted=[2])  # fmt: skip
    few = tensors(plan([(5, 2)], 2))
    assert [tensor.data_ptr() for tensor in many] == [tensor.data_ptr() for tensor in few]
    for tensor, expected in zip(few, tensors(fresh), strict=True):
        assert tensor.tolist() == expected.tolist()
    assert few[1].tolist()[1:] == [PAD] * 7
    assert few[3].tolist() == [2] + [1] * 7
    with pytest.raises(ValueError, match="row 1 reads its prompt"):
        plan_mamba(lens((5, 1), (0, 4)), LAYER, table_of(2), memory=memory)


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4)), max_size=5),
       st.integers(0, 3), st.sampled_from([-1, 0]), st.booleans(), st.booleans())  # fmt: skip
def test_the_short_way_of_planning_decodes_gives_what_the_long_one_does(drafts, rows, more, pad_slot, counted, kept):
    """Contexts, new tokens and accepted ones of each request, padded by some rows, with and without memory."""
    batch = lens(*((c, min(q, 1 + drafts)) for c, q, _ in rows)) if rows else Batch.from_lens([], [])
    live, accepted = len(rows), [min(a, 1 + drafts) for *_, a in rows] if counted else None
    size, tokens = live + more, (live + more) * (1 + drafts)
    given = {"num_draft": drafts, "num_accepted": accepted, "pad_slot": pad_slot}
    memory = [state_memory(size + 1, tokens + 1, 1 + drafts) if kept else None for _ in range(2)]
    short = plan_decodes(batch, table_of(live), size, tokens, memory=memory[0], max_query_len=1 + drafts, handle=-1,
                         **given)  # fmt: skip
    if not live:
        assert short is None
        return
    wide = pad_host(batch, size, tokens)
    long = plan_mamba(wide, LAYER, table_of(live), memory=memory[1], max_query_len=1 + drafts, **given)
    for field in dataclasses.fields(short.decode):
        one, two = getattr(short.decode, field.name), getattr(long.decode, field.name)
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, field.name
    assert short.max_slot == long.max_slot and (short.num_tokens, short.padded_tokens) == (batch.num_tokens, tokens)
    assert (short.padding is None) is (long.padding is None)
    assert short.padding is None or torch.equal(short.padding, long.padding)
    others = [plan.with_group(table_of(live) + 50).decode for plan in (short, long)]
    assert torch.equal(others[0].initial_indices, others[1].initial_indices)
    assert torch.equal(others[0].state_indices, others[1].state_indices)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_slots_that_the_device_looks_up_come_to_where_those_of_the_host_do(mode, monkeypatch):
    """Tables and counts of the host and of a device, of other lengths and widths, in turns: a graph reads one place.

    What a device has takes one launch, whatever it is.
    """
    launched, where, rng = [], set(), np.random.default_rng(4)
    for module in ("places", "memory", "decodes"):
        monkeypatch.setattr(f"portable.mamba_{module}.far", torch.is_tensor)
    memory = state_memory(reqs=4, tokens=12, queries=3, launched=launched)
    other_memory = state_memory(reqs=4, tokens=12, queries=3)
    given = {"num_draft": 2, "mode": mode, "block_size": 4}
    for turn in range(24):
        live = int(rng.integers(1, 5))
        step = lens(*((int(rng.integers(1, 30)), int(rng.integers(1, 4))) for _ in range(live)))
        batch = pad_host(step, 4, 12)
        table, counts = table_of(live, int(rng.integers(15, 19))), rng.integers(1, 4, live)
        wanted = plan_mamba(batch, LAYER, table, num_accepted=counts, **given)
        there = torch.from_numpy(table).to((torch.int32, torch.int64)[turn % 2]), torch.from_numpy(counts)
        asked = (there[0] if turn & 1 else table), (there[1] if turn & 2 else counts)
        launched.clear()
        plan = plan_mamba(batch, LAYER, asked[0], num_accepted=asked[1], memory=memory, max_query_len=3, **given)
        assert len(launched) == (turn & 3 > 0)
        for name in ("initial_indices", "state_indices", "num_accepted", "cu_seqlens_q"):
            assert torch.equal(getattr(plan.decode, name), getattr(wanted.decode, name)), name
        if mode == "none":
            options = {"num_draft": 2, "num_accepted": asked[1], "pad_slot": -1, "memory": other_memory}
            short = plan_decodes(step, asked[0], 4, 12, max_query_len=3, handle=-1, **options)
            for name in ("initial_indices", "state_indices", "num_accepted", "cu_seqlens_q"):
                assert torch.equal(getattr(short.decode, name), getattr(wanted.decode, name)), name
            one, two = ([x for x in each.places() if x is not None] for each in (short, plan))
            assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True)) and short.max_slot == plan.max_slot
        if not turn & 1:  # the host knows what is written
            assert plan.max_slot >= wanted.max_slot
            other = plan.with_group(table + 50).decode
            assert torch.equal(other.state_indices, wanted.with_group(table + 50).decode.state_indices)
            assert torch.equal(other.initial_indices, wanted.with_group(table + 50).decode.initial_indices)
        names = "initial_indices", "state_indices", "num_accepted"
        where.add(tuple(getattr(plan.decode, name).data_ptr() for name in names))
    assert len(where) == 1
    short, hollow = pad_host(lens((3, 1)), 4, 12), np.array([[100, -1, -1, -1]])  # states that are not there yet
    plan = plan_mamba(short, LAYER, hollow, num_accepted=torch.tensor([1]), memory=memory, max_query_len=3, num_draft=2)
    assert plan.decode.initial_indices.tolist() == [100, -1, -1, -1] and plan.max_slot == 100
    twice = np.array([[7, 8, 9], [3, 4, 8]])
    with pytest.raises(ValueError, match="row 1: slot 8 is written by row 0 too"):
        short = pad_host(lens((5, 3), (6, 3)), 4, 12)
        plan_mamba(short, LAYER, twice, num_draft=2, num_accepted=torch.tensor([1, 2]), memory=memory, max_query_len=3)


def test_a_second_group_has_its_own_slots_in_the_same_step():
    batch = pad(lens((5, 1), (6, 1)), 4, 4)
    first = plan_mamba(batch, LAYER, table_of(2))
    kept = first.decode.state_indices.clone()
    second = first.with_group(table_of(2) + 1000)
    assert torch.equal(first.decode.state_indices, kept)
    assert second.decode.state_indices.tolist() == [[1100], [1200], [PAD], [PAD]]
    mixed = plan_mamba(lens((5, 1), (0, 9)), LAYER, table_of(2))
    other = mixed.with_group(table_of(2) + 1000)
    assert other.prefill.cu_chunks is mixed.prefill.cu_chunks
    for one, two in zip(slots(mixed), slots(other), strict=True):
        assert torch.equal(torch.where(one == PAD, PAD, one + 1000), two)


def test_counts_on_a_device_move_the_initial_states_there():
    """The same places as counts on the host give: tables and counts of the device, looked up by the device."""
    batch = lens((5, 1), (6, 3), (9, 2), (4, 9))
    for mode in ("none", "align", "all"):
        given = {"mode": mode, "block_size": 4, "num_draft": 2, "running": [1, 2, -1, 0]}
        counts = [1, 3, 2, 2]
        on_host = plan_mamba(batch, LAYER, table_of(4), num_accepted=counts, **given)
        places = on_host.places()
        moved = torch.tensor(counts) - 1
        columns = places.columns.copy()
        columns[:4] -= np.array(counts) - 1
        there = Places(places.rows, columns, moved.int(), 2)
        found = torch.from_numpy(located(table_of(4), there, 4))
        assert found.dtype == torch.int64
        assert slots_at(found, torch.from_numpy(table_of(4)), there, PAD).tolist() == torch.cat(
            [on_host.decode.initial_indices, on_host.prefill.initial_indices, on_host.decode.state_indices.flatten(),
             on_host.prefill.state_indices, on_host.prefill.chunk_state_indices]).tolist()  # fmt: skip


def slots(plan):
    decode, prefill = plan.decode, plan.prefill
    yield from (decode.initial_indices, decode.state_indices)
    yield from (prefill.initial_indices, prefill.state_indices, prefill.chunk_state_indices)


def test_counts_have_a_range_and_a_default():
    batch = lens((5, 1), (6, 3))
    usual = plan_mamba(batch, LAYER, table_of(2), num_draft=2).decode
    assert usual.num_accepted.tolist() == [1, 1]
    assert usual.initial_indices.tolist() == [100, 200]
    for wrong in (0, 4, -1):
        with pytest.raises(ValueError, match=f"row 1: num_accepted is {wrong}; it must be between 1 and 3"):
            plan_mamba(batch, LAYER, table_of(2), num_draft=2, num_accepted=[1, wrong])
    with pytest.raises(ValueError, match="num_accepted has shape"):
        plan_mamba(batch, LAYER, table_of(2), num_draft=2, num_accepted=[1])


def calls_of(make):
    seen = 0

    def count(frame, event, arg):
        nonlocal seen
        seen += event in ("call", "c_call")

    make()
    sys.setprofile(count)
    try:
        make()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_planning_takes_as_many_calls_for_many_requests_as_for_few(mode):
    """No loop over requests, chunks or tokens."""

    def step(size):
        rows = [(20, 3)] * (size // 2) + [(9, 40)] * (size // 4) + [(0, 30)] * (size - size // 2 - size // 4)
        batch, table = lens(*rows), table_of(size)
        return lambda: plan_mamba(batch, LAYER, table, mode=mode, block_size=8, num_draft=2, num_accepted=[2] * size)

    assert calls_of(step(1024)) == calls_of(step(16))


def test_nothing_of_a_device_is_read(monkeypatch):
    """Tables and counts on the meta device have no values: a plan that looked at one would fail."""
    monkeypatch.setattr("portable.upload.stage", lambda arrays, pin_memory: stage(arrays, pin_memory=False))
    batch = lens((5, 1), (6, 3), (4, 9))
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    table = torch.empty(3, 30, dtype=torch.int32, device="meta")
    on_meta = Batch.from_tensors(
        batch.cu_seqlens_q.to("meta"), batch.seq_lens.to("meta"), None, None, page_size=4,
        host_cu_seqlens_q=batch.host_cu_seqlens_q, host_seq_lens=batch.host_seq_lens,
    )  # fmt: skip
    plan = plan_mamba(on_meta, LAYER, table, mode="all", num_draft=2, num_accepted=counts)
    assert plan.decode.state_indices.shape == (2, 3)
    assert plan.decode.state_indices.device.type == "meta"
    assert plan.max_slot == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.zeros((1, 4), np.int32)}, r"table has shape \[1, 4\]; it must be \[2, W\]"),
        ({"table": np.array([[3], [-2]])}, r"row 1: table\[1, 0\] is -2; a state slot is between 0"),
        ({"table": np.zeros((2, 1)), "mode": "none"}, "table has dtype float64"),
        ({"mode": "align", "table": np.zeros((2, 1), np.int32)}, "row 1: the step needs column 2, but table is 1 wide"),
        ({"mode": "every"}, "mode is 'every'"),
        ({"block_size": 0}, "block_size is 0; it must be an int of at least 1"),
        ({"num_draft": -1}, "num_draft is -1"),
        ({"conv_block": 2}, "conv_block is 2; it must be an int of at least 3"),
        ({"pad_slot": 201, "mode": "align"}, r"row 1: table\[1, 1\] is 201, the slot that kernels skip"),
        ({"table": None}, "table is None"),
        ({"checkpoints": [-1, 3]}, "row 1: checkpoint 3 is not above the context of 3 and up to the length of 9"),
        ({"checkpoints": [5, -1]}, "row 0: checkpoint 5"),
        ({"checkpoints": [-1, 6], "mode": "align"}, "row 1: checkpoint 6 is not a multiple of block_size 4"),
        ({"table": np.array([[3], [3]])}, "row 1: slot 3 is written by row 0 too"),
        ({"running": [1]}, r"running has shape \[1\]; it must be \[2\]"),
    ],
)
def test_what_cannot_be_right_is_named(change, message):
    batch = lens((4, 1), (3, 6))
    given = {"table": table_of(2), "block_size": 4, **change}
    with pytest.raises(ValueError, match=message):
        plan_mamba(batch, LAYER, given.pop("table"), **given)


@pytest.mark.parametrize("table", [[[3, 4, 5], [5, 6, 7]], [[3, 4, 4], [5, 6, 7]]])
def test_a_slot_that_a_decode_writes_twice_is_refused_the_short_way_and_the_long_one(table):
    with pytest.raises(ValueError, match=r"slot [45] is written by row 0 too"):
        plan_mamba(Batch.from_lens([3, 3], [5, 6]), LAYER, np.array(table), num_draft=2)
    kept = plan_mamba(Batch.from_lens([3, 2], [5, 6]), LAYER, np.array([[3, 4, 5], [6, 7, 6]]), num_draft=2)
    assert kept.decode.state_indices.tolist() == [[3, 4, 5], [6, 7, -1]]  # what is not written may be anything


def test_other_layers_derived_batches_and_bounds_are_refused():
    batch = lens((4, 1), (3, 6))
    with pytest.raises(ValueError, match=r"layer\.family is 'gqa'"):
        plan_mamba(batch, Layer.gqa(num_heads=2, head_dim=8), table_of(2))
    with pytest.raises(ValueError, match=r"request 1 \(decode\) stands behind a prefill"):
        plan_mamba(lens((0, 4), (3, 1)), LAYER, table_of(2))
    bounds = Batch.from_tensors(batch.cu_seqlens_q, batch.seq_lens, None, None, page_size=4, exact=False)
    with pytest.raises(ValueError, match="a prefill of states needs exact lengths"):
        plan_mamba(bounds, LAYER, table_of(2))
    decodes = Batch.from_tensors(*(x.int() for x in (torch.tensor([0, 1]), torch.tensor([9]))), None, None, page_size=4,
                                 exact=False)  # fmt: skip
    assert plan_mamba(decodes, LAYER, table_of(1)).decode.initial_indices.tolist() == [100]
    with pytest.raises(ValueError, match="mode 'all' needs exact lengths"):
        plan_mamba(decodes, LAYER, table_of(1), mode="all")


def test_chunks_tile_the_tokens_of_a_large_step():
    rng = np.random.default_rng(0)
    rows = [(int(rng.integers(0, 3000)), int(rng.integers(2, 900))) for _ in range(200)]
    rows.sort(key=lambda row: row[0] == 0)
    prefill = plan_mamba(lens(*rows), Layer.mamba2(num_heads=2), table_of(200)).prefill
    for a, b in pairwise(prefill.cu_chunks.tolist()):
        assert 0 < b - a <= 256
    assert prefill.cu_chunks[prefill.last_chunks.long() + 1].tolist() == np.cumsum([new for _, new in rows]).tolist()
