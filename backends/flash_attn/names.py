"""What the releases of FlashAttention call the contract's arguments."""

from __future__ import annotations

import torch

DTYPES = frozenset({torch.float16, torch.bfloat16})
# Scores and sums are float32, weights are rounded to the dtype before they meet V.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

MASKED = {"scale": "softmax_scale", "causal": "causal", "window": "window_size"}
PACKED = {
    "q": "q",
    "k": "k",
    "v": "v",
    "cu_seqlens_q": "cu_seqlens_q",
    "max_query_len": "max_seqlen_q",
    "max_seq_len": "max_seqlen_k",
    **MASKED,
}
VARLEN = {**PACKED, "cu_seqlens_k": "cu_seqlens_k"}
KVCACHE = {
    "q": "q",
    "k": "k_cache",
    "v": "v_cache",
    "seq_lens": "cache_seqlens",
    **MASKED,
    "lse": "return_softmax_lse",
}
SOFTCAP, ALIBI = {"softcap": "softcap"}, {"alibi": "alibi_slopes"}
TABLE = {"block_table": "block_table"}
LSE = {"lse": "return_attn_probs"}
