"""The plan of recurrent-state layers (Mamba): which states a step reads, where it writes them, how its tokens are cut.

The states of a request live in the slots that its row of a table names, in one of three modes:

* `none`: column 0 holds the running state; with drafts, column j the state after the j-th token of the last step;
* `align`: a column for each block of `block_size` tokens. The running state is in that of the last scheduled token,
  and the states after drafts in those behind it. `plan_state_copies` brings it there before a step, and keeps after
  it the state at the end of a block that drafts filled. A prefill stores the state at the last block end it passes;
* `all`: the same columns, but a prefill stores the state at every block end, and a step reads the state of the one
  before from where that left it, so nothing is copied before a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import at_least
from portable.batch import Batch
from portable.layer import Layer
from portable.lengths import counted
from portable.mamba_chunks import stored_chunks
from portable.mamba_memory import StateMemory
from portable.mamba_places import (
    Places,
    Table,
    accepted_counts,
    check_apart,
    greatest,
    in_range,
    located,
    per_row,
    slots_at,
)
from portable.planned import Padded
from portable.ragged import cdiv, ragged_arange
from portable.states import DecodeStates, PrefillStates
from portable.upload import upload

Mode = Literal["none", "align", "all"]
CONV_BLOCK = 64  # tokens of a block of the causal convolution's plan


class BlockIndices(NamedTuple):
    """Columns of the table with prefix caching, [B] i32 of the batch's rows."""

    last_computed: torch.Tensor  # the block of the last token that has a state; 0 where there is none
    first_scheduled: torch.Tensor  # the block of the first new token
    last_scheduled: torch.Tensor  # the block of the last new token; 0 for a padded row


@dataclass(frozen=True, slots=True, eq=False)
class MambaPlan:
    """What `Mamba.run` executes for one step. It lives until the next plan on its slot."""

    decode: DecodeStates | None
    prefill: PrefillStates | None
    blocks: BlockIndices | None  # in the modes "align" and "all"
    places: Callable[[], Places]
    num_reqs: int
    num_tokens: int
    padded_tokens: int
    pad_slot: int
    device: torch.device
    max_slot: int = -1  # the greatest slot, where the host knows them
    padding: torch.Tensor | None = None  # [T] bool on the device, of a step that is padded to a size
    padded: Padded | None = None
    handle: int = -1  # the slot, as the registered ops know it

    def __repr__(self) -> str:
        step = self.padded.step if self.padded else self
        size = f", padded to {self.padded.size}" if self.padded else ""
        return f"MambaPlan({counted(step.num_reqs, step.num_tokens)}{size})"

    def with_group(self, table: Table) -> MambaPlan:
        """The same step on the states of another group with the same block size.

        >>> batch = Batch.from_lens([1], [5])
        >>> plan = plan_mamba(batch, Layer.mamba2(num_heads=2), np.array([[3]]))
        >>> other = plan.with_group(np.array([[8]]))
        >>> plan.decode.state_indices.tolist(), other.decode.state_indices.tolist()
        ([[3]], [[8]])
        """
        places = self.places()
        host = located(table, places, self.num_reqs, self.pad_slot)
        (found,) = upload((host,), self.device)
        decode, prefill = self.decode, self.prefill
        dec, width = (0, 1) if decode is None else (decode.requests.stop, decode.state_indices.shape[1])
        pre = 0 if prefill is None else len(prefill.state_indices)
        reads, initial, writes, final, stores = _parted(slots_at(found, table, places, self.pad_slot), dec, width, pre)
        if decode is not None:
            decode = replace(decode, initial_indices=reads, state_indices=writes)
        if prefill is not None:
            prefill = replace(prefill, initial_indices=initial, state_indices=final, chunk_state_indices=stores)
        return replace(self, decode=decode, prefill=prefill, max_slot=greatest(host))


def plan_mamba(
    batch: Batch,
    layer: Layer,
    table: Table | None = None,
    *,
    mode: Mode = "none",
    block_size: int | None = None,
    num_draft: int = 0,
    num_accepted: npt.ArrayLike | torch.Tensor | None = None,
    running: npt.ArrayLike | None = None,
    checkpoints: npt.ArrayLike | None = None,
    pad_slot: int = -1,
    conv_block: int = CONV_BLOCK,
    memory: StateMemory | None = None,
    max_query_len: int | None = None,
    handle: int = -1,
) -> MambaPlan:
    """The states of one step, ordered as decodes, then what reads a prompt. No loop over requests, no device read.

    A request goes on from its state as a decode with up to 1 + num_draft new tokens, unless `batch.is_prefilling` says
    that they are its prompt's; without a context it is a prefill, whatever its length. With drafts, a batch without
    `is_prefilling` has no short chunks of prompts.

    Args:
        table: [B, W] state slots, on the host or a device. None: the batch's block table.
        mode: what the columns of the table are, see this module.
        block_size: tokens per column in the modes `align` and `all`. None: the batch's page_size.
        num_draft: tokens to verify per decode at most, k: a decode stores 1 + k states.
        num_accepted: [B] tokens of each decode's step before that count, 1 to 1 + k: it goes on from the state after
            the last of them. On the host they are checked; on a device, where nobody looks at them, those out of range
            are taken for the nearest. None: 1, since a prefill leaves its state in the first column.
        running: [B] host, the column that the step before stored its first state in; -1: unknown. None or -1: in the
            mode `align` the column that this step stores in, in the mode `all` that of the last computed token.
        checkpoints: [B] host, tokens of the sequence after which a prefill stores its state too, among the new ones,
            or -1: in the modes `align` and `all` in the block that ends there. The mode `none` only cuts there.
        pad_slot: what kernels skip, no slot of a state.
        conv_block: tokens of a block of the causal convolution, at least the inputs in front of one.
        memory: where the decodes of a captured graph read; None: anywhere.
        max_query_len: the most new tokens of a decode that a graph is captured for; None: of this step.

    Raises:
        ValueError: naming the argument or row, where the batch is not ordered, the table is too narrow, or a value
            cannot be right.

    >>> batch = Batch.from_lens([1, 7], [6, 10])
    >>> plan = plan_mamba(batch, Layer.mamba2(num_heads=2, chunk=4), np.array([[5], [2]]))
    >>> plan.decode.initial_indices.tolist(), plan.decode.state_indices.tolist(), plan.prefill.cu_chunks.tolist()
    ([5], [[5]], [0, 1, 5, 7])
    """
    size = batch.page_size if block_size is None else block_size
    table = _checked(batch, layer, table, mode, size, num_draft, conv_block)
    q, s = batch.query_lens, batch.host_seq_lens
    c, rows = s - q, np.arange(q.size, dtype=np.int32)
    split = batch.split(1 + num_draft, short_extends_as_decodes=False)
    d, p = split.decodes.requests.stop, split.prefills.requests.stop
    if p > d or mode != "none":
        batch.needs_exact("a prefill of states" if p > d else f"mode {mode!r}")

    if p > d and memory is not None:
        raise ValueError(f"row {d} reads its prompt; a step that is padded to a size decodes only")
    # Columns of the running state: where this step stores it, and where the one before left it.
    last_block, zero = np.maximum(s - 1, 0) // size, np.zeros_like(s)
    now = zero if mode == "none" else last_block
    before = np.maximum(c - 1, 0) // size if mode == "all" else now
    if running is not None:
        ran = per_row("running", running, batch.num_reqs, q.size, -1)
        before = np.where(ran >= 0, ran, before)
    device = batch.device if memory is None else memory.device
    kept, counts = accepted_counts(batch, num_accepted, num_draft)
    if kept is not None:
        before = before + kept - 1

    dec = slice(0, d if p > d else split.pads.requests.stop)  # with the padding, unless prefills lie between
    pre, cu, tokens = slice(d, p), batch.host_cu_seqlens_q, np.arange(1 + num_draft, dtype=np.int32)
    at_rows = [rows[: max(p, dec.stop)], rows[dec].repeat(tokens.size)]
    at_columns = [
        np.where(q[dec] > 0, before[dec], -1),
        np.where(tokens < q[dec, None], now[dec, None] + tokens, -1).reshape(-1),
    ]
    arrays: list[npt.NDArray[Any]] = []
    if mode != "none":
        arrays += (np.where(q > 0, x, 0) for x in (np.maximum(c - 1, 0) // size, c // size, last_block))
    if p > d or checkpoints is not None:
        has_initial = (c[pre] > 0) & (q[pre] > 0)
        chunks, stored, at = stored_chunks(batch, pre, layer.chunk or 1, mode, size, checkpoints)
        at_rows += [rows[pre], chunks.rows + np.int32(d)]
        at_columns[1:1] = [np.where(has_initial, before[pre], -1)]
        at_columns += [np.where(q[pre] > 0, now[pre], -1), stored]
    if p > d:
        blocks = ragged_arange(cdiv(q[pre], conv_block))
        arrays += [cu[d : p + 1] - cu[d], has_initial, chunks.cu_chunks, chunks.rows, chunks.last, at, *blocks]
    at_host = Places(np.concatenate(at_rows), np.concatenate(at_columns), None)

    def places() -> Places:
        if counts is None:
            return at_host
        behind = in_range(counts, q.size, num_draft, device)[: max(p, dec.stop)] - 1
        return at_host._replace(behind=behind, reach=num_draft)

    cu_here, padding = cu[: dec.stop + 1], None
    if memory is None:
        at_device = places()
        host = located(table, at_device, batch.num_reqs, pad_slot)
        if host.dtype == np.int32:
            written = dec.stop + p - d  # behind what is read
            check_apart(host[written:], at_host.rows[written:], dec.stop * tokens.size, pad_slot)
        ones = np.ones(dec.stop, np.int32)
        *there, cu_d, accepted, found = upload([*arrays, cu_here, ones if kept is None else kept[dec], host], device)
        slots = slots_at(found, table, at_device, pad_slot)
        if at_device.behind is not None:
            accepted = at_device.behind[dec] + 1
    else:
        behind = np.arange(batch.padded_tokens) >= batch.num_tokens
        mine = None if kept is None else kept[dec]
        brought, host = memory.look_up(
            table, at_host, batch.num_reqs, pad_slot, counts, 1 + num_draft, cu_here, mine, behind, arrays
        )
        cu_d, accepted, padding, slots = brought[:4]
        there = list(brought.blocks)
    reads, initial, writes, final, stores = _parted(slots, dec.stop, tokens.size, p - d)
    columns = [] if mode == "none" else there[:3]
    decode = prefill = None
    if dec.stop:
        decode = DecodeStates(
            requests=dec,
            tokens=slice(0, int(cu[d]) if p > d else batch.padded_tokens),
            cu_seqlens_q=cu_d,
            initial_indices=reads,
            state_indices=writes,
            num_accepted=accepted if num_draft else None,
            max_query_len=max_query_len or int(q[dec].max()),
            pad_slot=pad_slot,
        )
    if p > d:
        cu_p, has, cu_chunks, chunk_rows, last, at_p, conv_r, conv_o = there[len(columns) :]
        prefill = PrefillStates(
            requests=pre,
            tokens=slice(int(cu[d]), int(cu[p])),
            cu_seqlens_q=cu_p,
            has_initial=has,
            initial_indices=initial,
            state_indices=final,
            cu_chunks=cu_chunks,
            chunk_requests=chunk_rows,
            chunk_state_indices=stores,
            last_chunks=last,
            checkpoint_chunks=None if checkpoints is None else at_p,
            conv_requests=conv_r,
            conv_offsets=conv_o,
            conv_block=conv_block,
            max_query_len=int(q[pre].max()),
            pad_slot=pad_slot,
        )
    return MambaPlan(
        decode=decode,
        prefill=prefill,
        blocks=BlockIndices(*columns) if columns else None,
        places=places,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_tokens,
        padded_tokens=batch.padded_tokens,
        pad_slot=pad_slot,
        device=device,
        max_slot=greatest(host),
        padding=padding,
        handle=handle,
    )


def _checked(
    batch: Batch, layer: Layer, table: Table | None, mode: Mode, size: int, num_draft: int, conv_block: int
) -> Table:
    """The table of slots, once the arguments are found to fit together."""
    if layer.family not in ("mamba1", "mamba2"):
        raise ValueError(f"layer.family is {layer.family!r}; states are of 'mamba1' and 'mamba2' layers")
    if mode not in ("none", "align", "all"):
        raise ValueError(f"mode is {mode!r}; it must be 'none', 'align' or 'all'")
    at_least(1, block_size=size)
    at_least(0, num_draft=num_draft)
    at_least(max(1, layer.conv_width - 1), conv_block=conv_block)  # the inputs in front of a block are of one before
    if batch.view is not None or not batch.self_attention:
        raise ValueError("the batch is derived by a variant; states are of whole sequences, so plan the step itself")
    table = batch.block_table if table is None else table
    if table is None:
        raise ValueError("table is None and the batch has no block_table; a plan needs the slots of the states")
    return table


def _parted(slots: torch.Tensor, decodes: int, width: int, prefills: int) -> tuple[torch.Tensor, ...]:
    """What decodes read, what prefills read, what decodes write, prefills in the end, and prefills after chunks."""
    edges = (decodes, prefills, decodes * width, prefills)
    a, b, c, d = accumulate(edges)
    return slots[:a], slots[a:b], slots[b:c].view(decodes, width), slots[c:d], slots[d:]
