"""The recurrent layers of the engine of `portable generate`: their pools, and who has which slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from portable.batch import Batch
from portable.cache import allocate_states
from portable.layer import Layer
from portable.mamba import MambaPlan
from portable.mamba_copies import plan_state_copies
from portable.mamba_run import Mamba
from portable.model_mamba import Answer, Bound
from portable.schedule import Chunk
from portable.state_slots import StateSlots

FAMILIES = ("mamba1", "mamba2")


class Recurrent:
    """The recurrent layers of a model, and their states.

    Args:
        layers: of the model, attention too.
        slots: who has which; None for a slot per row of the block table, without checkpoints.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        device: torch.device | str,
        max_reqs: int,
        max_tokens: int,
        slots: StateSlots | None,
        backend: str | None = None,
    ) -> None:
        self.slots = slots
        own = [layer for layer in layers if layer.family in FAMILIES]
        self.mambas = {
            layer: Mamba(
                layer,
                device=device,
                mode="none" if slots is None else "align",
                block_size=None if slots is None else slots.block_size,
                max_reqs=max_reqs,
                max_tokens=max_tokens,
                backend=backend,
            )
            for layer in dict.fromkeys(own)
        }
        self.layers = tuple(layers)
        num_slots = max_reqs if slots is None else slots.num_slots
        self.pools = {
            index: allocate_states(layer, num_slots, self.mambas[layer].device)
            for index, layer in enumerate(layers)
            if layer.family in FAMILIES
        }

    def plan(self, batch: Batch, chunks: Sequence[Chunk]) -> Answer:
        """Bring the running states where the step stores them, and bind each layer to the plan of its kind."""
        asked = self.asked(batch, chunks)
        return self.answer({layer: mamba.plan(**asked[layer]) for layer, mamba in self.mambas.items()})

    def asked(self, batch: Batch, chunks: Sequence[Chunk]) -> dict[Layer, dict[str, Any]]:
        """What `Mamba.plan` of each kind of layer takes, once the running states are where the step stores them."""
        rows = np.array([chunk.request.row for chunk in chunks])
        table, running = rows[:, None].astype(np.int32), None
        if self.slots is not None:
            moves = self.slots.before(chunks)
            if moves.rows.size:
                pairs = plan_state_copies(moves, self.slots.table)
                next(iter(self.mambas.values())).copy((list(self.pools.values()), pairs))
            table, running = self.slots.table[rows], self.slots.states.running[rows]
        return {layer: {"batch": batch, "table": table, "running": running} for layer in self.mambas}

    def answer(self, plans: Mapping[Layer, MambaPlan]) -> Answer:
        """Each layer bound to the plan of its kind."""

        def bound(index: int) -> Bound:
            layer = self.layers[index]
            return Bound(self.mambas[layer], self.pools[index], plans[layer])

        return bound
