"""Calls of the kernels of recurrent layers, for `compile_cases`: Mamba2-2.7B, 8 groups, Mamba-1, state slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from portable.backends.triton import conv1d, scan, ssd, state_copy, state_update
from portable.layer import Layer
from portable.platform.target import Target
from portable.states import DecodeStates, PrefillStates, SsmTensors

TOKENS, REQUESTS, SLOTS = 4096, 16, 512
CHUNKS = TOKENS // 256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def prefill() -> PrefillStates:
    return PrefillStates(
        requests=slice(0, REQUESTS),
        tokens=slice(0, TOKENS),
        cu_seqlens_q=integers(REQUESTS + 1),
        has_initial=meta(REQUESTS, dtype=torch.bool),
        initial_indices=integers(REQUESTS),
        state_indices=integers(REQUESTS),
        cu_chunks=integers(CHUNKS + 1),
        chunk_requests=integers(CHUNKS),
        chunk_state_indices=integers(CHUNKS),
        last_chunks=integers(REQUESTS),
        checkpoint_chunks=None,
        conv_requests=integers(TOKENS // 64),
        conv_offsets=integers(TOKENS // 64),
        conv_block=64,
        max_query_len=TOKENS,
        pad_slot=-1,
    )


def decode(tokens: int) -> DecodeStates:
    return DecodeStates(
        requests=slice(0, REQUESTS),
        tokens=slice(0, REQUESTS * tokens),
        cu_seqlens_q=integers(REQUESTS + 1),
        initial_indices=integers(REQUESTS),
        state_indices=integers(REQUESTS, tokens),
        num_accepted=None,
        max_query_len=tokens,
        pad_slot=-1,
    )


def scanned(layer: Layer, drafts: int, target: Target) -> None:
    """A prefill and a decode; x, b and c are columns of one tensor, as the convolution leaves them."""
    heads, width, groups, dim = layer.num_heads, layer.qk_head_dim, layer.num_groups, layer.state_dim
    one = layer.family == "mamba1"
    pool = meta(SLOTS, heads, width, dim, dtype=layer.kv_dtype)
    tensors = SsmTensors(
        a=meta(heads, dim, dtype=torch.float32) if one else meta(heads, dtype=torch.float32),
        d=meta(heads, dtype=torch.float32),
        dt_bias=meta(heads, dtype=torch.float32),
    )
    calls: tuple[tuple[Callable[..., None], Any], ...] = (
        (scan.scan if one else ssd.ssd, prefill()),
        (state_update.state_update, decode(drafts)),
    )
    for run, states in calls:
        mixed = meta(states.tokens.stop, heads * width + 2 * groups * dim, dtype=layer.dtype)
        x, b, c = mixed.split([heads * width, groups * dim, groups * dim], 1)
        x = x.unflatten(1, (heads, width))
        z = torch.empty_like(x, memory_format=torch.contiguous_format) if drafts > 1 else None
        dt = meta(len(mixed), heads, dtype=layer.dtype)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        keys = (part.unflatten(1, (groups, dim)) for part in (b, c))
        run(x, dt, *keys, z, pool, states, layer, tensors, out)


def convolved(target: Target) -> None:
    for states in (prefill(), decode(1)):
        x = meta(states.tokens.stop, 5376)
        conv1d.conv1d(x, meta(5376, 4), meta(5376), meta(SLOTS, 3, 5376), states, torch.empty_like(x), True)


def copied(target: Target) -> None:
    """Addresses are values here, so the pools are real, and small."""
    pools = [[torch.zeros((4, 3, 64), dtype=torch.bfloat16)], [torch.zeros((4, 2, 8, 16))]]
    state_copy.state_copy(pools, torch.zeros((8, 2), dtype=torch.int64), torch.zeros(3, dtype=torch.int32))


CALLS: dict[str, Callable[[Target], None]] = {
    "mamba2 80 heads": partial(scanned, Layer.mamba2(num_heads=80), 1),
    "mamba2 64 heads 8 groups drafts": partial(scanned, Layer.mamba2(num_heads=64, num_groups=8), 4),
    "mamba2 float32": partial(scanned, Layer.mamba2(num_heads=80, dtype=torch.float32), 1),
    "mamba1 5120 channels": partial(scanned, Layer.mamba1(num_channels=5120), 1),
    "conv1d 5376 channels": convolved,
    "state copy": copied,
}
