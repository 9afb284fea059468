"""The host side of the prefill kernel: tiles that cover every row once, in the order of their work, and their sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.conformance.inputs import segment
from portable.layer import Layer

pytest.importorskip("triton")

import portable
from portable.backends.reference import visible
from portable.backends.triton import prefill
from portable.backends.triton.prefill_tiles import TILES, longest_first, pieces, plan, tile_of

UNPREPARED = replace(prefill.KERNELS[0], prepare=None)
ARCHS = sorted(TILES)
LENS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=6)
WINDOWS = st.sampled_from([(None, None), (3, 0), (20, None), (None, 2), (0, 0)])


def layer_of(window=(None, None), causal=True, heads=6, kv_heads=2, **facts) -> Layer:
    return Layer.gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=64, window=window, causal=causal, **facts)


@given(LENS, WINDOWS, st.booleans(), st.sampled_from([16, 64]))
def test_the_tiles_hold_every_row_once_and_those_with_most_keys_come_first(lens, window, causal, rows):
    layer = layer_of(window, causal)
    made = segment(UNPREPARED, lens, layer, causal=causal)
    order = longest_first(made, layer, rows)
    found, work = [], []
    for request, part in order:
        queries, keys = lens[request]
        tile = np.arange(part * rows, min((part + 1) * rows, queries * layer.group))
        assert tile.size
        found += [(request, row) for row in tile]
        positions = torch.from_numpy(np.unique(tile // layer.group) + keys - queries)
        seen = visible(positions[:, None] - torch.arange(keys), causal, window).any(0).nonzero()
        work.append(int(seen[-1] - seen[0] + 1) if len(seen) else 0)
    assert sorted(found) == [(r, row) for r, (queries, _) in enumerate(lens) for row in range(queries * layer.group)]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [16, 24, 64, 80, 96, 128, 192, 200, 256])
def test_every_width_has_a_tile_on_every_architecture(arch, width):
    target = portable.describe(arch)
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=width, v_head_dim=min(width, 128), dtype=dtype)
        for rows in (None, 1, 40, 4096):
            tile = tile_of(target, layer, rows)
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.keys, tile.warps))
            for piece in pieces(width, tile.piece):
                assert not piece or (piece >= 16 and piece & (piece - 1) == 0)
            assert width <= sum(pieces(width, tile.piece)) < width + max(16, width)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("alibi", [False, True])
def test_each_lane_loads_16_bytes_of_k_and_of_v(arch, alibi):
    target = portable.describe(arch)
    for width, v_width in ((64, 64), (128, 128), (192, 128), (128, 192), (128, 256), (192, 192), (256, 256)):
        layer = Layer.gqa(num_heads=16, head_dim=width, v_head_dim=v_width, alibi=alibi, window=128)
        for rows in (16, 64, 4096):
            tile = tile_of(target, layer, rows)
            for columns in (pieces(width, tile.piece)[0], pieces(v_width, tile.piece)[0]):
                assert tile.keys * columns * 2 >= 16 * target.wave_size * tile.warps, (width, v_width, rows)


@pytest.mark.parametrize("arch, width, v_width", [("gfx942", 192, 128), ("gfx950", 256, 128)])
def test_float32_of_two_widths_spills_nothing(arch, width, v_width, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "ci")
    from compile_cases import attention, compiled, prefill_kernel
    from compile_facts import facts, faults

    sizes = {"num_heads": 8, "head_dim": width, "v_head_dim": v_width, "dtype": torch.float32}
    ((_, made),) = compiled(attention(prefill_kernel, 512, 512, None, **sizes), arch)
    assert faults(facts(made, arch), arch, "attention", products=True) == []


def test_a_batch_invariant_layer_has_one_tile_for_all_lengths():
    target = portable.describe("gfx942")
    layer = layer_of(batch_invariant=True)
    assert all(tile_of(target, layer, rows) == tile_of(target, layer) for rows in (1, 40, 4096))
    assert tile_of(target, layer_of(), 8) != tile_of(target, layer_of())


def test_lengths_that_are_bounds_leave_the_order_to_the_device():
    layer, target = layer_of(), portable.describe("gfx942")
    made = segment(UNPREPARED, ((40, 50), (3, 3)), layer, torch.zeros(2, 4, dtype=torch.int32), 16)
    bounds = replace(made, exact=False)
    assert plan(made, layer, target).order is not None
    work = plan(bounds, layer, target)
    assert work.order is None and work.tiles >= plan(made, layer, target).tiles
