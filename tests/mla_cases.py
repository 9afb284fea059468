"""MLA steps on poisoned pages, and what is right for them by up-projecting every latent of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from portable import Batch, Layer, LayerTensors
from portable.backends.reference import attend
from portable.mla_attention import MlaAttention
from portable.mla_weights import MlaWeights

HEADS, RANK, NOPE, ROPE, V_DIM = 3, 16, 8, 4, 6


def mla_layer(dtype: torch.dtype = torch.float64, **more: object) -> Layer:
    given = {"num_heads": HEADS, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    return Layer.mla(**{**given, "v_head_dim": V_DIM, "dtype": dtype, **more})


@dataclass
class Step:
    """The tensors of a step, with the latents of each request's whole history."""

    batch: Batch
    pages: torch.Tensor
    weights: MlaWeights
    q: torch.Tensor  # [T, H, nope + rope]
    new: torch.Tensor  # [T, rank + rope]
    latents: list[torch.Tensor]  # of each request [S, rank + rope]
    tensors: LayerTensors

    def run(self, attn: MlaAttention, *, return_lse: bool = False, out: torch.Tensor | None = None):
        """Plan, write and run."""
        layer = attn.layer
        plan = attn.plan(self.batch)
        kv_c, k_pe = self.new.split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
        attn.write(kv_c, k_pe, self.pages, plan, self.tensors)
        q_nope, q_pe = self.q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        return attn.run(
            q_nope,
            q_pe,
            kv_c,
            k_pe,
            self.pages,
            plan,
            self.weights,
            tensors=self.tensors,
            out=out,
            return_lse=return_lse,
        )

    def right(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, H, Dv] and lse [H, T] in float64."""
        outs, lses = [torch.empty(0, layer.num_heads, layer.v_head_dim)], [torch.empty(layer.num_heads, 0)]
        w_uk, w_uv = (half.double() for half in self.weights)
        causal = self.batch.causal
        for r, row in enumerate(self.latents):
            start, queries = self.batch.host_cu_seqlens_q[r], self.batch.query_lens[r]
            kv_c, k_pe = row.double().split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
            k_nope = torch.einsum("tr,hnr->thn", kv_c, w_uk)
            k = torch.cat([k_nope, k_pe[:, None].expand(-1, layer.num_heads, -1)], -1)
            v = torch.einsum("tr,hvr->thv", kv_c, w_uv)
            part = attend(
                self.q[start : start + queries],
                k,
                v,
                scale=layer.scale,
                causal=causal if isinstance(causal, bool) else causal[r],
                compute=torch.float64,
            )
            outs.append(part.out)
            lses.append(part.lse)
        return torch.cat([each.double() for each in outs]), torch.cat([each.double() for each in lses], 1)


def make_step(
    layer: Layer,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    page_size: int = 4,
    seed: int = 0,
    k_scale: float | None = None,
    **of_batch: object,
) -> Step:
    """A step on distinct pages in random order; every row of the pages that holds no token is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(layer.dtype)

    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    counts = [-(-s // page_size) for s in seq_lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).numpy()
    table = np.full((len(counts), max(counts, default=0) + 1), 0, dtype=np.int32)
    pages = torch.full((len(order), page_size, layer.latent_dim), torch.nan).to(layer.kv_dtype)
    scale = 1.0 if k_scale is None else k_scale
    latents, new, at = [], [normal(0, layer.latent_dim)], 0
    for row, (count, length, context) in enumerate(zip(counts, seq_lens, context_lens, strict=True)):
        table[row, :count] = order[at : at + count]
        at += count
        rows = normal(length, layer.latent_dim)
        new.append(rows[context:].clone())
        if context:
            slots = table[row, np.arange(context) // page_size].astype(np.int64) * page_size
            slots = torch.from_numpy(slots + np.arange(context) % page_size)
            stored = (rows[:context].float() / scale).to(layer.kv_dtype) if scale != 1 else rows[:context]
            pages[slots // page_size, slots % page_size] = stored.to(layer.kv_dtype)
            rows[:context] = (pages[slots // page_size, slots % page_size].double() * scale).to(layer.dtype)
        latents.append(rows)
    weight = normal(layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim), layer.kv_lora_rank)
    return Step(
        Batch.from_lens(query_lens, seq_lens, block_table=table, page_size=page_size, **of_batch),
        pages,
        MlaWeights.from_kv_b_proj(weight / layer.kv_lora_rank**0.5, layer),
        normal(sum(query_lens), layer.num_heads, layer.qk_head_dim),
        torch.cat(new),
        latents,
        LayerTensors() if k_scale is None else LayerTensors(k_scale=torch.tensor(k_scale)),
    )
