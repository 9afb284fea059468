"""aiter's adapters on stand-ins of both releases: the whole contract, and what must be refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from fakes import aiter as fake
from fakes.attention import Empty
from packaging.specifiers import SpecifierSet

import portable
from portable.backends import selftest
from portable.backends.aiter import KERNELS
from portable.conformance import cells, contract
from portable.conformance.inputs import build as build_inputs
from portable.kernel import Needs, Op
from portable.layer import Layer, UnsupportedError

INF, NAN = float("inf"), float("nan")
VERSIONS = {"0.1.7.post2.dev18": False, "0.1.12": True}  # version -> whether it has the later signatures
ARCHS = ("gfx942", "gfx950")
CPU = {arch: replace(portable.describe(arch), device="cpu") for arch in ARCHS}
LATENT = {"ranks": ((512, 64),), "latent_heads": (4, 16, 24)}
# 1.1: what CK, assembly and batch prefill leave in rows without keys is not confirmed
EMPTY = (fake.BLANK, Empty(0.0, INF), Empty(NAN, NAN), Empty(7.0, 0.0))
READINGS = [*(fake.Readings(empty=empty) for empty in EMPTY), fake.Readings(writes=False)]
PAIRS = [
    pytest.param(kernel, version, arch, id=f"{kernel.name}-{version}-{arch}")
    for kernel in KERNELS
    for version in VERSIONS
    for arch in ARCHS
    if arch in kernel.caps.archs
    if SpecifierSet(kernel.caps.requires[0].versions).contains(version, prereleases=True)
]


def is_new(kernel):
    """Whether a kernel is for the later signatures."""
    return SpecifierSet(kernel.caps.requires[0].versions).contains("0.1.12")


@cache
def cases_of(kernel, target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cells.AXES, Op.MLA_DECODE, {**cells.AXES[Op.MLA_DECODE], **LATENT})
        return list(cells.cases(kernel, target, 16))


@pytest.mark.parametrize(("kernel", "version", "arch"), PAIRS)
def test_every_cell_that_an_adapter_accepts_is_right(kernel, version, arch, monkeypatch):
    aiter = fake.install(monkeypatch, new=VERSIONS[version], readings=fake.Readings(arch=arch))
    wrong, served = [], 0
    for case in cases_of(kernel, portable.describe(arch)):
        served += 1
        try:
            contract.check(kernel, case)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}\n    {case}")
    assert not wrong, f"{len(wrong)} of {served} cells:\n" + "\n".join(wrong[:5])
    assert served and (aiter.calls or "triton" in kernel.name)


def test_packed_decode_has_cells_of_both_layouts():
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.decode_packed")
    cases = cases_of(kernel, portable.describe("gfx942"))
    assert {case.pages for case in cases} == set(kernel.caps.cache_layouts)
    assert {case.page_size for case in cases} == {16} and {case.strided for case in cases} == {True, False}
    assert {case.layer.alibi for case in cases} == {True, False} and len({case.lens for case in cases}) == 4


@pytest.mark.parametrize("readings", READINGS)
@pytest.mark.parametrize("name", ["aiter.varlen", "aiter.paged"])
def test_rows_without_keys_are_right_under_every_reading(name, readings, monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    fake.install(monkeypatch, new=True, readings=readings)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    for lens in ("no_keys", "more_queries"):
        page_size = 16 if kernel.caps.op is Op.PAGED else None
        contract.check(kernel, cells.Case(op=kernel.caps.op, layer=layer, lens=cells.LENS[lens], page_size=page_size))


@pytest.mark.parametrize("readings", READINGS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_adapter_passes_its_self_test(kernel, readings, monkeypatch):
    arch = min(kernel.caps.archs)
    fake.install(monkeypatch, new=is_new(kernel), readings=replace(readings, arch=arch))
    assert selftest.fault(kernel, CPU[arch]) is None


@pytest.mark.parametrize("name", ["aiter.varlen", "aiter.varlen_017", "aiter.paged"])
def test_an_lse_in_another_base_does_not_pass_the_self_test(name, monkeypatch):
    """1.1: that of the assembly is natural, as far as is known."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    fake.install(monkeypatch, new=is_new(kernel), readings=fake.Readings(lse_base="2"))
    assert "lse is wrong" in selftest.fault(kernel, CPU["gfx942"])


def test_bytes_of_fp8_are_those_of_the_device(monkeypatch):
    """15, C24: each arch has its flavour; where a device read the other one, the self-test would see it."""
    layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    needs = Needs(page_size=16)
    flavours = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
    pages = [kernel for kernel in KERNELS if kernel.caps.op is Op.PAGED]
    for arch, dtype in flavours.items():
        other = next(each for each in flavours.values() if each != dtype)
        able = [k for k in pages if not k.why_not(CPU[arch], replace(layer, kv_dtype=dtype), needs)]
        assert [kernel.name for kernel in able] == [f"aiter.decode_{short(dtype)}"]
        assert not [k for k in pages if not k.why_not(CPU[arch], replace(layer, kv_dtype=other), needs)]
        fake.install(monkeypatch, new=True, readings=fake.Readings(arch=next(a for a in ARCHS if a != arch)))
        assert selftest.fault(able[0], CPU[arch]).startswith("an fp8 cache: ")
        assert any(case.layer.kv_dtype == dtype for case in cases_of(able[0], portable.describe(arch)))


def short(dtype):
    return {torch.float8_e4m3fnuz: "fp8_fnuz", torch.float8_e4m3fn: "fp8"}[dtype]


def test_a_call_that_records_gradients_does_not_reach_a_callable_that_would_insist_on_an_lse(monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.varlen")
    fake.install(monkeypatch, new=True)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    inputs = build_inputs(kernel, cells.Case(op=Op.PREFILL, layer=layer), "cpu")
    for each in (inputs.q, inputs.kv.v):
        out = torch.empty_like(inputs.q)
        each.requires_grad_()
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, None)
        each.requires_grad_(False)
        assert out.isfinite().all() and not out.requires_grad


def test_a_triton_implementation_whose_lse_lies_otherwise_is_refused(monkeypatch):
    """8.3: `mha_set_impl("dao_ai")` turns the LSE into [H, T]."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.varlen_triton")
    fake.install(monkeypatch, new=True)
    monkeypatch.setattr("aiter.ops.triton.attention.mha._MHA_IMPL", "dao_ai")
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"is set to 'dao_ai', whose LSE is \[H, T\]"):
        contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer))


def test_a_call_that_would_be_routed_to_triton_is_refused(monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.varlen")
    fake.install(monkeypatch, new=True)
    monkeypatch.setattr("aiter.ops.mha.ENABLE_CK", False)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="ENABLE_CK is off"):
        contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer))


def test_calls_at_the_same_time_have_their_own_outputs(monkeypatch):
    fake.install(monkeypatch, new=True)
    kernel = next(each for each in KERNELS if each.name == "aiter.decode_packed")
    case = next(each for each in cells.cases(kernel, portable.describe("gfx942"), 16) if not each.lse)
    first, second = (build_inputs(kernel, case, "cpu", attempt=attempt) for attempt in range(2))
    step, seen = first.segment.prepared, []
    function = step.function

    def of_one_step(given):
        out = torch.full((len(given.q), case.layer.num_heads, case.layer.v_head_dim), torch.nan, dtype=given.q.dtype)
        kernel.run(given.q, given.kv, first.segment, case.layer, given.tensors, out, None)
        return out

    def with_another_before_its_end(*args, **kwargs):
        result = function(*args, **kwargs)
        if not seen:
            seen.append(None)
            seen.append(of_one_step(second))
        return result

    alone = of_one_step(first), of_one_step(second)
    object.__setattr__(step, "function", with_another_before_its_end)
    assert torch.equal(of_one_step(first), alone[0])
    assert torch.equal(seen[1], alone[1])
