"""Which launches of C++ kernels are kept and found again, and what a warm-up records; tensors pass for a GPU's."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portable import Attention, Batch, Layer, allocate_cache, describe
from portable.attention import Kernels
from portable.backends.hip import cache, launch, refresh, runtime, state_copy
from portable.backends.state_table import Tables
from portable.conformance.inputs import gathered, segment
from portable.kernel import KV, Needs, Op
from portable.layer import LayerTensors
from portable.select import parse_requested

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64)
Launched = list[tuple[str, tuple[str, ...], int, bytes]]  # kernel, defines, blocks, packed arguments


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What reaches the driver of a GPU whose tensors are the CPU's."""
    launched: Launched = []

    def load(self: launch.Function, device: int) -> Any:
        def call(config: Any, function: Any, parameters: None, extra: Any) -> int:
            _, data, _, size, _ = extra._obj
            arguments = ctypes.string_at(data, ctypes.c_size_t.from_address(size).value)
            launched.append((self.name, self.defines, runtime.CONFIG.unpack_from(config._obj)[0], arguments))
            return 0

        return SimpleNamespace(launch=call, names=runtime.NVIDIA), ctypes.c_void_p(5)

    monkeypatch.setattr(launch.Function, "load", load)
    monkeypatch.setattr(launch, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cpu"))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0 if tensor.device.type == "cpu" else -1)
    monkeypatch.setattr(state_copy, "_tables", Tables(state_copy._tables.block))  # which know their device
    for kept in launch.Launches.every:
        monkeypatch.setattr(kept, "known", {})
    return launched


def names(launched: Launched) -> list[str]:
    return [name for name, *_ in launched]


def test_a_warm_up_over_pages_that_were_written_runs_nothing(gpu: Launched, monkeypatch: pytest.MonkeyPatch):
    """The launch of an eager write is good for the layer and the pages, and a warm-up has no rows for it."""
    attn = Attention(LAYER, page_size=16, device="cpu", max_reqs=2, max_tokens=8, max_seq_len=64)
    attn._kernels = Kernels(replace(describe("sm90"), device="cuda:0"), LAYER, parse_requested("cache_write=hip"))
    pages = allocate_cache(LAYER, 4, 16, device="cpu")
    batch = Batch.from_lens([1], [5], block_table=[[0]], page_size=16, device="cpu")
    k, v = torch.zeros(2, 1, 2, 64, dtype=LAYER.dtype)

    def write() -> None:
        attn._kernels(Op.CACHE_WRITE, Needs(page_size=16)).run(k, v, pages, batch.slot_mapping, LAYER, LayerTensors())

    write()
    assert names(gpu) == ["write"]
    compiled: list[launch.Function] = []
    others = pytest.importorskip("portable.backends.triton.launch")
    monkeypatch.setattr(others, "warmup", lambda calls, device: len(calls))
    monkeypatch.setattr(launch, "warmup", lambda functions, device: compiled.extend(functions) or len(functions))
    attn.warmup(query_lens=(1,), cache=pages)
    assert names(gpu) == ["write"] and "write" in {function.name for function in compiled}
    write()
    assert names(gpu) == ["write"] * 2


def test_what_is_recorded_is_not_kept(gpu: Launched):
    pages = allocate_cache(LAYER, 4, 16, device="cpu")
    kernel = next(kernel for kernel in cache.KERNELS if kernel.caps.op is Op.CACHE_GATHER)
    part = segment(kernel, [(1, 5)], LAYER, torch.zeros(1, 1, dtype=torch.int32), 16)
    with launch.recorded(describe("sm90")) as functions:
        gathered(part, LAYER, LayerTensors(), pages)
    assert [function.name for function in functions] == ["gather"] and not gpu
    gathered(part, LAYER, LayerTensors(), pages)
    assert names(gpu) == ["gather"]


def test_a_thread_that_records_takes_no_other_threads_launches(gpu: Launched):
    table, cells = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    during: list[int] = []

    def work() -> None:
        refresh.collect(table, None, None, cells, 0)
        during.append(len(gpu))
        ended.wait(60)
        refresh.collect(table, None, None, cells, 0)

    ended = threading.Event()
    with launch.recorded(describe("sm90")) as functions:
        thread = threading.Thread(target=work)
        thread.start()
        while not during and thread.is_alive():
            thread.join(0.01)
        refresh.refresh(torch.zeros(2, dtype=torch.int64), cells[0], cells[1])
    ended.set()
    thread.join()
    assert [function.name for function in functions] == ["refresh"]
    assert during == [1] and names(gpu) == ["collect"] * 2


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def i64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


Calls = list[Callable[[], None]]
LENS, SLOTS, FLAGS = (i32(9), i32(9)), (i64(5), i64(5)), (torch.zeros(300, dtype=torch.bool),) * 2


def refreshes() -> Calls:
    """Any sizes and tensors."""
    given = ((i64(n), i32(n), i32(cells)) for n, cells in ((3, 8), (3, 9), (300, 8), (0, 8)))
    return [partial(refresh.refresh, *each) for each in given]


def advances() -> Calls:
    """As many requests as one likes, up to any length, with positions or without; other pages and tables."""
    table, wide = i32(2, 4), i32(2, 8)
    one = partial(refresh.advance, i32(2), table, i64(2))
    return [
        partial(one, i64(2), 16, 64), partial(one, None, 16, 64), partial(one, None, 16, 65),
        partial(one, None, 32, 64),
        partial(refresh.advance, i32(300), wide, i64(300), None, 16, 64),
        partial(refresh.advance, i32(2), wide[:, :4], i64(2), None, 16, 64),
        partial(refresh.advance, i32(0), table, i64(0), None, 16, 64),
    ]  # fmt: skip


def collects() -> Calls:
    """Each in one way unlike the first."""
    table, cells, rows = i32(4, 8), i32(4, 6), i32(4)
    one = partial(refresh.collect, table, None, None)
    lists = partial(refresh.collect, table, rows, rows, cells, -1, rows, 3, rows)
    return [
        partial(one, cells, -1), partial(one, i32(4, 6), -1), partial(one, cells[:3], -1),
        partial(one, cells[:, :5], -1), partial(one, i32(4, 5), -1), partial(one, cells, 0),
        partial(one, i32(0, 6), -1), partial(refresh.collect, table[:, :7], None, None, cells, -1),
        partial(refresh.collect, i32(4, 7), None, None, cells, -1),
        partial(refresh.collect, i32(4, 9)[:, :8], None, None, cells, -1),
        partial(refresh.collect, i64(4, 8), None, None, cells, -1),
        partial(refresh.collect, table, rows, None, cells, -1), partial(refresh.collect, table, None, rows, cells, -1),
        partial(lists), partial(lists, (LENS, SLOTS, FLAGS)), partial(lists, (FLAGS, LENS)), partial(lists, (SLOTS,)),
        partial(one, cells, -1, rows[:2], 3), partial(one, cells, -1, rows, 3), partial(one, cells, -1, rows, 4),
        partial(one, cells, -1, i64(4), 3), partial(one, i32(0, 6), -1, copies=(FLAGS,)),
    ]  # fmt: skip


def copies() -> Calls:
    """Of pools in words of 16 bytes and of 2."""
    even, odd, pairs, groups = torch.zeros(4, 8), torch.zeros(4, 3, dtype=torch.bfloat16), i64(1, 2), i32(2)
    copy = state_copy.state_copy
    given = ([[even]], [[odd]], [[even, odd]], [[odd, even]], [[odd], [even]], [[], [even]], [], [[]])
    return [partial(copy, pools, pairs, groups) for pools in given] + [partial(copy, [[even]], pairs[:0], groups)]


@pytest.mark.parametrize("calls", [refreshes, advances, collects, copies])
def test_a_launch_that_is_found_again_is_what_one_made_anew_would_be(
    calls: Callable[[], Calls], gpu: Launched, monkeypatch: pytest.MonkeyPatch
):
    made = calls()
    for call in made:
        for each in launch.Launches.every:
            each.known.clear()
        call()
    anew = gpu.copy()
    gpu.clear()
    for call in made:
        call()
    assert gpu == anew and len({*gpu}) > len(made) / 2
    monkeypatch.setattr(launch.Function, "prepare", None)
    for call in reversed(made):
        call()
    assert gpu[len(anew) :] == anew[::-1]


def test_a_table_of_pools_is_found_by_the_same_tensors_in_the_same_places():
    tables = Tables(lambda unit: 64)
    pools = [torch.zeros(4, 8), torch.zeros(4, 8)]
    table, unit, device, rows, address = tables.of([pools])
    assert tables.of([pools])[0] is table and unit == 16
    assert (device, rows, address) == (-1, len(table), table.data_ptr())
    assert tables.of([[each.view(4, 8) for each in pools]])[0] is table  # other tensors like them
    assert tables.of([pools[:1], pools[1:]])[0][:, 3].tolist() == [0, 1]
    assert tables.of([pools[::-1]])[0].tolist() == table.flip(0).tolist()
    pools[1].data = torch.zeros(4, 8)  # which moved
    moved = tables.of([pools])[0]
    assert moved[:, 0].tolist() == [each.data_ptr() for each in pools]
    pools[1] = torch.zeros(4, 8)
    assert tables.of([pools])[0][:, 0].tolist() == [each.data_ptr() for each in pools]


def test_a_tensor_that_took_the_place_of_a_dead_one_is_no_pool_that_was_met():
    """Its number and its memory may be the other's, and its rows half as long."""
    tables, memory = Tables(lambda unit: 64), torch.zeros(4, 8)
    for width in (8, 4) * 20:
        pool = memory[:, :width]
        assert tables.of([[pool]])[0][:, 2].tolist() == [4 * width]
        del pool


def test_a_set_of_pools_is_forgotten_with_any_of_them():
    tables, pools = Tables(lambda unit: 64), [torch.zeros(4, 8) for _ in range(3)]
    tables.of([pools])
    tables.of([pools[:1], pools[1:]])
    tables.of([pools[:2]])
    assert len(tables._met) == 3
    del pools[2]
    gc.collect()
    assert [*tables._met] == [tuple(map(id, pools))]
    pools.clear()
    gc.collect()
    assert not tables._met


@pytest.mark.parametrize("strides", [(16, 1), (4, 1), (8, 2)])
def test_a_pool_that_was_given_other_strides_where_it_is_is_looked_at_anew(strides: tuple[int, int]):
    tables, pool = Tables(lambda unit: 64), torch.zeros(8, 8)[:4]
    tables.of([[pool]])
    pool.as_strided_((4, 4), strides)
    if strides[1] > 1:
        with pytest.raises(ValueError, match=r"pools\[0\]\[0\] has strides"):
            tables.of([[pool]])
    else:
        assert tables.of([[pool]])[0].tolist() == [[pool.data_ptr(), 4 * strides[0], 16, 0]]


@pytest.mark.parametrize("how", ["write", "gather"])
def test_pages_that_are_cut_from_a_pool_for_each_call_share_a_launch(
    how: str, gpu: Launched, monkeypatch: pytest.MonkeyPatch
):
    """As engines do that unbind [2, pages, ...] in every layer."""
    pools = [
        torch.zeros(2, pages, size, 2, 64, dtype=LAYER.dtype) for pages, size in ((4, 16), (4, 16), (8, 16), (4, 32))
    ]
    rows, slots = torch.zeros(1, 2, 64, dtype=LAYER.dtype), i64(1)
    kernel = next(kernel for kernel in cache.KERNELS if kernel.caps.op is Op.CACHE_GATHER)
    part = segment(kernel, [(1, 5)], LAYER, i32(1, 1), 16)

    def call(pool: torch.Tensor) -> bytes:
        if how == "write":
            cache.write(rows, rows, KV(*pool.unbind(0)), slots, LAYER, LayerTensors())
        else:
            gathered(part, LAYER, LayerTensors(), KV(*pool.unbind(0)))
        arguments = gpu[-1][3]
        return arguments if how == "write" else arguments[:16] + arguments[32:]  # its result lies anywhere

    anew = []
    for pool in pools:
        for each in launch.Launches.every:
            each.known.clear()
        anew.append(call(pool))
    assert [call(pool) for pool in pools] == anew
    monkeypatch.setattr(launch.Function, "prepare", None)
    held = [pool.unbind(0) for pool in pools]  # so that no number of a tensor is met again
    assert [call(pool) for pool in pools] == anew and held
