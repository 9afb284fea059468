"""Atomic operations: tables of what each computes, and their execution lane after lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from portable.platform.emulated.spans import Array, Span


class Atomic(NamedTuple):
    """`compute(old, *sources)` is the new value; `sources` counts the data operands."""

    dtype: np.dtype[np.generic]
    compute: Callable[..., Array]
    sources: int = 1


def apply(span: Span, index: Array, operation: Atomic, sources: list[Array]) -> Array:
    """Carry out n operations at byte `index` [n], those at one address in the order of their lanes; the old values [n].

    >>> cell = Span(np.zeros(8, np.uint8))
    >>> apply(cell, np.array([4, 4, 4]), MEMORY["add"], [np.array([1, 10, 100], np.uint32)]).tolist()
    [0, 1, 11]
    """
    values = span.units[operation.dtype.itemsize].view(operation.dtype)
    place = index // operation.dtype.itemsize
    old = np.empty(len(index), operation.dtype)
    left = np.arange(len(index))
    with np.errstate(all="ignore"):
        while left.size:
            _, first = np.unique(place[left], return_index=True)
            now = left[first]
            old[now] = values[place[now]]
            values[place[now]] = operation.compute(old[now], *(source[now] for source in sources))
            left = np.delete(left, first)
    return old


def _add_f16(old: Array, new: Array) -> Array:
    """Two halves of a word, each added as float16."""
    return np.ascontiguousarray((old.view(np.float16) + new.view(np.float16)).astype(np.float16)).view(np.uint32)


def _add_bf16(old: Array, new: Array) -> Array:
    """Two halves of a word, each added as bfloat16, rounded to nearest even."""
    word = np.zeros_like(old)
    for shift in (np.uint32(0), np.uint32(16)):
        left, right = ((x >> shift << np.uint32(16)).view(np.float32) for x in (old, new))
        total = left + right
        bits = total.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        word |= np.where(np.isnan(total), bits >> np.uint32(16) | np.uint32(0x40), rounded) << shift
    return word


def _increment(old: Array, new: Array) -> Array:
    """old >= new ? 0 : old + 1."""
    return np.where(old >= new, 0, old + old.dtype.type(1)).astype(old.dtype)


def _decrement(old: Array, new: Array) -> Array:
    """old == 0 or old > new ? new : old - 1."""
    return np.where((old == 0) | (old > new), new, old - old.dtype.type(1)).astype(old.dtype)


def _swap_if(old: Array, new: Array, expected: Array) -> Array:
    """old == expected ? new : old."""
    return np.where(old == expected, new, old)


def _least(old: Array, new: Array) -> Array:
    """new < old ? new : old: a NaN in memory stays, and one that comes changes nothing."""
    return np.where(new < old, new, old)


def _greatest(old: Array, new: Array) -> Array:
    """new > old ? new : old."""
    return np.where(new > old, new, old)


def _second(old: Array, new: Array) -> Array:
    """new."""
    return new


def _bits(width: int) -> dict[str, Atomic]:
    unsigned, signed = np.dtype(f"u{width}"), np.dtype(f"i{width}")
    return {
        "add": Atomic(unsigned, np.add),
        "sub": Atomic(unsigned, np.subtract),
        "umin": Atomic(unsigned, np.minimum),
        "umax": Atomic(unsigned, np.maximum),
        "smin": Atomic(signed, np.minimum),
        "smax": Atomic(signed, np.maximum),
        "and": Atomic(unsigned, np.bitwise_and),
        "or": Atomic(unsigned, np.bitwise_or),
        "xor": Atomic(unsigned, np.bitwise_xor),
        "inc": Atomic(unsigned, _increment),
        "dec": Atomic(unsigned, _decrement),
        "swap": Atomic(unsigned, _second),
        "cmpswap": Atomic(unsigned, _swap_if, 2),
    }


_FLOAT = {
    "add_f32": Atomic(np.dtype(np.float32), np.add),
    "add_f64": Atomic(np.dtype(np.float64), np.add),
    "min_f64": Atomic(np.dtype(np.float64), _least),
    "max_f64": Atomic(np.dtype(np.float64), _greatest),
    "pk_add_f16": Atomic(np.dtype(np.uint32), _add_f16),
    "pk_add_bf16": Atomic(np.dtype(np.uint32), _add_bf16),
}

# The names behind global_atomic_, flat_atomic_ and buffer_atomic_; the data of cmpswap is (new, expected).
MEMORY = _bits(4) | {f"{name}_x2": each for name, each in _bits(8).items()} | _FLOAT


def _lds(width: int) -> dict[tuple[str, str], Atomic]:
    plain = _bits(width)
    unsigned, signed, bits = f"u{8 * width}", f"i{8 * width}", f"b{8 * width}"
    named = {("add", unsigned): "add", ("sub", unsigned): "sub", ("inc", unsigned): "inc", ("dec", unsigned): "dec"}
    named |= {("min", unsigned): "umin", ("max", unsigned): "umax", ("min", signed): "smin", ("max", signed): "smax"}
    named |= {("and", bits): "and", ("or", bits): "or", ("xor", bits): "xor", ("wrxchg", bits): "swap"}
    kind = plain["add"].dtype
    return {key: plain[name] for key, name in named.items()} | {
        ("rsub", unsigned): Atomic(kind, lambda old, new: new - old),
        ("cmpst", bits): Atomic(kind, lambda old, expected, new: _swap_if(old, new, expected), 2),
        ("mskor", bits): Atomic(kind, lambda old, mask, new: (old & ~mask) | new, 2),
    }


# (operation, type) of ds_OPERATION_TYPE and ds_OPERATION_rtn_TYPE; the data of cmpst is (expected, new).
LDS = _lds(4) | _lds(8)
LDS |= {
    ("add", "f32"): _FLOAT["add_f32"],
    ("min", "f32"): Atomic(np.dtype(np.float32), _least),
    ("max", "f32"): Atomic(np.dtype(np.float32), _greatest),
    ("add", "f64"): _FLOAT["add_f64"],
    ("min", "f64"): _FLOAT["min_f64"],
    ("max", "f64"): _FLOAT["max_f64"],
    ("pk_add", "f16"): _FLOAT["pk_add_f16"],
    ("pk_add", "bf16"): _FLOAT["pk_add_bf16"],
}
