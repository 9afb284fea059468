"""`flash_attn` 2 in four builds.

Rows reproduced. LSE: "FA2 CUDA varlen >=2.6.0", "FA2 with_kvcache", "FA2-ROCm CK" [U: base, empty row, output],
"FA2-ROCm Triton, FA283 in-tree", "FA2-ROCm Triton, via aiter main" [rows not visited stay 0; an LSE [B, H, Sq] may be
rounded up; U: what an open right side is beside a bounded left, which aiter's prompt and decode kernels read
differently]. Pages: "FA2 upstream", "FA2-ROCm CK", "FA2-ROCm Triton". Sections "FA2 CUDA", "ROCm flash-attn, CK
backend", "ROCm flash-attn, Triton backend".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType

import torch

from fakes.dense import (
    Empty,
    attention,
    check_heads,
    check_offsets,
    contiguous,
    from_pages,
    lens_of,
    need,
    sides,
)


@dataclass(frozen=True)
class Build:
    """What the builds differ in."""

    page: int = 0  # pages are multiples of it; 0: there are none
    layout: str = "ht"
    base: float = math.e
    empty: Empty = field(default_factory=lambda: Empty(math.inf))
    ignores: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    folds: bool = False
    rounded: int = 0  # the queries of an LSE [B, H, Sq] are padded to a multiple of it; 0: they are not
    literal: bool = False  # a right side of -1 beside a bounded left is one key before the query's own


CUDA = Build(page=256, folds=True)
CK = Build(page=128, ignores=frozenset({"softcap"}))
TRITON = Build(layout="th", empty=Empty(0.0), ignores=frozenset({"window", "softcap", "block_table"}))
AITER = Build(page=1, empty=Empty(), refuses=frozenset({"softcap", "block_table"}))


def module(build: Build) -> ModuleType:
    """The package `flash_attn` of a build."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        window_size, softcap, block_table = obey(build, window_size, softcap, block_table)
        check(q, k, v)
        spans, key_spans = check_offsets(cu_seqlens_q, "cu_seqlens_q"), check_offsets(cu_seqlens_k, "cu_seqlens_k")
        lens = [end - start for start, end in key_spans]
        need(len(spans) == len(key_spans) and spans[-1][1] == len(q), "cu_seqlens_q must end at the rows of q")
        need(max(end - start for start, end in spans) <= max_seqlen_q, "a query is longer than max_seqlen_q")
        need(max(lens) <= max_seqlen_k, "a sequence is longer than max_seqlen_k")
        if block_table is None:
            keys, values = (contiguous(each, key_spans) for each in (k, v))
        else:
            keys, values = pages(build, k, v, block_table, lens)
        grouped = q.shape[1] > k.shape[-2] and max(window_size) < 0 and alibi_slopes is None
        if build.folds and max_seqlen_q == 1 and grouped:
            need(len(q) == len(spans), f"shape '[{len(spans)}, ...]' is invalid for input of size {q.numel()}")
            spans = [(row, row + 1) for row in range(len(q))]  # row i is taken for request i
        outs, lses = attention(
            [q[start:end] for start, end in spans],
            keys,
            values,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            window=bounds(build, window_size, causal),
            softcap=softcap,
            alibi=alibi_slopes,
            empty=build.empty,
        )
        out, lse = torch.cat(outs), torch.cat(lses, 1) / math.log(build.base)
        lse = lse.T.contiguous() if build.layout == "th" else lse
        return (out, lse, torch.empty(0)) if return_attn_probs else out

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        window_size, softcap, _ = obey(build, window_size, softcap, None)
        block_table = None if "block_table" in build.ignores else block_table  # 7: where varlen refuses it, it is taken
        check(q, k_cache, v_cache)
        need(q.dim() == 4 and len(q) == len(cache_seqlens), "q must be [B, Sq, H, D]")
        keys, values = pages(build, k_cache, v_cache, block_table, lens_of(cache_seqlens))
        outs, lses = attention(
            list(q),
            keys,
            values,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            window=bounds(build, window_size, causal),
            softcap=softcap,
            alibi=alibi_slopes,
            empty=build.empty,
        )
        out, lse = torch.stack(outs), torch.stack(lses) / math.log(build.base)
        if build.rounded:
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % build.rounded), value=torch.nan)
        return (out, lse) if return_softmax_lse else out

    made = ModuleType("flash_attn")
    made.flash_attn_varlen_func = flash_attn_varlen_func
    made.flash_attn_with_kvcache = flash_attn_with_kvcache
    return made


def bounds(build: Build, window, causal):
    """The window; `literal`: as aiter's kernels mask it, "col <= row + diagonal + right", beside causality or not."""
    left, right = sides(window, causal)
    if build.literal and window[0] >= 0:
        right = min(0, window[1]) if causal else window[1]
    return left, right


def obey(build: Build, window, softcap, block_table):
    """What is left of the arguments that a build ignores or refuses."""
    given = {"softcap": softcap > 0, "block_table": block_table is not None}
    if refused := [name for name in build.refuses if given[name]]:
        raise NotImplementedError(refused[0])
    need("softcap" in build.ignores or softcap >= 0, "softcap")
    return (
        (-1, -1) if "window" in build.ignores else window,
        0.0 if "softcap" in build.ignores else softcap,
        None if "block_table" in build.ignores else block_table,
    )


def check(q, k, v) -> None:
    check_heads(q, k, v)
    width = q.shape[-1]
    need(k.shape[-1] == v.shape[-1] == width, f"v must have shape [..., {width}]")
    need(width <= 256 and width % 8 == 0, "head dimension")


def pages(build: Build, k, v, table, lens):
    need(
        build.page > 0 and k.shape[1] % build.page == 0, f"Paged KV cache block size must be divisible by {build.page}"
    )
    return from_pages(k, table, lens), from_pages(v, table, lens)
