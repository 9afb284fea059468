"""Layer: what it derives and what it refuses."""

import math

import pytest
import torch

from portable import Layer


def test_layers_are_values():
    a, b = (Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64, window=128) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a.window == (127, 0) and a.group == 4
    assert a != Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64)


def test_the_cache_stores_the_layer_dtype_unless_told():
    assert Layer.gqa(num_heads=1, head_dim=8, dtype=torch.float16).kv_dtype == torch.float16
    assert Layer.gqa(num_heads=1, head_dim=8, kv_dtype=torch.float8_e4m3fn).kv_dtype == torch.float8_e4m3fn


def test_mla_scales_by_the_up_projected_head():
    layer = Layer.mla(num_heads=128)
    assert math.isclose(layer.scale, 192**-0.5) and layer.latent_dim == 576 and layer.v_head_dim == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_heads=0), "num_heads is 0"),
        (dict(num_heads=6, num_kv_heads=4), "num_heads 6 is not a multiple of num_kv_heads 4"),
        (dict(head_dim=0), "head_dim is 0"),
        (dict(scale=math.inf), "scale is inf"),
        (dict(scale=0.0), "scale is 0.0"),
        (dict(softcap=0.0), "softcap is 0.0"),
        (dict(softcap=math.nan), "softcap is nan"),
        (dict(window=0), "window is 0"),
        (dict(window=(-1, 0)), "window left is -1"),
        (dict(window=(3, -1)), "window right is -1"),
        (dict(chunk=0), "chunk is 0"),
        (dict(dtype=torch.int32), "dtype is torch.int32"),
        (dict(kv_dtype=torch.uint8), "kv_dtype is torch.uint8"),
        (dict(cache_layout="nhd"), "cache_layout is 'nhd'; it must be one of strided, k_packed, shuffled"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layer.gqa(**{"num_heads": 8, "head_dim": 64, **arguments})


def test_an_mla_layer_has_a_latent():
    with pytest.raises(ValueError, match="kv_lora_rank is 0"):
        Layer.mla(num_heads=8, kv_lora_rank=0)
