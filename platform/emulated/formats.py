"""Narrow floating-point formats: one table of all values each, and the way back from numbers to codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """Sign, exponent and mantissa bits; `special` says which codes are no numbers."""

    exponent: int
    mantissa: int
    bias: int
    special: str = ""  # "ieee": infinities and NaNs, "fn": all ones is NaN, "fnuz": minus zero is NaN, "": none

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa


FORMATS = {
    "e4m3fnuz": Format(4, 3, 8, "fnuz"),
    "e5m2fnuz": Format(5, 2, 16, "fnuz"),
    "e4m3fn": Format(4, 3, 7, "fn"),
    "e5m2": Format(5, 2, 15, "ieee"),
    "e2m3": Format(2, 3, 1),
    "e3m2": Format(3, 2, 3),
    "e2m1": Format(2, 1, 1),
    "f16": Format(5, 10, 15, "ieee"),
    "bf16": Format(8, 7, 127, "ieee"),
}


@functools.cache
def values(name: str) -> npt.NDArray[np.float32]:
    """The value of every code of a format.

    >>> values("e2m1")[:8].tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    kind = FORMATS[name]
    code = np.arange(1 << kind.bits)
    exponent = (code >> kind.mantissa) & ((1 << kind.exponent) - 1)
    mantissa = code & ((1 << kind.mantissa) - 1)
    normal = exponent > 0
    scale = np.exp2(np.where(normal, exponent, 1) - kind.bias - kind.mantissa)
    value = (mantissa + np.where(normal, 1 << kind.mantissa, 0)) * scale
    top = exponent == (1 << kind.exponent) - 1
    if kind.special == "ieee":
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    elif kind.special == "fn":
        value[top & (mantissa == (1 << kind.mantissa) - 1)] = np.nan
    value = np.where(code >> (kind.bits - 1) == 1, -value, value)
    if kind.special == "fnuz":
        value[1 << (kind.bits - 1)] = np.nan
    out: npt.NDArray[np.float32] = value.astype(np.float32)
    return out


def encode(value: Array, name: str, saturate: Array | bool) -> Array:
    """Floats to the codes of a narrow format, to nearest even. uint32.

    What overflows, infinities too, becomes the largest number where `saturate`, and otherwise infinity or NaN; formats
    without these always saturate.
    """
    kind = FORMATS[name]
    size = np.abs(_quiet(value))
    known = np.where(np.isfinite(size), size, 0)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(known)[1] - 1, 1 - kind.bias) - kind.mantissa)
    return _coded(value, np.rint(known / quantum) * quantum, name, saturate)


def encode_stochastic(value: Array, name: str, seed: Array, saturate: Array | bool) -> Array:
    """Floats of 24 bits or fewer to the codes of a narrow format: the bits that are dropped and as many bits from the
    top of `seed` (uint32) are added, and the carry alone is kept. uint32.

    More than 24 dropped bits give 0, as AMD's own emulator has it; no public text says what the hardware does there.
    """
    kind = FORMATS[name]
    size = np.abs(_quiet(value))
    known = np.where(np.isfinite(size), size, 0)
    exponent = np.frexp(known)[1] - 1
    whole = np.ldexp(known, 23 - exponent).astype(np.uint64)
    drop = np.clip(23 - kind.mantissa + np.maximum(1 - kind.bias - exponent, 0), 0, 32)
    some = drop.astype(np.uint64)
    kept = (whole + (seed.astype(np.uint64) >> (np.uint64(32) - some))) >> some
    return _coded(value, np.ldexp(np.where(drop > 24, 0, kept), exponent - 23 + drop), name, saturate)


def _quiet(value: Array) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return value.astype(np.float64)


def _coded(value: Array, rounded: Array, name: str, saturate: Array | bool) -> Array:
    """The codes of |value| rounded to what a format has, or beyond its end, with the sign of `value`."""
    kind = FORMATS[name]
    half = np.uint32(1 << (kind.bits - 1))
    table = values(name).astype(np.float64)[:half]
    numbers = table[np.isfinite(table)]
    last = np.uint32(len(numbers) - 1)
    nan, over = np.isnan(value), (rounded > numbers[-1]) | np.isinf(value)
    code = np.searchsorted(numbers, np.minimum(rounded, numbers[-1])).astype(np.uint32)
    if kind.special == "":
        code = np.where(over | nan, last, code)
    else:
        beyond = {"ieee": np.uint32(len(numbers)), "fn": half - np.uint32(1), "fnuz": half}[kind.special]
        code = np.where(over, np.where(saturate, last, beyond), code)
        code = np.where(nan, half if kind.special == "fnuz" else half - np.uint32(1), code)
    signed: Array = code | np.where(np.signbit(value), half, np.uint32(0))
    return np.where((code == 0) | (code == half), code, signed) if kind.special == "fnuz" else signed
