"""What a report asks of each kernel: every value of every feature on its own, then many of them in pairs.

A feature is an axis of the contract's cells, with the values that engines ask for. Where a kernel does not take a value
beside the plainest values of the others, the nearest cell that it does take is asked, so a refusal is of the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from portable.conformance import cells, laws
from portable.conformance.cells import AXES, Axes, Case, Cell, case_of, lens_for, longest
from portable.conformance.laws import Law
from portable.conformance.lens import LONG, MORE
from portable.kernel import ATTENTION, Kernel, Op
from portable.platform.target import Target
from portable.sets import short

LAYOUT = "layout of memory"
SCORES = "scores and mask"
CALL = "call"
PAIRS = "in pairs"
GROUPS: Mapping[str, str] = {  # axis -> the group of columns that shows its values
    "dtype": "dtype",
    "heads": "GQA ratio",
    "latent_heads": "GQA ratio",
    "dims": "head dim",
    "ranks": "latent + rope",
    "kv_dtype": "cache dtype",
    "scales": "cache dtype",
    "page_size": "page size",
    "pages": LAYOUT,
    "strided": LAYOUT,
    "same_pool": LAYOUT,
    "joined": LAYOUT,
    "window": SCORES,
    "softcap": SCORES,
    "sinks": SCORES,
    "alibi": SCORES,
    "causal": SCORES,
    "times_scale": SCORES,
    "lens": "lengths",
    "lse": CALL,
    "in_place": CALL,
    "parts": CALL,
    "slots": "slots",
    "step": "steps",
    "state_dtype": "dtype",
    "mamba1": "Mamba-1 shape",
    "mamba2": "Mamba-2 shape",
}
ORDER = (
    "dtype",
    "cache dtype",
    "GQA ratio",
    "head dim",
    "latent + rope",
    "Mamba-2 shape",
    "Mamba-1 shape",
    SCORES,
    "lengths",
    "steps",
    "page size",
    LAYOUT,
    "slots",
    CALL,
    PAIRS,
)
WIDE: Axes = {  # in place of the contract's own, where the report asks for more
    "heads": ((4, 2), (2, 2), (6, 2), (4, 1), (5, 1), (6, 1), (14, 2), (8, 1), (16, 1)),
    "dims": (*((d, d) for d in (64, 40, 80, 96, 112, 128, 192, 256)), (192, 128), (576, 512), (64, 512)),
    "page_size": (16, 1, 8, 32, 64, 128, 256),
    "ranks": ((16, 16), (64, 16), (512, 64)),
    "latent_heads": (4, 1, 6, 16, 128),
}
NAMES: Mapping[str, Callable[[Any], str]] = {  # of the values that do not name themselves
    "heads": lambda pair: str(pair[0] // pair[1]),
    "dims": lambda pair: str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}/{pair[1]}",
    "latent_heads": str,
    "ranks": lambda pair: "K and V" if pair is None else f"{pair[0]} + {pair[1]}",
    "dtype": lambda dtype: short(dtype),
    "kv_dtype": lambda dtype: "as the layer" if dtype is None else short(dtype),
    "state_dtype": lambda dtype: "states as the layer" if dtype is None else f"states {short(dtype)}",
    "scales": lambda scales: {"none": "no scales", "scalar": "one scale", "head": "a scale per head"}[scales],
    "window": lambda window: "no window" if window == (None, None) else f"window {_side(window[0])},{_side(window[1])}",
    "causal": lambda how: {True: "causal", False: "not causal", "layer": "never causal", "mixed": "some causal"}[how],
    "times_scale": lambda times: "default scale" if times == 1 else "another scale",
    "page_size": str,
    "lens": lambda name: name.replace("_", " "),
    "pages": lambda name: name.replace("_", " "),
    "step": str,
    "joined": lambda joined: "one tensor" if joined else "two tensors",
    "slots": lambda name: name.replace("_", " "),
    "parts": lambda count: f"{count} parts",
    "mamba1": lambda shape: "x".join(map(str, shape)),
    "mamba2": lambda shape: "x".join(map(str, shape)),
}
OPTIONAL = frozenset(  # axes whose first value is what a kernel does without the feature
    ("window", "softcap", "sinks", "alibi", "causal", "times_scale", "strided", "same_pool", "joined", "scales")
)
DECLARED: Mapping[str, str] = {  # axis -> what caps call the feature
    "window": "window",
    "softcap": "softcap",
    "sinks": "sinks",
    "alibi": "alibi",
    "causal": "noncausal",
    "lse": "lse",
}
WITH: Mapping[str, Cell] = {  # values of other axes without which an axis says nothing
    "mamba2": {"mamba1": None},
    "joined": {"ranks": (64, 16)},
}
TWO = ("dtype", "dims", "page_size", "pages", "lens", "kv_dtype", "mamba1")  # axes that may change together


@dataclass(frozen=True, slots=True)
class Probe:
    """One cell of the report: a case, or why there is none."""

    group: str
    value: str
    case: Case | None = None
    law: Law = Law.CONTRACT
    reasons: tuple[str, ...] = ()  # for which the kernel refuses
    absent: str = ""  # why it cannot be asked here
    fault: str = ""  # what is wrong before anything runs

    @property
    def runs(self) -> bool:
        """Whether the kernel must be called to know what becomes of it."""
        return self.case is not None and not (self.reasons or self.absent or self.fault)


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is asked of a kernel."""

    pairs: int = 12  # cases that combine features, behind each feature on its own
    full: bool = False  # on a GPU, lengths to 32k as well
    features: tuple[str, ...] = ()  # only these groups or values; none: all

    def holds(self, group: str, value: str) -> bool:
        return not self.features or group in self.features or value in self.features


QUICK, FULL = Scope(), Scope(pairs=40, full=True)


def probes(kernel: Kernel, target: Target, scope: Scope = QUICK) -> Iterator[Probe]:
    """Every cell of a kernel's row; nothing for another device's kernel.

    >>> from portable.backends.reference import KERNELS
    >>> from portable.platform.detect import detect
    >>> [probe.value for probe in probes(KERNELS[1], detect("cpu")) if probe.group == "GQA ratio"]
    ['2', '1', '3', '4', '5', '6', '7', '8', '16']
    """
    if not cells.runs_on(kernel, target):
        return
    op = kernel.caps.op
    axes = wide_axes(kernel, target, scope.full)

    def why(cell: Cell) -> tuple[str, ...] | None:
        case = case_of(op, cell)
        return None if case is None else kernel.why_not(target, case.layer, case.needs())

    base = cells.first(axes, lambda cell: why(cell) == ())
    if base is None:  # a kernel of a few shapes, which it has to declare
        shapes = list(cells.cases(kernel, target, 0))
        if not shapes:
            nothing = why({name: values[0] for name, values in axes.items()}) or ("nothing fits",)
            yield Probe(PAIRS, "any", fault=f"it serves no case of the contract: {'; '.join(nothing)}")
        yield from (Probe(PAIRS, str(number), case) for number, case in enumerate(shapes, 1))
        return
    if "lse" in base and why({**base, "lse": True}) == ():
        base["lse"] = True  # looked at wherever the kernel has one
    for axis, values in axes.items():
        asked = [v for v in single(axis, values) if scope.holds(GROUPS.get(axis, CALL), named(axis, v))]
        made = [_probe(op, axis, value, nearest(axes, base, axis, value, why), why) for value in asked]
        yield from _kept(kernel, axis, made)
    plain = case_of(op, base)
    assert plain is not None
    yield from (probe for probe in of_laws(kernel, target, plain) if scope.holds(CALL, probe.value))
    if scope.holds(PAIRS, PAIRS):
        for number, case in enumerate(cells.cases(kernel, target, scope.pairs), 1):
            yield Probe(PAIRS, str(number), case)


def single(axis: str, values: Sequence[Any]) -> list[Any]:
    """The values of an axis that are looked at on their own."""
    return [value for value in values[axis in OPTIONAL :] if not (axis == "mamba1" and value is None)]


def _side(keys: int | None) -> str:
    return "open" if keys is None else str(keys)


def wide_axes(kernel: Kernel, target: Target, full: bool) -> Axes:
    """The axes of the operation with the report's own values."""
    op = kernel.caps.op
    axes = {name: WIDE.get(name, values) for name, values in AXES[op].items()}
    if op in (Op.CACHE_WRITE, Op.CACHE_GATHER, Op.CACHE_COPY):
        axes["ranks"] = AXES[op]["ranks"]
    if "lens" in axes:
        axes["lens"] = tuple(asked_lens(kernel, target, full))
    return axes


def asked_lens(kernel: Kernel, target: Target, full: bool) -> Iterator[str]:
    """The names of the lengths: an emulator has no time for 4,096 keys, and a CPU none for 32,768."""
    given, gpu = lens_for(kernel), target.device != "cpu"
    yield from given
    yield from () if given == tuple(LONG) else ("holes", "one_2k")
    few = kernel.caps.query_lens.why_not("", longest(MORE["to_4k"]))
    for most, asked in (("4k", not target.emulated), ("32k", full and gpu and kernel.caps.op in ATTENTION)):
        if asked:
            yield from () if few else (f"to_{most}",)
            yield from (f"prompts_to_{most}",) if few or kernel.caps.op is Op.PREFILL else ()


Why = Callable[[Cell], tuple[str, ...] | None]


def beside(axis: str, value: Any) -> Cell:
    """Values of other axes without which one would not show, or not all of it."""
    if axis == "causal":
        return {"lens": "verify"}  # every request has queries, so all count
    if axis == "window" and value[1] not in (None, 0):
        return {"causal": False}  # a causal mask hides the right edge
    if axis == "state_dtype" and value is None:
        return {"dtype": torch.bfloat16}  # float32 is a value of its own
    return {}


def nearest(axes: Axes, base: Cell, axis: str, value: Any, why: Why) -> Cell:
    """The cell closest to `base` with this value that the kernel serves; else the closest at all."""
    wanted = {**base, axis: value, **WITH.get(axis, {})}
    for cell in ({**wanted, **beside(axis, value)}, wanted):
        if why(cell) == ():
            return cell
    others = [name for name in axes if name != axis and name not in WITH.get(axis, {})]
    closest: Cell | None = None
    stuck: set[str] | None = None  # reasons that no change of one other axis takes away: two changes will not either
    for count, names in ((1, others), (2, [name for name in TWO if name in others])):
        for changed in itertools.combinations(names, count):
            for chosen in itertools.product(*(axes[name] for name in changed)):
                cell = {**wanted, **dict(zip(changed, chosen, strict=True))}
                if (reasons := why(cell)) == ():
                    return cell
                if reasons is not None:
                    closest = closest or (wanted if why(wanted) is not None else cell)
                    stuck = set(reasons) if stuck is None else stuck & set(reasons)
        if stuck:
            break
    return closest or wanted


def _probe(op: Op, axis: str, value: Any, cell: Cell, why: Why) -> Probe:
    group, name = GROUPS.get(axis, CALL), named(axis, value)
    case, reasons = case_of(op, cell), why(cell)
    if case is None or reasons is None:
        return Probe(group, name, absent="it does not go with the rest of this operation")
    return Probe(group, name, case, reasons=reasons)


def named(axis: str, value: Any) -> str:
    """What a value is called.

    >>> named("heads", (6, 2)), named("window", (3, None)), named("bias", False)
    ('3', 'window 3,open', 'no bias')
    """
    if axis in NAMES:
        return NAMES[axis](value)
    word = axis.replace("_", " ")
    return {True: word, False: f"no {word}"}[value] if isinstance(value, bool) else f"{word} {value}"


def _kept(kernel: Kernel, axis: str, made: list[Probe]) -> list[Probe]:
    """The probes of an axis; where a kernel declares the feature and serves no value of it, that is its fault."""
    feature = DECLARED.get(axis)
    if feature not in kernel.caps.features or not made or any(not probe.reasons for probe in made):
        return made
    why = f"it declares {feature}, and refuses every case of it: {'; '.join(made[0].reasons)}"
    return [replace(probe, fault=why) for probe in made]


def of_laws(kernel: Kernel, target: Target, case: Case) -> Iterator[Probe]:
    """A cell for each law that may be asked of the operation."""
    for law in Law:
        if law is not Law.CONTRACT:
            if (found := laws.asked(law, kernel, case, target)) is None:
                continue
            if isinstance(found, str):
                yield Probe(CALL, str(law), law=law, absent=found)
            else:
                yield Probe(CALL, str(law), found[0], law, found[1])
