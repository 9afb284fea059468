"""Which cases the contract asks of a kernel: a pairwise set over everything that it accepts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from portable.conformance import recurrent
from portable.conformance.lens import LENS, LONG, NAMED, Lens
from portable.kernel import ATTENTION, PAGES, GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, default_scale
from portable.platform.target import Target
from portable.ragged import next_power_of_2

Cell = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
CALLED = ("page_size", "scales", "lse", "strided", "slots", "in_place", "parts", "joined", "same_pool")
LATENT_PAGES = ("nhd", "interleaved")
PACKED = ("k_packed", "shuffled")  # values of `pages` that are layouts of their own; the others are strided views

NUMBERS: Axes = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "heads": ((4, 2), (3, 3), (6, 2), (4, 1), (16, 2), (5, 1)),  # query heads, KV heads
}
DIMS: Axes = {"dims": ((64, 64), (16, 16), (128, 128), (80, 80), (192, 128), (32, 128), (9, 5), (256, 256))}
LATENT: Axes = {"ranks": ((16, 16), (64, 16), (24, 8)), "latent_heads": (4, 1, 16, 6)}  # rank, rope
CACHE: Axes = {
    "page_size": (16, 1, 3, 64, 256),
    "pages": ("nhd", "hnd", "interleaved", "k_first", "k_packed", "shuffled"),
    "kv_dtype": (None, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.bfloat16),
    "scales": ("none", "scalar", "head"),  # of fp8
}
COPIED: Axes = {name: CACHE[name] for name in ("page_size", "pages", "kv_dtype")}
ONE_TENSOR = (None, (64, 16), (24, 8))  # of MLA, for the operations of a cache; None: K and V
MASK: Axes = {"causal": (True, False, "layer", "mixed"), "lens": tuple(LENS)}
FEATURES: Axes = {
    "window": ((None, None), (3, 0), (2, 1), (None, 2), (0, 0), (20, None)),
    "softcap": (None, 1.0),
    "sinks": (False, True),
    "alibi": (False, True),
}
CALL: Axes = {"lse": (False, True), "strided": (False, True), "times_scale": (1.0, 1.7)}

AXES: Mapping[Op, Axes] = {
    Op.PREFILL: {**FEATURES, **CALL, **MASK, **DIMS, **NUMBERS},
    Op.PAGED: {**FEATURES, **CALL, **MASK, **CACHE, **DIMS, **NUMBERS},
    Op.MLA_DECODE: {
        **CALL,
        **MASK,
        "dtype": NUMBERS["dtype"],
        **LATENT,
        **CACHE,
        "pages": LATENT_PAGES,
        "scales": ("none", "scalar"),
    },
    Op.MERGE: {
        "sinks": (False, True),
        "strided": (False, True),
        "in_place": (False, True),
        "parts": (2, 3, 9),
        **DIMS,
        **NUMBERS,
    },
    Op.CACHE_WRITE: {
        "slots": ("all", "int32", "short", "holes", "nothing", "past_the_end"),
        "strided": (False, True),
        "ranks": ONE_TENSOR,
        "joined": (True, False),
        **CACHE,
        **DIMS,
        **NUMBERS,
    },
    Op.CACHE_GATHER: {"lens": MASK["lens"], "ranks": ONE_TENSOR, **CACHE, **DIMS, **NUMBERS},
    Op.CACHE_COPY: {"same_pool": (False, True), "ranks": ONE_TENSOR, **COPIED, **DIMS, **NUMBERS},
    Op.REFRESH: {"slots": ("all", "holes", "past_the_end", "nothing"), "parts": (13, 1, 700)},  # entries
    Op.ADVANCE: {  # parts: requests; lse: positions are wanted
        "parts": (13, 1, 700),
        "page_size": (16, 1, 3),
        "lse": (True, False),
        "strided": (False, True),
    },
    Op.COLLECT: {  # parts: rows; page_size: cells of a row; lse: tokens that count; same_pool: of a wide table
        "slots": ("all", "holes", "past_the_end"),
        "parts": (13, 1, 700),
        "page_size": (16, 1, 3),
        "lse": (True, False),
        "strided": (False, True),
        "same_pool": (False, True),
    },
    **recurrent.AXES,
}
# in place of the shapes of an operation, for kernels of some larger ones alone: vendors' MLA
LARGE: Mapping[Op, Axes] = {Op.MLA_DECODE: {"ranks": ((512, 64),), "latent_heads": (16, 128)}}
STEPS = (Op.REFRESH, Op.ADVANCE, Op.COLLECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one operation; the data follow from it."""

    op: Op
    layer: Layer
    lens: Lens = LENS["extend"]
    page_size: int | None = None
    pages: str = "nhd"
    scales: str = "none"
    causal: bool | tuple[bool, ...] = True
    lse: bool = True
    strided: bool = False
    slots: str = "all"
    in_place: bool = False
    parts: int = 2
    joined: bool = True  # of MLA: both parts of a row come in one tensor
    same_pool: bool = False
    call: recurrent.Call = recurrent.PLAIN  # of recurrent layers

    def needs(self, graph: GraphLevel = GraphLevel.NEVER, num_pages: int | None = None) -> Needs:
        return Needs(
            causal=self.causal is True,
            page_size=self.page_size,
            query_len=longest(self.lens),
            seq_len=next_power_of_2(max(1, *(s for _, s in self.lens))),
            lse=self.lse,
            graph=graph,
            num_pages=num_pages,
        )


def longest(lens: Lens) -> int:
    """The bucket of the longest query."""
    return next_power_of_2(max(1, *(q for q, _ in lens)))


def lens_for(kernel: Kernel) -> tuple[str, ...]:
    """The lengths that are asked of a kernel: `LONG` where it attends and takes none of those with fewer queries."""
    if kernel.caps.op not in ATTENTION:
        return tuple(LENS)
    few = [lens for name, lens in LENS.items() if name not in LONG]
    if all(kernel.caps.query_lens.why_not("", longest(lens)) for lens in few):
        return tuple(LONG)
    return (*LENS, "many_prompts") if kernel.caps.query_lens.why_not("", longest(LENS["many"])) else tuple(LENS)


def case_of(op: Op, cell: Cell) -> Case | None:
    """The case of a cell; None where its values exclude each other: scales of a wide type, a page too small to pack."""
    return _case_of(op, tuple(cell.items()))


@lru_cache(1 << 16)  # kernels are asked for the same cells, up to 20,000 of an operation
def _case_of(op: Op, values: tuple[tuple[str, Any], ...]) -> Case | None:
    cell = dict(values)
    if op in recurrent.AXES:
        return Case(op=op, layer=recurrent.layer_of(op, cell), call=recurrent.call_of(cell))
    if op in STEPS:
        return Case(op=op, layer=Layer.gqa(num_heads=1, head_dim=8), **cell)
    kv_dtype = cell.get("kv_dtype") or cell["dtype"]
    pages = cell.get("pages", "nhd")
    types = {"dtype": cell["dtype"], "kv_dtype": kv_dtype}
    if kv_dtype.itemsize > 1 and cell.get("scales", "none") != "none":
        return None
    if cell.get("ranks"):
        if pages not in LATENT_PAGES or cell.get("scales") == "head":
            return None
        rank, rope = cell["ranks"]
        scale = cell.get("times_scale", 1.0) * default_scale(rank + rope)
        heads = cell.get("latent_heads", 4)
        layer = Layer.mla(num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, scale=scale, **types)
    else:
        (heads, kv_heads), (qk_dim, v_dim) = cell["heads"], cell["dims"]
        x = 16 // kv_dtype.itemsize
        if (pages in PACKED and qk_dim % x) or (pages == "shuffled" and cell["page_size"] % x):
            return None
        layer = Layer.gqa(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=qk_dim,
            v_head_dim=v_dim,
            scale=cell.get("times_scale", 1.0) * default_scale(qk_dim),
            window=cell.get("window", (None, None)),
            softcap=cell.get("softcap"),
            sinks=cell.get("sinks", False),
            alibi=cell.get("alibi", False),
            cache_layout=pages if pages in PACKED else "strided",
            **types,
        )
    lens = NAMED[cell.get("lens", "extend")]
    causal = cell.get("causal", True)
    if causal == "layer":
        layer, causal = replace(layer, causal=False), False
    elif causal == "mixed":
        causal = tuple(r % 2 == 0 for r in range(len(lens)))
    rest = {name: cell[name] for name in CALLED if name in cell}
    return Case(op=op, layer=layer, lens=lens, causal=causal, pages=pages, **rest)


def pairwise(axes: Axes, fits: Callable[[Cell], bool], most: int = 40) -> list[Cell]:
    """At most `most` cells that fit, chosen so that every two values of two axes meet in one where they can.

    >>> cells = pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, lambda cell: cell["a"] + cell["b"] < 2)
    >>> sorted((cell["a"], cell["b"], cell["c"]) for cell in cells)
    [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]
    """
    start = first(axes, fits)
    if start is None:
        return []
    names = list(axes)
    todo = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    cells: list[Cell] = []
    while todo and len(cells) < most:
        (a, i), (b, j) = next(iter(todo))
        chosen = {a: i, b: j}
        cell = {**start, a: axes[a][i], b: axes[b][j]}
        if not fits(cell):  # the two exclude each other beside the starting values
            del todo[(a, i), (b, j)]
            continue
        for name in sorted((n for n in names if n not in chosen), key=lambda name: -len(axes[name])):
            gains = {
                n: sum(_pair(names, (name, n), other) in todo for other in chosen.items())
                for n, value in enumerate(axes[name])
                if fits({**cell, name: value})
            }
            chosen[name] = max(gains, key=lambda n: gains[n])
            cell[name] = axes[name][chosen[name]]
        for pair in itertools.combinations(((name, chosen[name]) for name in names), 2):
            todo.pop(pair, None)
        cells.append(cell)
    return cells


def _pair(names: list[str], one: tuple[str, int], other: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)


def first(axes: Axes, fits: Callable[[Cell], bool]) -> Cell | None:
    """The first cell that fits; lengths vary first, then the axes of the end, so features stay off."""
    names = sorted(axes, key="lens".__eq__)
    cells = (dict(zip(names, values, strict=True)) for values in itertools.product(*(axes[name] for name in names)))
    found = next((cell for cell in itertools.islice(cells, 20_000) if fits(cell)), None)
    return found or next(filter(fits, _nearest(axes)), None)


def _nearest(axes: Axes) -> Iterator[Cell]:
    """The cells that differ from the first values in up to three axes, the closest first: for kernels of one layout."""
    plain = {name: values[0] for name, values in axes.items()}
    for changed in range(1, 4):
        for names in itertools.combinations(axes, changed):
            for values in itertools.product(*(axes[name][1:] for name in names)):
                yield {**plain, **dict(zip(names, values, strict=True))}


def runs_on(kernel: Kernel, target: Target) -> bool:
    """Whether the kernel is for this kind of device at all."""
    caps = kernel.caps
    return target.vendor in caps.vendors and target.arch in caps.archs and (caps.emulated or not target.emulated)


def cases(kernel: Kernel, target: Target, most: int = 40) -> Iterator[Case]:
    """What the kernel must get right on the target: a pairwise set, then the shapes that it declares itself."""
    op = kernel.caps.op
    if not runs_on(kernel, target):
        return

    def fits(cell: Cell) -> bool:
        case = case_of(op, cell)
        return case is not None and not kernel.why_not(target, case.layer, case.needs())

    axes = AXES[op]
    if op in ATTENTION:
        axes = {**axes, "lens": lens_for(kernel)}
    cells = pairwise(axes, fits, most) or pairwise({**axes, **LARGE.get(op, {})}, fits, most)
    yield from filter(None, (case_of(op, cell) for cell in cells))
    page_size = next((cell["page_size"] for cell in cells if "page_size" in cell), None) if op in PAGES else None
    for shape in kernel.caps.test_shapes:
        if op in recurrent.AXES:
            yield from recurrent.shaped(kernel, target, shape)
            continue
        layer = (Layer.mla if op is Op.MLA_DECODE else Layer.gqa)(**shape)
        for lens in ("decode", "extend") if op in ATTENTION else ("extend",):
            case = Case(op=op, layer=layer, lens=LENS[lens], page_size=page_size, lse=False)
            if not kernel.why_not(target, layer, case.needs()):
                yield case


def refused(kernel: Kernel, target: Target) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Cases one value away from those that the kernel serves, which it refuses, with its reasons."""
    op = kernel.caps.op
    base = {name: values[0] for name, values in AXES[op].items()}
    if runs_on(kernel, target):
        served = first(
            AXES[op], lambda cell: (case := case_of(op, cell)) is not None and not _why(kernel, target, case)
        )
        base = served or base
    for name, values in AXES[op].items():
        for value in values:
            case = case_of(op, {**base, name: value})
            if case is not None and (reasons := _why(kernel, target, case)):
                yield case, reasons


def _why(kernel: Kernel, target: Target, case: Case) -> tuple[str, ...]:
    return kernel.why_not(target, case.layer, case.needs())
