"""Decoding with recurrent layers: the state of each request by one token, or by every token of a draft.

A program holds a tile of one request's state in registers, rows of a head by N, and walks the request's tokens.
For Mamba-1, whose heads are one wide, the rows are heads. Nothing but the state counts: it is read and written once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.triton import ssm
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import launch, target_of
from portable.kernel import Kernel, Op
from portable.layer import Layer
from portable.ragged import cdiv, next_power_of_2
from portable.sets import ANY_SIZE, multiple_of
from portable.states import DecodeStates, SsmTensors


class Tile(NamedTuple):
    elements: int  # of a state
    warps: int


TILES = {"nvidia": Tile(4096, 4), "amd": Tile(4096, 4)}


@triton.jit
def _state_update(
    x,
    dt,
    b,
    c,
    z,
    pool,
    out,
    x_strides,  # token, head
    dt_strides,
    b_strides,  # token, group
    c_strides,
    z_strides,
    pool_strides,  # slot, head, row
    out_strides,
    a,
    d,
    dt_bias,
    low,
    high,
    cu_seqlens_q,
    initial_indices,
    state_indices,
    indices_stride,
    num_heads,
    pad_slot,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNELS: tl.constexpr,  # rows are heads
    ONE: tl.constexpr,  # token a request, at most
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(1)
    place = tl.arange(0, ROWS)
    if CHANNELS:
        head = tl.program_id(0) * ROWS + place
        row = tl.zeros([ROWS], tl.int32)
        live, group = head < num_heads, 0
    else:
        blocks: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
        head = tl.program_id(0) // blocks + tl.zeros([ROWS], tl.int32)
        row = tl.program_id(0) % blocks * ROWS + place
        live, group = row < WIDTH, tl.program_id(0) // blocks // HEADS_PER_GROUP
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    whole = live[:, None] & inside[None, :]
    first = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - first
    slot = tl.load(initial_indices + request)
    wide = head.to(tl.int64)
    at = wide[:, None] * pool_strides[1] + row[:, None] * pool_strides[2] + column[None, :]
    has = ssm.is_slot(slot, pad_slot) & (count > 0)
    state = tl.load(pool + slot.to(tl.int64) * pool_strides[0] + at, whole & has, 0.0).to(tl.float32)
    if CHANNELS:
        rate = tl.load(a + head[:, None] * DIM + column[None, :], whole, 0.0)
    else:
        rate = tl.load(a + head, live, 0.0)[:, None]
    skip = 0.0 if d is None else tl.load(d + head, live, 0.0).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + head, live, 0.0).to(tl.float32)
    for j in range(tl.minimum(count, 1) if ONE else count):
        token = (first + j).to(tl.int64)
        step = tl.load(dt + token * dt_strides[0] + wide * dt_strides[1], live, 0.0).to(tl.float32)
        step = ssm.step_size(step, bias, low, high, SOFTPLUS)
        value = tl.load(x + token * x_strides[0] + wide * x_strides[1] + row, live, 0.0).to(tl.float32)
        to = tl.load(b + token * b_strides[0] + group * b_strides[1] + column, inside, 0.0).to(tl.float32)
        back = tl.load(c + token * c_strides[0] + group * c_strides[1] + column, inside, 0.0).to(tl.float32)
        state = state * ssm.exp(step[:, None] * rate) + (step * value)[:, None] * to[None, :]
        result = tl.sum(state * back[None, :], 1) + skip * value
        if z is not None:
            gate = tl.load(z + token * z_strides[0] + wide * z_strides[1] + row, live, 0.0).to(tl.float32)
            result *= ssm.silu(gate)
        at_out = out + token * out_strides[0] + wide * out_strides[1] + row
        tl.store(at_out, result.to(out.dtype.element_ty), live)
        go = tl.load(state_indices + request * indices_stride + j)
        if ssm.is_slot(go, pad_slot):
            tl.store(pool + go.to(tl.int64) * pool_strides[0] + at, state.to(pool.dtype.element_ty), whole)


def state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    pool: torch.Tensor,
    states: DecodeStates,
    layer: Layer,
    tensors: SsmTensors,
    out: torch.Tensor,
) -> None:
    """x, z, out [T, H, P], dt [T, H], b, c [T, G, N], pool [slots, H, P, N]: tokens and states of a decode part."""
    requests, (heads, width, dim) = len(states.initial_indices), pool.shape[1:]
    if not requests:
        return
    tile, channels = TILES[target_of(x).vendor], layer.family == "mamba1"
    block = next_power_of_2(dim)
    rows = max(1, min(tile.elements // block, next_power_of_2(heads if channels else width)))
    launch(
        _state_update,
        (cdiv(heads, rows) if channels else heads * cdiv(width, rows), requests),
        x,
        dt,
        b,
        c,
        z,
        pool,
        out,
        x.stride()[:2],
        dt.stride(),
        b.stride()[:2],
        c.stride()[:2],
        (0, 0) if z is None else z.stride()[:2],
        pool.stride()[:3],
        out.stride()[:2],
        tensors.a,
        tensors.d,
        tensors.dt_bias,
        *tensors.dt_limit,
        states.cu_seqlens_q,
        states.initial_indices,
        states.state_indices,
        states.state_indices.stride(0),
        heads,
        states.pad_slot,
        WIDTH=width,
        DIM=dim,
        HEADS_PER_GROUP=heads // b.shape[1],
        SOFTPLUS=tensors.dt_softplus,
        CHANNELS=channels,
        ONE=states.max_query_len == 1,
        ROWS=rows,
        BLOCK=block,
        num_warps=max(1, min(tile.warps, rows * block // 256)),
    )


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.STATE_UPDATE,
            name="triton.state_update",
            kv_dtypes=ssm.STATES,
            head_dims=ANY_SIZE,
            families=frozenset({"mamba1", "mamba2"}),
            state_dims=multiple_of(1, up_to=512),
        ),
        state_update,
    ),
)
