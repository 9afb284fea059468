"""Local transformers models: loading, what portable refuses, and the attention layers that they have."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from portable.layer import Layer, UnsupportedError
from portable.model_attention import NAME, WIDTHS, Call, answering, register, watch_latents
from portable.model_mamba import MODEL_TYPES, Bound, answering_states, install

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})


class ModelError(ValueError):
    """A model cannot be loaded; the message says what to do."""


def transformers() -> Any:
    """The transformers package, told to stay off the network, to be quiet, and of portable's attention.

    Raises:
        ModelError: it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    module = require("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    register(module)
    return module


def require(name: str) -> Any:
    """An optional package, or a ModelError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the package {error.name} is not installed; run: pip install 'portable-attention[demo]'"
        ) from error


def load_config(path: Path | str) -> Any:
    """The transformers config of a local model folder.

    Raises:
        ModelError: the folder or its config.json is missing, or the model is of an unknown or unsupported kind.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist; give the folder of a transformers model")
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {path} has no config.json; give the folder of a transformers model")
    try:
        config = transformers().AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        refuse_config(config)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path / 'config.json'} is not a usable config: {one_line(error)}") from error
    return config


def load_model(path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The model of a local folder, from safetensors only, ready for inference with portable's attention.

    Raises:
        ModelError: the folder lacks something, holds weights in another format, or is of an unsupported kind.
    """
    config = load_config(path)
    if not any(Path(path).glob("*.safetensors")):
        raise ModelError(f"model folder {path} has no *.safetensors; save the model with save_pretrained first")
    try:
        model = transformers().AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # a damaged file, an unknown format, missing tensors: each has its own type
        raise ModelError(f"model folder {path} cannot be loaded: {one_line(error)}") from error
    return model.to(device).eval()


def load_tokenizer(path: Path | str) -> Any:
    """The tokenizer of a local folder; ModelError where there is none that transformers can read."""
    try:
        return transformers().AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model folder {path} has no usable tokenizer: {one_line(error)}") from error


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, as the user's turn where the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template holds them already
    return ids


def stop_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by the generation config or the config.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(eos_token_id=[2, 5])
    >>> stop_ids(SimpleNamespace(generation_config=None, config=config))
    (2, 5)
    """
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, Iterable) else (ids,)
    return ()


def eager_tokens(model: Any, prompt: list[int], max_new_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """What transformers' own generate() gives greedily for one prompt of token ids, with its `eager` attention."""
    ids = torch.tensor([prompt], device=model.device)
    usual, implementation = model.generation_config, model.config._attn_implementation
    # The model's own generation config may sample or penalize repetitions, so a plain one takes its place.
    model.generation_config = transformers().GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop) or None,
        pad_token_id=stop[0] if stop else 0,
    )
    model.set_attn_implementation("eager")
    try:
        # Without the mask, generate() would hide the prompt's own stop tokens, taking them for padding.
        output = model.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        model.generation_config = usual
        model.set_attn_implementation(implementation)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def context_length(config: Any) -> int:
    """Tokens that a sequence may have, prompt included.

    Rotary embeddings that rescale with the longest position of a batch would let one request change another, so such
    a model keeps to the length below which they do not rescale.
    """
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return int(length)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, with the next where it ends in a colon; its type where there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def refuse_config(config: Any) -> None:
    """ModelError for a model whose tokens see each other in a way that paged causal attention does not cover."""
    text = config.get_text_config(decoder=True)
    recurrent = {"linear_attention"} if config.model_type in MODEL_TYPES else set()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS - recurrent)
    if getattr(config, "is_encoder_decoder", False):
        why = "it is an encoder-decoder"
    elif getattr(text, "attention_chunk_size", None) is not None:
        why = f"attention_chunk_size is {text.attention_chunk_size} (local attention)"
    elif getattr(text, "index_topk", None) is not None:
        why = f"index_topk is {text.index_topk} (each query attends to the keys that an indexer picks)"
    elif kinds:
        why = f"its layer_types hold {', '.join(kinds)}"
    elif getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        why = "its attention is bidirectional"
    else:
        return
    raise ModelError(f"model type {config.model_type!r} is not supported: {why}; name a decoder with plain attention")


def discover_layers(model: Any) -> list[Layer]:
    """The attention layers of a model loaded with `attn_implementation=NAME`, by a forward of one token.

    Works on the meta device too.

    Raises:
        ModelError: the model has tokens that meet elsewhere than in these layers, or hides a layer's window.
    """
    config, found = model.config, dict[int, Layer]()
    text = config.get_text_config(decoder=True)

    def record(call: Call) -> torch.Tensor:
        if call.layer_idx in found:
            raise ModelError(f"model type {config.model_type!r} attends twice in layer {call.layer_idx}")
        found[call.layer_idx] = _layer_of(call)
        return call.q.new_zeros(1, call.q.shape[1], call.v.shape[2])

    watch_latents(model)
    try:
        recurrent = install(model)
    except UnsupportedError as error:
        raise ModelError(f"model type {config.model_type!r} is not supported: {error}") from error
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode(), answering(record), answering_states(lambda index: Bound()):
            model(input_ids=one, position_ids=one, attention_mask=one + 1, use_cache=False)
    except (ModelError, UnsupportedError) as error:
        raise ModelError(one_line(error)) from error
    except Exception as error:
        raise ModelError(
            f"model type {config.model_type!r} does not run on transformers' attention interface: {one_line(error)}"
        ) from error
    found |= recurrent
    layers = [found[index] for index in sorted(found)]
    if sorted(found) != list(range(text.num_hidden_layers)):
        why = f"{len(layers)} of its {text.num_hidden_layers} layers call transformers' attention interface"
    elif sum(isinstance(module, torch.nn.Conv1d) for module in model.modules()) != len(recurrent):
        why = "it has recurrent or convolutional layers beside attention"
    elif hidden := _hidden_windows(text, layers):
        why = f"layer {hidden[0]} has a sliding window that only its mask would show"
    else:
        return layers
    raise ModelError(f"model type {config.model_type!r} is not supported: {why}")


def _layer_of(call: Call) -> Layer:
    """The layer that a call shows; one of latents where heads are as wide as the parts that its module names."""
    heads, kv_heads, width, v_width = call.q.shape[1], call.k.shape[1], call.k.shape[2], call.v.shape[2]
    if call.latents is not None and call.sliding_window is None and call.softcap is None and call.sinks is None:
        nope, rope, values = (int(getattr(call.module, name)) for name in WIDTHS)
        if (nope + rope, values, heads) == (width, v_width, kv_heads):
            return Layer.mla(
                num_heads=heads,
                kv_lora_rank=call.latents.shape[-1],
                qk_nope_head_dim=nope,
                qk_rope_head_dim=rope,
                v_head_dim=values,
                scale=call.scale,
                dtype=call.q.dtype,
            )
    return Layer.gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=v_width,
        scale=call.scale,
        dtype=call.q.dtype,
        window=(None, None) if call.sliding_window is None else call.sliding_window,
        softcap=call.softcap,
        sinks=call.sinks is not None,
    )


def _hidden_windows(text: Any, layers: list[Layer]) -> list[int]:
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        windowed = getattr(text, "sliding_window", None) is not None
        return [] if not windowed or any(layer.window[0] is not None for layer in layers) else [0]
    return [i for i, layer in enumerate(layers) if kinds[i] == "sliding_attention" and layer.window[0] is None]


def layers_of(path: Path | str, dtype: torch.dtype | None = None) -> list[Layer]:
    """The attention layers of a local model folder, from its config.json alone.

    Args:
        dtype: of the model; None for the one that the config names, else bfloat16.

    Raises:
        ModelError: the folder has no config, or the model is of an unsupported kind.
    """
    config = load_config(path)
    return discover_layers(_on_meta(config, dtype or getattr(config, "dtype", None) or torch.bfloat16))


def _on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The model without its weights; its experts in the form whose shapes do not depend on the routing."""
    config.get_text_config(decoder=True)._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            model = transformers().AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f"model type {config.model_type!r} is not a decoder: {one_line(error)}") from error
    return model.eval()
