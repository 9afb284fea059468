"""The warm-up of a layer with chunks covers its pieces, on described devices: recorded, and not compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_mla_warmup import draw, kinds

from portable import Attention, Layer, allocate_cache, describe
from portable.attention import Kernels
from portable.backends.hip import launch as cpp
from portable.backends.triton import launch
from portable.select import parse_requested

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, chunk=64)


@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
def test_no_piece_of_a_step_needs_what_the_warm_up_did_not_compile(arch, monkeypatch):
    compiled: dict[object, str] = {}
    attn = Attention(LAYER, page_size=16, device="cpu", max_reqs=8, max_tokens=256, max_seq_len=400)
    target = replace(describe(arch), device="cuda:0", compute_units=132)
    attn._kernels = Kernels(target, LAYER, parse_requested("triton"))
    monkeypatch.setattr(launch, "warmup", lambda calls, device: compiled.update(kinds(calls)) or len(compiled))
    monkeypatch.setattr(cpp, "warmup", lambda functions, device: len(functions))
    assert attn.warmup(query_lens=(1, 3, 33, 70)) > 0
    cache, rng = allocate_cache(LAYER, 40, 16, device="cpu"), np.random.default_rng(5)
    with launch.recorded(attn._kernels.target) as calls:
        for _ in range(150):
            batch = draw(attn, rng)
            plan = attn.plan(batch)
            q = torch.empty(batch.num_tokens, 4, 64, dtype=LAYER.dtype)
            k, v = torch.empty(2, batch.num_tokens, 2, 64, dtype=LAYER.dtype)
            attn.write(k, v, cache, plan)
            new = {"k": k, "v": v} if rng.random() < 0.5 else {}
            attn.run(q, cache, plan, return_lse=bool(rng.random() < 0.5), **new)
    assert len(calls) > 300
    assert not {name for key, name in kinds(calls).items() if key not in compiled}
