"""After warm-up nothing that a captured step launches is cold, on described devices: what is compiled, not compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from portable import Attention, Batch, Layer, LayerTensors, Mamba, SsmTensors, allocate_cache, allocate_states, describe
from portable.attention import Kernels
from portable.backends.hip import launch as cpp
from portable.backends.triton import launch
from portable.select import parse_requested
from portable.sizes import Size

PAGE = 16
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
LAYERS = {
    "full": Layer.gqa(**HEADS),
    "window and sinks": Layer.gqa(**HEADS, window=50, sinks=True),
    "local": Layer.gqa(**HEADS, chunk=64),
    "fp8": Layer.gqa(**HEADS, kv_dtype=torch.float8_e4m3fn),
}
SIZES = [
    Size(1),
    Size(3),
    Size(8),
    Size(8, ahead=2),
    Size(4, 4),
    Size(8, 4),
    Size(8, 4, seq_len=112),
    Size(4, 16, tokens=24),
]


def described(attn, arch, backend="triton"):
    """Its kernels are chosen, and recorded, for a device that is not here."""
    target = replace(describe(arch), device="cuda:0", compute_units=132)
    attn._kernels = Kernels(target, attn.layer, parse_requested(backend))
    return attn


def kinds(calls):
    """What the launches of Triton are compiled for, with their kernels' names."""
    return {
        (id(call.kernel), call.kernel.kernel_of(call.arguments).kind(0, call.arguments)): call.kernel.kernel.fn.__name__
        for call in calls
    }


@pytest.fixture
def compiled(monkeypatch):
    """What warm-up compiled: kinds of Triton's launches, and functions of C++."""
    found = {}
    monkeypatch.setattr(launch, "warmup", lambda calls, device: found.update(kinds(calls)) or len(found))
    monkeypatch.setattr(cpp, "warmup", lambda functions, device: found.update(dict.fromkeys(functions)) or len(found))
    return found


def step(rng, size):
    rows = int(rng.integers(1, size.reqs + 1))
    new = (
        np.full(rows, size.queries)
        if size.uniform
        else rng.integers(1, 1 + min(size.queries, size.tokens // rows), rows)
    )
    most = (size.seq_len or 400) - size.ahead
    lens = new + rng.integers(0, most - new + 1)
    return Batch.from_lens(new, lens, block_table=rng.integers(0, 40, (rows, 25)).astype(np.int32), page_size=PAGE)


@pytest.mark.parametrize(
    ("arch", "name"), [("gfx942", "window and sinks"), ("gfx942", "local"), ("gfx950", "full"), ("sm90", "fp8")]
)
def test_attention(arch, name, compiled):
    layer, rng = LAYERS[name], np.random.default_rng(3)
    attn = Attention(layer, page_size=PAGE, device="cpu", max_reqs=8, max_tokens=64, max_seq_len=400)
    described(attn, arch)
    assert attn.warmup(query_lens=(1, 4, 16)) > 0
    cache, scale = (
        allocate_cache(layer, 40, PAGE, device="cpu"),
        torch.ones(()) if layer.kv_dtype.itemsize == 1 else None,
    )
    tensors = LayerTensors(torch.zeros(8) if layer.sinks else None, k_scale=scale, v_scale=scale)
    with launch.recorded(attn._kernels.target) as calls, cpp.recorded(attn._kernels.target) as functions:
        for size in (each for each in SIZES if layer.chunk is None or not each.ahead):
            for _ in range(2):
                plan, tokens = attn.plan(step(rng, size), pad_to=size), size.padded_tokens
                q, k, v = (torch.empty(tokens, heads, 64, dtype=layer.dtype) for heads in (8, 2, 2))
                attn.write(k, v, cache, plan, tensors)
                attn.run(q, cache, plan, tensors=tensors, return_lse=bool(rng.integers(2)))
                if size.ahead:
                    attn.advance(plan)
    cold = {each for key, each in kinds(calls).items() if key not in compiled}
    cold |= {function.name for function in functions if function not in compiled}
    assert calls and not cold


@pytest.mark.parametrize(("arch", "family"), [("gfx942", "mamba1"), ("gfx942", "mamba2"), ("sm90", "mamba2")])
def test_states(arch, family, compiled):
    """Padded decodes and drafts, slots and counts of a device among them, and steps that read prompts."""
    layer = {"mamba1": Layer.mamba1(num_channels=128), "mamba2": Layer.mamba2(num_heads=4)}[family]
    mamba = described(Mamba(layer, device="cpu", max_reqs=8, max_tokens=64, num_draft=3), arch)
    assert mamba.warmup() > 0
    pools, heads, rng = allocate_states(layer, 40, "cpu"), layer.num_heads, np.random.default_rng(4)
    weight, bias = torch.empty(layer.conv_channels, layer.conv_width).bfloat16(), torch.empty(layer.conv_channels)
    a = torch.empty((heads, layer.state_dim) if family == "mamba1" else heads)
    tensors = SsmTensors(a, torch.empty(heads), torch.empty(heads))
    with launch.recorded(mamba._kernels.target) as calls, cpp.recorded(mamba._kernels.target) as functions:
        mamba._slots.clear()
        for size in (Size(1), Size(8), Size(3, 4), Size(8, 4), None):
            rows = 2 if size is None else int(rng.integers(1, size.reqs + 1))
            new = [1, 30] if size is None else [size.queries] * rows
            batch = Batch.from_lens(new, np.add(new, 9), is_prefilling=None if size is None else [False] * rows)
            plan = mamba.plan(batch, rng.permutation(40)[: rows * 4].reshape(rows, 4), pad_to=size)
            x = torch.empty(plan.padded_tokens, layer.conv_channels + heads).bfloat16()
            made = mamba.conv(x[:, : layer.conv_channels], pools.conv, plan, weight, bias.bfloat16())
            shared = torch.empty(plan.padded_tokens, layer.num_groups, layer.state_dim).bfloat16()
            inner = made[:, : heads * layer.qk_head_dim].unflatten(1, (heads, -1))
            mamba.run(inner, x[:, layer.conv_channels :], shared, shared, pools.ssm, plan, tensors)
    cold = {each for key, each in kinds(calls).items() if key not in compiled}
    assert calls and not cold and not [each.name for each in functions if each not in compiled]
