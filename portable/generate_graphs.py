"""Decode steps of the engine of `portable generate` as captured graphs, one for each padded size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portable.layer import Layer
from portable.schedule import Chunk

log = logging.getLogger("portable")
Forward = Callable[[Mapping[Layer, Any], torch.Tensor], torch.Tensor]


class DecodeGraphs:
    """A model's forward of one token for each request, captured at the first step of each size.

    Args:
        planners: of each kind of layer.
        forward: takes a plan of each, and [n, 2] i64, the id and the position of each token; gives logits [n, V].
        max_reqs: the most requests of a step.

    A model that cannot be captured, one whose host code reads tensors above all, is reported once and left alone then.
    """

    def __init__(self, planners: Mapping[Layer, Any], forward: Forward, max_reqs: int) -> None:
        from portable.graphs import Graphs
        from portable.sizes import ladder

        self.layers = tuple(planners)
        self.why_not: str | None = None
        self.graphs = Graphs(
            lambda plans, tokens: forward(dict(zip(self.layers, plans, strict=True)), tokens),
            list(planners.values()),
            ladder(max_reqs),
        )

    def serves(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step decodes only."""
        return self.why_not is None and all(c.length == 1 and c.start > 0 and c.samples for c in chunks)

    def __call__(self, steps: Mapping[Layer, Any], tokens: torch.Tensor) -> torch.Tensor | None:
        """Logits [n, V] that live until the next call; None where the step could not be captured, and did nothing.

        Args:
            steps: what each layer's planner plans; batches may be on the host.
            tokens: [n, 2] i64 on the host.
        """
        try:
            logits: torch.Tensor = self.graphs([steps[layer] for layer in self.layers], tokens)
        except (RuntimeError, ValueError) as error:
            self.why_not = str(error).partition("\n")[0] or type(error).__name__
            log.warning("decodes are not captured as graphs: %s", self.why_not)
            return None
        return logits
