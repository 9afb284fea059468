"""transformers' attention, replaced through its public interface: layers found in a model, and steps run by portable.

A model loaded with `attn_implementation=NAME` calls `attend` in each layer. What answers is whatever `answering` put in
place around the model's forward: a recorder while the layers are discovered, a packed step while the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from portable.layer import UnsupportedError

NAME = "portable"
LATENTS = "portable_latents"  # where a layer keeps them between its projection and its attention
WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # what a latent-attention layer knows of its heads


class Call(NamedTuple):
    """One layer's attention in a packed step of T tokens."""

    layer_idx: int
    q: torch.Tensor  # [T, H, D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor  # [T, Hkv, Dv]
    scale: float | None
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [H]
    latents: torch.Tensor | None = None  # [T, rank]: what the layer's `kv_b_proj` made k and v of
    module: Any = None  # the attention layer


Answer = Callable[[Call], torch.Tensor]  # [T, H, Dv]
_answer: ContextVar[Answer] = ContextVar("portable_answer")


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Let `answer` compute the attention of models that run inside."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query [1, H, T, D], key and value [1, Hkv, T, D or Dv], out [1, T, H, Dv].

    Raises:
        UnsupportedError: naming what was asked that packed, paged, causal attention does not do.
    """
    answer = _answer.get(None)
    if answer is None:
        raise UnsupportedError("the attention 'portable' serves portable's engine; use another one for generate()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for name, asked in (
        ("is_causal=False", not causal),
        ("position_bias", position_bias is not None),
        ("attention_mask", attention_mask is not None),
        ("output_attentions", output_attentions),
        ("dropout in training", dropout and module.training),
        (f"a batch of {query.shape[0]} rows", query.shape[0] != 1),
    ):
        if asked:
            raise UnsupportedError(f"{type(module).__name__} asks for {name}, which is not supported")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    latents = module.__dict__.pop(LATENTS, None)
    call = Call(module.layer_idx, q, k, v, scaling, sliding_window, softcap, s_aux, latents, module)  # type: ignore[arg-type]
    return answer(call).unsqueeze(0), None


def watch_latents(model: torch.nn.Module) -> None:
    """Keep what the up-projection of each latent-attention layer is given, for the layer's call; again, no change.

    transformers hands its attention function the heads, in the layout of every other model; the latents that the cache
    is to hold are what went into `kv_b_proj` before.
    """
    for module in model.modules():
        up = getattr(module, "kv_b_proj", None)
        if isinstance(up, torch.nn.Module) and all(hasattr(module, width) for width in WIDTHS):
            watch = _Watch(module)
            if watch not in up._forward_pre_hooks.values():
                up.register_forward_pre_hook(watch)


class _Watch:
    """A hook that leaves the latents with the layer; equal to another one of the same layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer

    def __call__(self, up: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self.layer.__dict__[LATENTS] = given[0].reshape(-1, given[0].shape[-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Watch) and other.layer is self.layer

    def __hash__(self) -> int:
        return id(self.layer)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers builds no mask: the plan of each step knows who sees what."""


def register(transformers: Any) -> None:
    """Make `attn_implementation=NAME` known to transformers; calling it again changes nothing."""
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, no_mask)
