"""The oracle of recurrent layers: causal convolution, state updates and scans, a token at a time.

It runs on any device, in float32 at least (float64 for float64 layers, or when asked to), and reads lengths and slots
on the host. Where the contract leaves a choice, it is made here:

* a state is rounded to the pool's type where it is stored, and nowhere between the tokens of a call;
* tokens behind the last row of `states` are padding: their `out` is not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import silu, softplus

from portable.backends.pages import compute_of
from portable.backends.reference import DTYPES, TOLERANCE
from portable.kernel import GraphLevel, Kernel, KernelCaps, Op
from portable.layer import Layer
from portable.sets import ANY, ANY_SIZE
from portable.states import DecodeStates, PrefillStates, SsmTensors

States = DecodeStates | PrefillStates


@dataclass(frozen=True, slots=True)
class Row:
    """A request's tokens, the slot that it starts from (None: from zero), and where its states go."""

    tokens: range
    initial: int | None
    stores: dict[int, int]  # token -> slot of the state after it


def rows_of(states: States) -> Iterator[Row]:
    """Every request of a decode or prefill part.

    >>> integers = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> states = DecodeStates(slice(0, 2), slice(0, 3), integers(0, 2, 2), integers(4, -1),
    ...                       integers(5, 6, -1, -1).view(2, 2), None, 2, -1)
    >>> list(rows_of(states))
    [Row(tokens=range(0, 2), initial=4, stores={0: 5, 1: 6}), Row(tokens=range(2, 2), initial=None, stores={})]
    """
    cu, initial = states.cu_seqlens_q.tolist(), states.initial_indices.tolist()
    padding = (-1, states.pad_slot)
    if isinstance(states, PrefillStates):
        ends = states.cu_chunks[1:].tolist()
        slots = dict(zip((end - 1 for end in ends), states.chunk_state_indices.tolist(), strict=True))
        initial = [slot if has else -1 for slot, has in zip(initial, states.has_initial.tolist(), strict=True)]
    else:
        slots = {
            start + j: slot
            for (start, end), row in zip(pairwise(cu), states.state_indices.tolist(), strict=True)
            for j, slot in enumerate(row[: end - start])
        }
    for (start, end), slot in zip(pairwise(cu), initial, strict=True):
        tokens = range(start, end)
        stores = {token: slots[token] for token in tokens if slots.get(token, -1) not in padding}
        yield Row(tokens, None if slot in padding else slot, stores)


def conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    states: States,
    out: torch.Tensor,
    activate: bool,
    compute: torch.dtype | None = None,
) -> None:
    """A causal convolution per channel: x, out [T, C], weight [C, W]; the last W - 1 inputs are the state.

    pool [slots, W - 1, C] holds the newest input last. `activate`: SiLU.
    """
    compute = compute or compute_of(x.dtype)
    width = weight.shape[1]
    for row in rows_of(states):
        if not row.tokens:
            continue
        first, end = row.tokens.start, row.tokens.stop
        before = x.new_zeros((width - 1, x.shape[1]), dtype=compute)
        if row.initial is not None:
            before = pool[row.initial].to(compute)
        inputs = torch.cat([before, x[first:end].to(compute)])  # [W - 1 + n, C]
        sums = torch.einsum("ncw,cw->nc", inputs.unfold(0, width, 1), weight.to(compute))
        if bias is not None:
            sums = sums + bias.to(compute)
        out[first:end] = silu(sums) if activate else sums
        for token, slot in row.stores.items():
            pool[slot] = inputs[token - first + 1 : token - first + width]


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    pool: torch.Tensor,
    states: States,
    layer: Layer,
    tensors: SsmTensors,
    out: torch.Tensor,
    compute: torch.dtype | None = None,
) -> None:
    """x, z, out [T, H, P], dt [T, H], b, c [T, G, N], pool [slots, H, P, N]; both scans and state updates.

    state = exp(dt a) state + dt x b, out = (state c + d x) silu(z), from the float32 of dt and a on.
    """
    compute = compute or compute_of(layer.dtype)
    heads, width, dim = pool.shape[1:]
    group = heads // b.shape[1]
    steps = step_sizes(dt, tensors, compute)  # [T, H]
    decay = torch.exp(steps[..., None] * tensors.a.to(compute).reshape(heads, -1))[:, :, None]  # [T, H, 1, 1 or N]
    for row in rows_of(states):
        state = x.new_zeros((heads, width, dim), dtype=compute)
        if row.initial is not None:
            state = pool[row.initial].to(compute)
        for token in row.tokens:
            given = x[token].to(compute)  # [H, P]
            to, back = (part[token].to(compute).repeat_interleave(group, 0) for part in (b, c))  # [H, N]
            state = decay[token] * state + (steps[token, :, None] * given)[..., None] * to[:, None]
            result = (state @ back[..., None])[..., 0]
            if tensors.d is not None:
                result = result + tensors.d.to(compute)[:, None] * given
            out[token] = result if z is None else result * silu(z[token].to(compute))
            if token in row.stores:
                pool[row.stores[token]] = state


def step_sizes(dt: torch.Tensor, tensors: SsmTensors, compute: torch.dtype) -> torch.Tensor:
    """The lengths of the steps [T, H], above 0.

    >>> given = SsmTensors(torch.tensor([-1.0]), dt_softplus=True, dt_limit=(0.0, 0.5))
    >>> step_sizes(torch.tensor([[-1.0], [2.0]]), given, torch.float32).flatten().tolist()
    [0.3132616877555847, 0.5]
    """
    steps = dt.to(compute)
    if tensors.dt_bias is not None:
        steps = steps + tensors.dt_bias.to(compute)
    if tensors.dt_softplus:
        steps = softplus(steps, threshold=100)  # exact up to where it is the identity in float64
    return steps.clamp(*tensors.dt_limit)


def state_copy(pools: Sequence[Sequence[torch.Tensor]], copies: torch.Tensor, cu_copies: torch.Tensor) -> None:
    """Whole slots, each group's pairs (from, to) in its pools, in order; a pair with a negative slot copies nothing."""
    pairs = copies.tolist()
    for group, (first, end) in zip(pools, pairwise(cu_copies.tolist()), strict=True):
        for come, go in pairs[first:end]:
            if come >= 0 and go >= 0 and come != go:
                for pool in group:
                    pool[go] = pool[come]


def _caps(op: Op) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=f"reference.{op}",
        provider="reference",
        vendors=ANY,
        archs=ANY,
        emulated=True,
        graph=GraphLevel.NEVER,  # it reads lengths and slots
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        head_dims=ANY_SIZE,
        families=ANY,
        state_dims=ANY_SIZE,
        conv_widths=ANY_SIZE,
        tolerance=TOLERANCE,
    )


KERNELS = (
    Kernel(_caps(Op.CONV1D), conv1d),
    Kernel(_caps(Op.SSD), scan),
    Kernel(_caps(Op.STATE_UPDATE), scan),
    Kernel(_caps(Op.STATE_COPY), state_copy),
)
