"""Where the decodes of captured graphs over recurrent layers read their plan: one slot of plans, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from portable.mamba_places import Places, Table, slots_at
from portable.platform.graphs import plain, repeatable
from portable.staging import Staging

BLOCKS = 3  # arrays of `BlockIndices`
GAPS = 16 * 16  # bytes between arrays


class StateMemory:
    """The memory of one slot, for steps of up to `reqs` decodes of `queries` tokens."""

    def __init__(self, device: torch.device, reqs: int, tokens: int, queries: int) -> None:
        self.device = device
        nbytes = 8 * reqs * (1 + queries) + 4 * (reqs + 1) + 4 * reqs * (1 + BLOCKS) + tokens + GAPS
        self.staging = Staging(nbytes, device)
        self.upload: Callable[[Sequence[npt.NDArray[Any]]], tuple[torch.Tensor, ...]] = self.staging.upload
        self._kept: dict[Any, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Callable[[], None]]] = {}

    def slots(
        self, found: torch.Tensor, table: Table, places: Places, pad_slot: int, counts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`slots_at`, and the counts, at addresses of the slot.

        A table and counts on the device are copied to where the slot keeps them, and looked up there by one launch.
        """
        if found.dtype == torch.int32:
            return found, counts
        there = table if isinstance(table, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(table))
        key = found.data_ptr(), tuple(found.shape), tuple(there.shape), there.dtype, counts is None
        kept = self._kept.get(key)
        if kept is None:
            with plain():
                own = torch.empty(there.shape, dtype=there.dtype, device=self.device)
                own_counts = None if counts is None else torch.empty_like(counts)
            _copy(own, there, own_counts, counts)

            def look() -> torch.Tensor:
                behind = None if own_counts is None or places.behind is None else own_counts[: len(places.behind)] - 1
                return slots_at(found, own, places._replace(behind=behind), pad_slot)

            result, again = repeatable(look, self.device)
            self._kept[key] = own, own_counts, result, again
            return result, own_counts
        own, own_counts, result, again = kept
        _copy(own, there, own_counts, counts)
        again()
        return result, own_counts

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        kept = [tensor for own, _, result, _ in self._kept.values() for tensor in (own, result)]
        return self.staging.nbytes + sum(tensor.nbytes for tensor in kept)


def _copy(own: torch.Tensor, table: torch.Tensor, own_counts: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    own.copy_(table, non_blocking=True)
    if own_counts is not None and counts is not None:
        own_counts.copy_(counts, non_blocking=True)
