"""What a kernel is given: arguments in the layout of C, and the memory that their pointers lead to."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from portable.platform.emulated.access import Array
from portable.platform.emulated.allocations import seen
from portable.platform.emulated.views import Rows, extent

TYPES = {"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q"}
TYPES |= {"u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a kernel may access.

    Attributes:
        name: what a fault calls it by.
        data: [bytes] uint8, contiguous.
        written: [bytes] bool, the bytes that hold values, if only some do; launches keep it up to date.
        rows: the bytes that it may access, if only some are its.
    """

    name: str
    data: Array
    written: Array | None = None
    rows: Rows | None = None


class Arguments:
    """The arguments of one launch, added in order.

    A view is an allocation of its own, with the bytes of its elements alone, so that no offset leads from one view of
    a storage into another; those that overlap see each other's writes.

    `written` has, by the address of its storage, which bytes of a tensor hold values, where only some do. `whole` lets
    a view lead to all of its storage.

    >>> arguments = Arguments()
    >>> arguments.add("x", "*fp32", np.zeros(4, np.float32))
    >>> arguments.add("n", "i32", 4)
    >>> len(arguments.packed()), [buffer.name for buffer in arguments.buffers]
    (12, ['x'])
    """

    def __init__(self, written: Mapping[int, Array] | None = None, whole: bool = False) -> None:
        self.buffers: list[Buffer] = []
        self._packed = bytearray()
        self._numbers: dict[tuple[object, ...], int] = {}  # of the buffer of the same bytes
        self._written, self._whole = written or {}, whole

    def add(self, name: str, kind: Any, value: Any) -> None:
        """The next argument.

        Args:
            kind: "*..." for a pointer or one of `TYPES`; a tuple of them for a tuple; a "constexpr" is left out.
            value: for a pointer a CPU tensor, a numpy array, None, or an address.

        Raises:
            ValueError: a tensor that is not on the CPU, or a tensor descriptor.
        """
        if isinstance(kind, tuple):
            for number, (part, each) in enumerate(zip(kind, value, strict=True)):
                self.add(f"{name}[{number}]", part, each)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            raise ValueError(f"argument {name} is a tensor descriptor; an emulated device takes pointers")
        elif not kind.startswith("*"):
            self._pack(kind, value)
        elif value is None or isinstance(value, int):
            self._pack(kind, value or 0)
        else:
            self._pack(kind, self.pointer(name, value))

    def pointer(self, name: str, value: Any) -> int:
        """Let the kernel access a tensor or an array; the address at which it sees its first element.

        Raises:
            ValueError: a tensor that is not on the CPU.
        """
        if isinstance(value, np.ndarray):
            first, strides, itemsize = value.ctypes.data, value.strides, value.itemsize
            writeable, held, origin = value.flags.writeable, base(value), 0
        else:
            if value.device.type != "cpu":
                raise ValueError(f"argument {name} is on {value.device}; an emulated device takes CPU tensors")
            itemsize, writeable, held = value.element_size(), True, storage(value)
            origin = held.ctypes.data if held.size else 0
            first = origin + value.storage_offset() * itemsize if held.size else 0
            strides = tuple(stride * itemsize for stride in value.stride())
        before, size, rows = extent(value.shape, strides, itemsize)
        start = first - before
        if self._whole and held.size:
            start, size, rows = held.ctypes.data, held.size, None
        key = (start, size, rows, writeable) if size else (name,)
        if key not in self._numbers:
            data = at(start, size, writeable)
            written = self._written.get(origin)
            if written is not None and size:
                written = written[start - origin :][:size]
            self._numbers[key] = len(self.buffers)
            self.buffers.append(Buffer(name, data, written if size else None, rows))
        number = self._numbers[key]
        return seen(number, self.buffers[number].data) + (first - start if size else 0)

    def place(self, offset: int, data: bytes) -> None:
        """The next argument, as bytes at an offset that the caller knows."""
        self._packed += bytes(offset - len(self._packed)) + data

    def packed(self) -> bytes:
        """The bytes that the kernel finds."""
        return bytes(self._packed)

    def _pack(self, kind: str, value: int | float) -> None:
        data = pack([(kind, value)])
        self.place(-(-len(self._packed) // len(data)) * len(data), data)


def pack(arguments: Iterable[tuple[str, int | float]]) -> bytes:
    """Kernel arguments as the hardware finds them: each at a multiple of its size. Pointers are `"*..."`.

    >>> pack([("i8", -1), ("*fp32", 2), ("fp32", 1.0)]).hex()
    'ff0000000000000002000000000000000000803f'

    Raises:
        ValueError: a type that has no layout.
    """
    out = bytearray()
    for kind, value in arguments:
        code = "Q" if kind.startswith("*") else TYPES.get(kind)
        if code is None:
            raise ValueError(f"argument type {kind!r} is not a pointer or one of {', '.join(TYPES)}")
        if code == "bf16":
            bits = int(np.float32(value).view(np.uint32))
            data = struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
        else:
            data = struct.pack("<" + code, value)
        out += bytes(-len(out) % len(data)) + data
    return bytes(out)


def at(address: int, size: int, writeable: bool = True) -> Array:
    """The bytes of memory that something else keeps alive."""
    if not size:
        return np.zeros(0, np.uint8)
    found = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    found.flags.writeable = writeable
    return found


def storage(tensor: Any) -> Array:
    """The bytes of the whole storage that a CPU tensor lies in, shared with it."""
    held = tensor.untyped_storage()
    return at(held.data_ptr(), held.nbytes())


def base(array: Array) -> Array:
    """The bytes of the whole array that an array is a view of, shared with it; its own where it is a view of others."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    before, size, _ = extent(whole.shape, whole.strides, whole.itemsize)
    return at(whole.ctypes.data - before, size)
