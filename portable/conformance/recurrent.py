"""The cells of recurrent layers, and what a kernel sees of their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable.chunks import aligned_chunks
from portable.kernel import Kernel, Op
from portable.layer import Layer
from portable.ragged import cdiv
from portable.states import DecodeStates, PrefillStates

if TYPE_CHECKING:
    from portable.conformance.cells import Axes, Case, Cell
    from portable.platform.target import Target

CONV_BLOCK = 8  # tokens of a block of the convolution's plan
PADDING = 3  # tokens behind the last row
# (new tokens, context) of each request. Contexts end inside of chunks and at their ends; pieces are shorter than a
# convolution's window; two rows have no tokens. One row, and more than 16, are where strides and grids go wrong.
STEPS: Mapping[str, Sequence[tuple[int, int]]] = {
    "prefill": ((5, 0), (0, 0), (21, 0), (1, 0), (2, 0)),
    "chunks": ((1, 3), (2, 17), (0, 9), (19, 13), (3, 16), (37, 0)),
    "blocks": ((16, 16), (40, 5), (3, 14), (1, 15), (7, 0)),
    "long": ((150, 30), (70, 0)),
    "decode": ((1, 4), (1, 9), (1, 1), (1, 300)),
    "verify": ((3, 4), (1, 9), (3, 1), (2, 300)),
    "padded": ((1, 4), (2, 9), (0, 0), (0, 0)),
    "one": ((21, 7),),
    "many": tuple((1 + r % 4, 1 + r) for r in range(20)),
    "one decode": ((1, 9),),
    "many decodes": tuple((1, 1 + r) for r in range(20)),
}
PREFILLS = ("prefill", "chunks", "blocks", "long", "one", "many")
DECODES = ("decode", "verify", "padded", "one decode", "many decodes")
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
        "channels": (40, 16, 9, 300),
        "step": tuple(STEPS),  # behind the first axis, with whose values 40 cells do not pair all of these
        "conv_width": (4, 2, 3),
        "bias": (True, False),
        "activate": (True, False),
        **CALL,
    },
    Op.SSD: {"step": PREFILLS, **SCAN, **CALL},
    Op.STATE_UPDATE: {"step": DECODES, **SCAN, **CALL},
    Op.STATE_COPY: {
        "pools": (2, 1, 5),
        "groups": (1, 2, 4),
        "pairs": (7, 1, 0),
        "apart": (False, True),
        "dtype": DTYPES,
    },
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
    "groups",
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
    groups: int = 1
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
    from portable.conformance.cells import Case

    layer = (Layer.mamba2 if "num_heads" in shape else Layer.mamba1)(**shape)
    for step in AXES[kernel.caps.op]["step"][:2]:
        case = Case(op=kernel.caps.op, layer=layer, call=Call(step=step))
        if not kernel.why_not(target, layer, case.needs()):
            yield case
