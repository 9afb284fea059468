"""What the C++ paged decode promises beyond one call: bits in any batch, lengths of the device, replays; many parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import portable
from portable import warmup
from portable.backends.hip import KERNELS, launch, paged_decode
from portable.backends.hip.paged_decode import LEAST, _chunk, cut_of, prepare
from portable.conformance import cells, contract, laws
from portable.conformance.inputs import build
from portable.kernel import KV, Op
from portable.limits import Limits
from portable.mha import segment_of
from portable.platform.emulated import activate

pytest.importorskip("triton")

(KERNEL,) = (kernel for kernel in KERNELS if kernel.name == "hip.paged_decode")
TARGET = portable.detect("emulated:gfx942")
CASES = list(cells.cases(KERNEL, TARGET))


@pytest.mark.parametrize("law", [laws.Law.BATCH, laws.Law.BOUNDS, laws.Law.REPLAY], ids=str)
def test_laws(law: laws.Law):
    shown = 0
    with activate("gfx942"):
        for case in CASES[:: 16 if law is laws.Law.BATCH else 8]:
            if law is laws.Law.REPLAY and isinstance(case.causal, tuple):
                continue  # which request is causal is no part of what a replay changes
            asked = laws.asked(law, KERNEL, case, TARGET)
            if isinstance(asked, tuple) and not asked[1]:
                laws.check(law, KERNEL, asked[0], TARGET)
                shown += 1
    assert shown >= 3


def test_layers_of_a_step_share_what_is_prepared():
    """Each call leaves the counters of parts as it found them, so the next layer's parts are joined as well."""
    case = next(case for case in CASES if case.lens == cells.LENS["long_decode"])
    with activate("gfx942"):
        inputs = build(KERNEL, case, "cpu")
        assert inputs.segment.prepared.splits > 1
        first, second = (contract.call(KERNEL, case, inputs)[0].clone() for _ in range(2))
        assert torch.equal(first, second) and not inputs.segment.prepared.arrived.any()


@pytest.mark.parametrize("lens", [[1000] * 8, [7, 1, 30000, 400], [1], [131072] * 2, [16] * 500])
@pytest.mark.parametrize("step", [32, 64])
def test_parts_are_whole_turns_and_fill_the_device(lens: list[int], step: int):
    """There are at most four times as many parts as run at once, beside one that each request begins."""
    places, heads = 264, 8
    chunk = _chunk(np.array(lens, np.int32), len(lens) * heads, places, step)
    blocks = sum(-(-n // chunk) for n in lens) * heads
    least = max(step, LEAST)
    assert chunk % step == 0 and chunk >= least
    assert blocks <= 4 * places + len(lens) * heads
    assert chunk == least or blocks * 4 > places  # no device is left idle for fewer parts


def test_a_step_of_bounds_is_cut_on_the_device():
    case = next(case for case in CASES if case.lens == cells.LENS["long_decode"])
    with activate("gfx942"):
        made = replace(build(KERNEL, case, "cpu").segment, exact=False, max_seq_len=1 << 20)
        prepared = prepare(made, case.layer)
    places = prepared.cut.blocks * (TARGET.compute_units or 64)
    assert prepared.chunk == max(LEAST, prepared.cut.step) and places // 2 < prepared.blocks <= places


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("width", [64, 128])  # vector units and matrix units
def test_a_nan_byte_of_a_key_that_is_seen_is_not_a_number(width: int, flavour: torch.dtype, part: str):
    given = next(c for c in CASES if c.layer.kv_dtype == flavour and c.layer.num_kv_heads > 1)
    layer = replace(given.layer, window=(None, None), causal=True, qk_head_dim=width, v_head_dim=width)
    case = replace(given, layer=layer, causal=True, pages="nhd", lens=cells.LENS["extend"])
    with activate("gfx942"):
        inputs = build(KERNEL, case, "cpu")
        assert inputs.segment.prepared.cut.matrix == (width == 128)
        table, pages = inputs.segment.block_table, getattr(inputs.kv, part)
        request = max(range(len(case.lens)), key=lambda r: case.lens[r][1] * (case.lens[r][0] > 0))
        assert table is not None
        byte = 0x80 if flavour == torch.float8_e4m3fnuz else 0xFF
        pages.view(torch.uint8)[int(table[request, 0]), 0, 0, 3] = byte
        out = contract.call(KERNEL, case, inputs)[0]
    first = sum(queries for queries, _ in case.lens[:request])
    mine = out[first : first + case.lens[request][0], : case.layer.group]
    assert mine.isnan().all() if part == "k" else mine[..., 3].isnan().all()
    assert not out[:, case.layer.group :].isnan().any() and not out[:first].isnan().any()


def test_a_warm_up_compiles_what_steps_launch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    layer = portable.Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=48, dtype=torch.float16)
    limits = {"max_reqs": 1, "max_tokens": 1, "max_seq_len": 16}
    attn = portable.Attention(layer, page_size=16, backend="cache_write=hip.cache_write", **limits)
    launch._emulated.cache_clear()
    assert attn.warmup(query_lens=(1,)) and not attn.warmup(query_lens=(1,))
    known = launch._emulated.cache_info().misses
    batch = portable.Batch.from_lens([1], [6], block_table=np.array([[2]], np.int32), page_size=16)
    k, cache = torch.ones(1, 2, 48, dtype=torch.float16), portable.allocate_cache(layer, 3, 16)
    attn.write(k, k, cache, attn.plan(batch))
    assert cache.k[2, 5].eq(1).all() and launch._emulated.cache_info().misses == known > 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_blocks_of_16_rows_are_right(arch: str, monkeypatch: pytest.MonkeyPatch):
    """On a device of two compute units: the contract's requests leave larger ones half empty, and get blocks of 8."""
    few = replace(portable.detect(f"emulated:{arch}"), compute_units=2)
    monkeypatch.setattr(paged_decode, "target_of", lambda _: few)
    met = set()
    with activate(arch):
        for case in (*CASES, *(replace(case, lens=((4, 400),), causal=True) for case in CASES)):
            if cut_of(case.layer, max(queries for queries, _ in case.lens), arch).rows < 16:
                continue
            inputs = build(KERNEL, case, "cpu")
            made = inputs.segment.prepared
            kind = made.cut.width, made.cut.vec, made.splits
            if made.cut.rows == 16 and kind not in met:
                laws.is_right(KERNEL, case, inputs, *contract.call(KERNEL, case, inputs))
                met.add(kind)
    assert {(64, 8, 1), (128, 8, 1), (128, 16, 1)} < met and max(splits for _, _, splits in met) > 2


@pytest.mark.parametrize("max_seq_len", [64, 4096], ids=["8 alone", "both"])
def test_a_warm_up_compiles_blocks_of_8_and_of_16_rows(max_seq_len):
    """Which of them a step takes is a matter of its requests and keys, and of whether all are causal."""
    layer = portable.Layer.gqa(num_heads=16, num_kv_heads=1, head_dim=64)
    limits = Limits(page_size=16, max_reqs=4, max_tokens=4, max_seq_len=max_seq_len)
    met, compiled = set(), set()
    q = torch.empty((4, 16, 64), dtype=layer.dtype, device="meta")
    kv = KV(*(torch.empty((8, 16, 1, 64), dtype=layer.dtype, device="meta") for _ in range(2)))
    with launch.recorded(TARGET) as functions:
        for batch in warmup.steps(limits, (1,)):
            part = segment_of(batch, layer, lambda *_: KERNEL, slice(0, batch.padded_reqs), Op.PAGED, False)
            part = replace(part, prepared=prepare(part, layer))
            met.add(part.prepared.cut.rows)
            rows = q[: batch.num_tokens]
            KERNEL.run(rows, kv, part, layer, portable.LayerTensors(), torch.empty_like(rows), None)
            compiled |= {each for function in functions for each in function.defines if each.startswith("ROWS")}
            assert compiled == {"ROWS=8", "ROWS=16"}
    assert met == ({8} if max_seq_len == 64 else {8, 16})
