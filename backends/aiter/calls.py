"""What aiter's callables have in common."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from portable.backends.adapter import Adapter
from portable.kernel import KV, Requires, Segment
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.merge import merge_states

OLD, NEW, EITHER = (Requires("amd-aiter", versions) for versions in (">=0.1.7,<0.1.8", ">=0.1.8", ">=0.1.7"))
ARCHS = frozenset({"gfx942", "gfx950"})
HALVES = frozenset({torch.bfloat16, torch.float16})
# bfloat16 keeps 8 bits: half a unit in the last place of the output, of P and of a product
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Call(Adapter):
    """A callable of aiter. Sinks are applied here, from its LSE, so that every release does the same with them."""

    def bind(self) -> Callable[..., Any]:
        function = super().bind()
        if reason := self.why_not_routed():
            raise UnsupportedError(f"{self.convention.module}.{self.convention.function} {reason}")
        return function

    def why_not_routed(self) -> str | None:
        """Why a call would not reach the kernels that the conventions are of, or None."""
        return None

    def prepare(self, segment: Segment, layer: Layer) -> Any:
        return super().prepare(segment, replace(layer, sinks=False))

    def attend(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if not layer.sinks:
            Adapter.attend(self, q, kv, segment, layer, tensors, out, lse)  # `super` takes 0.1 us to find it
            return
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32) if lse is None else lse
        super().attend(q, kv, segment, replace(layer, sinks=False), tensors._replace(sinks=None), out, lse)
        merge_states([out], [lse], tensors.sinks, out, lse)


def module_of(name: str) -> Any:
    """A module of aiter, which has been imported already."""
    return importlib.import_module(name)
