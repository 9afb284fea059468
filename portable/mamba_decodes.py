"""The plan of a step of recurrent layers that only decodes, each request from the state of its row: the usual one.

It is what `plan_mamba` gives, in a third of the time, where there are no blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import Batch
from portable.lengths import MAX_INT32, Int32
from portable.mamba import MambaPlan
from portable.mamba_memory import StateMemory
from portable.mamba_places import Places, Table, accepted_counts, far, greatest, in_range
from portable.states import DecodeStates
from portable.upload import upload


def plan_decodes(
    batch: Batch,
    table: Table | None,
    rows: int,
    tokens: int,
    *,
    num_draft: int,
    num_accepted: npt.ArrayLike | torch.Tensor | None,
    pad_slot: int,
    memory: StateMemory | None,
    max_query_len: int,
    handle: int,
) -> MambaPlan | None:
    """The plan of a batch without padding of its own, padded to so many rows and tokens; None: `plan_mamba` makes it.

    >>> batch = Batch.from_lens([1, 1], [6, 4])
    >>> options = {"num_draft": 0, "num_accepted": None, "pad_slot": -1, "memory": None, "handle": -1}
    >>> plan = plan_decodes(batch, np.array([[5], [2]]), 3, 3, max_query_len=1, **options)
    >>> plan.decode.initial_indices.tolist(), plan.decode.cu_seqlens_q.tolist()
    ([5, 2, -1], [0, 1, 2, 2])
    """
    live, width = batch.num_reqs, 1 + num_draft
    given = batch.block_table if table is None else table
    if given is None or given.ndim != 2 or batch.padded_reqs != live or not live:
        return None
    looked_up = far(num_accepted) or far(given)
    if looked_up and memory is None:
        return None
    host = given.numpy() if isinstance(given, torch.Tensor) and not far(given) else given
    q = batch.query_lens
    decodes = batch.continues or (q.min() > 0 and (batch.host_seq_lens > q).all())
    if not decodes or batch.max_query_len > width or (batch.is_prefilling is not None and batch.is_prefilling.any()):
        return None
    found: npt.NDArray[np.integer] | None = None
    if not looked_up:
        assert isinstance(host, np.ndarray)
        found = _slots(host, q, rows, width, pad_slot)
        if found is None:
            return None
    kept, on_device = accepted_counts(batch, num_accepted, num_draft)
    if kept is not None and found is not None:
        found[:live] = host[np.arange(live), kept - 1]
    cu = batch.host_cu_seqlens_q
    if live < rows:
        cu = np.full(rows + 1, batch.num_tokens, np.int32)
        cu[: live + 1] = batch.host_cu_seqlens_q
    if memory is None:
        assert found is not None
        device, padding = batch.device, None
        counts = np.ones(rows, np.int32) if num_draft and kept is None else kept
        cu_device = batch.cu_seqlens_q if live == rows else upload([cu], device)[0]
        slots, *counted = upload([found] if counts is None else [found, counts], device)
        accepted = counted[0] if counted else None
    else:
        device = memory.device
        if kept is not None and live < rows:
            kept = np.concatenate([kept, np.ones(rows - live, np.int32)])
        pads = np.zeros(tokens, np.bool_)
        pads[batch.num_tokens :] = True
        if found is None:
            at = _places(q, kept, rows, width)
            brought, found = memory.look_up(host, at, live, pad_slot, on_device, width, cu, kept, pads, ())
        else:
            brought = memory.bring(cu, kept, pads, found)
        cu_device, slots, accepted, padding = brought.cu_seqlens_q, brought.slots, brought.num_accepted, brought.padding
    decode = DecodeStates(
        requests=slice(0, rows),
        tokens=slice(0, tokens),
        cu_seqlens_q=cu_device,
        initial_indices=slots[:rows],
        state_indices=slots[rows:].view(rows, width),
        num_accepted=accepted if num_draft else None,
        max_query_len=max_query_len,
        pad_slot=pad_slot,
    )

    def places() -> Places:
        found = _places(q, kept, rows, width)
        if on_device is None:
            return found
        return found._replace(behind=in_range(on_device, rows, num_draft, device) - 1, reach=num_draft)

    return MambaPlan(
        decode=decode,
        prefill=None,
        blocks=None,
        places=places,
        num_reqs=live,
        num_tokens=batch.num_tokens,
        padded_tokens=tokens,
        pad_slot=pad_slot,
        device=device,
        max_slot=greatest(found),
        padding=padding,
        handle=handle,
    )


def _slots(table: npt.NDArray[np.integer], q: Int32, rows: int, width: int, pad_slot: int) -> Int32 | None:
    """[rows * (1 + width)] what each row reads, and what it writes after each token; None where one cannot be right."""
    live = q.size
    if len(table) < live or table.shape[1] < width or table.dtype.kind not in "iu":
        return None
    given = table[:live, :width]
    if given.min() < 0 or given.max() > MAX_INT32 or (pad_slot >= 0 and (given == pad_slot).any()):
        return None
    found = np.full(rows * (1 + width), pad_slot, np.int32)
    writes = found[rows:].reshape(rows, width)
    if width == 1:
        writes[:live] = given
    else:
        writes[:live] = np.where(np.arange(width) < q[:, None], given, pad_slot)
    found[:live] = given[:, 0]
    written = np.sort(writes[:live], axis=None)  # 3.6 us for 1,024
    twice = written[1:] == written[:-1]
    if width > 1:
        twice &= written[1:] != pad_slot
    if twice.any():
        return None
    return found


def _places(q: Int32, kept: Int32 | None, rows: int, width: int) -> Places:
    """Where in a table the slots stand."""
    live, tokens = q.size, np.arange(width, dtype=np.int32)
    row = np.arange(rows, dtype=np.int32)
    reads, writes = np.full(rows, -1, np.int32), np.full((rows, width), -1, np.int32)
    reads[:live] = 0 if kept is None else kept[:live] - 1
    writes[:live] = np.where(tokens < q[:, None], tokens, -1)
    return Places(np.concatenate([row, row.repeat(width)]), np.concatenate([reads, writes.reshape(-1)]), None)
