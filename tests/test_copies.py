"""Pages are copied as asked, within a pool and between pools, and what cannot be right is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from portable import KV, Layer, allocate_cache, copy_pages
from portable.layer import CACHE_LAYOUTS

LAYER = Layer.gqa(num_heads=2, head_dim=16, dtype=torch.float32)
SIZE = 2000


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_of_one_pool_are_copied_right_or_refused(data):
    """Pages of any two views, cut from one memory, with gaps and in between each other: as if read before any write."""
    memory = torch.randn(SIZE)
    views = []
    for _ in range(2):
        tokens, heads = data.draw(st.sampled_from([(16, 4), (8, 4), (4, 16)]), "strides of tokens and heads")
        page = data.draw(st.sampled_from([16, 32, 40, 64, 128]), "stride of pages")
        starts = (data.draw(st.integers(0, 350)) * 4 + data.draw(st.sampled_from([0, 0, 0, 1])) for _ in range(2))
        views.append(KV(*(memory.as_strided((4, 2, 2, 4), (page, tokens, heads, 1), at) for at in starts)))
    source, target = views
    layer = Layer.gqa(num_heads=2, head_dim=4, dtype=torch.float32)
    come, go = data.draw(st.permutations(range(4))), data.draw(st.permutations(range(4)))
    pairs = list(zip(come, go, strict=True))[: data.draw(st.integers(1, 3), "pairs")]
    places = torch.arange(SIZE)

    def touched(view: torch.Tensor, page: int) -> set[int]:
        return set(places.as_strided(view.shape, view.stride(), view.storage_offset())[page].flatten().tolist())

    before = memory.clone()
    reads = {place for page, _ in pairs for part in source for place in touched(part, page)}
    writes = [place for _, page in pairs for part in target for place in touched(part, page)]
    try:
        copy_pages(layer, source, target, pairs)
    except ValueError as error:
        assert re.search("pairs run at the same time|lie on each other|in the same memory", str(error))
        assert torch.equal(memory, before)
        event("refused")
        return
    assert not reads & set(writes) and len(writes) == len(set(writes))
    for part, other in zip(source, target, strict=True):
        for page, to in pairs:
            assert torch.equal(part[page], other[to])
    untouched = sorted(set(range(SIZE)) - set(writes))
    assert torch.equal(memory[untouched], before[untouched])


def test_views_that_share_a_page_are_refused_and_those_in_between_each_other_are_not():
    k, v = torch.randn(2, 9, 8, 2, 16)
    before = k.clone()
    for shifted in (KV(k[1:], v), KV(v, k)):
        with pytest.raises(ValueError, match="share it"):
            copy_pages(LAYER, KV(k[:8], v[:8]), KV(*(part[:8] for part in shifted)), [(3, 2), (5, 3)])
        assert torch.equal(k, before)
    layers = torch.randn(9, 2, 2, 8, 2, 16)  # pages of two layers, K and V of each side by side
    one, two = (KV(layers[:, i, 0], layers[:, i, 1]) for i in range(2))
    copy_pages(LAYER, one, two, [(3, 2), (2, 3)])
    assert torch.equal(two.k[[2, 3]], one.k[[3, 2]]) and torch.equal(two.v[[2, 3]], one.v[[3, 2]])
    with pytest.raises(ValueError, match="K pages that lie on each other"):
        copy_pages(LAYER, one, KV(torch.zeros(8, 2, 16).expand(9, 8, 2, 16), torch.zeros(9, 8, 2, 16)), [(3, 2)])


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
