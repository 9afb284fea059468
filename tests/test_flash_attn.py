"""The adapters of FlashAttention meet the contract on stand-ins for every release and build that they are for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch
from fakes import flash_attn_2, flash_attn_3, flash_attn_4
from fakes.dense import Empty

import portable
from portable.backends import flash_attn, selftest
from portable.conformance import cells, contract
from portable.conformance.inputs import build as build_inputs
from portable.kernel import GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.platform.target import Target
from portable.select import select

SHOWN = {"window", "softcap", "sinks", "alibi", "noncausal"}

# The module that a kernel calls, a device it is for, and the stand-ins for the builds: one per reading where a
# convention is not documented.
CK = [
    replace(flash_attn_2.CK, empty=Empty(lse, out))
    for lse, out in ((-math.inf, 0.0), (math.inf, 0.0), (0.0, math.nan), (math.nan, 0.0))
] + [replace(flash_attn_2.CK, folds=True)]
AITER = [replace(flash_attn_2.AITER, empty=Empty(lse), literal=lse == 0.0) for lse in (-math.inf, 0.0)]
AITER_DECODE = [replace(flash_attn_2.AITER, literal=literal, rounded=128 * literal) for literal in (True, False)]
V3 = [flash_attn_3.Build(), flash_attn_3.Build(schedules=False, tail="masked")]
V2 = [flash_attn_3.Build(writes=writes) for writes in (True, False)]
V3_SINKS = [
    flash_attn_3.Build(sink_skipped=skipped, sink_empty=out) for skipped in (True, False) for out in (0.0, math.nan)
]
BUILDS: dict[str, tuple[str, str, list[Callable[[], ModuleType]]]] = {
    "flash_attn_4.": ("flash_attn.cute", "sm100", [flash_attn_4.module]),
    "flash_attn_3.": ("flash_attn_interface", "sm90", [lambda b=b: flash_attn_3.module(b) for b in V3]),
    "flash_attn_3.varlen_only": (
        "flash_attn_interface",
        "sm90",
        [lambda: flash_attn_3.module(flash_attn_3.Build(varlen_lse=False))],
    ),
    "vllm_flash_attn_3.": ("vllm.vllm_flash_attn", "sm90", [lambda b=b: flash_attn_3.vllm_module(b) for b in V3]),
    "vllm_flash_attn_3.sinks": (
        "vllm.vllm_flash_attn",
        "sm90",
        [lambda b=b: flash_attn_3.vllm_module(b) for b in V3_SINKS],
    ),
    "flash_attn.vllm": ("vllm.vllm_flash_attn", "sm80", [lambda b=b: flash_attn_3.vllm_module(b) for b in V2]),
    "flash_attn.": ("flash_attn", "sm80", [lambda: flash_attn_2.module(flash_attn_2.CUDA)]),
    "flash_attn.ck": ("flash_attn", "gfx942", [lambda b=b: flash_attn_2.module(b) for b in CK]),
    "flash_attn.triton": ("flash_attn", "gfx1100", [lambda: flash_attn_2.module(flash_attn_2.TRITON)]),
    "flash_attn.aiter": ("flash_attn", "gfx950", [lambda b=b: flash_attn_2.module(b) for b in AITER]),
    "flash_attn.aiter_kvcache": ("flash_attn", "gfx1100", [lambda b=b: flash_attn_2.module(b) for b in AITER_DECODE]),
}


HOLES = ((0, 0), (1, 3), (0, 0), (1, 5))
SQUARE = ((2, 7), (3, 3))
# What the common axes have not, or so late that no pair reaches it.
WIDER = {"page_size": (256, 512), "ranks": ((512, 64),), "dims": ((64, 128), (64, 512), (32, 256))}


@cache
def cases_of(kernel: Kernel, target: Target) -> list[cells.Case]:
    """The contract's cases, with the axes that the kernel is narrower than put to what it serves."""
    if found := list(cells.cases(kernel, target)):
        return found + [case for case in named_cases(kernel, found[0]) if can(kernel, target, case)]
    axes = dict(cells.AXES[kernel.caps.op])
    name = "ranks" if kernel.caps.op is Op.MLA_DECODE else "dims" if kernel.name.endswith("64_512") else "page_size"
    axes[name] = WIDER[name]

    def fits(cell: cells.Cell) -> bool:
        case = cells.case_of(kernel.caps.op, cell)
        return case is not None and can(kernel, target, case)

    found = [case for cell in cells.pairwise(axes, fits) if (case := cells.case_of(kernel.caps.op, cell)) is not None]
    return found + [case for case in named_cases(kernel, found[0]) if can(kernel, target, case)]


def can(kernel: Kernel, target: Target, case: cells.Case) -> bool:
    return not kernel.why_not(target, case.layer, case.needs())


def named_cases(kernel: Kernel, first: cells.Case) -> Iterator[cells.Case]:
    """Queries with holes between them, as many tokens as heads (shapes do not tell layouts apart), a narrower V."""
    if kernel.caps.op is Op.MLA_DECODE:
        return
    layer = first.layer
    few = Layer.gqa(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    square = Layer.gqa(num_heads=5, num_kv_heads=5, head_dim=64, dtype=torch.bfloat16)
    lse = "lse" in kernel.caps.features
    for made, lens in ((few, HOLES), (square, SQUARE)):
        wide = replace(made, qk_head_dim=layer.qk_head_dim, v_head_dim=layer.v_head_dim)
        yield cells.Case(op=first.op, layer=wide, lens=lens, page_size=first.page_size, lse=lse)
    yield cells.Case(op=first.op, layer=replace(few, qk_head_dim=128), lens=SQUARE, page_size=first.page_size, lse=lse)


def builds_of(kernel: Kernel) -> tuple[str, str, list[Callable[[], ModuleType]]]:
    return BUILDS[max((name for name in BUILDS if kernel.name.startswith(name)), key=len)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, ModuleType], None]:
    return lambda name, module: monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kernel", flash_attn.KERNELS, ids=lambda kernel: kernel.name)
def test_every_cell_that_a_kernel_accepts_is_right(kernel, install):
    name, arch, modules = builds_of(kernel)
    target, shown = portable.describe(arch), set()
    assert cells.runs_on(kernel, target)
    cases = cases_of(kernel, target)
    assert cases
    if kernel.name.endswith("mla_pieces") or kernel.name == "vllm_flash_attn_3.mla_paged":
        # which differ from flash_attn_3.mla_paged by their pages and their module alone; 128 heads take 12 s
        cases = cases[::3]
    for build, make in enumerate(modules):
        install(name, make())
        for case in cases:
            try:
                shown |= contract.check(kernel, case)
            except Exception as error:
                raise AssertionError(f"{kernel} on build {build} in {case}") from error
    if kernel.caps.op in (Op.PREFILL, Op.PAGED):
        single = 2 not in kernel.caps.query_lens  # whose one query sees the same keys, causal or not
        assert shown >= (kernel.caps.features & SHOWN) - ({"noncausal"} if single else set())


# Which kernel serves, by what is installed.

PLAIN = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
MLA = Layer.mla(num_heads=16)


def chosen(arch: str, op: Op, layer: Layer = PLAIN, needs: Needs | None = None, **packages: str) -> str | None:
    """The kernel that is taken where these packages are, or None."""
    found = {name.replace("__", "-"): version for name, version in packages.items()}
    page_size = None if op is Op.PREFILL else 16
    try:
        needs = needs or Needs(page_size=page_size, seq_len=64)
        return select(op, portable.describe(arch), layer, needs, "flash_attn", found, flash_attn.KERNELS).kernel.name
    except UnsupportedError:
        return None


def test_each_release_is_for_its_own_devices():
    assert chosen("sm90", Op.PREFILL, flash_attn_3="3.0.0b1") == "flash_attn_3.varlen"
    assert chosen("sm90", Op.PAGED, flash_attn_3="3.0.0b1") == "flash_attn_3.decode"
    assert chosen("sm90", Op.PREFILL, vllm="0.33.0") == "vllm_flash_attn_3.varlen"
    assert chosen("sm100", Op.PREFILL, flash__attn__4="4.0.0b36") == "flash_attn_4.varlen"
    assert chosen("sm80", Op.PREFILL, flash__attn="2.8.3") == "flash_attn.varlen"
    assert chosen("gfx942", Op.PREFILL, flash__attn="2.8.3") == "flash_attn.ck_varlen"
    for arch, packages in (
        ("gfx942", {"flash_attn_3": "3.0.0b1"}),
        ("sm120", {"flash__attn__4": "4.0.0b36"}),
        ("sm100", {"flash__attn__4": "4.0.0b35"}),
        ("sm80", {"flash__attn": "2.5.9"}),  # whose LSE is padded, [B, H, longest]
    ):
        assert chosen(arch, Op.PREFILL, **packages) is None


def test_widths_choose_the_kernel_that_needs_no_padding():
    wide = Layer.gqa(num_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128)
    assert chosen("sm90", Op.PREFILL, wide, flash_attn_3="3.0.0b1") == "flash_attn_3.varlen_192_128"
    tall = Layer.gqa(num_heads=16, num_kv_heads=16, head_dim=64, v_head_dim=512)
    assert chosen("sm90", Op.PREFILL, tall, flash_attn_3="3.0.0b1") == "flash_attn_3.varlen_64_512"
    assert chosen("sm80", Op.PREFILL, wide, flash__attn="2.8.3") == "flash_attn.varlen"  # with V padded
    assert chosen("sm80", Op.PAGED, wide, Needs(page_size=256), flash__attn="2.8.3") is None  # a cache is not
    assert chosen("sm90", Op.MLA_DECODE, MLA, vllm="0.33.0") == "vllm_flash_attn_3.mla_decode"


@pytest.mark.parametrize("version", ["2.8.3", "2.8.3.post2", "2.8.4"])
def test_a_graph_holds_decoding_only_where_nothing_waits(version):
    for graph in (GraphLevel.NEVER, GraphLevel.UNIFORM):
        needs = Needs(page_size=256, seq_len=512, graph=graph)
        waits = version == "2.8.4"
        want = ("flash_attn.kvcache_eager" if graph is GraphLevel.NEVER else None) if waits else "flash_attn.kvcache"
        assert chosen("sm80", Op.PAGED, needs=needs, flash__attn=version) == want


def test_what_a_build_drops_or_cannot_read_is_refused():
    ck, triton = {"flash__attn[ck]": "2.8.3"}, {"flash__attn[triton]": "2.8.3"}
    assert chosen("gfx942", Op.PREFILL, replace(PLAIN, softcap=30.0), **ck) is None
    assert chosen("gfx942", Op.PREFILL, **triton) == "flash_attn.triton_varlen"
    assert chosen("gfx1100", Op.PREFILL, **ck) is None
    windowed = replace(PLAIN, window=(127, 0))
    assert chosen("gfx942", Op.PREFILL, windowed, **triton) is None
    assert chosen("gfx942", Op.PREFILL, windowed, **{"flash__attn[triton]": "2.8.4"}) == "flash_attn.aiter_varlen"
    assert chosen("gfx942", Op.PAGED, needs=Needs(page_size=128), **triton) is None
    assert chosen("gfx1100", Op.PAGED, **triton) is None
    assert chosen("gfx1100", Op.PAGED, **{"flash__attn[triton]": "2.8.4"}) == "flash_attn.aiter_kvcache"
    assert chosen("gfx942", Op.PAGED, needs=Needs(page_size=64), **ck) is None
    sinks = replace(PLAIN, sinks=True)
    assert chosen("sm90", Op.PREFILL, sinks, flash_attn_3="3.0.0b1") is None
    assert chosen("sm90", Op.PREFILL, sinks, vllm="0.33.0") == "vllm_flash_attn_3.sinks_varlen"
    assert chosen("sm90", Op.PREFILL, sinks, Needs(lse=True), vllm="0.33.0") == "vllm_flash_attn_3.sinks_varlen"
    assert chosen("sm90", Op.PREFILL, replace(sinks, num_heads=128), vllm="0.33.0") is None
    # TMA would read the NaN behind the last token of a page of a whole tile of keys
    tall = Layer.gqa(num_heads=16, num_kv_heads=16, head_dim=64, v_head_dim=512)
    paged, tall_paged = "flash_attn_3.paged", "flash_attn_3.paged_64_512"
    for layer, page_size, want in (
        (PLAIN, 16, paged), (PLAIN, 64, paged), (PLAIN, 128, None), (PLAIN, 80, None), (tall, 32, tall_paged),
        (tall, 64, None),
    ):  # fmt: skip
        needs = Needs(page_size=page_size, query_len=64, seq_len=64)
        assert chosen("sm90", Op.PAGED, layer, needs, flash_attn_3="3.0.0b1") == want
    assert chosen("sm90", Op.PAGED, needs=Needs(page_size=128), flash_attn_3="3.0.0b1") == "flash_attn_3.decode"
    # columns of V that are not read: seen on an H100
    wide = Layer.gqa(num_heads=16, num_kv_heads=16, head_dim=32, v_head_dim=64)
    assert chosen("sm90", Op.PAGED, wide, flash_attn_3="3.0.0b1") is None
    assert chosen("sm90", Op.PREFILL, wide, flash_attn_3="3.0.0b1") == "flash_attn_3.varlen_64_512"
    fp8 = replace(PLAIN, kv_dtype=torch.float8_e4m3fn)  # with which q would have to be fp8 as well
    assert chosen("sm90", Op.PAGED, fp8, flash_attn_3="3.0.0b1") is None
    assert chosen("sm100", Op.PAGED, needs=Needs(page_size=128), flash__attn__4="4.0.0b36") is None


def test_a_page_that_tma_reads_would_not_be_right(install):
    """What the caps leave out is wrong under one reading of the tail of a page, and right under the other."""
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn_3.paged")
    layer = Layer.gqa(num_heads=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    case = cells.Case(op=Op.PAGED, layer=layer, lens=((25, 25), (5, 40)), page_size=128)
    install("flash_attn_interface", flash_attn_3.module(flash_attn_3.Build(tail="masked")))
    contract.check(kernel, case)
    install("flash_attn_interface", flash_attn_3.module(flash_attn_3.Build(tail="poison")))
    with pytest.raises(AssertionError, match="out is wrong"):
        contract.check(kernel, case)


def test_v_wider_than_k_in_one_tile_is_wrong_over_pages(install):
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "vllm_flash_attn_3.paged")
    install("vllm.vllm_flash_attn", flash_attn_3.vllm_module())
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="out is wrong"):
        contract.check(kernel, cells.Case(op=Op.PAGED, layer=layer, page_size=16))


def test_a_page_of_64_is_read_row_by_row(install):
    """For V of up to 256 beside K as wide: the largest tiles of keys divide no such page."""
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn_3.paged")
    install("flash_attn_interface", flash_attn_3.module(flash_attn_3.Build(tail="poison")))
    for dim in (64, 96, 128, 192, 256):
        layer = Layer.gqa(num_heads=16, num_kv_heads=2, head_dim=dim, dtype=torch.bfloat16)
        for causal in (True, False):
            lens = ((25, 25), (5, 70))
            contract.check(kernel, cells.Case(op=Op.PAGED, layer=layer, lens=lens, page_size=64, causal=causal))


def test_a_build_whose_lse_leaves_the_sinks_out_fails_its_self_test(install):
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "vllm_flash_attn_3.sinks_decode")
    target = replace(portable.describe("sm90"), device="cpu")
    install("vllm.vllm_flash_attn", flash_attn_3.vllm_module(flash_attn_3.Build(sink_in_lse=False)))
    assert "sinks: lse is wrong" in selftest.fault(kernel, target)
    install("vllm.vllm_flash_attn", flash_attn_3.vllm_module())
    assert selftest.fault(kernel, target) is None


@pytest.mark.parametrize("name", ["flash_attn.ck_varlen", "flash_attn.ck_kvcache", "flash_attn.ck_varlen_paged"])
def test_an_lse_in_another_base_than_the_documented_one_does_not_pass(install, name):
    """1.1: that Composable Kernel's is natural is not confirmed."""
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == name)
    install("flash_attn", flash_attn_2.module(replace(flash_attn_2.CK, base=2.0)))
    assert "lse is wrong" in selftest.fault(kernel, replace(portable.describe("gfx942"), device="cpu"))


@pytest.mark.parametrize("causal", [True, False, (True, False)])
@pytest.mark.parametrize("window", [(3, None), (3, 2), (None, 2)])
@pytest.mark.parametrize("name", ["flash_attn.aiter_varlen", "flash_attn.aiter_kvcache"])
def test_no_side_of_a_window_is_open_to_aiters_kernels_beside_a_bounded_left(name, window, causal, install):
    """7, C25: they read a right side of -1 as one key before the query's own, beside causality and without it."""
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == name)
    install("flash_attn", flash_attn_2.module(replace(flash_attn_2.AITER, literal=True)))
    layer = replace(Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16), window=window)
    page_size = 16 if kernel.caps.op is Op.PAGED else None
    contract.check(
        kernel,
        cells.Case(op=kernel.caps.op, layer=layer, lens=((4, 12), (5, 9)), page_size=page_size, causal=causal),
    )


def test_a_build_whose_signature_differs_is_refused_with_the_name_of_the_argument(install):
    install("flash_attn_interface", flash_attn_3.module(flash_attn_3.Build(varlen_lse=False)))
    kernels = {kernel.name: kernel.run.__self__ for kernel in flash_attn.KERNELS}
    with pytest.raises(UnsupportedError, match="takes no 'return_attn_probs'"):
        kernels["flash_attn_3.varlen"].bind()
    assert kernels["flash_attn_3.varlen_only"].bind()


def test_a_step_without_any_key_calls_nothing(install):
    install("flash_attn_interface", flash_attn_3.module())
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn_3.varlen")
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    contract.check(kernel, cells.Case(op=Op.PREFILL, layer=layer, lens=((2, 0), (1, 0))))


@pytest.mark.parametrize(("lens", "most"), [(((3, 9), (5, 5)), 0), (((1, 9), (1, 5)), 1)])
def test_vllms_version_2_is_given_the_output_and_what_it_wrote_there_is_not_copied(lens, most, install):
    """A copy is a launch more: 6 us of an H100's host. 2: with folded heads the output is elsewhere."""
    install("vllm.vllm_flash_attn", flash_attn_3.vllm_module())
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn.vllm_paged")
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    case = cells.Case(op=Op.PAGED, layer=layer, lens=lens, page_size=16)
    contract.check(kernel, case)
    inputs, copies = build_inputs(kernel, case, "cpu"), []

    class Out(torch.Tensor):
        def copy_(self, source, non_blocking=False):
            copies.append(source)
            return super().copy_(source)

    out = torch.empty_like(inputs.q).as_subclass(Out)
    kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, None)
    assert len(copies) == most


def test_a_schedule_is_made_once_for_a_step_and_used_by_each_of_its_layers(install):
    module, made = flash_attn_3.module(), []
    build = module.get_scheduler_metadata
    module.get_scheduler_metadata = lambda **given: made.append(build(**given)) or made[-1]
    install("flash_attn_interface", module)
    kernel = next(kernel for kernel in flash_attn.KERNELS if kernel.name == "flash_attn_3.paged")
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    inputs = build_inputs(kernel, cells.Case(op=Op.PAGED, layer=layer, page_size=16), "cpu")
    out = torch.empty_like(inputs.q)
    for _ in range(3):
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, None)
    assert len(made) == 1 and torch.isfinite(out).all()
