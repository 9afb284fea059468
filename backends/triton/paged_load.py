"""How the paged kernel reads a cache: rows of its pages, their numbers, and the pages of a tile's keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portable.backends.triton.fp8 import decode


def even(pages: torch.Tensor) -> bool:
    """Whether two bytes of a row can be read as one number of 16 bits."""
    return pages.shape[3] % 2 == 0 and not any(n % 2 for n in (*pages.stride()[:3], pages.storage_offset()))


@triton.jit
def load_rows(base, page, offset, page_stride, row_stride, columns, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Rows [n, PAD] of a cache; `page` is a scalar where all rows are in one page."""
    if page.type.is_block():
        at = base + (page.to(tl.int64) * page_stride + offset * row_stride)[:, None] + columns[None, :]
    else:
        at = base + page.to(tl.int64) * page_stride + ((offset * row_stride)[:, None] + columns[None, :])
    return tl.load(at) if WIDTH == PAD else tl.load(at, mask=columns[None, :] < WIDTH, other=0)


@triton.jit
def number(stored, like: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """What is stored as numbers to multiply; an fp8 value is exact in float16."""
    if FP8 is None:
        value = stored
    elif NATIVE is not None:
        value = stored.to(NATIVE, bitcast=True).to(like)
    else:
        value = decode(stored, FP8[0], FP8[1], FP8[2], FP8[3]).to(like)
    return value


@triton.jit
def half(pair, HIGH: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """The low or the high byte of 16 bits, in float16."""
    if FP8[0] == 2 and not FP8[3]:  # e5m2 is the upper half of float16
        value = (pair & -256 if HIGH else pair << 8).to(tl.float16, bitcast=True)
    else:
        byte = (pair >> 8 if HIGH else pair) & 0xFF
        if NATIVE is not None:
            value = byte.to(tl.uint8).to(NATIVE, bitcast=True).to(tl.float16)
        else:  # the exponent as float16 reads it is 15 - bias too small
            bits = (byte & 0x7F) << (10 - FP8[0]) | (byte & 0x80) << 8
            value = bits.to(tl.float16, bitcast=True) * tl.full([], 2.0 ** (15 - FP8[1]), tl.float16)
            no_number = byte == 0x80 if FP8[3] else (byte & 0x7F) > FP8[2]
            value = tl.where(no_number, float("nan"), value)
    return value


@triton.jit
def known(keys, low, high, MASKED: tl.constexpr, LEFT: tl.constexpr):
    """The keys, and in place of those outside of [low, high) one within."""
    if MASKED:
        keys = tl.minimum(keys, high - 1)
        if LEFT:
            keys = tl.maximum(keys, low)
    return keys


@triton.jit
def load_pages(table, key, low, high, LEFT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of `BLOCK_N` keys, or the one of all. Loaded an iteration ahead, by hand: Triton would take
    a load that others wait for into the pipeline, and leave one stage of K and V of four."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + tl.maximum(tl.minimum(key, high - 1), 0).to(tl.uint32) // PAGE)
    else:
        keys = tl.maximum(known(key + tl.arange(0, BLOCK_N), low, high, True, LEFT), 0)
        page = tl.load(table + keys.to(tl.uint32) // PAGE)
    return page
