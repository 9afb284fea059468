"""What the memory of a cache means: where a token's row is in each layout, and what its bytes stand for.

fp8 caches store x / scale, rounded to nearest and saturated at the type's largest value as torch has it (448 for
e4m3fn, 240 for e4m3fnuz, 57344 for e5m2); what is read is byte * scale. Scales do not touch wider types.
"""

from __future__ import annotations

import torch

from portable.kernel import KV
from portable.layer import Layer

Index = tuple[torch.Tensor, ...]
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})


def at(
    pages: torch.Tensor, part: str, layout: str, page: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, Index]:
    """A view of the pages and the index with which it gives the rows [n, Hkv, ...] of these tokens."""
    if layout == "strided":
        return pages, (page, offset)
    if part == "k":
        return pages.permute(0, 3, 1, 2, 4), (page, offset)  # [pages, page_size, Hkv, D/x, x]
    if layout == "k_packed":
        return pages.permute(0, 3, 1, 2), (page, offset)  # [pages, page_size, Hkv, D]
    x = pages.shape[-1]
    return pages.permute(0, 2, 4, 1, 3), (page, offset // x, offset % x)  # [pages, page_size/x, x, Hkv, D]


def page_size_of(kv: KV, layer: Layer) -> int:
    """Tokens per page of a cache in the layer's layout."""
    return kv.k.shape[1] if layer.cache_layout == "strided" else kv.k.shape[3]


def quantize(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [n, Hkv, D] (or [n, D]) as a cache of `dtype` stores them; scale a scalar or [Hkv].

    >>> quantize(torch.tensor([[[300.0]]]), torch.tensor(0.5), torch.float8_e4m3fn).float().item()
    448.0
    """
    if dtype.itemsize > 1:
        return rows.to(dtype)
    wide = rows.to(compute_of(rows.dtype))
    if scale is not None:
        wide = wide / scale.to(wide).reshape(-1, 1)
    limit = torch.finfo(dtype).max
    return wide.clamp(-limit, limit).to(dtype)  # torch casts 448 to NaN in e4m3fnuz, so clamp first


def values_of(stored: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
    """What stored rows [n, Hkv, D] (or [n, D]) stand for: byte * scale where they are fp8."""
    rows = stored.to(compute)
    return rows if scale is None or stored.dtype.itemsize > 1 else rows * scale.to(rows).reshape(-1, 1)


def compute_of(dtype: torch.dtype) -> torch.dtype:
    """What to compute in for data of a type: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
