"""The state slots of a plan, looked up in a table on the host or on a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import Batch
from portable.lengths import Int32, as_array, check_integers

Table = torch.Tensor | npt.NDArray[np.integer]


def far(values: object) -> bool:
    """Whether they are a tensor of a device, at which the host does not look."""
    return isinstance(values, torch.Tensor) and values.device.type != "cpu"


class Places(NamedTuple):
    """Where in a table the slots of a plan stand.

    >>> places = Places(np.array([0, 1], np.int32), np.array([1, -1], np.int32), None)
    >>> located(np.array([[5, 6], [7, 8]]), places, 2).tolist()
    [6, -1]
    """

    rows: Int32
    columns: Int32  # -1: no slot
    behind: torch.Tensor | None  # [n] i32 on a device: how far behind their columns the first n stand
    reach: int = 0  # the most that `behind` may say


def located(table: Table, places: Places, num_reqs: int, pad_slot: int = -1) -> npt.NDArray[np.integer]:
    """[n] int32 slots, pad_slot for none, where the host knows all; else their int64 places in the flattened table."""
    rows, columns = places.rows, places.columns
    if table.ndim != 2 or table.shape[0] < num_reqs:
        raise ValueError(f"table has shape {list(table.shape)}; it must be [{num_reqs}, W], a row per request")
    check_integers("table", table)
    width = table.shape[1]
    most = columns if places.behind is None else columns.copy()
    if places.behind is not None:
        most[: len(places.behind)] += places.reach
    if most.size and most.max() >= width:
        entry = int(most.argmax())
        raise ValueError(f"row {rows[entry]}: the step needs column {most[entry]}, but table is {width} wide")
    none, flat = columns < 0, rows * np.int64(width) + columns
    if places.behind is not None or far(table):
        return np.where(none, -1, flat)
    if not table.shape[0] or not width:
        return np.full(rows.size, pad_slot, np.int32)
    host = table.numpy() if isinstance(table, torch.Tensor) else table
    slots = host.reshape(-1).take(flat, mode="clip")  # only the place of no slot can lie outside
    most = np.iinfo(np.int32).max
    if slots.size and (slots.min() < 0 or slots.max() > most) and (bad := ~none & ((slots < 0) | (slots > most))).any():
        entry = int(bad.argmax())
        raise ValueError(
            f"row {rows[entry]}: table[{rows[entry]}, {columns[entry]}] is {slots[entry]}; "
            "a state slot is between 0 and 2**31 - 1"
        )
    if pad_slot >= 0 and (bad := ~none & (slots == pad_slot)).any():
        entry = int(bad.argmax())
        raise ValueError(
            f"row {rows[entry]}: table[{rows[entry]}, {columns[entry]}] is {pad_slot}, the slot that kernels skip"
        )
    return np.where(none, pad_slot, slots).astype(np.int32, copy=False)


def check_apart(slots: npt.NDArray[np.integer], rows: Int32, decodes: int, pad_slot: int) -> None:
    """Raise a ValueError where two requests write one slot, or one decode writes one twice.

    Args:
        slots, rows: [n] what is written, the first `decodes` of them by decodes, and by which requests. A prefill may
            store its last state where it ends.

    >>> check_apart(np.array([3, 3]), np.array([0, 1], np.int32), 2, -1)
    Traceback (most recent call last):
    ValueError: row 1: slot 3 is written by row 0 too; a state slot is written once in a step
    """
    live = np.flatnonzero((slots >= 0) & (slots != pad_slot))
    order = live[np.argsort(slots[live], kind="stable")]
    first, second = order[:-1], order[1:]
    bad = (slots[first] == slots[second]) & ((rows[first] != rows[second]) | (second < decodes))
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"row {rows[second[at]]}: slot {slots[second[at]]} is written by row {rows[first[at]]} too; a state slot "
            "is written once in a step"
        )


def slots_at(found: torch.Tensor, table: Table, places: Places, pad_slot: int) -> torch.Tensor:
    """[n] int32 slots on the device of `found`, what `located` gave; pad_slot for none."""
    if found.dtype == torch.int32:
        return found
    none = found < 0
    there = table if isinstance(table, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(table))
    at = found.clamp(min=0)
    if places.behind is not None:
        at[: len(places.behind)] += places.behind
    return torch.where(none, pad_slot, there.to(found.device).reshape(-1)[at]).to(torch.int32)


def per_row(name: str, values: npt.ArrayLike, num_reqs: int, rows: int, fill: int) -> Int32:
    """[rows] int32 from a value per request or per row; `fill` behind the requests."""
    given = as_array(name, values)
    if given.shape not in ((num_reqs,), (rows,)):
        raise ValueError(f"{name} has shape {list(given.shape)}; it must be [{num_reqs}], one per request")
    if given.size:
        check_integers(name, given)
    if len(given) == rows:
        return given.astype(np.int32, copy=False)
    return np.pad(given.astype(np.int32), (0, rows - num_reqs), constant_values=fill)


def greatest(found: npt.NDArray[np.integer]) -> int:
    """The greatest of the slots that `located` gave; -1 without one, or where only a device knows them."""
    return int(found.max(initial=-1)) if found.dtype == np.int32 else -1


def accepted_counts(
    batch: Batch, num_accepted: npt.ArrayLike | torch.Tensor | None, num_draft: int
) -> tuple[Int32 | None, torch.Tensor | None]:
    """The counts of all rows on the host, checked, padding having 1; or of the requests, as the device has them."""
    rows, num_reqs = batch.padded_reqs, batch.num_reqs
    if isinstance(num_accepted, torch.Tensor) and far(num_accepted):
        if num_accepted.dim() != 1 or len(num_accepted) not in (num_reqs, rows):
            raise ValueError(f"num_accepted has shape {list(num_accepted.shape)}; it must be [{num_reqs}]")
        check_integers("num_accepted", num_accepted)
        return None, num_accepted[:num_reqs]
    if num_accepted is None:
        return None, None
    kept = np.where(batch.query_lens > 0, per_row("num_accepted", num_accepted, num_reqs, rows, 1), 1).astype(np.int32)
    if (wrong := (kept < 1) | (kept > 1 + num_draft)).any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row}: num_accepted is {kept[row]}; it must be between 1 and {1 + num_draft}")
    return kept, None


def in_range(counts: torch.Tensor, rows: int, num_draft: int, device: torch.device) -> torch.Tensor:
    """[rows] i32 counts of a device, those out of range taken for the nearest; padding has 1."""
    near = counts.to(device=device, dtype=torch.int32).clamp(1, 1 + num_draft)
    return torch.nn.functional.pad(near, (0, rows - len(near)), value=1)
