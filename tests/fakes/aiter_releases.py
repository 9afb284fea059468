"""The signatures of aiter's callables: those of 0.1.7, and in what later ones differ from them.

A stand-in has one body for both, which sees the arguments by name, defaults included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fakes import aiter as fake

if TYPE_CHECKING:
    from fakes.aiter import Aiter

CALL = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FLAGS = "deterministic=False, return_lse=False, return_attn_probs=False"
DECODE = (
    "num_kv_heads, scale, block_tables, context_lens, block_size, max_context_len, alibi_slopes, kv_cache_dtype, "
    "k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None"
)
WORK = "reduce_indptr, reduce_final_map, reduce_partial_map"
TAIL = "kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1"
OLD: Mapping[str, str] = {
    "triton_varlen": f"{CALL}, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), bias=None, "
    f"alibi_slopes=None, {FLAGS}, block_table=None, out=None, config=None",
    "flash_attn_varlen_func": f"{CALL}, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, "
    f"causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None, {FLAGS}, how_v3_bf16_cvt=1, "
    "block_table=None, out=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None",
    "mha_batch_prefill_func": "q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, "
    "dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    f"{FLAGS}, out=None",
    "mla_decode_fwd": "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
    "sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None, "
    "work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, "
    "q_scale=None, kv_scale=None",
    "get_mla_metadata_info_v1": "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True",
    "get_mla_metadata_v1": "seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal, "
    f"work_metadata_ptrs, work_indptr, work_info, {WORK}, {TAIL}",
    "paged_attention_v1": "out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens, "
    "context_lens, max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale, "
    "fp8_out_scale=None, partition_size=256, mtp=1, sliding_window=0",
    "paged_attention_rocm": f"out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, {DECODE}",
}
# A window of three numbers, MLA with page sizes, an LSE and another order of the metadata's arguments.
NEW: Mapping[str, str] = {
    **OLD,
    "triton_varlen": OLD["triton_varlen"].replace("config", "sink=None, config"),
    "flash_attn_varlen_func": OLD["flash_attn_varlen_func"].replace("(-1, -1)", "(-1, -1, 0)") + ", sink_ptr=None",
    "mha_batch_prefill_func": OLD["mha_batch_prefill_func"]
    + ", kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, k_descale=None, v_descale=None, "
    "kv_block_descale=None, sink_ptr=None, sink_size=0",
    "mla_decode_fwd": OLD["mla_decode_fwd"].replace("sm_scale", "page_size=1, nhead_kv=1, sm_scale")
    + ", intra_batch_mode=False, return_logits=False, return_lse=False, g_kv_indptr=None, cp_world_size=1, cp_rank=0, "
    "causal=True",
    "get_mla_metadata_info_v1": OLD["get_mla_metadata_info_v1"] + ", num_kv_splits=32, intra_batch_mode=False",
    "get_mla_metadata_v1": "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, "
    f"num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, {WORK}, page_size=1, {TAIL}, "
    "intra_batch_mode=False, dtype_q=None, dtype_kv=None",
}
Given = SimpleNamespace


def public(aiter: Aiter) -> dict[str, Callable[..., Any]]:
    """Every callable of a release, by name."""
    bodies: dict[str, Callable[[Aiter, Given], Any]] = {
        "triton_varlen": triton_varlen,
        "flash_attn_varlen_func": varlen,
        "mha_batch_prefill_func": batch_prefill,
        "mla_decode_fwd": mla_decode,
        "get_mla_metadata_info_v1": lambda aiter, g: aiter.info(
            g.batch_size, g.max_seqlen_qo, g.num_head_qo, g.q_dtype, g.kv_dtype, g.is_sparse, g.fast_mode
        ),
        "get_mla_metadata_v1": metadata,
        "paged_attention_v1": decode,
        "paged_attention_rocm": decode_packed,
    }
    release = NEW if aiter.new else OLD
    return {name: with_signature(name, aiter, release[name], body) for name, body in bodies.items()}


def with_signature(name: str, aiter: Aiter, parameters: str, body: Callable[[Aiter, Given], Any]) -> Callable[..., Any]:
    signature = inspect.signature(eval(f"lambda {parameters}: None"))

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return body(aiter, Given(**bound.arguments))

    function.__name__, function.__signature__ = name, signature  # type: ignore[attr-defined]
    return function


def scale_of(g: Given) -> float:
    return float(g.q.shape[-1] ** -0.5 if g.softmax_scale is None else g.softmax_scale)


def packed(g: Given) -> tuple[Any, ...]:
    return g.q, g.k, g.v, g.cu_seqlens_q, g.cu_seqlens_k, g.max_seqlen_q, g.max_seqlen_k, scale_of(g)


def triton_varlen(aiter: Aiter, g: Given) -> Any:
    assert getattr(g, "sink", None) is None
    masks = g.causal, g.window_size, g.bias, g.alibi_slopes
    return fake.triton_varlen(*packed(g), *masks, g.return_lse, windows=aiter.new)


def varlen(aiter: Aiter, g: Given) -> Any:
    assert g.window_size[2:] == ((0,) if aiter.new else ()) and getattr(g, "sink_ptr", None) is None
    masks = g.logits_soft_cap, g.causal, g.window_size, g.alibi_slopes
    return aiter.varlen(*packed(g), *masks, g.return_lse, g.block_table, g.out)


def batch_prefill(aiter: Aiter, g: Given) -> Any:
    call = g.q, g.k, g.v, g.cu_seqlens_q, g.kv_indptr, g.kv_page_indices, g.max_seqlen_q, g.max_seqlen_k, scale_of(g)
    masks = g.logits_soft_cap, g.causal, g.window_size, g.alibi_slopes
    return aiter.batch_prefill(*call, *masks, g.return_lse, g.out)


def mla_decode(aiter: Aiter, g: Given) -> Any:
    assert g.logit_cap <= 0 and getattr(g, "nhead_kv", 1) == 1
    page_size = getattr(g, "page_size", g.kv_buffer.shape[1])
    assert isinstance(page_size, int), "positional callers of 0.1.7 pass the scale here"
    csr = g.qo_indptr, g.kv_indptr, g.kv_indices, g.kv_last_page_lens, g.max_seqlen_q, page_size
    return aiter.mla(g.q, g.kv_buffer, g.o, *csr, g.sm_scale, g.work_meta_data, getattr(g, "return_lse", False))


def metadata(aiter: Aiter, g: Given) -> None:
    info, last = (g.work_info_set, g.kv_last_page_lens) if aiter.new else (g.work_info, None)
    heads = g.num_heads_per_head_k, g.num_heads_k, g.is_causal
    work = g.work_metadata_ptrs, g.work_indptr, info
    sizes = getattr(g, "page_size", 1), g.kv_granularity, g.max_seqlen_qo, g.uni_seqlen_qo
    aiter.plan(g.seqlens_qo_indptr, g.seqlens_kv_indptr, last, *heads, *work, *sizes)


def decode(aiter: Aiter, g: Given) -> Any:
    assert (g.kv_cache_layout, g.cu_query_lens, g.mtp) == ("NHD", None, 1)
    assert (g.partition_size, g.sliding_window, g.fp8_out_scale) == (256, 0, None)
    caches = g.out, g.workspace_buffer, g.query, g.key_cache, g.value_cache
    lens = g.scale, g.block_tables, g.context_lens, g.max_context_len
    return aiter.nhd(*caches, *lens, g.alibi_slopes, g.logits_soft_cap, g.kv_cache_dtype, g.k_scale, g.v_scale)


def decode_packed(aiter: Aiter, g: Given) -> Any:
    assert (g.kv_cache_dtype, g.k_scale, g.v_scale, g.fp8_out_scale) == ("auto", None, None, None)
    assert (g.partition_size, g.mtp) == (256, 1)
    scratch = g.out, g.exp_sums, g.max_logits, g.tmp_out
    caches = g.query, g.key_cache, g.value_cache, g.num_kv_heads
    lens = g.scale, g.block_tables, g.context_lens, g.block_size, g.max_context_len
    return aiter.packed(*scratch, *caches, *lens, g.alibi_slopes)
