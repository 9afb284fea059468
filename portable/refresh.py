"""What a plan of a padded step repeats on the device: its block and new pages, and all that the kernels prepare.

Both are captured once for each size of a slot. A plan is then a launch of each, and what a graph of the caller reads,
of kernels' preparations too, lies where it lay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from portable.batch import Batch
from portable.check import step_facts
from portable.kernel import Kernel, Needs, Op, Segment
from portable.layer import Layer
from portable.mha import Choose, prepare, segment_of
from portable.persistent import Pads, Persistent, Step, near
from portable.platform.graphs import capturing, plain, repeatable, tensors
from portable.sizes import Size


@dataclass(slots=True, eq=False)
class Work:
    """One size of a slot: its kernels, for calls with and without an LSE, and what each plan repeats."""

    step: Step
    write: Kernel | None
    place: Kernel
    pads: Pads
    ways: dict[bool, Segment] = field(default_factory=dict)
    again: list[Callable[[], None]] = field(default_factory=list)  # of each kernel that prepares
    baked: Mapping[str, int] = field(default_factory=dict)
    facts: tuple[Any, ...] = ()  # what checks look at
    segments: Any = None  # as a plan holds them
    kept: list[Any] = field(default_factory=list)


class Refresh:
    """The padded steps of one plan slot, of attention over pages."""

    def __init__(self, layer: Layer, choose: Choose, op: Op, memory: Persistent) -> None:
        self.layer, self.choose, self.op, self.memory = layer, choose, op, memory
        self._works: dict[Step, Work] = {}
        self._now: Work | None = None
        self._advanced = 0  # tokens since the newest plan
        self._grown: dict[bool, Segment] = {}  # of `advance` since the newest plan, instead of what that prepared
        self._recorded = False  # whether that was part of a capture, which computes nothing itself

    def plan(self, batch: Batch, size: Size) -> Work:
        """Bring a step to where graphs of its size read it.

        Raises:
            RuntimeError: a graph is being captured.
            UnsupportedError: no kernel can be captured for the size.
            ValueError: the step does not fit.
        """
        if capturing(self.memory.device):
            raise RuntimeError("plan was called while a graph is captured; plan before the capture, and before replays")
        step = self.memory.step_of(batch, size)
        if self.memory.filling:  # of the last step that failed nobody knows what arrived
            self.memory.mirror.forget(0)
        work = self._works.get(step)
        if work is not None:
            self.memory.fill(step, batch, work.pads, work.place, self._collect(batch))
            for again in work.again:
                again()
        else:
            work = self._works[step] = self._made(step, batch)
        self._now, self._advanced, self.memory.filling = work, 0, False
        self._grown = {}
        return work

    def advance(self) -> torch.Tensor:
        """The newest plan's step with a token more for each request: the new tokens' positions.

        What it launches may be captured, and does in every replay what it does now.
        """
        work = self._now
        assert work is not None
        self._check_grown()
        step, batch = work.step, work.step.batch
        if batch.padded_reqs != batch.padded_tokens:
            raise ValueError(f"the plan is of {step.size}; a step that advances has one new token for each request")
        if not step.size.ahead:
            raise ValueError(f"the plan is of {step.size} with ahead 0; say how many tokens its requests grow by")
        if self._advanced >= step.size.ahead:
            raise ValueError(f"the plan has advanced {self._advanced} times; {step.size} brings the pages of no more")
        self._advanced += 1
        assert batch.block_table is not None
        positions = torch.zeros(batch.padded_reqs, dtype=torch.int64, device=self.memory.device)
        slots = torch.empty_like(positions) if batch.slot_mapping is None else batch.slot_mapping
        self.choose(Op.ADVANCE, Needs(graph=step.size.level)).run(
            batch.seq_lens, batch.block_table, slots, positions, batch.page_size, batch.max_seq_len
        )
        if work.pads != Pads():  # which the kernel takes for requests, or does not write
            for tensor, pad in ((batch.seq_lens, work.pads.seq_len), (slots, work.pads.slot), (positions, 0)):
                tensor.masked_fill_(step.padding, pad)
        made: dict[int, Segment] = {}
        for segment in work.ways.values():
            if id(segment) not in made:
                made[id(segment)] = replace(segment, prepared=prepare(segment, self.layer))
        self._grown = {lse: made[id(segment)] for lse, segment in work.ways.items()}
        self._recorded = capturing(self.memory.device)
        if self._recorded:
            work.kept.append(self._grown)  # the graph may be replayed long after the next plan
        return positions

    def _check_grown(self) -> None:
        """Forget what grew in a capture once that is over; what grew before one is none of its graph's."""
        if self._grown and self._recorded is not capturing(self.memory.device):
            if not self._recorded:
                raise RuntimeError("the plan advanced before the capture began; plan the step again, then capture")
            self._grown = {}

    def segment(self, lse: bool) -> Segment:
        """For the newest plan, what serves a call with or without an LSE."""
        work = self._now
        assert work is not None
        self._check_grown()
        if lse in self._grown:
            return self._grown[lse]
        if lse not in work.ways:
            if capturing(self.memory.device):
                raise RuntimeError("the first call with return_lse is captured; make one before the capture begins")
            segment, first = self._segment(work.step, lse), work.ways[not lse]
            if segment.kernel is first.kernel:
                segment = first
            else:
                self._agreed(work, segment)
                segment = self._prepared(work, segment)
            work.ways[lse] = segment
            if self._grown:
                self._grown[lse] = self._grown[not lse] if segment is first else segment
                return self._grown[lse]
        return work.ways[lse]

    def mask(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """0 and -inf for padding, where it had to have keys."""
        work = self._now
        if work is not None and work.pads.seq_len:
            out.masked_fill_(work.step.padding[:, None, None], 0)
            if lse is not None:
                lse.masked_fill_(work.step.padding, -torch.inf)

    @plain()
    def _made(self, step: Step, batch: Batch) -> Work:
        write = None
        if step.batch.slot_mapping is not None:
            write = self.choose(Op.CACHE_WRITE, Needs(page_size=batch.page_size, graph=step.size.level))
        segment = self._segment(step, False)
        pads = Pads(segment.kernel.caps.padded_seq_len, -1 if write is None else write.caps.pad_slot)
        place = self.choose(Op.REFRESH, Needs(graph=step.size.level))
        self.memory.fill(step, batch, pads, place, self._collect(batch))
        work = Work(step, write, place, pads, baked=step.baked, facts=step_facts(step.batch))
        work.ways[False] = self._prepared(work, segment)
        return work

    def _prepared(self, work: Work, segment: Segment) -> Segment:
        """A segment with what its kernel prepares, which each plan prepares again."""
        if segment.kernel.prepare is None:
            return segment
        made, again = repeatable(lambda: prepare(segment, self.layer), self.memory.device)
        work.again.append(again)
        return replace(segment, prepared=made)

    def _collect(self, batch: Batch) -> Kernel | None:
        return None if near(batch) else self.choose(Op.COLLECT, Needs())

    def _segment(self, step: Step, lse: bool) -> Segment:
        rows = slice(0, step.batch.padded_reqs)
        return segment_of(step.batch, self.layer, self.choose, rows, self.op, lse, step.size.level)

    def _agreed(self, work: Work, segment: Segment) -> None:
        if segment.kernel.caps.padded_seq_len != work.pads.seq_len:
            raise ValueError(
                f"{segment.kernel.name} wants padding of length {segment.kernel.caps.padded_seq_len}, and "
                f"{work.ways[False].kernel.name} of {work.pads.seq_len}; choose one of them by `backend`"
            )

    @property
    def nbytes(self) -> int:
        """Bytes held on the device: the memory of the slot, and what kernels prepared."""
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for work in self._works.values()
            for segment in work.ways.values()
            for tensor in tensors(segment.prepared)
        }
        return self.memory.nbytes + sum(found.values())
