"""Decoders of a few thousand random weights, one for each way in which attention differs between models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from portable import models

VOCABULARY = 257  # the bytes, and the end of a text
END = 256
WINDOW = 6  # shorter than the prompts of the tests
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # enough for attention scores that matter
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "layer_types": ALTERNATING,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"layer_types": ALTERNATING, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "layer_types": ALTERNATING,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,  # of the part that carries positions
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}
CONFIGS["deepseek_v2"] = (
    "DeepseekV2Config",
    {**CONFIGS["deepseek_v3"][1], "q_lora_rank": None, "n_shared_experts": 1, "topk_method": "greedy"},
)
FAMILIES = tuple(CONFIGS)
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {"expand": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "bamba": (
        "BambaConfig",
        {
            "mamba_expand": 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "attn_layer_indices": [1],
        },
    ),
    "mamba": ("MambaConfig", {"expand": 2, "state_size": 4, "time_step_rank": 3}),
    "falcon_mamba": ("FalconMambaConfig", {"expand": 2, "state_size": 4, "time_step_rank": 3}),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The transformers config of a family, with changes."""
    name, facts = {**CONFIGS, **RECURRENT}[family]
    return getattr(models.transformers(), name)(**{**SIZES, **facts, **changes})


def tiny_model(family: str, attention: str = "portable", **changes: Any) -> Any:
    """The model with seeded random float32 weights, sinks included."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = models.transformers().AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif name.endswith(("A_log", "dt_bias", "dt_proj.bias", ".D")):  # states that last, and differ between heads
            torch.nn.init.uniform_(parameter, -2.0, 0.5)
        elif name.endswith(("conv1d.weight", "dt_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A model folder with a tokenizer of bytes."""
    import tokenizers

    tiny_model(family, **changes).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**vocabulary, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = models.transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    return folder
