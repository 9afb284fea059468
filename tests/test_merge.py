"""Merging partial attention by LSE, and bringing a vendor's LSE to the contract's form."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from dense import dense_mask
from hypothesis import given
from hypothesis import strategies as st

from portable.backends.reference import attend
from portable.kernel import LseForm
from portable.merge import has_keys, merge_states, normalize_lse

INF = math.inf


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance, check_dtype=False, check_stride=False)


def parts(counts: list[int], heads: int = 4, queries: int = 3, sinks: torch.Tensor | None = None):
    """Attention over each slice of the keys, over all of them, and the sink counted over all of them."""
    keys = sum(counts)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((queries, heads), (keys, 2), (keys, 2)))
    ask = {"scale": 0.5, "causal": False, "compute": torch.float64}
    each = [attend(q, *kv, **ask) for kv in zip(k.split(counts), v.split(counts), strict=True)]
    return [p.out for p in each], [p.lse for p in each], attend(q, k, v, sinks=sinks, **ask)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans())
def test_merging_slices_is_attention_over_all_keys(counts, with_sinks):
    sinks = torch.linspace(-2, 2, 4, dtype=torch.float64) if with_sinks else None
    outs, lses, whole = parts(counts, sinks=sinks)
    lse = torch.empty_like(whole.lse)
    merged = merge_states(outs, lses, sinks, lse=lse)
    close(merged.out, whole.out, 1e-12)
    close(lse, whole.lse, 1e-12)


@given(st.permutations(range(4)), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_order_and_grouping_of_four_chunks_do_not_matter(order, dtype):
    outs, lses, _ = parts([5, 3, 1, 7])
    outs, lses = [part.to(dtype) for part in outs], [part.float() for part in lses]
    flat = merge_states(outs, lses)
    a, b, c, d = ((outs[i], lses[i]) for i in order)

    def merge(*states):
        return merge_states([s[0] for s in states], [s[1] for s in states])

    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for grouped in (merge(merge(a, b), merge(c, d)), merge(a, merge(b, merge(c, d))), merge(merge(merge(a, b), c), d)):
        close(grouped.out, flat.out, tolerance)
        close(grouped.lse, flat.lse, 1e-5)


@pytest.mark.parametrize("nothing", [0.0, math.nan], ids=["zeros", "nan"])
def test_empty_sides_count_for_nothing_whatever_they_hold(nothing):
    prefix = tensor([1.0, 2.0], [nothing] * 2, [nothing] * 2)[:, None]
    suffix = tensor([3.0, 4.0], [nothing] * 2, [5.0, 6.0])[:, None]
    out, lse = merge_states([prefix, suffix], [tensor([-1.0, -INF, INF]), tensor([1.0, -INF, 0.0])])
    close(out[:, 0], tensor([2.761594, 3.761594], [0.0, 0.0], [5.0, 6.0]))
    close(lse, tensor([1.126928, -INF, 0.0]))


@pytest.mark.parametrize("empty", [INF, -INF])
def test_one_empty_side_gives_the_other_exactly(empty):
    out, lse = torch.randn(2, 3, 4), torch.randn(3, 2)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, empty)
    for outs, lses in (((out, nothing[0]), (lse, nothing[1])), ((nothing[0], out), (nothing[1], lse))):
        merged = merge_states(outs, lses)
        assert torch.equal(merged.out, out) and torch.equal(merged.lse, lse)


def test_genuine_nan_stays_in_its_row():
    outs = [torch.ones(2, 1, 1), torch.full((2, 1, 1), 3.0)]
    out, lse = merge_states(outs, [tensor([math.nan, 0.0]), tensor([0.0, 0.0])])
    assert out[0].isnan() and lse[0, 0].isnan()
    assert out[1] == 2 and lse[0, 1].isfinite()


def test_large_lse_does_not_overflow():
    out, lse = merge_states([torch.ones(1, 1, 1), torch.full((1, 1, 1), 3.0)], [tensor([5000.0]), tensor([5000.0])])
    assert out == 2
    close(lse, tensor([5000.693]), 1e-3)


def test_the_sink_counts_once():
    half, lse = torch.ones(1, 1, 1), torch.full((1, 1), math.log(4))
    sinks = torch.zeros(1)
    out, merged = merge_states([half, half], [lse, lse], sinks)
    close(out, torch.full((1, 1, 1), 8 / 9))
    close(merged, torch.full((1, 1), math.log(9)))
    each = merge_states([half], [lse], sinks)  # 4/5, and a second sink below
    close(merge_states([each.out, each.out], [each.lse, each.lse]).out, torch.full((1, 1, 1), 0.8))


def test_without_any_key_the_sink_is_left():
    nothing = torch.full((1, 2, 1), torch.nan)
    out, lse = merge_states([nothing, nothing], [tensor([INF], [-INF])] * 2, torch.tensor([2.0, -INF]))
    assert (out == 0).all()
    assert lse.tolist() == [[2.0], [-INF]]


def test_every_combination_of_strides_reads_its_own_rows():
    wide = torch.arange(2 * 2 * 192, dtype=torch.float32).reshape(2, 2, 192)
    assert wide[..., :128][1, 1, 0] == 576
    left, right = -wide[..., :128], wide[..., :128]
    lses = [tensor([0.0, 0.0], [0.0, -INF]), tensor([0.0, -INF], [-INF, 0.0])]  # [H, T]
    want = merge_states([left.contiguous(), right.contiguous()], lses)
    assert want.out[1, 1, 0] == 576 and (want.out[0, 0] == 0).all()
    for prefix_padded, suffix_padded, out_padded, transposed in itertools.product((False, True), repeat=4):
        outs = [
            part if padded else part.contiguous()
            for part, padded in ((-wide, prefix_padded), (wide, suffix_padded))
            for part in [part[..., :128]]
        ]
        into = torch.full((2, 2, 192 if out_padded else 128), torch.nan)
        given_lses = [lse.T.contiguous().T if transposed else lse for lse in lses]
        lse = torch.full((2, 2), torch.nan).T
        merge_states(outs, given_lses, out=into[..., :128], lse=lse)
        assert torch.equal(into[..., :128], want.out) and torch.equal(lse, want.lse)
        assert into[..., 128:].isnan().all()


def test_out_may_be_an_input_and_nothing_is_read_by_the_host(no_sync):
    outs, lses, whole = parts([4, 4])
    with no_sync():
        merged = merge_states(outs, lses, out=outs[1], lse=lses[0])
    assert merged.out is outs[1] and merged.lse is lses[0]
    close(outs[1], whole.out, 1e-12)


def test_wrong_shapes_are_named():
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    for arguments, message in (
        (([], []), "at least one"),
        (([out], [lse, lse]), "outs has 1 parts and lses 2"),
        (([out], [lse.T]), r"lses\[0\] has shape \(3, 2\); it must be \[H, T\] = \(2, 3\)"),
        (([out, out[:2]], [lse, lse]), r"outs\[1\] has shape"),
        (([out], [lse], torch.zeros(3)), r"sinks has shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_states(*arguments)


def test_base_2_merged_as_natural_log_is_what_normalizing_prevents():
    """3072 keys of value 0 and 64 of value 1, all of score 0: the answer is 64/3136."""
    outs = [torch.zeros(1, 1, 1), torch.ones(1, 1, 1)]
    log2 = [torch.full((1, 1), math.log2(n)) for n in (3072, 64)]
    seen, form = torch.tensor([True]), LseForm(base="2")
    close(merge_states(outs, [normalize_lse(lse, form, 1, seen) for lse in log2]).out, torch.full((1, 1, 1), 0.020408))
    close(merge_states(outs, log2).out, torch.full((1, 1, 1), 0.003740))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(
    ("query_lens", "heads"), [([2, 3, 1], 3), ([2, 3], 5), ([5], 5), ([1, 1, 1], 3), ([0, 4, 0], 2)]
)
@pytest.mark.parametrize("layout", ["ht", "th", "bhs", "bsh", "bhs1"])
def test_every_layout_becomes_the_same_values(no_sync, layout, query_lens, heads, pad, base):
    """Square cases are told apart by the declaration: score h for head h over n keys gives ln(n) + h."""
    tokens, longest = sum(query_lens), max(query_lens)
    cu = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    keys = torch.cat([torch.arange(1, n + 1) for n in query_lens])
    want = keys.log()[None] + torch.arange(heads)[:, None]
    vendor = want if base == "e" else want / math.log(2)
    if layout == "ht":
        given_lse = torch.nn.functional.pad(vendor, (0, pad), value=torch.nan)
    elif layout == "th":
        given_lse = vendor.T.contiguous()
    else:
        given_lse = torch.full((len(query_lens), heads, longest + pad), torch.nan)
        for r, n in enumerate(query_lens):
            given_lse[r, :, :n] = vendor[:, cu[r] : cu[r] + n]
        given_lse = {"bhs": given_lse, "bsh": given_lse.transpose(1, 2), "bhs1": given_lse[..., None]}[layout]
    with no_sync():
        seen = has_keys(cu, cu.diff(), tokens)
        got = normalize_lse(given_lse, LseForm(layout=layout, base=base), heads, seen, cu)
    assert got.is_contiguous() and got.dtype == torch.float32 and got.shape == (heads, tokens)
    close(got, want)


@pytest.mark.parametrize("empty", [-INF, INF, 0.0, math.nan])
def test_rows_without_keys_are_known_by_their_lengths(empty):
    """Two causal queries over one key, where the vendor's mark for the first could be anything, 0 included."""
    seen = has_keys(torch.tensor([0, 2]), torch.tensor([1]), num_tokens=2)
    vendor = tensor([empty, 0.0])
    assert normalize_lse(vendor, LseForm(), 1, seen).tolist() == [[-INF, 0.0]]
    assert normalize_lse(vendor, LseForm(), 1, seen, sinks=torch.tensor([3.0])).tolist() == [[3.0, 0.0]]


def test_an_lse_that_cannot_be_of_its_layout_is_refused():
    seen, cu = torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 6])
    for shape, layout, message in (
        ((6, 3), "ht", r"lse has shape \(6, 3\); layout 'ht' of 3 heads and 6 tokens"),
        ((3, 5), "ht", "layout 'ht'"),
        ((3, 6), "th", "layout 'th'"),
        ((3, 3, 4), "bhs", "layout 'bhs'"),
    ):
        with pytest.raises(ValueError, match=message):
            normalize_lse(torch.zeros(shape), LseForm(layout=layout), 3, seen, cu)
    with pytest.raises(ValueError, match="cu_seqlens_q is None"):
        normalize_lse(torch.zeros(2, 3, 4), LseForm(layout="bhs"), 3, seen)


sides = st.none() | st.integers(0, 6)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.booleans()), max_size=5), sides, sides, st.booleans()
)
def test_has_keys_is_whether_the_mask_has_any(requests, left, right, one_flag):
    queries, keys = [q for q, _, _ in requests], [s for _, s, _ in requests]
    causal = [c for _, _, c in requests]
    if one_flag:
        causal = causal[:1] * len(causal)
    flags = (causal[0] if causal else True) if one_flag else torch.tensor(causal, dtype=torch.bool)
    cu = torch.tensor([0, *np.cumsum(queries, dtype=np.int32)], dtype=torch.int32)
    got = has_keys(cu, torch.tensor(keys, dtype=torch.int32), sum(queries), flags, (left, right))
    want = [
        row for q, s, c in zip(queries, keys, causal, strict=True) for row in dense_mask(q, s, c, left, right).any(1)
    ]
    assert got.tolist() == want
