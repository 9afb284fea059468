"""Faults of copies, of a step's metadata and of recurrent layers make the kit fail, with a message that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_conformance_faults import CPU, names_it, small

from portable.backends import reference, reference_mamba, reference_steps
from portable.conformance.cells import STEPS
from portable.conformance.features import Scope
from portable.conformance.outcomes import FAILED, row
from portable.kernel import Kernel, Op
from portable.states import PrefillStates

RIGHT = {
    kernel.caps.op: kernel
    for kernel in (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
    if kernel.caps.op in (Op.CACHE_COPY, Op.STATE_COPY, *STEPS, Op.CONV1D, Op.SSD, Op.STATE_UPDATE)
}


def faulty(op: Op, run: Callable[..., Any]) -> Kernel:
    if op is Op.CACHE_COPY:
        return small(op, run)
    few = {} if op in STEPS else {"dtypes": {torch.float32}}
    return replace(RIGHT[op], caps=replace(RIGHT[op].caps, **few), run=run)


def pages(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., None]:
    """A copy of other pairs; the change gets the pairs and the number of pages."""
    return lambda source, target, pairs, layer: RIGHT[Op.CACHE_COPY].run(
        source, target, change(pairs, len(target.k)), layer
    )


def k_alone(source, target, pairs, layer):
    for come, go in pairs.tolist():
        if come >= 0 and go >= 0:
            target.k[go] = source.k[come]


def slots(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    return lambda pools, copies, cu: RIGHT[Op.STATE_COPY].run(pools, *change(copies, cu))


def gathered_first(pools, copies, cu):
    pairs = copies.tolist()
    for group, (first, end) in zip(pools, pairwise(cu.tolist()), strict=True):
        for pool in group:
            old = pool.clone()
            for come, go in pairs[first:end]:
                if come >= 0 and go >= 0:
                    pool[go] = old[come]


def swapped(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.flip(1)


def to_the_end(copies, cu):
    return copies, torch.cat([cu[:-1], torch.tensor([len(copies)], dtype=torch.int32)])


def first_group(copies, cu):
    size = int(cu[1])
    return copies[:size].repeat(len(cu) - 1, 1), cu


def cells(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]):
    return lambda index, given, table: RIGHT[Op.REFRESH].run(*change(index, given, table), table)


def without_holes(index, given, table):
    kept = index[index >= 0]
    return kept, given[: len(kept)]


def advanced(change: Callable[..., None]) -> Callable[..., None]:
    """A right step, spoilt: the change gets the lengths before and what the kernel got."""

    def run(lens, table, slots, positions, page_size, most):
        before, held = lens.clone(), slots.clone()
        RIGHT[Op.ADVANCE].run(lens, table, slots, positions, page_size, most)
        change(before, held, lens, table, slots, positions, page_size, most)

    return run


def in_32_bits(before, held, lens, table, slots, *rest):
    slots.copy_(slots.int().long())


def counts_empty(before, held, lens, table, slots, positions, page_size, most):
    empty = before == 0
    lens[empty] = 1
    slots[empty] = table[empty, 0].long() * page_size
    if positions is not None:
        positions[empty] = 0


def keeps_slots(before, held, lens, table, slots, *rest):
    slots.copy_(torch.where(slots < 0, held, slots))


def new_positions(before, held, lens, table, slots, positions, *rest):
    if positions is not None:
        positions.copy_(torch.where(lens != before, lens.long(), positions))


NAMES = ("table", "rows", "first", "cells", "pad", "accepted", "most", "kept", "copies")


def collected(**changes: Callable[[dict[str, Any]], Any]) -> Callable[..., None]:
    """A collection of other arguments; a change is a function of the right ones."""

    def run(*args):
        given = dict(zip(NAMES, args, strict=True))
        RIGHT[Op.COLLECT].run(**{**given, **{name: change(given) for name, change in changes.items()}})

    return run


def spoilt(change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """A right collection, and what a change makes of it."""

    def run(*args):
        RIGHT[Op.COLLECT].run(*args)
        change(dict(zip(NAMES, args, strict=True)))

    return run


def rows_in(given):
    return torch.arange(len(given["cells"])) if given["rows"] is None else given["rows"]


def _moved(rows, given, by):
    return torch.where(rows < 0, rows, (rows + by) % len(given["table"]))


def _own(given):
    return torch.where(rows_in(given) < 0, -1, torch.arange(len(given["cells"])))


def mirrors(given):
    given["cells"].copy_(given["cells"].flip(1))


def forgets_pads(given):
    given["cells"][rows_in(given) < 0] = -5


def pads_with_zero(given):
    given["cells"][given["cells"] == given["pad"]] = 0


def first_of_the_row(given):
    return None if given["first"] is None else given["first"][rows_in(given).clamp(0) % len(given["first"])]


def unbounded(given):
    if given["kept"] is not None:
        given["kept"].copy_(given["accepted"])


def clears_lists(given):
    for _, target in given["copies"]:
        target.zero_()


def writes_on(given):
    cells = given["cells"]
    if cells.stride(0) > cells.shape[1]:
        cells.as_strided((len(cells),), cells.stride()[:1], cells.shape[1]).zero_()


def stateless(states):
    if isinstance(states, PrefillStates):
        return replace(states, has_initial=torch.zeros_like(states.has_initial))
    return replace(states, initial_indices=torch.full_like(states.initial_indices, states.pad_slot))


def trusting(states):
    if isinstance(states, PrefillStates):
        return replace(states, has_initial=torch.ones_like(states.has_initial))
    return states


def conv(**changes: Callable[[Any], Any]) -> Callable[..., None]:
    """A convolution of other arguments; a change is a function of the right one."""
    names = ("x", "weight", "bias", "pool", "states", "out", "activate")

    def run(*args):
        given = dict(zip(names, args, strict=True))
        made = {name: None if given[name] is None else change(given[name]) for name, change in changes.items()}
        RIGHT[Op.CONV1D].run(**{**given, **made})

    return run


def scan(tensors: Callable[[Any], Any] = lambda given: given, **changes: Callable[[Any], Any]) -> Callable[..., None]:
    names = ("x", "dt", "b", "c", "z", "pool", "states", "layer", "tensors", "out")

    def run(*args):
        given = dict(zip(names, args, strict=True))
        made = {name: None if given[name] is None else change(given[name]) for name, change in changes.items()}
        RIGHT[Op.SSD].run(**{**given, **made, "tensors": tensors(given["tensors"])})

    return run


def into_a_copy(right: Kernel, at: int) -> Callable[..., None]:
    """States go to memory that is thrown away."""
    return lambda *args: right.run(*args[:at], args[at].clone(), *args[at + 1 :])


def swapped_b_and_c(x, dt, b, c, *rest):
    RIGHT[Op.SSD].run(x, dt, c, b, *rest)


def heads_in_turn(x, dt, b, c, z, pool, *rest):
    of = torch.arange(pool.shape[1]) % b.shape[1]
    RIGHT[Op.SSD].run(x, dt, b[:, of], c[:, of], z, pool, *rest)


def gated_early(x, dt, b, c, z, pool, states, layer, tensors, out):
    RIGHT[Op.SSD].run(x, dt, b, c, z, pool, states, layer, tensors._replace(d=None), out)
    if tensors.d is not None:
        tokens = int(states.cu_seqlens_q[-1])
        out[:tokens] += tensors.d[:, None] * x[:tokens]


FAULTS: tuple[tuple[str, Op, Callable[..., Any]], ...] = (
    ("nothing copied", Op.CACHE_COPY, lambda *args: None),
    ("-1 taken for the last one", Op.CACHE_COPY, pages(lambda pairs, count: pairs % count)),
    ("from and to swapped", Op.CACHE_COPY, pages(lambda pairs, count: swapped(pairs))),
    ("the last pair left out", Op.CACHE_COPY, pages(lambda pairs, count: pairs[:3])),
    ("V not copied", Op.CACHE_COPY, k_alone),
    ("reads what was there before the list", Op.STATE_COPY, gathered_first),
    ("from and to swapped", Op.STATE_COPY, slots(lambda copies, cu: (swapped(copies), cu))),
    ("-1 taken for the last one", Op.STATE_COPY, slots(lambda copies, cu: (copies % 9, cu))),
    ("pairs of no group copied", Op.STATE_COPY, slots(to_the_end)),
    ("pairs of the first group for all", Op.STATE_COPY, slots(first_group)),
    ("place -1 written", Op.REFRESH, cells(lambda at, new, table: (torch.where(at < 0, at + len(table), at), new))),
    ("place past the end wraps", Op.REFRESH, cells(lambda at, new, table: (torch.where(at < 0, at, at % 1500), new))),
    ("holes closed up", Op.REFRESH, cells(without_holes)),
    ("cells not written", Op.REFRESH, lambda *args: None),
    ("slot in 32 bits", Op.ADVANCE, advanced(in_32_bits)),
    ("requests without keys advanced", Op.ADVANCE, advanced(counts_empty)),
    ("the slot of a request that stays is kept", Op.ADVANCE, advanced(keeps_slots)),
    ("positions one too far", Op.ADVANCE, advanced(new_positions)),
    ("nothing collected", Op.COLLECT, lambda *args: None),
    ("wrong row collected: one too far", Op.COLLECT, collected(rows=lambda g: _moved(rows_in(g), g, 1))),
    ("wrong row collected: one before", Op.COLLECT, collected(rows=lambda g: _moved(rows_in(g), g, -1))),
    ("wrong row collected: that of its own place", Op.COLLECT, collected(rows=_own)),
    ("row -1 taken for the last one", Op.COLLECT, collected(rows=lambda g: rows_in(g) % len(g["table"]))),
    ("row -1 taken for the first one", Op.COLLECT, collected(rows=lambda g: rows_in(g).clamp(0))),
    ("tokens of a row mixed up: in reverse order", Op.COLLECT, spoilt(mirrors)),
    ("tokens of a row mixed up: first column not read", Op.COLLECT, collected(first=lambda g: None)),
    ("tokens of a row mixed up: first column of another row", Op.COLLECT, collected(first=first_of_the_row)),
    ("accepted tokens not kept", Op.COLLECT, collected(kept=lambda g: None)),
    ("accepted tokens out of bounds are kept", Op.COLLECT, spoilt(unbounded)),
    ("pad row not written", Op.COLLECT, spoilt(forgets_pads)),
    ("another pad value", Op.COLLECT, spoilt(pads_with_zero)),
    ("lists not copied", Op.COLLECT, spoilt(clears_lists)),
    ("memory written that is not its own", Op.COLLECT, spoilt(writes_on)),
    ("bias dropped", Op.CONV1D, conv(bias=lambda bias: None)),
    ("activation dropped", Op.CONV1D, conv(activate=lambda active: False)),
    ("weights in reverse order", Op.CONV1D, conv(weight=lambda weight: weight.flip(1))),
    ("state not read", Op.CONV1D, conv(states=stateless)),
    ("initial slot read where there is no state", Op.CONV1D, conv(states=trusting)),
    ("state not stored", Op.CONV1D, into_a_copy(RIGHT[Op.CONV1D], 3)),
    ("state not read", Op.SSD, scan(states=stateless)),
    ("state not stored", Op.STATE_UPDATE, into_a_copy(RIGHT[Op.STATE_UPDATE], 5)),
    ("gate dropped", Op.SSD, scan(z=lambda gate: None)),
    ("D dropped", Op.SSD, scan(lambda tensors: tensors._replace(d=None))),
    ("D beside the gate", Op.STATE_UPDATE, gated_early),
    ("dt bias dropped", Op.STATE_UPDATE, scan(lambda tensors: tensors._replace(dt_bias=None))),
    ("softplus dropped", Op.SSD, scan(lambda tensors: tensors._replace(dt_softplus=False))),
    ("dt limit dropped", Op.SSD, scan(lambda tensors: tensors._replace(dt_limit=(0.0, float("inf"))))),
    ("decay's sign", Op.STATE_UPDATE, scan(lambda tensors: tensors._replace(a=-tensors.a))),
    ("B and C swapped", Op.SSD, swapped_b_and_c),
    ("wrong group map", Op.SSD, heads_in_turn),
    ("out not written", Op.STATE_UPDATE, scan(out=torch.empty_like)),
)


@pytest.mark.parametrize(("kind", "op", "run"), FAULTS, ids=[f"{op}-{kind}" for kind, op, _ in FAULTS])
def test_a_faulty_kernel_fails_and_the_fault_is_named(kind, op, run):
    names_it(row(faulty(op, run), CPU, Scope(pairs=0)), kind)


@pytest.mark.parametrize("op", RIGHT)
def test_the_same_kernels_without_a_fault_pass(op):
    found = row(faulty(op, RIGHT[op].run), CPU, Scope(pairs=0))
    assert found.status == "parity" and not found.count(FAILED)
