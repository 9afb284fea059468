"""Lengths and tables of a step: brought to one form, and refused with the row where they cannot be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from portable.ragged import IntArray, ragged_arange

Lens = Sequence[int] | IntArray
Int32 = npt.NDArray[np.int32]
MAX_INT32 = int(np.iinfo(np.int32).max)


def as_lens(name: str, values: npt.ArrayLike) -> Int32:
    """A fresh [B] int32 array of non-negative numbers, or a ValueError naming the row."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1 and values.min(initial=0) >= 0:
        plain: Int32 = values.copy()  # as engines keep them: 4 us, where all that follows takes 9
        return plain
    lens = as_array(name, values)
    if lens.ndim != 1:
        raise ValueError(f"{name} has shape {list(lens.shape)}; it must be [B]")
    if lens.size:
        check_integers(name, lens)
    if lens.size and (lens.min() < 0 or lens.max() > MAX_INT32):
        row = int(((lens < 0) | (lens > MAX_INT32)).argmax())
        raise ValueError(f"{name}[{row}] is {lens[row]}; a length is between 0 and 2**31 - 1")
    return lens.astype(np.int32)


def check_lens(query_lens: Int32, seq_lens: Int32, page_size: int) -> None:
    """Raise a ValueError unless every sequence holds its new tokens, and int32 offsets hold them all."""
    if query_lens.size != seq_lens.size:
        raise ValueError(
            f"query_lens has {query_lens.size} rows and seq_lens {seq_lens.size}; both have one per request"
        )
    check_page_size(page_size)
    if (short := seq_lens < query_lens).any():
        row = int(short.argmax())
        raise ValueError(
            f"row {row}: seq_len {seq_lens[row]} is less than query_len {query_lens[row]}; "
            "seq_lens counts the new tokens too"
        )
    if (total := int(query_lens.sum(dtype=np.int64))) > MAX_INT32:
        raise ValueError(f"query_lens sum to {total}; cu_seqlens_q is int32, so a step has at most 2**31 - 1 tokens")


def check_page_size(page_size: int) -> None:
    """Raise a ValueError unless it is a number of tokens."""
    if not isinstance(page_size, int) or not 1 <= page_size <= MAX_INT32:
        raise ValueError(f"page_size is {page_size!r}; it must be an int between 1 and 2**31 - 1")


def check_table(table: IntArray | torch.Tensor, query_lens: Int32, seq_lens: Int32, page_size: int) -> None:
    """Raise a ValueError unless the block table has a row per request, wide enough for its sequence."""
    shape = tuple(table.shape)
    if len(shape) != 2 or shape[0] != query_lens.size:
        raise ValueError(f"block_table has shape {list(shape)}; it must be [{query_lens.size}, W], a row per request")
    check_integers("block_table", table)
    longest = int(seq_lens.max(initial=0))
    if shape[1] * page_size < longest:
        row, single = int(seq_lens.argmax()), page_size == 1
        raise ValueError(
            f"row {row}: seq_len {longest} needs {-(-longest // page_size)} pages of {page_size} "
            f"token{'' if single else 's'}, but block_table is {shape[1]} wide"
            f"{' (page_size is 1, as it is where from_lens is given none)' if single else ''}"
        )


def counted(num_reqs: int, num_tokens: int) -> str:
    """The size of a step in words.

    >>> counted(1, 6)
    '1 request, 6 tokens'
    """
    return f"{num_reqs} request{'s' * (num_reqs != 1)}, {num_tokens} token{'s' * (num_tokens != 1)}"


def check_pages(table: Int32, seq_lens: Int32, page_size: int) -> None:
    """Raise a ValueError unless the page ids that the sequences reach are 0 or more; behind them anything may stand."""
    if not table.size or table.min() >= 0:
        return
    live = np.arange(table.shape[1]) * page_size < seq_lens[:, None]
    if (bad := live & (table < 0)).any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"row {row}: block_table[{row}, {column}] is {table[row, column]}; a live page id is 0 or more"
        )


def check_integers(name: str, values: npt.NDArray[np.generic] | torch.Tensor) -> None:
    """Raise a ValueError unless an array or tensor holds integers."""
    if values.dtype in (np.int32, torch.int32):
        return
    if isinstance(values, torch.Tensor):
        integers = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    else:
        integers = np.issubdtype(values.dtype, np.integer)
    if not integers:
        raise ValueError(f"{name} has dtype {values.dtype}; it must hold integers")


def as_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """A numpy array, or a ValueError naming the argument where the rows differ in length."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is ragged; its rows must be equally long") from error


def as_integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """An int64 array of integers, or a ValueError; a list without elements counts as one of them.

    >>> as_integers("rows", [3, 4])
    array([3, 4])
    """
    given = as_array(name, values)
    if given.size:
        check_integers(name, given)
    return given.astype(np.int64, copy=False)


def as_flags(name: str, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """A fresh array of bools, given as they are or as integers.

    >>> as_flags("is_prefilling", [0, 1])
    array([False,  True])
    """
    given = as_array(name, values)
    if given.size and given.dtype.kind not in "biu":
        raise ValueError(f"{name} has dtype {given.dtype}; it must hold bools")
    return given.astype(np.bool_)


def as_table(values: npt.NDArray[np.integer]) -> Int32:
    """A block table as int32 in C order, not copied where it is that already; an id past int32 is a ValueError."""
    check_integers("block_table", values)
    if values.size and not np.can_cast(values.dtype, np.int32):
        wide = (values > MAX_INT32) | (values < -MAX_INT32 - 1)
        if wide.any():
            row, column = np.argwhere(wide)[0]
            raise ValueError(
                f"row {row}: block_table[{row}, {column}] is {values[row, column]}; a page id is at most 2**31 - 1"
            )
    return np.ascontiguousarray(values, dtype=np.int32)


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """Raise a ValueError unless a tensor has this dtype, device and shape; None in a shape is any size."""
    fits = tensor.dim() == len(shape) and all(b is None or a == b for a, b in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}]")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; seq_lens is on {device}")
    if tensor.numel() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has a last stride of {tensor.stride(-1)}; it must be 1: give its contiguous()")


def twin(name: str, tensor: torch.Tensor, host: npt.ArrayLike | None) -> Int32:
    """The host twin of a tensor of lengths: the one that is given, or the tensor itself where it is on the CPU."""
    if host is not None:
        return as_lens(f"host_{name}", host)
    if tensor.device.type != "cpu":
        raise ValueError(f"host_{name} is None; {name} is on {tensor.device}, and reading it would stop the device")
    return as_lens(name, tensor.numpy())


def new_positions(query_lens: Int32, seq_lens: Int32) -> tuple[Int32, Int32]:
    """For each new token: its row, and its position in the sequence.

    >>> new_positions(np.array([2, 1], np.int32), np.array([5, 1], np.int32))[1].tolist()
    [3, 4, 0]
    """
    if (query_lens == 1).all():  # decodes
        return np.arange(query_lens.size, dtype=np.int32), seq_lens - np.int32(1)
    requests, new = ragged_arange(query_lens)
    return requests, new + (seq_lens - query_lens)[requests]
