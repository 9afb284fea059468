"""`flash_mla`: MLA decode, with the metadata of its builds before and since 2026, and vLLM's copy of the later one.

Rows reproduced. LSE: "FlashMLA decode". Pages: "FlashMLA dense". Section 11. [U], what a row without keys gets and
the base of the LSE, is parametrised; the source of the split and of the combine kernel has +inf and natural log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch

from fakes.dense import HALVES, Empty, attention, from_pages, lens_of, need


@dataclass(frozen=True)
class Build:
    """What the builds differ in, and what is not documented."""

    lazy: bool = True  # the first call makes the metadata, not `get_mla_metadata`
    empty: float = 0.0  # the output of a row without keys
    lse: float = math.inf  # and its LSE
    base: float = math.e
    transposed: bool = False  # the LSE is [B, Sq, H]
    vllm: bool = False  # vLLM's copy


class SchedMeta:
    """What later builds return: empty, then of the first call's lengths and shapes."""

    def __init__(self) -> None:
        self.config: tuple[object, ...] | None = None
        self.lens: list[int] = []


def module(build: Build | None = None) -> ModuleType:
    """The module `flash_mla`, or vLLM's."""
    build = build or Build()
    made = ModuleType("flash_mla")
    made.get_mla_metadata = new_metadata if build.lazy else old_metadata

    def call(q, k_cache, block_table, lens, head_dim_v, meta, splits, scale, causal):
        need(q.dim() == 4 and k_cache.dim() == 4, "q must be [B, Sq, H, D], k_cache [pages, page_size, 1, D]")
        need(q.dtype == k_cache.dtype and q.dtype in HALVES, "query and key must have the same dtype")
        need(q.shape[-1] == k_cache.shape[-1] == 576 and head_dim_v == 512, "head sizes")
        need(k_cache.shape[1] == 64, "Currently page_block_size must be 64")
        need(k_cache.shape[2] == 1 and q.stride(-1) == k_cache.stride(-1) == 1, "strides")
        need(q.is_contiguous(), "TMA: rows of q")
        need(len(q) > 0, "batch size must be positive")
        counts = lens_of(lens)
        need(len(counts) == len(q), "cache_seqlens")
        if build.lazy:
            need(isinstance(meta, SchedMeta) and splits is None, "tile_scheduler_metadata must be a FlashMLASchedMeta")
            config = (*q.shape[:3], *k_cache.shape[1:3], causal)
            if meta.config is None:
                meta.config, meta.lens = config, counts
            need(meta.config == config, "Your input arguments are inconsistent with sched_meta.")
            made_for = meta.lens
        else:
            need(splits is not None and splits[0] == 0 and len(splits) == len(q) + 1, "num_splits")
            need(meta.shape[1] == 2 and int(meta[0, 1]) == q.shape[1] * q.shape[2], "metadata of other queries")
            made_for = meta[1:, 0].tolist()
        if made_for != counts:  # the division is of another step: some keys would be read by nobody
            raise IndexError(f"the metadata is of lengths {made_for}, the call of {counts}")
        keys = from_pages(k_cache, block_table, counts)
        outs, lses = attention(
            list(q),
            keys,
            [each[..., :head_dim_v] for each in keys],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            window=(None, 0 if causal and q.shape[1] > 1 else None),
            empty=Empty(build.lse, build.empty),
        )
        lse = torch.stack(lses).float() / math.log(build.base)
        return torch.stack(outs), lse.mT if build.transposed else lse

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
    ):
        sparse = indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
        assert sparse == (None,) * 6 and not is_fp8_kvcache
        meta = tile_scheduler_metadata, num_splits
        return call(q, k_cache, block_table, cache_seqlens, head_dim_v, *meta, softmax_scale, causal)

    def older(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=None,
        causal=False,
    ):
        meta = tile_scheduler_metadata, num_splits
        return call(q, k_cache, block_table, cache_seqlens, head_dim_v, *meta, softmax_scale, causal)

    def with_out(*given, out=None, enable_batch_invariant=False, **named):
        """vLLM's, which writes to a dense `out` of its own shape."""
        got, lse = flash_mla_with_kvcache(*given, **named)
        if out is not None:
            grouped = len(got), 1, got.shape[1] * got.shape[2], got.shape[3]  # whatever its docstring says
            need(out.shape == grouped or got.shape[1] == 1, "out must have shape (batch_size, num_heads, ...)")
            need(out.dtype == got.dtype and out.is_contiguous(), "out")
            got = out.copy_(got)
        return got, lse

    made.flash_mla_with_kvcache = with_out if build.vllm else flash_mla_with_kvcache if build.lazy else older
    return made


def new_metadata(*args, **kwargs):
    return SchedMeta(), None


def old_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    need(num_heads_k == 1, "num_heads_k")
    lens = torch.tensor([0, *lens_of(cache_seqlens)], dtype=torch.int32)
    meta = torch.stack((lens, torch.full_like(lens, num_heads_per_head_k)), 1)
    return meta, torch.arange(len(lens), dtype=torch.int32)
