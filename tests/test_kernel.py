"""Kernel.why_not: everything that is not declared is refused, with both numbers in the sentence."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable import Layer, describe
from portable.kernel import FEATURES, GraphLevel, Kernel, KernelCaps, LseForm, Needs, Op
from portable.sets import ANY, NO_SIZE, Sizes, from_arch, multiple_of, one_of

TARGET = describe("gfx942", "MI300X")
PAGED = Needs(page_size=16, query_len=1, seq_len=4096)


def kernel(**kwargs):
    caps = {
        "op": Op.PAGED,
        "name": "toy.paged",
        "provider": "toy",
        "vendors": {"amd"},
        "archs": {"gfx942"},
        "dtypes": {torch.bfloat16},
        "head_dims": multiple_of(8, up_to=256),
        "gqa_ratios": one_of(1, 4, 8),
        "page_sizes": multiple_of(16),
    }
    return Kernel(KernelCaps(**{**caps, **kwargs}), run=lambda *_: None)


def layer(**kwargs):
    return Layer.gqa(**{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **kwargs})


def test_what_is_declared_is_served():
    assert kernel().why_not(TARGET, layer(), PAGED) == ()


def test_an_empty_declaration_serves_nothing():
    bare = Kernel(KernelCaps(op=Op.PAGED, name="bare", provider="toy"), run=lambda *_: None)
    assert len(bare.why_not(TARGET, layer(), PAGED)) >= 5


@pytest.mark.parametrize(
    ("layer_with", "needs_with", "reason"),
    [
        (dict(window=8), {}, "window is not supported"),
        (dict(softcap=50.0), {}, "softcap is not supported"),
        (dict(sinks=True), {}, "sinks is not supported"),
        (dict(alibi=True), {}, "alibi is not supported"),
        (dict(causal=False), {}, "noncausal is not supported"),
        (dict(batch_invariant=True), {}, "batch_invariant is not supported"),
        ({}, dict(causal=False), "noncausal is not supported"),
        ({}, dict(lse=True), "lse is not supported"),
        ({}, dict(page_size=24), "page_size 24 is not a multiple of 16"),
        ({}, dict(graph=GraphLevel.SINGLE), "graph level SINGLE is above NEVER"),
        (dict(head_dim=72 + 4), {}, "head_dim 76 is not a multiple of 8"),
        (dict(head_dim=320), {}, "head_dim 320 is above 256"),
        (dict(v_head_dim=12), {}, "v_head_dim 12 is not a multiple of 8"),
        (dict(num_heads=24), {}, "GQA ratio 3 is not one of 1, 4, 8"),
        (dict(dtype=torch.float16), {}, "dtype float16 is not one of bfloat16"),
        (dict(kv_dtype=torch.float8_e4m3fn), {}, "kv_dtype float8_e4m3fn is not supported: the kernel declares none"),
        (dict(cache_layout="shuffled"), {}, "cache layout 'shuffled' is not one of strided"),
    ],
)
def test_each_thing_that_is_not_declared_is_refused_alone(layer_with, needs_with, reason):
    needs = PAGED._replace(**needs_with)
    assert kernel().why_not(TARGET, layer(**layer_with), needs) == (reason,)


def test_each_feature_is_accepted_once_declared():
    everything = kernel(features=FEATURES)
    asked = layer(window=8, softcap=50.0, sinks=True, alibi=True, causal=False, batch_invariant=True)
    assert everything.why_not(TARGET, asked, PAGED._replace(causal=False, lse=True)) == ()
    for feature in FEATURES:
        lacking = kernel(features=FEATURES - {feature})
        reasons = lacking.why_not(TARGET, asked, PAGED._replace(causal=False, lse=True))
        assert reasons == (f"{feature} is not supported",)


def test_devices_are_told_apart_by_vendor_and_arch_never_by_numbers():
    assert kernel().why_not(describe("sm90"), layer(), PAGED) == ("vendor 'nvidia' is not one of amd",)
    assert kernel().why_not(describe("gfx90a"), layer(), PAGED) == ("arch 'gfx90a' is not one of gfx942",)
    hopper = kernel(vendors=ANY, archs=from_arch("sm90"))
    assert hopper.why_not(TARGET, layer(), PAGED) == ("arch 'gfx942' is not sm90 or newer",)
    assert hopper.why_not(describe("sm100"), layer(), PAGED) == ()


def test_emulated_devices_take_only_what_can_be_emulated():
    emulated = dataclasses.replace(TARGET, emulated=True)
    assert kernel().why_not(emulated, layer(), PAGED) == ("it does not run on an emulated device",)
    assert kernel(emulated=True).why_not(emulated, layer(), PAGED) == ()


def test_equal_widths_are_asked_for_both():
    narrow = layer(v_head_dim=64)
    assert kernel().why_not(TARGET, narrow, PAGED) == ()
    assert kernel(equal_value_dim=True).why_not(TARGET, narrow, PAGED) == ("v_head_dim 64 differs from head_dim 128",)


def test_mla_decode_sees_the_latent():
    mla = Layer.mla(num_heads=16)
    decode = kernel(op=Op.MLA_DECODE, head_dims=one_of(576), v_head_dims=one_of(512), gqa_ratios=one_of(16))
    assert decode.why_not(TARGET, mla, PAGED) == ()
    assert decode.why_not(TARGET, Layer.mla(num_heads=8), PAGED) == ("GQA ratio 8 is not one of 16",)
    prefill = kernel(op=Op.PREFILL, head_dims=one_of(192), v_head_dims=one_of(128))
    assert prefill.why_not(TARGET, mla, Needs()) == ()


def test_lengths_beyond_a_kernel_are_refused():
    short = kernel(max_seq_len=1024, query_lens=one_of(1, 2))
    assert short.why_not(TARGET, layer(), PAGED._replace(query_len=4)) == (
        "query length 4 is not one of 1, 2",
        "sequence length 4096 is above 1024",
    )


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 64), st.integers(1, 300))
def test_sizes_contain_what_they_do_not_refuse(value, multiple, least, most):
    sizes = Sizes(multiple=multiple, least=least, most=most)
    assert (value in sizes) == (value % multiple == 0 and least <= value <= most)
    assert (sizes.why_not("size", value) is None) == (value in sizes)


def test_nothing_is_in_no_size():
    assert NO_SIZE.why_not("page_size", 16) == "page_size 16 is not one of nothing: the kernel declares no size"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KernelCaps(op=Op.PAGED, name="x", provider="y", features=frozenset({"windows"})), "windows"),
        (lambda: KernelCaps(op=Op.PAGED, name="x", provider="y", page_form="list"), "page_form is 'list'"),
        (lambda: LseForm(layout="hbt"), "layout is 'hbt'"),
        (lambda: LseForm(base="10"), "base is '10'"),
        (lambda: LseForm(empty="none"), "empty is 'none'"),
    ],
)
def test_a_declaration_with_a_word_that_means_nothing_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
