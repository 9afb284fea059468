"""Pages are copied as asked, within a pool and between pools, and what cannot be right is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable import KV, Layer, allocate_cache, copy_pages
from portable.layer import CACHE_LAYOUTS

LAYER = Layer.gqa(num_heads=2, head_dim=16, dtype=torch.float32)


def pool(num_pages: int, layer: Layer = LAYER, page_size: int = 8) -> KV:
    made = allocate_cache(layer, num_pages, page_size, device="cpu")
    for part in made:
        if part is not None:
            part.copy_(torch.randn(part.shape))
    return made


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_a_fork_within_a_pool(layout):
    layer = Layer.gqa(num_heads=2, head_dim=16, dtype=torch.float32, cache_layout=layout)
    cache = pool(5, layer)
    before = [part.clone() for part in cache]
    copy_pages(layer, cache, cache, [(1, 4), (0, 2), (-1, 3)])
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part, old[[0, 1, 0, 3, 1]])


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)), st.permutations(range(9)), st.integers(0, 6))
def test_swapping_out_and_in_again_restores_every_page(come, go, count):
    device, host = pool(6), pool(9)
    before = [part.clone() for part in device]
    pairs = list(zip(come, go, strict=False))[:count]
    copy_pages(LAYER, device, host, pairs)
    for part in device:
        part[list(come[:count])] = torch.nan
    copy_pages(LAYER, host, device, torch.tensor([(b, a) for a, b in pairs], dtype=torch.int32).reshape(-1, 2))
    for part, old in zip(device, before, strict=True):
        assert torch.equal(part, old)


def test_latent_pages():
    layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, dtype=torch.float32)
    cache = pool(3, layer)
    copy_pages(layer, cache, cache, [(0, 2)])
    assert torch.equal(cache.k[0], cache.k[2])


@pytest.mark.parametrize(
    ("pages", "why"),
    (
        ([(0, 4)], r"page 4 of target, which has pages 0 to 3"),
        ([(7, 0)], r"page 7 of source"),
        ([(0, 1), (2, 1)], r"writes page 1 twice"),
        ([(0, 1), (1, 2)], r"reads and writes page 1"),
        (torch.zeros(3, dtype=torch.int64), r"pairs \(from, to\)"),
        (torch.zeros(3, 2), r"torch.float32"),
        ([0, 1, 2], r"pairs \(from, to\)"),
    ),
)
def test_what_cannot_be_right_is_refused(pages, why):
    cache = pool(4)
    before = cache.k.clone()
    with pytest.raises(ValueError, match=why):
        copy_pages(LAYER, cache, cache, pages)
    assert torch.equal(cache.k, before)


def test_pools_that_do_not_fit_together():
    with pytest.raises(ValueError, match=r"K pages are .*\(8, 2, 16\) in source and .*\(4, 2, 16\) in target"):
        copy_pages(LAYER, pool(4), pool(4, page_size=4), [(0, 0)])
    with pytest.raises(ValueError, match="target has no V pages"):
        copy_pages(LAYER, pool(4), KV(pool(4).k, None), [(0, 0)])


@pytest.mark.device
def test_between_a_device_and_the_host():
    device = KV(*(part.cuda() for part in pool(5) if part is not None))
    host, before = pool(3), [part.clone() for part in device]
    copy_pages(LAYER, device, host, [(4, 0), (1, 2)])
    for part, old in zip(host, before, strict=True):
        assert torch.equal(part[[0, 2]], old[[4, 1]].cpu())
    copy_pages(LAYER, host, device, [(0, 3)])
    for part, old in zip(device, before, strict=True):
        assert torch.equal(part[3], old[4])
