"""Conversions between integers, floats and 8-bit floats, whose flavour is the architecture's own; `scaled` has more."""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.floating import F64
from portable.platform.emulated.formats import encode, encode_stochastic, values
from portable.platform.emulated.isa import Instruction
from portable.platform.emulated.modifiers import (
    DPP,
    OUTPUT,
    SDWA,
    Function,
    bounded,
    define,
    read,
    refuse,
    write,
)
from portable.platform.emulated.waves import F32, I64, U32, Array, Group, handles

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


def flavour(w: Group, name: str) -> str:
    """The format that a mnemonic means: the first CDNA with fp8 and bf8 has the fnuz ones."""
    if name in ("fp6", "bf6", "fp4"):
        return {"fp6": "e2m3", "bf6": "e3m2", "fp4": "e2m1"}[name]
    base = {"fp8": "e4m3", "bf8": "e5m2"}[name]
    if w.arch == "gfx942":
        return base + "fnuz"
    return base + "fn" if base == "e4m3" else base


def pair_of_halves(low: Array, high: Array) -> Array:
    pair: Array = low | high << U32(16)
    return pair


def _normalised(scale: int, low: int) -> Function:
    """D.16[k] = round(clamp(Sk, -1 or 0, 1) * scale)."""

    def compute(a: Array, b: Array) -> Array:
        a, b = (to_integer(np.rint(np.clip(value.astype(F64), low, 1) * scale), -scale, scale) for value in (a, b))
        return pair_of_halves(a.astype(np.uint16).astype(U32), b.astype(np.uint16).astype(U32))

    return compute


def _pair_of(name: str) -> Function:
    """D.16[k] = Sk saturated."""
    ends = INT_ENDS[name]
    return lambda *sources: pair_of_halves(*(np.clip(each, *ends).astype(np.uint16).astype(U32) for each in sources))


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
    "v_cvt_pkrtz_f16_f32": ("ff>u", lambda a, b: pair_of_halves(half_bits_to_zero(a), half_bits_to_zero(b))),
    "v_cvt_pknorm_i16_f32": ("ff>u", _normalised(32767, -1)),
    "v_cvt_pknorm_u16_f32": ("ff>u", _normalised(65535, 0)),
    "v_cvt_pk_u16_u32": ("uu>u", _pair_of("u16")),
    "v_cvt_pk_i16_i32": ("ii>u", _pair_of("i16")),
    "v_cvt_pk_u8_f32": ("fuu>u", _byte_inserted),
}
for _name, (_signature, _function) in CONVERSIONS.items():
    define(_name, _signature, _function)


def saturation(w: Group) -> Array:
    """[G, 1] bool: MODE.FP16_OVFL of each wave."""
    return w.waves.saturate[w.at][:, None]


def insert_half(w: Group, i: Instruction, bits: Array, high: int) -> None:
    """Write one half of D; the other stays."""
    write(w, i, bits.astype(np.uint16), "w", high)


@handles("v_cvt_pk_f16_f32")
def pack_half(w: Group, i: Instruction) -> None:
    """D = {f16(S1.f32), f16(S0.f32)}."""
    refuse(i)
    with np.errstate(all="ignore"):
        low, high = (half_bits(bounded(w, value, value)) for value in (read(w, i, 1, "f"), read(w, i, 2, "f")))
    write(w, i, pair_of_halves(low, high), "u")


@handles("v_cvt_pk_bf16_f32")
def pack_bfloat(w: Group, i: Instruction) -> None:
    """D = {bf16(S1.f32), bf16(S0.f32)}; under MODE.FP16_OVFL a finite source does not become infinity."""
    refuse(i)
    low, high = (bounded_bfloat(w, read(w, i, 1 + k, "f")) for k in range(2))
    write(w, i, pair_of_halves(low, high), "u")


def bounded_bfloat(w: Group, value: Array) -> Array:
    """float32 to bf16 bits; under MODE.FP16_OVFL an overflow of a finite number gives the largest one. uint32."""
    bits = bfloat_bits(value)
    over = saturation(w) & np.isfinite(value) & (bits & U32(0x7FFF) == 0x7F80)
    return np.where(over, bits - U32(1), bits)


@handles("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32")
def round_stochastically(w: Group, i: Instruction) -> None:
    """D.byte[op_sel[2] + 2 op_sel[3]] = fp8(S0.f32), cut off after the bits of S1 were added to those that it loses."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0, 0, 0, 0))
    value = read(w, i, 1, "f", high=chosen[0])
    code = encode_stochastic(value, flavour(w, i.name[9:12]), read(w, i, 2, "u", high=chosen[1]), saturation(w))
    insert_byte(w, i, code, chosen)


def insert_byte(w: Group, i: Instruction, code: Array, chosen: tuple[int, ...]) -> None:
    """Write the byte of D that op_sel[3:2] names; the others stay."""
    shift = U32(8 * (chosen[2] + 2 * chosen[3]))
    w.set(i.operands[0], w.u32(i.operands[0]) & ~(U32(0xFF) << shift) | code << shift)


@handles("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def pack_fp8(w: Group, i: Instruction) -> None:
    """D.16[op_sel] = {fp8(S1.f32), fp8(S0.f32)}."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0, 0, 0))
    name = flavour(w, i.name[9:12])
    low, high = (encode(read(w, i, 1 + k, "f", high=chosen[k]), name, saturation(w)) for k in range(2))
    insert_half(w, i, low | high << U32(8), chosen[2])


@handles("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def unpack_fp8(w: Group, i: Instruction) -> None:
    """D.f32 = float(S0.byte[0]), the byte that SDWA selects."""
    refuse(i, DPP | SDWA | OUTPUT)
    write(w, i, values(flavour(w, i.name[10:13]))[read(w, i, 1, "u") & U32(0xFF)], "f")


@handles("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def unpack_fp8pair_of_halves(w: Group, i: Instruction) -> None:
    """D.f32[k] = float(S0.16.byte[k]), of the half that SDWA or op_sel selects."""
    refuse(i, {"op_sel", "src0_sel"})
    bits = read(w, i, 1, "w", high=i.numbers("op_sel", (0, 0))[0])
    table = values(flavour(w, i.name[13:16]))
    w.set_f32(i.operands[0], table[bits & 0xFF])
    w.set_f32(i.operands[0], table[bits >> 8], 1)
