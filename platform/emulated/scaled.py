"""Conversions of gfx950 with a block scale, which is a power of two: to and from 8, 6 and 4 bits, to nearest even or
stochastically. Sources are divided by the scale, results of the way back multiplied by it; one rounding.

AMD's CDNA4 manual gives the packing, the order of the random numbers, and that 6 and 4 bits saturate; what NaN becomes
there is not confirmed by a public text (the largest number here).
"""

from __future__ import annotations

import numpy as np

from portable.platform.emulated.convert import (
    bounded_bfloat,
    flavour,
    insert_byte,
    insert_half,
    pair_of_halves,
    saturation,
)
from portable.platform.emulated.floating import F64
from portable.platform.emulated.formats import encode, encode_stochastic, values
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.modifiers import bounded, constant16, define, plain, refuse
from portable.platform.emulated.waves import F32, I32, LANES, U32, Array, Group, handles

NARROW, SIX, WIDE = ("fp8", "bf8", "fp4"), ("fp6", "bf6"), ("f32", "f16", "bf16")
ELEMENTS = 32  # of 6 bits


def only_gfx950(w: Group, i: Instruction) -> None:
    if w.arch != "gfx950":
        raise NotImplementedError(f"line {i.line}: {i.name} is no instruction of {w.arch}")


def block_scale(w: Group, i: Instruction, operand: Operand) -> Array:
    """2 to the unbiased exponent field of a float32 scale, as float64; NaN for the field 255."""
    plain(i, operand)
    exponent = (w.u32(operand) >> U32(23) & U32(0xFF)).astype(I32)
    return np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))


def elements(w: Group, i: Instruction, operand: Operand, kind: str, count: int) -> Array:
    """[count, G, 64] float64: the numbers of a kind that lie in registers one after another, lower halves first."""
    if kind == "f32":
        return np.stack([w.f32(operand, word).astype(F64) for word in range(count)])
    plain(i, operand)
    if operand.kind == "f" and kind == "bf16":
        raise NotImplementedError(f"line {i.line}: a bf16 constant in {i.text!r} is not emulated")
    bits = constant16(operand) if operand.kind == "f" else None
    parts = []
    for word in range((count + 1) // 2):
        raw = w.u32(operand, word) if bits is None else np.full((w.size, LANES), bits, U32)
        parts += [(raw >> U32(shift)).astype(np.uint16) for shift in (0, 16)]
    held = np.stack(parts[:count])
    single: Array = held.view(np.float16) if kind == "f16" else (held.astype(U32) << U32(16)).view(F32)
    return single.astype(F64)


def advanced(seed: Array) -> Array:
    """The random number after this one: S0 << 1, xor 197 if its top bit was set."""
    after: Array = np.where(seed >> U32(31) != 0, seed << U32(1) ^ U32(197), seed << U32(1))
    return after


define("v_prng_b32", "u>u", advanced)


def narrowed(w: Group, i: Instruction, numbers: Array, narrow: str, seed: Array | None) -> Array:
    """[n, G, 64] float64 divided by the scale, the last operand, to codes; each with a random number of its own."""
    scale, name = block_scale(w, i, i.operands[-1]), flavour(w, narrow)
    codes = []
    with np.errstate(all="ignore"):
        for number in numbers / scale:
            if seed is None:
                codes.append(encode(number, name, saturation(w)))
            else:
                codes.append(encode_stochastic(number, name, seed, saturation(w)))
                seed = advanced(seed)
    return np.stack(codes)


def _selected(i: Instruction, count: int) -> tuple[int, ...]:
    """op_sel, refused where it chooses halves of sources."""
    refuse(i, {"op_sel"})
    chosen = i.numbers("op_sel", (0,) * count)
    if any(chosen[:2]):
        raise NotImplementedError(f"line {i.line}: op_sel of a source in {i.text!r} is not emulated")
    return chosen


@handles(*(f"v_cvt_scalef32_pk_{narrow}_{wide}" for narrow in NARROW for wide in WIDE))
def pack_scaled(w: Group, i: Instruction) -> None:
    """D.16[op_sel] = {fp8(S[1] / scale), fp8(S[0] / scale)} of two f32 or a pair; fp4: D.byte[op_sel]."""
    only_gfx950(w, i)
    narrow, wide = i.name.split("_")[-2:]
    chosen = _selected(i, 4 if wide == "f32" or narrow == "fp4" else 3)
    if wide == "f32":
        numbers = np.concatenate([elements(w, i, operand, wide, 1) for operand in i.operands[1:3]])
    else:
        numbers = elements(w, i, i.operands[1], wide, 2)
    low, high = narrowed(w, i, numbers, narrow, None)
    if narrow == "fp4":
        insert_byte(w, i, low | high << U32(4), chosen)
    elif wide == "f32" and chosen[2]:
        raise NotImplementedError(f"line {i.line}: op_sel of the scale of {i.text!r} is not emulated")
    else:
        insert_half(w, i, low | high << U32(8), chosen[-1])


@handles(*(f"v_cvt_scalef32_sr_{narrow}_{wide}" for narrow in ("fp8", "bf8", "pk_fp4") for wide in WIDE))
def pack_stochastically(w: Group, i: Instruction) -> None:
    """D.byte[op_sel[2] + 2 op_sel[3]] = fp8(S0 / scale), or two fp4 of a pair, by random numbers from S1 on."""
    only_gfx950(w, i)
    narrow, wide = i.name.split("_")[-2:]
    chosen = _selected(i, 4)
    plain(i, i.operands[2])
    numbers = elements(w, i, i.operands[1], wide, 2 if narrow == "fp4" else 1)
    codes = narrowed(w, i, numbers, narrow, w.u32(i.operands[2]))
    insert_byte(w, i, codes[0] | codes[1] << U32(4) if narrow == "fp4" else codes[0], chosen)


@handles(
    *(f"v_cvt_scalef32_pk32_{six}_{wide}" for six in SIX for wide in ("f16", "bf16")),
    *(f"v_cvt_scalef32_sr_pk32_{six}_{wide}" for six in SIX for wide in WIDE),
    *(f"v_cvt_scalef32_2xpk16_{six}_f32" for six in SIX),
)
def pack_six(w: Group, i: Instruction) -> None:
    """D[6k + 5 : 6k] = fp6(S0[k] / scale), 32 of them; sr: by random numbers from S1 on; 2xpk16: S0 and S1 in turn."""
    only_gfx950(w, i)
    refuse(i)
    six, wide = i.name.split("_")[-2:]
    seed = None
    if "2xpk16" in i.name:
        pair = [elements(w, i, operand, wide, ELEMENTS // 2) for operand in i.operands[1:3]]
        numbers = np.stack(pair, 1).reshape(ELEMENTS, w.size, LANES)
    else:
        numbers = elements(w, i, i.operands[1], wide, ELEMENTS)
    if "_sr_" in i.name:
        plain(i, i.operands[2])
        seed = w.u32(i.operands[2])
    words = np.zeros((7, w.size, LANES), np.uint64)
    for k, code in enumerate(narrowed(w, i, numbers, six, seed).astype(np.uint64)):
        word, shift = divmod(6 * k, 32)
        words[word] |= code << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        words[word + 1] |= code << np.uint64(shift) >> np.uint64(32)
    for k in range(6):
        w.set(i.operands[0], words[k].astype(U32), k)


def widened(w: Group, i: Instruction, codes: Array, narrow: str) -> Array:
    """[n, G, 64] codes to float64, times the scale, which is the last operand."""
    with np.errstate(all="ignore"):
        product: Array = values(flavour(w, narrow)).astype(F64)[codes] * block_scale(w, i, i.operands[-1])
    return product


def _spread(w: Group, i: Instruction, numbers: Array, wide: str) -> None:
    """Write numbers of a kind into registers one after another, lower halves first."""
    with np.errstate(all="ignore"):
        if wide == "f32":
            for k, number in enumerate(numbers):
                w.set_f32(i.operands[0], number.astype(F32), k)
            return
        halves = [half_or_bfloat(w, number, wide) for number in numbers]
    for k in range(len(halves) // 2):
        w.set(i.operands[0], pair_of_halves(halves[2 * k], halves[2 * k + 1]), k)


def half_or_bfloat(w: Group, number: Array, wide: str) -> Array:
    """float64 to the bits of a 16-bit kind; under MODE.FP16_OVFL finite numbers stay finite. uint32."""
    if wide == "bf16":
        return bounded_bfloat(w, number.astype(F32))
    return bounded(w, number, number).view(np.uint16).astype(U32)


@handles(*(f"v_cvt_scalef32_pk_{wide}_{narrow}" for narrow in NARROW for wide in WIDE))
def unpack_scaled(w: Group, i: Instruction) -> None:
    """D[k] = S0.16[op_sel].byte[k] * scale, of a pair of f32 or in halves; fp4: of S0.byte[op_sel[0] + 2 op_sel[1]]."""
    only_gfx950(w, i)
    refuse(i, {"op_sel"})
    plain(i, i.operands[1])
    wide, narrow = i.name.split("_")[-2:]
    chosen = i.numbers("op_sel", (0, 0, 0))
    if (narrow != "fp4" and chosen[1]) or chosen[2]:
        raise NotImplementedError(f"line {i.line}: op_sel of the scale or destination of {i.text!r} is not emulated")
    bits = 4 if narrow == "fp4" else 8
    raw = w.u32(i.operands[1]) >> U32(2 * bits * (chosen[0] + 2 * chosen[1]))
    mask = U32((1 << bits) - 1)
    _spread(w, i, widened(w, i, np.stack([raw & mask, raw >> U32(bits) & mask]), narrow), wide)


@handles(*(f"v_cvt_scalef32_{wide}_{narrow}" for narrow in ("fp8", "bf8") for wide in ("f32", "f16")))
def unpack_one_scaled(w: Group, i: Instruction) -> None:
    """D.f32 = S0.byte[op_sel[0] + 2 op_sel[1]] * scale; D.f16[op_sel[2]], the other half staying."""
    only_gfx950(w, i)
    refuse(i, {"op_sel"})
    plain(i, i.operands[1])
    chosen = i.numbers("op_sel", (0, 0, 0))
    wide, narrow = i.name.split("_")[-2:]
    raw = w.u32(i.operands[1]) >> U32(8 * (chosen[0] + 2 * chosen[1])) & U32(0xFF)
    (number,) = widened(w, i, raw[None], narrow)
    with np.errstate(all="ignore"):
        if wide == "f16":
            insert_half(w, i, half_or_bfloat(w, number, wide), chosen[2])
        elif chosen[2]:
            raise NotImplementedError(f"line {i.line}: op_sel of the destination of {i.text!r} is not emulated")
        else:
            w.set_f32(i.operands[0], number.astype(F32))


@handles(*(f"v_cvt_scalef32_pk32_{wide}_{six}" for six in SIX for wide in WIDE))
def unpack_six(w: Group, i: Instruction) -> None:
    """D[k] = S0[6k + 5 : 6k] * scale, 32 of them."""
    only_gfx950(w, i)
    refuse(i)
    plain(i, i.operands[1])
    wide, six = i.name.split("_")[-2:]
    words = [w.u32(i.operands[1], k).astype(np.uint64) for k in range(6)] + [np.zeros((w.size, LANES), np.uint64)]
    codes = []
    for k in range(ELEMENTS):
        word, shift = divmod(6 * k, 32)
        codes.append((words[word] | words[word + 1] << np.uint64(32)) >> np.uint64(shift) & np.uint64(63))
    _spread(w, i, widened(w, i, np.stack(codes), six), wide)


@handles("v_cvt_sr_f16_f32", "v_cvt_sr_bf16_f32")
def round_half_stochastically(w: Group, i: Instruction) -> None:
    """D.16[op_sel[2]] = f16 or bf16 of S0.f32, cut off after the top bits of S1 were added to those that it loses."""
    only_gfx950(w, i)
    chosen = _selected(i, 3)
    plain(i, i.operands[2])
    number, name = w.f32(i.operands[1]), i.name.split("_")[3]
    code = encode_stochastic(number, name, w.u32(i.operands[2]), saturation(w) & np.isfinite(number))
    insert_half(w, i, code, chosen[2])
