"""What the kernels of recurrent layers share. Used by conv1d.py, state_update.py, ssd_kernel.py and scan.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
STATES = frozenset({torch.float32, torch.float16, torch.bfloat16})  # what pools may hold


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def silu(x):
    return x / (1.0 + exp(-x))


@triton.jit
def step_size(dt, bias, low, high, SOFTPLUS: tl.constexpr):
    """clamp(softplus(dt + bias)); exact where exp(dt) is lost beside 1."""
    dt += bias
    if SOFTPLUS:
        power = exp(tl.minimum(dt, 20.0))  # above, softplus is the identity to 2e-9
        one = 1.0 + power
        rest = tl.where(one == 1.0, 1.0, one - 1.0)
        dt = tl.where(dt > 20.0, dt, tl.where(one == 1.0, power, tl.log2(one) * LN_2 * (power / rest)))
    return tl.minimum(tl.maximum(dt, low), high)


@triton.jit
def is_slot(slot, pad_slot):
    return (slot >= 0) & (slot != pad_slot)
