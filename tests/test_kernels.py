"""Every kernel that a device of this machine can run meets the contract, and the contract sees what it is for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import portable
from portable.attention import load_kernels
from portable.backends import reference
from portable.conformance import cells, contract
from portable.kernel import Kernel, Op
from portable.platform.target import Target

KERNELS = load_kernels()
RIGHT = next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.PAGED)
SHOWN = ("window", "softcap", "sinks", "alibi", "noncausal")
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def prove(kernel: Kernel, target: Target) -> None:
    """Every cell that the kernel accepts on the target is right, and together they show every feature it declares."""
    wrong, shown = [], set()
    for case in cells.cases(kernel, target):
        try:
            shown |= contract.check(kernel, case, target.device)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}\n    {case}")
    assert not wrong, f"{kernel} is wrong in {len(wrong)} cells:\n" + "\n".join(wrong[:10])
    if kernel.caps.op in (Op.PREFILL, Op.PAGED) and cells.runs_on(kernel, target):
        assert shown >= kernel.caps.features & set(SHOWN)


@each_kernel
def test_every_cell_that_a_kernel_accepts_is_right(kernel):
    prove(kernel, portable.detect("cpu"))


@pytest.mark.device
@each_kernel
def test_every_cell_that_a_kernel_accepts_is_right_on_this_device(kernel):
    if kernel not in portable.available_kernels():
        pytest.skip("its package is not installed, or it is for another device")
    prove(kernel, portable.detect())


@each_kernel
def test_a_kernel_serves_something_or_is_for_another_device(kernel):
    target = portable.detect("cpu")
    assert bool(list(cells.cases(kernel, target))) == cells.runs_on(kernel, target)


def test_every_triton_file_with_kernels_is_offered():
    """Their list has an order, so it is written by hand; a file that is left out would be tested by nobody."""
    triton = pytest.importorskip("portable.backends.triton")
    names = {info.name for info in pkgutil.iter_modules(triton.__path__)}
    modules = {name: importlib.import_module(f"portable.backends.triton.{name}") for name in names}
    assert {name for name, module in modules.items() if hasattr(module, "KERNELS")} == set(triton.FILES)


@each_kernel
def test_every_refusal_says_why(kernel):
    """On the CPU, and on the first of these devices that the kernel is for."""
    here, *others = portable.detect("cpu"), *map(portable.describe, ("gfx942", "gfx950", "sm90", "sm100"))
    for target in (here, next((each for each in others if cells.runs_on(kernel, each)), here)):
        for case, reasons in cells.refused(kernel, target):
            assert all(isinstance(reason, str) and reason for reason in reasons), case


# What kernels have been seen to do, each as a change to a right kernel.


def drop(**fields: object) -> Callable[..., None]:
    """The layer says one thing and the kernel does another."""

    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, replace(layer, **fields), tensors, out, lse)

    return run


def without(**fields: object) -> Callable[..., None]:
    """The kernel ignores a tensor of the layer."""

    def run(q, kv, segment, layer, tensors, out, lse):
        reference.paged(q, kv, segment, layer, tensors._replace(**fields), out, lse)

    return run


def always_causal(q, kv, segment, layer, tensors, out, lse):
    reference.paged(q, kv, replace(segment, causal=True), layer, tensors, out, lse)


def first_request_decides_causal(q, kv, segment, layer, tensors, out, lse):
    causal = segment.causal if isinstance(segment.causal, bool) else bool(segment.causal[0])
    reference.paged(q, kv, replace(segment, causal=causal), layer, tensors, out, lse)


def one_key_too_many(q, kv, segment, layer, tensors, out, lse):
    left, right = layer.window
    layer = layer if left is None else replace(layer, window=(left + 1, right))
    reference.paged(q, kv, segment, layer, tensors, out, lse)


def one_key_too_few(q, kv, segment, layer, tensors, out, lse):
    left, right = layer.window
    layer = layer if not left else replace(layer, window=(left - 1, right))
    reference.paged(q, kv, segment, layer, tensors, out, lse)


def whole_pages(q, kv, segment, layer, tensors, out, lse):
    size = segment.page_size
    keys = -(-segment.host_seq_lens // size) * size
    reference.paged(q, kv, replace(segment, host_seq_lens=keys, causal=False), layer, tensors, out, lse)


def base_2(q, kv, segment, layer, tensors, out, lse):
    reference.paged(q, kv, segment, layer, tensors, out, lse)
    if lse is not None:
        lse.div_(0.6931472)


def no_sink_in_lse(q, kv, segment, layer, tensors, out, lse):
    reference.paged(q, kv, segment, layer, tensors._replace(sinks=None), torch.empty_like(out), lse)
    reference.paged(q, kv, segment, layer, tensors, out, None)


def heads_interleaved(q, kv, segment, layer, tensors, out, lse):
    order = torch.arange(layer.num_heads).reshape(layer.num_kv_heads, -1).T.reshape(-1)
    reference.paged(q[:, order], kv, segment, layer, tensors, out, lse)


def leaves_empty_rows(q, kv, segment, layer, tensors, out, lse):
    part = torch.empty_like(out)
    reference.paged(q, kv, segment, layer, tensors, part, lse)
    out.copy_(torch.where(part == 0, out, part))


def scales_q_in_place(q, kv, segment, layer, tensors, out, lse):
    q.mul_(2)
    reference.paged(q, kv, segment, replace(layer, scale=layer.scale / 2), tensors, out, lse)


def dense_out(q, kv, segment, layer, tensors, out, lse):
    reference.paged(q, kv, segment, layer, tensors, out, lse)
    rows = out.as_strided((out[0].numel(),), (1,), out.storage_offset())  # takes the first row to be without gaps
    rows.copy_(out[0].reshape(-1))


FAULTS = {
    "window": drop(window=(None, None)),
    "softcap": drop(softcap=None),
    "sinks": without(sinks=None),
    "alibi": without(alibi=None),
    "k_scale": without(k_scale=None),
    "v_scale": without(v_scale=None),
    "scale": drop(scale=0.125),
}
DEPARTURES = (
    always_causal,
    first_request_decides_causal,
    one_key_too_many,
    one_key_too_few,
    whole_pages,
    base_2,
    no_sink_in_lse,
    heads_interleaved,
    leaves_empty_rows,
    scales_q_in_place,
    dense_out,
)


@pytest.fixture(scope="module")
def paged_cases() -> list[cells.Case]:
    return list(cells.cases(RIGHT, portable.detect("cpu")))


@pytest.mark.parametrize("fault", [*FAULTS, *(run.__name__ for run in DEPARTURES)])
def test_the_contract_sees(fault, paged_cases):
    run = FAULTS.get(fault) or next(run for run in DEPARTURES if run.__name__ == fault)
    with pytest.raises(AssertionError, match=r"wrong|not 0|outside|written"):
        for case in paged_cases:
            contract.check(replace(RIGHT, run=run), case)


def test_the_contract_wants_a_tolerance_that_hides_nothing(paged_cases):
    for tolerance, message in (({}, "declares no tolerance"), (dict.fromkeys(reference.DTYPES, 0.1), "would hide")):
        with pytest.raises(AssertionError, match=message):
            contract.check(replace(RIGHT, caps=replace(RIGHT.caps, tolerance=tolerance)), paged_cases[0])
