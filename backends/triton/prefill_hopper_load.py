"""What the programs of prefill_hopper_kernel.py work on, and the warp that fetches it: Gluon, see there."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

GROUPS = gl.constexpr(2)  # of 128 threads
ROWS = gl.constexpr(64)  # of q, in each group
copy: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name until Triton 3.6


@gluon.jit
def _item(items, i, total, HEADS: gl.constexpr, LISTED: gl.constexpr):
    """Tile and head of the i-th item of this program.

    All heads of the heaviest tile first, and the order of the programs reversed in every other round, so that each gets
    as much; or as they are listed, which is by program already.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    if LISTED:
        at = items + gl.minimum(i * programs + program, total - 1) * 8
        head = gl.load(at + 6)
    else:
        index = gl.minimum(i * programs + gl.where(i % 2 == 0, program, programs - 1 - program), total - 1)
        at = items + index // HEADS * 8
        head = index % HEADS
    return at, head


@gluon.jit
def rounds(total, LISTED: gl.constexpr):
    """The number of items of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    full = total // programs
    place = program
    if not LISTED:
        place = gl.where(full % 2 == 0, program, programs - 1 - program)
    return full + (place < total % programs).to(gl.int32)


@gluon.jit
def load_item(
    items, i, total, causal, left, right, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    LEFT: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """What is to be done, the last block of keys and the number of blocks; at least one, if only to be masked."""
    at, head = _item(items, i, total, HEADS, LISTED)
    q_row = gl.load(at)
    rows = gl.load(at + 1)
    k_row = gl.load(at + 2)
    length = gl.load(at + 3)
    position = gl.load(at + 4)
    request = gl.load(at + 5)
    if CAUSAL is None:
        right = gl.where(gl.load(causal + request) != 0, gl.minimum(right, 0), right)
    elif CAUSAL:
        right = gl.minimum(right, 0)
    last = gl.maximum(gl.minimum(position + rows - 1 + right, length - 1), 0) // BLOCK_N
    start = 0
    if LEFT:
        start = gl.minimum(gl.maximum(position - left, 0) // BLOCK_N, last)
    return head, q_row, rows, k_row, length, position, request, right, last, last + 1 - start


@gluon.jit
def _copy(maps, row, column, ready, rings, place, first, ROWS: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Copy rows to the places of both parts of a head's columns; the second has REST of them, or none."""
    copy(maps[0], [row, column], ready, rings[0].index(place).slice(first, ROWS))
    if REST:
        copy(maps[1], [row, column + WIDTH], ready, rings[1].index(place).slice(first, ROWS))


@gluon.jit
def _fill(
    place, maps, rings, ready, free, block, at, pages, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Copy a block of keys or values to a place of the ring, once that is free; page by page where there are pages."""
    stage = place % STAGES
    parity = ((place // STAGES) & 1) ^ 1
    row, column, page_rows = at
    NBYTES: gl.constexpr = maps[0].block_type.nbytes * (WIDTH + REST) // WIDTH  # of one copy of both parts
    if PAGE is None:
        mbarrier.wait(free.index(stage), parity)
        mbarrier.expect(ready.index(stage), NBYTES)
        _copy(maps, row + block * BLOCK_N, column, ready.index(stage), rings, stage, 0, BLOCK_N, WIDTH, REST)
    else:
        PIECE: gl.constexpr = min(PAGE, BLOCK_N)
        table, final = pages
        rows = ()
        for piece in gl.static_range(BLOCK_N // PIECE):  # all page ids are on their way before the wait
            key = block * BLOCK_N + piece * PIECE
            page = gl.load(table + gl.minimum(key // PAGE, final))
            rows = rows + (row + page * page_rows + key % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(stage), parity)
        mbarrier.expect(ready.index(stage), NBYTES * (BLOCK_N // PIECE))
        for piece in gl.static_range(BLOCK_N // PIECE):
            _copy(maps, rows[piece], column, ready.index(stage), rings, stage, piece * PIECE, PIECE, WIDTH, REST)


@gluon.jit
def barriers(N: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr):
    """`ready` and `free` of a ring of N places, and how many arrive at each."""
    ready = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(N):
        mbarrier.init(ready.index(place), count=READY)
        mbarrier.init(free.index(place), count=FREE)
    return ready, free


@gluon.jit
def produce(
    q, k, v, rings, ready, free, items, total, causal, left, right, table, table_row, q_head, q_step, k_head,
    k_step, k_page, v_head, v_step, v_page, HEADS: gl.constexpr, RATIO: gl.constexpr,
    WIDTH: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """The producer warp: the keys one block ahead of the values, as they are used."""
    q_rings, k_rings, v_ring = rings
    v_maps, v_rings = (v, v), (v_ring, v_ring)
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    place = 0
    for i in range(rounds(total, LISTED)):
        head, q_row, _, k_row, length, _, request, _, last, blocks = load_item(
            items, i, total, causal, left, right, HEADS, BLOCK_N, CAUSAL, LEFT, LISTED
        )
        kv_head = head // RATIO
        k_at = (k_row + kv_head * k_step, kv_head * k_head, k_page)
        v_at = (k_row + kv_head * v_step, kv_head * v_head, v_page)
        pages = (table, 0)
        if PAGE is not None:
            pages = (table + request.to(gl.int64) * table_row, gl.maximum(length - 1, 0) // PAGE)
        _fill(place, k, k_rings, k_ready, k_free, last, k_at, pages, BLOCK_N, WIDTH, REST, STAGES, PAGE)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(q_free.index(group), (i & 1) ^ 1)
            mbarrier.expect(q_ready.index(group), q[0].block_type.nbytes * (WIDTH + REST) // WIDTH)
            row = q_row + head * q_step + group * ROWS
            _copy(q, row, head * q_head, q_ready.index(group), q_rings, group, 0, ROWS, WIDTH, REST)
        for block in range(1, blocks):
            now = last - block
            _fill(
                place + block, k, k_rings, k_ready, k_free, now, k_at, pages, BLOCK_N, WIDTH, REST, STAGES, PAGE
            )  # fmt: skip
            _fill(
                place + block - 1, v_maps, v_rings, v_ready, v_free, now + 1, v_at, pages, BLOCK_N, WIDTH, 0, STAGES,
                PAGE,
            )  # fmt: skip
        place += blocks
        now = last + 1 - blocks
        _fill(place - 1, v_maps, v_rings, v_ready, v_free, now, v_at, pages, BLOCK_N, WIDTH, 0, STAGES, PAGE)
