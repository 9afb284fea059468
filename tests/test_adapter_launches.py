"""What an adapter launches beside its vendor: copies of results, and one more for each where a row has no key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from portable.backends import aiter, flash_attn, flash_mla, torch_flash
from portable.backends.adapter import Adapter, Convention
from portable.backends.flash_attn import pieces
from portable.conformance import cells
from portable.conformance.inputs import build, segment
from portable.kernel import ATTENTION, KV, Kernel, LseForm, Op
from portable.layer import Layer, LayerTensors

MODULES = (flash_attn, aiter, flash_mla, torch_flash)
KERNELS = [k for module in MODULES for k in module.KERNELS if k.caps.op in ATTENTION and "lse" in k.caps.features]
MLA = Layer.mla(num_heads=16, dtype=torch.bfloat16)
GQA = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)


class Launches(TorchDispatchMode):
    """The names of the operators that are called, but for those of a vendor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ours = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.ours:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def vendor(convention: Convention, rows: torch.Tensor, requests: int, launches: Launches) -> Any:
    """Results in the forms that are declared: `rows`, or what it is given to write to, and an LSE of 7."""
    shapes = {"ht": (rows.shape[1], len(rows)), "th": rows.shape[:2], "bhs": (requests, rows.shape[1], 1)}
    count, at = next(iter(convention.returns.items()))

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        launches.ours = False
        out = rows[:, None] if convention.rows == "batch" else rows
        if convention.writes_out and given.get("out" if "out" in given else "o") is not None:
            out = given["out" if "out" in given else "o"].copy_(out)
        lse = torch.full(shapes[convention.lse.layout], 7.0)
        launches.ours = True
        return tuple(lse if i == at else out for i in range(count))

    return call


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", [k.name for k in KERNELS if k.name != "torch.flash_rocm"])
def test_an_lse_costs_a_copy_and_rows_without_keys_one_more(name: str, empty: bool) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    owner = kernel.run.__self__
    convention, launches = owner.convention, Launches()
    layer = MLA if kernel.caps.op is Op.MLA_DECODE else GQA
    case = cells.Case(op=kernel.caps.op, layer=layer, lens=((1, 40), (1, 0 if empty else 7)), page_size=64)
    inputs = build(replace(kernel, prepare=None), case, "cpu")
    width = layer.kv_lora_rank if layer is MLA else layer.v_head_dim
    rows = torch.ones(2, layer.num_heads, width, dtype=layer.dtype)
    alone = type(owner)(replace(convention, step={}))
    alone.bind = lambda: vendor(convention, rows, 2, launches)
    if isinstance(owner, aiter.mla.MlaCall | flash_mla.MlaCall):
        alone.fixed = lambda segment, layer: Adapter.fixed(alone, segment, layer)
    made = replace(inputs.segment, kernel=kernel)
    made = replace(made, prepared=alone.prepare(made, layer))
    out, lse = torch.empty_like(rows), torch.empty(layer.num_heads, 2)
    for _ in range(3):
        alone.run(inputs.q, inputs.kv, made, layer, inputs.tensors, out, lse)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    with torch.no_grad(), launches:
        alone.run(inputs.q, inputs.kv, made, layer, inputs.tensors, out, lse)
    sets_lse = empty and convention.lse.empty not in ("sink", "-inf")
    sets_out = empty and not convention.zeroes_empty
    assert sorted(launches.names) == ["copy_"] * (2 - convention.writes_out) + ["masked_fill_"] * (sets_lse + sets_out)
    assert (lse[:, 0] == 7).all() and (lse[:, 1] == (-torch.inf if sets_lse else 7)).all()
    assert (out[0] == 1).all() and (out[1] == (0 if sets_out else 1)).all()


def test_a_sink_is_set_in_place_for_rows_without_keys() -> None:
    """One operator, for an LSE of any strides."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "vllm_flash_attn_3.sinks_paged")
    layer, launches = replace(GQA, sinks=True), Launches()
    case = cells.Case(op=Op.PAGED, layer=layer, lens=((1, 40), (1, 0)), page_size=64)
    inputs = build(replace(kernel, prepare=None), case, "cpu")
    rows = torch.ones(2, 4, 128, dtype=torch.bfloat16)
    alone = Adapter(kernel.run.__self__.convention)
    alone.bind = lambda: vendor(alone.convention, rows, 2, launches)
    made = replace(inputs.segment, kernel=kernel)
    made = replace(made, prepared=alone.prepare(made, layer))
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5])
    for lse in (torch.empty(4, 2), torch.empty(2, 4).T, torch.empty(4, 6)[:, ::3]):
        lse.fill_(torch.nan)
        launches.names.clear()
        with torch.no_grad(), launches:
            alone.run(inputs.q, inputs.kv, made, layer, LayerTensors(sinks=sinks), torch.empty_like(rows), lse)
        assert (lse[:, 0] == 7).all() and torch.equal(lse[:, 1], sinks)
        assert launches.names.count("where") == 1 and launches.names.count("copy_") == 1


def test_pieces_of_pages_with_gaps_follow_the_table_of_each_replay() -> None:
    """What `prepare` made is filled again in place for a graph; nothing of a table that was is kept beside it."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_attn_3.mla_pieces")
    alone, given = pieces.Pieces(kernel.run.__self__.convention), []
    result = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    alone.bind = lambda: lambda **call: given.append((call["page_table"], call["k_cache"])) or result
    q, pool = torch.zeros(2, 16, 576, dtype=torch.bfloat16), torch.zeros(5, 3, 64, 576, dtype=torch.bfloat16)
    pool += torch.arange(5.0).view(5, 1, 1, 1)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    made = segment(replace(kernel, run=alone.run, prepare=alone.prepare), ((1, 70), (1, 90)), MLA, table, 64)
    for pages in (pool[:, 1], pool[:, 1].contiguous()) * 2:
        for first in (4, 2, 3):
            table[0, 0] = first
            again = pieces.spread(made, 64).block_table
            made.prepared.calls[0]["page_table"].copy_(again)
            alone.run(q, KV(pages, None), made, MLA, LayerTensors(), result.clone(), None)
            found, keys = given[-1]
            assert keys[found.long()][:, :, 0, 0, 0].tolist() == [[first] * 2 + [0] * 2, [1, 1, 3, 3]]


def test_a_form_that_is_not_copied_as_it_is_stays_right() -> None:
    """Padded, an LSE of [H, T] with more columns is cut; one in base 2 is brought to natural log."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_attn_3.varlen")
    case = cells.Case(op=Op.PREFILL, layer=GQA, lens=((3, 3), (2, 2)))
    inputs = build(replace(kernel, prepare=None), case, "cpu")
    logs = torch.arange(32.0).view(4, 8)
    for base, times in (("e", 1.0), ("2", 0.6931471805599453)):
        alone = Adapter(replace(kernel.run.__self__.convention, lse=LseForm(base=base)))
        for columns in (8, 5):
            alone.bind = lambda: lambda **call: (torch.zeros_like(inputs.q), logs[:, :columns])  # noqa: B023
            made = replace(inputs.segment, kernel=Kernel(kernel.caps, alone.run, alone.prepare))
            made = replace(made, prepared=alone.prepare(made, GQA))
            for lse in (torch.empty(4, 5), torch.empty(5, 4).T):
                alone.run(inputs.q, inputs.kv, made, GQA, inputs.tensors, torch.empty_like(inputs.q), lse)
                torch.testing.assert_close(lse, logs[:, :5] * times)
