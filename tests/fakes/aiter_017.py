"""The signatures of amd-aiter 0.1.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fakes import aiter as fake

if TYPE_CHECKING:
    from fakes.aiter import Aiter


def triton_varlen(
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
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    block_table=None,
    out=None,
    config=None,
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return fake.triton_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size, bias,
        alibi_slopes, return_lse, windows=False,
    )  # fmt: skip


def public(aiter: Aiter) -> dict[str, Callable[..., object]]:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        min_seqlen_q=0,
        dropout_p=0.0,
        softmax_scale=None,
        logits_soft_cap=0.0,
        causal=False,
        window_size=(-1, -1),
        bias=None,
        alibi_slopes=None,
        deterministic=False,
        return_lse=False,
        return_attn_probs=False,
        how_v3_bf16_cvt=1,
        block_table=None,
        out=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_k_padded=None,
    ):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        assert len(window_size) == 2
        return aiter.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, logits_soft_cap, causal,
            window_size, alibi_slopes, return_lse, block_table, out,
        )  # fmt: skip

    def mha_batch_prefill_func(
        q,
        k,
        v,
        cu_seqlens_q,
        kv_indptr,
        kv_page_indices,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        logits_soft_cap=0.0,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_lse=False,
        return_attn_probs=False,
        out=None,
    ):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return aiter.batch_prefill(
            q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, scale, logits_soft_cap,
            causal, window_size, alibi_slopes, return_lse, out,
        )  # fmt: skip

    def mla_decode_fwd(
        q,
        kv_buffer,
        o,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_lens,
        max_seqlen_q,
        sm_scale=None,
        logit_cap=0.0,
        num_kv_splits=None,
        num_kv_splits_indptr=None,
        work_meta_data=None,
        work_indptr=None,
        work_info_set=None,
        reduce_indptr=None,
        reduce_final_map=None,
        reduce_partial_map=None,
        q_scale=None,
        kv_scale=None,
    ):
        assert logit_cap <= 0
        return aiter.mla(
            q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, kv_buffer.shape[1],
            sm_scale, work_meta_data, False,
        )  # fmt: skip

    def get_mla_metadata_info_v1(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True):
        return aiter.info(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode)

    def get_mla_metadata_v1(
        seqlens_qo_indptr,
        seqlens_kv_indptr,
        num_heads_per_head_k,
        num_heads_k,
        is_causal,
        work_metadata_ptrs,
        work_indptr,
        work_info,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
        kv_granularity=16,
        max_seqlen_qo=-1,
        uni_seqlen_qo=-1,
        fast_mode=True,
        topk=-1,
        max_split_per_batch=-1,
    ):
        aiter.plan(
            seqlens_qo_indptr, seqlens_kv_indptr, None, num_heads_per_head_k, num_heads_k, is_causal,
            work_metadata_ptrs, work_indptr, work_info, 1, kv_granularity, max_seqlen_qo, uni_seqlen_qo,
        )  # fmt: skip

    functions = (
        flash_attn_varlen_func,
        mha_batch_prefill_func,
        mla_decode_fwd,
        get_mla_metadata_info_v1,
        get_mla_metadata_v1,
    )
    return {**{function.__name__: function for function in functions}, **decode(aiter)}


def decode(aiter: Aiter) -> dict[str, Callable[..., object]]:
    """Paged decode, of the same signatures in both."""

    def paged_attention_v1(
        out,
        workspace_buffer,
        query,
        key_cache,
        value_cache,
        scale,
        block_tables,
        cu_query_lens,
        context_lens,
        max_context_len,
        alibi_slopes,
        kv_cache_dtype,
        kv_cache_layout,
        logits_soft_cap,
        k_scale,
        v_scale,
        fp8_out_scale=None,
        partition_size=256,
        mtp=1,
        sliding_window=0,
    ):
        assert (kv_cache_dtype, kv_cache_layout, cu_query_lens, mtp) == ("auto", "NHD", None, 1)
        assert (partition_size, sliding_window, fp8_out_scale) == (256, 0, None)
        return aiter.nhd(
            out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, context_lens, max_context_len,
            alibi_slopes, logits_soft_cap, k_scale, v_scale,
        )  # fmt: skip

    def paged_attention_rocm(
        out,
        exp_sums,
        max_logits,
        tmp_out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        fp8_out_scale=None,
        partition_size=256,
        mtp=1,
        q_scale=None,
    ):
        assert (kv_cache_dtype, k_scale, v_scale, fp8_out_scale, partition_size, mtp) == ("auto", *[None] * 3, 256, 1)
        return aiter.packed(
            out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables,
            context_lens, block_size, max_context_len, alibi_slopes,
        )  # fmt: skip

    return {"paged_attention_v1": paged_attention_v1, "paged_attention_rocm": paged_attention_rocm}
