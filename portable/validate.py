"""Whether a step can be right: its host twins in O(B), and its tensors too where the device may be read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import Batch
from portable.lengths import as_lens, check_lens, check_pages, check_table, check_tensor
from portable.ragged import cdiv, cu_from_lens

Bools = npt.NDArray[np.bool_]


def validate(batch: Batch, *, sync: bool = False, num_pages: int | None = None) -> None:
    """Raise a ValueError, naming the row and its values, unless the parts of a step agree with each other.

    Building a batch checks its arguments; this checks a batch that was put together by hand or by `replace`.

    Args:
        sync: also read the device, which waits for it: lengths beside their host twins, live page ids, and slots.
            Negative page ids of a table on the CPU are found without it.
        num_pages: pages of the cache, for the upper end of page ids and slots; None leaves it open.

    >>> from dataclasses import replace
    >>> batch = Batch.from_lens([1, 2], [9, 2], block_table=[[0, 1, 2], [3, 0, 0]], page_size=4)
    >>> validate(batch, sync=True, num_pages=4)
    >>> validate(batch, sync=True, num_pages=3)
    Traceback (most recent call last):
    ValueError: row 1: block_table[1, 0] is 3; the cache has pages 0 to 2
    >>> validate(replace(batch, max_seq_len=8))
    Traceback (most recent call last):
    ValueError: row 0: seq_len 9 is above max_seq_len 8
    """
    _check_twins(batch)
    _check_tensors(batch)
    if sync:
        _check_device_lens(batch)
        live = _check_pages(batch, num_pages)
        _check_slots(batch, num_pages, live)
    elif batch.block_table is not None and batch.device.type == "cpu":
        check_pages(batch.block_table.numpy(), batch.seq_lens.numpy(), batch.page_size)


def _check_twins(batch: Batch) -> None:
    q, s, cu = batch.query_lens, batch.host_seq_lens, batch.host_cu_seqlens_q
    for name, twin in (("query_lens", q), ("host_seq_lens", s), ("host_cu_seqlens_q", cu)):
        as_lens(name, twin)
        if twin.dtype != np.int32:
            raise ValueError(f"{name} has dtype {twin.dtype}; it must be int32")
    # the keys of a cross or derived step are not its new tokens, so there may be fewer
    check_lens(q, s if batch.self_attention or s.size != q.size else np.maximum(q, s), batch.page_size)
    right = cu_from_lens(q)
    if cu.shape != right.shape:
        raise ValueError(f"host_cu_seqlens_q has shape {list(cu.shape)}; it must be [{right.size}]")
    if (row := _first(cu != right)) is not None:
        raise ValueError(
            f"row {row}: host_cu_seqlens_q[{row}] is {cu[row]}; the query_lens before it sum to {right[row]}"
        )
    if not 0 <= batch.num_reqs <= q.size:
        raise ValueError(f"num_reqs is {batch.num_reqs}; the batch has {q.size} rows")
    if (row := _first(q[batch.num_reqs :] > 0)) is not None:
        row += batch.num_reqs
        raise ValueError(f"row {row}: query_len {q[row]} in padding, which starts at num_reqs {batch.num_reqs}")
    if batch.num_tokens != cu[-1]:
        raise ValueError(f"num_tokens is {batch.num_tokens}; query_lens sum to {cu[-1]}")
    if batch.padded_tokens < batch.num_tokens:
        raise ValueError(f"padded_tokens is {batch.padded_tokens}, below num_tokens {batch.num_tokens}")
    for name, lens, most in (("query_len", q, batch.max_query_len), ("seq_len", s, batch.max_seq_len)):
        if (row := _first(lens > most)) is not None:
            raise ValueError(f"row {row}: {name} {lens[row]} is above max_{name} {most}")
    if batch.is_prefilling is not None and batch.is_prefilling.shape != q.shape:
        raise ValueError(f"is_prefilling has shape {list(batch.is_prefilling.shape)}; it must be [{q.size}]")


def _check_tensors(batch: Batch) -> None:
    rows = batch.padded_reqs
    causal = batch.causal if isinstance(batch.causal, torch.Tensor) else None
    for name, tensor, dtype, shape in (
        ("cu_seqlens_q", batch.cu_seqlens_q, torch.int32, (rows + 1,)),
        ("seq_lens", batch.seq_lens, torch.int32, (rows,)),
        ("block_table", batch.block_table, torch.int32, (rows, None)),
        ("slot_mapping", batch.slot_mapping, torch.int64, (batch.padded_tokens,)),
        ("causal", causal, torch.bool, (rows,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, dtype, shape, batch.device)
    if batch.block_table is not None:
        check_table(batch.block_table, batch.query_lens, batch.host_seq_lens, batch.page_size)


def _check_device_lens(batch: Batch) -> None:
    cu, host_cu = _read(batch.cu_seqlens_q), batch.host_cu_seqlens_q
    if (row := _first(cu != host_cu)) is not None:
        raise ValueError(f"row {row}: cu_seqlens_q[{row}] is {cu[row]} on the device and {host_cu[row]} on the host")
    lens, host, q = _read(batch.seq_lens), batch.host_seq_lens, batch.query_lens
    if batch.exact and (row := _first(lens != host)) is not None:
        raise ValueError(f"row {row}: seq_len is {lens[row]} on the device and {host[row]} on the host")
    if (row := _first(lens > host)) is not None:
        raise ValueError(f"row {row}: seq_len {lens[row]} on the device is above its bound {host[row]} on the host")
    least = q if batch.self_attention else np.zeros_like(q)
    if (row := _first(lens < least)) is not None:
        raise ValueError(f"row {row}: seq_len {lens[row]} on the device is less than {least[row]}")


def _check_pages(batch: Batch, num_pages: int | None) -> npt.NDArray[np.integer]:
    """The pages of the rows that are not padding."""
    if batch.block_table is None:
        return np.empty(0, np.int32)
    table = _read(batch.block_table)
    live = np.arange(table.shape[1]) < cdiv(_read(batch.seq_lens), batch.page_size)[:, None]
    if (at := _first_outside(table, live, 0, num_pages)) is not None:
        row, column = at
        raise ValueError(
            f"row {row}: block_table[{row}, {column}] is {table[row, column]}; "
            f"the cache has {_range('pages', num_pages)}"
        )
    pages: npt.NDArray[np.integer] = table[: batch.num_reqs][live[: batch.num_reqs]]
    return pages


def _check_slots(batch: Batch, num_pages: int | None, live: npt.NDArray[np.integer]) -> None:
    if batch.slot_mapping is None:
        return
    slots, n = _read(batch.slot_mapping), batch.num_tokens
    rows = np.append(batch.token_to_req(), np.full(slots.size - n, batch.num_reqs))
    capacity = None if num_pages is None else num_pages * batch.page_size
    if (at := _first_outside(slots, np.ones(slots.shape, bool), -1, capacity)) is not None:
        token = at[0]
        raise ValueError(
            f"row {rows[token]}: slot_mapping[{token}] is {slots[token]}; "
            f"the cache has {_range('slots', capacity)}, and -1 writes nothing"
        )
    written = np.flatnonzero(slots[:n] >= 0)
    _, first, place = np.unique(slots[written], return_index=True, return_inverse=True)
    if (again := _first(first[place] != np.arange(written.size))) is not None:
        token, before = written[again], written[first[place[again]]]
        raise ValueError(
            f"row {rows[token]}: slot_mapping[{token}] is {slots[token]}, "
            f"and so is slot_mapping[{before}] of row {rows[before]}"
        )
    padding = slots[n:]
    if (spare := _first((padding >= 0) & np.isin(padding // batch.page_size, live))) is not None:
        raise ValueError(f"slot_mapping[{n + spare}] is {padding[spare]}: padding would write into a page of a request")


def _read(tensor: torch.Tensor) -> npt.NDArray[np.integer]:
    values: npt.NDArray[np.integer] = tensor.cpu().numpy()
    return values


def _first(bad: Bools) -> int | None:
    return int(bad.argmax()) if bad.any() else None


def _first_outside(
    values: npt.NDArray[np.integer], where: Bools, least: int, end: int | None
) -> tuple[int, ...] | None:
    bad = where & ((values < least) | (False if end is None else values >= end))
    return tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None


def _range(what: str, end: int | None) -> str:
    return f"{what} from 0 on" if end is None else f"{what} 0 to {end - 1}"
