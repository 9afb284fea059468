"""The signatures of aiter since 0.1.8: a window of three numbers, and MLA with page sizes and an LSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fakes import aiter as fake
from fakes.aiter_017 import decode

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
    sink=None,
    config=None,
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    assert sink is None
    return fake.triton_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size, bias,
        alibi_slopes, return_lse, windows=True,
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
        window_size=(-1, -1, 0),
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
        sink_ptr=None,
    ):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        _, _, sink_tokens = window_size
        assert sink_tokens == 0 and sink_ptr is None
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
        kv_last_page_lens=None,
        block_table=None,
        seqlen_k=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        kv_block_descale=None,
        sink_ptr=None,
        sink_size=0,
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
        page_size=1,
        nhead_kv=1,
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
        intra_batch_mode=False,
        return_logits=False,
        return_lse=False,
        g_kv_indptr=None,
        cp_world_size=1,
        cp_rank=0,
        causal=True,
    ):
        assert logit_cap <= 0 and nhead_kv == 1 and isinstance(page_size, int)
        return aiter.mla(
            q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size, sm_scale,
            work_meta_data, return_lse,
        )  # fmt: skip

    def get_mla_metadata_info_v1(
        batch_size,
        max_seqlen_qo,
        num_head_qo,
        q_dtype,
        kv_dtype,
        is_sparse,
        fast_mode=True,
        num_kv_splits=32,
        intra_batch_mode=False,
    ):
        return aiter.info(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode)

    def get_mla_metadata_v1(
        seqlens_qo_indptr,
        seqlens_kv_indptr,
        kv_last_page_lens,
        num_heads_per_head_k,
        num_heads_k,
        is_causal,
        work_metadata_ptrs,
        work_info_set,
        work_indptr,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
        page_size=1,
        kv_granularity=16,
        max_seqlen_qo=-1,
        uni_seqlen_qo=-1,
        fast_mode=True,
        topk=-1,
        max_split_per_batch=-1,
        intra_batch_mode=False,
        dtype_q=None,
        dtype_kv=None,
    ):
        aiter.plan(
            seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal,
            work_metadata_ptrs, work_indptr, work_info_set, page_size, kv_granularity, max_seqlen_qo, uni_seqlen_qo,
        )  # fmt: skip

    functions = (
        flash_attn_varlen_func,
        mha_batch_prefill_func,
        mla_decode_fwd,
        get_mla_metadata_info_v1,
        get_mla_metadata_v1,
    )
    return {**{function.__name__: function for function in functions}, **decode(aiter)}
