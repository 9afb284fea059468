"""The Mamba-1 scan of prompts: every channel has a decay per state, so there is no matrix product to it.

Three launches: `scan_chunks` goes through each chunk from a state of zero, `scan_pass` through the chunks of each
request, after which `scan_tokens` knows the state before each chunk and goes through its tokens once more for out.
So the tokens of a long prompt are walked by as many programs as it has chunks. States in between are [N, channels].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.triton import ssm
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import launch, target_of
from portable.backends.triton.ssd_kernel import first_chunk
from portable.kernel import Kernel, Op
from portable.layer import Layer
from portable.ragged import cdiv, next_power_of_2
from portable.sets import multiple_of, one_of
from portable.states import PrefillStates, SsmTensors


class Tile(NamedTuple):
    elements: int  # of a state, channels by N
    warps: int


TILES = {"nvidia": Tile(512, 1), "amd": Tile(1024, 1)}
PASSED = Tile(256, 1)  # few programs go through all chunks, so each takes little


@triton.jit
def _rates(a, channel, live, n, DIM: tl.constexpr):
    """a of a block of channels in units of log2, [N, channels]."""
    at = a + channel[None, :] * DIM + n[:, None]
    return tl.load(at, live[None, :] & (n < DIM)[:, None], 0.0) * ssm.LOG2_E


@triton.jit
def scan_chunks(
    x,
    dt,
    b,
    x_strides,
    dt_strides,
    b_strides,
    a,
    dt_bias,
    low,
    high,
    local,  # [M, N, channels] f32: the state that a chunk leaves when it starts from zero
    lengths,  # [M, channels] f32: the sum of its steps
    cu_chunks,
    num_channels,
    DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Axes: blocks of channels, chunks."""
    chunk = tl.program_id(1)
    channel, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    live, inside = channel < num_channels, n < DIM
    rate = _rates(a, channel, live, n, DIM)
    bias = tl.zeros([CHANNELS], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel, live, 0.0).to(tl.float32)
    state, length = tl.zeros([BLOCK, CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    for place in range(tl.load(cu_chunks + chunk), tl.load(cu_chunks + chunk + 1)):
        token = tl.cast(place, tl.int64)
        step = tl.load(dt + token * dt_strides[0] + channel.to(tl.int64) * dt_strides[1], live, 0.0).to(tl.float32)
        step = tl.where(live, ssm.step_size(step, bias, low, high, SOFTPLUS), 0.0)
        value = tl.load(x + token * x_strides[0] + channel.to(tl.int64) * x_strides[1], live, 0.0).to(tl.float32)
        to = tl.load(b + token * b_strides[0] + n, inside, 0.0).to(tl.float32)
        state = state * tl.exp2(rate * step[None, :]) + to[:, None] * (step * value)[None, :]
        length += step
    at = local + chunk.to(tl.int64) * num_channels * DIM + n[:, None] * num_channels + channel[None, :]
    tl.store(at, state, inside[:, None] & live[None, :])
    tl.store(lengths + chunk.to(tl.int64) * num_channels + channel, length, live)


@triton.jit
def scan_pass(
    local,  # becomes the state before each chunk
    lengths,
    a,
    pool,
    pool_strides,  # slot, channel
    has_initial,
    initial_indices,
    chunk_state_indices,
    last_chunks,
    num_channels,
    pad_slot,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Axes: blocks of channels, requests."""
    request = tl.program_id(1)
    channel, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = channel < num_channels
    live = inside[None, :] & (n < DIM)[:, None]
    rate = _rates(a, channel, inside, n, DIM)
    last, chunk = tl.load(last_chunks + request), first_chunk(last_chunks, request, 256)
    slot = tl.load(initial_indices + request)
    has = (tl.load(has_initial + request) != 0) & ssm.is_slot(slot, pad_slot) & (last >= 0)
    in_pool = channel.to(tl.int64)[None, :] * pool_strides[1] + n[:, None]
    state = tl.load(pool + slot.to(tl.int64) * pool_strides[0] + in_pool, live & has, 0.0).to(tl.float32)
    at = local + chunk.to(tl.int64) * num_channels * DIM + n[:, None] * num_channels + channel[None, :]
    length_at = lengths + chunk.to(tl.int64) * num_channels + channel
    some = chunk <= last
    added, length = tl.load(at, live & some, 0.0), tl.load(length_at, inside & some, 0.0)
    while chunk <= last:
        # the next chunk's, so that its loads do not wait for this one's
        some = chunk < last
        next_added = tl.load(at + num_channels * DIM, live & some, 0.0)
        next_length = tl.load(length_at + num_channels, inside & some, 0.0)
        go = tl.load(chunk_state_indices + chunk)
        tl.store(at, state, live)
        state = state * tl.exp2(rate * length[None, :]) + added
        if ssm.is_slot(go, pad_slot):
            tl.store(pool + go.to(tl.int64) * pool_strides[0] + in_pool, state.to(pool.dtype.element_ty), live)
        added, length = next_added, next_length
        at += num_channels * DIM
        length_at += num_channels
        chunk += 1


@triton.jit
def scan_tokens(
    x,
    dt,
    b,
    c,
    z,
    out,
    x_strides,
    dt_strides,
    b_strides,
    c_strides,
    z_strides,
    out_strides,
    a,
    d,
    dt_bias,
    low,
    high,
    before,
    cu_chunks,
    num_channels,
    DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Axes: blocks of channels, chunks."""
    chunk = tl.program_id(1)
    channel, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    live, inside = channel < num_channels, n < DIM
    rate = _rates(a, channel, live, n, DIM)
    bias, skip = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel, live, 0.0).to(tl.float32)
    if d is not None:
        skip = tl.load(d + channel, live, 0.0).to(tl.float32)
    at = before + chunk.to(tl.int64) * num_channels * DIM + n[:, None] * num_channels + channel[None, :]
    state = tl.load(at, inside[:, None] & live[None, :], 0.0)
    for place in range(tl.load(cu_chunks + chunk), tl.load(cu_chunks + chunk + 1)):
        token = tl.cast(place, tl.int64)
        step = tl.load(dt + token * dt_strides[0] + channel.to(tl.int64) * dt_strides[1], live, 0.0).to(tl.float32)
        step = ssm.step_size(step, bias, low, high, SOFTPLUS)
        value = tl.load(x + token * x_strides[0] + channel.to(tl.int64) * x_strides[1], live, 0.0).to(tl.float32)
        to = tl.load(b + token * b_strides[0] + n, inside, 0.0).to(tl.float32)
        back = tl.load(c + token * c_strides[0] + n, inside, 0.0).to(tl.float32)
        state = state * tl.exp2(rate * step[None, :]) + to[:, None] * (step * value)[None, :]
        result = tl.sum(state * back[:, None], 0) + skip * value
        if z is not None:
            gate = tl.load(z + token * z_strides[0] + channel.to(tl.int64) * z_strides[1], live, 0.0).to(tl.float32)
            result *= ssm.silu(gate)
        to_out = out + token * out_strides[0] + channel.to(tl.int64) * out_strides[1]
        tl.store(to_out, result.to(out.dtype.element_ty), live)


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    pool: torch.Tensor,
    states: PrefillStates,
    layer: Layer,
    tensors: SsmTensors,
    out: torch.Tensor,
) -> None:
    """x, z, out [T, channels, 1], dt [T, channels], b, c [T, 1, N], pool [slots, channels, 1, N]: a prefill part."""
    chunks, (channels, _, dim) = len(states.chunk_requests), pool.shape[1:]
    if not chunks:
        return
    tile, block = TILES[target_of(x).vendor], next_power_of_2(dim)
    width, passed = (max(1, min(each.elements // block, next_power_of_2(channels))) for each in (tile, PASSED))
    blocks = cdiv(channels, width)
    shape = {"DIM": dim, "BLOCK": block}
    local = torch.empty((chunks, dim, channels), dtype=torch.float32, device=x.device)
    lengths = torch.empty((chunks, channels), dtype=torch.float32, device=x.device)
    walked = {"SOFTPLUS": tensors.dt_softplus, "CHANNELS": width, "num_warps": tile.warps, **shape}
    launch(
        scan_chunks,
        (blocks, chunks),
        x,
        dt,
        b,
        x.stride()[:2],
        dt.stride(),
        b.stride()[:2],
        tensors.a,
        tensors.dt_bias,
        *tensors.dt_limit,
        local,
        lengths,
        states.cu_chunks,
        channels,
        **walked,
    )
    launch(
        scan_pass,
        (cdiv(channels, passed), len(states.last_chunks)),
        local,
        lengths,
        tensors.a,
        pool,
        pool.stride()[:2],
        states.has_initial,
        states.initial_indices,
        states.chunk_state_indices,
        states.last_chunks,
        channels,
        states.pad_slot,
        CHANNELS=passed,
        num_warps=PASSED.warps,
        **shape,
    )
    launch(
        scan_tokens,
        (blocks, chunks),
        x,
        dt,
        b,
        c,
        z,
        out,
        x.stride()[:2],
        dt.stride(),
        b.stride()[:2],
        c.stride()[:2],
        (0, 0) if z is None else z.stride()[:2],
        out.stride()[:2],
        tensors.a,
        tensors.d,
        tensors.dt_bias,
        *tensors.dt_limit,
        local,
        states.cu_chunks,
        channels,
        **walked,
    )


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.SSD,
            name="triton.scan",
            kv_dtypes=ssm.STATES,
            head_dims=one_of(1),
            families=frozenset({"mamba1"}),
            state_dims=multiple_of(1, up_to=256),
        ),
        scan,
    ),
)
