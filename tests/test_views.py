"""Views of caches are made once, never outlive the cache, and are those of the memory that it has now."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.backends.reach import Reach
from portable.backends.views import Views, latent, latent_parts, slot_indices, slots
from portable.kernel import KV
from portable.layer import UnsupportedError


def pages(count: int, size: int, heads: int, dim: int, order: tuple[int, ...], gap: int) -> torch.Tensor:
    """Pages [count, size, heads, dim] whose dimensions lie in memory in this order, `gap` numbers behind each page."""
    shape = (count, size, heads, dim)
    inner = [shape[d] for d in (*order, 3)]
    room = size * heads * dim + gap
    memory = torch.arange(count * room, dtype=torch.float32).view(count, room)[:, : room - gap]
    made = memory.view(count, *inner) if not gap else memory.unflatten(1, inner)
    return made.permute(0, *(1 + order.index(d) for d in (1, 2)), 3)


@given(
    count=st.integers(1, 4),
    size=st.integers(1, 4),
    heads=st.integers(1, 3),
    order=st.sampled_from([(1, 2), (2, 1)]),
    gap=st.integers(0, 3),
    paged=st.booleans(),
)
def test_a_slot_holds_the_token_of_its_page_or_the_strides_are_refused(count, size, heads, order, gap, paged):
    k = pages(count, size, heads, 2, order, gap * heads * 2)
    v = pages(count, size, heads, 2, order, gap * heads * 2)
    try:
        view = slots(KV(k, v), paged=paged)
    except ValueError as error:
        assert order == (2, 1) or gap  # heads before tokens: pages are no whole number of tokens apart
        assert "tokens apart" in str(error)
        return
    token = torch.arange(count * size)
    at = slot_indices(token, size, view.apart)
    for got, want in ((view.k, k), (view.v, v)):
        assert got.dim() == 3 + paged and got.data_ptr() == want.data_ptr()
        found = got[at].reshape(len(token), heads, 2)
        assert torch.equal(found, want.reshape(count * size, heads, 2))


def test_latent_pages_have_one_head_and_one_slot_a_token():
    cache = torch.arange(3.0 * 4 * 6).view(3, 4, 6)
    assert torch.equal(latent(KV(cache, None)).k.squeeze(2), cache)
    both = latent_parts(KV(cache, None), 4)
    assert torch.equal(torch.cat([both.v, both.k], -1).squeeze(2), cache)
    single = slots(KV(cache, None), paged=True)
    assert single.k.shape == (12, 1, 1, 6) and torch.equal(single.k.flatten(1), cache.flatten(0, 1))


def test_strides_of_a_dimension_of_one_say_nothing():
    one = torch.zeros(5, 1, 2, 4).as_strided((5, 1, 2, 4), (8, 3, 4, 1))
    view = slots(KV(one, one))
    assert view.k.shape == (5, 2, 4) and view.apart == 1


@pytest.fixture
def kept():
    made = []

    def make(kv):
        made.append(kv)
        return latent(kv)

    views = Views(make)
    views.made = made
    return views


def test_a_view_is_made_once_for_each_cache(kept):
    layers = [torch.zeros(2, 4, 6) for _ in range(3)]
    for _ in range(4):
        for layer in layers:
            assert kept(KV(layer, None)).k.data_ptr() == layer.data_ptr()
    assert len(kept.made) == 3


@pytest.mark.parametrize("dies", ["k", "v"])
def test_nothing_keeps_a_cache_that_has_died(dies):
    views = Views(latent)
    k, v = torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)
    views(KV(k, v))
    gone = ref({"k": k, "v": v}[dies])
    if dies == "k":
        del k
    else:
        del v
    gc.collect()
    assert gone() is None and not views._kept


def test_memory_that_was_changed_in_place_is_looked_at_anew(kept):
    k, v = torch.zeros(2, 4, 6), torch.ones(2, 4, 6)
    first = kept(KV(k, v))
    k.data = torch.full((2, 4, 6), 7.0)
    assert kept(KV(k, v)).k.unique().tolist() == [7.0] and first.k.unique().tolist() == [0.0]
    k.set_(torch.arange(48.0).untyped_storage(), 0, (2, 4, 6), (24, 6, 1))
    assert torch.equal(kept(KV(k, v)).k.squeeze(2), torch.arange(48.0).view(2, 4, 6))
    k.as_strided_((2, 4, 6), (24, 1, 4))
    assert torch.equal(kept(KV(k, v)).k.squeeze(2), torch.arange(48.0).view(2, 6, 4).mT)
    v.data = torch.full((2, 4, 6), 9.0)
    assert kept(KV(k, v)).v.unique().tolist() == [9.0]
    other = torch.full((2, 4, 6), 11.0)
    assert kept(KV(k, other)).v.data_ptr() == other.data_ptr()
    assert len(kept.made) == 6


def test_what_is_out_of_reach_is_refused_at_every_call():
    views = Views(latent, Reach("toy", 2, None, None))
    small, large = torch.zeros(3, 4, 6), torch.zeros(4, 4, 6)
    views(KV(small, None))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="the cache has 4 pages; toy can address 3"):
            views(KV(large, None))
    small.set_(torch.zeros(4, 4, 6))
    with pytest.raises(UnsupportedError, match="the cache has 4 pages"):
        views(KV(small, None))
