"""What a wrong kernel leaves behind that copies pages or states, or that changes a step's metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from portable.conformance.inputs import storage_of

Moves = list[tuple[int, int]]  # (from, to), in order
Answer = TypeVar("Answer")

AT_ONCE = "reads what was there before the list"


def explaining(answers: Iterable[tuple[str, Answer]], alike: Callable[[Answer], bool]) -> tuple[str, ...]:
    """The faults whose own result is what was found."""
    return tuple(name for name, answer in answers if alike(answer))


def moved_wrongly(pairs: Moves, count: int) -> Iterator[tuple[str, Moves]]:
    """What is copied in place of the pairs, of which negative ones copy nothing, among `count` pages or slots.

    >>> dict(moved_wrongly([(1, 0), (-1, 2)], 4))["-1 taken for the last one"]
    [(1, 0), (3, 2)]
    """
    live = [pair for pair in pairs if min(pair) >= 0]
    yield "nothing copied", []
    if live != pairs:
        yield "-1 taken for the last one", [(come % count, go % count) for come, go in pairs]
        yield "-1 taken for the first one", [(max(0, come), max(0, go)) for come, go in pairs]
    yield "from and to swapped", [(go, come) for come, go in live]
    if len(live) > 1:
        yield "the last pair left out", live[:-1]
        yield "only the first pair copied", live[:1]
        yield "the pairs in reverse order", live[::-1]
    yield "to one too far", [(come, go + 1) for come, go in live if go + 1 < count]
    yield "from one too far", [(come + 1, go) for come, go in live if come + 1 < count]


def move(source: torch.Tensor, target: torch.Tensor, moves: Moves, at_once: bool = False) -> None:
    """Whole rows of `source` to rows of `target`, one after another, or all from what was there before."""
    old = source.clone() if at_once else source
    for come, go in moves:
        target[go] = old[come]


Pool = Sequence["torch.Tensor | None"]
Memory = dict[int, torch.Tensor]  # address of a storage -> its bytes


def memory_of(*tensors: torch.Tensor | None) -> Memory:
    """A copy of the memory that the tensors are views of; K and V may share theirs."""
    given = [tensor for tensor in tensors if tensor is not None]
    return {each.untyped_storage().data_ptr(): storage_of(each, torch.uint8).clone() for each in given}


def same(one: Memory, other: Memory) -> bool:
    return all(torch.equal(bytes_, other[at]) for at, bytes_ in one.items())


def _over(like: torch.Tensor, memory: Memory) -> torch.Tensor:
    """The same view over the bytes that are kept for its storage."""
    storage = memory[like.untyped_storage().data_ptr()].untyped_storage()
    return torch.tensor([], dtype=like.dtype, device=like.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )


def pages_wrongly(source: Pool, target: Pool, before: Memory, pairs: Moves) -> Iterator[tuple[str, Memory]]:
    """The memory of both pools after each fault of a copy of pages."""
    parts = [(come, go) for come, go in zip(source, target, strict=True) if come is not None and go is not None]

    def after(*moves: Moves) -> Memory:
        now = {at: bytes_.clone() for at, bytes_ in before.items()}
        for (come, go), listed in zip(parts, moves, strict=True):
            move(_over(come, now), _over(go, now), listed)
        return now

    live = [pair for pair in pairs if min(pair) >= 0]
    for name, moves in moved_wrongly(pairs, len(parts[0][1])):
        yield name, after(*[moves] * len(parts))
    if len(parts) == 2:
        yield "V not copied", after(live, [])
        yield "K not copied", after([], live)


def states_wrongly(
    pools: Sequence[torch.Tensor], before: Memory, groups: Sequence[Moves], rest: Moves
) -> Iterator[tuple[str, Memory]]:
    """The memory of pools [slots, ...] after each fault of copies; pool i belongs to group i % len(groups).

    `rest` are the pairs behind the last group's.
    """

    def after(moves: Callable[[int], Moves], at_once: bool = False) -> Memory:
        now = {at: bytes_.clone() for at, bytes_ in before.items()}
        for i, pool in enumerate(pools):
            view = _over(pool, now)
            move(view, view, [pair for pair in moves(i) if min(pair) >= 0], at_once)
        return now

    count, size = len(groups), len(pools[0])
    yield AT_ONCE, after(lambda i: groups[i % count], at_once=True)
    wrong = [dict(moved_wrongly(listed, size)) for listed in groups]
    for name in wrong[0]:
        moves = [each.get(name, []) for each in wrong]
        yield name, after(lambda i, moves=moves: moves[i % count])  # type: ignore[misc]
    every = [pair for listed in groups for pair in listed]
    yield "pairs of no group copied", after(lambda i: [*groups[i % count], *(rest if i % count == count - 1 else [])])
    if count > 1:
        yield "pairs of every group copied", after(lambda i: every)
        yield "pairs of the first group for all", after(lambda i: groups[0])
        yield "pairs of another group", after(lambda i: groups[(i + 1) % count])
    if len(pools) > count:
        yield "only the first pool of a group", after(lambda i: groups[i] if i < count else [])


def cells_wrongly(cells: torch.Tensor, index: list[int], pages: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """A table [n] after each fault of a refresh by entries (place, page); places that are not in it change nothing."""
    count = len(cells)

    def after(entries: Iterable[tuple[int, int]]) -> torch.Tensor:
        made = cells.clone()
        for at, page in entries:
            if 0 <= at < count:
                made[at] = page
        return made

    entries = list(zip(index, pages, strict=True))
    live = [entry for entry in entries if 0 <= entry[0] < count]
    yield "cells not written", after([])
    if any(at < 0 for at in index):
        yield "place -1 written", after((at % count if at < 0 else at, page) for at, page in entries)
        yield "place -1 written, to place 0", after((max(0, at), page) for at, page in entries)
        kept = [at for at in index if at >= 0]
        yield "holes closed up", after(zip(kept, pages, strict=False))
    if any(at >= count for at in index):
        yield "place past the end wraps", after((at % count if at >= count else at, page) for at, page in entries)
        yield "place past the end is the last", after((min(at, count - 1), page) for at, page in entries)
    yield "places one too far", after((at + 1, page) for at, page in live)
    yield "place and page swapped", after((page, at) for at, page in live)
    yield "the last entries left out", after(live[: -(len(live) % 64) or None] if len(live) > 64 else live[:-1])


Step = tuple[list[int], list[int], "list[int] | None"]  # lengths, slots and positions afterwards


def steps_wrongly(
    lens: list[int], table: list[list[int]], page_size: int, most: int, slots: list[int], positions: list[int] | None
) -> Iterator[tuple[str, Step]]:
    """What is left after each fault of an advance of lengths by one; `slots` and `positions` are those before."""

    def after(
        grows: Callable[[int], bool] = lambda length: 0 < length < most,
        slot: Callable[[int, list[int]], int] = lambda at, row: row[at // page_size] * page_size + at % page_size,
        at: int = 0,
        by: int = 1,
        none: Callable[[int], int] = lambda before: -1,
        idle: Callable[[int, int], int] = lambda before, length: before,
        place: int = 0,
    ) -> Step:
        new, found, places = [], [], []
        for r, (length, row) in enumerate(zip(lens, table, strict=True)):
            live = grows(length)
            new.append(length + by * live)
            inside = min(max(0, length + at), len(row) * page_size - 1)
            found.append(slot(inside, row) if live else none(slots[r]))
            if positions is not None:
                places.append(length + place if live else idle(positions[r], length))
        return new, found, None if positions is None else places

    def cut(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    right = after()
    yield "nothing advanced", (lens, slots, positions)
    yield "lengths not advanced", after(by=0)
    yield "requests without keys advanced", after(grows=lambda length: length < most)
    yield "full requests advanced", after(grows=lambda length: length > 0)
    yield "every request advanced", after(grows=lambda length: True)
    yield "the slot behind", after(at=1)
    yield "the slot before", after(at=-1)
    yield "slot in 32 bits", (right[0], [cut(slot) for slot in right[1]], right[2])
    yield "page and offset swapped", after(slot=lambda at, row: row[at % len(row)] * page_size + at // page_size)
    yield "slots without the page table", after(slot=lambda at, row: at)
    yield "page for slot", after(slot=lambda at, row: row[at // page_size])
    yield "the slot of a request that stays is kept", after(none=lambda before: before)
    yield "the slot of a request that stays is 0", after(none=lambda before: 0)
    if positions is not None:
        yield "positions not written", (right[0], right[1], positions)
        yield "positions one too far", after(place=1)
        yield "positions of requests that stay written", after(idle=lambda before, length: length)
