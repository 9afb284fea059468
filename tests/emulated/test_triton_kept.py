"""Kept launches: whatever changes between two calls, strides, types, scales, sizes or alignment, the second sees it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from portable.backends import reference
from portable.backends.triton import cache, copy, gather, merge
from portable.conformance.inputs import gathered
from portable.kernel import KV, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.platform.emulated import activate

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
ORACLE = next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.CACHE_GATHER)
FP8 = torch.float8_e4m3fnuz
PAGE, PAGES = 4, 6
SCALAR, PER_HEAD = torch.tensor(0.5), torch.tensor([0.5, 0.25])
SPACED = torch.tensor([0.5, 9.0, 0.25])[::2]


@pytest.fixture(autouse=True)
def device():
    with activate("gfx942"):
        yield


def shuffled(cases):
    """Every case after every other at some time: what one leaves is there for the next."""
    order = [*cases] * 3
    random.Random(7).shuffle(order)
    return order


def placed(values: torch.Tensor, how: str) -> torch.Tensor:
    """The same values: dense, an element behind a multiple of 16 bytes, or with gaps between heads and tokens."""
    if how == "odd":
        there = torch.zeros(values.numel() + 8, dtype=values.dtype)[1 : 1 + values.numel()].view(values.shape)
    elif how == "gaps":
        there = torch.zeros(*values.shape[:-2], values.shape[-2] + 1, 24, dtype=values.dtype)
        there = there[..., : values.shape[-2], : values.shape[-1]]
    else:
        return values.contiguous()
    return there.copy_(values)


def pages(count: int, how: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if how == "heads first":
        return pages(count, "dense", dtype, seed).view(count, 2, PAGE, 16).transpose(1, 2)
    if how == "every second":
        return pages(2 * count, "dense", dtype, seed)[::2]
    return torch.randn(count, PAGE, 2, 16, generator=generator).to(dtype)


CACHES = [
    *((count, how, torch.float16, None) for count in (PAGES, PAGES + 3) for how in ("dense", "heads first")),
    (PAGES, "every second", torch.float16, None),
    *((PAGES, "dense", FP8, scale) for scale in (None, SCALAR, PER_HEAD, SPACED)),
]


def tensors_of(scale: torch.Tensor | None) -> LayerTensors:
    return LayerTensors(k_scale=scale, v_scale=scale)


def copied(pool: torch.Tensor) -> torch.Tensor:
    """The same strides in other memory."""
    there = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype)
    bits(there).copy_(bits(pool))
    return there


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype is FP8 else x


def test_writes():
    new = torch.randn(3, 2, 16).half()
    cases = [*itertools.product(CACHES, ("dense", "odd", "gaps"), (True, False))]
    for (count, how, dtype, scale), rows, both in shuffled(random.Random(1).sample(cases, 16)):
        layer = replace(LAYER, kv_dtype=dtype)
        pool = KV(pages(count, how, dtype, 0), pages(count, how, dtype, 1) if both else None)
        want = KV(*(None if part is None else copied(part) for part in pool))
        given = placed(new, rows), placed(-new, rows) if both else None
        slots = torch.tensor([PAGE * count - 1, -1, 5])  # the last one of these pages
        cache.write(*given, pool, slots, layer, tensors_of(scale))
        reference.cache_write(*given, want, slots, layer, tensors_of(scale))
        for got, right in zip(pool, want, strict=True):
            assert (got is None) is (right is None)
            assert got is None or torch.equal(bits(got), bits(right)), (count, how, dtype, scale, rows, both)


def test_pages_that_grow_in_place():
    """The same tensor, of the same address, with more pages: slots behind the former end are written."""
    whole, new = torch.zeros(PAGES, PAGE, 2, 16).half(), torch.ones(1, 2, 16).half()
    k, v, slot = whole[:2], whole.clone()[:2], torch.tensor([PAGE * PAGES - 1])
    cache.write(new, new, KV(k, v), slot, LAYER, LayerTensors())
    assert not k.any() and not v.any()
    for part in (k, v):
        part.as_strided_(whole.shape, whole.stride())
    cache.write(new, new, KV(k, v), slot, LAYER, LayerTensors())
    assert k[-1, -1].eq(1).all() and v[-1, -1].eq(1).all() and k.sum() == v.sum() == 32


def test_gathers():
    for (count, how, dtype, scale), lens, wide in shuffled(
        [*itertools.product(CACHES[::2], ((5, 3), (1,)), (False, True))][::2]
    ):
        layer = replace(LAYER, kv_dtype=dtype)
        pool = KV(pages(count, how, dtype, 2), pages(count, how, dtype, 3))
        table = torch.arange(len(lens) * (5 if wide else 2), dtype=torch.int32).view(len(lens), -1) % count
        segment = of_lens(lens, table)
        segment = replace(segment, prepared=gather.prepare_gather(segment, layer))
        got = gathered(segment, layer, tensors_of(scale), pool)
        want = gathered(replace(segment, kernel=ORACLE), layer, tensors_of(scale), pool)
        assert torch.equal(got.k, want.k) and torch.equal(got.v, want.v), (count, how, dtype, scale, lens, wide)


def of_lens(lens: tuple[int, ...], table: torch.Tensor) -> Segment:
    host = np.array(lens, np.int32)
    return Segment(
        kernel=gather.KERNELS[0],
        requests=slice(0, len(lens)),
        tokens=slice(0, len(lens)),
        cu_seqlens_q=torch.arange(len(lens) + 1, dtype=torch.int32),
        seq_lens=torch.from_numpy(host),
        block_table=table,
        page_size=PAGE,
        causal=True,
        max_query_len=1,
        max_seq_len=max(lens),
        host_query_lens=np.ones_like(host),
        host_seq_lens=host,
    )


def test_merges():
    values, logs = torch.randn(3, 5, 4, 16).half(), torch.randn(3, 4, 5)
    sinks = torch.randn(4)
    for count, rows, tokens, sink, with_lse in shuffled(
        [*itertools.product((2, 3), ("dense", "odd", "gaps"), (5, 2), (None, sinks), (True, False))][::3]
    ):
        outs = [placed(each[:tokens], rows) for each in values[:count]]
        lses = [each[:, :tokens] for each in logs[:count]]
        results = [(torch.full((tokens, 4, 16), 9.0).half(), torch.full((4, tokens), 9.0)) for _ in range(2)]
        merge.merge(outs, lses, sink, results[0][0], results[0][1] if with_lse else None)
        reference.merge(outs, lses, sink, results[1][0], results[1][1] if with_lse else None)
        torch.testing.assert_close(results[0], results[1], rtol=2e-3, atol=2e-3)


def test_page_copies():
    pairs = torch.tensor([(0, 3), (2, 1), (-1, 4)])
    kinds = [(count, how, dtype) for count, how, dtype, _ in CACHES[:6]]
    for (count, come, dtype), (more, go, other) in shuffled([*itertools.product(kinds, kinds)][::3]):
        if dtype is not other:
            continue
        source = KV(pages(count, come, dtype, 4), pages(count, come, dtype, 5))
        target = KV(pages(more, go, dtype, 6), pages(more, go, dtype, 7))
        want = KV(copied(target.k), copied(target.v))
        copy.copy(source, target, pairs, LAYER)
        for read, got, right in zip(source, target, want, strict=True):
            bits(right)[pairs[:2, 1]] = bits(read)[pairs[:2, 0]]
            assert torch.equal(bits(got), bits(right)), (count, come, dtype, more, go)
