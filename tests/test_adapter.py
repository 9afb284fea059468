"""What adapters do beyond FlashAttention's conventions: pages in compressed rows, scales of fp8, and bad tables."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fakes.dense import attention, check_offsets, need, sides

import portable
from portable.backends.adapter import Adapter, Convention
from portable.backends.rows import each_query
from portable.conformance import cells, contract
from portable.conformance.inputs import segment
from portable.kernel import Kernel, KernelCaps, LseForm, Op
from portable.layer import Layer, UnsupportedError
from portable.merge import has_keys
from portable.sets import ANY, ANY_SIZE

CALL = Convention(
    module="toy_vendor",
    function="ops.attend",
    names={
        "q": "q",
        "k": "keys",
        "v": "values",
        "cu_seqlens_q": "qo_indptr",
        "kv_indptr": "kv_indptr",
        "kv_indices": "kv_indices",
        "kv_last_page_len": "kv_last_page_len",
        "scale": "scale",
        "causal": "causal",
        "window_left": "left",
        "window_right": "right",
        "lse": "return_lse",
    },
    lse=LseForm(layout="th", base="2", empty="0"),
)
CAPS = KernelCaps(
    op=Op.PAGED,
    name="toy.paged",
    provider="toy",
    vendors=ANY,
    archs=ANY,
    dtypes={torch.bfloat16, torch.float16},
    head_dims=ANY_SIZE,
    gqa_ratios=ANY_SIZE,
    page_sizes=ANY_SIZE,
    page_form="csr",
    features=frozenset({"window", "noncausal", "lse"}),
    tolerance={torch.bfloat16: 1e-2, torch.float16: 2e-3},
)


def attend(q, keys, values, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, scale, causal, left, right, return_lse):
    """Over pages [pages, page_size, H, D], or slots [N, H, D], in compressed rows; LSE [T, H] in base 2, 0 if empty."""
    size = 1 if keys.dim() == 3 else keys.shape[1]
    found = []
    for (start, end), last in zip(check_offsets(kv_indptr, "kv_indptr"), kv_last_page_len.tolist(), strict=True):
        need((end > start) == (last > 0) and last <= size, "kv_last_page_len")
        length = (end - start - 1) * size + last if end > start else 0
        at = kv_indices[start:end].long()
        found.append([(t[at] if size == 1 and t.dim() == 3 else t[at].flatten(0, 1))[:length] for t in (keys, values)])
    spans = check_offsets(qo_indptr, "qo_indptr")
    queries = [q[start:end] for start, end in spans]
    window = sides((left, right), causal)
    outs, lses = attention(queries, *zip(*found, strict=True), scale=scale, window=window)
    lse = torch.cat(lses, 1).T / torch.tensor(2.0).log()
    return (torch.cat(outs), lse.masked_fill(lse.isinf(), 0.0)) if return_lse else torch.cat(outs)


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("toy_vendor")
    module.ops = ModuleType("toy_vendor.ops")
    module.ops.attend = attend
    monkeypatch.setitem(sys.modules, "toy_vendor", module)
    return module


@pytest.mark.parametrize("pages", ["page", "token"])
def test_pages_in_compressed_rows_meet_the_contract_in_both_granularities(vendor, pages):
    """C30: the same result for page indices and for slots, for every memory that pages may lie in."""
    kernel = Adapter(replace(CALL, pages=pages)).kernel(CAPS)
    for case in cells.cases(kernel, portable.detect("cpu")):
        contract.check(kernel, case)


def test_a_callable_is_checked_when_it_is_bound_and_again_when_it_changes(vendor):
    adapter = Adapter(CALL)
    assert adapter.bind() is attend
    vendor.ops.attend = lambda q, keys: q
    with pytest.raises(UnsupportedError, match=r"toy_vendor\.ops\.attend takes no 'values'"):
        adapter.bind()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": {"queries": "q"}}, "names of ops.attend has 'queries'"),
        ({"rows": "ragged"}, "rows is 'ragged'; it must be one of packed, batch"),
        ({"pages": "block"}, "pages is 'block'"),
        ({"descale": "all"}, "descale is 'all'"),
        ({"writes_out": True}, "writes_out of ops.attend is True; names must have 'out' then"),
    ],
)
def test_a_convention_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CALL, **changes)


@pytest.mark.parametrize("causal", [True, False, (True, False, True)])
def test_each_query_as_a_request_of_its_own_sees_the_same_keys(causal):
    layer = Layer.gqa(num_heads=2, head_dim=16)
    made = segment(Kernel(CAPS, print), ((3, 7), (0, 4), (2, 1)), layer, causal=causal)
    rows = each_query(made)
    assert rows.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5] and rows.max_query_len == 1
    want = {True: [5, 6, 7, 0, 1], False: [7, 7, 7, 1, 1]}.get(causal, [5, 6, 7, 0, 1])
    assert rows.seq_lens.tolist() == want and (rows.host_seq_lens >= want).all()
    before = has_keys(made.cu_seqlens_q, made.seq_lens, 5, made.causal)
    assert torch.equal(before, rows.seq_lens > 0)


def test_the_time_of_an_adapter_is_measured_without_its_vendor(monkeypatch, capsys):
    """`python -m benchmarks.adapters`: what it prints is of the adapters that were named, and finite."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent.parent / "ci"), *sys.path])
    adapters = importlib.import_module("benchmarks.adapters")
    monkeypatch.setattr(adapters, "ROUNDS", 1)
    monkeypatch.setattr(adapters, "CALLS", 1)
    monkeypatch.setattr(adapters, "detect", lambda: portable.detect("cpu"))
    before = dict(sys.modules)
    try:
        list(adapters.added(["flash_attn_3.varlen", "flash_attn.kvcache", "torch.flash"]))
    finally:
        for name in sys.modules.keys() - before.keys():
            if sys.modules[name].__spec__ is None:  # a stand-in, in which transformers would look for a version
                del sys.modules[name]
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line.split()[0] for line in lines] == ["flash_attn_3.varlen", "flash_attn.kvcache", "torch.flash"]
    assert all("out and lse" in line for line in lines)
