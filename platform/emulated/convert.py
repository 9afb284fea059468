"""Conversions between integers, floats and the 8-bit and 4-bit floats; the fp8 flavour is the architecture's own."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.floating import F64
from portable.platform.emulated.formats import FORMATS, values
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.modifiers import (
    DPP,
    OUTPUT,
    SDWA,
    Function,
    bounded,
    constant16,
    define,
    plain,
    read,
    refuse,
    write,
)
from portable.platform.emulated.waves import F32, I32, I64, LANES, U32, Array, Group, handles

INT_ENDS = {"i32": (-(1 << 31), (1 << 31) - 1), "u32": (0, (1 << 32) - 1), "i16": (-32768, 32767), "u16": (0, 65535)}


def to_integer(value: Array, low: int, high: int) -> Array:
    """Whole floats to int64, saturated; NaN gives 0."""
    return np.where(np.isnan(value), 0, np.clip(value.astype(F64), low, high)).astype(I64)


def _truncating(name: str) -> Function:
    return lambda value: to_integer(np.trunc(value), *INT_ENDS[name])


def bfloat_bits(value: Array) -> Array:
    """float32 to bf16 bits, to nearest even; NaN stays NaN. uint32."""
    bits = np.ascontiguousarray(value).view(U32)
    rounded: Array = (bits + (U32(0x7FFF) + (bits >> U32(16) & U32(1)))) >> U32(16)
    return np.where(np.isnan(value), bits >> U32(16) | U32(0x40), rounded)


def half_bits(value: Array) -> Array:
    """Floats to f16 bits, to nearest even. uint32."""
    return value.astype(np.float16).view(np.uint16).astype(U32)


def half_bits_to_zero(value: Array) -> Array:
    """float32 to f16 bits, rounded towards zero: an overflow gives the largest number. uint32."""
    near = value.astype(np.float16)
    too_far = (np.abs(near.astype(F32)) > np.abs(value)) & np.isfinite(value)
    return np.where(too_far, np.nextafter(near, np.float16(0)), near).view(np.uint16).astype(U32)


def encode(value: Array, name: str, saturate: Array) -> Array:
    """Floats to the codes of a narrow format, to nearest even. uint32.

    What overflows becomes the largest number where `saturate`, and otherwise infinity or NaN; fp4 always saturates.
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = value.astype(F64)
    kind = FORMATS[name]
    table = values(name).astype(F64)
    half = 1 << (kind.bits - 1)
    numbers = table[:half][np.isfinite(table[:half])]
    largest = numbers[-1]
    size = np.abs(value)
    known = np.where(np.isfinite(size), size, 0)
    exponent = np.maximum(np.frexp(known)[1] - 1, 1 - kind.bias)
    quantum = np.ldexp(1.0, exponent - kind.mantissa)
    rounded = np.rint(known / quantum) * quantum
    over = (rounded > largest) | np.isinf(size)
    code = np.searchsorted(numbers, np.minimum(rounded, largest)).astype(U32)
    sign = np.where(np.signbit(value), U32(half), U32(0))
    if kind.special == "":  # no infinity, no NaN
        code = np.where(over | np.isnan(size), U32(len(numbers) - 1), code)
    else:
        beyond = {"ieee": U32(len(numbers)), "fn": U32(half - 1), "fnuz": U32(half)}[kind.special]
        code = np.where(over, np.where(saturate, U32(len(numbers) - 1), beyond), code)
        code = np.where(np.isnan(size), U32(half) if kind.special == "fnuz" else U32(half - 1), code)
    signed_code: Array = code | sign
    return np.where((code == 0) | (code == half), code, signed_code) if kind.special == "fnuz" else signed_code


def flavour(w: Group, name: str) -> str:
    """The format that "fp8", "bf8" or "fp4" in a mnemonic means: the first CDNA with fp8 has the fnuz ones."""
    if name == "fp4":
        return "e2m1"
    base = {"fp8": "e4m3", "bf8": "e5m2"}[name]
    if w.arch == "gfx942":
        return base + "fnuz"
    return base + "fn" if base == "e4m3" else base


def _pair(low: Array, high: Array) -> Array:
    pair: Array = low | high << U32(16)
    return pair


def _normalised(scale: int, low: int) -> Function:
    """D.16[k] = round(clamp(Sk, -1 or 0, 1) * scale)."""

    def compute(a: Array, b: Array) -> Array:
        a, b = (to_integer(np.rint(np.clip(value.astype(F64), low, 1) * scale), -scale, scale) for value in (a, b))
        return _pair(a.astype(np.uint16).astype(U32), b.astype(np.uint16).astype(U32))

    return compute


def _pair_of(name: str) -> Function:
    """D.16[k] = Sk saturated."""
    return lambda a, b: _pair(*(np.clip(value, *INT_ENDS[name]).astype(np.uint16).astype(U32) for value in (a, b)))


def _byte_inserted(value: Array, position: Array, old: Array) -> Array:
    """D = S2 with byte S1[1:0] replaced by round(S0), saturated to 0..255."""
    shift = (position & U32(3)) * U32(8)
    byte = to_integer(np.rint(value), 0, 255).astype(U32)
    result: Array = old & ~(U32(0xFF) << shift) | byte << shift
    return result


CONVERSIONS: dict[str, tuple[str, Function]] = {
    "v_cvt_i32_f32": ("f>i", _truncating("i32")),
    "v_cvt_u32_f32": ("f>u", _truncating("u32")),
    "v_cvt_i32_f64": ("d>i", _truncating("i32")),
    "v_cvt_u32_f64": ("d>u", _truncating("u32")),
    "v_cvt_i16_f16": ("h>s", _truncating("i16")),
    "v_cvt_u16_f16": ("h>w", _truncating("u16")),
    "v_cvt_rpi_i32_f32": ("f>i", lambda a: to_integer(np.floor(a.astype(F64) + 0.5), *INT_ENDS["i32"])),
    "v_cvt_flr_i32_f32": ("f>i", lambda a: to_integer(np.floor(a), *INT_ENDS["i32"])),
    "v_cvt_f32_i32": ("i>f", lambda a: a.astype(F32)),
    "v_cvt_f32_u32": ("u>f", lambda a: a.astype(F32)),
    "v_cvt_f64_i32": ("i>d", lambda a: a.astype(F64)),
    "v_cvt_f64_u32": ("u>d", lambda a: a.astype(F64)),
    "v_cvt_f16_i16": ("s>h", lambda a: a.astype(np.float16)),
    "v_cvt_f16_u16": ("w>h", lambda a: a.astype(np.float16)),
    "v_cvt_f16_f32": ("f>h", lambda a: a.astype(np.float16)),
    "v_cvt_f32_f16": ("h>f", lambda a: a.astype(F32)),
    "v_cvt_f64_f32": ("f>d", lambda a: a.astype(F64)),
    "v_cvt_f32_f64": ("d>f", lambda a: a.astype(F32)),
    "v_cvt_f32_bf16": ("w>f", lambda a: (a.astype(U32) << U32(16)).view(F32)),
    "v_cvt_f32_ubyte0": ("u>f", lambda a: (a & U32(0xFF)).astype(F32)),
    "v_cvt_f32_ubyte1": ("u>f", lambda a: (a >> U32(8) & U32(0xFF)).astype(F32)),
    "v_cvt_f32_ubyte2": ("u>f", lambda a: (a >> U32(16) & U32(0xFF)).astype(F32)),
    "v_cvt_f32_ubyte3": ("u>f", lambda a: (a >> U32(24)).astype(F32)),
    "v_cvt_pkrtz_f16_f32": ("ff>u", lambda a, b: _pair(half_bits_to_zero(a), half_bits_to_zero(b))),
    "v_cvt_pk_bf16_f32": ("ff>u", lambda a, b: _pair(bfloat_bits(a), bfloat_bits(b))),
    "v_cvt_pknorm_i16_f32": ("ff>u", _normalised(32767, -1)),
    "v_cvt_pknorm_u16_f32": ("ff>u", _normalised(65535, 0)),
    "v_cvt_pk_u16_u32": ("uu>u", _pair_of("u16")),
    "v_cvt_pk_i16_i32": ("ii>u", _pair_of("i16")),
    "v_cvt_pk_u8_f32": ("fuu>u", _byte_inserted),
}
for _name, (_signature, _function) in CONVERSIONS.items():
    define(_name, _signature, _function)


def _saturation(w: Group) -> Array:
    """[G, 1] bool: MODE.FP16_OVFL of each wave."""
    return w.waves.saturate[w.at][:, None]


def _insert_half(w: Group, i: Instruction, bits: Array, high: int) -> None:
    """Write one half of D; the other stays."""
    write(w, i, bits.astype(np.uint16), "w", high)


@handles("v_cvt_pk_f16_f32")
def pack_half(w: Group, i: Instruction) -> None:
    """D = {f16(S1.f32), f16(S0.f32)}."""
    refuse(i)
    with np.errstate(all="ignore"):
        low, high = (half_bits(bounded(w, value, value)) for value in (read(w, i, 1, "f"), read(w, i, 2, "f")))
    write(w, i, _pair(low, high), "u")


@handles("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def pack_fp8(w: Group, i: Instruction) -> None:
    """D.16[op_sel] = {fp8(S1.f32), fp8(S0.f32)}."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0, 0, 0))
    name = flavour(w, i.name[9:12])
    low, high = (encode(read(w, i, 1 + k, "f", high=chosen[k]), name, _saturation(w)) for k in range(2))
    _insert_half(w, i, low | high << U32(8), chosen[2])


@handles("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def unpack_fp8(w: Group, i: Instruction) -> None:
    """D.f32 = float(S0.byte[0]), the byte that SDWA selects."""
    refuse(i, DPP | SDWA | OUTPUT)
    write(w, i, values(flavour(w, i.name[10:13]))[read(w, i, 1, "u") & U32(0xFF)], "f")


@handles("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def unpack_fp8_pair(w: Group, i: Instruction) -> None:
    """D.f32[k] = float(S0.16.byte[k]), of the half that SDWA or op_sel selects."""
    refuse(i, {"op_sel", "src0_sel"})
    bits = read(w, i, 1, "w", high=i.numbers("op_sel", (0, 0))[0])
    table = values(flavour(w, i.name[13:16]))
    w.set_f32(i.operands[0], table[bits & 0xFF])
    w.set_f32(i.operands[0], table[bits >> 8], 1)


def block_scale(w: Group, i: Instruction, operand: Operand) -> Array:
    """2 to the unbiased exponent field of a float32 scale, as float64; NaN for the field 255."""
    plain(i, operand)
    exponent = (w.u32(operand) >> U32(23) & U32(0xFF)).astype(I32)
    return np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))


def _halves(w: Group, i: Instruction, kind: str) -> list[Array]:
    """The two f16 or bf16 numbers of S0, as float64."""
    operand = i.operands[1]
    plain(i, operand)
    if operand.kind == "f" and kind == "bf16":
        raise NotImplementedError(f"line {i.line}: a bf16 constant in {i.text!r} is not emulated")
    bits = constant16(operand) if operand.kind == "f" else None
    raw = w.u32(operand) if bits is None else np.full((w.size, LANES), bits, U32)
    parts = [(raw >> U32(shift)).astype(np.uint16) for shift in (0, 16)]
    if kind == "f16":
        return [part.view(np.float16).astype(F64) for part in parts]
    return [(part.astype(U32) << U32(16)).view(F32).astype(F64) for part in parts]


NARROW, WIDE = ("fp8", "bf8", "fp4"), ("f32", "f16", "bf16")


@handles(*(f"v_cvt_scalef32_pk_{narrow}_{wide}" for narrow in NARROW for wide in WIDE))
def pack_scaled(w: Group, i: Instruction) -> None:
    """D.16[op_sel] = {fp8(S[1] / scale), fp8(S[0] / scale)} of two f32 or a pair; fp4: D.byte[op_sel]."""
    refuse(i, {"op_sel"})
    narrow, wide = i.name.split("_")[-2:]
    count = len(i.operands) - 1
    chosen = i.numbers("op_sel", (0,) * (count + (2 if narrow == "fp4" and count == 2 else 1)))
    sources = [read(w, i, 1 + k, "f").astype(F64) for k in range(2)] if wide == "f32" else _halves(w, i, wide)
    if any(chosen[: min(2, count)]) or (wide != "f32" and narrow != "fp4" and chosen[1]):
        raise NotImplementedError(f"line {i.line}: op_sel of a source in {i.text!r} is not emulated")
    scale = block_scale(w, i, i.operands[-1])
    with np.errstate(all="ignore"):
        low, high = (encode(source / scale, flavour(w, narrow), _saturation(w)) for source in sources)
    if narrow == "fp4":
        shift = U32(8 * (chosen[2] + 2 * chosen[3]))
        kept = w.u32(i.operands[0]) & ~(U32(0xFF) << shift)
        w.set(i.operands[0], kept | (low | high << U32(4)) << shift)
        return
    _insert_half(w, i, low | high << U32(8), chosen[-1])


@handles(*(f"v_cvt_scalef32_pk_{wide}_{narrow}" for narrow in NARROW for wide in WIDE))
def unpack_scaled(w: Group, i: Instruction) -> None:
    """D[k] = S0.16[op_sel].byte[k] * scale, of a pair of f32 or in halves; fp4: of S0.byte[op_sel[0] + 2 op_sel[1]]."""
    refuse(i, {"op_sel"})
    plain(i, i.operands[1])
    wide, narrow = i.name.split("_")[-2:]
    chosen = i.numbers("op_sel", (0, 0, 0))
    if (narrow != "fp4" and chosen[1]) or chosen[2]:
        raise NotImplementedError(f"line {i.line}: op_sel of the scale or destination of {i.text!r} is not emulated")
    bits = 4 if narrow == "fp4" else 8
    raw = w.u32(i.operands[1]) >> U32(2 * bits * (chosen[0] + 2 * chosen[1]))
    table, scale = values(flavour(w, narrow)).astype(F64), block_scale(w, i, i.operands[2])
    mask = U32((1 << bits) - 1)
    with np.errstate(all="ignore"):
        low, high = table[raw & mask] * scale, table[raw >> U32(bits) & mask] * scale
        if wide == "f32":
            w.set_f32(i.operands[0], low.astype(F32))
            w.set_f32(i.operands[0], high.astype(F32), 1)
            return
        low, high = (half_bits(x) if wide == "f16" else bfloat_bits(x.astype(F32)) for x in (low, high))
        w.set(i.operands[0], _pair(low, high))


@handles("v_cvt_scalef32_f32_fp8", "v_cvt_scalef32_f32_bf8")
def unpack_one_scaled(w: Group, i: Instruction) -> None:
    """D.f32 = S0.byte[op_sel[0] + 2 op_sel[1]] * scale."""
    refuse(i, {"op_sel"})
    plain(i, i.operands[1])
    chosen = i.numbers("op_sel", (0, 0, 0))
    raw = w.u32(i.operands[1]) >> U32(8 * (chosen[0] + 2 * chosen[1])) & U32(0xFF)
    table = values(flavour(w, i.name[-3:])).astype(F64)
    with np.errstate(all="ignore"):
        w.set_f32(i.operands[0], (table[raw] * block_scale(w, i, i.operands[2])).astype(F32))
