"""FlashMLA's adapter on stand-ins of its builds: the contract, fresh metadata, what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from fakes import flash_mla as fake

import portable
from portable.backends import flash_mla, selftest
from portable.conformance import cells, contract
from portable.conformance.inputs import build as build_inputs
from portable.kernel import GraphLevel, Kernel, Needs, Op
from portable.layer import Layer

BUILDS = [fake.Build(lazy, empty) for lazy in (True, False) for empty in (0.0, math.nan)]
ROWS = {"ranks": ((512, 64),), "latent_heads": (4, 16, 24), "page_size": (64,)}
LAYER = Layer.mla(num_heads=16, dtype=torch.bfloat16)
DECODE, VLLM = flash_mla.KERNELS


def install(patch: pytest.MonkeyPatch, kernel: Kernel, build: fake.Build) -> ModuleType:
    made = fake.module(replace(build, lazy=True, vllm=True) if kernel is VLLM else build)
    patch.setitem(sys.modules, kernel.run.__self__.convention.module, made)
    return made


def cases_of(kernel: Kernel) -> list[cells.Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cells.AXES, Op.MLA_DECODE, {**cells.AXES[Op.MLA_DECODE], **ROWS})
        return list(cells.cases(kernel, portable.describe("sm90"), 16))


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("kernel", flash_mla.KERNELS, ids=str)
def test_every_cell_that_it_accepts_is_right(
    kernel: Kernel, build: fake.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, kernel, build)
    cases = cases_of(kernel)
    assert any(case.causal not in (True, False) for case in cases) and any(case.lse for case in cases)
    for case in cases:
        contract.check(kernel, case)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_the_self_test_passes(build: fake.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DECODE, build)
    assert selftest.fault(DECODE, replace(portable.describe("sm90"), device="cpu")) is None


@pytest.mark.parametrize("lazy", [True, False])
def test_metadata_are_made_once_a_step_and_never_kept(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = install(monkeypatch, DECODE, fake.Build(lazy)), []
    build: Callable[..., tuple[object, object]] = module.get_mla_metadata

    def counted(*given: object) -> tuple[object, object]:
        made.append(build(*given))
        return made[-1]

    module.get_mla_metadata = counted
    for step, lens in enumerate((((1, 9), (1, 70)), ((1, 10), (1, 71)))):
        case = cells.Case(op=Op.MLA_DECODE, layer=LAYER, lens=lens, page_size=64)
        inputs = build_inputs(DECODE, case, "cpu")
        for _ in range(3):  # layers
            out = torch.full((2, 16, 512), torch.nan, dtype=torch.bfloat16)
            DECODE.run(inputs.q, inputs.kv, inputs.segment, LAYER, inputs.tensors, out, None)
            assert out.isfinite().all()
        assert len(made) == step + 1
        if step == 0:
            stale = inputs.segment
    # a step whose metadata are those of another one does not pass unseen here, and so is not offered to graphs
    with pytest.raises(IndexError, match="the metadata is of lengths"):
        lens = inputs.segment.seq_lens
        calls = tuple({**call, "cache_seqlens": lens} for call in stale.prepared.calls)
        segment = replace(stale, prepared=replace(stale.prepared, calls=calls))
        DECODE.run(inputs.q, inputs.kv, segment, LAYER, inputs.tensors, out, None)
    assert DECODE.caps.graph_level is GraphLevel.NEVER


@pytest.mark.parametrize(
    ("arch", "layer", "needs", "reason"),
    [
        ("sm90", LAYER, Needs(page_size=32), "page_size 32 is not one of 64"),
        ("sm90", LAYER, Needs(page_size=64, query_len=32), "query length 32 is above 16"),
        ("sm90", LAYER, Needs(page_size=64, graph=GraphLevel.SINGLE), "graph level SINGLE is above NEVER"),
        ("sm90", Layer.mla(num_heads=16, kv_lora_rank=256), Needs(page_size=64), "head_dim 320 is not one of 576"),
        ("sm90", replace(LAYER, kv_dtype=torch.float8_e4m3fn), Needs(page_size=64), "kv_dtype float8_e4m3fn"),
        ("sm100", LAYER, Needs(page_size=64), "arch 'sm100' is not one of sm90"),
        ("gfx942", LAYER, Needs(page_size=64), "vendor 'amd' is not one of nvidia"),
    ],
)
def test_what_it_refuses(arch: str, layer: Layer, needs: Needs, reason: str) -> None:
    for kernel in flash_mla.KERNELS:
        assert any(reason in each for each in kernel.why_not(portable.describe(arch), layer, needs))


def test_a_call_without_requests_or_keys_reaches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DECODE, fake.Build())
    for lens in (((1, 0), (1, 0)), ((0, 3), (0, 0))):
        contract.check(DECODE, cells.Case(op=Op.MLA_DECODE, layer=LAYER, lens=lens, page_size=64))
