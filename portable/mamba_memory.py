"""Where the decodes of captured graphs over recurrent layers read their plan: one slot of plans, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.lengths import Int32
from portable.mamba_places import Places, Table, slots_at
from portable.platform.graphs import plain, repeatable
from portable.staging import Field, Staging, Views

BLOCKS = 3  # arrays of `BlockIndices`
I32 = torch.int32


class Brought(NamedTuple):
    """What a plan brought to the device."""

    cu_seqlens_q: torch.Tensor
    num_accepted: torch.Tensor
    padding: torch.Tensor
    slots: torch.Tensor
    blocks: tuple[torch.Tensor, ...]


class StateMemory:
    """The memory of one slot, for steps of up to `reqs` decodes of `queries` tokens."""

    def __init__(self, device: torch.device, reqs: int, tokens: int, queries: int) -> None:
        self.device, self.reqs = device, reqs
        fields = _fields(reqs, tokens, reqs * (1 + queries), BLOCKS)
        self.staging = Staging(sum(field.nbytes for field in fields.values()), device)
        self._layouts: dict[tuple[int, ...], Views] = {}
        self._looks: dict[Any, tuple[torch.Tensor, Callable[[], None]]] = {}

    def bring(
        self,
        cu: Int32,
        accepted: Int32 | None,
        padding: npt.NDArray[np.bool_],
        found: npt.NDArray[np.integer],
        blocks: Sequence[npt.NDArray[np.integer]] = (),
    ) -> Brought:
        """Arrays to the device by one copy; `found` is what `located` gave, of which `look` makes slots if need be."""
        views = self._views(cu, padding, found, blocks)
        here, there = views.here[self.staging.turn()], views.there
        here["cu_seqlens_q"][:] = cu
        here["num_accepted"][:] = 1 if accepted is None else accepted
        here["padding"][:] = padding
        here["slots" if found.dtype == np.int32 else "places"][:] = found
        for i, block in enumerate(blocks):
            here[f"block {i}"][:] = block
        self.staging.send(views.start, views.end)
        own = tuple(there[f"block {i}"] for i in range(len(blocks)))
        return Brought(there["cu_seqlens_q"], there["num_accepted"], there["padding"], there["slots"], own)

    def look(
        self,
        brought: Brought,
        found: npt.NDArray[np.integer],
        table: Table,
        places: Places,
        pad_slot: int,
        counts: torch.Tensor | None,
    ) -> None:
        """The slots of places in a table, on the device: it is copied to where the slot keeps it, and one launch looks
        it up there, with the counts of accepted tokens that the device has."""
        there = table if isinstance(table, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(table))
        if counts is not None:
            brought.num_accepted.copy_(counts, non_blocking=True)
        reads = None if places.behind is None else len(places.behind)
        key = brought.slots.data_ptr(), found.size, there.shape[1], there.dtype, reads, pad_slot
        rows = min(len(there), self.reqs)
        kept = self._looks.get(key)
        if kept is not None:
            kept[0][:rows].copy_(there[:rows], non_blocking=True)
            kept[1]()
            return
        with plain():
            own = torch.zeros((self.reqs, there.shape[1]), dtype=there.dtype, device=self.device)
        own[:rows].copy_(there[:rows], non_blocking=True)
        at = next(views for views in self._layouts.values() if views.there["slots"] is brought.slots).there["places"]

        def look() -> None:
            behind = None if reads is None else brought.num_accepted[:reads] - 1
            brought.slots.copy_(slots_at(at, own, Places(places.rows, places.columns, behind), pad_slot))

        self._looks[key] = own, repeatable(look, self.device)[1]

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
        return self.staging.nbytes + sum(own.nbytes for own, _ in self._looks.values())


def _fields(rows: int, tokens: int, slots: int, blocks: int) -> dict[str, Field]:
    return {
        "cu_seqlens_q": Field((rows + 1,), I32),
        "num_accepted": Field((rows,), I32),
        "padding": Field((tokens,), torch.bool),
        "slots": Field((slots,), I32),
        "places": Field((slots,), torch.int64),
        **{f"block {i}": Field((rows,), I32) for i in range(blocks)},
    }
