"""Block tables that log their changes, and what a mirror of the device's table sends: nothing stale, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import launches

from portable import Attention, Batch, Layer
from portable.backends import reference, reference_steps
from portable.block_table import KEPT, BlockTable
from portable.mirror import Mirror

ROWS, WIDTH, PAGE = 5, 6, 4
ACTIONS = st.tuples(
    st.sampled_from(["write", "put", "move", "clear"]), st.integers(0, ROWS - 1), st.integers(0, WIDTH - 1),
    st.integers(0, 99),
)  # fmt: skip


def act(table, model, action):
    kind, row, column, page = action
    if kind == "write":
        pages = np.arange(page, page + WIDTH - column)
        table.write(row, column, pages)
        model[row, column:] = pages
    elif kind == "put":
        rows = np.arange(row, ROWS)
        table.put(rows, np.full(rows.size, column), np.arange(page, page + rows.size))
        model[row:, column] = np.arange(page, page + rows.size)
    elif kind == "move":
        table.move(row, column % ROWS)
        model[column % ROWS] = model[row]
    else:
        table.clear(row)
        model[row] = 0


@given(st.lists(ACTIONS, max_size=12), st.lists(ACTIONS, max_size=6))
def test_what_was_written_since_a_version_is_all_that_differs_from_it(before, after):
    table, model = BlockTable(ROWS, WIDTH), np.zeros((ROWS, WIDTH), np.int64)
    for action in before:
        act(table, model, action)
    old, version = table.pages.copy(), table.version
    for action in after:
        act(table, model, action)
    assert (table.pages == model).all()
    old.reshape(-1)[table.since(version)] = table.pages.reshape(-1)[table.since(version)]
    assert (old == table.pages).all()
    assert not table.since(table.version).size


def test_a_log_forgets_what_is_long_ago():
    table = BlockTable(2, KEPT)
    table.write(0, 0, np.ones(KEPT, int))
    assert table.since(0).size == KEPT
    table.put([1], [3], [7])
    assert table.since(0) is None and table.since(1).tolist() == [KEPT + 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.write(5, 0, [1]), "row 5 and columns 0 to 0 are not in a table of 5 x 6"),
        (lambda t: t.write(0, 4, [1, 2, 3]), "row 0 and columns 4 to 6 are not"),
        (lambda t: t.write(0, 0, [-1]), "row 0: pages are -1 to -1; a page is 0"),
        (lambda t: t.put([0], [-1], [1]), "rows are 0 to 0, columns -1 to -1 and pages 1 to 1; the table is 5 x 6"),
        (lambda t: t.put([0], [0], [2**31]), "pages 2147483648 to 2147483648"),
        (lambda t: t.put([0, 1], [0], [2]), r"rows, columns and pages have shapes \(2,\), \(1,\) and \(1,\)"),
        (lambda t: BlockTable(0, 3), "rows is 0; it must be an int of at least 1"),
    ],
)
def test_what_does_not_fit_into_a_table_is_refused(change, message):
    table = BlockTable(ROWS, WIDTH)
    with pytest.raises(ValueError, match=message):
        change(table)
    assert not table.pages.any() and not table.version
    with pytest.raises(ValueError, match="read-only"):
        table.pages[0, 0] = 3


@st.composite
def steps(draw):
    """(requests, pages of the longest, seed, how the table is given)"""
    return [
        (draw(st.integers(0, ROWS)), draw(st.integers(1, WIDTH)), draw(st.integers(0, 2**20)), kind)
        for kind in draw(st.lists(st.sampled_from(["array", "table", "same table", "device"]), min_size=1, max_size=8))
    ]


@settings(max_examples=80)
@given(steps())
def test_the_table_of_the_device_follows_any_sequence_of_steps(sequence):
    """Arrays, logged tables, and tables that the device copied by itself, in turns and of any size."""
    mirror, device = Mirror(ROWS, WIDTH), np.zeros((ROWS, WIDTH), np.int32)
    own = BlockTable(ROWS, WIDTH)
    for live, reach, seed, kind in sequence:
        rng = np.random.default_rng(seed)
        if kind == "device":
            device[:live] = rng.integers(0, 50, (live, WIDTH))
            mirror.forget(live)
            continue
        given = rng.integers(0, 50, (live, WIDTH)).astype(np.int32)
        if kind != "array":
            own = own if kind == "same table" else BlockTable(ROWS, WIDTH)
            for row in range(live):
                own.write(row, 0, given[row, :reach])
        batch = Batch.from_lens([1] * live, [reach * PAGE] * live, block_table=given if kind == "array" else own,
                                page_size=PAGE)  # fmt: skip
        entries = mirror.changes(batch)
        if entries is None:
            whole = mirror.whole()
            device.reshape(-1)[: whole.size] = whole
        else:
            device.reshape(-1)[entries[0]] = entries[1]
        wanted = batch.block_table.numpy()
        assert (device[:live, :reach] == wanted[:, :reach]).all()
        if kind == "array":
            assert not device[live : mirror.used].any() and not device[:live, reach:].any()


def test_an_entry_that_no_page_has_is_found_before_anything_is_sent():
    mirror = Mirror(ROWS, WIDTH)
    wrong = Batch.from_lens([1], [9], block_table=np.array([[3, -1, 4]]), page_size=PAGE)
    with pytest.raises(ValueError, match=r"row 0: block_table\[0, 1\] is -1; a live page id is 0 or more"):
        mirror.changes(wrong)
    right = Batch.from_lens([1], [9], block_table=np.array([[3, 1, 4]]), page_size=PAGE)
    assert [part.tolist() for part in mirror.changes(right)] == [[0, 1, 2], [3, 1, 4]]


def test_plans_of_a_logged_table_are_those_of_an_array(monkeypatch):
    """Decodes that grow, leave and join; `Batch.decode` is `from_lens` of one token each."""
    kernels = tuple(launches(kernel) for kernel in (*reference.KERNELS, *reference_steps.KERNELS))
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    layer = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    attn = Attention(layer, page_size=PAGE, device="cpu", max_reqs=ROWS, max_tokens=8, max_seq_len=WIDTH * PAGE)
    rng, table, lens = np.random.default_rng(0), BlockTable(ROWS, WIDTH), []
    for turn in range(60):
        if len(lens) < ROWS and rng.random() < 0.3:
            lens.append(int(rng.integers(1, 12)))
            table.clear(len(lens) - 1)
            table.write(len(lens) - 1, 0, rng.integers(1, 90, -(-lens[-1] // PAGE)))
        grown = [row for row, length in enumerate(lens) if length % PAGE == 0]
        table.put(grown, [lens[row] // PAGE for row in grown], rng.integers(1, 90, len(grown)))
        lens = [length + 1 for length in lens]
        batch = Batch.decode(lens, table, page_size=PAGE)
        same = Batch.from_lens([1] * len(lens), lens, block_table=table.pages[: len(lens)].copy(), page_size=PAGE)
        one, two = attn.plan(batch, pad_to=ROWS), attn.plan(same, pad_to=ROWS, slot=1)
        for name in ("cu_seqlens_q", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(one.batch, name), getattr(two.batch, name)), (turn, name)
        reach = -(-max(lens, default=0) // PAGE)
        tables = (plan.batch.block_table[: len(lens), :reach] for plan in (one, two))
        assert torch.equal(*tables)
        for row in reversed([row for row, length in enumerate(lens) if length >= WIDTH * PAGE - 1]):
            table.move(len(lens) - 1, row)
            table.clear(len(lens) - 1)
            lens[row] = lens[-1]
            lens.pop()
    with pytest.raises(ValueError, match="row 1: seq_len is 0; it counts the new token too"):
        Batch.decode([3, 0], table, page_size=PAGE)
