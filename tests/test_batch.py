"""Batch: every way to build one says the same, what it derives, what it refuses, and that it changes nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_same_batch, cases

from portable import Batch
from portable.block_table import BlockTable
from portable.lengths import as_table, check_table
from portable.padding import pad
from portable.view import View


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_dtypes(batch):
    """Those of the glossary, on the device and on the host."""
    tensors = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    assert {t.dtype for t in tensors if t is not None} == {torch.int32}
    assert batch.slot_mapping is None or batch.slot_mapping.dtype == torch.int64
    assert {batch.query_lens.dtype, batch.host_seq_lens.dtype, batch.host_cu_seqlens_q.dtype} == {np.dtype(np.int32)}
    numbers = (batch.num_reqs, batch.num_tokens, batch.padded_tokens, batch.max_query_len, batch.max_seq_len)
    assert {type(number) for number in numbers} == {int}


@given(cases())
def test_a_batch_of_lengths_equals_the_loop(case):
    before = case.block_table.tobytes()
    batch = case.batch()
    assert batch.slot_mapping.tolist() == case.slots()
    assert batch.cu_seqlens_q.tolist() == batch.host_cu_seqlens_q.tolist() == np.cumsum([0, *case.query_lens]).tolist()
    assert batch.seq_lens.tolist() == batch.host_seq_lens.tolist() == case.seq_lens
    assert batch.query_lens.tolist() == case.query_lens
    assert batch.context_lens.tolist() == case.context_lens
    assert batch.token_to_req().tolist() == [row for row, q in enumerate(case.query_lens) for _ in range(q)]
    assert batch.token_to_req().dtype == np.int32
    assert (batch.num_reqs, batch.padded_reqs) == (len(case.query_lens),) * 2
    assert (batch.num_tokens, batch.padded_tokens) == (sum(case.query_lens),) * 2
    assert batch.max_query_len == max(case.query_lens, default=0)
    assert batch.max_seq_len == max(case.seq_lens, default=0)
    assert_dtypes(batch)
    assert case.block_table.tobytes() == before


@given(cases(), st.sampled_from([np.int32, np.int64, np.uint16, torch.int32, torch.int64, list]))
def test_the_type_of_the_arguments_does_not_matter(case, kind):
    def given_as(values):
        if kind is list:
            return np.asarray(values).tolist()
        return torch.tensor(values, dtype=kind) if isinstance(kind, torch.dtype) else np.array(values, kind)

    table = case.block_table if kind is list else given_as(case.block_table)
    lens = [np.asarray(given_as(values)) for values in (case.query_lens, case.seq_lens)]
    if kind is list:
        lens = [case.query_lens, case.seq_lens]
    found = Batch.from_lens(*lens, block_table=table, page_size=case.page_size)
    assert_same_batch(found, case.batch())


def test_an_int32_table_on_the_cpu_is_not_copied_and_others_are():
    table = np.zeros((1, 2), np.int32)
    for given_table in (table, torch.from_numpy(table)):
        batch = Batch.from_lens([1], [1], block_table=given_table, page_size=4)
        assert batch.block_table.data_ptr() == table.ctypes.data
    wide = Batch.from_lens([1], [1], block_table=table.astype(np.int64), page_size=4)
    assert wide.block_table.data_ptr() != table.ctypes.data


def test_a_batch_keeps_its_numbers_when_the_engine_reuses_its_arrays():
    query_lens, seq_lens, prefilling = np.array([1, 2], np.int32), np.array([5, 2], np.int32), np.array([False, True])
    batch = Batch.from_lens(query_lens, seq_lens, is_prefilling=prefilling)
    for array in (query_lens, seq_lens, prefilling):
        array[:] = 0
    assert batch.query_lens.tolist() == [1, 2] and batch.host_seq_lens.tolist() == [5, 2]
    assert batch.seq_lens.tolist() == [5, 2] and batch.is_prefilling.tolist() == [False, True]


def engine_tensors(case, extra_rows=0, extra_tokens=0):
    """What an engine that pads keeps: (cu, seq_lens, table, slots), padding behind."""
    cu = np.cumsum([0, *case.query_lens, *[0] * extra_rows]).astype(np.int32)
    lens = np.array([*case.seq_lens, *[0] * extra_rows], np.int32)
    table = np.pad(case.block_table, ((0, extra_rows), (0, 0)))
    slots = np.array([*case.slots(), *[-1] * extra_tokens], np.int64)
    return [torch.from_numpy(array) for array in (cu, lens, table, slots)]


def test_whoever_writes_into_a_batch_of_decodes_leaves_the_others_alone(recwarn):
    """Into its tensors, or into its arrays as tensors; and no table that is read only is written to."""
    fields = ("cu_seqlens_q", "seq_lens", "slot_mapping", "query_lens", "host_cu_seqlens_q", "host_seq_lens")
    table = BlockTable(rows=2, width=3)
    table.put([0, 0, 1], [0, 1, 0], [7, 9, 4])
    right = Batch.from_lens([1, 1], [5, 2], block_table=table.pages.copy(), page_size=4)
    torch.set_warn_always(True)
    try:
        for pages in (table, table.pages):
            batch = Batch.decode([5, 2], pages, page_size=4)
            assert_same_batch(batch, right, ignore=("pages",))
            for name in fields:
                torch.as_tensor(getattr(batch, name)).fill_(77)
        batch.block_table.fill_(77)
    finally:
        torch.set_warn_always(False)
    assert not [str(each.message) for each in recwarn] and table.pages.tolist() == [[7, 9, 0], [4, 0, 0]]


def test_a_decode_takes_the_tables_that_a_batch_of_lengths_takes_and_blames_what_is_wrong():
    for table in ([[3, 7], [1, 0]], torch.tensor([[3, 7], [1, 0]]), np.array([[3, 7], [1, 0]])):
        assert Batch.decode([5, 2], table, page_size=4).slot_mapping.tolist() == [28, 5]
        for make in (
            Batch.decode,
            lambda lens, table, **more: Batch.from_lens([1, 1], lens, block_table=table, **more),
        ):
            with pytest.raises(ValueError, match=r"page_size is (np\.int64\()?4\)?; it must be an int between 1 and"):
                make([5, 2], table, page_size=np.int64(4))


@given(cases(), st.booleans())
def test_an_engines_own_tensors_make_the_same_batch_uncopied(case, with_twins):
    tensors = engine_tensors(case)
    before = [tensor.clone() for tensor in tensors]
    twins = {"host_cu_seqlens_q": tensors[0].numpy(), "host_seq_lens": case.seq_lens} if with_twins else {}
    batch = Batch.from_tensors(*tensors, page_size=case.page_size, **twins)
    assert_same_batch(batch, case.batch())
    assert_dtypes(batch)
    for tensor, same, old in zip(
        (batch.cu_seqlens_q, batch.seq_lens, batch.block_table, batch.slot_mapping), tensors, before, strict=True
    ):
        assert tensor is same and torch.equal(tensor, old)


@given(cases(), st.integers(0, 3), st.integers(0, 4))
def test_an_engines_padded_tensors_make_the_padded_batch(case, rows, tokens):
    tensors = engine_tensors(case, rows, tokens)
    batch = Batch.from_tensors(*tensors, page_size=case.page_size, num_reqs=len(case.query_lens))
    right = pad(case.batch(), len(case.query_lens) + rows, sum(case.query_lens) + tokens)
    assert_same_batch(batch, right)
    assert (batch.num_reqs, batch.padded_reqs) == (len(case.query_lens), len(case.query_lens) + rows)
    assert (batch.num_tokens, batch.padded_tokens) == (sum(case.query_lens), sum(case.query_lens) + tokens)
    assert torch.equal(tensors[3], engine_tensors(case, rows, tokens)[3])  # its tail is read, never filled


def test_tensors_off_the_host_need_their_twins_and_are_not_read(no_sync):
    far = [t.to("meta") for t in (int32(0, 1, 3), int32(5, 2), torch.zeros(2, 2, dtype=torch.int32))]
    slots = torch.zeros(3, dtype=torch.int64, device="meta")
    twins = {"host_cu_seqlens_q": [0, 1, 3], "host_seq_lens": [5, 2]}
    with no_sync():
        batch = Batch.from_tensors(*far, slots, page_size=4, **twins)
        split, csr = batch.split(), batch.csr()
    assert (split.decodes.num_reqs, split.prefills.num_reqs) == (1, 1)
    assert (csr.indices.shape, csr.indices.device.type) == ((3,), "meta")
    for name in twins:
        with pytest.raises(ValueError, match=rf"{name} is None; {name[5:]} is on meta"):
            Batch.from_tensors(*far, slots, page_size=4, **(twins | {name: None}))


@given(cases(), st.data())
def test_upper_bounds_feed_what_may_take_them_and_nothing_else(case, data):
    """The host runs ahead of what was accepted: its lengths are at least the device's, up to the table's width."""
    room = case.block_table.shape[1] * case.page_size
    bounds = [
        data.draw(st.integers(s, room)) if s > q else s for q, s in zip(case.query_lens, case.seq_lens, strict=True)
    ]
    tensors = engine_tensors(case)
    batch = Batch.from_tensors(*tensors, page_size=case.page_size, host_seq_lens=bounds, exact=False)
    assert batch.host_seq_lens.tolist() == bounds and batch.seq_lens.tolist() == case.seq_lens
    assert batch.max_seq_len == max(bounds, default=0)
    assert batch.kinds().tolist() == case.batch().kinds().tolist()
    csr, exact = batch.csr(), case.batch().csr()
    assert torch.equal(csr.indptr, exact.indptr) and torch.equal(csr.last_page_len, exact.last_page_len)
    assert torch.equal(csr.indices[: len(exact.indices)], exact.indices)
    assert len(csr.indices) == sum(-(-n // case.page_size) for n in bounds)
    with pytest.raises(ValueError, match=r"chunking needs exact lengths; .* upper bounds \(exact=False\)"):
        batch.needs_exact("chunking")
    case.batch().needs_exact("chunking")


@given(cases(), st.sampled_from([1, 4, 16]), st.sampled_from([torch.int32, torch.int64]), st.randoms())
def test_a_token_table_makes_the_batch_of_its_block_table(case, page_size, dtype, random):
    """Rows of a pool in any order, with rubbish behind each length."""
    case = dataclasses.replace(case, page_size=page_size)
    need = [-(-s // page_size) for s in case.seq_lens]
    pages = list(range(sum(need) + 2))
    random.shuffle(pages)
    table = np.zeros((len(need), max(need, default=0)), np.int32)
    for row, count in enumerate(need):
        table[row, :count] = [pages.pop() for _ in range(count)]
    case = dataclasses.replace(case, block_table=table)
    rows = list(range(len(need) + 2))
    random.shuffle(rows)
    longest = max(case.seq_lens, default=0)
    tokens = torch.full((len(rows), longest + 3), 2**31 - 1, dtype=dtype)
    for b, s in enumerate(case.seq_lens):
        tokens[rows[b], :s] = torch.tensor([case.slot(b, p) for p in range(s)], dtype=dtype)
    before = tokens.clone()
    picked = torch.tensor(rows[: len(need)], dtype=torch.int64)
    batch = Batch.from_token_table(tokens, picked, case.query_lens, case.seq_lens, page_size=page_size)
    assert_same_batch(batch, case.batch())
    assert_dtypes(batch)
    assert torch.equal(tokens, before)


def test_a_token_table_with_page_ids_of_the_checklist():
    tokens = torch.tensor([[8, 9, 10, 11, 20, 21, 22, 23, 4, 5, 6, 7]], dtype=torch.int32)
    batch = Batch.from_token_table(tokens, torch.tensor([0]), [1], [9], page_size=4)
    assert batch.block_table.tolist() == [[2, 5, 1]] and batch.slot_mapping.tolist() == [4]


def test_an_empty_batch_is_a_batch():
    token_table = torch.zeros((2, 0), dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int32)
    for batch in (
        Batch.from_lens([], [], block_table=np.zeros((0, 4), np.int32), page_size=16),
        Batch.from_tensors(int32(0), empty, empty.reshape(0, 4), torch.zeros(0, dtype=torch.int64), page_size=16),
        Batch.from_token_table(*token_table, [], [], page_size=16),
    ):
        assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (0, 0, 0, 0)
        assert batch.cu_seqlens_q.tolist() == [0] and batch.slot_mapping.shape == (0,)
        split = batch.split()
        assert split.decodes == split.prefills == split.pads
        assert batch.csr().indptr.tolist() == [0] and batch.is_ordered()
        assert_dtypes(batch)


def test_a_batch_without_a_cache_has_no_pages():
    batch = Batch.from_lens([3, 2], [3, 2])
    assert batch.block_table is None and batch.slot_mapping is None and batch.padded_tokens == 5
    with pytest.raises(ValueError, match="no block_table"):
        batch.csr()


def test_a_batch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Batch.from_lens([1], [1]).num_tokens = 2


def test_slots_past_32_bits_do_not_wrap():
    for page, size in ((2**27, 64), (2**31 - 1, 2**16), (7768, 576 * 480)):
        batch = Batch.from_lens([1], [size], block_table=np.array([[page]]), page_size=size)
        assert batch.slot_mapping.tolist() == [page * size + size - 1]


@given(cases())
def test_another_group_is_the_same_step_on_other_pages(case):
    """Half the page size, its own ids: what `from_lens` makes of them, without the lengths being worked out again."""
    batch, size = case.batch(is_prefilling=[True] * len(case.query_lens)), max(1, case.page_size // 2)
    need = [-(-s // size) for s in case.seq_lens]
    table = np.zeros((len(need), max(need, default=0) + 1), np.int32)
    for row, count in enumerate(need):
        table[row, :count] = 1000 * row + 7 + np.arange(count)
    other = dataclasses.replace(case, block_table=table, page_size=size)
    right = other.batch(is_prefilling=batch.is_prefilling)
    group = batch.with_group(right.block_table, right.slot_mapping, size)
    assert_same_batch(group, right)
    for name in ("cu_seqlens_q", "seq_lens", "query_lens", "host_seq_lens"):
        assert getattr(group, name) is getattr(batch, name)
    assert_same_batch(batch, case.batch(is_prefilling=batch.is_prefilling))
    assert batch.with_group(right.block_table, None, size).slot_mapping is None


def derived():
    """Two rows on pages 1 and 0 of the step's second and first request, and padding."""
    view = View(rows=np.array([1, 0]), first_page=np.array([1, 0]), width=1)
    step = Batch.from_lens([1, 1], [4, 3], block_table=[[6], [8]], page_size=4)
    return dataclasses.replace(step, view=view)


def test_a_derived_batch_reads_its_pages_off_the_table_of_a_group():
    table = int32([10, 11], [20, 21])
    batch = derived()
    assert batch.with_group(table, None, 4).block_table.tolist() == [[21], [10]]
    padded = pad(batch, 4, 5)
    group = padded.with_group(table, torch.full((5,), -1), 4)
    assert group.block_table.tolist() == [[21], [10], [0], [0]] and group.padded_reqs == 4


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.booleans(), st.data())
def test_the_pages_of_a_view_are_those_of_its_rows(rows, columns, width, gap, dense, data):
    """Of any part of a wider table, however far behind the last page a row reaches."""
    wide = torch.arange(rows * (columns + gap), dtype=torch.int32).reshape(rows, columns + gap)
    table = wide[:, :columns] if dense else wide[:, :columns].T.contiguous().T
    picks = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, columns)), max_size=7))
    row, first = (np.array(each, np.int64).reshape(-1) for each in (zip(*picks, strict=True) if picks else ((), ())))
    found = View(rows=row, first_page=first, width=width).of(table)
    assert found.shape == (len(picks), width) and found.is_contiguous()
    for (at, page), got in zip(picks, found, strict=True):
        wanted = table[at, page : page + width]
        assert torch.equal(got[: len(wanted)], wanted)


@given(cases(), st.integers(0, 2), st.booleans())
def test_a_step_continues_where_all_have_equally_many_new_tokens_on_a_context(case, padding, single):
    case = dataclasses.replace(case, query_lens=[min(q, 1) for q in case.query_lens]) if single else case
    batch = case.batch()
    padded = pad(batch, batch.num_reqs + padding, batch.num_tokens)
    for step, pads in ((batch, 0), (padded, padding)):
        uniform = len(set(step.query_lens.tolist())) == 1 and step.query_lens[0] > 0
        assert step.continues is bool(uniform and not pads and all(step.context_lens > 0))
    fresh = dataclasses.replace(batch, host_seq_lens=batch.query_lens)
    assert not fresh.continues  # what was asked of a step is not told of another


@pytest.mark.parametrize(
    ("batch", "arguments", "message"),
    [
        (None, (int32([1], [2]), None, 0), "page_size is 0"),
        (None, (int32([1]), None, 4), r"block_table has shape \[1, 1\]; it must be \[2, W\]"),
        (None, (int32([1], [2]), None, 2), "row 0: seq_len 4 needs 2 pages of 2 tokens, but block_table is 1 wide"),
        (None, (torch.tensor([[1], [2]]), None, 4), "block_table has dtype torch.int64; it must be torch.int32"),
        (None, (int32(1, 2), None, 4), r"block_table has shape \[2\]"),
        (None, (int32([1], [2]).to("meta"), None, 4), "block_table is on meta; seq_lens is on cpu"),
        (
            None,
            (int32([1], [2]), torch.zeros(3, dtype=torch.int64), 4),
            r"slot_mapping has shape \[3\]; it must be \[2\]",
        ),
        (None, (int32([1], [2]), int32(0, 0), 4), "slot_mapping has dtype torch.int32; it must be torch.int64"),
        (derived(), (int32([1, 2], [3, 4]), None, 8), "page_size is 8; a derived batch keeps its 4"),
        (derived(), (int32([1, 2]), None, 4), "block_table has 1 rows; the step has 2 requests"),
        (derived(), (int32([1], [2]), None, 4), "row 1: the step reads 2 pages, but block_table is 1 wide"),
    ],
)
def test_a_group_that_does_not_fit_the_step_is_refused(batch, arguments, message):
    batch = batch or Batch.from_lens([1, 1], [4, 3], block_table=[[6], [8]], page_size=4)
    with pytest.raises(ValueError, match=message):
        batch.with_group(*arguments)


NO_CAUSE = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(query_lens=[1, 5], seq_lens=[1, 4]), "row 1: seq_len 4 is less than query_len 5"),
        (dict(query_lens=[1], seq_lens=[1, 2]), "query_lens has 1 rows and seq_lens 2"),
        (dict(query_lens=[3, -1], seq_lens=[3, 1]), r"query_lens\[1\] is -1"),
        (dict(query_lens=[1], seq_lens=[2**31]), r"seq_lens\[0\] is 2147483648"),
        (dict(query_lens=[1], seq_lens=[2**64]), "seq_lens has dtype object"),
        (dict(query_lens=[2**30] * 2, seq_lens=[2**30] * 2), "query_lens sum to 2147483648"),
        (dict(query_lens=[1.5], seq_lens=[2]), "query_lens has dtype float64"),
        (dict(query_lens=[True], seq_lens=[2]), "query_lens has dtype bool"),
        (dict(query_lens=[[1]], seq_lens=[[2]]), r"query_lens has shape \[1, 1\]"),
        (
            dict(block_table=[[0, 1]], page_size=4, seq_lens=[9]),
            "row 0: seq_len 9 needs 3 pages of 4 tokens, .* 2 wide",
        ),
        (dict(block_table=[0]), r"block_table has shape \[1\]; it must be \[1, W\]"),
        (dict(block_table=[[0], [1]]), r"block_table has shape \[2, 1\]; it must be \[1, W\]"),
        (dict(block_table=[[0.5]]), "block_table has dtype float64"),
        (dict(block_table=[[True]]), "block_table has dtype bool"),
        (dict(block_table=torch.ones(1, 1)), "block_table has dtype float32"),
        (dict(block_table=[[7, -3]], seq_lens=[5], page_size=4), r"row 0: block_table\[0, 1\] is -3"),
        (
            dict(block_table=[[5, 2**32 + 5]]),
            r"row 0: block_table\[0, 1\] is 4294967301; a page id is at most 2\*\*31 - 1",
        ),
        (dict(block_table=np.array([[2**31]], np.uint32)), r"row 0: block_table\[0, 0\] is 2147483648"),
        (dict(block_table=int32([1]).to("meta"), device="cpu"), "block_table is on meta; device is cpu"),
        (dict(page_size=0), "page_size is 0; it must be an int between 1 and"),
        (dict(page_size=2.0), "page_size is 2.0"),
        (dict(page_size=2**31), "page_size is 2147483648"),
        (dict(causal=NO_CAUSE), r"causal has shape \[2\] and dtype torch.bool; a tensor must be \[1\] bool"),
        (dict(causal=torch.ones(1)), "dtype torch.float32; a tensor must be"),
        (dict(causal=NO_CAUSE[:1].to("meta")), "causal is on meta; seq_lens is on cpu"),
        (dict(is_prefilling=[True, False]), r"is_prefilling has shape \[2\]; it must be \[1\]"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch.from_lens(**({"query_lens": [1], "seq_lens": [1]} | arguments))


def test_rubbish_behind_the_live_pages_is_nobodys_business():
    batch = Batch.from_lens([1], [4], block_table=[[7, -1]], page_size=4)
    assert batch.slot_mapping.tolist() == [31]


SLOTS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(cu_seqlens_q=int32(0, 3, 1)), "row 1: cu_seqlens_q goes from 3 to 1; it never falls"),
        (dict(cu_seqlens_q=int32(1, 2, 3)), "row 0: cu_seqlens_q starts at 1; it must start at 0"),
        (dict(cu_seqlens_q=int32(0, 1)), r"cu_seqlens_q has shape \[2\]; it must be \[3\]"),
        (dict(cu_seqlens_q=torch.tensor([0, 1, 3])), "cu_seqlens_q has dtype torch.int64; it must be torch.int32"),
        (dict(cu_seqlens_q=int32(0, -1, 3)), r"cu_seqlens_q\[1\] is -1"),
        (dict(seq_lens=torch.tensor([5, 2])), "seq_lens has dtype torch.int64; it must be torch.int32"),
        (dict(seq_lens=int32([5, 0], [2, 0])[:, 0]), "seq_lens has a last stride of 2; it must be 1"),
        (dict(seq_lens=int32([5, 2])), r"seq_lens has shape \[1, 2\]; it must be \[2\]"),
        (dict(seq_lens=int32(5, 1)), "row 1: seq_len 1 is less than query_len 2"),
        (dict(block_table=torch.zeros(2, 2)), "block_table has dtype torch.float32; it must be torch.int32"),
        (dict(block_table=int32([0, 0])), r"block_table has shape \[1, 2\]; it must be \[2, any\]"),
        (dict(block_table=int32([0], [0])), "row 0: seq_len 5 needs 2 pages of 4 tokens, but block_table is 1 wide"),
        (dict(block_table=int32([0, 0], [0, 0]).to("meta")), "block_table is on meta; seq_lens is on cpu"),
        (dict(slot_mapping=SLOTS[:2]), "slot_mapping has 2 rows; the batch has 3 new tokens"),
        (dict(slot_mapping=SLOTS.int()), "slot_mapping has dtype torch.int32; it must be torch.int64"),
        (dict(host_cu_seqlens_q=[0, 3]), "the host twins have 1 and 2 rows; the tensors have 2"),
        (dict(host_seq_lens=[5, 2, 1]), "the host twins have 2 and 3 rows; the tensors have 2"),
        (dict(host_seq_lens=[5.0, 2.0]), "seq_lens has dtype float64"),
        (dict(page_size=0), "page_size is 0"),
        (dict(num_reqs=3), "num_reqs is 3; .* of 2 rows"),
        (dict(num_reqs=1), "num_reqs is 1; rows behind it are padding and have no new tokens"),
        (dict(num_reqs=-1), "num_reqs is -1"),
    ],
)
def test_an_engines_tensors_that_cannot_be_right_are_refused_by_name(arguments, message):
    right = {
        "cu_seqlens_q": int32(0, 1, 3),
        "seq_lens": int32(5, 2),
        "block_table": int32([0, 1], [2, 3]),
        "slot_mapping": SLOTS,
        "page_size": 4,
    }
    Batch.from_tensors(**right)
    with pytest.raises(ValueError, match=message):
        Batch.from_tensors(**(right | arguments))


def test_an_empty_engine_step_that_does_not_start_at_zero_is_refused():
    with pytest.raises(ValueError, match="cu_seqlens_q starts at 3"):
        Batch.from_tensors(int32(3), torch.zeros(0, dtype=torch.int32), None, None, page_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rows=torch.tensor([0])), r"rows has shape \[1\]; it must be \[2\]"),
        (dict(rows=torch.tensor([0.0, 1.0])), "rows has dtype torch.float32; it must hold integers"),
        (dict(rows=torch.tensor([0, 1], device="meta")), "rows is on meta; req_to_token is on cpu"),
        (dict(req_to_token=torch.zeros(3, 8)), "req_to_token has dtype torch.float32; it must hold integers"),
        (
            dict(req_to_token=torch.zeros(3, 4, dtype=torch.int32)),
            r"req_to_token has shape \[3, 4\]; a row needs 5 columns",
        ),
        (dict(req_to_token=torch.zeros(8, dtype=torch.int32)), r"req_to_token has shape \[8\]"),
        (dict(seq_lens=[5, 1]), "row 1: seq_len 1 is less than query_len 2"),
        (dict(page_size=-4), "page_size is -4"),
    ],
)
def test_a_token_table_that_cannot_be_right_is_refused_by_name(arguments, message):
    right = {
        "req_to_token": torch.zeros(3, 8, dtype=torch.int32),
        "rows": torch.tensor([0, 2]),
        "query_lens": [1, 2],
        "seq_lens": [5, 2],
        "page_size": 4,
    }
    Batch.from_token_table(**right)
    with pytest.raises(ValueError, match=message):
        Batch.from_token_table(**(right | arguments))


def test_a_table_is_checked_and_brought_to_int32():
    table = np.array([[1, 2], [3, 4]], np.int32)
    assert as_table(table) is table
    turned = as_table(table.T)
    assert turned.flags.c_contiguous and turned.tolist() == [[1, 3], [2, 4]]
    assert as_table(table.astype(np.uint8)).dtype == as_table(table.astype(np.int64)).dtype == np.int32
    check_table(torch.zeros(1, 1, dtype=torch.int32), *np.ones((2, 1), np.int32), page_size=4)


def test_building_a_batch_reads_no_tensor(no_sync):
    table = np.zeros((2, 2), np.int32)
    tokens, rows = torch.arange(16, dtype=torch.int32).reshape(2, 8), torch.tensor([1, 0])
    tensors = int32(0, 1, 3), int32(5, 2), torch.from_numpy(table), torch.zeros(3, dtype=torch.int64)
    slots = torch.zeros(3, dtype=torch.int64)
    with no_sync():
        batches = [
            Batch.from_lens([1, 2], [5, 2], block_table=table, page_size=4),
            Batch.from_lens([1, 2], [5, 2], causal=NO_CAUSE),
            Batch.from_tensors(*tensors, page_size=4, exact=False),
            Batch.from_token_table(tokens, rows, [1, 2], [5, 2], page_size=4),
        ]
        for batch in batches:
            batch.split(short_extends_as_decodes=False, uniform=True)
            batch.is_ordered(), batch.token_to_req(), batch.context_lens
            if batch.block_table is not None:
                batch.csr().of_tokens(7)
                batch.with_group(tensors[2], slots, 4)
        derived().with_group(tensors[2], None, 4)
