"""Cache shapes in every layout, and what their makers refuse."""

import pytest
import torch

from portable import Layer, allocate_cache
from portable.cache import cache_shapes


def test_every_layout_holds_every_token_of_every_head_once():
    for layout, kv_dtype in (
        ("strided", torch.bfloat16),
        ("k_packed", torch.bfloat16),
        ("shuffled", torch.float8_e4m3fn),
    ):
        layer = Layer.gqa(
            num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=32, kv_dtype=kv_dtype, cache_layout=layout
        )
        kv = allocate_cache(layer, num_pages=3, page_size=16, device="cpu")
        assert kv.k.numel() == 3 * 16 * 2 * 64 and kv.v.numel() == 3 * 16 * 2 * 32
        assert kv.k.dtype == kv_dtype and not kv.k.float().any()


def test_packed_layouts_hold_16_bytes_together():
    layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64, cache_layout="shuffled")
    assert cache_shapes(layer, 5, 16) == ((5, 2, 8, 16, 8), (5, 2, 2, 64, 8))
    with pytest.raises(ValueError, match="page_size 4 is not a multiple of 8"):
        cache_shapes(layer, 5, 4)


def test_mla_has_one_tensor_of_latents():
    kv = allocate_cache(Layer.mla(num_heads=16), num_pages=2, page_size=64, device="cpu")
    assert kv.k.shape == (2, 64, 576) and kv.v is None


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0), (4, -1)])
def test_pages_are_counted_from_one(num_pages, page_size):
    with pytest.raises(ValueError, match="must be an int of at least 1"):
        allocate_cache(Layer.gqa(num_heads=1, head_dim=8), num_pages, page_size)
