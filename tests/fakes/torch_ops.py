"""torch's operators for GPUs on CPU tensors, behind torch's own schemas, as each build of torch behaves.

`_flash_attention_forward`: conventions 1.1 (rows "torch aten flash"), 1.3 and 9. What SDPA calls, memory-efficient and
of cuDNN: 1.1 (rows "torch efficient (CUDA)" and "torch cudnn"), 1.3 and 9. What is not confirmed there is a field of
`Readings`, or of `Sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from portable.backends.reference import attend

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Readings:
    """A build of torch, and one reading of what is not known of it."""

    rocm: bool = False
    empty_out: float = 0.0
    empty_lse: float = float("inf")
    padded_lse: bool = True  # under ROCm: [B, H, longest]; or [H, T]
    unseen: float = float("nan")  # the padding of an LSE
    lse_factor: float = 1.0  # 1 / ln 2: in base 2
    transposed: bool = False  # [T, H]
    bottom_right: bool = False  # under ROCm too
    varlen: bool = False  # called by torch.nn.attention.varlen, which passes -1 for an open side on to CUDA

    def __str__(self) -> str:
        build = "rocm" if self.rocm else "cuda"
        return f"{build}-{self.empty_out}-{self.empty_lse}" + (f"-{self.padded_lse}" if self.rocm else "")


@contextmanager
def installed(readings: Readings) -> Iterator[list[dict[str, object]]]:
    """The operator has a CPU kernel inside; gives the list of its calls."""
    calls: list[dict[str, object]] = []

    def forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
        block_table=None, num_splits=None,
    ):  # fmt: skip
        calls.append({"causal": is_causal, "q": cum_seq_q.tolist(), "k": cum_seq_k.tolist()})
        assert dropout_p == 0 and not return_debug_mask and seqused_k is None and block_table is None
        if readings.rocm and alibi_slopes is not None:
            raise RuntimeError("alibi_slopes is not supported")
        for packed, cu, longest in ((query, cum_seq_q, max_q), (key, cum_seq_k, max_k)):
            assert cu.dtype == torch.int32 and cu.is_contiguous() and int(cu[-1]) <= len(packed)
            assert int(cu.diff().max()) <= longest, "a request is longer than the grid"
        assert query.dtype in HALVES and query.dtype == key.dtype == value.dtype
        assert query.shape[-1] == key.shape[-1] == value.shape[-1], "9: the widths must be equal"
        assert query.shape[-1] % 8 == 0 and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        if max_q == 1 and not readings.rocm:  # 2: heads are folded, and row i is taken for request i
            assert len(query) == len(cum_seq_q) - 1, "the folded path needs one query for each request"
        if readings.varlen:
            window_size_left, window_size_right = (
                None if side == -1 else side for side in (window_size_left, window_size_right)
            )
        if window_size_left is not None or window_size_right is not None:
            if readings.rocm:
                raise RuntimeError("windows are not what they seem")
            assert all(side is None or side >= 0 for side in (window_size_left, window_size_right))
        out, lse = (
            torch.full_like(query, readings.empty_out),
            query.new_full((query.shape[1], len(query)), readings.empty_lse),
        )
        lse = lse.float()
        for r in range(len(cum_seq_q) - 1):
            rows, keys = (slice(int(cu[r]), int(cu[r + 1])) for cu in (cum_seq_q, cum_seq_k))
            found = attend(
                query[rows], key[keys], value[keys],
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                causal=is_causal, window=(window_size_left, window_size_right), alibi=alibi_slopes,
                first=0 if readings.rocm and not readings.bottom_right else None, compute=torch.float64,
            )  # fmt: skip
            seen = ~found.lse.isinf().all(0)
            out[rows] = torch.where(seen[:, None, None], found.out.to(out.dtype), out[rows])
            lse[:, rows] = torch.where(seen, found.lse.float(), lse[:, rows])
        lse = lse * readings.lse_factor
        if readings.transposed:
            lse = lse.T
        if readings.rocm and readings.padded_lse:
            padded = lse.new_full((len(cum_seq_q) - 1, query.shape[1], max_q), readings.unseen)
            for r in range(len(cum_seq_q) - 1):
                rows = slice(int(cum_seq_q[r]), int(cum_seq_q[r + 1]))
                padded[r, :, : rows.stop - rows.start] = lse[:, rows]
            lse = padded
        seed = torch.empty(0, dtype=torch.int64)
        return out, lse, seed, seed, torch.empty(0, dtype=query.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@dataclass(frozen=True)
class Sdpa:
    """One reading of what is not known of the operators below `scaled_dot_product_attention`."""

    empty_out: float = 0.0
    empty_lse: float = float("inf")
    padding: float = float("inf")  # of an LSE that is rounded up
    lse_factor: float = 1.0  # 1 / ln 2: in base 2
    bottom_right: bool = False


@contextmanager
def sdpa_installed(readings: Sdpa) -> Iterator[list[tuple[str, bool]]]:
    """Both operators have a CPU kernel inside; gives the list of their calls: which, and whether causal."""
    calls: list[tuple[str, bool]] = []

    def computed(q, k, v, bias, causal, scale):
        assert q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2], "[B, H, S, D], no GQA"
        assert q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] and k.shape[2] == v.shape[2]
        assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in (q, k, v))
        scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if bias is not None:
            assert bias.dtype == q.dtype and bias.shape == scores.shape, "attn_bias: wrong shape"
            scores = scores + bias.double()
        if causal:
            assert bias is None, "explicit attn_bias should not be set when is_causal=True"
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
            seen = seen.tril(scores.shape[-1] - scores.shape[-2] if readings.bottom_right else 0)
            scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        blind = lse.isneginf()
        out = torch.softmax(scores, -1) @ v.double()
        out = out.masked_fill(blind[..., None], readings.empty_out).to(q.dtype)
        return out, (lse.masked_fill(blind, readings.empty_lse) * readings.lse_factor).float()

    def efficient(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):  # fmt: skip
        calls.append(("efficient", is_causal))
        assert dropout_p == 0 and compute_log_sumexp
        for stride in () if attn_bias is None else attn_bias.stride()[:3]:
            assert stride * attn_bias.itemsize % 16 == 0, "attn_bias is not correctly aligned"
        out, lse = computed(query, key, value, attn_bias, is_causal, scale)
        rounded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=readings.padding)
        return out, rounded, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)

    def cudnn(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
        scale=None,
    ):  # fmt: skip
        calls.append(("cudnn", is_causal))
        assert dropout_p == 0 and compute_log_sumexp and not return_debug_mask
        assert query.dtype in HALVES and max(query.shape[-1], value.shape[-1]) <= 128
        out, lse = computed(query, key, value, attn_bias, is_causal, scale)
        none = torch.empty(0, dtype=torch.int64)
        return out, lse[..., None], none, none, query.shape[2], key.shape[2], none, none, torch.empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn, "CPU")
    try:
        yield calls
    finally:
        library._destroy()
