"""Slots, page tables and compressed rows: laws against plain loops, with ids that 32-bit arithmetic would wrap."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases

from portable.paging import num_pages, page_csr, page_table_from_tokens, slot_mapping

page_sizes = st.sampled_from([1, 2, 3, 16, 64, 1000])


@st.composite
def tables(draw):
    """A block table whose ids go up to 2**31 - 1 and whose tails are rubbish, lengths, and a page size."""
    page_size = draw(page_sizes)
    lens = draw(st.lists(st.integers(0, 4 * page_size + 1), max_size=6))
    need = [-(-n // page_size) for n in lens]
    width = max(need, default=0) + draw(st.integers(0, 2))
    ids = st.one_of(st.integers(0, 9), st.integers(2**31 - 9, 2**31 - 1))
    table = np.array([[draw(ids) for _ in range(width)] for _ in lens], np.int32).reshape(len(lens), width)
    return table, np.array(lens, np.int32), page_size


def rows_of(table, lens, page_size):
    return [table[b, : -(-int(n) // page_size)].tolist() for b, n in enumerate(lens)]


@given(tables())
def test_slots_equal_the_loop_in_64_bits_on_both_libraries(case):
    table, lens, page_size = case
    requests = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    positions = np.array([p for n in lens for p in range(n)], np.int32)
    right = [
        int(table[b, p // page_size]) * page_size + p % page_size
        for b, p in zip(requests.tolist(), positions.tolist(), strict=True)
    ]
    before = table.tobytes(), requests.tobytes(), positions.tobytes()
    found = slot_mapping(table, requests, positions, page_size)
    assert found.dtype == np.int64 and found.tolist() == right
    tensors = (torch.from_numpy(array) for array in (table, requests, positions))
    twin = slot_mapping(*tensors, page_size)
    assert twin.dtype == torch.int64 and twin.tolist() == right
    assert (table.tobytes(), requests.tobytes(), positions.tobytes()) == before


@pytest.mark.parametrize(
    "page, page_size", [(7768, 576 * 480), (65536, 2**15), (2**31 - 1, 2**31 - 1), (131072, 16384)]
)
def test_the_first_slot_past_32_bits_does_not_wrap(page, page_size):
    table, zero = np.array([[page]], np.int32), np.array([0], np.int32)
    right = page * page_size
    assert right >= 2**31
    assert slot_mapping(table, zero, zero, page_size).tolist() == [right]
    assert slot_mapping(*(torch.from_numpy(a) for a in (table, zero, zero)), page_size).tolist() == [right]


@given(st.data(), st.sampled_from([1, 2, 4, 16]), st.booleans())
def test_a_page_table_of_tokens_equals_the_loop(data, page_size, with_offsets):
    """Token slots as an engine keeps them: right up to each length and rubbish behind, rows in any order."""
    lens = data.draw(st.lists(st.integers(0, 3 * page_size + 1), max_size=5))
    starts = [page_size * data.draw(st.integers(0, 2)) if with_offsets else 0 for _ in lens]
    capacity = max((start + n for start, n in zip(starts, lens, strict=True)), default=0) + data.draw(st.integers(0, 3))
    rows = data.draw(st.permutations(range(len(lens) + 2)))[: len(lens)]
    width = max((-(-n // page_size) for n in lens), default=0) + data.draw(st.integers(0, 2))
    tokens = torch.full((len(lens) + 2, capacity), 2**31 - 1, dtype=torch.int32)
    right = [[0] * width for _ in lens]
    for b, (row, start, n) in enumerate(zip(rows, starts, lens, strict=True)):
        for page in range(-(-n // page_size)):
            right[b][page] = data.draw(st.integers(0, (2**31 - 1) // page_size - 1))
            for offset in range(min(page_size, n - page * page_size)):
                tokens[row, start + page * page_size + offset] = right[b][page] * page_size + offset
    before = tokens.clone()
    found = page_table_from_tokens(
        tokens,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lens, dtype=torch.int32),
        page_size,
        width,
        torch.tensor(starts, dtype=torch.int32) if with_offsets else None,
    )
    assert found.dtype == torch.int32 and found.shape == (len(lens), width) and found.tolist() == right
    assert torch.equal(tokens, before)


def test_page_ids_are_not_token_slots():
    slots = torch.tensor([[8, 9, 10, 11, 20, 21, 22, 23, 4, 5, 6, 7]])
    row, lens = torch.tensor([0]), torch.tensor([9])
    assert page_table_from_tokens(slots, row, lens, page_size=4, width=3).tolist() == [[2, 5, 1]]
    assert page_table_from_tokens(slots, row, torch.tensor([12]), page_size=4, width=3)[:, 2].tolist() == [1]
    text = page_table_from_tokens(slots, row, torch.tensor([5]), 4, 4, offsets=torch.tensor([4]))
    assert text.tolist() == [[5, 1, 0, 0]]


@given(tables(), st.integers(0, 3))
def test_compressed_rows_equal_the_loop_and_give_the_table_back(case, spare):
    table, lens, page_size = case
    pages = rows_of(table, lens, page_size)
    total = sum(map(len, pages))
    before = table.tobytes(), lens.tobytes()
    csr = page_csr(torch.from_numpy(table), torch.from_numpy(lens), page_size, total + spare)
    assert {csr.indptr.dtype, csr.indices.dtype, csr.last_page_len.dtype, csr.seq_lens.dtype} == {torch.int32}
    assert csr.indptr.tolist() == np.cumsum([0, *map(len, pages)]).tolist()
    assert csr.indices.tolist() == [page for row in pages for page in row] + [0] * spare
    assert csr.last_page_len.tolist() == [(int(n) - 1) % page_size + 1 if n else 0 for n in lens]
    assert csr.page_size == page_size and csr.seq_lens.tolist() == lens.tolist()
    assert total == num_pages(lens, page_size)
    for width in (table.shape[1], table.shape[1] + 1):
        again = csr.table(width)
        assert again.dtype == torch.int32
        assert again.tolist() == [row + [0] * (width - len(row)) for row in pages]
    assert (table.tobytes(), lens.tobytes()) == before


@given(cases(), st.integers(0, 3))
def test_rows_of_tokens_are_the_slots_of_the_pages_in_order(case, spare):
    total = sum(case.seq_lens)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    csr = page_csr(torch.from_numpy(case.block_table), lens, case.page_size, case.num_pages)
    tokens = csr.of_tokens(total + spare)
    right = [case.slot(b, p) for b, n in enumerate(case.seq_lens) for p in range(n)]
    assert tokens.indices.tolist() == right + [0] * spare
    assert tokens.indptr.tolist() == np.cumsum([0, *case.seq_lens]).tolist()
    assert tokens.last_page_len.tolist() == [min(n, 1) for n in case.seq_lens]
    assert tokens.page_size == 1 and tokens.seq_lens.tolist() == case.seq_lens
    assert {tokens.indptr.dtype, tokens.indices.dtype, tokens.last_page_len.dtype} == {torch.int32}


def test_the_granularity_of_the_checklist():
    lens = torch.tensor([1, 16, 17, 127, 0], dtype=torch.int32)
    table = torch.zeros(5, 8, dtype=torch.int32)
    table[0, 0], table[1, 0] = 9, 4
    table[2, :2] = torch.tensor([7, 2])
    table[3] = torch.tensor([30, 11, 28, 3, 5, 19, 1, 8])
    csr = page_csr(table, lens, 16, 12)
    assert csr.indptr.diff().tolist() == [1, 1, 2, 8, 0]
    assert csr.last_page_len.tolist() == [1, 16, 1, 15, 0]
    tokens = csr.of_tokens(161)
    assert tokens.last_page_len.tolist() == [1, 1, 1, 1, 0]
    right = [int(table[b, p // 16]) * 16 + p % 16 for b, n in enumerate(lens.tolist()) for p in range(n)]
    assert tokens.indices.tolist() == right


def test_a_sequence_at_the_end_of_int32_has_its_pages():
    longest, page_size = 2**31 - 1, 2**30
    csr = page_csr(torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([longest], dtype=torch.int32), page_size, 2)
    assert csr.indptr.tolist() == [0, 2] and csr.indices.tolist() == [5, 6]
    assert csr.last_page_len.tolist() == [2**30 - 1] and csr.seq_lens.tolist() == [longest]
    assert num_pages(np.array([longest, longest], np.int32), 1) == 2 * longest


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_no_keys_at_all_make_empty_rows_of_any_capacity(shape):
    csr = page_csr(torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int32), 4, 3)
    assert csr.indices.tolist() == [0, 0, 0] and csr.indptr.tolist() == [0] * (shape[0] + 1)
    assert csr.table(2).tolist() == [[0, 0]] * shape[0]
    none = page_csr(torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int32), 4, 0)
    for rows in (csr, none):
        tokens = rows.of_tokens(2)
        assert tokens.indices.tolist() == [0, 0] and tokens.last_page_len.tolist() == [0] * shape[0]
        assert tokens.indices.dtype == torch.int32


def test_nothing_here_reads_the_device(no_sync):
    table, lens = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    requests = torch.tensor([0, 1])
    with no_sync():
        csr = page_csr(table, lens, 4, 4)
        tokens = csr.of_tokens(13)
        again = tokens.table(8), csr.table(2), csr.seq_lens
        slots = slot_mapping(table, requests, requests, 4)
        pages = page_table_from_tokens(table, requests, lens.clamp(max=2), 1, 2, offsets=requests)
    assert torch.equal(again[1], table) and torch.equal(again[2], lens)
    assert slots.tolist() == [12, 9] and pages.shape == (2, 2)
