"""Arithmetic on ragged batches: rounding, exclusive prefix sums, and an arange per row.

Everything takes numpy arrays (planning on the host) or torch tensors (refreshing on a device), and is vectorised.
"""

from __future__ import annotations

from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.integer]
Ints = TypeVar("Ints", int, IntArray, torch.Tensor)


def cdiv(a: Ints, b: int) -> Ints:
    """ceil(a / b) of non-negative integers.

    >>> cdiv(0, 4), cdiv(5, 4), cdiv(np.array([8, 9]), 4).tolist()
    (0, 2, [2, 3])
    """
    _check_rounding(a, b)
    return a // b + (a % b > 0)  # a + b - 1 would wrap at the end of int32


def round_up(a: Ints, b: int) -> Ints:
    """The least multiple of b that is not below a.

    >>> round_up(7, 4)
    8
    """
    return cdiv(a, b) * b


def round_down(a: Ints, b: int) -> Ints:
    """The greatest multiple of b that is not above a.

    >>> round_down(7, 4)
    4
    """
    _check_rounding(a, b)
    return (a // b) * b


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n: the bucket of a length.

    >>> [next_power_of_2(n) for n in (0, 1, 3, 4)]
    [1, 1, 4, 4]
    """
    return 1 << (n - 1).bit_length() if n > 1 else 1


@overload
def cu_from_lens(lens: torch.Tensor) -> torch.Tensor: ...
@overload
def cu_from_lens(lens: npt.ArrayLike) -> npt.NDArray[np.int32]: ...
def cu_from_lens(lens: npt.ArrayLike | torch.Tensor) -> npt.NDArray[np.int32] | torch.Tensor:
    """Exclusive prefix sum with the total at its end: [B] lengths to [B + 1] int32 offsets.

    >>> cu_from_lens([3, 0, 2])
    array([0, 3, 3, 5], dtype=int32)
    """
    if isinstance(lens, torch.Tensor):
        cu = lens.new_zeros(lens.numel() + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, dtype=torch.int32, out=cu[1:])
        return cu
    values = np.asarray(lens)
    out = np.zeros(values.size + 1, dtype=np.int32)
    values.cumsum(out=out[1:])
    return out


def ragged_arange(counts: npt.ArrayLike) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For each item of a ragged batch: (its row, its place within the row), both int32.

    >>> segment, position = ragged_arange([2, 0, 3])
    >>> segment.tolist(), position.tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    """
    counts = np.asarray(counts, dtype=np.int64)
    cu = cu_from_lens(counts)
    segment = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    return segment, np.arange(cu[-1], dtype=np.int32) - cu[segment]


def _check_rounding(a: object, b: int) -> None:
    if b < 1:
        raise ValueError(f"b is {b}; the number to divide by must be at least 1")
    if isinstance(a, int) and a < 0:
        raise ValueError(f"a is {a}; it must be 0 or more")
