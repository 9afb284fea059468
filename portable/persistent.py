"""The padded steps of a plan slot over persistent tensors: one block of memory, and a view of it for each size.

A plan writes lengths, slots and the entries of the block table that changed into one pinned block. Its copy to the
device, and the kernel that puts the entries into the table, are captured for each size, and cost the host one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import Batch
from portable.kernel import Kernel
from portable.layer import UnsupportedError
from portable.lengths import Int32
from portable.mirror import NOTHING, Entries, Mirror, check_reach
from portable.padding import write_cu
from portable.platform.graphs import captured, capturing, plain
from portable.ragged import cdiv
from portable.sizes import Size
from portable.staging import Field, Staging

I32, I64 = torch.int32, torch.int64
NONE = -1  # an index that is no entry


def near(batch: Batch) -> bool:
    """Whether a step is on the host, which brings it to the device by one copy; else it is there already."""
    return batch.device.type == "cpu"


class Pads(NamedTuple):
    """What padding holds, as the chosen kernels declare it."""

    seq_len: int = 0
    slot: int = -1


class Turn(NamedTuple):
    """Where a plan writes a step on one of the host's two blocks."""

    cu_seqlens_q: Int32
    seq_lens: Int32
    slot_mapping: npt.NDArray[np.int64]
    causal: npt.NDArray[np.bool_]
    padding: npt.NDArray[np.bool_]
    bytes: torch.Tensor  # all of it, up to the table


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One size of a slot: the padded batch over persistent tensors, and where a plan writes it."""

    batch: Batch
    size: Size
    there: dict[str, torch.Tensor] = field(repr=False)
    turns: tuple[Turn, Turn] = field(repr=False)
    read: tuple[tuple[Int32, Int32], ...] = field(repr=False)  # of a derived step: rows of a table, and first columns
    bytes: torch.Tensor = field(repr=False)  # of the device, up to the table
    start: int
    bring: list[Callable[[], None]] = field(repr=False, default_factory=list)  # of each turn: its block, and pages

    @property
    def padding(self) -> torch.Tensor:
        """[T] bool on the device: tokens that are none of the step's; of a size `ahead`, and where padding has keys."""
        return self.there["padding"]

    @property
    def baked(self) -> dict[str, int]:
        """The numbers of the host that a captured graph freezes: the most that a step of the size may have."""
        batch = self.batch
        assert batch.block_table is not None
        return {
            "num_reqs": batch.num_reqs,
            "num_tokens": batch.num_tokens,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
            "page_size": batch.page_size,
            "block_table_width": batch.block_table.shape[1],
        }


def kind_of(batch: Batch) -> tuple[bool | None, bool, bool, int]:
    """What a graph freezes of a step beside its size."""
    causal = batch.causal if isinstance(batch.causal, bool) else None
    return causal, batch.slot_mapping is None, batch.self_attention, batch.page_size


class Room(NamedTuple):
    """What a plan slot takes of the device, for steps of so many requests and tokens, over tables of so many columns.

    >>> Room(reqs=256, tokens=8192, width=512).nbytes >> 10
    1113
    """

    reqs: int
    tokens: int
    width: int

    @property
    def rows(self) -> int:
        """As many for padding as for requests: it has no keys, so the host has none of their pages."""
        return 2 * self.reqs

    @property
    def entries(self) -> dict[str, Field]:
        """Of a step that changed: a page each for all requests, and a request of the longest."""
        capacity = self.reqs + self.width
        return {"index": Field((capacity,), I64), "page": Field((capacity,), I32)}

    @property
    def lens(self) -> int:
        """Bytes in front of the table."""
        return sum(each.nbytes for each in (_fields(self.rows, self.tokens) | self.entries).values())

    @property
    def known(self) -> Field:
        """The rows of the table that the host knows."""
        return Field((self.reqs * self.width,), I32)

    @property
    def nbytes(self) -> int:
        return self.lens + Field((self.rows * self.width,), I32).nbytes


class Persistent:
    """The memory of one plan slot.

    Args:
        reqs, tokens: of the largest step.
        seq_len: the longest sequence of a step.
        block: gives so many bytes of the device; None of them: they are allocated.
    """

    @plain()
    def __init__(
        self,
        reqs: int,
        tokens: int,
        seq_len: int,
        page_size: int,
        device: torch.device,
        block: Callable[[int], torch.Tensor | None] = lambda nbytes: None,
    ) -> None:
        self.tokens, self.seq_len, self.page_size, self.device = tokens, seq_len, page_size, device
        room = Room(reqs, tokens, cdiv(seq_len, page_size))
        self.rows, self.width = room.rows, room.width
        self.mirror = Mirror(reqs, self.width)
        self.filling = False  # a step is on its way, or failed there: what the last one brought is gone
        self._entries, lens, known = room.entries, room.lens, room.known
        more = room.nbytes - lens - known.nbytes
        self.staging = Staging(lens + known.nbytes, device, more=more, block=block(room.nbytes))
        capacity = self._entries["index"].shape[0]
        self._table_at = lens
        self._known = self.staging.views({"pages": known}, start=lens)
        self._changed = self.staging.views(self._entries, end=lens)
        self._count = [capacity, capacity]  # entries on the host's blocks
        cells_at = self.staging.block[lens:].view(I32)
        self._table = cells_at[: self.rows * self.width].view(self.rows, self.width)
        self._steps: dict[Any, Step] = {}
        self._last: tuple[Size, tuple[Any, ...], Step] | None = None

    def step_of(self, batch: Batch, size: Size) -> Step:
        """The size's step, of the same kind as `batch`: made once.

        Raises:
            ValueError: the step does not fit into the size, or the size is larger than this was made for.
            UnsupportedError: requests differ in being causal, in a size where their tokens may stand anywhere.
        """
        size.check(batch)
        kind, last = kind_of(batch), self._last
        if last is not None and last[0] is size and last[1] == kind:
            return last[2]
        found = self._steps.get((size, kind))
        if found is None:
            found = self._steps[size, kind] = self._made(batch, size)
        self._last = size, kind, found
        return found

    @plain()
    def _made(self, batch: Batch, size: Size) -> Step:
        rows, tokens, seq_len = size.rows, size.padded_tokens, size.seq_len or self.seq_len
        for name, value, limit in (
            ("rows", rows, self.rows), ("tokens", tokens, self.tokens), ("tokens in a sequence", seq_len, self.seq_len),
        ):  # fmt: skip
            if value > limit:
                raise ValueError(f"{size} has {value} {name} once padded, above the {limit} of the plan's slot")
        if batch.block_table is None:
            raise ValueError("block_table is None; a step that is padded to a size reads its keys from pages")
        if batch.page_size != self.page_size:
            raise ValueError(f"the batch has page_size {batch.page_size}; this slot was made for {self.page_size}")
        if not (size.uniform or isinstance(batch.causal, bool)):
            raise UnsupportedError(f"causal differs between requests; {size} says not which tokens are whose")
        views = self.staging.views(_fields(rows, tokens) | self._entries, end=self._table_at)
        there = views.there
        host_cu = np.minimum(np.arange(rows + 1) * size.queries, tokens).astype(np.int32)
        cu = there["cu_seqlens_q"] if not size.uniform else torch.tensor(host_cu, device=self.device)
        padded = replace(
            batch,
            cu_seqlens_q=cu,
            seq_lens=there["seq_lens"],
            block_table=self._table[:rows, : cdiv(seq_len, self.page_size)],
            slot_mapping=None if batch.slot_mapping is None else there["slot_mapping"],
            causal=batch.causal if isinstance(batch.causal, bool) else there["causal"],
            query_lens=np.full(rows, size.queries, np.int32),
            host_cu_seqlens_q=host_cu,
            host_seq_lens=np.full(rows, seq_len, np.int32),
            exact=False,
            is_prefilling=None,
            num_reqs=rows,
            num_tokens=tokens,
            padded_tokens=tokens,
            max_query_len=size.queries,
            max_seq_len=seq_len,
            view=None,
            pages=None,
        )
        blocks = self.staging.between(views.start, self._table_at)
        first, second = (
            Turn(here["cu_seqlens_q"], here["seq_lens"], here["slot_mapping"], here["causal"], here["padding"], block)
            for here, block in zip(views.here, blocks, strict=True)
        )
        read = tuple((here["rows"], here["first"]) for here in views.here)
        on_device = self.staging.block[views.start : self._table_at]
        return Step(padded, size, there, (first, second), read, on_device, views.start)

    def fill(self, step: Step, batch: Batch, pads: Pads, place: Kernel, collect: Kernel | None) -> None:
        """Bring a step to the device: one copy from the host, and of what is on the device already, one launch there.

        Args:
            place: puts entries into the table; used by the first step of a size, whose capture the others replay.
        """
        live, tokens, size = batch.num_reqs, batch.num_tokens, step.size
        here = near(batch)
        if here:
            entries = self.mirror.changes(batch, size.ahead)
        else:
            check_reach(batch, size.ahead, self.width)
            entries = NOTHING
        self.filling = True
        turn = self.staging.turn()
        cu, seq_lens, slots, causal, padding, _ = step.turns[turn]
        if not size.uniform:
            write_cu(batch, size, cu)
        seq_lens[:live] = batch.host_seq_lens[:live] if batch.exact or not here else batch.seq_lens[:live].numpy()
        if live < size.rows:
            seq_lens[live:] = pads.seq_len
        if size.ahead or pads.seq_len:
            padding[:tokens] = False
            padding[tokens:] = True
        if batch.slot_mapping is not None:
            if tokens < size.padded_tokens:
                slots[tokens:] = pads.slot
            if here:
                slots[:tokens] = batch.slot_mapping.numpy()[:tokens]
        if isinstance(batch.causal, torch.Tensor):
            if here:
                causal[:live] = batch.causal[:live].numpy()
            causal[live:] = True
        if not here:
            rows, first = step.read[turn]
            view = None if batch.view is None or batch.view.picked else batch.view
            rows[:live], first[:live] = (np.arange(live), 0) if view is None else (view.rows, view.first_page)
            rows[live:] = NONE
        few = self._enter(entries, turn)
        if few and step.bring:
            step.bring[turn]()
            self.staging.sent()
        else:
            self.staging.send(step.start, self._table_at + (0 if few else self._whole(turn)))
        if not step.bring:
            self._capture(step, place)
        if not here:
            assert collect is not None
            self._collect(step, batch, collect)

    def _capture(self, step: Step, place: Kernel) -> None:
        """What brings later steps of a size; of this one, whose block is there, the pages alone."""
        self._place(place)
        work = [partial(self._bring, step, turn, place) for turn in (0, 1)]
        step.bring[:] = [captured(each, self.device) for each in work]

    def _bring(self, step: Step, turn: int, place: Kernel) -> None:
        self.staging.copy(step.bytes, step.turns[turn].bytes)
        if self._count[turn] or capturing(self.device):  # a graph is replayed for steps with entries too
            self._place(place)

    def _place(self, place: Kernel) -> None:
        """Entries that came with a step into the table; on the device."""
        place.run(*self._changed.there.values(), self._table.view(-1))

    def _enter(self, entries: Entries | None, turn: int) -> bool:
        """Write entries to the block of the host; False where they are too many, and the whole table is due."""
        index, page = self._changed.here[turn].values()
        few = entries is not None and entries[0].size <= index.size
        count = 0
        if few and entries is not None:
            count = entries[0].size
            if count:
                index[:count], page[:count] = entries
        index[count : self._count[turn]] = NONE
        self._count[turn] = count
        return few

    def _whole(self, turn: int) -> int:
        """The table into the block of the host; how many bytes that are."""
        pages = self.mirror.whole()
        self._known.here[turn]["pages"][: pages.size] = pages
        return pages.nbytes

    def _collect(self, step: Step, batch: Batch, collect: Kernel) -> None:
        """What an engine has on the device, by one launch."""
        live, tokens, there, copies = batch.num_reqs, batch.num_tokens, step.there, []
        assert batch.block_table is not None
        self.mirror.forget(live)
        if not batch.exact:
            copies.append((batch.seq_lens[:live], there["seq_lens"][:live]))
        if batch.slot_mapping is not None:
            copies.append((batch.slot_mapping[:tokens], there["slot_mapping"][:tokens]))
        if isinstance(batch.causal, torch.Tensor):
            copies.append((batch.causal[:live], there["causal"][:live]))
        table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
        copies = [(source.contiguous(), target) for source, target in copies]
        collect.run(table, there["rows"], there["first"], step.batch.block_table, 0, None, 1, None, copies)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.staging.nbytes


def _fields(rows: int, tokens: int) -> dict[str, Field]:
    return {
        "cu_seqlens_q": Field((rows + 1,), I32),
        "seq_lens": Field((rows,), I32),
        "slot_mapping": Field((tokens,), I64),
        "causal": Field((rows,), torch.bool),
        "padding": Field((tokens,), torch.bool),
        "rows": Field((rows,), I32),
        "first": Field((rows,), I32),
    }
