"""A flat array of bytes that is read and written at any byte address, in the widest units that the addresses allow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Places(NamedTuple):
    """Where n accesses of `nbytes` bytes lie: unit numbers [nbytes // unit, n] of an array of `unit`-byte units."""

    unit: int
    numbers: Array
    nbytes: int


def places(index: Array, nbytes: int) -> Places:
    """The units of n accesses at byte `index` [n] int64: of 4 bytes if all are aligned to 4, else of 2, else of 1.

    >>> places(np.array([8, 24]), 8).numbers.tolist()
    [[2, 6], [3, 7]]
    """
    odd = int(np.bitwise_or.reduce(index)) | nbytes if index.size else nbytes
    unit = 4 if odd & 3 == 0 else 2 if odd & 1 == 0 else 1
    return Places(unit, index // unit + np.arange(nbytes // unit)[:, None], nbytes)


class Span:
    """Bytes as uint32 words: an access of n lanes is [words, n], one word for 1, 2 or 4 bytes, zero-extended.

    >>> span = Span(np.zeros(16, np.uint8))
    >>> span.store(places(np.array([1, 10]), 2), np.array([[0x1234, 0x5678]], np.uint32))
    >>> [hex(word) for word in span.load(places(np.array([0, 8]), 4))[0]]
    ['0x123400', '0x56780000']
    """

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        self.units: dict[int, Array] = {size: raw.view(f"u{size}") for size in (1, 2, 4, 8)}

    def load(self, at: Places) -> Array:
        """[words, n] uint32."""
        return join(self.units[at.unit][at.numbers], at)

    def store(self, at: Places, words: Array) -> None:
        """Write [words, n] uint32; of two lanes at one address the later one stays."""
        self.units[at.unit][at.numbers] = split(words, at)


def join(units: Array, at: Places) -> Array:
    """[nbytes // unit, n] units to [words, n] uint32."""
    per = max(1, min(4, at.nbytes) // at.unit)
    words = units[0::per].astype(np.uint32)
    for part in range(1, per):
        words |= units[part::per].astype(np.uint32) << np.uint32(8 * at.unit * part)
    return words


def split(words: Array, at: Places) -> Array:
    """[words, n] uint32 to [nbytes // unit, n] units."""
    per = max(1, min(4, at.nbytes) // at.unit)
    if per == 1:
        return words.astype(f"u{at.unit}")
    units = np.empty(at.numbers.shape, f"u{at.unit}")
    for part in range(per):
        units[part::per] = words >> np.uint32(8 * at.unit * part)
    return units
