"""A plan slot: the newest plan, and what runs when a layer calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from portable import ops
from portable.batch import Batch
from portable.check import check_run, check_write, facts, flat, rows, step_facts
from portable.kernel import KV, Kernel, Needs, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.mha import MhaPlan, plan_segments
from portable.persistent import Persistent
from portable.planned import Padded
from portable.refresh import Refresh
from portable.sizes import Size

Segments = tuple[tuple[Segment, ...], ...]
REMEMBERED = 256  # sets of arguments that passed the checks, before a slot starts afresh


class Kernels(Protocol):
    """The kernel for each operation and bucket of one layer."""

    def __call__(self, op: Op, needs: Needs) -> Kernel: ...
    def of(self, layer: Layer) -> Kernels: ...


class Slot:
    """The newest plan of a slot, and its segments for each way in which `run` may be called.

    Parts of a step run without the layer's sinks, into partial outputs that a merge kernel joins, sinks at its end.

    What a kernel prepares, room for its partial results too, belongs to the plan: all layers of the step write there,
    of a padded one those of every later step of the size as well. So a slot is for one stream at a time.
    """

    def __init__(self, layer: Layer, kernels: Kernels) -> None:
        self.layer, self.kernels = layer, kernels
        self.handle = ops.register(self)
        self.plan: MhaPlan | None = None
        self._partial: tuple[Layer, Kernels] | None = None
        self._ways: dict[tuple[bool, bool], Segments] = {}
        self._step: tuple[Any, ...] = ()
        self._refresh: Refresh | None = None  # made at the first step that is padded to a size
        self._passed: set[tuple[Any, ...]] = set()  # arguments like those of another layer or step are not checked anew

    def renew(self, parts: tuple[Batch, ...]) -> MhaPlan:
        """The plan of a new step; what an earlier one held is gone."""
        step, way = parts[-1], (True, len(parts) > 1)
        segments, write = self._segments(parts, *way), None
        if step.slot_mapping is not None:
            write = self.kernels(Op.CACHE_WRITE, Needs(page_size=parts[0].page_size))
        # set at the end: a step that cannot be planned leaves the last plan whole
        self._step, self._ways = step_facts(parts[0]), {way: segments}
        self.plan = MhaPlan(parts, segments, write, self.handle)
        return self.plan

    def renew_padded(self, batch: Batch, size: Size, memory: Callable[[], Persistent]) -> MhaPlan:
        """The plan of a step that is padded to a size, in the slot's memory, which is made at the first one."""
        if self._refresh is None:
            self._refresh = Refresh(self.layer, self.kernels, Op.PAGED, memory())
        try:
            work = self._refresh.plan(batch, size)
        finally:
            if self._refresh.memory.filling:
                self.plan = None
        self._ways, self._step = {}, work.facts
        padded = Padded(batch, size, work.baked)
        self.plan = MhaPlan((work.step.batch,), ((work.ways[False],),), work.write, self.handle, padded)
        return self.plan

    def advance(self) -> torch.Tensor:
        """Positions of the new tokens, once the step of a padded plan has one more for each request."""
        if self.plan is None or not self.plan.padded or self._refresh is None:
            raise ValueError("the plan is of a step that is not padded to a size; advance takes one that is")
        return self._refresh.advance()

    def attend(
        self,
        q: torch.Tensor,
        kv: KV | None,
        new: KV | None,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of the planned step, into `out` and `lse`; padded tokens get 0, and -inf or the layer's sink."""
        assert self.plan is not None
        parts, steps = self.plan.parts, out.stride()
        k, v = kv or (None, None)
        key = (self._step, facts(q, out, k, v, *(new or ())), steps, *_given(k, v, tensors))
        if key not in self._passed:
            check_run(self.layer, parts, q, kv, new, tensors, out)
            self._pass(key)
        if steps[-1] != 1:  # kernels write the elements of a head side by side
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.attend(q, kv, new, tensors, dense, lse)
            out.copy_(dense)
            return
        q, new, tensors = rows(q), None if new is None else _pair(new), _flat(tensors)
        if self.plan.padded:
            assert self._refresh is not None
            chosen = (self._refresh.segment(lse is not None),)
            run_part(parts[0], chosen, self.layer, q, kv, None, tensors, out, lse)
            self._refresh.mask(out, lse)
            return
        num_tokens = parts[0].num_tokens
        if parts[0].padded_tokens > num_tokens:
            out[num_tokens:] = 0
            if lse is not None:
                lse[:, num_tokens:] = -torch.inf
        way = (new is not None, lse is not None or len(parts) > 1)
        if way not in self._ways:
            self._ways[way] = self._segments(parts, *way)
        segments = self._ways[way]
        if len(parts) == 1:
            run_part(parts[0], segments[0], self.layer, q, kv, new, tensors, out, lse)
            return
        layer, kernels = self._of_parts()
        without = tensors._replace(sinks=None)
        partial = []
        for part, served in zip(parts, segments, strict=True):
            part_out, part_lse = torch.empty_like(out), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
            run_part(part, served, layer, q, kv, new, without, part_out, part_lse)
            partial.append((part_out[:num_tokens], part_lse[:, :num_tokens]))
        outs, lses = zip(*partial, strict=True)
        merged_lse = None if lse is None else lse[:, :num_tokens]
        kernels(Op.MERGE, Needs()).run(outs, lses, tensors.sinks, out[:num_tokens], merged_lse)

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None:
        """The new tokens of the planned step into their slots."""
        assert self.plan is not None
        step = self.plan.batch
        if self.plan.write is None or step.slot_mapping is None:
            raise ValueError("the plan writes nothing: its batch has no slot_mapping, which block_table brings")
        key = (self._step, facts(*kv), facts(*new), *_given(*kv, tensors))
        if key not in self._passed:
            check_write(self.layer, self.plan.parts, new, kv, tensors)
            self._pass(key)
        new, tensors = _pair(new), _flat(tensors)
        if step.num_tokens:
            self.plan.write.run(new.k, new.v, kv, step.slot_mapping, self.layer, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that padded steps hold on the device."""
        return 0 if self._refresh is None else self._refresh.nbytes

    def _pass(self, key: tuple[Any, ...]) -> None:
        if len(self._passed) >= REMEMBERED:
            self._passed.clear()
        self._passed.add(key)

    def _segments(self, parts: tuple[Batch, ...], contiguous: bool, lse: bool) -> Segments:
        layer, kernels = (self.layer, self.kernels) if len(parts) == 1 else self._of_parts()
        return tuple(plan_segments(part, layer, kernels, contiguous=contiguous, lse=lse) for part in parts)

    def _of_parts(self) -> tuple[Layer, Kernels]:
        if self._partial is None:
            layer = replace(self.layer, sinks=False)
            self._partial = layer, self.kernels.of(layer)
        return self._partial


def _given(k: torch.Tensor | None, v: torch.Tensor | None, tensors: LayerTensors) -> tuple[Any, ...]:
    """The facts of a layer's pages and tensors that are not in `facts`."""
    strides = (None if k is None else k.stride(), None if v is None else v.stride())
    return (*strides, None if all(map(_is_none, tensors)) else facts(*tensors))


def _is_none(each: object) -> bool:
    return each is None


def _pair(new: KV) -> KV:
    return KV(rows(new.k), None if new.v is None else rows(new.v))


def _flat(tensors: LayerTensors) -> LayerTensors:
    return tensors if all(map(_is_none, tensors)) else LayerTensors(*map(flat, tensors))


def run_part(
    batch: Batch,
    segments: tuple[Segment, ...],
    layer: Layer,
    q: torch.Tensor,
    kv: KV | None,
    new: KV | None,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Each segment's kernel on its tokens, and on the pages or the contiguous K/V that it reads."""
    for segment in segments:
        at = segment.tokens
        if at.stop - at.start == batch.padded_tokens and segment.block_table is not None:  # nothing to cut: 2 us less
            assert kv is not None
            segment.kernel.run(q, paged_as(kv, segment.page_size), segment, layer, tensors, out, lse)
            return
        if segment.block_table is not None:
            assert kv is not None
            keys: KV | None = paged_as(kv, segment.page_size)
        elif batch.block_table is None or new is None or new.v is None:
            keys = new
        else:
            keys = KV(new.k[at], new.v[at])
        segment.kernel.run(q[at], keys, segment, layer, tensors, out[at], None if lse is None else lse[:, at])


def paged_as(kv: KV, page_size: int) -> KV:
    """The same pages with another number of tokens each, as a view: what a draft tree's pages of one token read."""
    if kv.v is None or kv.k.dim() != 4 or kv.k.shape[1] == page_size:
        return kv
    for name, pages in (("k", kv.k), ("v", kv.v)):
        if pages.stride(0) != pages.shape[1] * pages.stride(1):
            raise ValueError(
                f"cache {name} has strides {list(pages.stride())}; pages of {page_size} tokens need equal steps"
            )
    k, v = (pages.flatten(0, 1).unflatten(0, (-1, page_size)) for pages in (kv.k, kv.v))
    return KV(k, v)
