"""The layers of a serving stack, each with caches for the ways in which it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from portable import Attention, Batch, Layer, LayerTensors, allocate_cache
from portable.cache import allocate_states
from portable.mamba_run import Mamba
from portable.mla_attention import MlaAttention
from portable.mla_weights import MlaWeights
from portable.states import SsmTensors

PAGE = 16
DRAFTS = 3
WAYS = ("graph", "eager", "oracle")


class Heads:
    """A layer of `Attention`; its input is q, k and v side by side, its output [T, H * Dv].

    The ways "graph" and "eager" have one planner, in different slots; the oracle is the reference in float64
    on the CPU.
    """

    def __init__(self, layer: Layer, group: int, device: str, num_pages: int, limits: dict[str, int]) -> None:
        self.layer, self.group = layer, group
        exact = replace(layer, dtype=torch.float64, kv_dtype=torch.float64)
        self.planner = self.make(layer, device=device, **limits)
        self.oracle = self.make(exact, device="cpu", backend="reference", **limits)
        near = self.planner.device  # of an emulated one, the CPU
        self.pools = {way: self.pool(layer, num_pages, near) for way in WAYS[:2]}
        self.pools["oracle"] = self.pool(exact, num_pages, "cpu")
        self.forget(range(num_pages))
        weights = self.weigh(layer, torch.Generator().manual_seed(3))
        self.weights = {way: [w.to(near, layer.dtype) for w in weights] for way in WAYS[:2]}
        self.weights["oracle"] = [w.to(layer.dtype).double() for w in weights]

    def make(self, layer: Layer, **options: Any) -> Any:
        return Attention(layer, page_size=PAGE, **options)

    def pool(self, layer: Layer, num_pages: int, device: torch.device | str) -> Sequence[torch.Tensor]:
        return allocate_cache(layer, num_pages, PAGE, device)

    def weigh(self, layer: Layer, generator: torch.Generator) -> list[torch.Tensor]:
        return [torch.randn(layer.num_heads, generator=generator)]  # sinks

    @property
    def width(self) -> int:
        """Columns of its input."""
        layer = self.layer
        return (layer.num_heads + layer.num_kv_heads) * layer.qk_head_dim + layer.num_kv_heads * layer.v_head_dim

    def asked(self, batch: Batch, slots: Any, accepted: list[int]) -> Any:
        """What `plan` takes; a batch of a device with lengths that the host does not know, where that may be."""
        inexact = batch.device.type != "cpu" and self.layer.chunk is None and not batch.is_prefilling.any()
        return replace(batch, exact=False) if inexact else batch

    def plan(self, way: str, asked: Any, **options: Any) -> Any:
        return (self.oracle if way == "oracle" else self.planner).plan(asked, **options)

    def forward(self, way: str, x: torch.Tensor, plan: Any) -> torch.Tensor:
        attn, pool, layer = (self.oracle if way == "oracle" else self.planner), self.pools[way], self.layer
        widths = [layer.num_heads * layer.qk_head_dim, layer.num_kv_heads * layer.qk_head_dim]
        q, k, v = x.split([*widths, x.shape[1] - sum(widths)], 1)
        q, k = (part.unflatten(1, (-1, layer.qk_head_dim)).contiguous() for part in (q, k))
        v = v.unflatten(1, (-1, layer.v_head_dim)).contiguous()
        tensors = LayerTensors(sinks=self.weights[way][0] if layer.sinks else None)
        attn.write(k, v, pool, plan, tensors)
        return attn.run(q, pool, plan, tensors=tensors).out.flatten(1)

    def forget(self, rows: Any) -> None:
        """NaN into pages, or states, that nobody owns any more."""
        for pool in self.pools.values():
            for part in pool:
                if part is not None:
                    part[list(rows)] = torch.nan


class Latents(Heads):
    """A layer of `MlaAttention`; its input is q, kv_c and k_pe."""

    def make(self, layer: Layer, **options: Any) -> Any:
        return MlaAttention(layer, page_size=PAGE, **options)

    def weigh(self, layer: Layer, generator: torch.Generator) -> list[torch.Tensor]:
        shape = (layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim), layer.kv_lora_rank)
        return [*MlaWeights.from_kv_b_proj(torch.randn(shape, generator=generator) / shape[1] ** 0.5, layer)]

    @property
    def width(self) -> int:
        return self.layer.num_heads * self.layer.qk_head_dim + self.layer.latent_dim

    def forward(self, way: str, x: torch.Tensor, plan: Any) -> torch.Tensor:
        attn, pool, layer = (self.oracle if way == "oracle" else self.planner), self.pools[way], self.layer
        q, kv_c, k_pe = x.split([self.width - layer.latent_dim, layer.kv_lora_rank, layer.qk_rope_head_dim], 1)
        q = q.unflatten(1, (layer.num_heads, -1))
        q_nope, q_pe = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        attn.write(kv_c, k_pe, pool, plan)
        return attn.run(q_nope, q_pe, kv_c, k_pe, pool, plan, MlaWeights(*self.weights[way])).out.flatten(1)


class States(Heads):
    """A layer of `Mamba`; its input is x, B and C of the convolution, and dt."""

    def make(self, layer: Layer, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name != "max_seq_len"}
        return Mamba(layer, num_draft=DRAFTS, **kept)

    def pool(self, layer: Layer, num_pages: int, device: torch.device | str) -> Sequence[torch.Tensor]:
        return allocate_states(layer, num_pages, device)

    def weigh(self, layer: Layer, generator: torch.Generator) -> list[torch.Tensor]:
        heads, channels = layer.num_heads, layer.conv_channels
        convolution = torch.randn(channels, layer.conv_width, generator=generator) / 2
        decay, bias = (torch.rand(heads, generator=generator) for _ in range(2))
        return [convolution, decay, bias]

    @property
    def width(self) -> int:
        return self.layer.conv_channels + self.layer.num_heads

    def asked(self, batch: Batch, slots: Any, accepted: list[int]) -> Any:
        if batch.device.type != "cpu":
            slots, accepted = (torch.tensor(each, device=batch.device) for each in (slots, accepted))
        return {"batch": batch, "table": slots, "num_accepted": accepted}

    def plan(self, way: str, asked: Any, **options: Any) -> Any:
        return (self.oracle if way == "oracle" else self.planner).plan(**asked, **options)

    def forward(self, way: str, x: torch.Tensor, plan: Any) -> torch.Tensor:
        mamba, (inputs, states), layer = (self.oracle if way == "oracle" else self.planner), self.pools[way], self.layer
        convolution, decay, bias = self.weights[way]
        shared = layer.num_groups * layer.state_dim
        xbc, dt = x.split([layer.conv_channels, layer.num_heads], 1)
        xbc = mamba.conv(xbc, inputs, plan, convolution)
        x, b, c = xbc.split([layer.conv_channels - 2 * shared, shared, shared], 1)
        x, b, c = (
            part.unflatten(1, (n, -1))
            for part, n in ((x, layer.num_heads), (b, layer.num_groups), (c, layer.num_groups))
        )
        tensors = SsmTensors(-decay.float(), None, bias.float(), True)
        return mamba.run(x, dt, b, c, states, plan, tensors).flatten(1)
