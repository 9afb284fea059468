"""The order of programs: every head's items once, few heads on an XCD, what reads the same keys together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from portable.backends.triton.xcd import order, room, run_of
from portable.platform.detect import describe

HEADS = st.integers(1, 33)
XCDS = st.sampled_from([1, 2, 3, 4, 6, 8])
RUNS = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 40), HEADS, XCDS, RUNS)
def test_every_item_of_every_head_has_one_program(items, heads, xcds, run):
    items = room(items, xcds, run)
    dealt = [order(program, heads, xcds, run) for program in range(heads * items)]
    assert sorted(dealt) == [(head, item) for head in range(heads) for item in range(items)]


@given(st.integers(1, 40), HEADS, XCDS, RUNS)
def test_a_run_is_on_one_xcd_one_item_after_the_other(items, heads, xcds, run):
    items = room(items, xcds, run)
    program_of = {order(program, heads, xcds, run): program for program in range(heads * items)}
    for head in range(heads):
        for first in range(0, items, run):
            programs = [program_of[head, first + i] for i in range(run)]
            assert programs == list(range(programs[0], programs[0] + run * xcds, xcds))


@given(st.integers(1, 5), HEADS, XCDS, RUNS)
def test_an_xcd_works_on_as_few_heads_as_it_can_and_on_its_share_of_long_items(rounds, heads, xcds, run):
    programs = range(rounds * xcds * run * heads)
    spread = bool(heads % xcds and xcds % heads)  # then the shares of XCDs begin and end within heads
    for xcd in range(xcds):
        own = [order(program, heads, xcds, run) for program in programs if program % xcds == xcd]
        assert len({head for head, _ in own}) <= -(-heads // xcds) + spread
        assert Counter(item // run // xcds for _, item in own) == dict.fromkeys(range(rounds), run * heads)
        places = [item // run // xcds for _, item in own]
        assert places == sorted(places)  # the list's first are its longest
    for head in range(heads):
        dies = {program % xcds for program in programs if order(program, heads, xcds, run)[0] == head}
        assert len(dies) <= -(-xcds // heads) + spread


@pytest.mark.parametrize(
    ("arch", "product", "xcds"),
    [
        ("gfx942", "MI300X", 8),
        ("gfx942", "MI300A", 6),
        ("gfx942", "MI308X", 4),
        ("gfx950", "MI355X", 8),
        ("sm90", None, 1),
    ],
)
@pytest.mark.parametrize("tiles", [0, 1, 3, 6, 100])
def test_products_have_the_dies_that_work_is_dealt_to(arch, product, xcds, tiles):
    assert describe(arch, product).xcds == xcds
    run = run_of(tiles, xcds)
    assert run == 1 if xcds == 1 else 1 <= run <= min(8, max(tiles, 1)) < 2 * run or run == 8


def test_with_one_xcd_the_heads_of_an_item_come_together():
    assert [order(program, 3, 1) for program in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
