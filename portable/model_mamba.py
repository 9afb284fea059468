"""transformers' Mamba mixers, replaced in place: their layers, and steps of several requests run by portable.

transformers has no interface for them as it has for attention, so `install` puts a forward of its own in front of each
mixer's. It takes over while `answering_states` is in force, and passes on to transformers' own elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch

from portable.cache import StatePools
from portable.layer import Layer, UnsupportedError
from portable.mamba import MambaPlan
from portable.mamba_run import Mamba
from portable.states import SsmTensors

SSD_MIXERS = ("Mamba2Mixer", "BambaMixer")
SCAN_MIXERS = ("MambaMixer", "FalconMambaMixer")
MODEL_TYPES = ("mamba", "falcon_mamba", "mamba2", "bamba")


class Bound(NamedTuple):
    """What runs one layer of a step; without a plan it is being discovered, and gives zeros."""

    mamba: Mamba | None = None
    pools: StatePools | None = None
    plan: MambaPlan | None = None


Answer = Callable[[int], Bound]
_answer: ContextVar[Answer] = ContextVar("portable_states")


@contextmanager
def answering_states(answer: Answer) -> Iterator[None]:
    """Let portable run the mixers of models that run inside: `answer` gives what is bound to a layer's index."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def mixers(model: torch.nn.Module) -> dict[int, Any]:
    """The mixers of a model by the index of their layer."""
    known = SSD_MIXERS + SCAN_MIXERS
    return {module.layer_idx: module for module in model.modules() if type(module).__name__ in known}  # type: ignore[misc]


def install(model: torch.nn.Module) -> dict[int, Layer]:
    """Put portable's forward in front of each mixer, and give their layers; again, no change.

    Raises:
        UnsupportedError: an activation other than SiLU.
    """
    layers = {}
    for index, mixer in mixers(model).items():
        layers[index] = layer_of(mixer)
        if "forward" not in mixer.__dict__:
            mixer.forward = partial(_forward, mixer, mixer.forward)
    return layers


def layer_of(mixer: Any) -> Layer:
    """The facts of a mixer's layer; its states are float32."""
    if mixer.activation not in ("silu", "swish"):
        raise UnsupportedError(f"{type(mixer).__name__} has activation {mixer.activation!r}, and not 'silu'")
    dtype = mixer.in_proj.weight.dtype
    if type(mixer).__name__ in SCAN_MIXERS:
        return Layer.mamba1(
            num_channels=mixer.intermediate_size,
            state_dim=mixer.ssm_state_size,
            conv_width=mixer.conv_kernel_size,
            dtype=dtype,
        )
    return Layer.mamba2(
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        state_dim=mixer.ssm_state_size,
        conv_width=mixer.conv_kernel_size,
        num_groups=mixer.n_groups,
        chunk=mixer.chunk_size,
        dtype=dtype,
    )


def _forward(
    mixer: Any, usual: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A mixer's forward: hidden_states [1, T, width] of a step's tokens, packed in batch order."""
    answer = _answer.get(None)
    if answer is None:
        return usual(hidden_states, *args, **kwargs)
    bound = answer(mixer.layer_idx)
    if bound.mamba is None:
        return torch.zeros_like(hidden_states)
    run = _scan if type(mixer).__name__ in SCAN_MIXERS else _ssd
    return run(mixer, bound, hidden_states[0]).unsqueeze(0)


def _ssd(mixer: Any, bound: Bound, hidden: torch.Tensor) -> torch.Tensor:
    mamba, pools, plan = bound
    assert mamba is not None and pools is not None and plan is not None
    layer, heads, width = mamba.layer, mixer.num_heads, mixer.head_dim
    shared = layer.num_groups * layer.state_dim
    gate, xbc, dt = mixer.in_proj(hidden).split([heads * width, layer.conv_channels, heads], -1)
    xbc = mamba.conv(xbc, pools.conv, plan, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias)
    x, b, c = xbc.split([heads * width, shared, shared], -1)
    b, c = (part.unflatten(-1, (layer.num_groups, layer.state_dim)) for part in (b, c))
    least, most = mixer.time_step_limit
    tensors = SsmTensors(-mixer.A_log.float().exp(), mixer.D, mixer.dt_bias, True, (float(least), float(most)))
    out = mamba.run(x.unflatten(-1, (heads, width)), dt, b, c, pools.ssm, plan, tensors)
    result: torch.Tensor = mixer.out_proj(mixer.norm(out.flatten(1), gate))
    return result


def _scan(mixer: Any, bound: Bound, hidden: torch.Tensor) -> torch.Tensor:
    mamba, pools, plan = bound
    assert mamba is not None and pools is not None and plan is not None
    dim = mixer.ssm_state_size
    x, gate = mixer.in_proj(hidden).chunk(2, -1)
    x = mamba.conv(x, pools.conv, plan, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias)
    steps, b, c = mixer.x_proj(x).split([mixer.time_step_rank, dim, dim], -1)
    if hasattr(mixer, "dt_layernorm"):  # of FalconMamba
        steps, b, c = mixer.dt_layernorm(steps), mixer.b_layernorm(b), mixer.c_layernorm(c)
    tensors = SsmTensors(-mixer.A_log.float().exp(), mixer.D, mixer.dt_proj.bias)
    dt = steps @ mixer.dt_proj.weight.t()
    out = mamba.run(
        x[..., None], dt, b[:, None], c[:, None], pools.ssm, plan, tensors, z=gate[..., None]
    )  # a head of width 1 per channel
    result: torch.Tensor = mixer.out_proj(out[..., 0])
    return result
