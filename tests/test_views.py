"""Views that are kept never hold memory, and are those of the memory that a tensor has now."""

from __future__ import annotations

import gc
import math
from itertools import compress, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from portable.backends.reach import Reach
from portable.backends.turns import Caches, Turns
from portable.backends.views import (
    Aliases,
    Views,
    grouped_lse,
    latent,
    latent_parts,
    slot_indices,
    slots,
    turned_lse,
)
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
            assert kept.of(layer, None).k.data_ptr() == layer.data_ptr()
    assert len(kept.made) == 3


@pytest.mark.parametrize("ends", ["del", "data", "set_"])
@pytest.mark.parametrize("which", [0, 1])
def test_nothing_keeps_the_memory_of_a_cache(which, ends):
    """Where it dies, and where it is given other memory in place and is not asked for again."""
    views = Views(latent)
    caches = [torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)]
    views.of(*caches)
    storage = StorageWeakRef(caches[which].untyped_storage())
    if ends == "del":
        del caches[which]
    elif ends == "data":
        caches[which].data = torch.ones(2, 4, 6)
    else:
        caches[which].set_(torch.ones(2, 4, 6))
    gc.collect()
    assert storage.expired()


def test_keys_alone_and_keys_beside_values_have_a_view_each(kept):
    k, v, other = torch.zeros(2, 4, 6), torch.ones(2, 4, 6), torch.ones(2, 4, 6)
    for _ in range(3):
        assert kept.of(k, None).v is None
        assert kept.of(k, v).v.data_ptr() == v.data_ptr()
        assert kept.of(k, other).v.data_ptr() == other.data_ptr()
    assert len(kept.made) == 3


def test_a_cache_that_is_cut_from_its_pool_at_each_call_has_one_view(kept):
    """As engines do that unbind [2, pages, ...] in every layer."""
    pool = torch.arange(96.0).view(2, 2, 4, 6)
    for _ in range(3):
        view = kept.of(*pool.unbind(0))
        assert torch.equal(view.k.squeeze(2), pool[0]) and view.v.data_ptr() == pool[1].data_ptr()
    assert len(kept.made) == 1


def test_caches_that_take_an_address_with_other_strides_are_seen_as_they_lie(kept):
    memory = torch.arange(96.0)
    for strides in ((24, 6, 1), (48, 6, 1), (48, 12, 1), (24, 1, 4)) * 2:
        cache = memory.as_strided((2, 4, 6), strides)
        assert torch.equal(kept.of(cache, None).k.squeeze(2), cache)
    assert len(kept.made) == 4


def test_the_number_of_views_is_bounded_and_none_is_kept_without_memory(kept, monkeypatch):
    monkeypatch.setattr(Views, "MOST", 3)
    for layer in [torch.zeros(2, 4, 6) for _ in range(8)]:
        assert kept.of(layer, None).k.data_ptr() == layer.data_ptr()
        assert len(kept._kept) <= 3
    for device in ("cpu", "meta"):
        assert kept.of(torch.zeros(0, 4, 6, device=device), None).k.device.type == device


def test_memory_that_was_changed_in_place_is_looked_at_anew(kept):
    k, v = torch.zeros(2, 4, 6), torch.ones(2, 4, 6)
    assert kept.of(k, v).k.unique().tolist() == [0.0]
    k.data = torch.full((2, 4, 6), 7.0)
    assert kept.of(k, v).k.unique().tolist() == [7.0]
    k.set_(torch.arange(48.0).untyped_storage(), 0, (2, 4, 6), (24, 6, 1))
    assert torch.equal(kept.of(k, v).k.squeeze(2), torch.arange(48.0).view(2, 4, 6))
    k.as_strided_((2, 4, 6), (24, 1, 4))
    assert torch.equal(kept.of(k, v).k.squeeze(2), torch.arange(48.0).view(2, 6, 4).mT)
    v.data = torch.full((2, 4, 6), 9.0)
    assert kept.of(k, v).v.unique().tolist() == [9.0]
    other = torch.full((2, 4, 6), 11.0)
    assert kept.of(k, other).v.data_ptr() == other.data_ptr()
    assert len(kept.made) == 6


def test_a_pool_that_changed_its_size_or_dtype_in_place_is_looked_at_anew(kept):
    pool = torch.arange(192.0).view(8, 4, 6)
    k, v = pool[:2], torch.ones(2, 4, 6)
    assert len(kept.of(k, v).k) == 2
    k.set_(pool.untyped_storage(), 0, (8, 4, 6), (24, 6, 1))
    assert torch.equal(kept.of(k, v).k.squeeze(2), pool)
    k.resize_(1, 4, 6)
    assert len(kept.of(k, v).k) == 1
    v.data = v.data.view(torch.int32)
    assert kept.of(k, v).v.dtype == torch.int32


def test_what_is_out_of_reach_is_refused_at_every_call():
    views = Views(latent, Reach("toy", 2, None, None))
    small, large = torch.zeros(3, 4, 6), torch.zeros(4, 4, 6)
    views.of(small, None)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="the cache has 4 pages; toy can address 3"):
            views.of(large, None)
    small.set_(torch.zeros(4, 4, 6))
    with pytest.raises(UnsupportedError, match="the cache has 4 pages"):
        views.of(small, None)
    pool = torch.zeros(4, 4, 6)
    growing = pool[:3]
    views.of(growing, None)
    growing.set_(pool.untyped_storage(), 0, (4, 4, 6), (24, 6, 1))
    with pytest.raises(UnsupportedError, match="the cache has 4 pages"):
        views.of(growing, None)


# Aliases: views of what a call is given, kept by address.


class Elsewhere(torch.Tensor):
    """Memory of another device at the same address."""

    def get_device(self):
        return 1


def at(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Another tensor object on the same bytes."""
    count = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(shape)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 64]),
            st.sampled_from([(2, 2, 6), (4, 1, 6), (4, 6), (1, 6, 2), (2, 4, 6)]),
            st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
            st.booleans(),
        ),
        max_size=24,
    )
)
def test_an_alias_is_what_a_view_would_be_for_whatever_lies_at_an_address(calls):
    """Tensors come and go at two addresses, in other shapes, types and strides, with other numbers each time."""
    memory, kept = torch.zeros(512, dtype=torch.uint8), Aliases(lambda rows: rows.unsqueeze(1))
    for turn, (offset, shape, dtype, strided) in enumerate(calls):
        tensor = at(memory, offset, shape, dtype)
        tensor = tensor.mT if strided else tensor
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + turn)
        got, want = kept.of(tensor), tensor.unsqueeze(1)
        assert got.dtype == want.dtype and got.data_ptr() == want.data_ptr()
        assert got.shape == want.shape and torch.equal(got, want)
        matter = [n > 1 for n in got.shape]
        assert [*compress(got.stride(), matter)] == [*compress(want.stride(), matter)]
        got.fill_(turn)
        assert (tensor == turn).all()


def test_an_alias_is_kept_for_what_is_met_again_and_given_to_any_tensor_there():
    made, memory = [], torch.zeros(96, dtype=torch.uint8)
    kept = Aliases(lambda rows: made.append(rows) or rows.unsqueeze(1))
    seen = [kept.of(at(memory, 0, (2, 3, 4), torch.float32)) for _ in range(5)]
    assert len(made) == 2 and seen[1] is seen[2] is seen[3] is seen[4]
    kept.of(at(memory, 0, (4, 3, 2), torch.float32))
    assert len(made) == 3
    rows = torch.arange(48).view(4, 12)
    for _ in range(3):
        q, _, _ = rows.split((6, 3, 3), -1)  # rows of q that lie as far apart as those of q, K and V together
        assert torch.equal(kept.of(q), q.unsqueeze(1)) and kept.of(q).stride() == (12, 6, 1)
    assert len(made) == 5


def test_a_stride_of_a_size_of_one_is_seen_behind_the_dense_one(kept):
    """Both are contiguous; what is made for the first is met there last."""
    memory = torch.zeros(24)
    dense, odd = memory.view(1, 4, 6), memory.as_strided((1, 4, 6), (7, 6, 1))
    aliases = Aliases(lambda rows: rows)
    for _ in range(3):
        aliases.of(dense), kept.of(dense, None), kept.of(memory.view(4, 6), dense)
        assert aliases.of(dense).stride() == (24, 6, 1)
    for _ in range(2):
        assert aliases.of(odd).stride() == (7, 6, 1)
        assert kept.of(odd, None).k.stride() == (7, 6, 6, 1)
        assert kept.of(memory.view(4, 6), odd).v.stride() == (7, 6, 1)


@pytest.mark.parametrize("fact", ["shape", "strides", "dtype", "device"])
@pytest.mark.parametrize("which", ["k", "v", "rows"])
def test_what_was_met_last_at_an_address_is_given_for_all_its_facts_alone(which, fact, kept):
    memory = torch.zeros(96)
    first, beside = memory[:24].view(2, 3, 4), torch.zeros(2, 3, 4)
    other = {
        "shape": memory[:24].view(3, 2, 4),
        "strides": memory.as_strided((2, 3, 4), (24, 8, 2)),
        "dtype": memory[:24].view(torch.int32).view(2, 3, 4),
        "device": first.as_subclass(Elsewhere),
    }[fact]
    of = Aliases(lambda rows: [rows]).of
    of = {"k": lambda k: kept.of(k, beside), "v": lambda v: kept.of(beside, v), "rows": of}[which]
    of(first)
    found = of(first)
    assert of(first) is found
    of(other)
    others = of(other)
    assert others is not found and of(first) is found and of(other) is others


def test_keys_beside_values_are_not_taken_for_keys_that_were_met_alone(kept):
    k, v = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    for _ in range(2):
        assert kept.of(k, None).v is None and kept.of(k, v).v.data_ptr() == v.data_ptr()


@pytest.mark.parametrize("strided", [(2, 6), (2, 3, 8)])
def test_rows_that_have_to_be_dense_and_are_not_have_no_alias(strided):
    dense = Aliases(lambda rows: rows.unsqueeze(1), dense=True)
    rows = torch.zeros(2, 6)
    for _ in range(3):
        assert dense.of(rows).shape == (2, 1, 6) and dense.of(torch.zeros(strided).mT) is None
        assert dense.of(rows.as_strided((2, 3), (6, 2))) is None


def test_strides_of_a_dimension_of_one_are_kept_apart():
    memory, kept = torch.zeros(24), Aliases(lambda rows: rows)
    odd = memory.as_strided((1, 4, 6), (7, 6, 1))
    for _ in range(2):
        assert kept.of(odd).stride() == (7, 6, 1)
    assert kept.of(memory.view(1, 4, 6)).stride() == (24, 6, 1)


def test_no_alias_is_kept_of_a_tensor_without_elements():
    kept = Aliases(lambda rows: rows.unsqueeze(1))
    for device in ("cpu", "cpu", "meta"):  # all at the address 0
        assert kept.of(torch.zeros(0, 3, 4, device=device)).device.type == device


@pytest.mark.parametrize("strided", [False, True])
def test_an_alias_holds_no_memory(strided):
    kept = Aliases(lambda rows: rows.unsqueeze(1))
    tensor = torch.zeros(2, 3, 8)[..., :4] if strided else torch.zeros(2, 3, 4)
    found = [kept.of(tensor) for _ in range(3)]
    assert found[1] is found[2]
    storage = StorageWeakRef(tensor.untyped_storage())
    del tensor, found[0]
    gc.collect()
    assert storage.expired()


def test_the_number_of_aliases_is_bounded(monkeypatch):
    monkeypatch.setattr(Aliases, "MOST", 3)
    kept, rows = Aliases(lambda rows: rows.unsqueeze(1)), torch.zeros(8, 4)
    for _ in range(3):
        for row in rows:
            kept.of(row)
            assert len(kept._kept) <= 3


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_alias_of_one_mode_is_written_in_every_other(first):
    kept, lse = Aliases(lambda rows: rows.mT), torch.zeros(3, 4)
    with first():
        kept.of(lse), kept.of(lse)
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad)):
        with mode():
            kept.of(lse).copy_(torch.full((4, 3), 1.0 + turn))
        assert (lse == 1.0 + turn).all() and not kept.of(lse).requires_grad


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_an_lse_is_seen_by_request_or_by_token(requests, queries, heads, strided):
    lse = torch.arange(1.0 * heads * requests * queries).view(heads, requests * queries)
    lse = lse.T.contiguous().T if strided else lse
    by_request = grouped_lse(lse, (requests, queries))
    for b, h, s in product(range(requests), range(heads), range(queries)):
        assert by_request[b, h, s] == lse[h, b * queries + s]
    assert torch.equal(turned_lse(lse, ()), lse.T) and by_request.data_ptr() == lse.data_ptr()


def test_devices_that_share_an_address_have_a_view_each(kept):
    here = torch.zeros(2, 4, 6)
    there = here.as_subclass(Elsewhere)
    for _ in range(2):
        kept.of(here, None), kept.of(there, None)
    assert len(kept.made) == 2
    made = []
    aliases = Aliases(lambda rows: made.append(rows) or rows)
    for _ in range(3):
        aliases.of(here), aliases.of(there)
    assert len(made) == 4


def test_nothing_is_kept_of_numbers_that_are_still_to_be_negated_or_conjugated(kept):
    numbers = torch.complex(torch.arange(24.0), torch.arange(24.0) + 1).view(1, 4, 6)
    for lazy in (numbers.conj().imag, numbers.conj()):
        aliases = Aliases(lambda rows: rows.unsqueeze(1))
        for _ in range(3):
            assert torch.equal(aliases.of(lazy), lazy.unsqueeze(1))
            assert torch.equal(kept.of(lazy, None).k.squeeze(2), lazy)
            assert torch.equal(kept.of(numbers.real, lazy).v, lazy)


# What is known of a step's tensors is not looked at again: address, strides and bytes are.


@pytest.mark.parametrize("dense", [False, True])
def test_a_turn_at_an_address_is_seen_as_it_lies(dense):
    """Dense rows, rows with gaps, and rows whose one row has another stride, all at one address in one step."""
    memory = torch.arange(96.0)
    turns = Turns(Aliases(lambda rows: rows.unsqueeze(1), dense=dense))
    for strides in ((6, 1), (12, 1), (1, 4), (6, 1)) * 4:
        rows = memory.as_strided((4, 6), strides)
        found = turns.of(rows)
        if dense and strides != (6, 1):
            assert found is None
        else:
            assert torch.equal(found, rows.unsqueeze(1)) and found.stride()[::2] == strides
    turns = Turns(turns.aliases)
    for stride in (6, 9) * 4:
        assert turns.of(memory.as_strided((1, 6), (stride, 1))).stride(0) == stride


def test_a_turn_looks_at_its_aliases_no_more_once_they_keep_a_view(monkeypatch):
    kept = Aliases(lambda rows: rows.unsqueeze(1))
    turns, rows = Turns(kept), torch.zeros(4, 6)
    found = [turns.of(rows) for _ in range(3)]
    monkeypatch.setattr(Aliases, "of", None)
    assert turns.of(rows) is found[2] is found[1]


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("which", ["turns", "k", "v"])
def test_what_is_known_of_a_step_holds_no_memory_and_nothing_lazy(which, calls):
    turns, caches = Turns(Aliases(lambda rows: rows.unsqueeze(1))), Caches(Views(latent))
    pair = [torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)]
    for _ in range(calls):
        turns.of(pair[0]), caches.of(*pair), caches.of(pair[0])
    at = 1 if which == "v" else 0
    storage = StorageWeakRef(pair[at].untyped_storage())
    del pair[at]
    gc.collect()
    assert storage.expired()
    lazy = torch.complex(torch.arange(48.0), torch.arange(48.0) + 1).view(2, 4, 6).conj().imag
    for _ in range(3):
        assert torch.equal(turns.of(lazy), lazy.unsqueeze(1)) and torch.equal(caches.of(lazy).k.squeeze(2), lazy)


def test_caches_of_a_kind_are_told_by_address_pages_and_strides():
    memory, beside = torch.arange(192.0), torch.arange(192.0) + 500
    made = []
    caches = Caches(Views(lambda kv: made.append(kv) or latent(kv)))
    turns = [((2, 4, 6), (24, 6, 1)), ((3, 4, 6), (24, 6, 1)), ((2, 4, 6), (48, 6, 1)), ((2, 4, 6), (24, 1, 4))]
    for _ in range(3):
        for shape, strides in turns:
            k = memory.as_strided(shape, strides)
            assert torch.equal(caches.of(k).k.squeeze(2), k) and caches.of(k).v is None
            for of_v in (strides, (96, 6, 1)):
                v = beside.as_strided(shape, of_v) if shape[0] == 2 else beside[96:].as_strided(shape, strides)
                found = caches.of(k, v)
                assert torch.equal(found.k.squeeze(2), k) and torch.equal(found.v, v)
            other = memory.as_strided(shape, strides).clone()
            assert caches.of(k, other).v.data_ptr() == other.data_ptr()


def test_a_pool_that_grows_out_of_reach_is_refused_where_a_smaller_one_was_met():
    caches, pool = Caches(Views(latent, Reach("toy", 2, None, None))), torch.zeros(4, 4, 6)
    for _ in range(2):
        assert len(caches.of(pool[:3]).k) == 3
        with pytest.raises(UnsupportedError, match="the cache has 4 pages; toy can address 3"):
            caches.of(pool)


def test_the_number_of_turns_that_are_known_is_bounded(monkeypatch):
    turns = Turns(Aliases(lambda rows: rows.unsqueeze(1)))
    monkeypatch.setattr(Aliases, "MOST", 3)
    for row in torch.zeros(8, 4):
        for _ in range(3):
            turns.of(row)
            assert len(turns._met) <= 3


def test_the_number_of_caches_that_are_known_is_bounded(monkeypatch):
    monkeypatch.setattr(Views, "MOST", 3)
    caches = Caches(Views(latent))
    for layer in [torch.zeros(2, 4, 6) for _ in range(8)]:
        assert caches.of(layer).k.data_ptr() == caches.of(layer).k.data_ptr() == layer.data_ptr()
        assert len(caches._met) <= 3
