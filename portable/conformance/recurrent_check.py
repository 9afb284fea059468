"""The contract of recurrent layers: one check of outputs and of every slot of the pools.

An error is |got - want| / (1 + size), and size the sum of the |terms| of a result. What is not data is NaN: slots that
nobody starts from (those of requests without a state as well), tokens behind the last row, gaps of strided views.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from portable.backends import reference_mamba
from portable.conformance import recurrent_faults
from portable.conformance.cells import Case
from portable.conformance.inputs import guarded, numbers, seed_of, strided, unchanged
from portable.conformance.measure import NOT_ITS_OWN, STATE_TOLERANCE, Departure, require, tolerance, within
from portable.conformance.move_faults import explaining, memory_of, same, states_wrongly
from portable.conformance.recurrent import BLOCK, PADDING, states_of
from portable.kernel import Kernel, Op
from portable.states import SsmTensors


def pool_of(shape: tuple[int, ...], slots: int, live: list[int], case: Case, device: str) -> torch.Tensor:
    """NaN but for the live slots; with `strided` the slots lie apart."""
    dtype, normal = case.layer.kv_dtype, numbers(case, 1)
    base = torch.full((slots, int(np.prod(shape)) + 16 * case.call.strided), torch.nan, dtype=dtype, device=device)
    pool: torch.Tensor = base[:, : int(np.prod(shape))].unflatten(1, shape)
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
    layer, call, normal = case.layer, case.call, numbers(case)
    states, slots, live = states_of(call, layer.chunk or BLOCK, device, seed_of(case))
    tokens = states.tokens.stop

    def rows(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = scale * normal(tokens + PADDING, *shape)
        made[tokens:] = torch.nan
        return strided(made.to(layer.dtype), call.strided, device)

    def weights(*shape: int) -> torch.Tensor:
        made: torch.Tensor = normal(*shape).to(layer.dtype)
        return made.to(device)

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
    stored = sorted({slot for row in reference_mamba.rows_of(states) for slot in row.stores.values()})
    mosts = most, max(most, STATE_TOLERANCE[pool.dtype])
    old = blank[:, : pool[0].numel()].unflatten(1, pool.shape[1:])
    try:
        within("out", out[:tokens], want[:tokens], most, size[:tokens])
        within("a state", pool[stored], want_pool[stored], mosts[1], pool_size[stored])
    except Departure as departure:

        def again(before: list[Any], after: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
            out, states = expected(case, before, after)
            return out[:tokens], states[stored]

        asked = [old if value is pool else value for value in before], after
        found = out[:tokens], pool[stored]
        sizes = size[:tokens], pool_size[stored]
        kinds = recurrent_faults.kinds(case, asked, again, found, old[stored], sizes, mosts)
        raise Departure(departure.args[0], *kinds) from None
    require(out[tokens:].isnan().all(), "tokens behind the last row were written", "padding written")
    guard("out")
    # as bytes: a GPU's deterministic writes by index give a NaN other bits
    pool.view(torch.uint8)[stored] = old.view(torch.uint8)[stored]
    now = pool.as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1))
    same_bytes = torch.equal(now.view(torch.uint8), blank.view(torch.uint8))
    require(same_bytes, "memory beside the stored slots was written", NOT_ITS_OWN)


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
        weight, bias = rest
        silu = after[0] and not sizes
        reference_mamba.conv1d(number(x), number(weight), number(bias), pool, states, out, silu, torch.float64)
        return out, pool
    dt, b, c, z = rest
    layer, tensors = after
    wide, gate = replace(layer, dtype=torch.float64), None if z is None or sizes else z.double()
    given = number(x), dt.double(), number(b), number(c), gate
    reference_mamba.scan(*given, pool, states, wide, number(tensors), out, torch.float64)
    if sizes and z is not None:
        out *= torch.nn.functional.silu(z.double()).abs()
    return out, pool


def check_copy(kernel: Kernel, case: Case, device: str) -> None:
    """Chains in the order of the list, pairs that copy nothing, groups without a pool; every byte afterwards.

    Each group has pairs of its own; the last row of the list belongs to none.
    """
    call, normal = case.call, numbers(case)
    shapes = [(3, 40), (4, 16, 16), (2, 5), (300,), (1, 9)][: call.pools]
    listed = [[5, 0], [0, 3], [-1, 4], [2, -1], [6, 6], [7, 5], [8, 2]][: call.pairs]  # 0 is written, then read
    wanted = [[(_turned(come, g), _turned(go, g)) for come, go in listed] for g in range(call.groups)]
    pairs = torch.tensor([*chain(*wanted), (1, 8)], dtype=torch.int64, device=device)
    cu_copies = torch.arange(call.groups + 1, dtype=torch.int32, device=device) * len(listed)
    pools, bases = [], []
    for i, shape in enumerate(shapes):
        count = int(np.prod(shape))
        dtype = (case.layer.dtype, torch.float32)[i % 2]
        bases.append(normal(9, count + 24 * call.apart).to(dtype).to(device))
        pools.append(bases[-1][:, :count].unflatten(1, shape))
    if len(pools) > 1:
        pools[1] = pools[1].transpose(1, 2)  # a slot's memory is dense, whatever the order of its dimensions
    want = [base.clone() for base in bases]
    for i, (base, pool) in enumerate(zip(want, pools, strict=True)):
        count = pool[0].numel()
        for come, go in wanted[i % call.groups]:
            if come >= 0 and go >= 0:
                base[go, :count] = base[come, :count]
    before = memory_of(*bases)
    kernel.run([pools[g :: call.groups] for g in range(call.groups)], pairs, cu_copies)
    if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(bases, want, strict=True)):
        return
    after = memory_of(*bases)
    kinds = explaining(states_wrongly(pools, before, wanted, [(1, 8)]), lambda wrong: same(wrong, after))
    raise Departure("pools differ from what was to be copied", *kinds)


def _turned(slot: int, by: int) -> int:
    """Another of the 9 slots; a negative one stays."""
    return slot if slot < 0 else (slot + by) % 9
