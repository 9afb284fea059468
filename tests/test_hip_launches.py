"""Which launches of C++ kernels are kept and found again, and what a warm-up records; tensors pass for a GPU's."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portable import Attention, Batch, Layer, allocate_cache, describe
from portable.attention import Kernels
from portable.backends.hip import cache, launch, refresh, runtime
from portable.conformance.inputs import segment
from portable.kernel import Needs, Op
from portable.layer import LayerTensors
from portable.select import parse_requested

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64)
Launched = list[tuple[str, int, bytes]]  # kernel, blocks, packed arguments


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What reaches the driver of a GPU whose tensors are the CPU's."""
    launched: Launched = []

    def load(self: launch.Function, device: int) -> Any:
        def call(config: Any, function: Any, parameters: None, extra: Any) -> int:
            _, data, _, size, _ = extra._obj
            arguments = ctypes.string_at(data, ctypes.c_size_t.from_address(size).value)
            launched.append((self.name, runtime.CONFIG.unpack_from(config._obj)[0], arguments))
            return 0

        return SimpleNamespace(launch=call, names=runtime.NVIDIA), ctypes.c_void_p(5)

    monkeypatch.setattr(launch.Function, "load", load)
    monkeypatch.setattr(launch, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cpu"))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0 if tensor.device.type == "cpu" else -1)
    for module, name in ((cache, "_writes"), (cache, "_gathers"), (refresh, "_collects")):
        monkeypatch.setattr(module, name, launch.Launches())
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
    """A gather of a warm-up makes its result where the pages are."""
    pages = allocate_cache(LAYER, 4, 16, device="cpu")
    kernel = next(kernel for kernel in cache.KERNELS if kernel.caps.op is Op.CACHE_GATHER)
    part = segment(kernel, [(1, 5)], LAYER, torch.zeros(1, 1, dtype=torch.int32), 16)
    with launch.recorded(describe("sm90")) as functions:
        cache.gather(pages, part, LAYER, LayerTensors())
    assert [function.name for function in functions] == ["gather"] and not gpu
    cache.gather(pages, part, LAYER, LayerTensors())
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
