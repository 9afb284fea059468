"""Packed instructions: an operation on both halves of a register or on two registers; dot products and mixed fma."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.floating import F64, exact_sum, fma, fma16, maximum, maximum3, minimum, minimum3, to_odd
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.modifiers import KINDS, Function, bounded, constant16, plain, refuse
from portable.platform.emulated.waves import F32, I32, I64, LANES, U32, Array, Group, handles, signed

CHOICE = frozenset(("op_sel", "op_sel_hi"))  # of the low and of the high result: which half of each source
SIGNS = frozenset(("neg_lo", "neg_hi"))


def _half(w: Group, operand: Operand, kind: str, high: int) -> Array:
    """16 bits of a source; a float constant fills the low half, an integer one is 32 bits wide."""
    bits = constant16(operand) if operand.kind == "f" else None
    raw = w.u32(operand) if bits is None else np.full((w.size, LANES), bits, U32)
    return np.ascontiguousarray((raw >> U32(16 * high)).astype(np.uint16)).view(KINDS[kind])


def _register(w: Group, operand: Operand, high: int) -> Array:
    """32 bits of a register pair; a constant, which fills both, is float32 or the bits of an integer."""
    if operand.kind in "if":
        return np.full((w.size, LANES), operand.bits, U32).view(F32)
    return np.ascontiguousarray(w.u32(operand, high)).view(F32)


def _packed(w: Group, i: Instruction, kind: str, count: int) -> list[list[Array]]:
    """The sources of the low and of the high result, with op_sel, op_sel_hi, neg_lo and neg_hi."""
    chosen = (i.numbers("op_sel", (0,) * count), i.numbers("op_sel_hi", (1,) * count))
    negative = (i.numbers("neg_lo", (0,) * count), i.numbers("neg_hi", (0,) * count))
    results = []
    for part in range(2):
        sources = []
        for k, operand in enumerate(i.operands[1 : 1 + count]):
            plain(i, operand)
            high = chosen[part][k]
            value = _register(w, operand, high) if kind == "f" else _half(w, operand, kind, high)
            sources.append(-value if negative[part][k] else value)
        results.append(sources)
    return results


def _clamped(i: Instruction, value: Array) -> Array:
    """Floats into [0, 1], NaN to 0, under `clamp`."""
    kind = value.dtype.type
    return np.fmin(np.fmax(value, kind(0)), kind(1)) if "clamp" in i.modifiers else value


def _saturated(function: Function, kind: str) -> Function:
    """Of the exact result: the nearest number of the kind."""
    ends = np.iinfo(KINDS[kind])  # type: ignore[type-var]
    return lambda *sources: np.clip(function(*(source.astype(I64) for source in sources)), ends.min, ends.max)


HALF: dict[str, tuple[str, Function]] = {  # D.half[k] = operation of the sources' halves
    "v_pk_add_f16": ("hh", lambda a, b: a + b),
    "v_pk_mul_f16": ("hh", lambda a, b: a * b),
    "v_pk_fma_f16": ("hhh", fma16),
    "v_pk_min_f16": ("hh", minimum),
    "v_pk_max_f16": ("hh", maximum),
    "v_pk_minimum3_f16": ("hhh", minimum3),
    "v_pk_maximum3_f16": ("hhh", maximum3),
    "v_pk_add_u16": ("ww", lambda a, b: a + b),
    "v_pk_sub_u16": ("ww", lambda a, b: a - b),
    "v_pk_add_i16": ("ss", lambda a, b: a + b),
    "v_pk_sub_i16": ("ss", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("ww", lambda a, b: a * b),
    "v_pk_mad_u16": ("www", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("sss", lambda a, b, c: a * b + c),
    "v_pk_min_u16": ("ww", np.minimum),
    "v_pk_max_u16": ("ww", np.maximum),
    "v_pk_min_i16": ("ss", np.minimum),
    "v_pk_max_i16": ("ss", np.maximum),
    "v_pk_lshlrev_b16": ("ww", lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("ww", lambda a, b: b >> (a & np.uint16(15))),
    "v_pk_ashrrev_i16": ("ss", lambda a, b: b >> (a & np.int16(15))),
}
SATURATING = ("v_pk_add_u16", "v_pk_sub_u16", "v_pk_add_i16", "v_pk_sub_i16", "v_pk_mad_u16", "v_pk_mad_i16")


@handles(*HALF)
def halves(w: Group, i: Instruction) -> None:
    """D.half[k] = operation(S0.half, S1.half, ...)."""
    signature, function = HALF[i.name]
    kind = signature[0]
    is_float = kind == "h"
    refuse(i, CHOICE | (SIGNS if is_float else set()) | ({"clamp"} if is_float or i.name in SATURATING else set()))
    if "clamp" in i.modifiers and not is_float:
        function = _saturated(function, kind)
    parts = []
    with np.errstate(all="ignore"):
        for sources in _packed(w, i, kind, len(signature)):
            result = function(*sources)
            result = _clamped(i, bounded(w, result, *sources)) if is_float else result.astype(KINDS[kind])
            parts.append(np.ascontiguousarray(result).view(np.uint16).astype(U32))
    w.set(i.operands[0], parts[0] | parts[1] << U32(16))


WORD: dict[str, tuple[int, Function]] = {  # D.f32[k] = operation of the sources' registers
    "v_pk_add_f32": (2, lambda a, b: a + b),
    "v_pk_mul_f32": (2, lambda a, b: a * b),
    "v_pk_fma_f32": (3, fma),
}


@handles(*WORD)
def registers(w: Group, i: Instruction) -> None:
    """D.f32[k] = operation(S0.f32, S1.f32, ...)."""
    count, function = WORD[i.name]
    refuse(i, CHOICE | SIGNS | {"clamp"})
    with np.errstate(all="ignore"):
        low, high = (_clamped(i, function(*sources)) for sources in _packed(w, i, "f", count))
    w.set_f32(i.operands[0], low)
    w.set_f32(i.operands[0], high, 1)


@handles("v_pk_mov_b32")
def move(w: Group, i: Instruction) -> None:
    """D.u32[0] = S0.u32[op_sel[0]]; D.u32[1] = S1.u32[op_sel[1]]."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0, 0))
    low, high = (_register(w, operand, chosen[k]).view(U32).copy() for k, operand in enumerate(i.operands[1:3]))
    w.set(i.operands[0], low)
    w.set(i.operands[0], high, 1)


@handles("v_pack_b32_f16")
def pack(w: Group, i: Instruction) -> None:
    """D = {S1.f16, S0.f16}, halves by op_sel."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0, 0, 0))
    low, high = (_half(w, operand, "h", chosen[k]) for k, operand in enumerate(i.operands[1:3]))
    low, high = (signed(value, operand) for value, operand in zip((low, high), i.operands[1:3], strict=True))
    w.set(i.operands[0], low.view(np.uint16).astype(U32) | high.view(np.uint16).astype(U32) << U32(16))


@handles("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def mixed(w: Group, i: Instruction) -> None:
    """D = S0 * S1 + S2; a source is f32, or where op_sel_hi says so the f16 half that op_sel names; lo and hi round the
    exact sum to f16 and keep the other half of D."""
    refuse(i, CHOICE | {"clamp"})
    half, short = i.numbers("op_sel", (0, 0, 0)), i.numbers("op_sel_hi", (0, 0, 0))
    sources = []
    for k, operand in enumerate(i.operands[1:4]):
        if short[k]:
            sources.append(signed(_half(w, operand, "h", half[k]), operand).astype(F32))
        elif half[k]:
            raise NotImplementedError(f"line {i.line}: op_sel of an f32 source in {i.text!r}")
        else:
            sources.append(w.f32(operand))
    a, b, c = sources
    with np.errstate(all="ignore"):
        if i.name == "v_fma_mix_f32":
            w.set_f32(i.operands[0], _clamped(i, fma(a, b, c)))
            return
        total = to_odd(*exact_sum(a.astype(F64) * b, c.astype(F64)))
        bits = _clamped(i, bounded(w, total, a, b, c)).view(np.uint16).astype(U32)
    old = w.u32(i.operands[0])
    low = i.name == "v_fma_mixlo_f16"
    w.set(i.operands[0], (old & U32(0xFFFF0000)) | bits if low else (old & U32(0xFFFF)) | bits << U32(16))


def _bfloat(value: Array) -> Array:
    """[..] uint16 bits to float32."""
    bits: Array = value.astype(U32) << U32(16)
    return bits.view(F32)


def _single(value: Array) -> Array:
    return value.astype(F32)


@handles("v_dot2_f32_f16", "v_dot2_f32_bf16", "v_dot2c_f32_f16", "v_dot2c_f32_bf16")
def dot2(w: Group, i: Instruction) -> None:
    """D.f32 = S2 (c: D) + S0.16[0] * S1.16[0] + S0.16[1] * S1.16[1], added in this order; dot2_f32_bf16 adds S2 last.

    The products are exact, each sum is rounded to f32: the order is the manual's, the roundings are not confirmed by a
    public text.
    """
    refuse(i, {"clamp"})
    bfloat = i.name.endswith("bf16")
    for operand in i.operands:
        plain(i, operand)
        if bfloat and operand.kind == "f":
            raise NotImplementedError(f"line {i.line}: a bf16 constant in {i.text!r} is not emulated")
    added = w.f32(i.operands[0] if "dot2c" in i.name else i.operands[3])
    last = i.name == "v_dot2_f32_bf16"
    total = np.zeros_like(added) if last else added
    with np.errstate(all="ignore"):
        for high in range(2):
            a, b = (_half(w, operand, "w" if bfloat else "h", high) for operand in i.operands[1:3])
            wide = _bfloat if bfloat else _single
            total = fma(wide(a), wide(b), total)
        w.set_f32(i.operands[0], _clamped(i, total + added if last else total))


DOTS = {
    f"v_dot{32 // bits}{form}_{sign}32_{sign}{bits}": (bits, sign)
    for bits in (16, 8, 4)
    for sign in "iu"
    for form in ("", "c")
    if not (form and sign == "u")
}


@handles(*DOTS)
def integer_dot(w: Group, i: Instruction) -> None:
    """D.32 = the sum over k of S0[k] * S1[k], of 16, 8 or 4 bits, + S2 (c: D); wraps, or saturates under clamp."""
    refuse(i, {"clamp"})
    for operand in i.operands:
        plain(i, operand)
    bits, sign = DOTS[i.name]
    word = I32 if sign == "i" else U32
    total = np.ascontiguousarray(w.u32(i.operands[0] if "c_" in i.name else i.operands[3])).view(word).astype(I64)
    a, b = (w.u32(operand) for operand in i.operands[1:3])
    for k in range(32 // bits):
        left, right = (_field(value, bits * k, bits, sign == "i") for value in (a, b))
        total = total + left * right
    if "clamp" in i.modifiers:
        total = np.clip(total, np.iinfo(word).min, np.iinfo(word).max)
    w.set(i.operands[0], total.astype(np.uint64).astype(U32))


def _field(value: Array, first: int, bits: int, is_signed: bool) -> Array:
    """Some bits of a register, as int64."""
    aligned: Array = value << U32(32 - bits - first)
    if is_signed:
        aligned = aligned.view(I32)
    part: Array = (aligned >> aligned.dtype.type(32 - bits)).astype(I64)
    return part
