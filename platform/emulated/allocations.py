"""Global memory: the arrays that a kernel may touch, at their own addresses, with every access checked."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.access import Access, Array, ScalarAccess
from portable.platform.emulated.atomics import Atomic, apply
from portable.platform.emulated.spans import Places, Span, places


class Allocation(NamedTuple):
    """`written` [bytes] bool says which bytes hold a value; None: all of them."""

    start: int
    end: int
    name: str
    array: npt.NDArray[np.uint8]
    written: npt.NDArray[np.bool_] | None


class Allocations:
    """Arrays at their real addresses, so that pointers stored inside them work too.

    An access must lie within one allocation. Allocations that overlap (views of one tensor) count as one.
    """

    def __init__(self) -> None:
        self._all: list[Allocation] = []
        self._special: list[Allocation] = []  # read-only, or with bytes not written yet
        self._stale = False
        self._span = Span(np.zeros(8, np.uint8))
        self._low = 0
        self._starts: Array = np.zeros(0, np.int64)
        self._ends: Array = np.zeros(0, np.int64)

    def add(self, array: npt.NDArray[np.uint8], name: str, initialised: bool = True) -> int:
        """Let kernels touch a contiguous uint8 array (only read it, if it is read-only); its address.

        Args:
            initialised: False if its bytes hold no values yet, so that reading one before it was written is a fault.

        Raises:
            ValueError: the array is not a contiguous uint8 one.
        """
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"array {name!r} is {array.dtype} with strides {array.strides}, not contiguous uint8")
        start = array.ctypes.data
        if not array.size:
            return start
        written = None if initialised else np.zeros(array.size, np.bool_)
        each = Allocation(start, start + array.nbytes, name, array.reshape(-1), written)
        self._all.append(each)
        if written is not None or not array.flags.writeable:
            self._special.append(each)
        self._stale = True
        return start

    def load(self, access: Access | ScalarAccess, address: Array, nbytes: int) -> Array:
        """[words, n] uint32 from addresses [n] uint64."""
        at = self._locate(access, address, nbytes, "read")  # first: it may replace the span
        return self._span.load(at)

    def store(self, access: Access, address: Array, words: Array, nbytes: int) -> None:
        """Write [words, n] uint32 to addresses [n] uint64."""
        at = self._locate(access, address, nbytes, "write")
        self._span.store(at, words)

    def atomic(self, access: Access, address: Array, operation: Atomic, sources: list[Array]) -> Array:
        """Read, modify, write, lane after lane; the values before, [n] of the operation's type."""
        size = operation.dtype.itemsize
        if (bad := address % size != 0).any():
            raise access.fault(f"misaligned atomic of {size} bytes at {int(address[bad][0]):#x}", bad)
        self._locate(access, address, size, "read")
        self._locate(access, address, size, "write")
        return apply(self._span, address.astype(np.int64) - self._low, operation, sources)

    def _locate(self, access: Access | ScalarAccess, address: Array, nbytes: int, verb: str) -> Places:
        if self._stale:
            self._arrange()
        start = address.astype(np.int64)
        if start.size:
            low, high = int(start.min()), int(start.max())
            first = int(np.searchsorted(self._starts, low, "right")) - 1
            if first < 0 or high + nbytes > self._ends[first]:
                self._check(access, start, nbytes, verb)
            self._check_written(access, start, nbytes, verb)
        return places(start - self._low, nbytes)

    def _check(self, access: Access | ScalarAccess, start: Array, nbytes: int, verb: str) -> None:
        """Each access on its own: the lanes may use several allocations."""
        found = np.searchsorted(self._starts, start, "right") - 1
        good = (found >= 0) & (start + nbytes <= self._ends[found]) if len(self._ends) else np.zeros(len(start), bool)
        if good.all():
            return
        address = int(start[~good][0])
        near = min(self._all, key=lambda a: max(a.start - address, address - a.end), default=None)
        where = "nothing is allocated"
        if near:
            far = f"{near.start - address} bytes before" if address < near.start else f"byte {address - near.start} of"
            where = f"{far} {near.name!r}, which has {near.end - near.start} bytes"
        raise access.fault(f"out-of-bounds {verb} of {nbytes} bytes at {address & (1 << 64) - 1:#x} ({where})", ~good)

    def _check_written(self, access: Access | ScalarAccess, start: Array, nbytes: int, verb: str) -> None:
        for each in self._special:
            inside = (start >= each.start) & (start < each.end)
            if not inside.any():
                continue
            if not each.array.flags.writeable and verb == "write":
                raise access.fault(f"write to {each.name!r}, which is read-only", inside)
            if each.written is None:
                continue
            bytes_ = start[inside] - each.start + np.arange(nbytes)[:, None]
            if verb == "write":
                each.written[bytes_] = True
            elif not (good := each.written[bytes_].all(axis=0)).all():
                inside[np.flatnonzero(inside)[good]] = False
                raise access.fault(f"read of uninitialised bytes of {each.name!r}", inside)

    def _arrange(self) -> None:
        """Merge overlaps, and lay one array over all that lies between the first and the last allocation.

        Only checked addresses are used with it, so the gaps are never touched.
        """
        spans: list[list[int]] = []
        for each in sorted(self._all, key=lambda each: (each.start, each.end)):
            if spans and each.start < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], each.end)
            else:
                spans.append([each.start, each.end])
        self._starts = np.array([start for start, _ in spans], np.int64)
        self._ends = np.array([end for _, end in spans], np.int64)
        self._low = int(self._starts[0]) & ~7
        size = -(-(int(self._ends[-1]) - self._low) // 8) * 8
        window = memoryview((ctypes.c_uint8 * size).from_address(self._low)).cast("B")
        self._span = Span(np.frombuffer(window, np.uint8))
        self._stale = False
