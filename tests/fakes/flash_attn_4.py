"""`flash_attn.cute` (FlashAttention 4).

Rows reproduced. LSE: "FA4 no qv". Pages: "FA4" (pages of 128 tokens come by TMA and must be finite to their end).
Section "FA4": windows taken as they are, sinks in the LSE, two results always, widths of SM100.
"""

from __future__ import annotations

from types import ModuleType

import torch

from fakes.dense import attention, check_heads, check_offsets, contiguous, from_pages, lens_of, need


def resolve(causal, window):
    """(left, right) as the release resolves them: only the pair (-1, -1) means two open sides."""
    left, right = (None, None) if tuple(window) == (-1, -1) else window
    if causal and left in (None, -1) and right == 0 and left == -1:
        return -1, 0  # an empty window in place of a causal mask
    return left, 0 if causal else right


def module() -> ModuleType:
    """The module `flash_attn.cute`."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        gather_kv_indices=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        score_mod=None,
        score_mod_bwd=None,
        mask_mod=None,
        block_sparse_tensors=None,
        aux_tensors=None,
        aux_scalars=None,
        return_lse=False,
        scheduler_metadata=None,
        seqlen_k_per_split=None,
        disable_scheduler_metadata=False,
    ):
        check_heads(q, k, v)
        dims = k.shape[-1], v.shape[-1]
        need(
            dims in ((192, 128), (256, 256)) or (max(dims) <= 128 and dims[0] % 8 == dims[1] % 8 == 0), f"widths {dims}"
        )
        need(page_table is None or cu_seqlens_k is None, "page_table excludes cu_seqlens_k")
        spans = check_offsets(cu_seqlens_q, "cu_seqlens_q")
        if page_table is None:
            key_spans = check_offsets(cu_seqlens_k, "cu_seqlens_k")
            lens = [end - start for start, end in key_spans]
            keys, values = (contiguous(each, key_spans) for each in (k, v))
        else:
            lens = lens_of(seqused_k)
            need(k.shape[1] != 128 or bool(v.isfinite().all()), "the tails of pages of 128 tokens must be finite")
            need(dims != (256, 256) or k.shape[1] == 128, "width 256 needs pages of 128 tokens")
            keys, values = (from_pages(each, page_table, lens) for each in (k, v))
        need(max(end - start for start, end in spans) <= max_seqlen_q and max(lens) <= max_seqlen_k, "max_seqlen")
        outs, lses = attention(
            [q[start:end] for start, end in spans],
            keys,
            values,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            window=resolve(causal, window_size),
            softcap=softcap,
            sinks=learnable_sink,
        )
        return torch.cat(outs), torch.cat(lses, 1) if return_lse else None

    made = ModuleType("flash_attn.cute")
    made.flash_attn_varlen_func = flash_attn_varlen_func
    return made
