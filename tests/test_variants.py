"""Each variant against the dense mask that defines it, over random batches in every mode and under padding."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import check_dtypes, expected, padded, seen, slot, slots, widened
from strategies import cases

from portable import Batch, UnsupportedError
from portable.lengths import MAX_INT32
from portable.order import PREFILL
from portable.padding import pad, unpad
from portable.variants import (
    cross,
    dead_pages,
    draft,
    encoder,
    local,
    local_capacity,
    prefix,
    shard,
    tree,
    trim,
    verify,
)

many = settings(max_examples=500)
paddings = st.tuples(st.integers(0, 3), st.integers(0, 4))


# local


@many
@given(cases(), st.integers(1, 6), paddings)
def test_local_sees_exactly_the_chunk_mask(case, pages, extra):
    chunk = pages * case.page_size
    batch = case.batch()
    found = local(padded(batch, extra), chunk)
    check_dtypes(found)
    assert np.array_equal(
        seen(found, slots(case)), expected(batch, slots(case), lambda _, q, k: k <= q and k // chunk == q // chunk)
    )
    assert torch.equal(found.slot_mapping[: batch.num_tokens], batch.slot_mapping)
    assert (found.query_lens > 0).all() and (found.host_seq_lens <= chunk).all()
    assert found.num_reqs <= local_capacity(batch.num_reqs, batch.num_tokens, chunk)


@given(st.integers(1, 6), st.integers(0, 30), st.integers(1, 9))
def test_local_capacity_is_reached_and_never_exceeded(num_reqs, num_tokens, chunk):
    bound = local_capacity(num_reqs, num_tokens, chunk)
    # one token each, a second for as many as can, the rest to the first: each first token ends a chunk
    reqs = min(num_reqs, num_tokens)
    lens = np.ones(reqs, int)
    spare = num_tokens - reqs
    for i in range(min(reqs, spare)):
        lens[i] += 1
        spare -= 1
    if reqs:
        lens[0] += spare
    worst = Batch.from_lens(lens, lens + chunk - 1, block_table=np.zeros((reqs, 100), int), page_size=chunk)
    assert local(worst, chunk).num_reqs == bound


def test_local_never_changes_the_chunk_and_decodes_see_their_chunk():
    # public fault: chunk 8 of pages of 4 shrank to 4 where the longest sequence had 6 tokens
    batch = Batch.from_lens([6], [6], block_table=[[3, 1]], page_size=4)
    assert local(batch, 8).host_seq_lens.tolist() == [6]
    one = local(Batch.from_lens([1], [12], block_table=[[2, 5, 1]], page_size=4), 8)
    assert one.host_seq_lens.tolist() == [4] and one.block_table[0, 0].item() == 1
    long = local(Batch.from_lens([1000], [1000], block_table=[list(range(63))], page_size=16), 8192)
    assert long.query_lens.tolist() == [1000]


def test_local_picks_the_pages_of_each_chunk():
    table = np.arange(30).reshape(3, 10)
    found = local(Batch.from_lens([4, 10, 5], [6, 17, 9], block_table=table, page_size=2), 4)
    pages = [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    assert found.block_table.tolist() == pages


@given(cases(), st.integers(1, 4), st.randoms())
def test_local_regathers_for_a_second_group_as_if_planned_for_it(case, pages, random):
    chunk = pages * case.page_size
    other = np.array(random.sample(range(10**6), case.block_table.size), np.int32).reshape(case.block_table.shape)
    table = torch.from_numpy(other)
    derived = local(case.batch(), chunk).with_group(table, None, case.page_size)
    direct = local(dataclasses.replace(case, block_table=other).batch(), chunk)
    assert torch.equal(derived.block_table, direct.block_table)
    assert derived.query_lens is not direct.query_lens and derived.seq_lens.tolist() == direct.seq_lens.tolist()


def test_local_refuses_by_name_what_it_cannot_do():
    batch = Batch.from_lens([1], [9], block_table=[[0]], page_size=16)
    with pytest.raises(UnsupportedError, match="chunk 8 is not a multiple of page_size 16"):
        local(batch, 8)
    with pytest.raises(UnsupportedError, match="chunk 48 is not a multiple of page_size 32"):
        local(Batch.from_lens([1], [9], block_table=[[0]], page_size=32), 48)
    with pytest.raises(ValueError, match="chunk is 0"):
        local(batch, 0)
    with pytest.raises(ValueError, match="exact"):
        local(dataclasses.replace(batch, exact=False), 16)
    with pytest.raises(UnsupportedError, match="row 0 has one"):
        local(Batch.from_lens([1], [9]), 8)


def test_local_of_contiguous_first_chunks_needs_no_pages():
    found = local(Batch.from_lens([5, 3], [5, 3]), 4)
    assert (found.query_lens.tolist(), found.block_table) == ([4, 1, 3], None)


# cross


@many
@given(cases(), st.data(), paddings)
def test_cross_sees_the_whole_encoder_of_its_request_whatever_the_step(case, data, extra):
    batch = padded(case.batch(), extra)
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    lens = np.array([data.draw(st.integers(0, 20)) for _ in case.query_lens], np.int32)
    width = -(-int(lens.max(initial=0)) // page_size)
    pages = np.array(data.draw(st.permutations(range(width * len(lens)))), np.int32).reshape(len(lens), width)
    lens, pages = np.pad(lens, (0, extra[0])), np.pad(pages, ((0, extra[0]), (0, 0)))
    found = cross(batch, lens, torch.from_numpy(pages), page_size)
    check_dtypes(found)
    space = max(1, pages.size) * page_size
    wanted = np.zeros((batch.num_tokens, space), int)
    for token, row in enumerate(batch.token_to_req()):
        for key in range(lens[row]):
            wanted[token, pages[row, key // page_size] * page_size + key % page_size] = 1
    assert np.array_equal(seen(found, space), wanted)
    assert found.slot_mapping is None and found.padded_tokens == batch.padded_tokens
    assert not (found.kinds() == PREFILL).any()  # no kernel may take its keys from the step's own tokens


def test_cross_of_the_public_case():
    # token tables rows 0..9 and 10..19, encoder lengths 3 and 5, text lengths 4 and 2
    tokens = torch.arange(20).reshape(2, 10)
    enc = torch.tensor([3, 5])
    text = Batch.from_token_table(tokens, torch.tensor([0, 1]), [4, 2], [4, 2], page_size=1, offsets=np.array([3, 5]))
    assert text.slot_mapping.tolist() == [3, 4, 5, 6, 15, 16]
    crossed = cross(text, enc.numpy(), tokens[:, :5].to(torch.int32))
    found = seen(crossed, 20)
    assert [np.flatnonzero(row).tolist() for row in found] == [[0, 1, 2]] * 4 + [[10, 11, 12, 13, 14]] * 2


def test_text_behind_an_encoder_starts_on_a_page_or_is_refused():
    tokens = torch.arange(32).reshape(1, 32)
    step = dict(query_lens=[1], seq_lens=[5], page_size=4)
    found = Batch.from_token_table(tokens, torch.tensor([0]), **step, offsets=np.array([8]))
    assert found.block_table.tolist() == [[2, 3]] and found.slot_mapping.tolist() == [12]
    with pytest.raises(ValueError, match="row 0: offset 6 is not a multiple of page_size 4"):
        Batch.from_token_table(tokens, torch.tensor([0]), **step, offsets=np.array([6]))


def test_the_encoder_is_written_once():
    table = torch.tensor([[4, 2], [1, 0], [3, 3]], dtype=torch.int32)
    lens = np.array([5, 0, 2])
    step = encoder(lens, table, 4, first=np.array([True, True, False]))
    assert step.slot_mapping.tolist() == [16, 17, 18, 19, 8] and step.causal is False
    later = encoder(lens, table, 4, first=np.zeros(3, bool))
    assert later.num_tokens == 0 and later.slot_mapping.numel() == 0


def test_cross_names_what_does_not_fit():
    batch = Batch.from_lens([1], [4], block_table=[[0]], page_size=4)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="encoder_lens has 2 rows; the step has 1"):
        cross(batch, np.array([1, 2]), table)
    with pytest.raises(ValueError, match="seq_len 5 needs 2 pages"):
        cross(batch, np.array([5]), table)
    with pytest.raises(ValueError, match="first has shape"):
        encoder(np.array([5]), table, 8, first=np.zeros(2, bool))


# draft and verify


@many
@given(cases(), st.integers(0, 4), paddings)
def test_a_draft_step_sees_everything_up_to_its_token(case, step, extra):
    case = widened(case, step + 1)
    batch = case.batch()
    found = draft(padded(batch, extra), step)
    check_dtypes(found)
    live = [row for row, q in enumerate(case.query_lens) if q]
    wanted = np.zeros((len(live), slots(case)), int)
    for token, row in enumerate(live):
        for key in range(case.seq_lens[row] + step + 1):
            wanted[token, slot(batch, row, key)] = 1
    assert np.array_equal(seen(found, slots(case)), wanted)
    written = [slot(batch, row, case.seq_lens[row] + step) for row in live]
    assert found.slot_mapping.tolist() == written + [-1] * extra[1]


@many
@given(cases(), st.data(), paddings, st.booleans())
def test_verify_sees_the_text_and_the_drafts_before_it(case, data, extra, uniform):
    case = widened(case, 5)
    batch = case.batch()
    count = data.draw(st.integers(0, 5))
    each = np.array([count if uniform else data.draw(st.integers(0, 5)) for _ in case.query_lens], int)
    found = verify(padded(batch, extra), count if uniform else np.pad(each, (0, extra[0])))
    check_dtypes(found)
    rows, written = [], []
    for row, q in enumerate(case.query_lens):
        for i in range(each[row] if q else 0):
            sees = np.zeros(slots(case), int)
            for key in range(case.seq_lens[row] + i + 1):
                sees[slot(batch, row, key)] = 1
            rows.append(sees)
            written.append(slot(batch, row, case.seq_lens[row] + i))
    assert np.array_equal(seen(found, slots(case)), np.array(rows).reshape(-1, slots(case)))
    assert found.slot_mapping.tolist() == written + [-1] * extra[1]


def test_drafts_work_on_bounds_without_reading_the_device():
    bound = Batch.from_tensors(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([[2, 7, 1]], dtype=torch.int32),
        torch.tensor([12]),
        page_size=4,
        host_seq_lens=[7],  # the host counts two drafted tokens that the device rejected
        exact=False,
    )
    found = draft(bound, 0)
    assert (found.seq_lens.tolist(), found.host_seq_lens.tolist(), found.exact) == ([6], [8], False)
    assert found.slot_mapping.tolist() == [29]
    assert verify(bound, 3).slot_mapping.tolist() == [29, 30, 31]


def test_a_table_too_narrow_for_the_drafts_is_refused():
    batch = Batch.from_lens([1], [7], block_table=[[4, 2]], page_size=4)
    assert draft(batch, 0).slot_mapping.tolist() == [11]
    for grow in (lambda: draft(batch, 1), lambda: verify(batch, 2)):
        with pytest.raises(ValueError, match="row 0: seq_len 9 needs 3 pages of 4 tokens, but block_table is 2 wide"):
            grow()
    with pytest.raises(ValueError, match="step is -1"):
        draft(batch, -1)
    with pytest.raises(ValueError, match="num_draft"):
        verify(batch, -1)


def test_lengths_do_not_wrap():
    batch = Batch.from_lens([1], [MAX_INT32])
    with pytest.raises(ValueError, match="row 0"):
        draft(batch, 0)


# trimming


@many
@given(cases(), st.integers(0, 20), paddings)
def test_trimming_keeps_what_the_window_sees_and_names_no_dead_page(case, left, extra):
    batch = case.batch()
    step = padded(batch, extra)
    found, dead = trim(step, left), dead_pages(step, left)
    check_dtypes(found)

    wanted = expected(batch, slots(case), lambda _, q, k: q - left <= k <= q)
    got = np.zeros_like(wanted)
    cu = found.host_cu_seqlens_q
    for row in range(found.padded_reqs):
        queries, keys = found.query_lens[row], found.host_seq_lens[row]
        for i in range(queries):
            at = keys - queries + i
            for key in range(max(0, at - left), at + 1):
                got[cu[row] + i, slot(found, row, key)] += 1
        used = -(-keys // case.page_size)
        gone = set(step.block_table[row, : dead[row]].tolist())
        if queries:
            assert not gone & set(found.block_table[row, :used].tolist())
    assert np.array_equal(got, wanted)


# composition


@given(cases(), st.integers(1, 3))
def test_variants_compose(case, pages):
    case = widened(case, 4)
    chunk = pages * case.page_size
    batch = case.batch()
    found = local(verify(batch, 3), chunk)
    whole = verify(batch, 3)
    assert np.array_equal(
        seen(found, slots(case)), expected(whole, slots(case), lambda _, q, k: k <= q and k // chunk == q // chunk)
    )
    assert np.array_equal(
        seen(unpad(pad(found, found.padded_reqs + 2, found.padded_tokens)), slots(case)), seen(found, slots(case))
    )


@given(cases(), paddings)
def test_more_variants_compose(case, extra):
    """Each pair equals the second on the plain step that the first stands for, or the mask that both ask for."""
    case = widened(case, 6)
    batch, num_slots = case.batch(), slots(case)
    step = padded(batch, extra)
    drafted = draft(step, 1)
    chunk = 2 * case.page_size
    wanted = expected(draft(batch, 1), num_slots, lambda _, q, k: k <= q and k // chunk == q // chunk)
    assert np.array_equal(seen(local(drafted, chunk), num_slots), wanted)
    verified = verify(step, 3)
    left = 4
    trimmed = trim(verified, left)
    wanted = expected(verify(batch, 3), num_slots, lambda _, q, k: q - left <= k <= q)
    assert ((seen(trimmed, num_slots) > 0) >= (wanted > 0)).all()
    whole = Batch.from_lens(case.query_lens, case.seq_lens)
    table = torch.from_numpy(case.block_table)
    ranks = [shard(whole, 2, rank, table, case.page_size) for rank in (0, 1)]
    for rank in ranks:
        more = pad(rank, rank.padded_reqs + extra[0], rank.padded_tokens + extra[1])
        assert np.array_equal(seen(more, num_slots), seen(rank, num_slots))


@given(cases())
def test_variants_change_nothing_of_the_step(case):
    case = widened(case, 2)
    batch = case.batch()
    before = [t.clone() for t in (batch.seq_lens, batch.block_table, batch.slot_mapping, batch.cu_seqlens_q)]
    host = [a.copy() for a in (batch.query_lens, batch.host_seq_lens, batch.host_cu_seqlens_q)]
    rows = batch.num_reqs
    table = batch.block_table.clone()
    nodes, where = torch.full((rows, 2), -1), torch.arange(2 * rows).reshape(rows, 2)
    given_tensors = [table, nodes, where]
    kept = [t.clone() for t in given_tensors]
    lens = batch.host_seq_lens.copy()
    for derive in (
        lambda b: local(b, case.page_size),
        lambda b: draft(b, 1),
        lambda b: verify(b, 2),
        lambda b: trim(b, 3),
        lambda b: cross(b, lens, table),
        lambda b: shard(Batch.from_lens(case.query_lens, case.seq_lens), 2, 1, table, case.page_size),
        lambda b: tree(b, nodes, where, 1),
        lambda b: b.with_group(table, b.slot_mapping, case.page_size),
        lambda b: pad(b, rows + 2, b.num_tokens + 2),
        lambda b: b.csr(),
    ):
        derive(batch)
    assert all(torch.equal(a, b) for a, b in zip(kept, given_tensors, strict=True))
    assert (lens == batch.host_seq_lens).all()
    after = (batch.seq_lens, batch.block_table, batch.slot_mapping, batch.cu_seqlens_q)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    twins = (batch.query_lens, batch.host_seq_lens, batch.host_cu_seqlens_q)
    assert all((a == b).all() for a, b in zip(host, twins, strict=True))


def test_variants_read_nothing_of_a_device(unpinned):
    """On the meta device there is nothing to read: asking for a value is an error."""
    table = torch.zeros(3, 8, dtype=torch.int32, device="meta")
    step = Batch.from_lens([1, 4, 3], [9, 12, 3], block_table=table, page_size=4)
    far = {
        "local": local(step, 8),
        "regathered": local(step, 8).with_group(table, None, 4),
        "cross": cross(step, np.array([3, 0, 7]), table, 4),
        "encoder": encoder(np.array([3, 0, 7]), table, 4, first=np.array([True, False, True])),
        "draft": draft(step, 1),
        "verify": verify(step, np.array([1, 2, 3])),
        "shard": shard(step, 2, 1, table, 4),
        "trim": trim(step, 3),
        "pad": unpad(pad(step, 8, 16)),
    }
    nodes = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    several = Batch.from_lens([1, 4], [9, 12], block_table=table[:2], page_size=4)
    parts = [*tree(step, nodes, nodes, depth=2).batches, *prefix(several, 8).batches]
    for batch in (*far.values(), *parts):
        assert batch.device.type == "meta" and batch.block_table.device.type == "meta"
    assert not parts[1].exact  # depths of a tree on a device are bounds


def test_variants_start_one_upload_each(unpinned):
    step = Batch.from_lens([1], [9], block_table=torch.zeros(1, 8, dtype=torch.int32, device="meta"), page_size=4)
    for derive in (lambda: local(step, 8), lambda: draft(step, 0), lambda: verify(step, 1), lambda: trim(step, 2)):
        unpinned.clear()
        derive()
        assert unpinned == [True]
