"""What the paged Triton kernel declares, and that planning and running it read nothing from the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import portable
from portable.conformance import cells
from portable.kernel import FEATURES, KV, Needs, Segment
from portable.layer import Layer, LayerTensors
from portable.limits import Limits
from portable.platform.target import Target

pytest.importorskip("triton")

from portable.backends.triton import paged, paged_tiles
from portable.backends.triton.launch import recorded
from portable.backends.triton.xcd import order

(KERNEL,) = paged.KERNELS
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "sm80", "sm86", "sm89", "sm90", "sm120")


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def segment(queries, keys, width=64, page_size=16, causal=True) -> Segment:
    """Meta tensors have no values: whatever reads one fails."""
    queries, keys = np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32)
    return Segment(
        kernel=KERNEL,
        requests=slice(0, len(keys)),
        tokens=slice(0, int(queries.sum())),
        cu_seqlens_q=meta(len(keys) + 1),
        seq_lens=meta(len(keys)),
        block_table=meta(len(keys), width),
        page_size=page_size,
        causal=causal if isinstance(causal, bool) else meta(len(keys), dtype=torch.bool),
        max_query_len=int(queries.max()),
        max_seq_len=int(keys.max()),
        host_query_lens=queries,
        host_seq_lens=keys,
    )


def launches(arch: str | Target, layer: Layer, made: Segment):
    """What a step of one layer launches."""
    tokens, pages = made.tokens.stop, 100
    kv = (layer.num_kv_heads, layer.qk_head_dim), (layer.num_kv_heads, layer.v_head_dim)
    with recorded(portable.describe(arch) if isinstance(arch, str) else arch) as calls:
        made = replace(made, prepared=KERNEL.prepare(made, layer))
        KERNEL.run(
            meta(tokens, layer.num_heads, layer.qk_head_dim, dtype=layer.dtype),
            KV(*(meta(pages, made.page_size, *shape, dtype=layer.kv_dtype) for shape in kv)),
            made,
            layer,
            LayerTensors(),
            meta(tokens, layer.num_heads, layer.v_head_dim, dtype=layer.dtype),
            meta(layer.num_heads, tokens, dtype=torch.float32),
        )
    return calls


LAYERS = {
    "gqa": Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128),
    "window": Layer.gqa(num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True),
    "fp8": Layer.gqa(num_heads=8, num_kv_heads=1, head_dim=192, v_head_dim=128, kv_dtype=torch.float8_e4m3fn),
    "invariant": Layer.gqa(num_heads=8, num_kv_heads=8, head_dim=80, batch_invariant=True),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_launched_depends_on_no_length(arch, layer):
    """Of two steps with the same requests, tokens and table, one can be captured and the other replayed."""
    some, others = (
        [(call.grid, call.kernel.options) for call in launches(arch, layer, segment([2] * 12, keys))]
        for keys in ([1000] * 12, [2] * 6 + [17] * 6)
    )
    assert some == others


PARTITIONS = {  # compute units and XCDs of what one device is
    "MI300X whole": ("gfx942", 304, 8),
    "MI300X in two": ("gfx942", 152, 4),
    "MI300X in four": ("gfx942", 76, 2),
    "MI300X in eight": ("gfx942", 38, 1),
    "MI300A": ("gfx942", 228, 6),
    "MI350X": ("gfx950", 256, 8),
    "H100": ("sm90", 132, 1),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("arch, units, xcds", PARTITIONS.values(), ids=PARTITIONS)
def test_programs_that_read_the_same_keys_are_on_one_xcd(arch, units, xcds, kv_heads):
    """48 tokens of 16 heads a KV head are 6 tiles of 128 rows a request, listed one after the other."""
    layer = Layer.gqa(num_heads=16 * kv_heads, num_kv_heads=kv_heads, head_dim=128)
    target = replace(portable.describe(arch), compute_units=units, xcds=xcds)
    calls = launches(target, layer, segment([48] * 12, [4000] * 12, width=512))
    (attend,) = (call for call in calls if call.kernel.kernel.__name__ == "attend_kernel")
    (programs,), run = attend.grid, attend.kernel.options["RUN"]
    assert attend.kernel.options["XCDS"] == xcds and run == (1 if xcds == 1 else 4)
    work = [order(program, kv_heads, xcds, run) for program in range(programs)]
    assert sorted(work) == [(head, item) for head in range(kv_heads) for item in range(programs // kv_heads)]
    on: dict[tuple[int, int], set[int]] = {}
    for program, (head, item) in enumerate(work):
        on.setdefault((head, item // run), set()).add(program % xcds)
    assert all(len(each) == 1 for each in on.values())
    for head in range(kv_heads):  # and a head is on as few as the work of all heads allows
        dies = set().union(*(each for (of, _), each in on.items() if of == head))
        assert len(dies) <= -(-xcds // kv_heads) + bool(xcds % kv_heads and kv_heads % xcds)


@pytest.mark.parametrize("causal", [True, False, "mixed"])
def test_a_mixed_batch_is_planned_without_a_value(causal):
    made = segment([300, 1, 1, 0], [900, 5, 1000, 0], width=512, causal=causal)
    names = [call.kernel.kernel.__name__ for call in launches("gfx942", LAYERS["gqa"], made)]
    assert names == ["schedule_kernel", "attend_kernel", "combine_kernel"]


def test_tiles_that_nothing_can_split_need_one_kernel():
    full = launches("sm90", LAYERS["window"], segment([1] * 64, [8192] * 64, width=512))
    assert [call.kernel.kernel.__name__ for call in full] == ["schedule_kernel", "attend_kernel"]
    short = launches("sm90", LAYERS["gqa"], segment([1], [30], width=2))
    assert len(short) == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tile_has_keys_in_multiples_of_16_and_fits_the_device(arch):
    target = portable.describe(arch)
    for dtype, dim in product((torch.float32, torch.bfloat16), (16, 64, 80, 96, 128, 192, 256)):
        layer = Layer.gqa(num_heads=32, num_kv_heads=4, head_dim=dim, dtype=dtype)
        pad = (1 << (dim - 1).bit_length()) * dtype.itemsize
        for block_m, few in product((16, 32, 64, 128), (False, True)):
            if block_m <= paged_tiles.rows_of(layer, 1000):
                tile = paged_tiles.tile_of(target, layer, block_m, few)
                assert tile.block_n % 16 == 0
                # a stage of K and V in shared memory for each that is in flight, on NVIDIA beside the queries
                nvidia = target.vendor == "nvidia"
                stages = max(tile.num_stages - nvidia, 1)
                assert 2 * stages * tile.block_n * pad + nvidia * block_m * pad <= target.shared_memory


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"])
def test_a_tile_of_two_widths_fits_the_device(arch):
    target = portable.describe(arch)
    for dtype, (k, v) in product((torch.float32, torch.bfloat16), product((8, 72, 136, 192, 256), repeat=2)):
        layer = Layer.gqa(num_heads=8, num_kv_heads=1, head_dim=k, v_head_dim=v, dtype=dtype)
        wide, narrow = ((1 << (width - 1).bit_length()) * dtype.itemsize for width in (k, v))
        for block_m, few in product((16, 32, 64, 128), (False, True)):
            if block_m <= paged_tiles.rows_of(layer, 1000):
                tile = paged_tiles.tile_of(target, layer, block_m, few)
                weights = tile.block_n * dtype.itemsize if block_m < 128 else 0  # 102,400 bytes of 192/64 on an sm86
                stages = (tile.num_stages - 1) * tile.block_n * (wide + narrow)
                assert stages + block_m * (wide + weights) <= target.shared_memory, (k, v, block_m, few, tile)


@pytest.mark.parametrize("group, queries, dim", [(4, 1, 80), (8, 8, 192)])
def test_what_is_compiled_fits_99_kib(group, queries, dim, monkeypatch):
    """Widths are padded: three copies of 64 keys of d80 were 3 KiB more, two of 32 of d192 beside 64 rows one."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "ci")
    from compile_cases import attention, compiled

    case = attention(lambda: KERNEL, queries, 8192, 16, num_heads=8 * group, num_kv_heads=8, head_dim=dim)
    found = {name: made.metadata.shared for name, made in compiled(case, "sm86")}
    assert 0 < found["attend_kernel"] <= portable.describe("sm86").shared_memory


@pytest.mark.parametrize("arch", ["gfx942", "sm90"])
@pytest.mark.parametrize("group", [1, 3, 4, 5])
def test_a_warm_up_meets_the_kernels_of_every_number_of_queries(arch, group):
    """It takes short ones each, and of long ones powers of two."""
    layer = Layer.gqa(num_heads=2 * group, num_kv_heads=2, head_dim=64)
    limits = Limits(page_size=16, max_reqs=2, max_tokens=60, max_seq_len=400)

    def kernels(queries):
        made = [launches(arch, layer, segment([queries] * reqs, [400] * reqs)) for reqs in (1, 2)]
        return {call.kernel for calls in made for call in calls if "schedule" not in call.kernel.kernel.__name__}

    warm = set().union(*map(kernels, limits.query_lens))
    assert all(kernels(queries) <= warm for queries in range(1, 61))


def test_it_declares_every_feature_and_refuses_what_it_cannot():
    assert KERNEL.caps.features == FEATURES
    target = portable.describe("gfx942")
    assert not KERNEL.why_not(target, LAYERS["fp8"], Needs(page_size=48, query_len=4, lse=True))
    for dim, served in ((24, True), (9, False), (264, False)):
        reasons = KERNEL.why_not(target, Layer.gqa(num_heads=4, head_dim=dim), Needs(page_size=16))
        assert not reasons if served else f"head_dim {dim}" in reasons[0]


def test_the_contract_has_cases_for_every_kind_of_number_and_page():
    found = list(cells.cases(KERNEL, portable.detect("emulated:gfx942")))
    assert len(found) <= 42
    assert {case.layer.dtype for case in found} == {torch.float32, torch.float16, torch.bfloat16}
    assert {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2} <= {case.layer.kv_dtype for case in found}
    assert {case.page_size for case in found} == {1, 3, 16, 64, 256}
    assert {case.layer.qk_head_dim for case in found} >= {16, 32, 64, 80, 128, 192, 256}
