"""What objects that plan attention over pages do with padded plans, beside planning them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from portable import ops
from portable.arguments import at_least, named
from portable.batch import Batch
from portable.layer import Layer, UnsupportedError
from portable.limits import Limits
from portable.mha import MhaPlan
from portable.mla import MlaPlan
from portable.parts import Parts
from portable.persistent import Persistent, Room
from portable.ragged import cdiv
from portable.sizes import Size, size_of
from portable.upload import ALIGNMENT

Plan = TypeVar("Plan", MhaPlan, MlaPlan)


class PaddedPlans(Generic[Plan]):
    """Plan slots of an object, whose plans may be padded to a size."""

    layer: Layer
    device: torch.device
    limits: Limits
    _last: Size | None = None  # of the last padded plan, within the limits
    _workspace: torch.Tensor | None = None  # what is left of the caller's
    _held: tuple[torch.Tensor, ...] = ()  # what slots have of it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layer.brief}, page {self.limits.page_size}, {self.device})"

    @named
    def advance(self, plan: Plan) -> torch.Tensor:
        """The step of a padded plan with a token more for each request: the next step of a drafter's loop.

        Lengths, slots and what kernels prepare follow from tensors of the device alone, so a loop of `write`, `run` and
        `advance` may be captured: a replay begins with what `plan` brought. The size's `ahead` says how far it goes:
        `plan` brings the pages of so many tokens.

        Returns:
            positions [reqs] int64 of the new tokens, 0 for padding.
        """
        self._check_current(plan)
        positions: torch.Tensor = self._slot_of(plan).advance()
        return positions

    @named
    def update_block_table(
        self, plan: Plan, block_table: torch.Tensor, slot_mapping: torch.Tensor | None = None, *, slot: int
    ) -> Plan:
        """The step of a plan on the pages of another KV group, as the plan of another slot.

        Args:
            block_table: [B, W] int32 of the group, where the step's tensors are.
            slot_mapping: [T] int64 slots of the new tokens there; None: the plan writes nothing.
        """
        self._check_current(plan)
        if self._slot(slot) is self._slot_of(plan):
            raise ValueError(f"slot {slot} holds the plan itself; give the other group a slot of its own")
        if len(plan.parts) > 1:
            raise ValueError("the plan is of Parts; plan the other group's own")
        step = plan.batch if plan.padded is None else plan.padded.step
        step = step.with_group(block_table, slot_mapping, self.limits.page_size)
        if plan.padded is None:
            return self._kept(self._slot(slot).renew((step,) if isinstance(plan, MhaPlan) else step))
        return self._renew_padded(step, plan.padded.size, slot)

    def _checked_size(self, step: Batch, pad_to: int | Size) -> Size:
        """The size that is asked for, once it and the step are found to be within the limits."""
        size, limits, owner = size_of(pad_to, step), self.limits, type(self).__name__
        if size is not self._last:
            size.check_within(owner, limits.max_reqs, limits.max_tokens, limits.max_seq_len)
            self._last = size
        limits.check(step, step.device if step.device.type == "cpu" else self.device, owner)
        return size

    def _renew_padded(self, step: Batch, size: Size, slot: int) -> Plan:
        held = self._slot(slot)
        with ops.on_device(self.device):
            try:
                plan = held.renew_padded(step, size, self._memory)
            finally:
                if held.plan is None:  # what it read is overwritten
                    self._lost(held.handle)
        return self._kept(plan)

    @named
    def use_workspace(self, workspace: torch.Tensor) -> None:
        """Give padded plans the caller's memory: that of slots that hold none yet lies in it from now on.

        Args:
            workspace: [n] uint8 on this object's device, `workspace_bytes(slots=)` of them; it must not be used for
                anything else as long as graphs are replayed.

        Raises:
            ValueError: it is another kind of tensor, too small for a slot, or holds a slot already. A plan on a slot
                for which too little is left raises one too.
        """
        dense = workspace.dim() == 1 and workspace.is_contiguous() and workspace.dtype == torch.uint8
        if not dense or workspace.device != self.device or workspace.is_inference():
            kind = "an inference tensor" if workspace.is_inference() else f"{workspace.dtype} {list(workspace.shape)}"
            raise ValueError(f"workspace is {kind} on {workspace.device}; it must be [n] uint8 on {self.device}, dense")
        start, need = workspace.data_ptr(), self._room.nbytes
        block = workspace[-start % ALIGNMENT :]
        if len(block) < need:
            raise ValueError(
                f"workspace has {len(workspace)} bytes, {len(block)} of them from a multiple of {ALIGNMENT} on, and a "
                f"slot takes {need}; it must be workspace_bytes(slots=n)"
            )
        if any(start < held.data_ptr() + len(held) and held.data_ptr() < start + len(workspace) for held in self._held):
            raise ValueError("workspace holds a plan slot already; give memory that use_workspace was not given before")
        self._workspace = block

    def _bytes_of(self, slots: int) -> int:
        """What padded plans of so many slots take, beside what kernels prepare."""
        at_least(1, slots=slots)
        return slots * self._room.nbytes + ALIGNMENT

    @property
    def _room(self) -> Room:
        """Of one slot, for the largest padded step."""
        reqs, tokens, seq_len = self._largest()
        return Room(reqs, tokens, cdiv(seq_len, self.limits.page_size))

    def _largest(self) -> tuple[int, int, int]:
        """Requests, tokens and the longest sequence of a padded step."""
        return self.limits.max_reqs, self.limits.max_tokens, self.limits.max_seq_len

    def _memory(self) -> Persistent:
        """Of one slot."""
        return Persistent(*self._largest(), self.limits.page_size, self.device, self._given)

    def _given(self, nbytes: int) -> torch.Tensor | None:
        """So many bytes of the caller's, if there are any."""
        left = self._workspace
        if left is None:
            return None
        if len(left) < nbytes:
            raise ValueError(
                f"workspace has {len(left)} bytes left, and a slot takes {nbytes}; it must be workspace_bytes(slots=n)"
            )
        block, self._workspace = left[:nbytes], left[nbytes:]
        self._held += (block,)
        return block

    def _kept(self, plan: Plan) -> Plan:
        return plan

    def _lost(self, handle: int) -> None:
        """The plan of a slot is gone."""

    def _slot(self, slot: int) -> Any:
        raise NotImplementedError

    def _slot_of(self, plan: Plan) -> Any:
        raise NotImplementedError

    def _check_current(self, plan: Plan) -> None:
        raise NotImplementedError


def whole(step: Batch | Parts) -> Batch:
    """A step that can be padded to a size.

    Raises:
        UnsupportedError: it is in parts; the message says what to write instead.

    Decodes beside a chunk of a prompt need no parts: they are one step, of a size that says how many tokens there are.

    >>> step = Batch.from_lens([1, 1, 6], [9, 10, 6], block_table=[[3, 7, 1], [4, 2, 9], [5, 8, 0]], page_size=4)
    >>> size = Size(reqs=4, queries=8, tokens=16)  # for attn.plan(step, pad_to=size)
    >>> size.why_not(whole(step)), size.level.name
    (None, 'VARLEN')
    >>> whole(Parts((step,)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    portable.layer.UnsupportedError: step is in Parts (a tree, a shared prefix), which are not padded to a size; ...
    """
    if isinstance(step, Parts):
        raise UnsupportedError(
            "step is in Parts (a tree, a shared prefix), which are not padded to a size; write plan(step), without "
            "pad_to, and run it outside of graphs. For a graph write, instead of prefix(batch, length), plan(batch, "
            "pad_to=n); instead of a tree a chain of k drafts, plan(Batch.from_lens([1 + k] * n, ...), pad_to=n); for "
            "decodes beside chunks of prompts one batch of both, plan(batch, pad_to=Size(reqs, queries, tokens=t))"
        )
    return step
