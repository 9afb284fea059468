"""The oracle itself, against attention as its definition says and against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import dense_attention, dense_mask
from hypothesis import given
from hypothesis import strategies as st

from portable.backends import reference, torch_mla
from portable.backends.reference import attend
from portable.conformance import cells
from portable.conformance.inputs import gathered, segment
from portable.kernel import KV, Op
from portable.layer import Layer, LayerTensors
from portable.platform.detect import describe

INF = math.inf
BY_OP = {kernel.caps.op: kernel for kernel in reference.KERNELS}
NONE = LayerTensors()
GATHERS = [kernel for kernel in (*reference.KERNELS, *torch_mla.KERNELS) if kernel.caps.op is Op.CACHE_GATHER]
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
sides = st.none() | st.integers(0, 6)


def close(got: torch.Tensor, want: object, tolerance: float = 1e-6) -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance, equal_nan=True)


def prefill(q, k, v, layer, lens, tensors=NONE, **fields):
    """Run the prefill kernel: out and lse."""
    made = replace(segment(BY_OP[Op.PREFILL], lens, layer), **fields)
    out, lse = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.empty(q.shape[1], q.shape[0])
    reference.prefill(q, KV(k, v), made, layer, tensors, out, lse)
    return out, lse


def weights_of(scores: list[float], **features: object) -> torch.Tensor:
    """The probability of each key for one query whose scores are these, read through one-hot values."""
    keys = len(scores)
    k = torch.tensor(scores, dtype=torch.float64).reshape(keys, 1, 1)
    v = torch.eye(keys, dtype=torch.float64)[:, None]
    return attend(torch.ones(1, 1, 1), k, v, scale=1.0, compute=torch.float64, **features).out[0, 0]


@given(
    sizes=st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    causal=st.booleans(),
    left=sides,
    right=sides,
    softcap=st.none() | st.floats(0.3, 3),
    sinks=st.booleans(),
    alibi=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_attention_by_definition(sizes, dims, causal, left, right, softcap, sinks, alibi, seed):
    (queries, keys, kv_heads, group), (qk_dim, v_dim), rng = sizes, dims, np.random.default_rng(seed)
    heads = kv_heads * group
    q, k, v = (
        rng.normal(size=s) for s in ((queries, heads, qk_dim), (keys, kv_heads, qk_dim), (keys, kv_heads, v_dim))
    )
    features = {
        "scale": 0.7,
        "softcap": softcap,
        "sinks": rng.normal(size=heads) if sinks else None,
        "alibi": rng.uniform(size=heads) if alibi else None,
    }
    want, want_lse = dense_attention(q, k, v, dense_mask(queries, keys, causal, left, right), **features)
    features = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in features.items()}
    got = attend(
        *map(torch.from_numpy, (q, k, v)), causal=causal, window=(left, right), compute=torch.float64, **features
    )
    close(got.out, want, 1e-12)
    close(got.lse, want_lse, 1e-12)


def test_causal_square_is_torchs_own():
    q, k, v = (torch.randn(7, 3, 16, dtype=torch.float64) for _ in range(3))
    layer = Layer.gqa(num_heads=3, head_dim=16, dtype=torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
        )
    close(prefill(q, k, v, layer, [(7, 7)])[0], want[0].transpose(0, 1), 1e-13)


def test_order_is_scale_softcap_alibi_mask_sink_softmax():
    """Scores 8 and 4 with scale 1/2 and cap 2, the first key one step away at slope 1, beside a sink of 1."""
    logits = [2 * math.tanh(4 / 2) - 1, 2 * math.tanh(2 / 2), 1.0]
    k, v = torch.tensor([8.0, 4.0]).reshape(2, 1, 1), torch.eye(2)[:, None]
    out, lse = attend(
        torch.ones(1, 1, 1), k, v, scale=0.5, softcap=2.0, alibi=torch.ones(1), sinks=torch.ones(1),
        compute=torch.float64,
    )  # fmt: skip
    total = sum(map(math.exp, logits))
    close(out[0, 0], [math.exp(logits[0]) / total, math.exp(logits[1]) / total], 1e-12)
    close(lse, [[math.log(total)]], 1e-12)


def test_one_key_beside_a_sink_of_the_same_score_gets_half():
    close(weights_of([0.0], sinks=torch.zeros(1)), [0.5])


@pytest.mark.parametrize(("sink", "total"), [(0.0, 4 / 5), (-INF, 1.0), (20.0, 4 / (4 + math.exp(20)))])
def test_the_weights_beside_a_sink(sink, total):
    close(weights_of([0.0] * 4, sinks=torch.tensor([sink])).sum(), total, 1e-12)


def test_a_sliding_window_of_4_at_position_9_sees_keys_6_to_9():
    window = Layer.gqa(num_heads=1, head_dim=1, window=4).window
    assert window == (3, 0)
    close(weights_of([0.0] * 10, window=window), [0.0] * 6 + [0.25] * 4)
    close(weights_of([0.0] * 10, window=(None, None)), [0.1] * 10)


def test_windows_that_no_convention_agrees_on_are_refused():
    for window in ((-1, 0), (0, -2)):
        with pytest.raises(ValueError, match="window"):
            Layer.gqa(num_heads=1, head_dim=1, window=window)


@pytest.mark.parametrize("window", [(3, 0), (None, None), (0, 0)])
def test_a_token_gets_the_same_from_decode_as_from_prefill(window):
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, window=window)
    q, k, v = (torch.randn(10, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out, lse = prefill(q, k, v, layer, [(10, 10)])
    made = segment(BY_OP[Op.PAGED], [(1, 10)], layer, torch.tensor([[2, 0, 1]], dtype=torch.int32), page_size=4)
    pages = KV(*(torch.full((3, 4, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)))
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5])
    reference.cache_write(k, v, pages, slots, layer, NONE)
    last, last_lse = torch.empty(1, 4, 8, dtype=torch.float64), torch.empty(4, 1)
    reference.paged(q[9:], pages, made, layer, NONE, last, last_lse)
    close(last, out[9:], 1e-13)
    close(last_lse, lse[:, 9:])


def test_requests_without_queries_or_keys_keep_to_themselves():
    """The holes of a decode batch: query lengths 0, 1, 0, 1 over 0, 3, 0 and 5 keys."""
    layer = Layer.gqa(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.float64)
    q, k, v = (torch.randn(n, h, 64, dtype=torch.float64) for n, h in ((2, 9), (8, 3), (8, 3)))
    out, _ = prefill(q, k, v, layer, [(0, 0), (1, 3), (0, 0), (1, 5)])
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        part = (q[row : row + 1], k[keys], v[keys])
        want, _ = dense_attention(*(x.numpy() for x in part), np.ones((1, len(part[1])), bool), scale=0.125)
        close(out[row : row + 1], want, 1e-12)


def test_queries_without_keys_give_zero_and_minus_infinity_or_the_sink():
    layer = Layer.gqa(num_heads=2, head_dim=4, dtype=torch.float32)
    q, empty = torch.randn(3, 2, 4), torch.empty(0, 2, 4)
    out, lse = prefill(q, empty, empty, layer, [(1, 0), (2, 0)])
    assert (out == 0).all() and (lse == -INF).all()
    out, lse = prefill(q, empty, empty, layer, [(3, 0)], LayerTensors(sinks=torch.tensor([1.5, -INF])))
    assert (out == 0).all() and lse.tolist() == [[1.5] * 3, [-INF] * 3]
    out, lse = prefill(q, q[:1], q[:1], layer, [(3, 1)])  # causal: only the last query sees the key
    assert (out[:2] == 0).all() and (lse[:, :2] == -INF).all()
    close(out[2], q[0])


def test_an_empty_batch_has_an_empty_result():
    layer = Layer.gqa(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.float32)
    q, k = torch.empty(0, 9, 64), torch.empty(0, 3, 64)
    for lens in ([], [(0, 0)]):
        out, lse = prefill(q, k, k, layer, lens)
        assert out.shape == (0, 9, 64) and lse.shape == (9, 0)


def test_minus_infinity_comes_from_the_mask_and_nan_from_values():
    """A visible key whose score is NaN is not an empty row, and an invisible NaN is not a value."""
    k, v = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    k[0] = v[0] = torch.nan
    q = torch.zeros(2, 1, 1)
    inside = attend(q, k, v, scale=1.0, window=(0, 0))
    assert inside.out.flatten().tolist() == [1.0, 1.0] and inside.lse.tolist() == [[0.0, 0.0]]
    assert attend(q, k, v, scale=1.0).out.isnan().all()


def test_values_padded_to_the_width_of_keys_and_cut_once_are_the_same():
    layer = Layer.gqa(num_heads=2, head_dim=192, v_head_dim=128, dtype=torch.float64)
    assert layer.scale == 1 / math.sqrt(192)
    q, k = (torch.randn(5, 2, 192, dtype=torch.float64) for _ in range(2))
    v = torch.randn(5, 2, 128, dtype=torch.float64)
    padded, _ = prefill(q, k, torch.nn.functional.pad(v, (0, 64)), layer, [(5, 5)])
    close(padded[..., :128], prefill(q, k, v, layer, [(5, 5)])[0], 1e-14)
    assert (padded[..., 128:] == 0).all()


def test_blocks_of_queries_change_nothing(monkeypatch):
    layer = Layer.gqa(num_heads=2, head_dim=8, dtype=torch.float64, window=(5, None))
    q, k, v = (torch.randn(11, 2, 8, dtype=torch.float64) for _ in range(3))
    whole = prefill(q[:9], k, v, layer, [(9, 11)])
    monkeypatch.setattr(reference, "MAX_SCORES", 50)
    for got, want in zip(prefill(q[:9], k, v, layer, [(9, 11)]), whole, strict=True):
        close(got, want, 1e-13)


@pytest.mark.parametrize("others", [1, 2, 7, 32])
def test_a_request_has_the_same_bits_alone_as_in_a_batch(others):
    layer = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, batch_invariant=True)
    lens = [(1, 200)] + [(1, 8 * n) for n in range(1, others)]
    q = torch.randn(len(lens), 8, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(s for _, s in lens), 2, 64, dtype=torch.bfloat16) for _ in range(2))
    alone, together = prefill(q[:1], k[:200], v[:200], layer, lens[:1]), prefill(q, k, v, layer, lens)
    assert torch.equal(alone[0], together[0][:1]) and torch.equal(alone[1], together[1][:, :1])


def test_exact_lengths_need_no_sync_and_bounds_are_read_from_the_device(no_sync):
    layer = Layer.gqa(num_heads=2, head_dim=8, dtype=torch.float32)
    q, k, v = torch.randn(3, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    with no_sync():
        want = prefill(q, k, v, layer, [(2, 4), (1, 5)], causal=torch.tensor([True, False]))
    bounds = np.array([64, 64], dtype=np.int32)
    got = prefill(q, k, v, layer, [(2, 4), (1, 5)], host_seq_lens=bounds, exact=False)
    assert torch.equal(got[0], want[0])


def test_every_query_of_an_mla_verify_has_its_own_limit():
    """3 queries on 8 keys see 6, 7 and 8 of them; each equals its own decode, and the rows differ."""
    layer = Layer.mla(num_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, dtype=torch.float64)
    kernel = BY_OP[Op.MLA_DECODE]
    pages, table = torch.randn(4, 3, 24, dtype=torch.float64), torch.tensor([[3, 1, 2]], dtype=torch.int32)
    q = torch.randn(3, 4, 24, dtype=torch.float64)

    def decode(q, keys):
        out = torch.empty(len(q), 4, 16, dtype=torch.float64)
        made = segment(kernel, [(len(q), keys)], layer, table, page_size=3)
        kernel.run(q, KV(pages, None), made, layer, NONE, out, None)
        return out

    together = decode(q, 8)
    rows = pages[[3, 1, 2]].flatten(0, 1).numpy()[:, None]
    for i, keys in enumerate((6, 7, 8)):
        close(together[i : i + 1], decode(q[i : i + 1], keys), 1e-13)
        mask = np.ones((1, keys), dtype=bool)
        want, _ = dense_attention(q[i : i + 1].numpy(), rows[:keys], rows[:keys, :, :16], mask, scale=layer.scale)
        close(together[i : i + 1], want, 1e-12)
    assert not torch.allclose(together[0], together[1])


def fp8_pages(dtype: torch.dtype, stored: list[int]) -> KV:
    """One page whose tokens hold these bytes."""
    k = torch.tensor(stored, dtype=torch.uint8).view(dtype).reshape(1, -1, 1, 1)
    return KV(k, k.clone())


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(FN, [1.0, 2.0, 448.0, math.nan, -0.0, math.nan]), (FNUZ, [0.5, 1.0, 224.0, 240.0, math.nan, -240.0])],
)
def test_the_same_bytes_mean_what_the_type_of_the_cache_says(dtype, values):
    layer = Layer.gqa(num_heads=1, head_dim=1, dtype=torch.float32, kv_dtype=dtype)
    made = segment(BY_OP[Op.CACHE_GATHER], [(1, 6)], layer, torch.zeros(1, 1, dtype=torch.int32), page_size=6)
    pages = fp8_pages(dtype, [0x38, 0x40, 0x7E, 0x7F, 0x80, 0xFF])
    k, v = gathered(made, layer, NONE, pages)
    close(k.flatten(), values)
    k, v = gathered(made, layer, LayerTensors(k_scale=torch.tensor(0.5), v_scale=torch.tensor([3.0])), pages)
    close(k.flatten(), [x * 0.5 for x in values])
    close(v.flatten(), [x * 3 for x in values])


@pytest.mark.parametrize("kernel", GATHERS, ids=lambda kernel: kernel.name)
def test_rows_beyond_the_last_key_of_a_gather_are_0_where_host_lengths_are_bounds(kernel):
    layer = Layer.gqa(num_heads=1, head_dim=2, dtype=torch.float32)
    pages = torch.arange(1.0, 17).view(4, 2, 1, 2)
    made = segment(kernel, [(1, 3), (1, 1)], layer, torch.tensor([[0, 1], [2, -1]], dtype=torch.int32), page_size=2)
    made = replace(made, host_seq_lens=np.array([4, 3], np.int32), exact=False, prepared=None)
    if kernel.prepare is not None:
        made = replace(made, prepared=kernel.prepare(made, layer))
    out = KV(*(torch.full((7, 1, 2), math.nan) for _ in range(2)))
    kernel.run(KV(pages, -pages), made, layer, NONE, out)
    want = torch.cat([pages.view(8, 1, 2)[[0, 1, 2, 4]], torch.zeros(3, 1, 2)])
    assert torch.equal(out.k, want) and torch.equal(out.v, -want)


def test_a_scale_of_a_quarter_in_one_flavour_is_a_half_in_the_other():
    for dtype, scale in ((FN, 0.25), (FNUZ, 0.5)):
        layer = Layer.gqa(num_heads=1, head_dim=1, dtype=torch.float32, kv_dtype=dtype)
        made = segment(BY_OP[Op.CACHE_GATHER], [(1, 1)], layer, torch.zeros(1, 1, dtype=torch.int32), page_size=1)
        tensors = LayerTensors(k_scale=torch.tensor(scale))
        assert gathered(made, layer, tensors, fp8_pages(dtype, [0x40])).k.item() == 0.5


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(FN, 448.0), (FNUZ, 240.0), (torch.float8_e5m2, 57344.0), (torch.float8_e5m2fnuz, 57344.0)],
)
def test_what_is_too_large_for_the_cache_is_its_largest_value(dtype, largest):
    layer = Layer.gqa(num_heads=1, head_dim=1, dtype=torch.float32, kv_dtype=dtype)
    rows = torch.tensor([240.0, 241.0, 448.0, 1e6, -1e6, -0.0, math.nan]).reshape(7, 1, 1)
    pages = fp8_pages(dtype, [1] * 7)
    reference.cache_write(rows, 4 * rows, pages, torch.arange(7), layer, LayerTensors(v_scale=torch.tensor(4.0)))
    k = pages.k.flatten().float()
    assert torch.equal(k.nan_to_num(), pages.v.flatten().float().nan_to_num())
    assert k[0] == (240 if dtype in (FN, FNUZ) else 256) and k[6].isnan()
    assert k[2] == min(448, largest) and k[3] == largest and k[4] == -largest and k[5] == 0
    if dtype == FNUZ:
        assert k[1] == 240


def five_blocks() -> tuple[Layer, KV]:
    layer = Layer.gqa(num_heads=2, head_dim=4, dtype=torch.float32)
    return layer, KV(*(torch.full((5, 16, 2, 4), -7.0) for _ in range(2)))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("slots", "written"),
    [
        ([3, 17], {3: 0, 17: 1}),
        ([3, -1, 17, -1], {3: 0, 17: 2}),
        ([3, 3], {3: 1}),
        ([5, 3, 5, 3], {5: 2, 3: 3}),
        ([], {}),
    ],
)
def test_slots_say_which_rows_are_written(slots, written, index):
    """4 rows, some not contiguous: a shorter mapping, -1 for nothing, and of equal slots the last."""
    layer, pages = five_blocks()
    qkv = torch.randn(4, 6, 4)  # fused, so k and v have gaps between their rows
    k, v = qkv[:, 2:4], qkv[:, 4:]
    reference.cache_write(k, v, pages, torch.tensor(slots, dtype=index), layer, NONE)
    for cache, rows in zip(pages, (k, v), strict=True):
        want = torch.full((80, 2, 4), -7.0)
        for slot, row in written.items():
            want[slot] = rows[row]
        assert torch.equal(cache.flatten(0, 1), want)


def test_a_slot_past_the_end_is_named_and_nothing_is_written():
    layer, pages = five_blocks()
    with pytest.raises(ValueError, match="slot_mapping holds 80; the cache has 80 slots, 0 to 79"):
        reference.cache_write(torch.ones(2, 2, 4), torch.ones(2, 2, 4), pages, torch.tensor([3, 80]), layer, NONE)
    assert (pages.k == -7).all()


def test_many_equal_slots_keep_the_last_row():
    layer, pages = five_blocks()
    rows = torch.arange(4000.0).reshape(-1, 1, 1).expand(4000, 2, 4)
    reference.cache_write(rows, rows, pages, torch.arange(4000) % 80, layer, NONE)
    assert torch.equal(pages.k[..., 0, 0].flatten(), torch.arange(3920.0, 4000.0))


def test_pages_beyond_two_gibibytes_are_reached():
    """4564 pages of 1,435,968 bytes are 6,553,757,952, past 32 bits; memory that is not touched costs nothing."""
    heads, size, dim, pages = 1, 576, 2493, 4564
    layer = Layer.gqa(num_heads=heads, head_dim=dim, dtype=torch.float32, kv_dtype=FN)
    assert pages * size * dim == 6_553_757_952
    k = torch.from_numpy(np.empty((pages, size, heads, dim), dtype=np.uint8)).view(FN)
    rows = torch.randint(-8, 8, (3, heads, dim)).float()
    slots = torch.tensor([pages * size - 1, 2**31 // dim, 0])
    reference.cache_write(rows, rows, KV(k, k), slots, layer, NONE)
    made = segment(BY_OP[Op.CACHE_GATHER], [(0, 1)], layer, torch.zeros(1, 1, dtype=torch.int32), page_size=size)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        page, offset = divmod(slot, size)
        assert torch.equal(k[page, offset].float(), row)
        table = torch.tensor([[page]], dtype=torch.int32)
        part = replace(made, block_table=table, host_seq_lens=np.array([offset + 1], dtype=np.int32))
        got = gathered(part, layer, NONE, KV(k, k))
        assert torch.equal(got.k[-1], row)


def test_what_does_not_fit_together_is_named():
    layer, pages = five_blocks()
    q, k = torch.zeros(2, 2, 4), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match=r"kv\.k has 3 rows; seq_lens of the segment sum to 5"):
        prefill(q, k, k, layer, [(2, 5)])
    for page in (5, -1):
        made = segment(BY_OP[Op.PAGED], [(2, 17)], layer, torch.tensor([[0, page]], dtype=torch.int32), page_size=16)
        with pytest.raises(ValueError, match=f"row 0: block_table holds page {page}; the cache has pages 0 to 4"):
            reference.paged(q, pages, made, layer, NONE, torch.empty(2, 2, 4), None)
    with pytest.raises(ValueError, match="v and the V pages"):
        reference.cache_write(k, None, pages, torch.arange(3), layer, NONE)


def test_it_refuses_nothing():
    """Every cell of the contract that makes sense is served: it is the kernel of last resort on every device."""
    for arch in ("x86_64", "gfx942", "sm90"):
        for kernel in reference.KERNELS:
            assert not list(cells.refused(kernel, describe(arch)))
