"""Which program does which work, so that programs that read the same keys and values share an L2.

A group of AMD's dies (XCDs) has an L2 each, and hardware deals workgroups to them in turn: workgroup i runs on XCD
i mod `Target.xcds` (8 on a whole MI300X, fewer in its partitions, 1 where one L2 serves all). A kernel launches
`groups * items` programs on one axis, where the programs of a group read the same K and V, and asks `xcd_order` which
(group, item) it is:

    group, item = xcd_order(tl.program_id(0), items, GROUPS, XCDS)

As many whole groups as there are XCDs are dealt one to each, rounds of them; the groups that are left share the XCDs
evenly: 2 groups on 8 XCDs have 4 each, 6 groups are 4 with 2 XCDs each and then 2 with 4 each. The items of a group
run in order, so the heavy ones are best first. With one XCD the order is group by group.

Used by the prefill and the paged kernels; `order` is the same in Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = 32  # XCDs; an MI300X has 8
LEVELS = tl.constexpr(6)  # divisor chains from there to 1


@triton.jit
def xcd_order(program, items, GROUPS: tl.constexpr, XCDS: tl.constexpr):
    """(group, item) of one of `GROUPS * items` programs, a bijection; see the module's text.

    Args:
        program: the program's linear id, 0 to GROUPS * items - 1.
        items: programs of a group; any integer.
        GROUPS: what shares K and V, usually the KV heads.
        XCDS: `Target.xcds`.
    """
    group, item = program, program
    for level in tl.static_range(LEVELS):
        group, item = _deal(program, items, group, item, GROUPS, _width(XCDS, level), _width(XCDS, level - 1))
    return group, item


@triton.jit
def _deal(program, items, group, item, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr):
    FIRST: tl.constexpr = GROUPS // WIDER * WIDER if WIDER else 0
    END: tl.constexpr = GROUPS // WIDTH * WIDTH if WIDTH else 0
    if WIDTH and FIRST < END:
        place = program - FIRST * items
        turn = place // WIDTH
        if WIDTH == END - FIRST:
            dealt, turn_item = FIRST + place % WIDTH, turn
        else:
            dealt, turn_item = FIRST + turn // items * WIDTH + place % WIDTH, turn % items
        if FIRST:
            group, item = tl.where(place >= 0, dealt, group), tl.where(place >= 0, turn_item, item)
        else:
            group, item = dealt, turn_item
    return group, item


@triton.constexpr_function
def _width(xcds, level):
    """How many groups are dealt at a time: all XCDs, then the largest divisor of what came before; 0 beside them."""
    width = xcds if level >= 0 else 0
    for _ in range(level):
        divisor = width - 1
        while divisor > 0 and width % divisor:
            divisor = divisor - 1
        width = divisor
    return max(width, 0)


def widths(xcds: int) -> tuple[int, ...]:
    """How many groups are dealt at a time, in the order of the programs.

    >>> widths(8), widths(6), widths(1)
    ((8, 4, 2, 1), (6, 3, 1), (1,))
    """
    if not 1 <= xcds <= MOST:
        raise ValueError(f"xcds is {xcds}; it must be 1 to {MOST}")
    found = (_width(xcds, level) for level in range(LEVELS.value))
    return tuple(width for width in found if width)


def order(program: int, items: int, groups: int, xcds: int) -> tuple[int, int]:
    """What `xcd_order` computes.

    >>> [order(program, items=2, groups=3, xcds=2) for program in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    if not 0 <= program < groups * items:
        raise ValueError(f"program is {program}; it must be 0 to {groups * items - 1}")
    first = 0
    for width in widths(xcds):
        dealt = (groups - first) // width * width
        place = program - first * items
        if place < dealt * items:
            turn, lane = divmod(place, width)
            return first + turn // items * width + lane, turn % items
        first += dealt
    raise AssertionError("the last width is 1, which deals every group")
