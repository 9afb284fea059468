"""What a layer keeps of its tokens, pages or states: the shapes in each cache layout, and the allocation."""

from __future__ import annotations

from operator import index
from typing import NamedTuple

import torch

from portable.arguments import as_device, at_least, checked
from portable.kernel import KV
from portable.layer import Layer


def cache_shapes(layer: Layer, num_pages: int, page_size: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of the K and V pages of a cache in the layer's layout; MLA has one tensor of latents.

    `strided` is [pages, page_size, Hkv, D]; `k_packed` holds K as [pages, Hkv, D/x, page_size, x] and V as
    [pages, Hkv, D, page_size]; `shuffled` holds V as [pages, Hkv, page_size/x, D, x]; x elements are 16 bytes.

    >>> cache_shapes(Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64), num_pages=10, page_size=16)
    ((10, 16, 2, 64), (10, 16, 2, 64))
    """
    if num_pages < 1 or page_size < 1:  # before the names are made: each run and write comes here
        at_least(1, num_pages=index(num_pages), page_size=index(page_size))
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


@checked
def allocate_cache(layer: Layer, num_pages: int, page_size: int, device: torch.device | str | None = None) -> KV:
    """Zeroed pages for one layer, in its layout and `kv_dtype`.

    Args:
        layer: by `Layer.gqa` or `Layer.mla`; of Mamba, `allocate_states` makes the states.
        num_pages: pages, which block tables name as 0 to num_pages - 1.
        page_size: tokens per page.
        device: where the tensors lie; None: torch's default device.

    Returns:
        KV(k, v), each [pages, page_size, Hkv, D] where the layout is "strided", D being that of k and of v;
        "k_packed" is k [pages, Hkv, D/x, page_size, x] and v [pages, Hkv, D, page_size], "shuffled" has
        v [pages, Hkv, page_size/x, D, x], x elements being 16 bytes.
        Of MLA k is [pages, page_size, rank + rope] and v None.

    Raises:
        ValueError: num_pages or page_size below 1, or sizes that x does not divide.

    >>> layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64)
    >>> allocate_cache(layer, num_pages=4, page_size=16, device="cpu").k.shape
    torch.Size([4, 16, 2, 64])
    """
    k_shape, v_shape = cache_shapes(layer, num_pages, page_size)
    if device is not None:
        device = as_device(device)
    k = torch.zeros(k_shape, dtype=layer.kv_dtype, device=device)
    return KV(k, None if v_shape is None else torch.zeros(v_shape, dtype=layer.kv_dtype, device=device))


class StatePools(NamedTuple):
    """The states of one layer: slot i of one belongs to slot i of the other."""

    conv: torch.Tensor  # [slots, W - 1, C], the newest input last
    ssm: torch.Tensor  # [slots, H, P, N]


@checked
def allocate_states(
    layer: Layer, num_slots: int, device: torch.device | str | None = None, conv_dtype: torch.dtype | None = None
) -> StatePools:
    """Zeroed states for one layer: inputs in `conv_dtype` (None: the layer's dtype), the rest in its `kv_dtype`.

    >>> [tuple(pool.shape) for pool in allocate_states(Layer.mamba2(num_heads=80), num_slots=4, device="cpu")]
    [(4, 3, 5376), (4, 80, 64, 128)]
    """
    at_least(1, num_slots=index(num_slots))
    if device is not None:
        device = as_device(device)
    inputs = (num_slots, layer.conv_width - 1, layer.conv_channels)
    states = (num_slots, layer.num_heads, layer.qk_head_dim, layer.state_dim)
    return StatePools(
        torch.zeros(inputs, dtype=conv_dtype or layer.dtype, device=device),
        torch.zeros(states, dtype=layer.kv_dtype, device=device),
    )


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
