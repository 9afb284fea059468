"""What the contract's short requests do not show of the prefill kernel: several tiles, lengths on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from portable.conformance import contract, inputs
from portable.conformance.cells import Case
from portable.conformance.measure import error
from portable.kernel import Op
from portable.layer import Layer
from portable.platform.emulated import activate
from portable.platform.emulated.driver import DEVICES

pytest.importorskip("triton")

import portable
from portable.backends.triton import prefill, prefill_tiles

CONTIGUOUS, PAGED = prefill.KERNELS
# tiles that end in the middle of a token's heads, whole blocks of keys before the diagonal, rows without keys
LENS = ((75, 190), (0, 3), (100, 40), (16, 16))


@pytest.fixture(params=DEVICES)
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    with activate(request.param):
        yield request.param


def case(op: Op, page_size: int | None = None, causal: bool | tuple[bool, ...] = True, **facts: Any) -> Case:
    layer = Layer.gqa(**{"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16, **facts})
    return Case(op=op, layer=layer, lens=LENS, page_size=page_size, causal=causal)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"causal": (True, False, True, False)},
        {"causal": False, "sinks": True, "v_head_dim": 48},
        {"window": (70, 0)},
        {"window": (40, 9), "causal": False, "dtype": torch.float16},
        {"window": (5, None), "causal": (False, True, False, True), "sinks": True},
    ],
    ids=str,
)
def test_requests_of_several_tiles(arch: str, facts: dict[str, Any]) -> None:
    contract.check(CONTIGUOUS, case(Op.PREFILL, **facts))


@pytest.mark.parametrize("page_size", [5, 16, 64])
@pytest.mark.parametrize("window", [(None, None), (70, 0)])
def test_chunks_over_pages(arch: str, page_size: int, window: tuple[int | None, int | None]) -> None:
    contract.check(PAGED, case(Op.PAGED, page_size, window=window))


def test_a_native_and_a_foreign_fp8_cache(arch: str) -> None:
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2):
        contract.check(PAGED, replace(case(Op.PAGED, 64, kv_dtype=kv_dtype), scales="head"))


@pytest.mark.parametrize(
    ("page_size", "facts"),
    [
        (None, {"head_dim": 128}),
        (None, {"head_dim": 192, "v_head_dim": 128, "sinks": True, "causal": (True, False, True, False)}),
        (None, {"head_dim": 192, "v_head_dim": 128, "dtype": torch.float32}),
        (None, {"head_dim": 40, "v_head_dim": 64, "dtype": torch.float32, "softcap": 5.0}),
        (None, {"head_dim": 256, "v_head_dim": 200, "dtype": torch.float16, "alibi": True}),
        (16, {"head_dim": 128, "window": (70, 0), "sinks": True}),
        (5, {"head_dim": 120, "window": (40, 9), "causal": False}),
        (64, {"head_dim": 192, "v_head_dim": 128, "kv_dtype": torch.float8_e4m3fn}),
        (16, {"head_dim": 128, "kv_dtype": torch.float8_e5m2, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_rdnas_parts_of_the_columns(page_size: int | None, facts: dict[str, Any], monkeypatch: Any) -> None:
    """No RDNA device is emulated: here its tiles run on a gfx942."""
    made = case(Op.PREFILL if page_size is None else Op.PAGED, page_size, **facts)
    if "kv_dtype" in facts:
        made = replace(made, scales="scalar")
    tile = prefill_tiles.tile_of(portable.describe("gfx1100"), made.layer, 300)
    assert tile.parts == tile.warps == (4 if made.layer.qk_head_dim == 40 else 8)
    monkeypatch.setattr(prefill_tiles, "tile_of", lambda *_: tile)
    with activate("gfx942"):
        contract.check(CONTIGUOUS if page_size is None else PAGED, made)


@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_that_only_the_device_knows(arch: str, page_size: int | None) -> None:
    """The host's lengths are bounds, the tiles are found by the programs, and there are more programs than tiles."""
    kernel = CONTIGUOUS if page_size is None else PAGED
    asked = case(kernel.caps.op, page_size, window=(90, 0))
    made = inputs.build(kernel, asked, "cpu")
    segment = replace(made.segment, exact=False, host_seq_lens=made.segment.host_seq_lens + np.int32(7))
    segment = replace(segment, prepared=prefill.prepare(segment, asked.layer))
    assert segment.prepared.order is None
    want, want_lse = contract.expected(asked, made)
    out, lse = torch.full(want.shape, torch.nan, dtype=torch.bfloat16), torch.full(want_lse.shape, torch.nan)
    kernel.run(made.q, made.kv, segment, asked.layer, made.tensors, out, lse)
    assert error(out, want, contract.size_of(asked, made)) <= 1e-2
    assert error(lse, want_lse) <= 1e-2


def test_tokens_that_are_far_apart(arch: str) -> None:
    """Strides of more elements than the compiler is told to expect, as of pages with a token of every page in turn."""
    asked = case(Op.PAGED, 16, num_heads=1, num_kv_heads=1)
    made = inputs.build(PAGED, asked, "cpu")
    apart = []
    for pages in made.kv:
        assert pages is not None
        memory = torch.empty(1 << 26, dtype=pages.dtype)
        view = memory.as_strided(pages.shape, (pages.shape[-1], 1 << 22, 0, 1))
        apart.append(view.copy_(pages))
    out, want = torch.empty_like(made.q), contract.expected(asked, made)[0]
    PAGED.run(made.q, type(made.kv)(*apart), made.segment, asked.layer, made.tensors, out, None)
    assert error(out, want, contract.size_of(asked, made)) <= 1e-2
