"""Which steps a layer is captured for: the least of what its kernels declare, and who is in the way of more."""

from __future__ import annotations

import pytest
import torch
from launched import launches

from portable import Attention, Batch, Layer, Mamba, MlaAttention, UnsupportedError
from portable.backends import reference, reference_mamba, reference_steps
from portable.kernel import GraphLevel, Op
from portable.sizes import Size

LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
LATENTS = Layer.mla(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=4, dtype=torch.float32)
STATES = Layer.mamba2(num_heads=2, head_dim=4, state_dim=8, dtype=torch.float32)
LIMITS = {"device": "cpu", "max_reqs": 4, "max_tokens": 16}
PAGED = LIMITS | {"page_size": 4, "max_seq_len": 32}
SIZES = {GraphLevel.SINGLE: Size(3), GraphLevel.UNIFORM: Size(3, 2), GraphLevel.VARLEN: Size(3, 2, tokens=5)}


@pytest.fixture
def declare(monkeypatch):
    """Makes kernels of all operations ALWAYS, and those that are named as they are named."""

    def declaring(**levels):
        every = (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
        kernels = tuple(launches(kernel, levels.get(kernel.caps.op.value, GraphLevel.ALWAYS)) for kernel in every)
        monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)

    return declaring


def step(size):
    """Of two requests, on contexts."""
    new = [size.queries, size.queries if size.uniform else 1]
    return Batch.from_lens(new, [9, 9], block_table=[[1, 2, 3], [4, 5, 6]], page_size=4, is_prefilling=[False] * 2)


@pytest.mark.parametrize("declared", GraphLevel)
@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: Attention(LAYER, **PAGED), Op.PAGED),
        (lambda: Attention(LAYER, **PAGED), Op.CACHE_WRITE),
        (lambda: MlaAttention(LATENTS, **PAGED), Op.MLA_DECODE),
        (lambda: Mamba(STATES, num_draft=1, **LIMITS), Op.STATE_UPDATE),
        (lambda: Mamba(STATES, num_draft=1, **LIMITS), Op.CONV1D),
    ],
    ids=lambda each: str(each) if isinstance(each, Op) else "",
)
def test_a_step_is_captured_up_to_the_least_level_of_its_kernels(declare, make, op, declared):
    declare(**{op.value: declared})
    planner = make()
    for level, size in SIZES.items():
        table = {"table": [[1, 2], [3, 4]]} if isinstance(planner, Mamba) else {}
        assert size.level is level
        if level <= declared:
            plan = planner.plan(step(size), **table, pad_to=size)
            assert isinstance(planner, Mamba) or plan.level is min(declared, GraphLevel.ALWAYS)
        else:
            with pytest.raises(UnsupportedError, match=f"graph level {level.name} is above {declared.name}"):
                planner.plan(step(size), **table, pad_to=size)
    told = planner.explain()
    assert told.level is min(declared, GraphLevel.VARLEN)
    limited = [each for each in told.levels if each.limit]
    assert bool(limited) is (declared < GraphLevel.VARLEN)
    if limited:
        assert f"no kernel for {op} can be captured; reference.{op} declares {declared.name}" in limited[0].limit
        assert limited[0].limit in str(told)
