"""Bits of unsigned arrays of any shape, as the instructions of both ALUs count and move them."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.waves import I32, I64, U64, Array


def signed32(value: Array) -> Array:
    """int64 of int32 bits.

    >>> signed32(np.array([0xFFFFFFFF], np.uint32))
    array([-1])
    """
    return np.ascontiguousarray(value).view(I32).astype(I64)


def signed64(value: Array) -> Array:
    """int64 of uint64 bits."""
    return np.ascontiguousarray(value).view(I64)


def bit_count(value: Array) -> Array:
    """Ones in each uint64, as uint64 (numpy has its own from 2.0 on; 1.26 is supported).

    >>> bit_count(np.array([0, 5, 2**64 - 1], np.uint64)).tolist()
    [0, 2, 64]
    """
    pairs = value - (value >> U64(1) & U64(0x5555555555555555))
    fours = (pairs & U64(0x3333333333333333)) + (pairs >> U64(2) & U64(0x3333333333333333))
    ones: Array = ((fours + (fours >> U64(4)) & U64(0x0F0F0F0F0F0F0F0F)) * U64(0x0101010101010101)) >> U64(56)
    return ones


def lowest_one(value: Array) -> Array:
    """The number of the lowest one of each uint64, 2**32 - 1 without a one.

    >>> lowest_one(np.array([12, 0], np.uint64)).tolist()
    [2, 4294967295]
    """
    lowest = value & (~value + U64(1))
    return np.where(value == 0, U64(0xFFFFFFFF), bit_count(lowest - U64(1)))


def leading_zeros(value: Array, width: int) -> Array:
    """Zeros above the highest one of the `width` bits in each uint64, 2**32 - 1 without a one.

    >>> leading_zeros(np.array([1, 0], np.uint64), 32).tolist()
    [31, 4294967295]
    """
    filled = value
    for step in (1, 2, 4, 8, 16, 32):
        filled = filled | filled >> U64(step)
    differing: Array = np.where(value == 0, U64(0xFFFFFFFF), U64(width) - bit_count(filled))
    return differing


def sign_changes(value: Array, width: int) -> Array:
    """Bits that differ from the sign bit of the `width` bits in each uint64."""
    negative = value >> U64(width - 1) & U64(1) == 1
    return np.where(negative, ~value & U64((1 << width) - 1), value)


def reverse(value: Array, width: int) -> Array:
    """The lower `width` bits (32 or 64) of each uint64 turned round.

    >>> reverse(np.array([1], np.uint64), 32).tolist() == [1 << 31]
    True
    """
    turned = np.ascontiguousarray(value).astype(U64)
    for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        turned = (turned >> U64(step) & U64(mask)) | ((turned & U64(mask)) << U64(step))
    bits: Array = turned.byteswap() >> U64(64 - width)
    return bits


def field(value: Array, first: Array, size: Array) -> Array:
    """`size` bits of each int64 or uint64 from bit `first`, extended by its type's sign; no bits give 0.

    >>> field(np.array([0xF0]), np.array([4]), np.array([4])).tolist()
    [-1]
    """
    rest = np.where(size >= 64, 0, 64 - size.astype(I64)).astype(value.dtype) & 63
    return np.where(size == 0, 0, value >> first.astype(value.dtype) << rest >> rest).astype(value.dtype)


def quads(value: Array) -> Array:
    """Bit 4k of each uint64: any of its bits 4k to 4k + 3."""
    marks: Array = (value | value >> U64(1) | value >> U64(2) | value >> U64(3)) & U64(0x1111111111111111)
    return marks


def gather_quads(value: Array) -> Array:
    """Bit k of each uint64: any of its bits 4k to 4k + 3."""
    found, gathered = quads(value), np.zeros_like(value)
    for k in range(16):
        gathered |= (found >> U64(4 * k) & U64(1)) << U64(k)
    return gathered


def double_bits(value: Array) -> Array:
    """Bits 2k and 2k + 1 of each uint64: bit k of its lower half.

    >>> double_bits(np.array([5], np.uint64)).tolist() == [0b110011]
    True
    """
    doubled = np.zeros_like(value)
    for k in range(32):
        doubled |= (value >> U64(k) & U64(1)) * U64(3 << 2 * k)
    return doubled


def wide(value: Array) -> Array:
    """uint64 of uint32."""
    return value.astype(U64)
