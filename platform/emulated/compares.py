"""Vector compares and the choice by their masks."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.isa import EXEC, Instruction, masks
from portable.platform.emulated.modifiers import DPP, SDWA, Function, read, read_mask, refuse, write
from portable.platform.emulated.waves import I64, U32, U64, Array, Group, handles

EXPONENT = {"f": (23, 0xFF), "h": (10, 0x1F), "d": (52, 0x7FF)}  # mantissa bits, and the exponent field
COMPARISONS: dict[str, Function] = {
    "f": lambda a, b: np.zeros(a.shape, np.bool_),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda a, b: np.ones(a.shape, np.bool_),
}
ORDERED: dict[str, Function] = {
    **{name: function for name, function in COMPARISONS.items() if name not in ("ne", "t")},
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "tru": COMPARISONS["t"],
}


def compare(name: str, signature: str, function: Function) -> None:
    """Enter v_cmp_NAME and v_cmpx_NAME: a lane's bit of D = its comparison, 0 of an inactive lane; x: EXEC = D too."""

    def handler(w: Group, i: Instruction) -> None:
        refuse(i, SDWA)
        a, b = (read(w, i, 1 + k, kind) for k, kind in enumerate(signature))
        with np.errstate(invalid="ignore"):
            result = function(a, b) & w.active
        w.set_mask(i.operands[0].index, result)
        if i.name.startswith("v_cmpx"):
            w.set_s64(EXEC, masks(np.ascontiguousarray(result)))

    for prefix in ("v_cmp_", "v_cmpx_"):
        handles(prefix + name)(handler)


def _class_test(kind: str) -> Function:
    """D = S1[class of S0]: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    mantissa, top = EXPONENT[kind]

    def test(value: Array, wanted: Array) -> Array:
        bits = value.view(f"u{value.dtype.itemsize}").astype(U64)
        fraction, exponent = bits & U64((1 << mantissa) - 1), (bits >> U64(mantissa)) & U64(top)
        rank = np.where(exponent == top, 3, np.where(exponent > 0, 2, np.where(fraction > 0, 1, 0)))
        number = np.where(np.signbit(value), 5 - rank, 6 + rank)
        nan = (exponent == top) & (fraction > 0)
        position = np.where(nan, (fraction >> U64(mantissa - 1)).astype(I64), number)
        chosen: Array = (wanted.astype(U64) >> position.astype(U64) & U64(1)) != 0
        return chosen

    return test


for _type, _kind in dict(i16="s", u16="w", i32="i", u32="u", i64="I", u64="U").items():
    for _name, _function in COMPARISONS.items():
        compare(f"{_name}_{_type}", 2 * _kind, _function)
for _type, _kind in dict(f16="h", f32="f", f64="d").items():
    for _name, _function in ORDERED.items():
        compare(f"{_name}_{_type}", 2 * _kind, _function)
    compare(f"class_{_type}", _kind + "u", _class_test(_kind))


@handles("v_cndmask_b32")
def choose(w: Group, i: Instruction) -> None:
    """D = S2[lane] ? S1 : S0; S2 is a mask in scalar registers."""
    refuse(i, DPP | SDWA)
    a, b = (read(w, i, k, "f" if i.operands[k].negate or i.operands[k].absolute else "u").view(U32) for k in (1, 2))
    write(w, i, np.where(read_mask(w, i, 3), b, a), "u")
