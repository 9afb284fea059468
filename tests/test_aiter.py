"""aiter's adapters on stand-ins of both releases: the whole contract, and what must be refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import cells
import contract
import pytest
import torch
from fakes import aiter as fake
from fakes.attention import Empty
from packaging.specifiers import SpecifierSet

import portable
from portable.backends import selftest
from portable.backends.aiter import KERNELS
from portable.kernel import Op
from portable.layer import Layer, UnsupportedError

INF, NAN = float("inf"), float("nan")
VERSIONS = {"0.1.7.post2.dev18": False, "0.1.12": True}  # version -> whether it has the later signatures
CPU = replace(portable.describe("gfx942"), device="cpu")
LATENT = {"ranks": ((512, 64),), "latent_heads": (4, 16, 24)}
# 1.1: what CK, assembly and batch prefill leave in rows without keys is not confirmed
EMPTY = (fake.BLANK, Empty(0.0, INF), Empty(NAN, NAN), Empty(7.0, 0.0))
READINGS = [*(fake.Readings(empty=empty) for empty in EMPTY), fake.Readings(writes=False)]
PAIRS = [
    pytest.param(kernel, version, id=f"{kernel.name}-{version}")
    for kernel in KERNELS
    for version in VERSIONS
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


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("kernel", "version"), PAIRS)
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
    assert {case.layer.alibi for case in cases} == {True, False} and len({case.lens for case in cases}) == 2


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
    fake.install(monkeypatch, new=is_new(kernel), readings=readings)
    assert selftest.fault(kernel, CPU) is None


@pytest.mark.parametrize("name", ["aiter.varlen", "aiter.varlen_017", "aiter.paged"])
def test_an_lse_in_another_base_does_not_pass_the_self_test(name, monkeypatch):
    """1.1: that of the assembly is natural, as far as is known."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    fake.install(monkeypatch, new=is_new(kernel), readings=fake.Readings(lse_base="2"))
    assert "lse is wrong" in selftest.fault(kernel, CPU)


def test_a_call_that_would_be_routed_to_triton_is_refused(monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.varlen")
    fake.install(monkeypatch, new=True)
    monkeypatch.setattr("aiter.ops.mha.ENABLE_CK", False)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="ENABLE_CK is off"):
        contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer))
