"""aiter's adapters on stand-ins of both releases: the whole contract, and what must be refused."""

from __future__ import annotations

import cells
import contract
import pytest
import torch
from fakes import aiter as fake
from fakes.attention import Empty
from packaging.specifiers import SpecifierSet

import portable
from portable.backends.aiter import KERNELS
from portable.kernel import Op
from portable.layer import Layer, UnsupportedError

INF, NAN = float("inf"), float("nan")
VERSIONS = {"0.1.7.post2.dev18": False, "0.1.12": True}  # version -> whether it has the later signatures
LATENT = {"ranks": ((512, 64),), "latent_heads": (4, 16, 24)}
PAIRS = [
    pytest.param(kernel, version, id=f"{kernel.name}-{version}")
    for kernel in KERNELS
    for version in VERSIONS
    if SpecifierSet(kernel.caps.requires[0].versions).contains(version, prereleases=True)
]


def packed_cases(kernel, target):
    """Of kernels that read packed layouts alone, which the pairwise set starts without."""
    for layout in set(kernel.caps.cache_layouts) - {"strided"}:
        for dim, alibi, lens, strided in ((64, True, "decode", False), (128, False, "long_decode", True)):
            layer = Layer.gqa(
                num_heads=6, num_kv_heads=2, head_dim=dim, dtype=torch.bfloat16, alibi=alibi, cache_layout=layout
            )
            case = cells.Case(
                op=Op.PAGED,
                layer=layer,
                lens=cells.LENS[lens],
                page_size=16,
                pages=layout,
                lse=False,
                strided=strided,
            )
            assert not kernel.why_not(target, layer, case.needs())
            yield case


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("kernel", "version"), PAIRS)
def test_every_cell_that_an_adapter_accepts_is_right(kernel, version, arch, monkeypatch):
    monkeypatch.setitem(cells.AXES, Op.MLA_DECODE, {**cells.AXES[Op.MLA_DECODE], **LATENT})
    aiter = fake.install(monkeypatch, new=VERSIONS[version], readings=fake.Readings(arch=arch))
    target, wrong, served = portable.describe(arch), [], 0
    for case in (*cells.cases(kernel, target, 16), *packed_cases(kernel, target)):
        served += 1
        try:
            contract.check(kernel, case)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}\n    {case}")
    assert not wrong, f"{len(wrong)} of {served} cells:\n" + "\n".join(wrong[:5])
    assert served and (aiter.calls or "triton" in kernel.name)


# 1.1: what CK, assembly and batch prefill leave in rows without keys is not confirmed
@pytest.mark.parametrize("empty", [Empty(0.0, -INF), Empty(0.0, INF), Empty(NAN, NAN), Empty(7.0, 0.0)])
@pytest.mark.parametrize("name", ["aiter.varlen", "aiter.paged"])
def test_rows_without_keys_are_right_under_every_reading(name, empty, monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    fake.install(monkeypatch, new=True, readings=fake.Readings(empty=empty))
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    for lens in ("no_keys", "more_queries"):
        page_size = 16 if kernel.caps.op is Op.PAGED else None
        contract.check(kernel, cells.Case(op=kernel.caps.op, layer=layer, lens=cells.LENS[lens], page_size=page_size))


def test_a_call_that_would_be_routed_to_triton_is_refused(monkeypatch):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "aiter.varlen")
    fake.install(monkeypatch, new=True)
    monkeypatch.setattr("aiter.ops.mha.ENABLE_CK", False)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="ENABLE_CK is off"):
        contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer))
