"""What a step is given as, checked and brought to where its kernels run: lengths, tables of pages and of tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import as_device
from portable.block_table import BlockTable
from portable.lengths import (
    MAX_INT32,
    Int32,
    Lens,
    as_array,
    as_flags,
    as_lens,
    as_table,
    check_integers,
    check_lens,
    check_page_size,
    check_pages,
    check_table,
    check_tensor,
    new_positions,
    twin,
)
from portable.paging import page_table_from_tokens
from portable.paging import slot_mapping as slots_of
from portable.ragged import cdiv, cu_from_lens
from portable.upload import tensor_of, upload


class StepInputs(NamedTuple):
    """The lengths of a step on the host, and its tensors; see `Batch`."""

    query_lens: Int32
    host_seq_lens: Int32
    host_cu_seqlens_q: Int32
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    slot_mapping: torch.Tensor | None


def of_lens(
    query_lens: Lens,
    seq_lens: Lens,
    block_table: npt.ArrayLike | torch.Tensor | BlockTable | None,
    page_size: int,
    device: torch.device | str | None,
) -> StepInputs:
    """Of lengths, and a table on the host or the device."""
    q, s = as_lens("query_lens", query_lens), as_lens("seq_lens", seq_lens)
    check_lens(q, s, page_size)
    if device is None:
        device = block_table.device if isinstance(block_table, torch.Tensor) else "cpu"
    device = as_device(device)
    if isinstance(block_table, BlockTable):
        block_table = block_table.rows(q.size)
    cu = cu_from_lens(q)
    if block_table is None:
        cu_device, s_device = upload((cu, s), device)
        table = slots = None
    elif isinstance(block_table, torch.Tensor) and block_table.device.type != "cpu":
        if block_table.device.type != device.type or device.index not in (None, block_table.device.index):
            raise ValueError(f"block_table is on {block_table.device}; device is {device}")
        requests, positions = new_positions(q, s)
        cu_device, s_device, r, p = upload((cu, s, requests, positions), device)
        check_table(block_table, q, s, page_size)
        table = block_table.to(device=device, dtype=torch.int32)
        slots = slots_of(table, r, p, page_size)
    else:
        assert not isinstance(block_table, BlockTable)
        given = as_array("block_table", block_table)
        check_table(given, q, s, page_size)
        host = as_table(given)
        requests, positions = new_positions(q, s)
        new_slots = slots_of(host, requests, positions, page_size)
        # A CPU's kernels look at the context's pages themselves; for another device this is the last chance, and
        # worth what it costs: to scan 1,024 rows of 512 takes as long as all the rest.
        if device.type != "cpu" or (new_slots.size and new_slots.min() < 0):
            check_pages(host, s, page_size)
        cu_device, s_device, table, slots = upload((cu, s, host, new_slots), device)
    return StepInputs(q, s, cu, cu_device, s_device, table, slots)


def of_decodes(seq_lens: Lens, block_table: npt.ArrayLike | BlockTable, page_size: int) -> StepInputs:
    """Of one new token for each request, all on the host."""
    s = as_lens("seq_lens", seq_lens)
    single = _single(s.size)
    check_page_size(page_size)
    if s.size and s.min() < 1:
        raise ValueError(f"row {int(s.argmin())}: seq_len is {s.min()}; it counts the new token too")
    if isinstance(block_table, BlockTable):
        table = block_table.rows(s.size)
    else:
        table = as_table(as_array("block_table", block_table))
    check_table(table, single.ones, s, page_size)
    last = s - single.ones
    pages = last // page_size
    slots = (table[single.rows, pages].astype(np.int64) - pages) * page_size + last  # no remainder: 0.7 us less
    if slots.size and slots.min() < 0:
        check_pages(table, s, page_size)
    cu = single.cu.copy()
    on_cpu = torch.from_numpy
    return StepInputs(single.ones.copy(), s, cu, on_cpu(cu), on_cpu(s), tensor_of(table), on_cpu(slots))


class _Single(NamedTuple):
    """What all steps of so many requests with one new token each begin with; read only: a step has copies."""

    ones: Int32
    rows: npt.NDArray[np.intp]
    cu: Int32


@lru_cache(maxsize=1024)
def _single(num_reqs: int) -> _Single:
    made = _Single(np.ones(num_reqs, np.int32), np.arange(num_reqs), np.arange(num_reqs + 1, dtype=np.int32))
    for array in made:
        array.flags.writeable = False
    return made


def of_tensors(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    page_size: int,
    host_cu_seqlens_q: npt.ArrayLike | None,
    host_seq_lens: npt.ArrayLike | None,
) -> StepInputs:
    """Of an engine's own tensors, as they are."""
    rows = seq_lens.numel()
    check_tensor("cu_seqlens_q", cu_seqlens_q, torch.int32, (rows + 1,), seq_lens.device)
    for name, tensor, dtype, shape in (
        ("seq_lens", seq_lens, torch.int32, (rows,)),
        ("block_table", block_table, torch.int32, (rows, None)),
        ("slot_mapping", slot_mapping, torch.int64, (None,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, dtype, shape, seq_lens.device)
    cu = twin("cu_seqlens_q", cu_seqlens_q, host_cu_seqlens_q)
    s = twin("seq_lens", seq_lens, host_seq_lens)
    if cu.size != rows + 1 or s.size != rows:
        raise ValueError(f"the host twins have {cu.size - 1} and {s.size} rows; the tensors have {rows}")
    if cu[0] != 0:
        raise ValueError(f"row 0: cu_seqlens_q starts at {cu[0]}; it must start at 0")
    q = np.diff(cu)
    if (falls := q < 0).any():
        row = int(falls.argmax())
        raise ValueError(f"row {row}: cu_seqlens_q goes from {cu[row]} to {cu[row + 1]}; it never falls")
    check_lens(q, s, page_size)
    if block_table is not None:
        check_table(block_table, q, s, page_size)
    if slot_mapping is not None and slot_mapping.numel() < cu[-1]:
        raise ValueError(f"slot_mapping has {slot_mapping.numel()} rows; the batch has {cu[-1]} new tokens")
    return StepInputs(q, s, cu, cu_seqlens_q, seq_lens, block_table, slot_mapping)


def of_token_table(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    query_lens: Lens,
    seq_lens: Lens,
    page_size: int,
    offsets: npt.ArrayLike | None,
) -> StepInputs:
    """Of the slot of each token of each request."""
    q, s = as_lens("query_lens", query_lens), as_lens("seq_lens", seq_lens)
    check_lens(q, s, page_size)
    if rows.shape != (q.size,):
        raise ValueError(f"rows has shape {list(rows.shape)}; it must be [{q.size}], one per request")
    check_integers("rows", rows)
    check_integers("req_to_token", req_to_token)
    if rows.device != req_to_token.device:
        raise ValueError(f"rows is on {rows.device}; req_to_token is on {req_to_token.device}")
    start = as_lens("offsets", np.zeros(q.size, np.int32) if offsets is None else offsets)
    if start.size != q.size:
        raise ValueError(f"offsets has {start.size} rows; it must have {q.size}, one per request")
    if (inside := start % page_size != 0).any():
        row = int(inside.argmax())
        raise ValueError(f"row {row}: offset {start[row]} is not a multiple of page_size {page_size}")
    columns = int((start + s).max(initial=0))
    if req_to_token.dim() != 2 or req_to_token.shape[1] < columns:
        raise ValueError(f"req_to_token has shape {list(req_to_token.shape)}; a row needs {columns} columns")
    if req_to_token.device.type == "cpu" and q.size:
        chosen = rows.numpy()
        if chosen.min() < 0 or chosen.max() >= len(req_to_token):
            row = int(((chosen < 0) | (chosen >= len(req_to_token))).argmax())
            raise ValueError(f"row {row}: rows is {chosen[row]}; req_to_token has rows 0 to {len(req_to_token) - 1}")
    cu = cu_from_lens(q)
    requests, positions = new_positions(q, s)
    cu_device, s_device, r, p, offset = upload(
        (cu, s, requests, positions + start[requests], start), req_to_token.device
    )
    width = cdiv(int(s.max(initial=0)), page_size)
    table = page_table_from_tokens(req_to_token, rows, s_device, page_size, width, offset)
    slots = req_to_token[rows.long()[r.long()], p.long()].long()
    if slots.device.type == "cpu" and slots.numel() and slots.numpy().max() // page_size > MAX_INT32:
        raise ValueError(f"req_to_token holds slot {slots.numpy().max()}; page ids are int32")
    if slots.device.type == "cpu" and slots.numel() and slots.numpy().min() < 0:
        token = int(slots.numpy().argmin())
        raise ValueError(f"row {requests[token]}: req_to_token holds slot {slots.numpy()[token]} for a new token")
    return StepInputs(q, s, cu, cu_device, s_device, table, slots)


def causal_of(causal: bool | torch.Tensor, rows: int, device: torch.device) -> bool | torch.Tensor:
    """A causal mask for all or for each request, or a ValueError."""
    if isinstance(causal, np.bool_):
        causal = bool(causal)
    if not isinstance(causal, bool | torch.Tensor):
        raise ValueError(f"causal is {causal!r}; it must be a bool, or a [{rows}] bool tensor")
    if isinstance(causal, torch.Tensor) and (causal.shape != (rows,) or causal.dtype != torch.bool):
        raise ValueError(
            f"causal has shape {list(causal.shape)} and dtype {causal.dtype}; a tensor must be [{rows}] bool"
        )
    if isinstance(causal, torch.Tensor) and causal.device != device:
        raise ValueError(f"causal is on {causal.device}; seq_lens is on {device}")
    return causal


def prefilling_of(is_prefilling: npt.ArrayLike | None, rows: int) -> npt.NDArray[np.bool_] | None:
    """Which requests still read their prompt, or a ValueError."""
    prefilling = None if is_prefilling is None else as_flags("is_prefilling", is_prefilling)
    if prefilling is not None and prefilling.shape != (rows,):
        raise ValueError(f"is_prefilling has shape {list(prefilling.shape)}; it must be [{rows}]")
    return prefilling
