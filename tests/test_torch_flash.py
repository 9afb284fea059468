"""PyTorch's fused kernels behind the contract, on a stand-in that departs from it as the builds of torch do."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from fakes.torch_ops import Readings, installed
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from portable.backends import selftest, torch_flash
from portable.backends.torch_flash import split
from portable.conformance import cells, contract
from portable.conformance.inputs import segment
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer
from portable.platform.detect import describe
from portable.select import select

KERNELS = {kernel.name: kernel for kernel in torch_flash.KERNELS}
ARCH = {"torch.flash": "sm90", "torch.varlen": "sm90", "torch.flash_rocm": "gfx942"}
INFINITY, NAN = float("inf"), float("nan")
ROCM = [
    Readings(True, out, lse, padded)
    for (out, lse), padded in product(((0.0, INFINITY), (0.0, -INFINITY), (NAN, NAN), (0.0, 0.0)), (True, False))
]
CUDA = [Readings(False, *empty) for empty in ((0.0, INFINITY), (0.0, -INFINITY), (NAN, NAN))]


def of(readings: Readings) -> tuple[Kernel, str]:
    kernel = KERNELS["torch.flash_rocm" if readings.rocm else "torch.flash"]
    return kernel, ARCH[kernel.name]


def on_cpu(arch: str):
    return replace(describe(arch), device="cpu")


@cache
def cases_of(kernel: Kernel, most: int = 24) -> list[cells.Case]:
    """The contract's cells, and one query in some requests with none in others (C14)."""
    few = Layer.gqa(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    holes = cells.Case(op=Op.PREFILL, layer=few, lens=((0, 0), (1, 3), (0, 0), (1, 5)))
    return [*cells.cases(kernel, on_cpu(ARCH[kernel.name]), most), holes]


@pytest.mark.parametrize("readings", [*CUDA, *ROCM], ids=str)
def test_every_cell_is_right_under_every_reading(readings: Readings) -> None:
    kernel, _ = of(readings)
    with installed(readings) as calls:
        for case in cases_of(kernel):
            contract.check(kernel, case)
    assert calls


@pytest.mark.parametrize("readings", [*CUDA, *ROCM], ids=str)
def test_the_self_test_passes_under_every_reading(readings: Readings) -> None:
    kernel, arch = of(readings)
    with installed(readings):
        assert selftest.fault(kernel, on_cpu(arch)) is None


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="torch.varlen is for torch 2.13 and later")
@pytest.mark.parametrize("readings", CUDA, ids=str)
def test_the_documented_function_is_right_as_well(readings: Readings) -> None:
    """9.1: causal is exactly (-1, 0), GQA has to be asked for, and the LSE is [H, T] whatever its docstring says."""
    kernel, here = KERNELS["torch.varlen"], on_cpu("sm90")
    with installed(replace(readings, varlen=True)) as calls:
        assert selftest.fault(kernel, here) is None
        for case in cases_of(kernel, 12):
            contract.check(kernel, case)
    assert {call["causal"] for call in calls} == {True, False}


def test_the_self_test_sees_the_other_alignment() -> None:
    with installed(Readings(rocm=True, padded_lse=False)):
        found = selftest.fault(KERNELS["torch.flash"], on_cpu("sm90"))
    assert found is not None and found.startswith("one query for each request: out is wrong")


@pytest.mark.parametrize(
    ("reading", "about"),
    [
        ({"lse_factor": 1 / math.log(2)}, "lse is wrong"),
        ({"transposed": True, "padded_lse": False}, "lse"),
        ({"bottom_right": True}, None),
    ],
)
def test_a_build_of_another_kind_is_right_or_refused(reading: dict[str, Any], about: str | None) -> None:
    with installed(Readings(rocm=True, **reading)):
        found = selftest.fault(KERNELS["torch.flash_rocm"], on_cpu("gfx942"))
    assert found is None if about is None else found is not None and about in found


def test_first_chunks_take_one_call_and_others_two() -> None:
    kernel = KERNELS["torch.flash_rocm"]
    layer = Layer.gqa(num_heads=2, head_dim=8, dtype=torch.bfloat16)
    for lens, most in (((5, 5), (3, 3)), 1), (((5, 9), (3, 3)), 2), (((9, 5),), 1):
        case = cells.Case(op=Op.PREFILL, layer=layer, lens=lens)
        with installed(Readings(rocm=True)) as calls:
            contract.check(kernel, case)
        assert len(calls) == most
        assert all(lengths(c["q"]) == lengths(c["k"]) for c in calls if c["causal"] and most == 1 and lens[0][0] == 5)


def lengths(cu: object) -> list[int]:
    return [b - a for a, b in pairwise(cu)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_a_split_step_sees_exactly_the_causal_pairs(lens) -> None:
    layer = Layer.gqa(num_heads=1, head_dim=8)
    step = segment(KERNELS["torch.flash_rocm"], (), layer) if not lens else segment(Plain, tuple(lens), layer)
    seen = []
    for part in split(step):
        rows, keys, pairs = 0, 0, set()
        cu = part.cu_seqlens_q.tolist()
        assert lengths(cu) == part.host_query_lens.tolist()
        assert part.seq_lens.tolist() == part.host_seq_lens.tolist()
        for q, k in zip(part.host_query_lens.tolist(), part.host_seq_lens.tolist(), strict=True):
            pairs |= {(rows + i, keys + j) for i in range(q) for j in range(k) if j <= i or part.causal is False}
            rows, keys = rows + q, keys + k
        seen.append(pairs)
    rows, keys, want = 0, 0, set()
    for q, k in lens:
        want |= {(rows + i, keys + j) for i in range(q) for j in range(k) if j <= i + k - q}
        rows, keys = rows + q, keys + k
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == want


Plain = Kernel(KERNELS["torch.flash_rocm"].caps, print)


def layer(**given: object) -> Layer:
    return Layer.gqa(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, **given})


def prefill(arch: str, kernels: tuple[Kernel, ...], **given: object) -> str:
    needs = Needs(query_len=4096, seq_len=4096)
    return select(
        Op.PREFILL, describe(arch), layer(**given), needs, None, {"torch": "2.13.0", "triton": "3.6"}, kernels
    ).kernel.name


def test_with_nothing_but_torch_a_gpu_prefills_with_its_fused_kernel() -> None:
    from portable.attention import load_kernels

    every = load_kernels()
    ours = {kernel.caps.provider for kernel in every} & {"triton", "hip"}
    without = tuple(kernel for kernel in every if kernel.caps.provider not in ours)
    assert prefill("sm90", without) == "torch.flash"
    assert prefill("gfx942", without) == "torch.flash_rocm"
    assert prefill("sm90", without, window=128) == "torch.flash"
    assert prefill("gfx942", without, window=128) == "torch.sdpa"
    assert prefill("sm90", without, alibi=True) == "torch.sdpa"
    assert prefill("sm90", without, head_dim=192, v_head_dim=128) == "torch.flash"


def test_a_triton_that_is_not_there_or_refuses_leaves_it_to_torch() -> None:
    from portable.attention import load_kernels

    needs = Needs(query_len=4096, seq_len=4096)
    for here in ({"torch": "2.13.0"}, {"torch": "2.13.0", "triton": "2.1"}):
        found = select(Op.PREFILL, describe("sm90"), layer(), needs, None, here, load_kernels())
        assert found.kernel.name == "torch.flash"


def test_what_rocm_would_ignore_is_refused() -> None:
    kernel, target = KERNELS["torch.flash_rocm"], describe("gfx942")
    for feature, reason in (
        ({"window": 16}, "window is not supported"),
        ({"softcap": 30.0}, "softcap is not supported"),
        ({"alibi": True}, "alibi is not supported"),
        ({"sinks": True}, "sinks is not supported"),
    ):
        assert kernel.why_not(target, layer(**feature), Needs()) == (reason,)
