"""How the new tokens of prefills are cut, so that a scan has a state wherever one has to be stored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from portable.batch import Batch
from portable.chunks import chunks_of
from portable.lengths import Int32
from portable.mamba_places import per_row
from portable.ragged import cu_from_lens, ragged_arange


class Cuts(NamedTuple):
    """Places in sequences: a row and the tokens of its whole sequence up to there."""

    rows: Int32
    ends: Int32


class StateChunks(NamedTuple):
    """M chunks, each of one row and never empty."""

    cu_chunks: Int32  # [M + 1] where each starts among the tokens, from 0; the last entry is their number
    rows: Int32  # [M]
    ends: Int32  # [M] tokens of the whole sequence up to its end
    last: Int32  # [P] the last chunk of each row; -1 for a row without new tokens

    def at(self, cuts: Cuts) -> npt.NDArray[np.int64]:
        """[n] the chunks that end there."""
        found: npt.NDArray[np.int64] = np.searchsorted(_keys(Cuts(self.rows, self.ends)), _keys(cuts))
        return found


NO_INTEGERS = np.zeros(0, np.int32)
NO_CHUNKS = StateChunks(np.zeros(1, np.int32), NO_INTEGERS, NO_INTEGERS, NO_INTEGERS)


def state_chunks(context_lens: Int32, query_lens: Int32, size: int, cuts: Cuts | None = None) -> StateChunks:
    """Chunks that end on absolute multiples of `size`, at the end of each sequence, and at `cuts` between.

    >>> context, new = np.array([3, 0, 5], np.int32), np.array([6, 0, 2], np.int32)
    >>> state_chunks(context, new, 4).ends.tolist()
    [4, 8, 9, 7]
    >>> chunks = state_chunks(context, new, 4, Cuts(np.array([0], np.int32), np.array([6], np.int32)))
    >>> chunks.cu_chunks.tolist(), chunks.ends.tolist(), chunks.last.tolist()
    ([0, 1, 3, 5, 6, 8], [4, 6, 8, 9, 7], [3, -1, 4])
    """
    found = chunks_of(context_lens, query_lens, size)
    if cuts is None or not cuts.rows.size:
        return StateChunks(found.cu_seqlens, found.request, found.ends, found.last)
    keys = np.unique(np.concatenate([_keys(Cuts(found.request, found.ends)), _keys(cuts)]))
    rows, ends = (keys >> 32).astype(np.int32), (keys & 0xFFFFFFFF).astype(np.int32)
    cu_chunks = np.zeros(rows.size + 1, np.int32)
    cu_chunks[1:] = ends - (context_lens - cu_from_lens(query_lens)[:-1])[rows]
    last = np.cumsum(np.bincount(rows, minlength=query_lens.size)) - 1
    return StateChunks(cu_chunks, rows, ends, np.where(query_lens > 0, last, -1).astype(np.int32))


def multiples(context_lens: Int32, query_lens: Int32, size: int, *, last: bool = False) -> Cuts:
    """The multiples of `size` above each context and up to each length; with `last`, only the greatest of each row.

    >>> context, new = np.array([3, 8], np.int32), np.array([6, 3], np.int32)
    >>> [cuts.ends.tolist() for cuts in (multiples(context, new, 4), multiples(context, new, 4, last=True))]
    [[4, 8], [8]]
    """
    first, end = context_lens // size, (context_lens + query_lens) // size
    if last:
        rows = np.flatnonzero(end > first).astype(np.int32)
        return Cuts(rows, end[rows] * np.int32(size))
    rows, place = ragged_arange(end - first)
    return Cuts(rows, (first[rows] + 1 + place) * np.int32(size))


def stored_chunks(
    batch: Batch, pre: slice, chunk: int, mode: str, block_size: int, checkpoints: npt.ArrayLike | None
) -> tuple[StateChunks, Int32, Int32]:
    """The chunks of the prefills `pre`, the table's column that each stores its state in (-1: none), and for each row
    the chunk that ends at its checkpoint (-1: none). See `plan_mamba` for the modes.

    Raises:
        ValueError: a checkpoint that is not among a prefill's new tokens, or not at the end of a block.
    """
    if pre.start == pre.stop and checkpoints is None:
        return NO_CHUNKS, NO_INTEGERS, NO_INTEGERS
    context, new = batch.context_lens[pre], batch.query_lens[pre]
    none = Cuts(new[:0], new[:0])
    cuts = none
    if mode == "align":  # also where chunks end there anyway: what is stored is found by them
        cuts = multiples(context, new, block_size, last=True)
    elif mode == "all" and chunk % block_size == 0:
        chunk = block_size
    elif mode == "all" and block_size % chunk:
        cuts = multiples(context, new, block_size)
    asked = none if checkpoints is None else _asked(batch, pre, checkpoints, 1 if mode == "none" else block_size)
    if checkpoints is not None:
        cuts = Cuts(*(np.concatenate(pair) for pair in zip(cuts, asked, strict=True)))
    chunks = state_chunks(context, new, chunk, cuts)
    if mode == "all":
        stored = np.where(chunks.ends % block_size == 0, chunks.ends // block_size - 1, -1).astype(np.int32)
    else:
        stored = np.full(chunks.rows.size, -1, np.int32)
        if mode == "align":
            stored[chunks.at(cuts)] = cuts.ends // block_size - 1
    live = new > 0
    stored[chunks.last[live]] = 0 if mode == "none" else (context[live] + new[live] - 1) // block_size
    at = np.full(new.size, -1, np.int32)
    at[asked.rows] = chunks.at(asked)
    return chunks, stored, at


def _asked(batch: Batch, pre: slice, checkpoints: npt.ArrayLike, multiple: int) -> Cuts:
    """The checkpoints as cuts, checked."""
    ends = per_row("checkpoints", checkpoints, batch.num_reqs, batch.padded_reqs, -1)
    wanted, inside = ends >= 0, np.zeros(ends.size, np.bool_)
    inside[pre] = (batch.context_lens[pre] < ends[pre]) & (ends[pre] <= batch.host_seq_lens[pre])
    if (wrong := wanted & ~inside).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"row {row}: checkpoint {ends[row]} is not above the context of {batch.context_lens[row]} and up to the "
            f"length of {batch.host_seq_lens[row]} tokens of a prefill"
        )
    if (wrong := wanted & (ends % multiple != 0)).any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row}: checkpoint {ends[row]} is not a multiple of block_size {multiple}")
    rows = np.flatnonzero(wanted[pre]).astype(np.int32)
    return Cuts(rows, ends[pre][rows])


def _keys(cuts: Cuts) -> npt.NDArray[np.int64]:
    """Row and place in one number: an order in which chunks stand."""
    return (cuts.rows.astype(np.int64) << 32) | cuts.ends
