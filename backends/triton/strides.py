"""Strides that 8 divides and 16 does not: Triton looks at whether 16 divides an integer, and no further.

A kernel that is told a common step as a constant, and gets the strides divided by it, loads the rows of a head dim of
120 by 16 bytes, not by 2, and no longer spills the 45 registers that its prompts spilled on a gfx942.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import triton
import triton.language as tl


def common_step(*strides: int) -> int:
    """The power of two that divides all strides, where that is not 16 or more; else 1.

    >>> common_step(72, 576), common_step(128, 1024), common_step(36, 72), common_step(0)
    (8, 1, 4, 1)
    """
    every = reduce(or_, strides)
    step = every & -every
    return step if 0 < step < 16 else 1


@triton.jit
def times(stride, STEP: tl.constexpr):
    """A stride that came divided by STEP."""
    return stride if STEP == 1 else tl.cast(stride, tl.int64) * STEP
