"""Head dims that 8 divides and 16 does not: their strides come to the kernels divided by 8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from portable.conformance import contract
from portable.conformance.cells import Case
from portable.kernel import Op
from portable.layer import Layer
from portable.platform.emulated import activate
from portable.platform.emulated.driver import DEVICES

pytest.importorskip("triton")

from portable.backends.triton import paged, prefill, strides

PROMPT, CHUNK, PAGED = *prefill.KERNELS, *paged.KERNELS
LENS = {PROMPT: ((20, 20), (5, 40)), CHUNK: ((20, 33), (16, 40)), PAGED: ((1, 70), (3, 18), (0, 4))}


@pytest.mark.parametrize("dims", [(72, 72), (120, 120), (24, 40)])
@pytest.mark.parametrize("kernel", LENS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("arch", DEVICES)
def test_the_contract_at_such_dims(arch, kernel, dims, monkeypatch):
    asked = []

    def step(*given: int) -> int:
        asked.append(strides.common_step(*given))
        return asked[-1]

    for module in (prefill, paged):
        monkeypatch.setattr(module, "common_step", step)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=torch.float16)
    size = None if kernel is PROMPT else 16
    case = Case(op=Op.PREFILL if kernel is PROMPT else Op.PAGED, layer=layer, lens=LENS[kernel], page_size=size)
    with activate(arch):
        for strided in (False, True):
            contract.check(kernel, replace(case, strided=strided), "cpu")
        if kernel is not PROMPT:
            fp8 = {"gfx942": torch.float8_e4m3fnuz}.get(arch, torch.float8_e4m3fn)
            narrow = replace(layer, kv_dtype=fp8)
            contract.check(kernel, replace(case, layer=narrow, scales="scalar", pages="hnd"), "cpu")
    assert 8 in asked
