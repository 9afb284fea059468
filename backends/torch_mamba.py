"""Recurrent layers on a CPU in few, large operations of PyTorch; slots and lengths are read on the host.

Beside the oracle's loop over tokens: the Mamba-2 scan is matrix products of `PIECE` tokens, the Mamba-1 scan one
multiply-add a token over what is made for a piece at once, and decodes are batched over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import silu

from portable.backends import reference_mamba
from portable.backends.pages import compute_of
from portable.backends.reference import DTYPES, TOLERANCE
from portable.backends.reference_mamba import Row, rows_of, step_sizes
from portable.kernel import GraphLevel, Kernel, KernelCaps, Op
from portable.layer import Layer
from portable.sets import ANY, ANY_SIZE
from portable.states import DecodeStates, PrefillStates, SsmTensors

PIECE = 64  # tokens: products within a piece grow with it, the states between pieces shrink


def conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    states: DecodeStates | PrefillStates,
    out: torch.Tensor,
    activate: bool,
) -> None:
    """As `reference_mamba.conv1d`; decodes by one token are one product."""
    if isinstance(states, PrefillStates) or states.max_query_len != 1:
        reference_mamba.conv1d(x, weight, bias, pool, states, out, activate)
        return
    compute, rows = compute_of(x.dtype), live_rows(states)
    tokens, initial = states.cu_seqlens_q[:-1][rows].long(), states.initial_indices[rows]
    known = is_slot(initial, states)[:, None, None]
    before = torch.where(known, pool[initial.clamp(min=0).long()].to(compute), 0)  # [D, W - 1, C]
    inputs = torch.cat([before, x[tokens, None].to(compute)], 1)
    sums = torch.einsum("dwc,cw->dc", inputs, weight.to(compute))
    if bias is not None:
        sums = sums + bias.to(compute)
    out[tokens] = (silu(sums) if activate else sums).to(out.dtype)
    store(pool, states.state_indices[rows, 0], inputs[:, 1:], states)


def live_rows(states: DecodeStates) -> torch.Tensor:
    """Rows that have tokens."""
    return states.cu_seqlens_q.diff().nonzero()[:, 0]


def is_slot(slots: torch.Tensor, states: DecodeStates) -> torch.Tensor:
    return (slots >= 0) & (slots != states.pad_slot)


def store(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, states: DecodeStates) -> None:
    stored = is_slot(slots, states)
    pool[slots[stored].long()] = values[stored].to(pool.dtype)


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
    """All requests at once, token after token."""
    compute, heads = compute_of(layer.dtype), pool.shape[1]
    group = heads // b.shape[1]
    rows, rates = live_rows(states), tensors.a.to(compute).reshape(heads, 1, -1)
    slots = states.initial_indices[rows]
    state = torch.where(
        is_slot(slots, states)[:, None, None, None], pool[slots.clamp(min=0).long()].to(compute), 0
    )  # [D, H, P, N]
    first, counts = states.cu_seqlens_q[:-1][rows].long(), states.cu_seqlens_q.diff()[rows]
    for j in range(states.max_query_len):
        some = counts > j
        rows, state, first, counts = rows[some], state[some], first[some], counts[some]
        token = first + j
        steps, given = step_sizes(dt[token], tensors, compute), x[token].to(compute)
        to, back = (part[token].to(compute).repeat_interleave(group, 1)[:, :, None] for part in (b, c))
        state = torch.exp(steps[..., None, None] * rates) * state + (steps[..., None] * given)[..., None] * to
        out[token] = finished((state * back).sum(-1), given, None if z is None else z[token], tensors).to(out.dtype)
        store(pool, states.state_indices[rows, j], state, states)


def finished(result: torch.Tensor, x: torch.Tensor, z: torch.Tensor | None, tensors: SsmTensors) -> torch.Tensor:
    """The sum of a state, [..., H, P], with what goes past it."""
    if tensors.d is not None:
        result = result + tensors.d.to(result.dtype)[:, None] * x
    return result if z is None else result * silu(z.to(result.dtype))


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
    """A request after the other, in pieces that end where a state is stored."""
    compute = compute_of(layer.dtype)
    steps, rates = step_sizes(dt, tensors, compute), tensors.a.to(compute)
    piece_of = channels if rates.dim() == 2 else products
    for row in rows_of(states):
        state = torch.zeros(pool.shape[1:], dtype=compute) if row.initial is None else pool[row.initial].to(compute)
        for first, end in pieces(row):
            here = slice(first, end)
            given = x[here].to(compute)
            sums, state = piece_of(given, steps[here], b[here].to(compute), c[here].to(compute), rates, state)
            out[here] = finished(sums, given, None if z is None else z[here], tensors).to(out.dtype)
            if end - 1 in row.stores:
                pool[row.stores[end - 1]] = state.to(pool.dtype)


def pieces(row: Row) -> list[tuple[int, int]]:
    """Tokens [first, end) of at most `PIECE`.

    >>> pieces(Row(range(10, 200), None, {89: 1, 199: 2}))
    [(10, 74), (74, 90), (90, 154), (154, 200)]
    """
    ends = sorted({row.tokens.start, row.tokens.stop, *(token + 1 for token in row.stores)})
    return [(at, min(at + PIECE, end)) for start, end in pairwise(ends) for at in range(start, end, PIECE)]


Piece = tuple[torch.Tensor, torch.Tensor]


def products(
    x: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rates: torch.Tensor, state: torch.Tensor
) -> Piece:
    """Mamba-2: x [n, H, P], steps [n, H], b, c [n, G, N] and a state [H, P, N] -> [n, H, P], and the state behind."""
    group = x.shape[1] // b.shape[1]
    sums = (steps * rates).cumsum(0).T  # [H, n]
    decay = (sums[:, :, None] - sums[:, None]).tril().exp().tril()  # [H, n, n]; at most 1
    weights = torch.einsum("ign,jgn->gij", c, b).repeat_interleave(group, 0) * decay * steps.T[:, None]
    values, keys = x.transpose(0, 1), b.transpose(0, 1).repeat_interleave(group, 0)  # [H, n, P], [H, n, N]
    queries = c.transpose(0, 1).repeat_interleave(group, 0) * sums.exp()[..., None]
    result = weights @ values + queries @ state.mT
    scaled = values * (steps.T * (sums[:, -1:] - sums).exp())[..., None]
    return result.transpose(0, 1), sums[:, -1].exp()[:, None, None] * state + scaled.mT @ keys


def channels(
    x: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rates: torch.Tensor, state: torch.Tensor
) -> Piece:
    """Mamba-1: as `products`, with P = G = 1 and a decay per state."""
    decay = torch.exp(steps[..., None] * rates)  # [n, H, N]
    after = (steps * x[..., 0])[..., None] * b  # becomes the states after each token
    last = state[:, 0]
    for token in range(len(x)):
        last = torch.addcmul(after[token], decay[token], last, out=after[token])
    return torch.einsum("nhs,ns->nh", after, c[:, 0])[..., None], last[:, None].clone()


def state_copy(pools: Sequence[Sequence[torch.Tensor]], copies: torch.Tensor, cu_copies: torch.Tensor) -> None:
    """Pairs at once, where none of a group's writes what another writes or reads; else one after the other."""
    for group, (first, end) in zip(pools, pairwise(cu_copies.tolist()), strict=True):
        pairs = copies[first:end]
        pairs = pairs[(pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1])]
        come, go = pairs.unbind(1)
        if len(go.unique()) < len(go) or torch.isin(go, come).any():
            reference_mamba.state_copy([group], pairs, torch.tensor([0, len(pairs)]))
        else:
            for pool in group:
                pool[go] = pool[come]


def _kernel(op: Op, run: object) -> Kernel:
    caps = KernelCaps(
        op=op,
        name=f"torch.{op}",
        provider="torch",
        vendors={"cpu"},
        archs=ANY,
        graph=GraphLevel.NEVER,  # it reads lengths and slots
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        head_dims=ANY_SIZE,
        families=ANY,
        state_dims=ANY_SIZE,
        conv_widths=ANY_SIZE,
        tolerance=TOLERANCE,
    )
    assert callable(run)
    return Kernel(caps, run)


KERNELS = (
    _kernel(Op.CONV1D, conv1d),
    _kernel(Op.SSD, scan),
    _kernel(Op.STATE_UPDATE, state_update),
    _kernel(Op.STATE_COPY, state_copy),
)
