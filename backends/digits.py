"""Every cache layout as one address: page, the token's offset in two digits, the head, and the column in two digits.

`strided` has one digit of each; the packed layouts put x elements (16 bytes) of columns or of offsets last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Digits(NamedTuple):
    """How an element is found: strides of (page, offset's digits, head, column's digits)."""

    strides: tuple[int, int, int, int, int, int]
    packed_offset: int  # the second digit's base, 1 where there is none
    packed_column: int


class Pages(NamedTuple):
    """The pages of K or V as the kernels take them."""

    tensor: torch.Tensor
    strides: tuple[int, int, int, int, int, int]
    packed_offset: int
    packed_column: int


def pages_of(pages: torch.Tensor, part: str, layout: str) -> Pages:
    """The digits of K ("k") or V ("v") in a layout; MLA's pages have one head."""
    return Pages(pages, *digits_of(pages.shape, pages.stride(), part, layout))


def digits_of(shape: Sequence[int], s: tuple[int, ...], part: str, layout: str) -> Digits:
    """`pages_of`, of pages with such sizes and strides."""
    if layout == "strided":
        page, offset, *head, column = s
        return Digits((page, offset, 0, head[0] if head else 0, column, 0), 1, 1)
    if part == "k":  # [pages, Hkv, D/x, page_size, x]
        return Digits((s[0], s[3], 0, s[1], s[2], s[4]), 1, shape[4])
    if layout == "k_packed":  # [pages, Hkv, D, page_size]
        return Digits((s[0], s[3], 0, s[1], s[2], 0), 1, 1)
    return Digits((s[0], s[2], s[4], s[1], s[3], 0), shape[4], 1)  # [pages, Hkv, page_size/x, D, x]
