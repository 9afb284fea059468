"""The contract of recurrent layers: their cells, and one check of outputs and of every slot of the pools.

An error is |got - want| / (1 + size), and size the sum of the |terms| of a result. What is not data is NaN: slots that
nobody starts from (those of requests without a state as well), tokens behind the last row, gaps of strided views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable.backends import reference_mamba
from portable.chunks import aligned_chunks
from portable.kernel import Kernel, Op
from portable.layer import Layer
from portable.ragged import cdiv
from portable.states import DecodeStates, PrefillStates, SsmTensors

if TYPE_CHECKING:
    from cells import Axes, Case, Cell

    from portable.platform.target import Target

CONV_BLOCK = 8  # tokens of a block of the convolution's plan
PADDING = 3  # tokens behind the last row
# (new tokens, context) of each request. Contexts end inside of chunks and at their ends; pieces are shorter than a
# convolution's window; two rows have no tokens.
STEPS: Mapping[str, Sequence[tuple[int, int]]] = {
    "prefill": ((5, 0), (0, 0), (21, 0), (1, 0), (2, 0)),
    "chunks": ((1, 3), (2, 17), (0, 9), (19, 13), (3, 16), (37, 0)),
    "blocks": ((16, 16), (40, 5), (3, 14), (1, 15), (7, 0)),
    "long": ((150, 30), (70, 0)),
    "decode": ((1, 4), (1, 9), (1, 1), (1, 300)),
    "verify": ((3, 4), (1, 9), (3, 1), (2, 300)),
    "padded": ((1, 4), (2, 9), (0, 0), (0, 0)),
}
PREFILLS = ("prefill", "chunks", "blocks", "long")
BLOCK = 16  # tokens of a cache block: of the chunks' multiples, "blocks" stores the states that end one

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CALL: Axes = {
    "dtype": DTYPES,
    "state_dtype": (torch.float32, None, torch.bfloat16),  # None: the layer's
    "strided": (False, True),
    "in_place": (True, False),  # a request goes on in the slot that it started from
    "pad_slot": (-1, 0),
}
SCAN: Axes = {
    # heads, head dim, state dim, groups, chunk
    "mamba2": ((4, 16, 16, 2, 16), (2, 16, 16, 1, 256), (8, 32, 32, 1, 32), (3, 64, 128, 1, 64), (6, 8, 24, 3, 8)),
    "mamba1": ((24, 1, 16, 1, 16), (70, 1, 8, 1, 64), None),  # None: the layer of "mamba2"
    "gated": (True, False),
    "skip": (True, False),  # d
    "dt": ("bias softplus", "softplus limit", "plain"),
}
AXES: Mapping[Op, Axes] = {
    Op.CONV1D: {
        "step": tuple(STEPS),
        "channels": (40, 16, 9, 300),
        "conv_width": (4, 2, 3),
        "bias": (True, False),
        "activate": (True, False),
        **CALL,
    },
    Op.SSD: {"step": PREFILLS, **SCAN, **CALL},
    Op.STATE_UPDATE: {"step": ("decode", "verify", "padded"), **SCAN, **CALL},
    Op.STATE_COPY: {"pools": (1, 2, 5), "pairs": (0, 1, 7), "apart": (False, True), "dtype": DTYPES},
}
CALLED = (
    "step",
    "bias",
    "activate",
    "gated",
    "skip",
    "dt",
    "in_place",
    "pad_slot",
    "strided",
    "pools",
    "pairs",
    "apart",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a layer is called."""

    step: str = "chunks"
    bias: bool = True
    activate: bool = True
    gated: bool = True
    skip: bool = True
    dt: str = "bias softplus"
    in_place: bool = True
    pad_slot: int = -1
    strided: bool = False
    pools: int = 1
    pairs: int = 0
    apart: bool = False

    @property
    def rows(self) -> Sequence[tuple[int, int]]:
        return STEPS[self.step]


PLAIN = Call()


def layer_of(op: Op, cell: Cell) -> Layer:
    types = {"dtype": cell["dtype"], "state_dtype": cell.get("state_dtype") or cell["dtype"]}
    if op is Op.CONV1D:
        return Layer.mamba1(num_channels=cell["channels"], conv_width=cell["conv_width"], chunk=BLOCK, **types)
    if op is Op.STATE_COPY:
        return Layer.mamba2(num_heads=2, **types)
    heads, width, dim, groups, chunk = cell["mamba1"] or cell["mamba2"]
    if cell["mamba1"]:
        return Layer.mamba1(num_channels=heads, state_dim=dim, chunk=chunk, **types)
    return Layer.mamba2(num_heads=heads, head_dim=width, state_dim=dim, num_groups=groups, chunk=chunk, **types)


def call_of(cell: Cell) -> Call:
    return Call(**{field.name: cell[field.name] for field in fields(Call) if field.name in cell})


def states_of(call: Call, chunk: int, device: str, seed: int) -> tuple[DecodeStates | PrefillStates, int, list[int]]:
    """What the kernel sees, the number of slots, and those that hold a state before. Slots are in random order."""
    new, context = (np.array([row[i] for row in call.rows], np.int32) for i in range(2))
    order = iter((np.random.default_rng(seed).permutation(60) + 1).tolist())

    def integers(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    live = (context > 0) & ((new > 0) | (call.step in PREFILLS))
    initial = [next(order) if has else call.pad_slot for has in live.tolist()]
    cu = integers([0, *np.cumsum(new).tolist()])
    rows, tokens = slice(0, len(new)), slice(0, int(new.sum()))
    if call.step in PREFILLS:
        pieces = aligned_chunks(context, new, min(chunk, BLOCK) if call.step == "blocks" else chunk)
        slots = [call.pad_slot] * len(pieces.request)
        ends = (context - np.cumsum(new) + new)[pieces.request] + pieces.cu_seqlens[1:]
        last = {}
        for m, (row, end) in enumerate(zip(pieces.request.tolist(), ends.tolist(), strict=True)):
            if m == pieces.last[row]:
                slots[m] = last[row] = initial[row] if call.in_place and context[row] else next(order)
            elif call.step == "blocks" and end % BLOCK == 0:
                slots[m] = next(order)
        blocks = cdiv(new, CONV_BLOCK)
        made: DecodeStates | PrefillStates = PrefillStates(
            requests=rows,
            tokens=tokens,
            cu_seqlens_q=cu,
            has_initial=torch.tensor(context > 0, device=device),
            # a request without a state may name a slot all the same
            initial_indices=integers(np.where(live, initial, 50 + np.arange(len(new)))),
            state_indices=integers([last.get(r, call.pad_slot) for r in range(len(new))]),
            cu_chunks=integers(pieces.cu_seqlens.tolist()),
            chunk_requests=integers(pieces.request.tolist()),
            chunk_state_indices=integers(slots),
            last_chunks=integers(pieces.last.tolist()),
            checkpoint_chunks=None,
            conv_requests=integers([r for r, count in enumerate(blocks.tolist()) for _ in range(count)]),
            conv_offsets=integers([i for count in blocks.tolist() for i in range(count)]),
            conv_block=CONV_BLOCK,
            max_query_len=int(new.max()),
            pad_slot=call.pad_slot,
        )
    else:
        most = int(new.max())

        def slot_of(r: int, j: int, count: int) -> int:
            if j >= count or (j == 0 and count > 2):  # a state after a token may be of no use
                return call.pad_slot
            return initial[r] if j == 0 and call.in_place else next(order)

        table = [[slot_of(r, j, count) for j in range(most)] for r, count in enumerate(new.tolist())]
        accepted = integers([1] * len(new)) if most > 1 else None
        made = DecodeStates(rows, tokens, cu, integers(initial), integers(table), accepted, most, call.pad_slot)
    return made, 61, [slot for slot in initial if slot != call.pad_slot]


def shaped(kernel: Kernel, target: Target, shape: Mapping[str, Any]) -> Iterator[Case]:
    """The cases of a shape that a kernel declares: keyword arguments of `Layer.mamba1` or `Layer.mamba2`."""
    from cells import Case

    layer = (Layer.mamba2 if "num_heads" in shape else Layer.mamba1)(**shape)
    for step in AXES[kernel.caps.op]["step"][:2]:
        case = Case(op=kernel.caps.op, layer=layer, call=Call(step=step))
        if not kernel.why_not(target, layer, case.needs()):
            yield case


def pool_of(shape: tuple[int, ...], slots: int, live: list[int], case: Case, device: str) -> torch.Tensor:
    """NaN but for the live slots; with `strided` the slots lie apart."""
    from inputs import numbers

    dtype, normal = case.layer.kv_dtype, numbers(case, 1)
    base = torch.full((slots, int(np.prod(shape)) + 16 * case.call.strided), torch.nan, dtype=dtype, device=device)
    pool = base[:, : int(np.prod(shape))].unflatten(1, shape)
    for slot in live:
        pool[slot] = normal(*shape).to(dtype)
    return pool


def check(kernel: Kernel, case: Case, device: str) -> None:
    """Raise AssertionError where the kernel departs from the contract."""
    if case.op is Op.STATE_COPY:
        check_copy(kernel, case, device)
    else:
        check_run(kernel, case, device)


def arguments(case: Case, device: str) -> tuple[list[Any], list[Any], torch.Tensor]:
    """The arguments of the kernel before `out`; the same in float64; and those as sizes. The pool is at its place."""
    from inputs import numbers, seed_of, strided

    layer, call, normal = case.layer, case.call, numbers(case)
    states, slots, live = states_of(call, layer.chunk or BLOCK, device, seed_of(case))
    tokens = states.tokens.stop

    def rows(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = scale * normal(tokens + PADDING, *shape)
        made[tokens:] = torch.nan
        return strided(made.to(layer.dtype), call.strided, device)

    def weights(*shape: int) -> torch.Tensor:
        return normal(*shape).to(layer.dtype).to(device)

    if case.op is Op.CONV1D:
        channels, width = layer.num_heads, layer.conv_width
        pool = pool_of((width - 1, channels), slots, live, case, device)
        x, weight = rows(channels, scale=2.0), weights(channels, width)
        return [x, weight, weights(channels) if call.bias else None, pool, states], [call.activate], pool
    heads, width, dim, groups = layer.num_heads, layer.qk_head_dim, layer.state_dim, layer.num_groups
    pool = pool_of((heads, width, dim), slots, live, case, device)
    bias, softplus, limit = (word in call.dt for word in ("bias", "softplus", "limit"))
    shape = (heads, dim) if layer.family == "mamba1" else (heads,)
    tensors = SsmTensors(
        a=-normal(*shape).exp().to(device),
        d=(1 + normal(heads)).to(device) if call.skip else None,
        dt_bias=(normal(heads) - 1).to(device) if bias else None,
        dt_softplus=softplus,
        dt_limit=(0.1, 0.4) if limit else (0.0, float("inf")),
    )
    x, b, c = rows(heads, width, scale=2.0), rows(groups, dim), rows(groups, dim)
    dt = rows(heads) if softplus else rows(heads, scale=0.2).abs_()
    z = rows(heads, width) if call.gated else None
    return [x, dt, b, c, z, pool, states], [layer, tensors], pool


def check_run(kernel: Kernel, case: Case, device: str) -> None:
    from contract import error, tolerance
    from inputs import guarded, unchanged

    before, after, pool = arguments(case, device)
    states, x = before[-1], before[0]
    want, want_pool = expected(case, before, after)
    size, pool_size = expected(case, before, after, sizes=True)
    out, guard = guarded(tuple(x.shape), case.layer.dtype, case.call.strided, device)
    tensors = after[-1] if case.op is not Op.CONV1D else ()
    given = [
        value
        for value in (*before, *tensors, *(getattr(states, field.name) for field in fields(states)))
        if isinstance(value, torch.Tensor)
    ]
    blank = pool.as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1)).clone()
    with unchanged(*(value for value in given if value is not pool)):
        run = (*before, out, *after) if case.op is Op.CONV1D else (*before, *after, out)
        kernel.run(*run)
    most, tokens = tolerance(kernel, case), states.tokens.stop
    assert (wrong := error(out[:tokens], want[:tokens], size[:tokens])) <= most, f"out is wrong by {wrong:.3g}"
    assert out[tokens:].isnan().all(), "tokens behind the last row were written"
    guard("out")
    most = max(most, STATE_TOLERANCE[pool.dtype])
    stored = sorted({slot for row in reference_mamba.rows_of(states) for slot in row.stores.values()})
    wrong = error(pool[stored], want_pool[stored], pool_size[stored])
    assert wrong <= most, f"states are wrong by {wrong:.3g}"
    pool[stored] = blank[stored, : pool[0].numel()].unflatten(1, pool.shape[1:])
    now = pool.as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1))
    assert torch.equal(now.view(torch.uint8), blank.view(torch.uint8)), "memory beside the stored slots was written"


STATE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def expected(case: Case, before: list[Any], after: list[Any], sizes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, pool) in float64, or the sums of the |terms| of each."""

    def number(value: Any) -> Any:
        if isinstance(value, SsmTensors) and sizes:
            return value._replace(d=None if value.d is None else value.d.double().abs())
        if not isinstance(value, torch.Tensor):
            return value
        return value.double().abs() if sizes else value.double()

    x, *rest, pool, states = before
    out = torch.full(x.shape, torch.nan, dtype=torch.float64, device=x.device)
    pool = number(pool).clone()
    if case.op is Op.CONV1D:
        given, activate = [number(value) for value in (x, *rest)], after[0]
        reference_mamba.conv1d(*given, pool, states, out, activate and not sizes, torch.float64)
        return out, pool
    dt, b, c, z = rest
    layer, tensors = after
    given = [number(x), dt.double(), number(b), number(c), None if z is None or sizes else z.double()]
    wide = replace(layer, dtype=torch.float64)
    reference_mamba.scan(*given, pool, states, wide, number(tensors), out, torch.float64)
    if sizes and z is not None:
        out *= torch.nn.functional.silu(z.double()).abs()
    return out, pool


def check_copy(kernel: Kernel, case: Case, device: str) -> None:
    """Chains in the order of the list, pairs that copy nothing; every byte of every pool afterwards."""
    from inputs import numbers

    call, normal = case.call, numbers(case)
    shapes = [(3, 40), (4, 16, 16), (2, 5), (300,), (1, 9)][: call.pools]
    wanted = [[5, 0], [0, 3], [-1, 4], [2, -1], [6, 6], [7, 5], [8, 2]][: call.pairs]  # 0 is written, then read
    pairs = torch.tensor(wanted, dtype=torch.int64, device=device).reshape(-1, 2)
    pools, bases = [], []
    for i, shape in enumerate(shapes):
        count = int(np.prod(shape))
        dtype = (case.layer.dtype, torch.float32)[i % 2]
        bases.append(normal(9, count + 24 * call.apart).to(dtype).to(device))
        pools.append(bases[-1][:, :count].unflatten(1, shape))
    if len(pools) > 1:
        pools[1] = pools[1].transpose(1, 2)  # a slot's memory is dense, whatever the order of its dimensions
    want = [base.clone() for base in bases]
    for base, pool in zip(want, pools, strict=True):
        count = pool[0].numel()
        for come, go in wanted:
            if come >= 0 and go >= 0:
                base[go, :count] = base[come, :count]
    kernel.run(pools, pairs)
    for base, right in zip(bases, want, strict=True):
        assert torch.equal(base.view(torch.uint8), right.view(torch.uint8)), "pools differ from what was to be copied"
