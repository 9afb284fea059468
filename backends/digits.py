"""Every cache layout as one address: page, the token's offset in two digits, the head, and the column in two digits.

`strided` has one digit of each; the packed layouts put x elements (16 bytes) of columns or of offsets last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pages(NamedTuple):
    """The pages of K or V as the kernels take them: strides of (page, offset's digits, head, column's digits)."""

    tensor: torch.Tensor
    strides: tuple[int, int, int, int, int, int]
    packed_offset: int  # the second digit's base, 1 where there is none
    packed_column: int


def pages_of(pages: torch.Tensor, part: str, layout: str) -> Pages:
    """The digits of K ("k") or V ("v") in a layout; MLA's pages have one head."""
    s = pages.stride()
    if layout == "strided":
        page, offset, *head, column = s
        return Pages(pages, (page, offset, 0, head[0] if head else 0, column, 0), 1, 1)
    if part == "k":  # [pages, Hkv, D/x, page_size, x]
        return Pages(pages, (s[0], s[3], 0, s[1], s[2], s[4]), 1, pages.shape[4])
    if layout == "k_packed":  # [pages, Hkv, D, page_size]
        return Pages(pages, (s[0], s[3], 0, s[1], s[2], 0), 1, 1)
    return Pages(pages, (s[0], s[2], s[4], s[1], s[3], 0), pages.shape[4], 1)  # [pages, Hkv, page_size/x, D, x]
