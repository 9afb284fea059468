"""Which program does which work, so that programs that read the same keys and values share an L2.

A group of AMD's dies (XCDs) has an L2 each, and hardware deals workgroups to them in turn: workgroup i runs on XCD
i mod `Target.xcds` (8 on a whole MI300X, fewer in its partitions, 1 where one L2 serves all). A kernel has a list of
items, the heaviest first, that each KV head goes through; `room` says for how many of them programs are launched.

Each XCD gets KV_HEADS of the KV_HEADS * XCDS pairs (head, item mod XCDS): one head where there are as many heads as
XCDs, never more than it must, and as many heavy items as any other XCD. Where `RUN` items that follow each other read
the same keys, as the tiles of one request do, they are on one XCD, one right after the other. With one XCD and a run
of one the head goes fastest.

Used by the prefill and the paged kernels; `order` is the same in Python.
"""

from __future__ import annotations

import triton


@triton.jit
def xcd_order(program, KV_HEADS, XCDS, RUN):
    """(head, item) of a program; see the module's text."""
    turn = program // XCDS
    pair = program % XCDS * KV_HEADS + turn // RUN % KV_HEADS
    return pair // XCDS, (turn // (RUN * KV_HEADS) * XCDS + pair % XCDS) * RUN + turn % RUN


def order(program: int, kv_heads: int, xcds: int, run: int = 1) -> tuple[int, int]:
    """What `xcd_order` computes.

    >>> [order(program, kv_heads=2, xcds=2) for program in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    """
    found: tuple[int, int] = xcd_order.fn(program, kv_heads, xcds, run)
    return found


def run_of(tiles: int, xcds: int) -> int:
    """The run for requests of up to `tiles` tiles; at most 8, so that few requests still have a run for every XCD.

    >>> run_of(6, xcds=8), run_of(1, xcds=8), run_of(6, xcds=1)
    (4, 1, 1)
    """
    return 1 if xcds == 1 else min(8, 1 << (max(tiles, 1).bit_length() - 1))


def room(items: int, xcds: int, run: int = 1) -> int:
    """Items that programs are launched for: as many, rounded up so that every XCD has as many turns.

    >>> room(17, xcds=8), room(17, xcds=1)
    (24, 17)
    """
    return -(-items // (xcds * run)) * xcds * run
