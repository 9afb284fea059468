"""What adapters do with results and scales in every form that a convention can declare, on a stand-in."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from fakes import aiter as fake_aiter
from fakes import flash_attn_2, flash_attn_3
from fakes.dense import Empty, attention, check_offsets, contiguous, from_pages, lens_of, need, sides
from fakes.flash_mla import Build as FlashMlaBuild
from test_flash_mla import DECODE as FLASH_MLA
from test_flash_mla import install as install_flash_mla

import portable
from portable.backends import aiter, flash_attn, selftest
from portable.backends.adapter import Adapter, Convention
from portable.conformance import cells, contract
from portable.conformance.inputs import build as build_inputs
from portable.kernel import Kernel, KernelCaps, LseForm, Op
from portable.layer import Layer
from portable.sets import ANY, ANY_SIZE

CAPS = KernelCaps(
    op=Op.PREFILL,
    name="toy.varlen",
    provider="toy",
    vendors=ANY,
    archs=ANY,
    dtypes={torch.bfloat16, torch.float16},
    head_dims=ANY_SIZE,
    gqa_ratios=ANY_SIZE,
    page_sizes=ANY_SIZE,
    features=frozenset({"window", "noncausal", "lse"}),
    tolerance={torch.bfloat16: 1e-2, torch.float16: 2e-3},
)
MASKS = {"scale": "scale", "causal": "causal", "window": "window", "lse": "return_lse"}
PACKED = Convention(
    module="toy_vendor",
    function="attend",
    names={
        **{name: name for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_query_len", "max_seq_len")},
        **MASKS,
    },
)
BATCH = Convention(
    module="toy_vendor",
    function="attend",
    names={**{name: name for name in ("q", "k", "v", "seq_lens", "block_table")}, **MASKS},
    rows="batch",
)
LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
SQUARE = Layer.gqa(num_heads=5, num_kv_heads=5, head_dim=16, dtype=torch.bfloat16)


def toy(monkeypatch: pytest.MonkeyPatch, attend: object) -> None:
    module = ModuleType("toy_vendor")
    module.attend = attend
    monkeypatch.setitem(sys.modules, "toy_vendor", module)


def laid_out(lse: torch.Tensor, form: LseForm, lens: list[int], pad: int) -> torch.Tensor:
    """[H, T] in natural log as a form; requests of `lens` queries each, NaN in what is padded."""
    lse = lse / math.log(2) if form.base == "2" else lse
    if form.layout == "ht":
        return torch.nn.functional.pad(lse, (0, pad), value=torch.nan)
    if form.layout == "th":
        return lse.T.contiguous()
    found = torch.full((len(lens), len(lse), max(lens) + pad), torch.nan)
    for r, part in enumerate(lse.split(lens, 1)):
        found[r, :, : lens[r]] = part
    return {"bhs": found, "bsh": found.transpose(1, 2).contiguous(), "bhs1": found[..., None]}[form.layout]


def returned(out: torch.Tensor, lse: torch.Tensor, count: int, at: int) -> object:
    """The results of a callable that has so many, and its LSE at a place among them."""
    results = [out, *[torch.full((1,), torch.nan)] * (count - 1)]
    results[at] = lse
    return tuple(results) if count % 2 else results


FORMS = [LseForm(layout=layout, base=base, empty="0") for layout in ("ht", "th", "bhs", "bsh", "bhs1") for base in "e2"]


@pytest.mark.parametrize(("count", "at"), [(2, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.layout}-{form.base}")
def test_every_form_of_packed_results_is_read_by_its_declaration(form, pad, count, at, monkeypatch):
    """C20, F53, F54: layouts, bases, padding, and 1 to 5 results; as many tokens as heads, so shapes say nothing."""

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_query_len, max_seq_len, scale, causal, window, return_lse):
        spans, key_spans = check_offsets(cu_seqlens_q, "q"), check_offsets(cu_seqlens_k, "k")
        outs, lses = attention(
            [q[start:end] for start, end in spans],
            contiguous(k, key_spans),
            contiguous(v, key_spans),
            scale=scale,
            window=sides(window, causal),
            empty=Empty(0.0),
        )
        lse = laid_out(torch.cat(lses, 1), form, [end - start for start, end in spans], pad)
        return returned(torch.cat(outs), lse, count, at) if return_lse else torch.cat(outs)

    toy(monkeypatch, attend)
    kernel = Adapter(replace(PACKED, lse=form, returns={count: at})).kernel(CAPS)
    for layer, lens in ((LAYER, cells.LENS["no_keys"]), (SQUARE, ((2, 7), (3, 3)))):
        for lse in (True, False):
            contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer, lens=lens, lse=lse))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.layout}-{form.base}")
def test_every_form_of_rectangular_results_is_read_by_its_declaration(form, monkeypatch):
    def attend(q, k, v, seq_lens, block_table, scale, causal, window, return_lse):
        need(q.dim() == 4 and len(q) == len(seq_lens), "q must be [B, Sq, H, D]")
        lens = lens_of(seq_lens)
        keys, values = (from_pages(each, block_table, lens) for each in (k, v))
        outs, lses = attention(list(q), keys, values, scale=scale, window=sides(window, causal), empty=Empty(0.0))
        out, lse = torch.stack(outs), laid_out(torch.cat(lses, 1), form, [q.shape[1]] * len(q), 0)
        return (out, lse) if return_lse else out

    toy(monkeypatch, attend)
    kernel = Adapter(replace(BATCH, lse=form)).kernel(replace(CAPS, op=Op.PAGED))
    for layer in (LAYER, SQUARE):
        for lens in ("no_keys", "decode", "verify", "extend"):
            contract.check(kernel, cells.Case(op=Op.PAGED, layer=layer, lens=cells.LENS[lens], page_size=3))


@pytest.mark.parametrize(
    ("given", "found"), [(torch.zeros(1), 1), ((1, 2, 3), 3), ([1], 1), ((torch.zeros(1), None), 2)]
)
def test_another_number_of_results_is_said_not_guessed(given, found, monkeypatch):
    toy(monkeypatch, lambda **call: given)
    kernel = Adapter(replace(PACKED, returns={2: 1})).kernel(CAPS)
    inputs = build_inputs(kernel, cells.Case(op=Op.PREFILL, layer=LAYER), "cpu")
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[1::-1])
    with pytest.raises(RuntimeError, match=rf"toy_vendor\.attend returned {found} values; with an LSE they are 2"):
        kernel.run(inputs.q, inputs.kv, inputs.segment, LAYER, inputs.tensors, out, lse)


@pytest.mark.parametrize("descale", ["heads", "one"])
def test_scales_of_an_fp8_cache_come_in_the_shape_that_is_declared(descale, monkeypatch):
    """12: [B, Hkv] of FA3 and FA4, [1] of aiter; float32, and none for a cache of another type."""
    shapes: set[object] = set()

    def attend(q, k, v, seq_lens, block_table, scale, causal, window, return_lse, k_descale=None, v_descale=None):
        want = (len(q), k.shape[2]) if descale == "heads" else (1,)
        parts = []
        for pages, given in ((k, k_descale), (v, v_descale)):
            need((given is None) or (given.dtype == torch.float32 and given.shape == want), "descale")
            need(given is None or pages.dtype.itemsize == 1, "a descale beside a cache that is not fp8")
            shapes.add(None if given is None else tuple(given.shape))
            rows = from_pages(pages.float(), block_table, lens_of(seq_lens))
            each = [1.0] * len(rows) if given is None else given.expand(len(rows), -1)
            parts.append([row * (x if isinstance(x, float) else x[:, None]) for row, x in zip(rows, each, strict=True)])
        outs, lses = attention(list(q), *parts, scale=scale, window=sides(window, causal))
        return (torch.stack(outs), torch.stack(lses)) if return_lse else torch.stack(outs)

    toy(monkeypatch, attend)
    names = {**BATCH.names, "k_descale": "k_descale", "v_descale": "v_descale"}
    convention = replace(BATCH, names=names, descale=descale, lse=LseForm(layout="bhs"))
    kernel = Adapter(convention).kernel(replace(CAPS, op=Op.PAGED, kv_dtypes={torch.float8_e4m3fn}))
    fp8 = replace(LAYER, kv_dtype=torch.float8_e4m3fn)
    for layer, scales in ((LAYER, "none"), (fp8, "none"), (fp8, "scalar"), (fp8, "head")):
        case = cells.Case(op=Op.PAGED, layer=layer, page_size=16, scales=scales)
        if scales == "head" and descale == "one":
            with pytest.raises(ValueError, match=r"scale has shape \(2,\); attend takes one number"):
                contract.check(kernel, case)
        else:
            contract.check(kernel, case)
    assert len(shapes - {None}) == (len({len(case.lens)}) if descale == "heads" else 1)


SLOPES = ("aiter.varlen", "aiter.varlen_triton", "aiter.paged", "aiter.decode", "aiter.decode_packed")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, "strided"])
@pytest.mark.parametrize("name", [*SLOPES, "flash_attn.varlen", "flash_attn.kvcache"])
def test_slopes_of_any_dtype_and_stride_are_given_as_dense_float32(name, kind, monkeypatch):
    """2, 8.5: FlashAttention refuses others, and aiter's decode reads what lies at their address."""
    kernel = next(kernel for kernel in (*flash_attn.KERNELS, *aiter.KERNELS) if kernel.name == name)
    fake_aiter.install(monkeypatch, new=True)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_2.module(flash_attn_2.CUDA))
    target = portable.describe("sm90" if kernel.caps.provider == "flash_attn" else "gfx942")
    layer, page_size = next(selftest.plain_layers(kernel, target))
    layer = replace(layer, alibi=True)
    inputs = build_inputs(kernel, cells.Case(op=kernel.caps.op, layer=layer, page_size=page_size), "cpu")
    slopes = 2.0 ** -torch.arange(1.0, layer.num_heads + 1)
    given = torch.stack((slopes, slopes + 1), 1)[:, 0] if kind == "strided" else slopes.to(kind)
    outs = []
    for each in (slopes, given):
        outs.append(torch.empty(*inputs.q.shape[:2], layer.v_head_dim, dtype=layer.dtype))
        tensors = inputs.tensors._replace(alibi=each)
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, tensors, outs[-1], None)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_of_any_stride_are_given_dense(dtype, monkeypatch):
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "vllm_flash_attn_3.sinks_varlen")
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", flash_attn_3.vllm_module())
    layer = replace(LAYER, sinks=True)
    inputs = build_inputs(kernel, cells.Case(op=Op.PREFILL, layer=layer), "cpu")
    sinks, outs = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=dtype), []
    for each in (sinks, torch.stack((sinks, sinks + 1), 1)[:, 0]):
        outs.append(torch.empty_like(inputs.q))
        tensors = inputs.tensors._replace(sinks=each)
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, tensors, outs[-1], None)
    assert torch.equal(*outs)


# Readings of conventions that are not confirmed: right under each, or refused by the self-test.


@pytest.mark.parametrize(
    ("build", "about"),
    [
        *((FlashMlaBuild(lazy, out, lse=lse), None) for lazy in (True, False) for out in (0.0, math.nan)
          for lse in (math.inf, -math.inf, 0.0, math.nan)),
        (FlashMlaBuild(base=2.0), "lse is wrong"),
        (FlashMlaBuild(transposed=True), ": "),
    ],
    ids=str,
)  # fmt: skip
def test_flash_mla_is_right_or_refused_under_every_reading(build, about, monkeypatch):
    """1.1: the base of its LSE and what it gives for a row without keys."""
    install_flash_mla(monkeypatch, FLASH_MLA, build)
    target = replace(portable.describe("sm90"), device="cpu")
    found = selftest.fault(FLASH_MLA, target)
    assert found is None if about is None else found is not None and about in found
    if about is None:
        layer = Layer.mla(num_heads=16, dtype=torch.bfloat16)
        for lens in ("no_keys", "more_queries", "decode"):
            contract.check(FLASH_MLA, cells.Case(op=Op.MLA_DECODE, layer=layer, lens=cells.LENS[lens], page_size=64))


def test_a_fork_that_reads_larger_pages_alone_is_refused(monkeypatch):
    """1.2: multiples of 16 are what vLLM says of its FA2; a build that keeps upstream's 256 does not pass."""
    kernel: Kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn.vllm_paged")

    def attend(**given: object) -> object:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = attend
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    found = selftest.fault(kernel, replace(portable.describe("sm80"), device="cpu"))
    assert found is not None and "block size must be divisible by 256" in found
