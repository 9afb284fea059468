"""`flash_attn_interface` (FlashAttention 3), and `vllm.vllm_flash_attn` with its versions 2 and 3.

Rows reproduced. LSE: "FA3", "V-FA varlen". Pages: "FA3", "FA2 vLLM fork" [U: multiples of 16]. Sections "FA3 Hopper"
and "vLLM bundled". [U] are whether the tail of a page that TMA reads must be finite, whether version 2 writes to `out`,
and the output of a row without keys beside sinks. Its LSE is the sink where its tile is computed and -inf where the
whole tile is passed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    """What the builds differ in, and the readings of what is not documented."""

    varlen_lse: bool = True  # varlen can return its LSE
    schedules: bool = True  # there is `get_scheduler_metadata`
    tail: str = "poison"  # of pages that TMA reads; or "masked"
    sink_in_lse: bool = True  # as it is in the source; no build is known that differs
    sink_empty: float = 0.0  # the output of a row without keys beside a sink
    sink_skipped: bool = False  # its LSE is -inf
    writes: bool = True  # vLLM's version 2 writes to `out`, where it does not fold heads


THIS = Build()


def schedule(q_lens, max_q, max_k, heads, kv_heads, dim, v_dim, lens, page, causal, window, softcap) -> torch.Tensor:
    """A schedule that remembers what it was made for."""
    facts = (q_lens, max_q, max_k, heads, kv_heads, dim, v_dim, lens, page, causal, tuple(window), softcap)
    return torch.tensor([hash(repr(facts)) % 2**31, *[0] * len(lens)], dtype=torch.int32)


def check_widths(q, k, v, qv) -> None:
    dim, v_dim = k.shape[-1], v.shape[-1]
    need(q.shape[-1] == dim and dim % 8 == 0 and dim <= 256, "head dimension")
    narrow = dim <= 64 and v_dim <= 512
    need(dim == v_dim or (128 < dim <= 192 and 96 < v_dim <= 128) or narrow, f"widths {dim} and {v_dim}")
    need(qv is None or (dim <= 64 and v_dim >= 256 and qv.shape[-1] == v_dim), "qv")


def hopper(build: Build, q, qv, keys, values, spans, scale, causal, window, softcap, sinks=None, page=0, kpages=None):
    """The kernel: out [T, H, Dv] and lse [H, T]."""
    if scale is None:
        scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5
    k_dim, v_dim = keys[0].shape[-1], values[0].shape[-1]
    if page and k_dim < v_dim <= 64:  # one tile for both: what is behind the width of K is not read
        values = [torch.cat((each[..., :k_dim], torch.zeros_like(each[..., k_dim:])), -1) for each in values]
    if qv is not None:
        q, keys = torch.cat([qv, q], -1), [torch.cat(pair, -1) for pair in zip(values, keys, strict=True)]
    queries = [q[start:end] for start, end in spans]
    empty = Empty(out=build.sink_empty if sinks is not None else 0.0)
    outs, lses = attention(
        queries, keys, values, scale=scale, window=sides(window, causal), softcap=softcap, sinks=sinks, empty=empty
    )
    if sinks is not None and not build.sink_in_lse:
        lses = attention(queries, keys, values, scale=scale, window=sides(window, causal), softcap=softcap)[1]
    elif sinks is not None and build.sink_skipped:
        plain = attention(queries, keys, values, scale=scale, window=sides(window, causal), softcap=softcap)[1]
        lses = [lse.masked_fill(other == -math.inf, -math.inf) for lse, other in zip(lses, plain, strict=True)]
    rows = max(end - start for start, end in spans) * (q.shape[1] // values[0].shape[1])
    widths = (k_dim if qv is not None else keys[0].shape[-1]), values[0].shape[-1]
    if build.tail == "poison" and page and max(window) < 0 and read_by_tma(page, rows, *widths, causal):
        for r, (out, tail) in enumerate(zip(outs, kpages, strict=True)):
            if tail.isnan().any():
                outs[r] = torch.full_like(out, torch.nan)
    return torch.cat(outs), torch.cat(lses, 1)


def read_by_tma(page: int, rows: int, dim: int, v_dim: int, causal: bool) -> bool:
    """Whether pages hold whole tiles of keys and the rows of queries more than one tile."""
    one_group = rows <= 64 and dim in (64, 128)
    if dim <= 64:
        wide = (64, 64) if v_dim > 256 else (128, 96) if v_dim > 192 else (192, 128 if causal else 192)
        tile = (64, 192) if one_group and v_dim <= 192 else wide
    elif dim <= 96:
        tile = 192, 144
    elif dim <= 128:
        tile = (64, 128 if causal else 176) if one_group else (128, 128 if causal else 160)
    else:
        tile = 128, 80 if dim > 192 else 128 if v_dim <= 128 else 96
    return page % tile[1] == 0 and rows > tile[0]


def tails(pages, table, lens):
    """What lies behind the last token of each request in its last page."""
    size = pages.shape[1]
    return [
        pages[row[(n - 1) // size], (n - 1) % size + 1 :].float() if n else pages[:0].float()
        for row, n in zip(table.tolist(), lens, strict=True)
    ]


def module(build: Build = THIS) -> ModuleType:
    """The module `flash_attn_interface`."""

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap):
        check_heads(q, k, v)
        check_widths(q, k, v, None)
        spans, key_spans = check_offsets(cu_seqlens_q, "cu_seqlens_q"), check_offsets(cu_seqlens_k, "cu_seqlens_k")
        need(max(e - s for s, e in spans) <= max_seqlen_q and max(e - s for s, e in key_spans) <= max_seqlen_k, "max")
        keys, values = (contiguous(each, key_spans) for each in (k, v))
        return hopper(build, q, None, keys, values, spans, softmax_scale, causal, window, softcap)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
        return_attn_probs=False,
    ):
        lens = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        both = varlen(q, k, v, *lens, softmax_scale, causal, window_size, softcap)
        return both if return_attn_probs else both[0]

    def older_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
    ):
        lens = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen(q, k, v, *lens, softmax_scale, causal, window_size, softcap)[0]

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        check_heads(q, k_cache, v_cache)
        check_widths(q, k_cache, v_cache, qv)
        need(q.dim() == 3, "with cu_seqlens_q, q must be [T, H, D]")
        spans, lens = check_offsets(cu_seqlens_q, "cu_seqlens_q"), lens_of(cache_seqlens)
        if scheduler_metadata is not None:
            check_schedule(
                scheduler_metadata,
                *(spans, max_seqlen_q, page_table.shape[1] * k_cache.shape[1]),
                *(q, k_cache, v_cache, lens, causal, window_size, softcap),
            )
        keys, values = (from_pages(each, page_table, lens) for each in (k_cache, v_cache))
        out, lse = hopper(
            *(build, q, qv, keys, values, spans, softmax_scale, causal, window_size, softcap),
            page=k_cache.shape[1],
            kpages=tails(v_cache, page_table, lens),
        )
        return (out, lse, None, None) if return_softmax_lse else out

    made = ModuleType("flash_attn_interface")
    made.flash_attn_varlen_func = flash_attn_varlen_func if build.varlen_lse else older_varlen_func
    made.flash_attn_with_kvcache = flash_attn_with_kvcache
    if build.schedules:
        made.get_scheduler_metadata = get_scheduler_metadata
    return made


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    lens = lens_of(cache_seqlens)
    need(len(lens) == batch_size, "batch_size")
    spans = check_offsets(cu_seqlens_q, "cu_seqlens_q")
    q_lens = [end - start for start, end in spans]
    heads, dims = (num_heads_q, num_heads_kv), (headdim, headdim if headdim_v is None else headdim_v)
    return schedule(
        q_lens, max_seqlen_q, max_seqlen_k, *heads, *dims, lens, page_size, causal, window_size, has_softcap
    )


def check_schedule(given, spans, max_q, max_k, q, k, v, lens, causal, window, softcap) -> None:
    """That a schedule was made for this very step."""
    q_lens = [end - start for start, end in spans]
    heads, dims = (q.shape[1], k.shape[-2]), (k.shape[-1], v.shape[-1])
    want = schedule(q_lens, max_q, max_k, *heads, *dims, lens, k.shape[1], causal, window, softcap > 0)
    need(given.dtype == torch.int32 and torch.equal(given, want), "scheduler_metadata is of another step")


def vllm_module(build: Build = THIS) -> ModuleType:
    """The module `vllm.vllm_flash_attn`."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        output_scale=None,
        fa_version=2,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
    ):
        assert (cu_seqlens_k is None) != (seqused_k is None), "one of cu_seqlens_k and seqused_k"
        assert block_table is None or seqused_k is not None, "seqused_k must be provided if block_table is provided"
        window = (-1, -1) if window_size is None else window_size
        check_heads(q, k, v)
        spans, page, behind = check_offsets(cu_seqlens_q, "cu_seqlens_q"), 0, None
        need(max(end - start for start, end in spans) <= max_seqlen_q, "a query is longer than max_seqlen_q")
        if block_table is None:
            key_spans = check_offsets(cu_seqlens_k, "cu_seqlens_k")
            lens = [end - start for start, end in key_spans]
            keys, values = (contiguous(each, key_spans) for each in (k, v))
        else:
            lens, page = lens_of(seqused_k), k.shape[1]
            keys, values = (from_pages(each, block_table, lens) for each in (k, v))
            behind = tails(v, block_table, lens)
        need(max(lens) <= max_seqlen_k, "a sequence is longer than max_seqlen_k")
        if fa_version == 3:
            assert alibi_slopes is None, "Alibi is not supported in FA3"
            check_widths(q, k, v, q_v)
            if s_aux is not None:
                need(s_aux.dtype == torch.bfloat16 and s_aux.shape == (q.shape[1],), "s_aux must be bfloat16 [H]")
                need(s_aux.is_contiguous(), "s_aux is read by its address")
            if scheduler_metadata is not None:
                facts = (spans, max_seqlen_q, max_seqlen_k, q, k, v, lens, causal, window, softcap)
                check_schedule(scheduler_metadata, *facts)
            got, lse = hopper(
                *(build, q, q_v, keys, values, spans, softmax_scale, causal, window, softcap, s_aux, page, behind)
            )
            if out is not None:
                need(out.shape == got.shape and out.stride(-1) == 1, "out")
                got = out.copy_(got)
        else:
            if s_aux is not None:
                raise NotImplementedError("FA2 does not support s_aux")
            width = q.shape[-1]
            need(k.shape[-1] == v.shape[-1] == width and width <= 256 and width % 8 == 0, "head dimension")
            need(page % 16 == 0, "pages must be of multiples of 16 tokens")
            folds = max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and max(window) < 0 and alibi_slopes is None
            if folds:
                need(len(q) == len(spans), "one token in each request")
                spans = [(row, row + 1) for row in range(len(q))]
            outs, lses = attention(
                [q[start:end] for start, end in spans],
                keys,
                values,
                scale=width**-0.5 if softmax_scale is None else softmax_scale,
                window=sides(window, causal),
                softcap=softcap,
                alibi=alibi_slopes,
                empty=Empty(math.inf),
            )
            got, lse = torch.cat(outs), torch.cat(lses, 1)
            if out is not None:
                need(out.shape == got.shape and out.dtype == got.dtype and out.stride(-1) == 1, "out")
                if build.writes and not folds:  # 2: folded, it is given back in a copy
                    out[:] = got
                    got = out
        return (got, lse) if return_softmax_lse else got

    made = ModuleType("vllm.vllm_flash_attn")
    made.flash_attn_varlen_func = flash_attn_varlen_func
    if build.schedules:
        made.get_scheduler_metadata = get_scheduler_metadata
    return made
