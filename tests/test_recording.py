"""The stand-in for captured graphs: it computes what a GPU's replay would, and refuses what a GPU refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launched import launches
from recording import RULES, CaptureError, Recorder

from portable.backends import reference
from portable.kernel import Op


@pytest.fixture(params=sorted(RULES))
def recorder(request):
    return Recorder(RULES[request.param])


def captured(recorder, function, pool=None):
    graph = recorder.CUDAGraph()
    with recorder.graph(graph, pool):
        result = function()
    return graph, result


def test_a_replay_reads_the_memory_again_and_runs_no_host_code(recorder):
    x, runs = torch.arange(4.0), []

    def forward():
        runs.append(1)
        y = torch.zeros(2, 2)
        y += x.view(2, 2).t() * 2
        y[0] = torch.nn.functional.linear(y[1:], y)[0]
        y[1, 1:] = 3
        return y

    expected = forward()
    graph, y = captured(recorder, forward)
    for scale in (1.0, -3.0):
        x.copy_(torch.arange(4.0) * scale)
        graph.replay()
        assert torch.equal(y, forward())
    assert torch.equal(x, torch.arange(4.0) * -3.0) and len(runs) == 4 and not torch.equal(y, expected)


def test_a_capture_computes_nothing(recorder):
    x = torch.zeros(3)
    graph, y = captured(recorder, lambda: x.add_(1).clone())
    assert not x.any() and y.isnan().all()
    graph.replay()
    assert torch.equal(y, torch.ones(3)) and torch.equal(x, y)


def test_memory_of_the_graph_is_nan_before_each_replay(recorder):
    x, given = torch.ones(2), []

    def forward():
        given.append(torch.empty(2))  # written behind the graph's back, below
        return given[0] + x

    graph, y = captured(recorder, forward)
    given[0].zero_()
    graph.replay()
    assert y.isnan().all()


HOST_READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: x.__setitem__(x > 0, x.clone()),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
}
PAGEABLE = {
    "tensor": lambda x: x + torch.tensor([1.0, 2.0]),
    "number": lambda x: x + torch.tensor(1.0),
    "list as an index": lambda x: x[[1, 0]],
    "from_numpy": lambda x: x.copy_(torch.from_numpy(np.ones(2, np.float32))),
    "as_tensor": lambda x: x + torch.as_tensor(np.ones(2, np.float32)),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_reading_a_tensor_on_the_host_is_refused(recorder, name):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="waits for the device"):
        captured(recorder, lambda: HOST_READS[name](x))
    HOST_READS[name](x)  # and is no more refused afterwards
    assert not recorder.is_current_stream_capturing()


@pytest.mark.parametrize("name", PAGEABLE)
def test_copies_of_pageable_memory_are_refused(recorder, name):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="not pinned"):
        captured(recorder, lambda: PAGEABLE[name](x))


def test_memory_that_was_freed_is_not_read(recorder):
    held = [torch.ones(2)]
    graph, _ = captured(recorder, lambda: held[0] * 2)
    graph.replay()
    held.clear()
    with pytest.raises(CaptureError, match="freed after the capture"):
        graph.replay()


def test_graphs_of_a_pool_spoil_what_nobody_held(recorder):
    x, pool = torch.ones(2), recorder.graph_pool_handle()
    first, kept = captured(recorder, lambda: x * 2, pool)
    second, lost = captured(recorder, lambda: x * 3, pool)
    address = second.operations[-1].results[0]
    del lost
    third, last = captured(recorder, lambda: x * 4, pool)
    for graph in (first, second):
        graph.replay()
    assert torch.equal(kept, x * 2) and torch.equal(address.read(), x * 3)
    third.replay()
    assert torch.equal(kept, x * 2) and torch.equal(last, x * 4) and address.read().isnan().all()


def test_a_cold_kernel_is_refused_and_a_warm_one_is_not(recorder):
    kernel = launches(next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.MERGE))
    outs, lses = (torch.ones(3, 2, 4), torch.zeros(3, 2, 4)), (torch.zeros(2, 3), torch.zeros(2, 3))
    out = torch.empty(3, 2, 4)
    with pytest.raises(CaptureError, match="call warmup"):
        captured(recorder, lambda: kernel.run(outs, lses, None, out, None))
    kernel.run(outs, lses, None, out, None)
    graph, _ = captured(recorder, lambda: kernel.run(outs, lses, None, out, None))
    lses[1].fill_(-torch.inf)
    graph.replay()
    assert torch.equal(out, outs[0])


def test_unloading_a_module_loses_a_capture_where_the_vendor_says_so(recorder):
    def loaded():
        kernel = launches(next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.MERGE))
        part = [torch.ones(1, 1, 1)], [torch.zeros(1, 1)]
        kernel.run(*part, None, torch.empty(1, 1, 1), None)
        return kernel

    held = [loaded()]
    if recorder.rules.unloads:
        captured(recorder, held.clear)
        return
    with pytest.raises(CaptureError, match="unloaded"):
        captured(recorder, held.clear)
    loaded()  # gone before the next one
    captured(recorder, lambda: None)


def test_a_capture_within_a_capture_is_refused(recorder):
    with pytest.raises(CaptureError, match="under way"):
        captured(recorder, lambda: captured(recorder, lambda: None))
    assert not recorder.is_current_stream_capturing()
