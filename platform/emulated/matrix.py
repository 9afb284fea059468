"""Matrix instructions (MFMA): D = A x B + C over the registers of a whole wave.

Lane i + M*g holds row i of A (column i of B), g the lane's group: the elements of K that follow those of group g - 1,
or, where an instruction has as many blocks as groups, another product. A register of D holds, in lane j + M*g, column
j of the rows 4*g + register. EXEC does not matter. Sums are float32 (float64 for scaled ones), in no particular order.

AMD's CDNA4 manual, chapter 7, says so, and that overflows give the largest number under MODE.FP16_OVFL; it does not say
how xf32 rounds its sources, nor in which order sums are formed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from portable.platform.emulated.formats import values
from portable.platform.emulated.isa import Instruction, Operand
from portable.platform.emulated.waves import F32, I32, I64, LANES, U32, Array, Group, handles

BOTH = (
    "f32_32x32x2_f32 f32_16x16x4_f32 f32_32x32x1_2b_f32 f32_16x16x1_4b_f32 f32_4x4x1_16b_f32 "
    "f32_32x32x8_f16 f32_16x16x16_f16 f32_32x32x4_2b_f16 f32_16x16x4_4b_f16 f32_4x4x4_16b_f16 "
    "f32_32x32x8_bf16 f32_16x16x16_bf16 f32_32x32x4_2b_bf16 f32_16x16x4_4b_bf16 f32_4x4x4_16b_bf16 "
    "i32_32x32x16_i8 i32_16x16x32_i8 i32_32x32x4_2b_i8 i32_16x16x4_4b_i8 i32_4x4x4_16b_i8 "
    "f32_32x32x16_fp8_fp8 f32_32x32x16_fp8_bf8 f32_32x32x16_bf8_fp8 f32_32x32x16_bf8_bf8 "
    "f32_16x16x32_fp8_fp8 f32_16x16x32_fp8_bf8 f32_16x16x32_bf8_fp8 f32_16x16x32_bf8_bf8 f64_16x16x4_f64"
)
ONLY = {
    "gfx942": "f32_32x32x4_xf32 f32_16x16x8_xf32",
    "gfx950": (
        "f32_32x32x16_f16 f32_16x16x32_f16 f32_32x32x16_bf16 f32_16x16x32_bf16 i32_32x32x32_i8 i32_16x16x64_i8 "
        "f32_32x32x64_f8f6f4 f32_16x16x128_f8f6f4"
    ),
}
NARROW = ("fp8", "bf8", "e2m3", "e3m2", "e2m1")  # the codes of cbsz (A) and blgp (B) for f8f6f4
FP8 = {"gfx942": {"fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}, "gfx950": {"fp8": "e4m3fn", "bf8": "e5m2"}}
SCALED = 32  # elements of K that share a scale


@dataclass(frozen=True, slots=True)
class Product:
    """What an opcode multiplies: `blocks` products of [m, k] and [k, m]."""

    result: str  # "f32", "i32", "f64"
    m: int
    k: int
    blocks: int
    a: str  # element types
    b: str

    @property
    def groups(self) -> int:
        """Lane groups that share the K of one block."""
        return LANES // (self.m * self.blocks)


def product(name: str) -> Product:
    """An opcode's name, read.

    >>> product("f32_4x4x4_16b_f16")
    Product(result='f32', m=4, k=4, blocks=16, a='f16', b='f16')
    """
    found = re.fullmatch(r"(\w\d\d)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_(\w+)", name)
    if found is None or found[2] != found[3]:
        raise ValueError(f"{name!r} is no matrix opcode")
    a, _, b = found[6].partition("_")
    return Product(found[1], int(found[2]), int(found[4]), int(found[5] or 1), a, b or a)


def elements(w: Group, operand: Operand, kind: str) -> Array:
    """[G, 64, n]: the elements that each lane holds, in the order of its registers."""
    words = np.stack([w.u32(operand, word) for word in range(operand.count)], axis=-1)
    octets, lanes = words.view(np.uint8), words.shape[:2]
    held: Array
    if kind == "f32":
        held = words.view(F32)
    elif kind == "f64":
        held = words.view(np.float64)
    elif kind == "xf32":  # 10 bits of mantissa, to nearest even; a NaN stays one
        rounded = (words + U32(0xFFF) + ((words >> U32(13)) & U32(1))) & U32(0xFFFFE000)
        held = np.where(np.isnan(words.view(F32)), words, rounded).view(F32)
    elif kind == "f16":
        held = words.view(np.float16).astype(F32)
    elif kind == "bf16":
        held = (words.view(np.uint16).astype(U32) << U32(16)).view(F32)
    elif kind == "i8":
        held = octets.view(np.int8).astype(F32)  # 128 x 128 x K < 2**24: sums in float32 are exact
    elif kind in ("fp8", "bf8"):
        held = values(FP8[w.arch][kind])[octets]
    elif kind == "e2m1":
        held = values(kind)[np.stack([octets & 15, octets >> 4], axis=-1).reshape(*lanes, -1)]
    else:  # 6 bits each
        bits = np.unpackbits(octets, axis=-1, bitorder="little").reshape(*lanes, -1, 6)
        held = values(kind)[np.packbits(bits, axis=-1, bitorder="little")[..., 0]]
    return held


def rows(held: Array, shape: Product, split: bool) -> Array:
    """[G, 64, n] elements of lanes to [G, blocks, m, k].

    With `split` a lane's first half precedes, in K, every lane's second half (the 8-bit types of f8f6f4).
    """
    parts: Array = held.reshape(len(held), shape.blocks, shape.groups, shape.m, 2 if split else 1, -1)
    out: Array = parts.transpose(0, 1, 3, 4, 2, 5).reshape(len(held), shape.blocks, shape.m, -1)
    return out


def registers(matrix: Array, shape: Product) -> Array:
    """[G, blocks, m, m] to [registers, G, 64]; blocks stand in lanes where a block does not fill them."""
    if shape.result == "f64":  # rows 4*register + g
        order, parts = (2, 1, 4, 0, 3, 5), matrix.reshape(len(matrix), 1, 4, 4, 1, 16)
    elif shape.m == 4:  # a block in every 4 lanes
        order, parts = (2, 4, 3, 0, 1, 5), matrix.reshape(len(matrix), shape.blocks, 1, 1, 4, 4)
    else:
        order, parts = (1, 2, 4, 0, 3, 5), matrix.reshape(len(matrix), shape.blocks, -1, LANES // shape.m, 4, shape.m)
    out: Array = parts.transpose(order).reshape(-1, len(matrix), LANES)
    return out


def scales(w: Group, i: Instruction, which: int, shape: Product) -> Array:
    """[G, 1, m, k] float64: 2**(byte - 127) for every 32 elements of K; op_sel and op_sel_hi choose the byte.

    A float constant gives its exponent.
    """
    low, high = i.modifiers.get("op_sel", [0, 0, 0]), i.modifiers.get("op_sel_hi")
    if not isinstance(low, list) or not isinstance(high, list):
        raise NotImplementedError(f"{i.text}: a scale's byte is chosen by op_sel and op_sel_hi")
    given = i.operands[4 + which]
    if given.kind == "i" or (given.kind == "f" and low[which] + high[which]):
        raise NotImplementedError(f"{i.text}: a scale is a vector register, or a float constant without op_sel")
    shift = 23 if given.kind == "f" else 8 * (low[which] + 2 * high[which])
    octet = (w.u32(given) >> U32(shift)) & U32(0xFF)
    value = np.where(octet == 0xFF, np.nan, np.exp2(octet.astype(np.float64) - 127))
    return np.repeat(rows(value[..., None], shape, False), SCALED, axis=-1)


def multiply(w: Group, i: Instruction, shape: Product, scaled: bool) -> None:
    """D[b] = A[b] x B[b] + C[b]; cbsz and abid give blocks of A that stand for others.

    Under MODE.FP16_OVFL an overflow of finite numbers gives the largest one, of integers the nearest.
    """
    allowed = {"cbsz", "blgp", "op_sel", "op_sel_hi"} if scaled else {"cbsz", "blgp", "abid"}
    if unknown := set(i.modifiers) - allowed:
        raise NotImplementedError(f"{i.text}: modifier {min(unknown)} of a matrix instruction")
    destination, a, b, c = i.operands[:4]
    cbsz, blgp, abid = i.number("cbsz"), i.number("blgp"), i.number("abid")
    kinds, narrow = (shape.a, shape.b), shape.a == "f8f6f4"
    if narrow:
        if max(cbsz, blgp) >= len(NARROW) or abid:
            raise NotImplementedError(f"{i.text}: cbsz, blgp and abid of f8f6f4")
        kinds = (NARROW[cbsz], NARROW[blgp])
    elif blgp or (1 << cbsz) > shape.blocks or abid >> cbsz:
        raise NotImplementedError(f"{i.text}: cbsz, blgp and abid")
    left, right = (
        rows(elements(w, operand, kind), shape, narrow and kind in ("fp8", "bf8"))
        for operand, kind in zip((a, b), kinds, strict=True)
    )
    if cbsz and not narrow:
        span = shape.blocks >> cbsz  # blocks that stand for the others
        left = left[:, np.arange(shape.blocks) % span + span * abid]
    if scaled:
        left, right = left * scales(w, i, 0, shape), right * scales(w, i, 1, shape)
    with np.errstate(all="ignore"):
        total = registers(left @ right.swapaxes(-1, -2), shape)
    saturate = w.waves.saturate[w.at]
    ends = _finite(left)[..., None] & _finite(right)[..., None, :] if saturate.any() else None
    if shape.result == "f64":
        added = np.stack([w.u64(_pair(c, word)).view(np.float64) for word in range(4)]) + total
        out = np.ascontiguousarray(added).view(U32).reshape(4, w.size, LANES, 2).transpose(0, 3, 1, 2)
        out = out.reshape(8, w.size, LANES)
    else:
        before = np.stack([w.u32(c, word if c.kind == "v" else 0) for word in range(len(total))])
        if shape.result == "i32":
            exact = total.astype(I64) + before.view(I32)
            bounded = np.clip(exact, np.iinfo(I32).min, np.iinfo(I32).max)
            out = np.where(saturate[:, None], bounded, exact).astype(I32).view(U32)  # or wraps
        else:
            with np.errstate(all="ignore"):
                number = np.asarray(total.astype(F32) + before.view(F32), F32)
            if ends is not None:
                finite = registers(ends, shape) & np.isfinite(before.view(F32)) & saturate[:, None]
                number = np.where(finite & np.isinf(number), np.copysign(np.finfo(F32).max, number), number)
            out = number.view(U32)
    if destination.count != len(out):
        raise NotImplementedError(f"{i.text}: {destination.count} registers where {len(out)} are written")
    w.waves.v[destination.index : destination.index + len(out), w.at] = out


def _finite(rows: Array) -> Array:
    """[G, blocks, m] of [G, blocks, m, k]: all of a row is finite."""
    whole: Array = np.asarray(np.isfinite(rows).all(axis=-1))
    return whole


def _pair(operand: Operand, word: int) -> Operand:
    """Register pair `word` of a float64 operand; a constant is itself."""
    return Operand("v", operand.index + 2 * word, 2) if operand.kind == "v" else operand


def _enter(name: str, archs: tuple[str, ...]) -> None:
    shape = product(name)
    for prefix, scaled in (("v_mfma_", False), ("v_mfma_scale_", True)):
        if scaled and shape.a != "f8f6f4":
            continue

        @handles(prefix + name)
        def handler(w: Group, i: Instruction, shape: Product = shape, scaled: bool = scaled) -> None:
            if w.arch not in archs:
                raise NotImplementedError(f"{i.name} is no instruction of {w.arch}")
            multiply(w, i, shape, scaled)


for _name in BOTH.split():
    _enter(_name, tuple(ONLY))
for _arch, _names in ONLY.items():
    for _name in _names.split():
        _enter(_name, (_arch,))
