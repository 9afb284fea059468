"""fp8 bytes to and from float32 in plain arithmetic, for every flavour on every device. Used by cache.py.

Triton converts only the flavours that a device has, and some of its software conversions are wrong (triton 3.9 on
gfx942: 465.0 in float16 becomes NaN in e4m3fn, where 448 is right). A flavour is its bits: mantissa, exponent bias,
largest finite byte, and whether it is "fnuz", which has no -0 and keeps 0x80 for NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Flavour(NamedTuple):
    """What the two functions below take as constants."""

    mantissa: int
    bias: int
    largest: int  # the byte of the largest finite value
    fnuz: bool


FLAVOURS = {
    torch.float8_e4m3fn: Flavour(3, 7, 0x7E, False),
    torch.float8_e4m3fnuz: Flavour(3, 8, 0x7F, True),
    torch.float8_e5m2: Flavour(2, 15, 0x7B, False),
    torch.float8_e5m2fnuz: Flavour(2, 16, 0x7F, True),
}


@triton.jit
def encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, FNUZ: tl.constexpr):
    """float32 to the byte of the nearest value, ties to even; beyond the largest finite value to that one."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits >> 31
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    odd = (size >> drop) & 1
    normal = ((size + odd + ((1 << (drop - 1)) - 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    # a number below the least normal one is a multiple of 2**(1 - BIAS - MANTISSA): adding 2**23 rounds it to one
    steps = size.to(tl.float32, bitcast=True) * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    small = steps.to(tl.uint32, bitcast=True) & 0xFF
    least: tl.constexpr = (128 - BIAS) << 23
    byte = tl.minimum(tl.where(size < least, small, normal), LARGEST)
    if FNUZ:
        byte = tl.where(byte == 0, 0, byte | (sign << 7))
        byte = tl.where(size > 0x7F800000, 0x80, byte)
    else:
        byte = tl.where(size > 0x7F800000, 0x7F, byte) | (sign << 7)
    return byte.to(tl.uint8)


@triton.jit
def decode(byte, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, FNUZ: tl.constexpr):
    """A byte to float32. Exact: every fp8 value is one of float32's, subnormal ones by way of float32's own."""
    wide = byte.to(tl.uint32)
    size = wide & 0x7F
    # the exponent as float32 reads it is 127 - BIAS too small
    value = (size << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    value = tl.where(wide > 0x7F, -value, value)
    if FNUZ:
        return tl.where(wide == 0x80, float("nan"), value)
    infinity: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C
    value = tl.where(size > LARGEST, float("nan"), value)
    if MANTISSA == 2:
        value = tl.where(wide == infinity, float("inf"), tl.where(wide == (infinity | 0x80), float("-inf"), value))
    return value
