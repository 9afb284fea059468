"""A plan slot of recurrent layers: the newest plan, and what runs when a layer calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from portable import ops
from portable.batch import Batch
from portable.check import check_conv, check_scan, flat, rows
from portable.kernel import GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.mamba import MambaPlan, plan_mamba
from portable.mamba_decodes import plan_decodes
from portable.mamba_memory import StateMemory
from portable.mamba_places import Table
from portable.mha import Choose
from portable.padding import pad_host
from portable.planned import Padded
from portable.platform.graphs import capturing
from portable.sizes import Size
from portable.states import SsmTensors

RUN = (Op.CONV1D, Op.STATE_UPDATE, Op.SSD)


class MambaSlot:
    """The newest plan of a slot. Its persistent memory is made at the first step that is padded to a size."""

    def __init__(self, layer: Layer, kernels: Choose, memory: Callable[[], StateMemory]) -> None:
        self.layer, self.kernels, self._make = layer, kernels, memory
        self._eager = self._chosen(Needs(), *RUN)
        self._pad_slot = one_pad_slot(*self._eager)
        self._captured: dict[GraphLevel, tuple[tuple[Kernel, ...], int]] = {}
        self._memory: StateMemory | None = None
        self.convolve, self.update, self.prefill = self._eager
        self.handle = ops.register(self)
        self.plan: MambaPlan | None = None
        self._asked: tuple[Batch, dict[str, Any]] | None = None  # what a padded plan was made of

    def renew(self, batch: Batch, table: Table | None, **options: Any) -> MambaPlan:
        """The plan of a new step; what an earlier one held is gone."""
        kernels, found = self._eager, None
        given: dict[str, Any] = {"pad_slot": self._pad_slot, "handle": self.handle}
        if simple(batch, options):
            rows, tokens, longest = batch.padded_reqs, batch.padded_tokens, batch.max_query_len
            found = plan_decodes(
                batch, table, rows, tokens, memory=None, max_query_len=longest, **given, **few(options)
            )
        plan = found or plan_mamba(batch, self.layer, table, **given, **options)
        self.convolve, self.update, self.prefill = kernels
        self.plan, self._asked = plan, None
        return plan

    def renew_padded(self, batch: Batch, size: Size, table: Table | None, **options: Any) -> MambaPlan:
        """The plan of a step that is padded to a size, in the slot's memory.

        Raises:
            RuntimeError: a graph is being captured.
            UnsupportedError: no kernel can be captured for the size.
            ValueError: the step does not fit.
        """
        if self._memory is None:
            self._memory = self._make()
        if capturing(self._memory.device):
            raise RuntimeError("plan was called while a graph is captured; plan before the capture, and before replays")
        level, found = size.level, None
        if level not in self._captured:
            chosen = self._chosen(Needs(graph=level), *RUN[:2])
            self._captured[level] = chosen, one_pad_slot(*chosen)
        size.check(batch)
        kernels, pad_slot = self._captured[level]
        given: dict[str, Any] = {"memory": self._memory, "max_query_len": size.queries, "handle": self.handle}
        given["pad_slot"] = pad_slot
        if simple(batch, options):
            found = plan_decodes(batch, table, size.reqs, size.padded_tokens, **given, **few(options))
        if found is None:
            padded = pad_host(batch, size.reqs, size.padded_tokens)
            found = plan_mamba(padded, self.layer, batch.block_table if table is None else table, **given, **options)
        baked = {"num_reqs": size.reqs, "num_tokens": size.padded_tokens, "max_query_len": size.queries}
        self.convolve, self.update = kernels
        object.__setattr__(found, "padded", Padded(batch, size, baked))  # nobody has seen it; `replace` takes 5 us
        self.plan, self._asked = found, (batch, options)
        return found

    def adopt(self, other: MambaSlot, table: Table) -> MambaPlan:
        """The step of another slot's plan, on other states."""
        assert other.plan is not None
        if other.plan.padded is not None and other._asked is not None:
            batch, options = other._asked
            return self.renew_padded(batch, other.plan.padded.size, table, **options)
        self.convolve, self.update, self.prefill = self._eager
        self.plan = replace(other.plan, handle=self.handle).with_group(table)
        return self.plan

    def _chosen(self, needs: Needs, *operations: Op) -> tuple[Kernel, ...]:
        return tuple(self.kernels(op, needs) for op in operations)

    @property
    def nbytes(self) -> int:
        """Bytes that padded steps hold on the device."""
        return 0 if self._memory is None else self._memory.nbytes

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        out: torch.Tensor,
        silu: bool,
    ) -> None:
        """The convolution of one layer of the planned step, into `out`; padded tokens get 0."""
        plan = self.plan
        assert plan is not None
        check_conv(self.layer, plan, x, weight, bias, pool, out)
        made = _result(out, plan, (x,))
        x, bias = rows(x), flat(bias)
        _blank(plan, made)
        for states in (plan.decode, plan.prefill):
            if states is not None:
                at = states.tokens
                self.convolve.run(x[at], weight, bias, pool, states, made[at], silu)
        if made is not out:
            out.copy_(made)

    def scan(
        self,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        pool: torch.Tensor,
        tensors: SsmTensors,
        out: torch.Tensor,
    ) -> None:
        """The states of one layer of the planned step, into `out` and the pool; padded tokens get 0."""
        plan = self.plan
        assert plan is not None
        check_scan(self.layer, plan, given, pool, tensors, out)
        x, dt, b, c, z = given
        given = rows(x), dt, rows(b), rows(c), None if z is None else rows(z)
        a = tensors.a if tensors.a.is_contiguous() else tensors.a.contiguous()
        tensors = tensors._replace(a=a, d=flat(tensors.d), dt_bias=flat(tensors.dt_bias))
        made = _result(out, plan, (x, z), (dt, b, c))
        _blank(plan, made)
        for kernel, states in ((self.update, plan.decode), (self.prefill, plan.prefill)):
            if states is not None:
                at = states.tokens
                parts = (None if tensor is None else tensor[at] for tensor in given)
                kernel.run(*parts, pool, states, self.layer, tensors, made[at])
        if made is not out:
            out.copy_(made)


def simple(batch: Batch, options: Mapping[str, Any]) -> bool:
    """Whether `plan_decodes` knows all the options."""
    others = options["running"] is None and options["checkpoints"] is None
    return options["mode"] == "none" and others and batch.view is None and batch.self_attention


def few(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that it takes."""
    return {"num_draft": options["num_draft"], "num_accepted": options["num_accepted"]}


def _result(
    out: torch.Tensor,
    plan: MambaPlan,
    own: tuple[torch.Tensor | None, ...],
    shared: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """`out`, or a tensor of its shape for kernels to write: where its rows' elements lie apart, or others read it.

    Args:
        own: inputs whose row is read by who writes that of `out`, except for prompts: `out` may be one of them.
        shared: inputs that are read by more than one.
    """
    start, end = _memory(out)
    fits = out.stride(-1) == 1 or out.shape[-1] == 1
    for each in (*own, *shared):
        if each is None or not fits:
            continue
        low, high = _memory(each)
        if low < end and start < high:
            same = each.data_ptr() == out.data_ptr() and each.stride() == out.stride()
            fits = same and plan.prefill is None and any(each is one for one in own)
    return out if fits else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory that a tensor is part of starts and ends."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _blank(plan: MambaPlan, out: torch.Tensor) -> None:
    """0 for padded tokens: by a number of the host, or, where a graph would freeze that, by the device's."""
    if plan.padding is None:
        out[plan.num_tokens :] = 0
    else:
        out.masked_fill_(plan.padding.view(-1, *[1] * (out.dim() - 1)), 0)


def one_pad_slot(*kernels: Kernel) -> int:
    """What all of them skip: one plan serves them."""
    pads = {kernel.caps.pad_slot: kernel.name for kernel in kernels}
    if len(pads) > 1:
        named = " and ".join(f"{name} skips slot {pad}" for pad, name in sorted(pads.items()))
        raise UnsupportedError(f"{named}; choose kernels that skip the same slot")
    return next(iter(pads))
