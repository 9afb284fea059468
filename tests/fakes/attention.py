"""What the stand-ins compute with: the reference, request by request, and the values of rows without keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from portable.backends.reference import attend

Bounds = tuple[int, int]  # a window as vendors write it: -1 is open


class Empty(NamedTuple):
    """What rows without keys hold."""

    out: float
    lse: float


def row(q, k, v, scale, window: Bounds, softcap, alibi, empty: Empty):
    """One request: q [Sq, H, D], k and v [Sk, Hkv, D]; out in the dtype of q, and the LSE [H, Sq] in natural log."""
    assert alibi is None or alibi.dtype == torch.float32, "slopes are read as float32"
    left, right = (None if side < 0 else side for side in window)
    out, lse = attend(q, k, v, scale=scale, causal=False, window=(left, right), softcap=softcap or None, alibi=alibi)
    blind = torch.isneginf(lse)
    out = out.masked_fill(blind.T[..., None], empty.out).to(q.dtype)
    return out, lse.float().masked_fill(blind, empty.lse)


def packed(q, k, v, cu_q, cu_k, max_q, max_k, scale, window: Bounds, softcap, alibi, empty: Empty):
    """Every request; rows beyond the longest that was announced are not computed, keys beyond it are an error."""
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    if int(cu_q[-1]) > len(q) or int(cu_k[-1]) > len(k):
        raise IndexError(f"offsets end at {int(cu_q[-1])} and {int(cu_k[-1])}; q and k have {len(q)} and {len(k)} rows")
    for r in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        if keys.stop - keys.start > max_k:
            raise IndexError(f"request {r} has {keys.stop - keys.start} keys; the longest is said to be {max_k}")
        slopes = alibi if alibi is None or alibi.dim() == 1 else alibi[r]
        made, made_lse = row(q[queries], k[keys], v[keys], scale, window, softcap, slopes, empty)
        served = min(max_q, len(made))
        out[queries.start : queries.start + served] = made[:served]
        lse[:, queries.start : queries.start + served] = made_lse[:, :served]
    return out, lse


def ready(*tensors, dtypes):
    """Floating tensors of one of these types with dense last axes; int32 ones contiguous."""
    for tensor in tensors:
        if tensor.is_floating_point():
            assert tensor.dtype in dtypes and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
        else:
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
