"""Global memory: the arrays that a kernel may touch, each at addresses of its own, with every access checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.access import Access, Array, ScalarAccess
from portable.platform.emulated.atomics import Atomic, apply
from portable.platform.emulated.spans import Places, Span, places
from portable.platform.emulated.views import Rows

# Kernels see array n in the middle of window n, 128 GiB between 2**47, above every address of this machine, and 2**48,
# which a buffer descriptor can hold: a wrong offset from one array ends in no other.
WINDOW = 37  # bits of an offset within a window
FIRST, WINDOWS = 1 << 47 - WINDOW, 1 << 47 - WINDOW
ALIGNMENT = 4096  # an address keeps its remainder by this
LOG = 1 << 22  # units of logged writes before doubles are dropped

Writes = list[tuple[int, Array, Array]]  # bytes of a unit, which units, their values


def seen(number: int, array: npt.NDArray[np.uint8]) -> int:
    """The address at which kernels see the array that is added as number `number`, from 0.

    >>> hex(seen(1, np.zeros(8, np.uint8)) >> WINDOW)
    '0x401'
    """
    return (FIRST + number << WINDOW) + (1 << WINDOW - 1) + array.ctypes.data % ALIGNMENT


class Allocation(NamedTuple):
    """`written` [bytes] bool says which bytes hold a value, `rows` which belong to it; None: all of them."""

    start: int  # as kernels see it
    end: int
    name: str
    array: npt.NDArray[np.uint8]
    written: npt.NDArray[np.bool_] | None
    rows: Rows | None = None

    @property
    def special(self) -> bool:
        """An access within it must be looked at more closely."""
        return self.written is not None or self.rows is not None or not self.array.flags.writeable

    @property
    def host(self) -> int:
        return self.array.ctypes.data


class Allocations:
    """Arrays at addresses of their own, and at their real ones too, so that pointers stored inside arrays work.

    An access must lie within the array that its address was derived from. At real addresses, of which nobody knows
    that, it must lie within one array, and those that overlap (views of one tensor) count as one.
    `changes` counts the stores, and the atomics that changed something.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._all: list[Allocation] = []
        self._plain: list[bool] = []  # by window: not special
        self._shifts: list[int] = []  # by window: from an address to an index of the span
        self._stale = False
        self._span = Span(np.zeros(8, np.uint8))
        self._low = 0
        self._starts: Array = np.zeros(0, np.int64)
        self._ends: Array = np.zeros(0, np.int64)
        self._log: list[Places] | None = None
        self._logged = 0

    def add(
        self,
        array: npt.NDArray[np.uint8],
        name: str,
        initialised: bool = True,
        written: npt.NDArray[np.bool_] | None = None,
        rows: Rows | None = None,
    ) -> int:
        """Let kernels touch a contiguous uint8 array (only read it, if it is read-only); the address that they see.

        Args:
            initialised: False if its bytes hold no values yet, so that reading one before it was written is a fault.
            written: [bytes], the bytes that hold values, where only some do; it is kept up to date.
            rows: the bytes that it may touch, where only some are; not checked at real addresses.

        Raises:
            ValueError: the array is not a contiguous uint8 one, or there is no window left for it.
        """
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"array {name!r} is {array.dtype} with strides {array.strides}, not contiguous uint8")
        if len(self._all) == WINDOWS or array.nbytes >= 1 << WINDOW - 1:
            raise ValueError(f"array {name!r} is number {len(self._all)} of {WINDOWS}, with {array.nbytes} bytes")
        if written is None and not initialised:
            written = np.zeros(array.size, np.bool_)
        start = seen(len(self._all), array)
        self._all.append(Allocation(start, start + array.nbytes, name, array.reshape(-1), written, rows))
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
        self.changes += 1
        if self._log is not None:
            self._remember(at)

    def atomic(self, access: Access, address: Array, operation: Atomic, sources: list[Array]) -> Array:
        """Read, modify, write, lane after lane; the values before, [n] of the operation's type."""
        size = operation.dtype.itemsize
        if (bad := address % size != 0).any():
            raise access.fault(f"misaligned atomic of {size} bytes at {int(address[bad][0]):#x}", bad)
        self._locate(access, address, size, "read")
        at = self._locate(access, address, size, "write")
        before = self._span.units[at.unit][at.numbers]
        old = apply(self._span, at.numbers[0] * at.unit, operation, sources)
        self.changes += bool((before != self._span.units[at.unit][at.numbers]).any())
        if self._log is not None:
            self._remember(at)
        return old

    def check(self, access: Access, address: Array, nbytes: int, verb: str) -> None:
        """Raise the fault of an access that is not carried out, if it is one."""
        self._locate(access, address, nbytes, verb)

    def log(self) -> None:
        """Remember from now on what is written."""
        self._log = []

    def logged(self) -> Writes:
        """What was written since `log`."""
        self._compact()
        return [(each.unit, each.numbers, self._span.units[each.unit][each.numbers]) for each in self._log or ()]

    def replay(self, writes: Writes) -> None:
        """Do what a copy of these allocations, in another process, has logged."""
        if self._stale:
            self._arrange()
        for unit, numbers, values in writes:
            self._span.units[unit][numbers] = values
            for each in self._all:
                if each.written is not None:
                    byte = (numbers * unit + (self._low - each.host) + np.arange(unit)[:, None]).reshape(-1)
                    each.written[byte[(byte >= 0) & (byte < each.array.size)]] = True

    def _remember(self, at: Places) -> None:
        assert self._log is not None
        self._log.append(at)
        self._logged += at.numbers.size
        if self._logged > LOG:
            self._compact()

    def _compact(self) -> None:
        """Each unit once."""
        logged = self._log or []
        self._log = []
        for unit in sorted({each.unit for each in logged}):
            numbers = np.unique(np.concatenate([each.numbers.reshape(-1) for each in logged if each.unit == unit]))
            self._log.append(Places(unit, numbers, unit))
        self._logged = 0

    def _locate(self, access: Access | ScalarAccess, address: Array, nbytes: int, verb: str) -> Places:
        if self._stale:
            self._arrange()
        start = address.view(np.int64)
        if not start.size:
            return places(start, nbytes)
        low, high = int(start.min()), int(start.max())
        window = (low >> WINDOW) - FIRST
        if 0 <= window < len(self._plain) and self._plain[window]:
            each = self._all[window]
            if low >= each.start and high + nbytes <= each.end:
                return places(start + self._shifts[window], nbytes)
        return places(self._closely(access, start, nbytes, verb), nbytes)

    def _closely(self, access: Access | ScalarAccess, start: Array, nbytes: int, verb: str) -> Array:
        """Indices of the span; the lanes may use several windows, and real addresses."""
        windows = (start >> WINDOW) - FIRST
        index = np.empty(start.shape, np.int64)
        one = (windows == windows[0]).all()  # as a rule, and looking for several costs more than the rest
        for window in [int(windows[0])] if one else np.unique(windows).tolist():
            where = windows == window
            if not 0 <= window < len(self._all):
                index[where] = start[where] - self._low
                self._check_host(access, start, where, nbytes, verb)
                continue
            each = self._all[window]
            outside = where & ((start < each.start) | (start + nbytes > each.end))
            between = np.zeros_like(outside)
            if each.rows:
                between = where & ~outside & ~each.rows.hold(np.where(outside, 0, start - each.start), nbytes)
            if (bad := outside | between).any():
                first = int(bad.argmax())  # of the lanes in the order of the workgroups
                address = int(start[first])
                place = f"byte {address - each.start} of {each.name!r}, "
                if outside[first]:
                    place += f"which has {each.end - each.start} bytes"
                    raise access.fault(_outside(verb, nbytes, address, place), outside)
                place += f"a view with rows of {each.rows.run} bytes, is between them" if each.rows else ""
                raise access.fault(_outside(verb, nbytes, address, place), between)
            if each.special:
                self._check_special(access, each, start - each.start, where, nbytes, verb)
            index[where] = start[where] + self._shifts[window]
        return index

    def _check_host(self, access: Access | ScalarAccess, start: Array, where: Array, nbytes: int, verb: str) -> None:
        """Real addresses."""
        found = np.searchsorted(self._starts, start, "right") - 1
        good = (found >= 0) & (start + nbytes <= self._ends[found]) if len(self._ends) else np.zeros(len(start), bool)
        if (bad := where & ~good).any():
            address = int(start[bad][0])
            near = min(self._all, key=lambda a: max(a.host - address, address - a.host - a.array.size), default=None)
            place = "nothing is allocated"
            if near:
                far = address - near.host
                place = f"{-far} bytes before" if far < 0 else f"byte {far} of"
                place += f" {near.name!r}, which has {near.array.size} bytes"
            raise access.fault(_outside(verb, nbytes, address, place), bad)
        for each in self._all:
            inside = where & (start >= each.host) & (start < each.host + each.array.size)
            if each.special and inside.any():
                self._check_special(access, each, start - each.host, inside, nbytes, verb)

    def _check_special(
        self, access: Access | ScalarAccess, each: Allocation, byte: Array, where: Array, nbytes: int, verb: str
    ) -> None:
        """Accesses from `byte` [n] of one array, where `where` [n] holds."""
        if not each.array.flags.writeable and verb == "write":
            raise access.fault(f"write to {each.name!r}, which is read-only", where)
        if each.written is None:
            return
        bytes_ = byte[where] + np.arange(nbytes)[:, None]
        if verb == "write":
            each.written[bytes_] = True
        elif not (good := each.written[bytes_]).all():
            bad = where.copy()
            bad[np.flatnonzero(where)[good.all(axis=0)]] = False
            first = int(bytes_.T[~good.T][0])
            raise access.fault(f"read of uninitialised bytes of {each.name!r}, the first is byte {first}", bad)

    def _arrange(self) -> None:
        """Merge overlaps, and lay one array over all that lies between the first and the last allocation.

        Only checked addresses are used with it, so the gaps are never touched.
        """
        spans = list(self._merged())
        self._starts = np.array([start for start, _ in spans], np.int64)
        self._ends = np.array([end for _, end in spans], np.int64)
        if spans:
            self._low = spans[0][0] & ~7
            size = -(-(spans[-1][1] - self._low) // 8) * 8
            whole = memoryview((ctypes.c_uint8 * size).from_address(self._low)).cast("B")
            self._span = Span(np.frombuffer(whole, np.uint8))
        self._plain = [not each.special for each in self._all]
        self._shifts = [each.host - each.start - self._low for each in self._all]
        self._stale = False

    def _merged(self) -> Iterator[tuple[int, int]]:
        """Start and end of what is allocated, at real addresses."""
        start = end = 0
        for host, size in sorted((each.host, each.array.size) for each in self._all if each.array.size):
            if host < end:
                end = max(end, host + size)
                continue
            if end:
                yield start, end
            start, end = host, host + size
        if end:
            yield start, end


def _outside(verb: str, nbytes: int, address: int, place: str) -> str:
    return f"out-of-bounds {verb} of {nbytes} bytes at {address & (1 << 64) - 1:#x} ({place})"
