"""The self-test passes what is right and names what is wrong: the known faults of vendors, each as a changed kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_flash_attn import builds_of

import portable
from portable.backends import flash_attn, reference, selftest
from portable.kernel import Kernel, Op
from portable.platform.detect import describe
from portable.sets import one_of

TARGET = replace(describe("gfx942"), device="cpu")
RIGHT = {kernel.caps.op: kernel for kernel in reference.KERNELS}
PREFILL, PAGED, MLA = RIGHT[Op.PREFILL], RIGHT[Op.PAGED], RIGHT[Op.MLA_DECODE]


def fault(kernel: Kernel, **caps: Any) -> str | None:
    return selftest.fault(replace(kernel, caps=replace(kernel.caps, **caps)), TARGET)


@pytest.mark.parametrize("kernel", [PREFILL, PAGED, MLA], ids=str)
def test_a_right_kernel_passes(kernel: Kernel) -> None:
    assert selftest.fault(kernel, TARGET) is None


@pytest.mark.parametrize("kernel", [PREFILL, PAGED, MLA], ids=str)
def test_it_is_a_matter_of_milliseconds(kernel: Kernel) -> None:
    selftest.fault(kernel, TARGET)
    took = min(timed(lambda: selftest.fault(kernel, TARGET)) for _ in range(3))
    assert took < 0.5  # 30 ms alone on this CPU, which the tests share


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@pytest.mark.parametrize("kernel", flash_attn.KERNELS, ids=lambda kernel: kernel.name)
def test_every_adapter_passes_on_the_builds_that_it_is_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arch, builds = builds_of(kernel)
    for build in builds:
        monkeypatch.setitem(sys.modules, module, build())
        assert selftest.fault(kernel, replace(describe(arch), device="cpu")) is None


@pytest.mark.parametrize(
    "narrower",
    [
        {"features": frozenset()},
        {"features": frozenset({"lse"})},
        {"dtypes": {torch.float16}},
        {"gqa_ratios": one_of(4)},
        {"page_sizes": one_of(256)},
        {"head_dims": one_of(128), "equal_value_dim": True},
        {"query_lens": one_of(1)},
        {"cache_layouts": ("shuffled",)},
    ],
    ids=str,
)
def test_what_a_kernel_refuses_is_not_asked(narrower: dict[str, Any]) -> None:
    assert fault(PAGED, **narrower) is None


def test_nothing_that_could_not_be_tried_passes() -> None:
    assert fault(PAGED, head_dims=one_of(24)) == "it serves no layer that the self-test knows"
    assert selftest.fault(RIGHT[Op.CACHE_WRITE], TARGET) == "no self-test is known for cache_write"


# The faults. A kernel: run(q, kv, segment, layer, tensors, out, lse).

Run = Callable[..., None]


def dropped(**fields: object) -> Run:  # C09
    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, replace(layer, **fields), tensors, out, lse)

    return run


def without(**fields: object) -> Run:  # C09, C24
    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, layer, tensors._replace(**fields), out, lse)

    return run


def widened(by: int) -> Run:  # C25
    def run(q, kv, segment, layer, tensors, out, lse):
        left, right = layer.window
        changed = layer if left is None else replace(layer, window=(max(0, left + by), right))
        reference.paged(q, kv, segment, changed, tensors, out, lse)

    return run


def always_causal(q, kv, segment, layer, tensors, out, lse):
    reference.paged(q, kv, replace(segment, causal=True), layer, tensors, out, lse)


def top_left(q, kv, segment, layer, tensors, out, lse):  # conventions 1.3
    for r, (queries, keys) in enumerate(reference.host_lens(segment)):
        at = int(segment.host_query_lens[:r].sum())
        rows = slice(at, at + queries)
        k, v = reference.gather(kv, segment, r, keys, layer, tensors, torch.float32)
        found = reference.attend(
            q[rows], k, v, scale=layer.scale, causal=segment.causal, window=layer.window, softcap=layer.softcap,
            sinks=tensors.sinks, alibi=tensors.alibi, first=0,
        )  # fmt: skip
        out[rows] = found.out.to(out.dtype)
        if lse is not None:
            lse[:, rows] = found.lse


def folded(q, kv, segment, layer, tensors, out, lse):  # C14
    if segment.max_query_len > 1:
        reference.paged(q, kv, segment, layer, tensors, out, lse)
        return
    count = len(q)
    first = replace(
        segment,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=segment.seq_lens[:count],
        block_table=segment.block_table[:count],
        host_query_lens=segment.host_query_lens[:0].repeat(0) if not count else segment.host_query_lens[:count] * 0 + 1,
        host_seq_lens=segment.host_seq_lens[:count],
    )
    reference.paged(q, kv, first, layer, tensors, out, lse)


def changed_lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, layer, tensors, out, lse)
        if lse is not None:
            lse.copy_(change(lse.clone()))

    return run


def square_only_transposed(lse: torch.Tensor) -> torch.Tensor:  # C20
    return lse.T if lse.shape[0] == lse.shape[1] else lse


def changed_out(change: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, layer, tensors, out, lse)
        out.copy_(change(out.clone()))

    return run


def whole_pages(q, kv, segment, layer, tensors, out, lse):  # C30: the tail counts
    size = segment.page_size
    keys = -(-segment.host_seq_lens // size) * size
    reference.paged(q, kv, replace(segment, host_seq_lens=keys), layer, tensors, out, lse)


def table_of_tokens(q, kv, segment, layer, tensors, out, lse):  # C30, C33: a page table is read as one of tokens
    reference.paged(q, kv, replace(segment, block_table=segment.block_table.flip(1)), layer, tensors, out, lse)


def same_position(q, kv, segment, layer, tensors, out, lse):  # C32
    reference.paged(q, kv, segment, layer, tensors, out, lse)
    if (segment.host_query_lens == 6).all():
        out.copy_(out[5::6].repeat_interleave(6, 0))


def raises(error: BaseException) -> Run:
    def run(*_: object) -> None:
        raise error

    return run


def writes_q(q, kv, segment, layer, tensors, out, lse):
    q.mul_(2)
    reference.paged(q, kv, segment, replace(layer, scale=layer.scale / 2), tensors, out, lse)


LOG2E = 1.4426950408889634
FAULTS: dict[str, tuple[Run, str]] = {
    "C09 window": (dropped(window=(None, None)), "the edge of a window"),
    "C09 softcap": (dropped(softcap=None), "softcap"),
    "C09 sinks": (without(sinks=None), "sinks"),
    "C09 alibi": (without(alibi=None), "alibi"),
    "C09 causal": (always_causal, "keys on both sides"),
    "C09 scale": (dropped(scale=128**-0.5), "the first tokens"),
    "top-left": (top_left, "one query"),
    "C14 folded": (folded, "requests without a query"),
    "C18 +inf": (changed_lse(lambda x: x.masked_fill(x.isneginf(), torch.inf)), "rows without a key: lse"),
    "C18 0": (changed_lse(lambda x: x.masked_fill(x.isneginf(), 0)), "rows without a key: lse"),
    "C18 NaN": (changed_out(lambda x: x.masked_fill((x == 0).all(-1, True), torch.nan)), "rows without a key: out"),
    "C19 base 2": (changed_lse(lambda x: x * LOG2E), "lse"),
    "C20 square": (changed_lse(square_only_transposed), "lse is wrong"),
    "C24 k": (without(k_scale=None), "an fp8 cache"),
    "C24 v": (without(v_scale=None), "an fp8 cache"),
    "C25 one more": (widened(1), "the edge of a window"),
    "C25 one fewer": (widened(-1), "the edge of a window"),
    "C30 tail": (whole_pages, ": "),
    "C30 table": (table_of_tokens, ": "),
    "C32 six": (same_position, "six queries"),
    "writes q": (writes_q, "it wrote into q"),
    "raises": (raises(RuntimeError("no kernel image\n for this device")), "RuntimeError: no kernel image for this"),
    "leaves": (raises(SystemExit(3)), "SystemExit: 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    run, about = FAULTS[name]
    found = selftest.fault(replace(PAGED, run=run), TARGET)
    assert found is not None and about in found


def test_a_fault_of_preparation_is_named_too() -> None:
    def prepare(segment: object, layer: object) -> None:
        raise portable.UnsupportedError("lib.attend takes no 'window'")

    found = selftest.fault(replace(PAGED, prepare=prepare), TARGET)
    assert found is not None and found.endswith("UnsupportedError: lib.attend takes no 'window'")


def test_ctrl_c_is_not_a_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        selftest.fault(replace(PAGED, run=raises(KeyboardInterrupt())), TARGET)


def test_fp8_bytes_of_the_other_flavour_are_a_fault() -> None:  # C24: the same bytes stand for twice as much
    def run(q, kv, segment, layer, tensors, out, lse):
        if layer.kv_dtype is torch.float8_e4m3fnuz:
            kv = kv._replace(k=kv.k.view(torch.float8_e4m3fn), v=kv.v.view(torch.float8_e4m3fn))
        reference.paged(q, kv, segment, layer, tensors, out, lse)

    found = selftest.fault(replace(PAGED, run=run), TARGET)
    assert found is not None and found.startswith("an fp8 cache")
