"""A plan slot of recurrent layers: the newest plan, and what runs when a layer calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from portable import ops
from portable.batch import Batch
from portable.buffers import Buffers
from portable.check import check_conv, check_scan
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.mamba import MambaPlan, plan_mamba
from portable.mamba_places import Table
from portable.mha import Choose
from portable.states import SsmTensors

RUN = (Op.CONV1D, Op.STATE_UPDATE, Op.SSD)


class MambaSlot:
    """The newest plan of a slot. Its persistent buffers are made at the first step that asks for them."""

    def __init__(self, layer: Layer, kernels: Choose, device: torch.device, max_reqs: int) -> None:
        self.layer, self.max_reqs = layer, max_reqs
        self.convolve, self.update, self.prefill = (kernels(op, Needs()) for op in RUN)
        self.pad_slot = one_pad_slot(self.convolve, self.update, self.prefill)
        self.buffers = Buffers(device)
        self.handle = ops.register(self)
        self.plan: MambaPlan | None = None

    def renew(self, batch: Batch, table: Table | None, *, persistent: bool, **options: Any) -> MambaPlan:
        """The plan of a new step; what an earlier one held is gone."""
        self.plan = plan_mamba(
            batch,
            self.layer,
            table,
            pad_slot=self.pad_slot,
            buffers=self.buffers if persistent else None,
            max_reqs=self.max_reqs,
            handle=self.handle,
            **options,
        )
        return self.plan

    def adopt(self, plan: MambaPlan, table: Table) -> MambaPlan:
        """The step of another slot's plan, on other states."""
        own = replace(plan, buffers=None if plan.buffers is None else self.buffers, handle=self.handle)
        self.plan = own.with_group(table, group=0)
        return self.plan

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
        out[plan.num_tokens :] = 0
        for states in (plan.decode, plan.prefill):
            if states is not None:
                at = states.tokens
                self.convolve.run(x[at], weight, bias, pool, states, out[at], silu)

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
        out[plan.num_tokens :] = 0
        for kernel, states in ((self.update, plan.decode), (self.prefill, plan.prefill)):
            if states is not None:
                at = states.tokens
                parts = (None if tensor is None else tensor[at] for tensor in given)
                kernel.run(*parts, pool, states, self.layer, tensors, out[at])


def one_pad_slot(*kernels: Kernel) -> int:
    """What all of them skip: one plan serves them."""
    pads = {kernel.caps.pad_slot: kernel.name for kernel in kernels}
    if len(pads) > 1:
        named = " and ".join(f"{name} skips slot {pad}" for pad, name in sorted(pads.items()))
        raise UnsupportedError(f"{named}; choose kernels that skip the same slot")
    return next(iter(pads))
