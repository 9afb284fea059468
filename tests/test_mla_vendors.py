"""MLA through vendor adapters, on stand-ins: pages in compressed rows, padded heads, and V as wide as K."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from fakes import aiter as fake
from fakes import flash_attn_3
from fakes import flash_mla as fake_flash_mla
from mla_cases import make_step, mla_layer

import portable
from portable.backends import flash_attn, flash_mla, reference
from portable.backends.aiter import KERNELS as AITER
from portable.backends.flash_attn import pieces
from portable.conformance import cells, contract
from portable.conformance.inputs import build, segment
from portable.kernel import KV, Op
from portable.layer import Layer, LayerTensors
from portable.mla_attention import MlaAttention
from portable.mla_slot import MlaSlot

BF16 = {
    "dtype": torch.bfloat16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
NAMED = {kernel.name: kernel for kernel in AITER}
VARLEN = ("aiter.varlen", "aiter.varlen_triton", "flash_attn_3.varlen")
TRITON_MHA = "aiter.ops.triton.attention.mha"
GFX942 = portable.describe("gfx942")


@pytest.fixture
def spy(monkeypatch):
    """aiter's later release, and the arguments of each call of its MLA decode and its varlen attention."""
    fake.install(monkeypatch, new=True)
    calls = []
    modules = ("aiter.mla", "mla_decode_fwd"), *((name, "flash_attn_varlen_func") for name in ("aiter", TRITON_MHA))
    for module, name in ((importlib.import_module(module), name) for module, name in modules):
        function = getattr(module, name)

        def remember(*args, function=function, name=name, **kwargs):
            calls.append((name, kwargs))
            return function(*args, **kwargs)

        remember.__wrapped__ = function
        monkeypatch.setattr(module, name, remember)
    return calls


def choose(layer, prefill="aiter.varlen", merged=()):
    """aiter's kernels where they serve, as on the machine that they are for; else the oracle; merges are noted."""
    oracle = {kernel.caps.op: kernel for kernel in reference.KERNELS}

    def merge(outs, lses, sinks, out, lse):
        merged.append({(part.shape[-1], part.is_contiguous()) for part in (*outs, out)})
        oracle[Op.MERGE].run(outs, lses, sinks, out, lse)

    def kernel(op, needs):
        vendor = {Op.MLA_DECODE: NAMED["aiter.mla_decode"], Op.PREFILL: NAMED[prefill]}.get(op)
        if op is Op.MERGE:
            return replace(oracle[op], run=merge)
        return vendor if vendor and not vendor.why_not(GFX942, layer, needs) else oracle[op]

    return kernel


@pytest.mark.parametrize(("prefill", "wide"), [("aiter.varlen", 128), ("aiter.varlen_triton", 192)])
@pytest.mark.parametrize("heads", [12, 16, 20])
def test_a_whole_step_on_aiter_equals_the_oracle(heads, prefill, wide, spy):
    """V is padded for the kernel that needs it as wide as K, and for no other."""
    layer = mla_layer(num_heads=heads, **BF16)
    made = make_step(layer, [1, 3, 20, 9], [33, 8, 70, 0], page_size=16)
    attn = MlaAttention(layer, page_size=16, device="cpu", workspace=32)
    merged = []
    slot = attn._slots[0] = MlaSlot(layer, choose(layer, prefill, merged), attn.workspace)
    found = made.run(attn, return_lse=True)
    names = {s.kernel.name for s in slot.plan.segments.decodes} | {
        p.new.kernel.name for p in slot.plan.segments.prefills
    }
    assert names == {"aiter.mla_decode", prefill}
    right, right_lse = made.right(layer)
    assert (found.out.double() - right).abs().max() < 0.02 * right.abs().max()
    torch.testing.assert_close(found.lse.double(), right_lse, atol=0.05, rtol=0.02)
    decodes = [kwargs for name, kwargs in spy if name == "mla_decode_fwd"]
    assert [kwargs["q"].shape[1] for kwargs in decodes] == [16 if heads <= 16 else 128]  # F50
    assert all(kwargs["sm_scale"] == layer.scale for kwargs in decodes)  # not that of 576
    varlen = [kwargs for name, kwargs in spy if name == "flash_attn_varlen_func"]
    assert [kwargs["v"].shape[-1] for kwargs in varlen] == [wide] * 4  # F47
    assert all(kwargs["softmax_scale"] == layer.scale for kwargs in varlen)  # T45
    assert [kwargs["causal"] for kwargs in varlen] == [True, False, False, False]
    assert merged == [{(128, True)}] * 3  # T41: what was padded is cut before it is merged


def test_a_kernel_of_padded_v_and_one_of_native_v_agree(spy):
    layer = mla_layer(num_heads=16, **BF16)
    made, found = make_step(layer, [3, 20, 9], [8, 70, 0], page_size=16), []
    for prefill in ("aiter.varlen", "aiter.varlen_triton"):
        attn = MlaAttention(layer, page_size=16, device="cpu", workspace=32)
        attn._slots[0] = MlaSlot(layer, choose(layer, prefill, []), attn.workspace)
        found.append(made.run(attn, return_lse=True))
    widths = [kwargs["v"].shape[-1] for name, kwargs in spy if name == "flash_attn_varlen_func"]
    assert set(widths[: len(widths) // 2]) == {128} and set(widths[len(widths) // 2 :]) == {192}
    native, padded = found
    assert torch.equal(native.out, padded.out) and torch.equal(native.lse, padded.lse)


@pytest.mark.parametrize("page_size", [1, 16])
def test_its_pages_come_in_compressed_rows_of_one_granularity(page_size, spy):
    """C30, F49: lengths [1, 16, 17, 127, 0] on pages in no order; each row of q is a request of one query."""
    lens = [1, 16, 17, 127, 0]
    layer = mla_layer(num_heads=16, **BF16)
    counts = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(counts) + 1)
    table = torch.zeros(5, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = order[sum(counts[:row]) :][:count]
    pages = torch.randn(len(order), page_size, 576).bfloat16()
    pairs = tuple((1, n) for n in lens)
    q, outs = torch.randn(5, 16, 576).bfloat16(), []
    for kernel in (NAMED["aiter.mla_decode"], next(k for k in reference.KERNELS if k.caps.op is Op.MLA_DECODE)):
        outs.append(torch.empty(5, 16, 512).bfloat16())
        made = segment(kernel, pairs, layer, table, page_size)
        kernel.run(q, KV(pages, None), made, layer, LayerTensors(), outs[-1], None)
    torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)
    assert not outs[0][4].any()
    ((_, kwargs),) = spy
    slots = [
        int(table[row, t // page_size]) * page_size + t % page_size for row, n in enumerate(lens) for t in range(n)
    ]
    assert kwargs["kv_indptr"].tolist() == [0, 1, 17, 34, 161, 161] and kwargs["page_size"] == 1
    assert kwargs["kv_indices"][:161].tolist() == slots and kwargs["kv_buffer"].shape[1:] == (1, 1, 576)
    assert kwargs["kv_last_page_lens"].tolist() == [1, 1, 1, 1, 0] and kwargs["qo_indptr"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize("queries", range(1, 9))
def test_each_query_of_a_verify_sees_its_own_keys(queries, monkeypatch):
    """C32: requests of 8 and 33 keys, whatever power of two the queries are not."""
    layer = Layer.mla(num_heads=16, dtype=torch.bfloat16)
    named = {kernel.name: kernel for kernel in (*AITER, *flash_mla.KERNELS, *flash_attn.KERNELS)}
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.module())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3.module())
    for name, page_size in (
        ("aiter.mla_decode_017", 16),
        ("aiter.mla_decode", 1),
        ("flash_mla.decode", 64),
        ("flash_attn_3.mla_paged", 32),
    ):
        fake.install(monkeypatch, new=name == "aiter.mla_decode")
        case = cells.Case(op=Op.MLA_DECODE, layer=layer, lens=((queries, 8), (queries, 33)), page_size=page_size)
        lse = "lse" in named[name].caps.features
        contract.check(named[name], replace(case, lse=lse))


@pytest.mark.parametrize("lse", [False, True])
def test_every_vendors_results_come_in_one_form(lse, monkeypatch):
    """T42: into what is given, of any strides; whether the vendor returns a tensor, a tuple or nothing."""
    latent, heads = Layer.mla(num_heads=16), Layer.gqa(num_heads=16, head_dim=192, v_head_dim=128)
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.module())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3.module())
    kernels = (*AITER, *flash_mla.KERNELS[:1], *flash_attn.KERNELS)
    named, shown = {kernel.name: kernel for kernel in kernels}, 0
    for name in ("aiter.mla_decode_017", "aiter.mla_decode", "flash_mla.decode", "flash_attn_3.mla_paged", *VARLEN):
        kernel = named[name]
        fake.install(monkeypatch, new=not name.endswith("017"))
        if lse and "lse" not in kernel.caps.features:
            continue
        decodes = kernel.caps.op is Op.MLA_DECODE
        page_size = next(n for n in (64, 32, 16, 1) if n in kernel.caps.page_sizes) if decodes else None
        layer, lens = latent if decodes else heads, ((1, 70), (1, 33))
        case = cells.Case(op=kernel.caps.op, layer=layer, lens=lens, lse=lse, page_size=page_size)
        inputs = build(kernel, case, "cpu")
        width = layer.kv_lora_rank or layer.v_head_dim
        out = torch.full((2, 16, width + 8), torch.nan, dtype=torch.bfloat16)[..., :width]
        log = torch.full((2, 16), torch.nan).T if lse else None
        assert kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, log) is None
        assert out.isfinite().all() and (log is None or log.isfinite().all())
        shown += 1
    assert shown >= 4


def test_a_kernel_that_needs_v_as_wide_as_k_is_refused_for_mla():
    """T26: declared by each kernel, and by nothing else: not a version, not the number of an architecture."""
    kernel = NAMED["aiter.varlen"]
    layer = Layer.mla(num_heads=16)
    needs = portable.Needs(query_len=16, seq_len=16)
    assert not kernel.why_not(GFX942, layer, needs)
    equal = replace(kernel, caps=replace(kernel.caps, equal_value_dim=True))
    assert "v_head_dim 128 differs from head_dim 192" in equal.why_not(GFX942, layer, needs)


@pytest.mark.parametrize(("page_size", "layers"), [(64, 1), (128, 1), (64, 3)])
def test_pages_in_pieces_are_the_same_tokens(page_size, layers):
    """FlashAttention 3 would read whole pages of 64 by TMA, NaN behind the last token and all."""
    pool = torch.arange(5 * layers * page_size * 4).view(5, layers, page_size, 4).float()
    pages = pool[:, layers - 1]
    oracle = next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.MLA_DECODE)
    made = segment(oracle, ((1, 150), (1, 3)), mla_layer(), torch.tensor([[4, 0, 2], [1, 3, 3]]), page_size)
    cut = pieces.spread(made, pieces.tokens_apart(pages))
    assert cut.page_size == 32 and cut.block_table.shape == (2, 3 * page_size // 32)
    k, v, _ = pieces.in_pieces(KV(pages, None), 3)
    whole = torch.cat([v[..., 0, :], k[..., 0, :]], -1)
    for row, table in enumerate(cut.block_table):
        assert torch.equal(whole[table].flatten(0, 1), pages[made.block_table[row]].flatten(0, 1))
    with pytest.raises(ValueError, match="its pages must be a multiple of 32 rows apart"):
        pieces.tokens_apart(torch.zeros(2, 72, 4)[:, :64])
    assert pieces.tokens_apart(torch.zeros(1, 72, 4)[:, :64]) == 64  # of one page nothing follows
