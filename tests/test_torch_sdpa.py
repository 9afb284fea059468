"""The kernels below torch's SDPA meet the contract on stand-ins, whatever of them is not known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fakes.torch_ops import Sdpa, sdpa_installed

import portable
from portable.attention import load_kernels
from portable.backends import selftest
from portable.backends.torch_sdpa import KERNELS
from portable.conformance import cells, contract
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer
from portable.select import select

SM90 = portable.describe("sm90")
HERE = replace(SM90, device="cpu")
READINGS = [Sdpa(), Sdpa(math.nan, math.nan, math.nan), Sdpa(0.0, -math.inf, 0.0), Sdpa(7.0, 0.0)]
PLAIN = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_cell_is_right_and_shows_what_the_kernel_declares(kernel: Kernel) -> None:
    shown: set[str] = set()
    with sdpa_installed(Sdpa(math.nan, math.nan, math.nan)) as calls:
        for case in cells.cases(kernel, HERE):
            shown |= contract.check(kernel, case)
    assert shown >= kernel.caps.features - {"lse"}
    name = "cudnn" if "cudnn" in kernel.name else "efficient"
    assert {call for call, _ in calls} == {name}
    if kernel.caps.op is Op.PREFILL:  # over pages few requests have as many queries as keys
        assert {causal for _, causal in calls} == {True, False}


@pytest.mark.parametrize("readings", READINGS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_rows_without_keys_and_the_self_test_are_right_under_every_reading(kernel: Kernel, readings: Sdpa) -> None:
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    page_size = 16 if kernel.caps.op is Op.PAGED else None
    with sdpa_installed(readings):
        assert selftest.fault(kernel, HERE) is None
        for lens in ("no_keys", "more_queries", "extend"):
            case = cells.Case(op=kernel.caps.op, layer=layer, lens=cells.LENS[lens], page_size=page_size)
            contract.check(kernel, case)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_an_lse_in_another_base_does_not_pass_the_self_test(kernel: Kernel) -> None:
    with sdpa_installed(Sdpa(lse_factor=1 / math.log(2))):
        found = selftest.fault(kernel, HERE)
    assert found is not None and "lse is wrong" in found


def test_they_serve_where_torch_alone_would_tell_no_lse() -> None:
    def chosen(layer: Layer, lse: bool, backend: str | None = None) -> str:
        needs = Needs(query_len=512, seq_len=512, lse=lse)
        return select(Op.PREFILL, SM90, layer, needs, backend, {"torch": "2.13.0"}, load_kernels()).kernel.name

    sinks = replace(PLAIN, sinks=True)
    assert chosen(PLAIN, True) == "torch.flash"
    assert chosen(sinks, False) == "torch.sdpa" and chosen(sinks, True) == "torch.efficient"
    wide = Layer.gqa(num_heads=8, head_dim=512, dtype=torch.float32)
    assert chosen(wide, True) == "torch.efficient"
    assert chosen(PLAIN, True, "torch.cudnn") == "torch.cudnn"
    for kernel in KERNELS:
        cudnn = "cudnn" in kernel.name
        assert bool(kernel.why_not(SM90, wide, Needs(page_size=16))) == cudnn
        assert kernel.why_not(portable.describe("gfx942"), PLAIN, Needs(page_size=16))[0].startswith("vendor 'amd'")
