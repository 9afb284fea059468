"""Copies of running states around a step, their overlaps, and 1,000 random schedules of an engine without a model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from mamba_simulator import simulate

from portable.mamba_copies import Moves, RunningStates, plan_state_copies

SEEDS = 1000
PARTS = 8  # of the seeds: one takes 2 s on a core of 2026


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rolling_hash_as_state_over_random_schedules(part):
    """Every read, every checkpoint and the owner of every slot that is written are checked inside."""
    seen: Counter[str] = Counter()
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        try:
            seen.update(simulate(seed))
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    for event in ("steps", "copies", "checkpoints", "hits", "preemptions", "rejections", "forks"):
        assert seen[event] > 100, f"the schedules hardly have {event}: {seen}"


def move(states, computed, scheduled, drafts, accepted):
    """The moves after a step of one request, as (from, to)."""
    states.before([0], [computed], [scheduled])
    moves = states.after([0], [computed], [scheduled], [drafts], [accepted])
    return list(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True))


@pytest.mark.parametrize(
    ("step", "block", "moved", "counts"),
    [
        ((6, 3, 2, 2), 4, [(2 + 1, 1)], 2),  # to a lower block than the running one, which stays as it is
        ((5, 3, 2, 3), 4, [(1 + 2, 1)], 1),  # the running block itself became full: it is where the next step starts
        ((1597, 3, 2, 3), 1600, [(0 + 2, 0)], 1),
        ((6, 3, 2, 3), 8, [(1 + 1, 0)], 3),
        ((6, 3, 2, 1), 8, [], 1),
        ((0, 8, 0, 1), 8, [], 1),
        ((3, 1, 0, 1), 4, [], 1),
    ],
)
def test_the_end_of_a_block_among_drafts_is_kept(step, block, moved, counts):
    states = RunningStates(1, block_size=block, num_draft=2)
    assert move(states, *step) == moved
    assert states.accepted[0] == counts


def test_the_running_state_moves_on_with_its_block_and_behind_what_was_accepted():
    states = RunningStates(2, block_size=4, num_draft=2)
    states.before([1], [3], [3])
    states.after([1], [3], [3], [2], [2])  # columns 1 to 3 hold the states after tokens 4, 5 and 6
    moves = states.before([1], [5], [4])
    assert (moves.rows.tolist(), moves.sources.tolist(), moves.targets.tolist()) == ([1], [2], [2])
    assert (states.running[1], states.accepted[1]) == (2, 1)


def test_a_step_in_the_same_block_moves_nothing_and_remembers_what_was_accepted():
    states = RunningStates(1, block_size=16, num_draft=2)
    assert move(states, 3, 3, 2, 3) == []
    assert states.before([0], [6], [1]).rows.size == 0
    assert states.accepted[0] == 3


@pytest.mark.parametrize("told", ["finished", "preempted", "resumed"])
def test_a_request_is_forgotten_that_is_only_among_the_resumed(told):
    states = RunningStates(3, block_size=4)
    states.before([2], [0], [30])
    states.forget(*([2] if told == name else [] for name in ("finished", "preempted", "resumed")))
    moves = states.before([2], [4], [1])  # resumed onto a cached prefix of one block
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([0], [1])
    states.forget([2])
    assert states.before([2], [0], [9]).rows.size == 0  # from nothing


def test_the_mode_all_moves_nothing_before_a_step_and_remembers_the_column():
    states = RunningStates(1, block_size=4, mode="all", num_draft=2)
    assert states.before([0], [6], [3]).rows.size == 0
    assert states.running[0] == 1
    moves = states.after([0], [6], [3], [2], [2])
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([3], [1])
    assert (states.running[0], states.accepted[0]) == (2, 2)


@pytest.mark.parametrize(
    ("drafts", "accepted", "message"),
    [
        (2, 0, "row 0: accepted is 0; it must be between 1 and 3"),
        (2, 4, "row 0: accepted is 4; it must be between 1 and 3"),
        (0, 2, "row 0: accepted is 2; it must be between 1 and 1"),
        (1, 1, "row 0: drafts is 1 of 3 scheduled tokens; it must be 0, or all but the first and at most 2"),
    ],
)
def test_counts_out_of_range_are_named(drafts, accepted, message):
    states = RunningStates(1, block_size=4, num_draft=2)
    with pytest.raises(ValueError, match=message):
        states.after([0], [6], [3], [drafts], [accepted])


def test_sizes_rows_and_modes_are_checked():
    with pytest.raises(ValueError, match="block_size is 0"):
        RunningStates(1, block_size=0)
    with pytest.raises(ValueError, match="mode is 'none'"):
        RunningStates(1, block_size=4, mode="none")
    states = RunningStates(2, block_size=4)
    with pytest.raises(ValueError, match="rows holds 2; requests are numbered from 0 to 1"):
        states.forget([2])
    with pytest.raises(ValueError, match="rows names 2 requests, and a count has 1 entries"):
        states.before([0, 1], [4, 4], [1])


def moves_of(*triples):
    rows, sources, targets = (np.array(column, np.int32) for column in zip(*triples, strict=True))
    return Moves(rows, sources, targets)


def test_copies_of_one_table():
    table = np.array([[3, 4, 5], [3, 6, 7]])
    pairs = plan_state_copies(moves_of((0, 0, 1), (1, 0, 2)), table)
    assert pairs.tolist() == [[3, 4], [3, 7]]  # a prefix that two read
    assert plan_state_copies(moves_of((0, 1, 1)), table).tolist() == []
    assert plan_state_copies(Moves(*(np.zeros(0, np.int32) for _ in range(3))), table).shape == (0, 2)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (moves_of((0, 0, 1), (1, 0, 1)), "rows 0 and 1 both write slot 4"),
        (moves_of((0, 0, 2), (1, 2, 0)), "row 1 writes slot 3, which row 0 reads"),
        (moves_of((0, 0, 3)), "row 0: a state moves from slot 3 to -1; a state slot is 0 or more"),
        (moves_of((0, 0, 9)), "the moves reach row 0 and column 9"),
    ],
)
def test_copies_that_overlap_or_leave_the_table_are_refused(moves, message):
    table = np.array([[3, 4, 5, -1], [3, 4, 7, -1]])
    with pytest.raises(ValueError, match=message):
        plan_state_copies(moves, table)


def test_a_thousand_requests_take_no_loop():
    """Vectorised: 1,024 requests give the moves of each alone."""
    rng = np.random.default_rng(0)
    computed, scheduled = rng.integers(0, 50, 1024), rng.integers(1, 9, 1024)
    together = RunningStates(1024, block_size=4)
    moves = together.before(np.arange(1024), computed, scheduled)
    for row in range(0, 1024, 97):
        alone = RunningStates(1, block_size=4)
        found = alone.before([0], computed[row : row + 1], scheduled[row : row + 1])
        at = moves.rows == row
        assert (moves.sources[at].tolist(), moves.targets[at].tolist()) == (
            found.sources.tolist(), found.targets.tolist()
        )  # fmt: skip
