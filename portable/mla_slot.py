"""A plan slot of MLA: the newest plan, and what runs when a layer calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from portable import ops
from portable.batch import Batch
from portable.check import check_latents, check_mla_run, facts, step_facts
from portable.kernel import KV, Kernel, Needs, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.mha import Choose
from portable.mla import Context, MlaPlan, MlaSegments, Prefill, plan_mla
from portable.mla_weights import MlaWeights, joined

PLAIN = LayerTensors()
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
        self.expanded = replace(layer, kv_dtype=layer.dtype)  # what attends to keys of the step itself
        self.handle = ops.register(self)
        self.plan: MlaPlan | None = None
        self._ways: dict[bool, MlaSegments] = {}
        self._step: tuple[Any, ...] = ()
        self._passed: set[tuple[Any, ...]] = set()  # arguments like those of another layer or step are not checked anew

    def renew(self, batch: Batch) -> MlaPlan:
        """The plan of a new step; what an earlier one held is gone."""
        self._ways, self._step = {False: self._segments(batch, False)}, step_facts(batch)
        write: Kernel | None = None
        if batch.slot_mapping is not None:
            write = self.kernels(Op.CACHE_WRITE, Needs(page_size=batch.page_size))
        self.plan = MlaPlan(batch, self._ways[False], write, self.handle)
        return self.plan

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
        stride = None if pages is None else pages.stride()
        key = (self._step, facts(*given, pages, *weights, tensors.k_scale, out), stride)
        if key not in self._passed:
            check_mla_run(self.layer, batch, new, pages, halves, tensors, out)
            if len(self._passed) >= REMEMBERED:
                self._passed.clear()
            self._passed.add(key)
        if batch.padded_tokens > batch.num_tokens:
            out[batch.num_tokens :] = 0
            if lse is not None:
                lse[:, batch.num_tokens :] = -torch.inf
        wants_lse = lse is not None
        if wants_lse not in self._ways:
            self._ways[wants_lse] = self._segments(batch, wants_lse)
        segments = self._ways[wants_lse]
        for segment in segments.decodes:
            assert pages is not None
            at, kv = segment.tokens, KV(pages, None)
            if at.stop - at.start == batch.padded_tokens:  # nothing to cut
                self._decode(segment, new, kv, halves, tensors, out, lse)
                continue
            self._decode(segment, new.at(at), kv, halves, tensors, out[at], None if lse is None else lse[:, at])
        for prefill in segments.prefills:
            at = prefill.new.tokens
            self._prefill(prefill, new.at(at), pages, halves, tensors, out[at], None if lse is None else lse[:, at])

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None:
        """The new tokens' latents into their slots."""
        assert self.plan is not None
        batch = self.plan.batch
        if self.plan.write is None or batch.slot_mapping is None:
            raise ValueError("the plan writes nothing: its batch has no slot_mapping, which block_table brings")
        check_latents(self.layer, batch, new.k, new.v, kv.k, tensors)
        if batch.num_tokens:
            self.plan.write.run(new.k, new.v, kv, batch.slot_mapping, self.layer, tensors)

    def _segments(self, batch: Batch, lse: bool) -> MlaSegments:
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
        q = weights.absorb(new.q_nope, new.q_pe)
        latent = q.new_empty(*q.shape[:2], self.layer.kv_lora_rank)
        segment.kernel.run(q, kv, segment, self.layer, tensors, latent, lse)
        weights.expand(latent, out)

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
        if prefill.context:  # float64 layers merge by a float64 LSE
            logs = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
        self._attend(prefill.new, q, new.kv_c, new.k_pe, weights, out, logs)
        for chunk in prefill.context:
            assert pages is not None and logs is not None
            first, of = prefill.new.tokens.start, chunk.attend.tokens
            rows = slice(of.start - first, of.stop - first)
            self._merge_context(chunk, q[rows], KV(pages, None), weights, tensors, out[rows], logs[:, rows])
        if lse is not None and logs is not None and logs is not lse:
            lse.copy_(logs)

    def _merge_context(
        self,
        chunk: Context,
        q: torch.Tensor,
        kv: KV,
        weights: MlaWeights,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """One chunk of the contexts into `out` and `lse`; all that it took is free again at the end."""
        latents = chunk.gather.kernel.run(kv, chunk.gather, self.layer, tensors).k
        kv_c, k_pe = latents.split([self.layer.kv_lora_rank, self.layer.qk_rope_head_dim], -1)
        part, part_lse = torch.empty_like(out), torch.empty_like(lse)
        self._attend(chunk.attend, q, kv_c, k_pe, weights, part, part_lse)
        # `lse` is read by all threads that share a row, so a kernel that wrote it in place could read what it wrote
        merged = torch.empty_like(lse)
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
        k, v = weights.up_project(kv_c, k_pe)
        segment.kernel.run(q, KV(k, v), segment, self.expanded, PLAIN, out, lse)
