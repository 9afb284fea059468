"""What a vendor's kernel cannot address is refused before a launch: pages, bytes, lengths, heads (C28, C32, C09)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import test_adapter as toy
import torch
from fakes import aiter as fake_aiter

import portable
from portable.backends import aiter, flash_attn
from portable.backends.adapter import Adapter
from portable.conformance import cells, contract
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError

GIB = 1 << 30
LAYER = Layer.gqa(num_heads=16, num_kv_heads=8, head_dim=128)
MLA = Layer.mla(num_heads=16)
CASE = cells.Case(op=Op.PAGED, layer=Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64), page_size=16, lse=False)


def kernel_of(name: str) -> Kernel:
    return next(kernel for kernel in (*aiter.KERNELS, *flash_attn.KERNELS) if kernel.name == name)


def narrow(monkeypatch: pytest.MonkeyPatch, **changes: object) -> Kernel:
    """A stand-in that reads block ids of a few bits, behind an adapter that says so."""
    module = ModuleType("toy_vendor")
    module.ops = ModuleType("toy_vendor.ops")
    module.ops.attend = lambda **given: toy.attend(**{**given, "kv_indices": given["kv_indices"] & 0x7})
    monkeypatch.setitem(sys.modules, "toy_vendor", module)
    return Adapter(toy.CALL).kernel(replace(toy.CAPS, **changes))


def test_a_block_id_that_wraps_is_wrong_and_is_refused_when_the_limit_is_declared(monkeypatch):
    assert sum(-(-s // 16) for _, s in CASE.lens) + 2 == 9  # pages of the cache
    with pytest.raises(AssertionError, match="out is wrong"):
        contract.check(narrow(monkeypatch), CASE)
    with pytest.raises(UnsupportedError, match=r"the cache has 9 pages; toy\.paged can address 8\. Name another"):
        contract.check(narrow(monkeypatch, max_block_id=7), CASE)
    fewer = replace(CASE, lens=((3, 7), (0, 5), (5, 40)))
    contract.check(narrow(monkeypatch, max_block_id=7), fewer)


def test_bytes_are_counted_by_the_strides_of_the_cache(monkeypatch):
    dense = 9 * 16 * 2 * 64 * 2
    contract.check(plain(monkeypatch, dense), CASE)
    for pages in ("interleaved", "k_first"):  # K of an interleaved cache extends over V as well
        case = replace(CASE, pages=pages)
        if pages == "interleaved":
            with pytest.raises(UnsupportedError, match=f"k extends over .* bytes; toy.paged can address {dense}"):
                contract.check(plain(monkeypatch, dense), case)
        else:
            contract.check(plain(monkeypatch, dense), case)


def plain(monkeypatch: pytest.MonkeyPatch, most: int) -> Kernel:
    module = ModuleType("toy_vendor")
    module.ops = ModuleType("toy_vendor.ops")
    module.ops.attend = toy.attend
    monkeypatch.setitem(sys.modules, "toy_vendor", module)
    return Adapter(toy.CALL).kernel(replace(toy.CAPS, max_tensor_bytes=most))


def test_the_contract_asks_again_where_memory_lay_out_of_reach(monkeypatch):
    kernel, seen = plain(monkeypatch, 1 << 40), []

    def run(q, kv, *rest):
        seen.append(kv.k.data_ptr())
        if kv.k.data_ptr() == seen[0]:
            raise UnsupportedError("k crosses a multiple of 4294967296 bytes in memory")
        kernel.run(q, kv, *rest)

    contract.check(replace(kernel, run=run), CASE)
    assert len(seen) == 2


def test_memory_that_crosses_a_window_of_addresses_is_refused(monkeypatch):
    kernel = plain(monkeypatch, 1 << 40)
    contract.check(replace_convention(kernel, address_window=1 << 62), CASE)
    with pytest.raises(UnsupportedError, match="k crosses a multiple of 64 bytes in memory"):
        contract.check(replace_convention(kernel, address_window=64), CASE)


def replace_convention(kernel: Kernel, **changes: object) -> Kernel:
    adapter = Adapter(replace(kernel.run.__self__.convention, **changes))
    return replace(kernel, run=adapter.run, prepare=adapter.prepare)


@pytest.mark.parametrize(
    ("name", "layer", "needs", "reason"),
    [
        # ROCm/aiter#2517: what is behind reads as zeros; #5765: offsets wrap
        ("aiter.paged", LAYER, Needs(page_size=16, num_pages=65536), None),
        ("aiter.paged", LAYER, Needs(page_size=16, num_pages=65537), f"65537 pages have {2 * GIB + 32768} bytes"),
        ("aiter.mla_decode", MLA, Needs(page_size=1, num_pages=3728270), None),
        ("aiter.mla_decode", MLA, Needs(page_size=1, num_pages=3728271), "above the 4294967296 that it can address"),
        ("aiter.decode", LAYER, Needs(page_size=16, num_pages=1 << 24), None),
        # lengths and heads
        ("aiter.decode", LAYER, Needs(page_size=16, seq_len=1 << 17), None),
        ("aiter.decode", LAYER, Needs(page_size=16, seq_len=1 << 18), "sequence length 262144 is above 131072"),
        ("aiter.decode", replace(LAYER, num_heads=136), Needs(page_size=16), "GQA ratio 17 is above 16"),
        ("aiter.mla_decode", Layer.mla(num_heads=256), Needs(page_size=1), "GQA ratio 256 is above 128"),
        ("aiter.mla_decode", MLA, Needs(page_size=1, query_len=16), "query length 16 is above 8"),
        ("vllm_flash_attn_3.sinks_decode", replace(LAYER, sinks=True), Needs(page_size=16), None),
        (
            "vllm_flash_attn_3.sinks_decode",
            replace(LAYER, num_heads=128, sinks=True),
            Needs(page_size=16),
            "num_heads 128 is above 64",
        ),
    ],
)
def test_limits_are_refused_when_a_step_is_planned(name, layer, needs, reason):
    kernel = kernel_of(name)
    arch = "sm90" if "vllm" in name else "gfx942"
    found = kernel.why_not(portable.describe(arch), layer, needs)
    assert (found == ()) if reason is None else any(reason in each for each in found), found


def test_attention_passes_over_a_kernel_that_cannot_address_the_cache(monkeypatch):
    attention = sys.modules["portable.attention"]
    last = attention.load_kernels()
    first = replace(next(k for k in last if k.name == "torch.sdpa_paged"))
    caps = replace(first.caps, name="toy.paged", provider="toy", requires=(), max_block_id=7)
    kernels = (replace(first, caps=caps), *last)
    monkeypatch.setattr(attention, "load_kernels", lambda: kernels)
    monkeypatch.setattr(
        sys.modules["portable.select"], "vendor_order", lambda target: {op.value: ("toy", "torch") for op in Op}
    )
    layer = Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    for num_pages, name in ((None, "toy.paged"), (8, "toy.paged"), (9, "torch.sdpa_paged")):
        attn = portable.Attention(layer, page_size=4, device="cpu", num_pages=num_pages)
        assert attn.choices["decode"].kernel.name == name
        plan = attn.plan(portable.Batch.from_lens([2], [2], block_table=[[1]], page_size=4))
        assert plan is not None and attn._kernels.num_pages == num_pages


def test_the_mla_of_aiter_looks_at_the_cache_that_is_there(monkeypatch):
    """Its stand-in with a small limit in the place of 4 GiB."""
    fake_aiter.install(monkeypatch, new=True)
    kernel = kernel_of("aiter.mla_decode")
    kernel = replace(kernel, caps=replace(kernel.caps, max_tensor_bytes=20000))
    case = cells.Case(op=Op.MLA_DECODE, layer=replace(MLA, dtype=torch.bfloat16), lens=((1, 9),), page_size=16)
    with pytest.raises(UnsupportedError, match=r"k extends over .* aiter\.mla_decode can address 20000"):
        contract.check(kernel, case)
