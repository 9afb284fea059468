"""Bookkeeping of running states with prefix caching: which column holds them, and what is copied around a step.

`before` brings the running state to the column that the step stores in, past a shared block that nobody may write;
`after` keeps the state at the end of a block that drafts filled, once it is known how many of them were accepted.

    moves = states.before(rows, computed, scheduled)                       # mode "align"
    mamba.copy((pools, plan_state_copies(moves, table)), ...)              # of every group by one launch
    plan_mamba(..., running=states.running[rows], num_accepted=states.accepted[rows])
    moves = states.after(rows, computed, scheduled, drafts, accepted)      # modes "align" and "all": then copy

What follows a step and what goes before the next may be one list, in this order: copies run in the order of the list.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.arguments import at_least, checked, named
from portable.lengths import Int32, as_integers, as_lens, check_integers

Rows = npt.NDArray[np.integer]
Pairs = npt.NDArray[np.int64]


class Moves(NamedTuple):
    """States to copy: rows of the step, the columns of their tables to read, and those to write."""

    rows: Rows
    sources: Int32
    targets: Int32


class RunningStates:
    """Where the running state of each request is; a request is a number below `max_reqs`, as in a block table's rows.

    One of these serves all groups of states with the same block size.

    Args:
        max_reqs: requests that there may be at once.
        block_size: tokens per column of their tables.
        mode: "align" or "all", see `portable.mamba`.
        num_draft: tokens to verify per request at most.

    >>> states = RunningStates(4, block_size=4, num_draft=2)
    >>> states.before([0], computed=[6], scheduled=[3])    # tokens 6 to 8, the last two of them drafts
    Moves(rows=array([0]), sources=array([1], dtype=int32), targets=array([2], dtype=int32))
    >>> states.after([0], [6], [3], drafts=[2], accepted=[2])    # the first draft filled block 1
    Moves(rows=array([0]), sources=array([3], dtype=int32), targets=array([1], dtype=int32))
    """

    @checked
    def __init__(
        self, max_reqs: int, *, block_size: int, mode: Literal["align", "all"] = "align", num_draft: int = 0
    ) -> None:
        at_least(1, max_reqs=max_reqs, block_size=block_size)
        at_least(0, num_draft=num_draft)
        if mode not in ("align", "all"):
            raise ValueError(f"mode is {mode!r}; it must be 'align' or 'all': in 'none' nothing is copied")
        self.block_size, self.mode, self.num_draft = block_size, mode, num_draft
        self.running = np.full(max_reqs, -1, np.int32)  # the column; -1: that of the last computed token, if any
        self.accepted = np.ones(max_reqs, np.int32)  # tokens of the last step that count: the state is as far behind

    @named
    def forget(self, *rows: npt.ArrayLike) -> None:
        """Drop what is known of requests: those that finished, were preempted, or are resumed, before they run again.

        A request may be resumed that nobody reported as preempted; its columns then belong to other slots.

        >>> states = RunningStates(4, block_size=4)
        >>> moves = states.before([2], [0], [6])
        >>> states.forget([], [], [2])
        >>> int(states.running[2])
        -1
        """
        for some in rows:
            which = self._rows(some)
            self.running[which], self.accepted[which] = -1, 1

    @named
    def before(self, rows: npt.ArrayLike, computed: npt.ArrayLike, scheduled: npt.ArrayLike) -> Moves:
        """The moves before a step of `scheduled` [n] new tokens on `computed` [n]: none in the mode "all".

        Afterwards `accepted` says how the step finds its state: 1 where it was moved.
        """
        which, c, n = self._rows(rows), as_lens("computed", computed), as_lens("scheduled", scheduled)
        self._check_lens(which, c, n)
        last = (c - 1) // np.int32(self.block_size)  # -1 without a state
        known = self.running[which]
        column = np.where(known >= 0, known, last)
        target = np.maximum(c + n - 1, 0) // np.int32(self.block_size)
        if self.mode == "all":
            self.running[which] = column
            return Moves(which[:0], last[:0], last[:0])
        moves = np.flatnonzero((column >= 0) & (column != target) & (n > 0))
        source = (column + self.accepted[which] - 1)[moves]
        self.running[which] = np.where(n > 0, target, known)
        self.accepted[which[moves]] = 1
        return Moves(which[moves], source, target[moves])

    @named
    def after(
        self,
        rows: npt.ArrayLike,
        computed: npt.ArrayLike,
        scheduled: npt.ArrayLike,
        drafts: npt.ArrayLike,
        accepted: npt.ArrayLike,
    ) -> Moves:
        """The moves after a step, and where its states are for the next one.

        Args:
            rows, computed, scheduled: of the step, as before it.
            drafts: [n] how many of the scheduled tokens were drafts: all but the first, or none.
            accepted: [n] drafts that were accepted, plus 1.

        Raises:
            ValueError: naming the row, where counts are out of range.
        """
        which, c, n = self._rows(rows), as_lens("computed", computed), as_lens("scheduled", scheduled)
        k, kept = as_lens("drafts", drafts), as_lens("accepted", accepted)
        self._check_lens(which, c, n, k, kept)
        if (wrong := (k > self.num_draft) | ((k > 0) & (k != n - 1))).any():
            row = int(wrong.argmax())
            raise ValueError(
                f"row {which[row]}: drafts is {k[row]} of {n[row]} scheduled tokens; it must be 0, or all but the "
                f"first and at most {self.num_draft}"
            )
        if (wrong := (n > 0) & ((kept < 1) | (kept > 1 + k))).any():
            row = int(wrong.argmax())
            raise ValueError(f"row {which[row]}: accepted is {kept[row]}; it must be between 1 and {1 + k[row]}")
        size = np.int32(self.block_size)
        first = np.maximum(c + n - 1, 0) // size  # the column of the first state
        certain = c + n - k  # tokens up to the first state: the drafts come behind
        full = (certain + kept - 1) // size * size
        crosses = (full >= certain) & (full > 0) & (n > 0)
        source, target = first + full - certain, full // size - 1
        moves = np.flatnonzero(crosses & (source != target))
        ran = n > 0
        self.running[which] = np.where(ran, first, self.running[which])
        # Where the end of the block is its first column, the state there has been replaced by the one to go on from.
        self.accepted[which] = np.where(ran, np.where(crosses & (target == first), 1, kept), self.accepted[which])
        return Moves(which[moves], source[moves], target[moves])

    def _rows(self, rows: npt.ArrayLike) -> Rows:
        given = as_integers("rows", rows).reshape(-1)
        if given.size and (given.min() < 0 or given.max() >= self.running.size):
            wrong = given[(given < 0) | (given >= self.running.size)]
            raise ValueError(f"rows holds {wrong[0]}; requests are numbered from 0 to {self.running.size - 1}")
        return given

    def _check_lens(self, rows: Rows, *lens: Int32) -> None:
        for values in lens:
            if values.size != rows.size:
                raise ValueError(
                    f"rows names {rows.size} requests, and a count has {values.size} entries; give one each"
                )


@named
def plan_state_copies(moves: Moves, table: npt.ArrayLike) -> Pairs:
    """The slots to copy, [n, 2] int64 (from, to), in the pools of one group of states: what `Mamba.copy` takes.

    Args:
        moves: of `RunningStates`; its rows are rows of `table`.
        table: [R, W] state slots of this group, on the host.

    Raises:
        ValueError: a slot below 0 (a block without a state), one written twice, or one written that another request
            reads: a block that is shared must not change.

    >>> moves = Moves(np.array([0, 1]), np.array([0, 1], np.int32), np.array([1, 1], np.int32))
    >>> plan_state_copies(moves, np.array([[3, 4], [3, 6]])).tolist()
    [[3, 4]]
    """
    host = np.asarray(table)
    rows, reach = moves.rows, int(max(moves.sources.max(initial=-1), moves.targets.max(initial=-1)))
    if host.ndim != 2 or (rows.size and (rows.max() >= len(host) or reach >= host.shape[1])):
        most = rows.max(initial=-1)
        raise ValueError(f"table has shape {list(host.shape)}; the moves reach row {most} and column {reach}")
    check_integers("table", host)
    come, go = host[rows, moves.sources], host[rows, moves.targets]
    if (bad := (come < 0) | (go < 0)).any():
        row = int(bad.argmax())
        raise ValueError(
            f"row {rows[row]}: a state moves from slot {come[row]} to {go[row]}; a state slot is 0 or more"
        )
    apart = come != go
    rows, come, go = rows[apart], come[apart], go[apart]
    order = np.argsort(go, kind="stable")
    if (twice := go[order][1:] == go[order][:-1]).any():
        at = int(twice.argmax())
        raise ValueError(f"rows {rows[order[at]]} and {rows[order[at + 1]]} both write slot {go[order[at]]}")
    if (shared := np.isin(go, come)).any():
        at = int(shared.argmax())
        reader = int(rows[(come == go[at]).argmax()])
        raise ValueError(f"row {rows[at]} writes slot {go[at]}, which row {reader} reads")
    return np.stack([come, go], axis=1).astype(np.int64)
