"""Acme's kernels: each is what it can do, as data, and its function."""

from __future__ import annotations

import math

import torch

from portable.kernel import KV, Kernel, KernelCaps, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.sets import ANY, ANY_SIZE


def paged(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention of q [T, H, D] over the pages of a cache, in plain torch: what a launch on the device will replace.

    kv.k is [pages, page_size, Hkv, D], kv.v [pages, page_size, Hkv, Dv]; out [T, H, Dv] and lse [H, T] are written.
    """
    assert kv.v is not None and segment.block_table is not None
    starts, lens = segment.cu_seqlens_q.tolist(), segment.seq_lens.tolist()
    for request, num_keys in enumerate(lens):
        rows = slice(starts[request], starts[request + 1])
        num_queries = starts[request + 1] - starts[request]
        pages = segment.block_table[request, : -(-num_keys // segment.page_size)].long()
        keys, values = (pool[pages].flatten(0, 1)[:num_keys].float() for pool in (kv.k, kv.v))

        # the last query sits at the last key; distance [Sq, Sk] is how far behind a query a key is
        positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        distance = positions[:, None] - torch.arange(num_keys, device=q.device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if segment.causal if isinstance(segment.causal, bool) else segment.causal[request]:
            visible &= distance >= 0
        left, right = layer.window
        if left is not None:
            visible &= distance <= left
        if right is not None:
            visible &= distance >= -right

        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys.repeat_interleave(layer.group, 1)) * layer.scale
        scores = scores.masked_fill(~visible, -math.inf)  # what no query sees may hold NaN
        logits = scores
        if tensors.sinks is not None:  # one more logit per head, whose value is 0
            sinks = tensors.sinks.float()[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([scores, sinks], -1)
        total = torch.logsumexp(logits, -1)
        weights = torch.exp(scores - total[..., None]).masked_fill(~visible, 0)  # a row without keys: 0
        values = values.masked_fill(~visible.any(0)[:, None, None], 0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(layer.group, 1)).to(out.dtype)
        if lse is not None:
            lse[:, rows] = total


KERNELS = (
    Kernel(
        KernelCaps(
            op=Op.PAGED,
            name="acme.paged",
            provider="acme",
            vendors={"acme", "cpu"},  # "cpu" while it is plain torch
            archs=ANY,
            dtypes={torch.float32, torch.bfloat16, torch.float16},
            head_dims=ANY_SIZE,
            gqa_ratios=ANY_SIZE,
            page_sizes=ANY_SIZE,
            features=frozenset({"window", "sinks", "noncausal", "lse"}),
            tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        ),
        run=paged,
    ),
)
