"""A plan slot of MLA: the newest plan, and what runs when a layer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from portable import ops
from portable.batch import Batch
from portable.check import check_latents, check_mla_run, facts, rows, step_facts
from portable.kernel import KV, Needs, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.mha import Choose, of_step
from portable.mla import Context, MlaPlan, MlaSegments, Prefill, plan_mla
from portable.mla_weights import MlaWeights, joined
from portable.parts import Parts
from portable.persistent import Persistent
from portable.planned import Padded
from portable.ragged import round_up
from portable.refresh import Refresh
from portable.sizes import Size

PLAIN = LayerTensors()
INVARIANT_ROWS = 256  # of each product with the up-projection, where no row's bits may depend on another's
REMEMBERED = 256  # sets of arguments that passed the checks, before a slot starts afresh


class Latents(NamedTuple):
    """What one layer of a step is given."""

    q_nope: torch.Tensor  # [T, H, nope]
    q_pe: torch.Tensor  # [T, H, rope]
    kv_c: torch.Tensor  # [T, rank]
    k_pe: torch.Tensor  # [T, rope]

    def at(self, tokens: slice) -> Latents:
        return Latents(self.q_nope[tokens], self.q_pe[tokens], self.kv_c[tokens], self.k_pe[tokens])


class MlaSlot:
    """The newest plan of a slot, and its segments with and without an LSE of all tokens."""

    def __init__(self, layer: Layer, kernels: Choose, workspace: int) -> None:
        self.layer, self.kernels, self.workspace = layer, kernels, workspace
        self.expanded = of_step(layer)  # what attends to keys of the step itself
        self.rows = INVARIANT_ROWS if layer.batch_invariant else 0
        self.handle = ops.register(self)
        self.plan: MlaPlan | None = None
        self._ways: dict[bool, MlaSegments] = {}
        self._refresh: Refresh | None = None  # made at the first step that is padded to a size
        self._step: tuple[Any, ...] = ()
        self._passed: set[tuple[Any, ...]] = set()  # arguments like those of another layer or step are not checked anew

    def renew(self, step: Batch | Parts) -> MlaPlan:
        """The plan of a new step; what an earlier one held is gone."""
        if isinstance(step, Parts):
            batch, parts = step.step, step.batches
            segments = MlaSegments((), (), tuple(self._planned(part, True) for part in parts))
            ways = {False: segments, True: segments}
        else:
            batch, parts = step, ()
            segments = self._planned(step, False)
            ways = {False: segments}
        of_cache, write = parts[0] if parts else batch, None
        if batch.slot_mapping is not None:
            write = self.kernels(Op.CACHE_WRITE, Needs(page_size=of_cache.page_size))
        # set at the end: a step that cannot be planned leaves the last plan whole
        self._step, self._ways = step_facts(of_cache), ways
        self.plan = MlaPlan(batch, segments, write, self.handle, parts=parts)
        return self.plan

    def renew_padded(self, batch: Batch, size: Size, memory: Callable[[], Persistent]) -> MlaPlan:
        """The plan of a step that is padded to a size, in the slot's memory, which is made at the first one."""
        if self._refresh is None:
            self._refresh = Refresh(self.layer, self.kernels, Op.MLA_DECODE, memory())
        try:
            work = self._refresh.plan(batch, size)
        finally:
            if self._refresh.memory.filling:
                self.plan = None
        self._ways, self._step = {}, work.facts
        if work.segments is None:
            work.segments = MlaSegments((work.ways[False],), ())
        self.plan = MlaPlan(work.step.batch, work.segments, work.write, self.handle, Padded(batch, size, work.baked))
        return self.plan

    def advance(self) -> torch.Tensor:
        """Positions of the new tokens, once the step of a padded plan has one more for each request."""
        if self.plan is None or not self.plan.padded or self._refresh is None:
            raise ValueError("the plan is of a step that is not padded to a size; advance takes one that is")
        return self._refresh.advance()

    def attend_latents(
        self,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        pages: torch.Tensor | None,
        weights: tuple[torch.Tensor, torch.Tensor],
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of the planned step, into `out` and `lse`; padded tokens get 0 and -inf."""
        assert self.plan is not None
        batch, new, halves = self.plan.batch, Latents(*given), MlaWeights(*weights)
        stride, steps = None if pages is None else pages.stride(), out.stride()
        key = (self._step, facts(*given, pages, *weights, tensors.k_scale, out), stride, steps)
        if key not in self._passed:
            check_mla_run(self.layer, self.plan.of_cache, new, pages, halves, tensors, out)
            if len(self._passed) >= REMEMBERED:
                self._passed.clear()
            self._passed.add(key)
        if steps[-1] != 1:  # kernels write the elements of a head side by side
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.attend_latents(given, pages, weights, tensors, dense, lse)
            out.copy_(dense)
            return
        if batch.padded_tokens > batch.num_tokens:
            out[batch.num_tokens :] = 0
            if lse is not None:
                lse[:, batch.num_tokens :] = -torch.inf
        segments, tokens = self._segments(batch, lse is not None), batch.padded_tokens
        if segments.parts:
            self._run_parts(segments.parts, batch.num_tokens, new, pages, halves, tensors, out, lse)
            return
        self.run(segments, tokens, new, pages, halves, tensors, out, lse)
        if self.plan.padded and self._refresh is not None:
            self._refresh.mask(out, lse)

    def run(
        self,
        segments: MlaSegments,
        tokens: int,
        new: Latents,
        pages: torch.Tensor | None,
        weights: MlaWeights,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of a step of so many tokens, of arguments that were checked."""
        for segment in segments.decodes:
            assert pages is not None
            at, kv = segment.tokens, KV(latents_as(pages, segment.page_size), None)
            if at.stop - at.start == tokens:  # nothing to cut
                self._decode(segment, new, kv, weights, tensors, out, lse)
                continue
            self._decode(segment, new.at(at), kv, weights, tensors, out[at], None if lse is None else lse[:, at])
        for prefill in segments.prefills:
            at = prefill.tokens
            self._prefill(prefill, new.at(at), pages, weights, tensors, out[at], None if lse is None else lse[:, at])

    def _run_parts(
        self,
        parts: tuple[MlaSegments, ...],
        tokens: int,
        new: Latents,
        pages: torch.Tensor | None,
        weights: MlaWeights,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Each part of a step of so many tokens into an output of its own, and their merge."""
        partial = [(torch.empty_like(out), new_logs(new.q_nope)) for _ in parts]
        for segments, (part, log) in zip(parts, partial, strict=True):
            self.run(segments, len(out), new, pages, weights, tensors, part, log)
        outs, logs = (tuple(each) for each in zip(*((o[:tokens], x[:, :tokens]) for o, x in partial), strict=True))
        merged = None if lse is None else lse[:, :tokens]
        self.kernels(Op.MERGE, Needs()).run(outs, logs, None, out[:tokens], merged)

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None:
        """The new tokens' latents into their slots."""
        assert self.plan is not None
        batch = self.plan.batch
        if self.plan.write is None or batch.slot_mapping is None:
            raise ValueError("the plan writes nothing: its batch has no slot_mapping, which block_table brings")
        check_latents(self.layer, self.plan.of_cache, new.k, new.v, kv.k, tensors)
        assert new.v is not None
        if batch.num_tokens:
            self.plan.write.run(rows(new.k), rows(new.v), kv, batch.slot_mapping, self.layer, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that padded steps hold on the device."""
        return 0 if self._refresh is None else self._refresh.nbytes

    def _segments(self, batch: Batch, lse: bool) -> MlaSegments:
        if self._refresh is not None and self.plan is not None and self.plan.padded:
            return MlaSegments((self._refresh.segment(lse),), ())  # which `advance` changes
        if lse not in self._ways:
            self._ways[lse] = self._planned(batch, lse)
        return self._ways[lse]

    def _planned(self, batch: Batch, lse: bool) -> MlaSegments:
        return plan_mla(batch, self.layer, self.kernels, workspace=self.workspace, lse=lse)

    def _decode(
        self,
        segment: Segment,
        new: Latents,
        kv: KV,
        weights: MlaWeights,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        q = weights.absorb(new.q_nope, new.q_pe, self.rows)
        latent = q.new_empty(*q.shape[:2], self.layer.kv_lora_rank)
        segment.kernel.run(q, kv, segment, self.layer, tensors, latent, lse)
        weights.expand(latent, out, self.rows)

    def _prefill(
        self,
        prefill: Prefill,
        new: Latents,
        pages: torch.Tensor | None,
        weights: MlaWeights,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The new tokens among themselves, then a chunk of the contexts at a time, each merged where it belongs."""
        q, logs = joined(new.q_nope, new.q_pe), lse
        if prefill.context or prefill.new is None:
            logs = new_logs(q)
        if prefill.new is not None:
            self._attend(prefill.new, q, new.kv_c, new.k_pe, weights, out, logs)
        elif logs is not None:
            out.zero_()
            logs.fill_(-torch.inf)
        if prefill.context:  # 3 us of a CPU less where there is none
            latents = q.new_empty(max(chunk.num_keys for chunk in prefill.context), self.layer.latent_dim)
        for chunk in prefill.context:
            assert pages is not None and logs is not None
            first, of = prefill.tokens.start, chunk.attend.tokens
            rows = slice(of.start - first, of.stop - first)
            kv, gathered = KV(latents_as(pages, chunk.gather.page_size), None), latents[: chunk.num_keys]
            chunk.gather.kernel.run(kv, chunk.gather, self.layer, tensors, KV(gathered, None))
            self._merge_context(chunk, q[rows], gathered, weights, out[rows], logs[:, rows])
        if lse is not None and logs is not None and logs is not lse:
            lse.copy_(logs)

    def _merge_context(
        self,
        chunk: Context,
        q: torch.Tensor,
        latents: torch.Tensor,
        weights: MlaWeights,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """One chunk of the contexts into `out` and `lse`; all that it took is free again at the end."""
        kv_c, k_pe = latents.split([self.layer.kv_lora_rank, self.layer.qk_rope_head_dim], -1)
        part, part_lse = torch.empty_like(out), new_logs(q)
        self._attend(chunk.attend, q, kv_c, k_pe, weights, part, part_lse)
        # `lse` is read by all threads that share a row, so a kernel that wrote it in place could read what it wrote
        merged = new_logs(q)
        self.kernels(Op.MERGE, Needs()).run((out, part), (lse, part_lse), None, out, merged)
        lse.copy_(merged)

    def _attend(
        self,
        segment: Segment,
        q: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        weights: MlaWeights,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        k, v = weights.up_project(kv_c, k_pe, self.rows)
        segment.kernel.run(q, KV(k, v), segment, self.expanded, PLAIN, out, lse)


def new_logs(q: torch.Tensor) -> torch.Tensor:
    """[H, T] for an LSE that is merged, in float64 for a float64 layer.

    Heads are a multiple of 16 apart, so that the kernels for it do not depend on the number of tokens.
    """
    tokens, heads = q.shape[:2]
    return q.new_empty(heads, round_up(tokens, 16), dtype=torch.promote_types(q.dtype, torch.float32))[:, :tokens]


def latents_as(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """The same pages with another number of tokens each, as a view: what a draft tree's pages of one token read."""
    if pages.shape[1] == page_size:
        return pages
    if pages.stride(0) != pages.shape[1] * pages.stride(1):
        raise ValueError(f"cache has strides {list(pages.stride())}; pages of {page_size} tokens need equal steps")
    view: torch.Tensor = pages.flatten(0, 1).unflatten(0, (-1, page_size))
    return view
