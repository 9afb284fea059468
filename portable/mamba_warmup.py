"""What recurrent layers compile before the first step: the launches of representative steps, without their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from portable.batch import Batch
from portable.kernel import KV, GraphLevel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.mamba import plan_mamba
from portable.mha import Choose
from portable.ragged import round_up
from portable.states import DecodeStates, SsmTensors
from portable.warmup import meta, recordable

PARTS = (Op.CONV1D, Op.STATE_UPDATE, Op.SSD)
LEVELS = (GraphLevel.NEVER, GraphLevel.SINGLE, GraphLevel.UNIFORM, GraphLevel.VARLEN)


def needs() -> Iterator[tuple[Op, Needs]]:
    """All that planning may ask of `select`; for a step that is captured there may be none."""
    for op in PARTS:
        for level in LEVELS if op is not Op.SSD else LEVELS[:1]:
            yield op, Needs(graph=level)
    yield Op.COLLECT, Needs()
    yield Op.STATE_COPY, Needs()


def steps(max_reqs: int, max_tokens: int, num_draft: int) -> Iterator[Batch]:
    """Decodes of one token and of all drafts, and prompts with a state before them and without."""
    for reqs in {1, min(max_reqs, 4)}:  # indices that begin at 16 bytes, and that do not
        for queries in {1, 1 + num_draft}:
            yield Batch.from_lens([queries] * reqs, [queries + 7] * reqs, is_prefilling=[False] * reqs)
    prompt = min(max_tokens - 1, 300)
    for decodes in range(min(max_reqs, 4) if prompt else 0):  # which shift what the kernels of prompts begin at
        for context in (0, 9):
            new, prompts = [1] * decodes + [prompt], [False] * decodes + [True]
            yield Batch.from_lens(new, [9] * decodes + [prompt + context], is_prefilling=prompts)


def pages(layer: Layer, conv_dtype: torch.dtype) -> KV:
    """Pools without memory: of inputs, and of states."""
    inputs = (16, layer.conv_width - 1, layer.conv_channels)
    states = (16, layer.num_heads, layer.qk_head_dim, layer.state_dim)
    return KV(meta(inputs, conv_dtype), meta(states, layer.kv_dtype))


def example(layer: Layer) -> SsmTensors:
    """The tensors of a layer of its family, as models have them."""
    heads = layer.num_heads
    a = (heads, layer.state_dim) if layer.family == "mamba1" else (heads,)
    decay, d, dt_bias = (meta(shape, torch.float32) for shape in (a, (heads,), (heads,)))
    return SsmTensors(decay, d, dt_bias)


def launches(num_draft: int, gated: tuple[bool, ...], biased: tuple[bool, ...]) -> Callable[..., None]:
    """Everything that one layer of a step may launch.

    Args:
        gated: whether `run` is given z.
        biased: whether `conv` is given a bias.
    """

    def launch(layer: Layer, choose: Choose, batch: Batch, pools: KV, tensors: Any, lse: bool) -> None:
        table = np.arange(batch.num_reqs * (1 + num_draft), dtype=np.int32).reshape(batch.num_reqs, -1)
        plan = plan_mamba(batch, layer, table, num_draft=num_draft)
        weight = meta((layer.conv_channels, layer.conv_width), layer.dtype)
        biases = [meta((layer.conv_channels,), layer.dtype) if each else None for each in biased]
        for inputs, made, given, out in _given(layer, batch.num_tokens):
            for states in (plan.decode, plan.prefill):
                if states is None:
                    continue
                at, decodes = states.tokens, isinstance(states, DecodeStates)
                for level in LEVELS if decodes else LEVELS[:1]:
                    with suppress(UnsupportedError):
                        convolve = choose(Op.CONV1D, Needs(graph=level))
                        for bias in biases if recordable(convolve.caps.provider) else ():
                            convolve.run(inputs[at], weight, bias, pools.k, states, made[at], True)
                        scan = choose(Op.STATE_UPDATE if decodes else Op.SSD, Needs(graph=level))
                        for with_z in gated if recordable(scan.caps.provider) else ():
                            *parts, z = (each[at] for each in given)
                            scan.run(*parts, z if with_z else None, pools.v, states, layer, tensors, out[at])
        collect = choose(Op.COLLECT, Needs())
        if recordable(collect.caps.provider):
            collect.run(meta((8, 1), torch.int32), None, None, meta((8, 1), torch.int32), plan.pad_slot)

    return launch


Given = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]


def _given(layer: Layer, tokens: int) -> Iterator[Given]:
    """Inputs and results of the convolution, x, dt, b, c and z, and results, as the parts of a model's projection.

    Its rows are a multiple of 16 elements apart, or an odd number of them.
    """
    heads, channels, shared = layer.num_heads, layer.conv_channels, layer.num_groups * layer.state_dim
    width = heads * layer.qk_head_dim
    of_heads = (heads, layer.qk_head_dim)
    for row in (round_up(channels + width + heads, 16), (channels + width + heads) | 1):
        projected, made = meta((tokens, row), layer.dtype), meta((tokens, channels), layer.dtype)
        z = projected[:, channels : channels + width].unflatten(1, of_heads)
        dt = projected[:, channels + width : channels + width + heads]
        if layer.family == "mamba1":
            x, b, c = made, *(meta((tokens, shared), layer.dtype) for _ in range(2))
        else:
            x, b, c = made.split([channels - 2 * shared, shared, shared], 1)
        b, c = (each.unflatten(1, (layer.num_groups, -1)) for each in (b, c))
        given = x.unflatten(1, of_heads), dt, b, c, z
        yield projected[:, :channels], made, given, meta((tokens, *of_heads), layer.dtype)
