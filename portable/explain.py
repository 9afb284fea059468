"""Which kernel serves each operation of a layer, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.utils import canonicalize_name

from portable.kernel import GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.levels import Level, effective, levels
from portable.packages import Package
from portable.select import Choice, Reasons, Request, Verdict, parse_requested, select, survey
from portable.sets import short

if TYPE_CHECKING:
    from portable.platform.target import Target

Case = tuple[Op, str, Needs]  # the operation, the phases that need it, and the need


@dataclass(frozen=True, slots=True)
class Row:
    """One operation for one need: the choice, or the candidates' reasons when nothing can serve."""

    op: Op
    phase: str  # "decode", "extend", ...; empty for an operation of every phase
    needs: Needs
    choice: Choice | None
    rejected: tuple[tuple[str, Reasons], ...]
    how: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every choice for one layer on one target; `str` is the text for people, `data` that for programs."""

    target: Target
    layer: Layer
    page_size: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    elsewhere: frozenset[str] = frozenset()  # kernels for other vendors' devices: one line of the text for all

    @property
    def level(self) -> GraphLevel:
        """The steps that can be captured: the least that the kernels declare which are chosen for a graph."""
        return effective(self.levels)

    @property
    def complete(self) -> bool:
        """Whether every operation has a kernel."""
        return all(row.choice for row in self.rows)

    def data(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        layer = {key: short(v) if isinstance(v, torch.dtype) else v for key, v in asdict(self.layer).items()}
        rows = [
            {
                "op": str(row.op),
                "phase": row.phase,
                "needs": {**row.needs._asdict(), "graph": row.needs.graph.name},
                "kernel": row.choice and row.choice.kernel.name,
                "provider": row.choice and row.choice.kernel.caps.provider,
                "how": row.how,
                "alternatives": list(row.choice.alternatives) if row.choice else [],
                "rejected": [{"kernel": name, "reasons": list(reasons)} for name, reasons in row.rejected],
            }
            for row in self.rows
        ]
        levels = [{"level": at.level.name, "kernels": list(at.kernels), "limit": at.limit} for at in self.levels]
        graphs = {"level": self.level.name, "levels": levels}
        return {"layer": layer, "page_size": self.page_size, "rows": rows, "graphs": graphs, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"target  {spell_target(self.target)}"
        pages = "" if self.layer.family in ("mamba1", "mamba2") else f", page_size {self.page_size}"
        yield f"layer   {spell_layer(self.layer)}{pages}"
        yield from (f"note    {note}" for note in self.notes)
        for first, phases in _merged(self.rows, self.elsewhere):
            yield ""
            phase = f" ({', '.join(phases)})" if any(phases) else ""
            yield f"{first.op}{phase}: {first.choice.kernel.name if first.choice else 'no kernel'} [{first.how}]"
            for name, reasons in _here(first, self.elsewhere):
                yield f"    not {name}: {'; '.join(reasons)}"
            others = Counter(name.partition(".")[0] for name, _ in first.rejected if name in self.elsewhere)
            if others:
                counts = ", ".join(f"{provider} ({count})" for provider, count in others.items())
                yield f"    not for {self.target.vendor}: kernels of {counts}"
            if first.choice and first.choice.alternatives:
                yield f"    also able: {', '.join(first.choice.alternatives)}"
        if self.levels:
            yield ""
            yield f"graphs: {self.level.name}"
            yield from (f"    {level}" for level in self.levels)


def explain(
    target: Target,
    layer: Layer,
    *,
    page_size: int = 16,
    kernels: Iterable[Kernel],
    installed: Mapping[str, str | Package] | None = None,
    requested: str | Mapping[str, str] | Request | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
    cases: Iterable[Case] | None = None,
    notes: Iterable[str] = (),
    verdict: Verdict | None = None,
) -> Explanation:
    """The choice for each case, those that the layer's family needs when None; arguments as for `select`.

    A forced choice that cannot serve is a row without a choice here, not an error.

    Raises:
        ValueError: a page size below 1, or a forced name that no kernel or provider has.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    every, request = tuple(kernels), parse_requested(requested)
    packages = {} if installed is None else installed
    rows = []
    for op, phase, needs in cases_of(layer, page_size) if cases is None else cases:
        try:
            choice = select(op, target, layer, needs, request, packages, every, order, verdict)
        except UnsupportedError:
            how, asked = survey(op, target, layer, needs, request, packages, every, order, verdict)
            rows.append(Row(op, phase, needs, None, tuple((kernel.name, reasons) for kernel, reasons in asked), how))
        else:
            rows.append(Row(op, phase, needs, choice, choice.rejected, choice.how))

    def candidates(op: Op, needs: Needs) -> tuple[tuple[Kernel, Reasons], ...]:
        return survey(op, target, layer, needs, request, packages, every, order, verdict)[1]

    captured = levels(layer, page_size, candidates) if cases is None else ()
    elsewhere = frozenset(kernel.name for kernel in every if target.vendor not in kernel.caps.vendors)
    return Explanation(target, layer, page_size, tuple(rows), tuple(notes), captured, elsewhere)


def cases_of(layer: Layer, page_size: int, *, lse: bool = False, seq_len: int = 4096) -> tuple[Case, ...]:
    """The operations that a layer's family needs, with a typical need of each phase.

    >>> [f"{op} {phase}".strip() for op, phase, _ in cases_of(Layer.mla(num_heads=16), page_size=64)]
    ['prefill', 'mla_decode decode', 'mla_decode verify', 'prefill context', 'merge', 'cache_write', 'cache_gather']

    >>> [f"{op} {phase}".strip() for op, phase, _ in cases_of(Layer.mamba2(num_heads=80), page_size=64)]
    ['conv1d', 'state_update decode', 'ssd prefill', 'state_copy']
    """
    if layer.family in ("mamba1", "mamba2"):
        needs = Needs()
        return (
            (Op.CONV1D, "", needs),
            (Op.STATE_UPDATE, "decode", needs),
            (Op.SSD, "prefill", needs),
            (Op.STATE_COPY, "", needs),
        )

    def paged(query_len: int) -> Needs:
        return Needs(layer.causal, page_size, query_len, seq_len, lse)

    prefill = Needs(layer.causal, None, seq_len, seq_len, lse)
    pages = Needs(layer.causal, page_size)
    over_cache: tuple[Case, ...]
    if layer.family == "gqa":
        over_cache = ((Op.PAGED, "decode", paged(1)), (Op.PAGED, "verify", paged(8)), (Op.PAGED, "extend", paged(64)))
    else:
        context = Needs(False, None, seq_len, seq_len, lse=True)  # gathered and up-projected, then merged
        over_cache = (
            (Op.MLA_DECODE, "decode", paged(1)),
            (Op.MLA_DECODE, "verify", paged(8)),
            (Op.PREFILL, "context", context),
        )
    return (
        (Op.PREFILL, "", prefill),
        *over_cache,
        (Op.MERGE, "", pages),
        (Op.CACHE_WRITE, "", pages),
        (Op.CACHE_GATHER, "", pages),
    )


def unused_packages(named: Mapping[str, str], kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """A sentence for each package, name -> version, that no kernel requires.

    >>> unused_packages({"fast-attention": "1.0"}, kernels=())
    ('fast-attention 1.0: no kernel of this version of portable uses it',)
    """
    needed = (each for kernel in kernels for each in (kernel.caps.requires, *kernel.caps.requires_on.values()))
    used = {canonicalize_name(name) for each in needed for name, _ in each}
    return tuple(
        f"{name} {version}: no kernel of this version of portable uses it"
        for name, version in named.items()
        if canonicalize_name(name) not in used
    )


def spell_target(target: Target) -> str:
    """A target in one line."""
    units = f", {target.compute_units} compute units" if target.compute_units else ""
    what = f"{target.vendor} {target.arch}{', emulated' if target.emulated else ''}"
    return f"{what} ({target.product or target.name}{units}, fp8 {target.fp8 or 'none'})"


def spell_layer(layer: Layer) -> str:
    """What sets a layer apart, in one line.

    >>> spell_layer(Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64, window=16, sinks=True))
    'gqa, 8 heads on 2, head_dim 64, bfloat16, window (15, 0), sinks'
    >>> spell_layer(Layer.mamba2(num_heads=80))
    'mamba2, 80 heads of 64 in 1 groups, state_dim 128, conv_width 4, chunk 256, bfloat16, states float32'
    """
    if layer.family in ("mamba1", "mamba2"):
        shape = f"{layer.num_heads} heads of {layer.qk_head_dim} in {layer.num_groups} groups"
        heads = f"{layer.num_heads} channels" if layer.family == "mamba1" else shape
        sizes = f"state_dim {layer.state_dim}, conv_width {layer.conv_width}, chunk {layer.chunk}"
        return f"{layer.family}, {heads}, {sizes}, {short(layer.dtype)}, states {short(layer.kv_dtype)}"
    parts = [f"{layer.family}, {layer.num_heads} heads on {layer.num_kv_heads}, head_dim {layer.qk_head_dim}"]
    parts += [f"v_head_dim {layer.v_head_dim}"] if layer.v_head_dim != layer.qk_head_dim else []
    parts += [f"latent {layer.latent_dim}"] if layer.family == "mla" else []
    parts += [short(layer.dtype)]
    parts += [f"kv_dtype {short(layer.kv_dtype)}"] if layer.kv_dtype != layer.dtype else []
    parts += [f"window {layer.window}"] if layer.window != (None, None) else []
    parts += [f"softcap {layer.softcap:g}"] if layer.softcap is not None else []
    parts += [name for name in ("sinks", "alibi", "batch_invariant") if getattr(layer, name)]
    parts += [] if layer.causal else ["not causal"]
    parts += [f"cache layout {layer.cache_layout}"] if layer.cache_layout != "strided" else []
    return ", ".join(parts)


def _here(row: Row, elsewhere: frozenset[str]) -> tuple[tuple[str, Reasons], ...]:
    """The rejected kernels that are for devices of the target's vendor."""
    return tuple((name, reasons) for name, reasons in row.rejected if name not in elsewhere)


def _merged(rows: tuple[Row, ...], elsewhere: frozenset[str]) -> list[tuple[Row, list[str]]]:
    """Rows of one operation with the same outcome, as the first of them and the phases of all."""
    merged: dict[object, tuple[Row, list[str]]] = {}
    for row in rows:
        outcome = (row.op, row.how, _here(row, elsewhere), row.choice and (row.choice.kernel, row.choice.alternatives))
        merged.setdefault(outcome, (row, []))[1].append(row.phase)
    return list(merged.values())
