"""The pages of a layer: their shapes in each cache layout, and their allocation."""

from __future__ import annotations

import torch

from portable.kernel import KV
from portable.layer import Layer


def cache_shapes(layer: Layer, num_pages: int, page_size: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of the K and V pages of a cache in the layer's layout; MLA has one tensor of latents.

    `strided` is [pages, page_size, Hkv, D]; `k_packed` holds K as [pages, Hkv, D/x, page_size, x] and V as
    [pages, Hkv, D, page_size]; `shuffled` holds V as [pages, Hkv, page_size/x, D, x]; x elements are 16 bytes.

    >>> cache_shapes(Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64), num_pages=10, page_size=16)
    ((10, 16, 2, 64), (10, 16, 2, 64))
    """
    for name, value in (("num_pages", num_pages), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if layer.family == "mla":
        return (num_pages, page_size, layer.latent_dim), None
    heads, k_dim, v_dim = layer.num_kv_heads, layer.qk_head_dim, layer.v_head_dim
    if layer.cache_layout == "strided":
        return (num_pages, page_size, heads, k_dim), (num_pages, page_size, heads, v_dim)
    x = 16 // layer.kv_dtype.itemsize
    if k_dim % x:
        raise ValueError(f"head_dim {k_dim} is not a multiple of {x}, which cache layout {layer.cache_layout!r} needs")
    k_shape = (num_pages, heads, k_dim // x, page_size, x)
    if layer.cache_layout == "k_packed":
        return k_shape, (num_pages, heads, v_dim, page_size)
    if page_size % x:
        raise ValueError(f"page_size {page_size} is not a multiple of {x}, which cache layout 'shuffled' needs")
    return k_shape, (num_pages, heads, page_size // x, v_dim, x)


def allocate_cache(layer: Layer, num_pages: int, page_size: int, device: torch.device | str | None = None) -> KV:
    """Zeroed pages for one layer, in its layout and `kv_dtype`.

    >>> layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64)
    >>> allocate_cache(layer, num_pages=4, page_size=16, device="cpu").k.shape
    torch.Size([4, 16, 2, 64])
    """
    k_shape, v_shape = cache_shapes(layer, num_pages, page_size)
    k = torch.zeros(k_shape, dtype=layer.kv_dtype, device=device)
    return KV(k, None if v_shape is None else torch.zeros(v_shape, dtype=layer.kv_dtype, device=device))


def token_bytes(layer: Layer) -> int:
    """Bytes that one token takes in the cache of one layer.

    >>> token_bytes(Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64)), token_bytes(Layer.mla(num_heads=128))
    (512, 1152)
    """
    if layer.family in ("mamba1", "mamba2"):
        return 0  # a state does not grow with the tokens
    if layer.family == "mla":
        return layer.latent_dim * layer.kv_dtype.itemsize
    return layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim) * layer.kv_dtype.itemsize
