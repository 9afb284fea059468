"""A debug build of the C++ cache kernels, emulated: a slot or a page outside of the cache ends the launch."""

from __future__ import annotations

import pytest
import torch

from portable.backends.hip import KERNELS
from portable.conformance.inputs import segment
from portable.kernel import KV, Op
from portable.layer import Layer, LayerTensors
from portable.platform.emulated import activate
from portable.platform.emulated.machine import ExecutionError

pytest.importorskip("triton")

GATHER, WRITE = (next(kernel for kernel in KERNELS if kernel.caps.op is op) for op in (Op.CACHE_GATHER, Op.CACHE_WRITE))
LAYERS = {
    "gqa": Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float16),
    "mla": Layer.mla(num_heads=2, kv_lora_rank=32, qk_rope_head_dim=8, dtype=torch.float16),
}
PAGES, SIZE = 3, 4  # of the cache; three pages more lie behind it in the same memory


def cache_of(layer: Layer) -> KV:
    shape = (2 * PAGES, SIZE, 40) if layer.family == "mla" else (2 * PAGES, SIZE, 2, 16)
    k, v = (torch.arange(2.0 * PAGES).half().view(-1, *[1] * len(shape[1:])).expand(shape).clone() for _ in range(2))
    return KV(k[:PAGES], None if layer.family == "mla" else v[:PAGES])


def gathered(layer: Layer, *pages: int) -> torch.Tensor:
    """A number of each token: that of its page."""
    kv, tokens = cache_of(layer), SIZE * len(pages)
    table = torch.tensor([pages], dtype=torch.int32)
    rows = [None if part is None else torch.full((tokens, *part.shape[2:]), -1.0).half() for part in kv]
    assert rows[0] is not None
    part = segment(GATHER, [(1, tokens)], layer, table, SIZE)
    GATHER.run(kv, part, layer, LayerTensors(), KV(rows[0], rows[1]))
    return rows[0].flatten(1)[:, 0]


def written(layer: Layer, *slots: int) -> torch.Tensor:
    """The slots that a write changed."""
    kv = cache_of(layer)
    before = kv.k.clone()
    k = torch.full((len(slots), *kv.k.shape[2:]), 99.0).half()
    WRITE.run(k, None if kv.v is None else k, kv, torch.tensor(slots), layer, LayerTensors())
    return (kv.k != before).view(PAGES * SIZE, -1).any(1).nonzero()[:, 0]


@pytest.fixture(params=["gfx942", "gfx950"])
def device(request: pytest.FixtureRequest):
    with activate(request.param) as active:
        yield active


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("page", [PAGES, 2 * PAGES - 1, -1, 2**31 - 1])
def test_a_gather_of_a_page_outside_of_the_cache_ends_the_launch(
    device, family: str, page: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PORTABLE_DEBUG", "1")
    with pytest.raises(ExecutionError, match=r"gather, .*'s_trap 2'"):
        gathered(LAYERS[family], 1, page)


def test_without_it_a_gather_reads_what_lies_behind_the_cache(monkeypatch: pytest.MonkeyPatch):
    """In the memory that the cache is part of, as on a card."""
    monkeypatch.delenv("PORTABLE_DEBUG", raising=False)
    with activate("gfx942") as device:
        device.whole = True
        assert gathered(LAYERS["gqa"], 1, PAGES).tolist() == [1.0] * SIZE + [float(PAGES)] * SIZE


@pytest.mark.parametrize("family", LAYERS)
def test_a_debug_build_moves_what_is_in_the_cache(device, family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PORTABLE_DEBUG", "1")
    pages = (PAGES - 1, 0, 1)
    assert gathered(LAYERS[family], *pages).tolist() == [float(page) for page in pages for _ in range(SIZE)]
    assert written(LAYERS[family], PAGES * SIZE - 1, -1, 0).tolist() == [0, PAGES * SIZE - 1]


@pytest.mark.parametrize("family", LAYERS)
def test_a_slot_past_the_end_is_skipped_and_ends_a_debug_build(family: str, monkeypatch: pytest.MonkeyPatch):
    with activate("gfx942"):
        monkeypatch.setenv("PORTABLE_DEBUG", "0")
        assert written(LAYERS[family], 5, PAGES * SIZE).tolist() == [5]
        monkeypatch.setenv("PORTABLE_DEBUG", "1")
        with pytest.raises(ExecutionError, match=r"write, .*'s_trap 2'"):
            written(LAYERS[family], 5, PAGES * SIZE)
