"""Narrow floating-point formats that the matrix unit reads: one table of all values each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
