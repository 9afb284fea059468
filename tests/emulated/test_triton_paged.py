"""The paged Triton kernel as compiled for gfx942 and gfx950: the contract, its plan, and what it could get wrong."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch

import portable
from portable.conformance import cells, contract, inputs
from portable.kernel import KV, Op
from portable.layer import Layer, LayerTensors

pytest.importorskip("triton")

from portable.backends.triton import paged
from portable.backends.triton.paged_tiles import Tile
from portable.backends.triton.schedule import OPEN, schedule
from portable.platform.emulated import activate

(KERNEL,) = paged.KERNELS
ARCHS = ("gfx942", "gfx950")
CASES = {arch: list(cells.cases(KERNEL, portable.detect(f"emulated:{arch}"))) for arch in ARCHS}
each_case = pytest.mark.parametrize("arch, number", [(arch, n) for arch in ARCHS for n in range(len(CASES[arch]))])


@pytest.fixture(params=ARCHS)
def device(request):
    with activate(request.param) as emulation:
        yield emulation


@each_case
def test_contract(arch, number):
    with activate(arch):
        contract.check(KERNEL, CASES[arch][number], "cpu")


def batch(lens, page_size=16, causal=True):
    """A segment that is not prepared, with distinct pages."""
    width = max(-(-keys // page_size) for _, keys in lens) + 1
    table = torch.randperm(len(lens) * width).view(len(lens), width).int()
    layer = Layer.gqa(num_heads=2, head_dim=16)
    return inputs.segment(replace(KERNEL, prepare=None), lens, layer, table, page_size, causal)


@pytest.mark.parametrize("window", [(None, None), (40, 0), (7, 9)])
@pytest.mark.parametrize("lens, group", [("decode", 4), ("mixed", 3), ("many", 1)])
def test_the_items_of_a_schedule_are_all_of_the_work_once_and_the_longest_come_first(lens, group, window):
    random = np.random.default_rng(7)
    lens = {
        "decode": [(1, int(n)) for n in random.integers(0, 900, 21)],
        "mixed": [(70, 300), (1, 500), (0, 9), (5, 3), (33, 33), (2, 0), (9, 200)],
        "many": [(int(n) % 3, int(n)) for n in random.integers(0, 99, 300)],
    }[lens]
    made, block_m, block_n = batch(lens), 16, 16
    with activate("gfx942"):
        work = schedule(made, window, group, block_m, block_n, enough=4, once=9, wanted=40)
    num_items, num_merges = work.counts[:2].tolist()
    assert num_items <= len(work.items) and num_merges <= len(work.merges)
    items = work.items[:num_items].tolist()
    left, _ = (OPEN if side is None else side for side in window)  # causal: no key is to the right

    starts = np.cumsum([0, *(q for q, _ in lens)])
    seen, blocks, slots = {}, [], {}
    for first, queries, context, request, tile, low, high, slot in items:
        if queries == 0:
            continue
        assert (first, queries, context) == (starts[request], lens[request][0], lens[request][1] - lens[request][0])
        seen.setdefault((request, tile), []).append((low, max(low, high)))
        blocks.append((request, -(-high // block_n) - low // block_n))
        if slot >= 0:
            assert slot < work.slots and slots.setdefault(slot, (request, tile, len(seen[request, tile]) - 1))
    merges = {tuple(each[:3]): each[3:5] for each in work.merges[:num_merges].tolist() if each[3]}

    for request, (queries, keys) in enumerate(lens):
        for tile in range(-(-queries * group // block_m)):
            tokens = range(tile * block_m // group, min(((tile + 1) * block_m - 1) // group + 1, queries))
            low, high = max(0, keys - queries + tokens[0] - left), max(0, min(keys, keys - queries + tokens[-1] + 1))
            ranges = sorted(seen.pop((request, tile)))
            assert [n for r in ranges for n in range(*r)] == list(range(low, high)), (request, tile)
            merge = merges.pop((starts[request], queries, tile), None)
            if len(ranges) > 1:
                assert merge is not None and merge[0] == len(ranges)
                assert [slots.pop(merge[1] + part) for part in range(merge[0])] == [
                    (request, tile, part) for part in range(merge[0])
                ]
            else:
                assert merge is None
    assert not seen and not merges and not slots
    if all(queries * group <= block_m for queries, _ in lens):  # tiles of one request differ
        longest = {r: max(n for other, n in blocks if other == r) for r, _ in blocks}
        listed = [max(longest[r], 1) for r, _ in blocks]
        assert listed == sorted(listed, reverse=True)


@pytest.mark.parametrize("count, keys, once", [(2, 500, 9), (5, 320, 7), (8, 256, 8), (3, 250, 2), (1, 700, 20)])
def test_requests_as_long_as_each_other_are_cut_into_the_parts_that_end_soonest(count, keys, once):
    block = 16
    with activate("gfx942"):
        work, same = (
            schedule(batch(lens), (None, None), 4, 16, block, enough=2, once=once, wanted=40)
            for lens in ([(1, keys)] * count, [(1, keys - 2 * r) for r in range(count)])
        )
    blocks = -(-keys // block)

    def rounds(parts: int) -> int:
        """Blocks that pass until the last part is done, as many more as hold 64 keys for what a part costs."""
        return -(-count * parts // once) * (-(-blocks // parts) + 64 // block * (parts > 1))

    parts = work.counts[0].item() // count
    assert work.counts[0].item() == count * parts
    assert rounds(parts) == min(rounds(n) for n in range(1, 1 + 40 // count))
    assert same.counts[0].item() == work.counts[0].item()


def test_pages_beyond_2_to_the_31_elements(device):
    """Page ids times strides need 64 bits; the file behind the pages is sparse."""
    layer = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=32, dtype=torch.bfloat16)
    far, row = 2**30 + 64, 16 * 32
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * (2 * far + 2 * row))
        memory = torch.from_numpy(np.memmap(file, dtype=np.int16, mode="r+")).view(torch.bfloat16)
        k = memory.as_strided((3, 16, 1, 32), (far, 32, 32, 1))
        v = memory.as_strided((3, 16, 1, 32), (far, 32, 32, 1), row)
        pages = torch.randn(2, 3, 16, 1, 32).bfloat16()
        k.copy_(pages[0])
        v.copy_(pages[1])
        case = cells.Case(op=Op.PAGED, layer=layer, lens=((1, 40),), page_size=16)
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
        made = inputs.segment(KERNEL, case.lens, layer, table, 16)
        q, out = torch.randn(1, 2, 32).bfloat16(), torch.empty(1, 2, 32).bfloat16()
        KERNEL.run(q, KV(k, v), made, layer, LayerTensors(), out, None)
    keys, values = (each[table[0].long()].reshape(48, 32)[:40].double() for each in pages)
    want = (q[0].double() @ keys.T * layer.scale).softmax(-1) @ values
    torch.testing.assert_close(out[0].double(), want, rtol=0, atol=2e-2)


def run(lens, layer, seed=0, tile=None, of=None, joins=None):
    """The output of a batch, or of one request of it alone, on data that are the same for both."""
    generator = torch.Generator().manual_seed(seed)
    made = batch(lens)
    pages = int(made.block_table.max()) + 1
    k, v = (
        torch.randn(pages, 16, layer.num_kv_heads, layer.qk_head_dim, generator=generator).to(layer.dtype)
        for _ in range(2)
    )
    q = torch.randn(sum(n for n, _ in lens), layer.num_heads, layer.qk_head_dim, generator=generator).to(layer.dtype)
    table = torch.randperm(pages, generator=generator).int().view(made.block_table.shape)
    if of is not None:
        first = sum(n for n, _ in lens[:of])
        q, table, lens = q[first : first + lens[of][0]], table[of : of + 1], lens[of : of + 1]
    made = inputs.segment(replace(KERNEL, prepare=None), tuple(lens), layer, table, 16)
    prepared = paged.prepare(made, layer, tile)
    made = replace(made, prepared=prepared if joins is None else replace(prepared, joins=joins))
    out = torch.full_like(q, torch.nan)
    tensors = LayerTensors(sinks=torch.zeros(layer.num_heads) if layer.sinks else None)
    KERNEL.run(q, KV(k, v), made, layer, tensors, out, None)
    return out, made


def test_a_sink_of_minus_infinity_is_no_sink(device):
    """Of rows without keys too, whose LSE is then -inf: there -inf - -inf is not a number."""
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, sinks=True, dtype=torch.float32)
    sinks = torch.tensor([-torch.inf, 0.5, -torch.inf, -1])
    kv, made = KV(*torch.randn(2, 2, 16, 2, 16)), batch([(3, 1), (1, 9)])
    made = inputs.segment(KERNEL, ((3, 1), (1, 9)), layer, made.block_table % 2, 16)
    q, out, lse = torch.randn(4, 4, 16), torch.empty(4, 4, 16), torch.empty(4, 4)
    KERNEL.run(q, kv, made, layer, LayerTensors(sinks=sinks), out, lse)
    torch.testing.assert_close(lse[:, :2], sinks[:, None].expand(4, 2))
    assert not out[:2].any()
    plain, without = replace(layer, sinks=False), torch.empty(4, 4)
    KERNEL.run(q, kv, made, plain, LayerTensors(), torch.empty_like(out), without)
    torch.testing.assert_close(lse[::2, 2:], without[::2, 2:])
    assert not lse.isnan().any() and not out.isnan().any()


def test_a_program_that_joins_several_rows_joins_each(device):
    """More rows than programs: a tile of every request is split, and one request has no queries."""
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16)
    tile = Tile(block_n=16, num_warps=2, num_stages=2, programs=2, enough=16)
    lens = [(3, 150), (0, 90), (1, 7), (2, 200)]
    many, made = run(lens, layer, tile=tile)
    assert made.prepared.work.counts[1] > 0
    few, _ = run(lens, layer, tile=tile, joins=3)
    assert torch.equal(many, few) and not many.isnan().any()


def test_a_request_has_the_same_bits_alone_and_in_any_batch(device):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, batch_invariant=True)
    tile = Tile(block_n=16, num_warps=2, num_stages=2, programs=2, enough=32)
    lens = [(3, 150), (1, 90), (1, 7)]
    together, made = run(lens, layer, tile=tile)
    assert made.prepared.work.counts[1] > 0
    first = 0
    for request, (queries, _) in enumerate(lens):
        alone, _ = run(lens, layer, tile=tile, of=request)
        assert torch.equal(alone, together[first : first + queries])
        first += queries


def test_short_windows_are_not_split_and_long_sequences_are(device):
    lens = [(1, 100 + 7 * r) for r in range(5)]
    tile = Tile(block_n=16, num_warps=2, num_stages=2, programs=2, enough=64)
    for window, split in ((20, False), ((None, None), True)):
        layer = Layer.gqa(num_heads=256, num_kv_heads=128, head_dim=16, window=window, sinks=True, dtype=torch.float16)
        whole, made = run(lens, layer, tile=tile)
        assert (made.prepared.parts is not None) == split
        one, other = run(lens, layer, tile=replace(tile, block_n=128))
        assert other.prepared.work.counts[1] == 0
        torch.testing.assert_close(whole, one, rtol=0, atol=3e-3)
