"""Draft trees, shards and shared prefixes against the dense masks that define them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import check_dtypes, expected, padded, seen, slot, slots
from strategies import cases

from portable import Batch
from portable.padding import pad
from portable.paging import pages_of
from portable.parts import branch_layout
from portable.variants import (
    prefix,
    prefix_pays,
    shard,
    shard_lens,
    tree,
)

many = settings(max_examples=500)
paddings = st.tuples(st.integers(0, 3), st.integers(0, 4))


# tree


@st.composite
def forests(draw, rows):
    nodes = draw(st.integers(1, 6))
    return np.array([[draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(rows)], int).reshape(
        rows, nodes
    )


def lineage(parents, row, node):
    out = []
    while node >= 0:
        out.append(node)
        node = parents[row, node]
    return out


@many
@given(cases(), st.data(), paddings)
def test_a_tree_node_sees_the_text_its_ancestors_and_itself(case, data, extra):
    batch = case.batch()
    rows = len(case.query_lens)
    parents = data.draw(forests(rows))
    nodes = parents.shape[1]
    base = slots(case)
    where = base + np.array(data.draw(st.permutations(range(rows * nodes))), int).reshape(rows, nodes)
    depth = max((len(lineage(parents, r, n)) for r in range(rows) for n in range(nodes)), default=1)
    padded_parents = torch.from_numpy(np.pad(parents, ((0, extra[0]), (0, 0)), constant_values=-1))
    padded_where = torch.from_numpy(np.pad(where, ((0, extra[0]), (0, 0))))
    parts = tree(padded(batch, extra), padded_parents, padded_where, depth)
    total = base + rows * nodes
    for part in parts.batches:
        check_dtypes(part)
    found = sum(seen(part, total) for part in parts.batches)
    wanted, written = [], []
    for row, q in enumerate(case.query_lens):
        for node in range(nodes if q else 0):
            sees = np.zeros(total, int)
            for key in range(case.seq_lens[row]):
                sees[slot(batch, row, key)] = 1
            for ancestor in lineage(parents, row, node):
                sees[where[row, ancestor]] = 1
            wanted.append(sees)
            written.append(where[row, node])
    assert np.array_equal(found, np.array(wanted).reshape(-1, total))
    assert parts.step.slot_mapping.tolist() == written + [-1] * extra[1]


def test_a_tree_names_what_cannot_be():
    batch = Batch.from_lens([1], [7], block_table=[[4, 2]], page_size=4)
    good = torch.tensor([[8, 9]])
    for parents, depth, message in (
        ([[-1, 1]], 2, "row 0: parent 1 of node 1 does not stand before it"),
        ([[-2, 0]], 2, "row 0: parent -2 of node 0"),
        ([[-1, 0]], 1, "depth is 1, but a node stands lower"),
        ([[-1, 0]], 3, "depth is 3; a tree of 2 nodes has 1 to 2 levels"),
        ([[-1, 0], [-1, 0]], 2, r"parents has shape \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tree(batch, torch.tensor(parents), good, depth)


def test_branches_of_the_public_case():
    for locations, pages in (([7, 16, 17], [1, 4]), ([3, 4, 5, 6, 7, 8], [0, 1, 2])):
        assert pages_of(torch.tensor(locations), page_size=4).tolist() == pages
    assert branch_layout(prefix_len=7, steps=5, page_size=4) == (3, 2)
    assert branch_layout(prefix_len=8, steps=4, page_size=4) == (0, 1)


# shard


@many
@given(cases(), st.integers(1, 4), st.integers(1, 5), paddings)
def test_shards_together_see_each_key_once(case, world, interleave, extra):
    whole = padded(Batch.from_lens(case.query_lens, case.seq_lens), (0, 0))
    whole = pad(whole, whole.padded_reqs + extra[0], whole.padded_tokens + extra[1])
    page_size, found, owners = 4, 0, {}
    width = -(-max(case.seq_lens, default=0) // page_size)
    rows = whole.padded_reqs
    space = max(1, rows * width * page_size)
    for rank in range(world):
        table = torch.arange(rows * width, dtype=torch.int32).reshape(rows, width).flip(1).contiguous()
        mine = shard(whole, world, rank, table, page_size, interleave)
        check_dtypes(mine)
        held = [[p for p in range(s) if p // interleave % world == rank] for s in case.seq_lens]
        assert shard_lens(np.array(case.seq_lens, int), world, rank, interleave).tolist() == [len(h) for h in held]

        def place(row, position, held=held, table=table):
            page, offset = divmod(held[row].index(position), page_size)
            return int(table[row, page]) * page_size + offset

        tokens = [
            (r, p) for r, (q, s) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)) for p in range(s - q, s)
        ]
        wanted = np.zeros((len(tokens), space), int)
        for t, (row, position) in enumerate(tokens):
            for key in held[row]:
                if key <= position:
                    wanted[t, place(row, key)] = 1
        assert np.array_equal(seen(mine, space), wanted)
        written = [place(r, p) if p in held[r] else -1 for r, p in tokens]
        assert mine.slot_mapping.tolist() == written + [-1] * extra[1]
        owners[rank] = {(r, p) for r, h in enumerate(held) for p in h}
        found += wanted.sum()
    assert sum(map(len, owners.values())) == sum(case.seq_lens)
    assert found == sum(p + 1 for q, s in zip(case.query_lens, case.seq_lens, strict=True) for p in range(s - q, s))


def test_slots_of_a_shard_of_the_checklist():
    # world 2, interleave 1: foreign tokens -1, the own ones at their local place
    step = Batch.from_lens([4], [4])
    table = torch.tensor([[5]], dtype=torch.int32)
    assert shard(step, 2, 0, table, 4).slot_mapping.tolist() == [20, -1, 21, -1]
    assert shard(step, 2, 1, table, 4).slot_mapping.tolist() == [-1, 20, -1, 21]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "world is 0"),
        ((2, 2, 1), "rank is 2; it must be at least 0 and below 2"),
        ((2, 0, 0), "interleave is 0"),
    ],
)
def test_a_shard_that_is_none_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_lens(np.array([4]), *arguments)


# prefix


@many
@given(cases(), st.integers(1, 3), paddings)
def test_a_shared_prefix_and_the_rest_see_what_the_step_sees(case, pages, extra):
    length = pages * case.page_size
    rows = [(q, s + length) for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    width = max((-(-s // case.page_size) for _, s in rows), default=pages)
    table = pages + np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    table[:, :pages] = np.arange(pages)[::-1]
    num_slots = (pages + max(1, table.size)) * case.page_size
    batch = Batch.from_lens([q for q, _ in rows], [s for _, s in rows], block_table=table, page_size=case.page_size)
    parts = prefix(padded(batch, extra), length)
    for part in parts.batches:
        check_dtypes(part)
    found = sum(seen(part, num_slots) for part in parts.batches)
    assert np.array_equal(found, expected(batch, num_slots, lambda _, q, k: k <= q))
    assert torch.equal(parts.step.slot_mapping[: batch.num_tokens], batch.slot_mapping)


def test_a_prefix_that_is_not_shared_is_refused():
    table = [[3, 7, 1], [3, 8, 2]]
    batch = Batch.from_lens([1, 1], [10, 9], block_table=table, page_size=4)
    assert prefix(batch, 4).step.host_seq_lens.tolist() == [6, 5]
    with pytest.raises(ValueError, match="row 1: its first 2 pages are not those of row 0"):
        prefix(batch, 8)
    with pytest.raises(ValueError, match="length is 6; a shared prefix is whole pages of 4"):
        prefix(batch, 6)
    with pytest.raises(ValueError, match="row 0: context 9 is shorter than the shared prefix of 12"):
        prefix(batch, 12)


def test_sharing_pays_with_many_requests_on_a_long_prefix():
    few, many_reqs = (Batch.from_lens([1] * n, [4096] * n) for n in (2, 64))
    assert prefix_pays(many_reqs, 2048)
    assert not prefix_pays(few, 2048) and not prefix_pays(many_reqs, 16)
