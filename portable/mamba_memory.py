"""Where the decodes of captured graphs over recurrent layers read their plan: one slot of plans, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.lengths import MAX_INT32, Int32
from portable.mamba_places import Places, Table, check_apart, far, located
from portable.staging import Field, Staging, Views

BLOCKS = 3  # arrays of `BlockIndices`
I32 = torch.int32


class Brought(NamedTuple):
    """What a plan brought to the device."""

    cu_seqlens_q: torch.Tensor
    num_accepted: torch.Tensor
    padding: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    blocks: tuple[torch.Tensor, ...]


class StateMemory:
    """The memory of one slot, for steps of up to `reqs` decodes of `queries` tokens.

    Args:
        collect: what a kernel of the operation runs.
    """

    def __init__(
        self, device: torch.device, reqs: int, tokens: int, queries: int, collect: Callable[..., None]
    ) -> None:
        self.device, self.collect = device, collect
        fields = _fields(reqs, tokens, reqs * (1 + queries), BLOCKS)
        self.staging = Staging(sum(field.nbytes for field in fields.values()), device)
        self._layouts: dict[tuple[int, ...], Views] = {}

    def bring(
        self,
        cu: Int32,
        accepted: Int32 | None,
        padding: npt.NDArray[np.bool_],
        slots: npt.NDArray[np.integer],
        blocks: Sequence[npt.NDArray[np.integer]] = (),
        **more: npt.NDArray[np.integer],
    ) -> Brought:
        """Arrays to the device by one copy, `rows` and `first` among them where the slots are looked up there."""
        views = self._views(cu, padding, slots, blocks)
        here, there = views.here[self.staging.turn()], views.there
        here["cu_seqlens_q"][:] = cu
        here["num_accepted"][:] = 1 if accepted is None else accepted
        here["padding"][:] = padding
        here["slots"][:] = slots
        for name, array in more.items():
            here[name][: array.size] = array
        for i, block in enumerate(blocks):
            here[f"block {i}"][:] = block
        self.staging.send(views.start, views.end)
        own = tuple(there[f"block {i}"] for i in range(len(blocks)))
        return Brought(**{name: there[name] for name in Brought._fields[:-1]}, blocks=own)

    def look_up(
        self,
        table: Table,
        places: Places,
        num_reqs: int,
        pad_slot: int,
        counts: torch.Tensor | None,
        most: int,
        cu: Int32,
        accepted: Int32 | None,
        padding: npt.NDArray[np.bool_],
        blocks: Sequence[npt.NDArray[np.integer]],
    ) -> tuple[Brought, npt.NDArray[np.integer]]:
        """`bring` the slots that stand in a table, and what `located` gave of them.

        Of a table on the device, and of counts of accepted tokens there, one launch looks them up.
        """
        reads = cu.size - 1
        if far(table):
            found = located(
                table, places if counts is None else places._replace(behind=counts, reach=most - 1), num_reqs
            )
            rows = np.where(places.columns < 0, -1, places.rows).astype(np.int32, copy=False)
            none = np.full(rows.size, pad_slot, np.int32)
            brought = self.bring(cu, accepted, padding, none, blocks, rows=rows, first=places.columns)
            assert isinstance(table, torch.Tensor)
            given, at, begin, cells = _indices(table), brought.rows, brought.first, brought.slots
        else:
            # what a request reads, only a device may know: one of so many states that it may go on from
            known = places if counts is None else Places(places.rows[reads:], places.columns[reads:], None)
            found = located(table, known, num_reqs, pad_slot)
            writes = found.size - (places.rows.size - reads)
            check_apart(found[writes:], places.rows[reads:], places.rows.size - reads, pad_slot)
            if counts is None:
                return self.bring(cu, accepted, padding, found, blocks), found
            located(table, places._replace(behind=counts, reach=most - 1), num_reqs)
            states = _candidates(table, places.rows[:reads], places.columns[:reads], most, pad_slot)
            none = np.full(reads, pad_slot, np.int32)
            brought = self.bring(cu, accepted, padding, np.concatenate([none, found]), blocks, first=states)
            found = np.concatenate([states, found])
            given, at, begin = brought.first[: states.size].view(reads, most), None, None
            cells = brought.slots[:reads]
        kept = None if counts is None else brought.num_accepted[: len(counts)]
        taken = None if counts is None else _indices(counts)
        self.collect(given, at, begin, cells[:, None], pad_slot, taken, most, kept, ())
        return brought, found

    def _views(
        self,
        cu: Int32,
        padding: npt.NDArray[np.bool_],
        found: npt.NDArray[np.integer],
        blocks: Sequence[npt.NDArray[np.integer]],
    ) -> Views:
        key = cu.size - 1, padding.size, found.size, len(blocks)
        if key not in self._layouts:
            self._layouts[key] = self.staging.views(_fields(*key))
        return self._layouts[key]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.staging.nbytes


def _candidates(table: Table, rows: Int32, columns: Int32, most: int, pad_slot: int) -> Int32:
    """[n * most] the slots in `most` columns of each row, pad_slot for what is none; a count never says those."""
    host = table.numpy() if isinstance(table, torch.Tensor) else table
    at = columns[:, None] + np.arange(most, dtype=np.int32)
    slots = host[rows[:, None].clip(0, len(host) - 1), at.clip(0, host.shape[1] - 1)] if host.size else at
    none = (columns[:, None] < 0) | (slots < 0) | (slots > MAX_INT32)
    return np.where(none, pad_slot, slots).astype(np.int32).reshape(-1)


def _indices(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels take them: 32 or 64 bits wide, with the columns of a row side by side."""
    wide = tensor if tensor.dtype in (I32, torch.int64) else tensor.long()
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def _fields(rows: int, tokens: int, slots: int, blocks: int) -> dict[str, Field]:
    return {
        "cu_seqlens_q": Field((rows + 1,), I32),
        "num_accepted": Field((rows,), I32),
        "padding": Field((tokens,), torch.bool),
        "slots": Field((slots,), I32),
        "rows": Field((slots,), I32),
        "first": Field((slots,), I32),
        **{f"block {i}": Field((rows,), I32) for i in range(blocks)},
    }
