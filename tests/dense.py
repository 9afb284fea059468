"""Attention of one request as its definition says, row by row in float64 numpy, for checking the oracle itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def dense_mask(num_queries: int, num_keys: int, causal: bool, left: int | None, right: int | None) -> Mask:
    """[Sq, Sk], True where query i, which sits at key i + Sk - Sq, sees key j."""
    mask = np.zeros((num_queries, num_keys), dtype=bool)
    for i in range(num_queries):
        here = i + num_keys - num_queries
        for j in range(num_keys):
            behind, ahead = here - j, j - here
            mask[i, j] = (
                not (causal and ahead > 0)
                and not (left is not None and behind > left)
                and not (right is not None and ahead > right)
            )
    return mask


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi: Array | None = None,
) -> tuple[Array, Array]:
    """q [Sq, H, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv], mask [Sq, Sk] to out [Sq, H, Dv] and lse [H, Sq]."""
    num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads, v_dim = v.shape
    out, lse = np.zeros((num_queries, num_heads, v_dim)), np.full((num_heads, num_queries), -np.inf)
    for h in range(num_heads):
        kv_head = h * num_kv_heads // num_heads
        for i in range(num_queries):
            here = i + num_keys - num_queries
            seen = [j for j in range(num_keys) if mask[i, j]]
            logits = []
            for j in seen:
                score = scale * float(q[i, h] @ k[j, kv_head])
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                if alibi is not None:
                    score -= float(alibi[h]) * abs(here - j)
                logits.append(score)
            everything = logits if sinks is None else [*logits, float(sinks[h])]
            if any(np.isfinite(everything)):
                lse[h, i] = np.logaddexp.reduce(everything)
            for j, score in zip(seen, logits, strict=True):
                out[i, h] += math.exp(score - lse[h, i]) * v[j, kv_head]
    return out, lse
