"""For which steps a layer can be captured, by which kernels, and which operation is in the way of more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from portable.kernel import GraphLevel, Kernel, Needs, Op
from portable.layer import Layer
from portable.mla import MAX_DECODE_QUERIES
from portable.select import Reasons

Survey = Callable[[Op, Needs], tuple[tuple[Kernel, Reasons], ...]]  # every candidate in its order, with its reasons

# What steps of a level typically ask: a token each; a token and three drafts; a chunk of a prompt among decodes.
QUERIES = {GraphLevel.SINGLE: 1, GraphLevel.UNIFORM: 4, GraphLevel.VARLEN: 64}


@dataclass(frozen=True, slots=True)
class Level:
    """Steps of one level: the kernels that are captured for them, or what there is none for."""

    level: GraphLevel
    kernels: tuple[str, ...]
    limit: str = ""  # the operation that no kernel can be captured for, and what those of it declare that serve it

    def __str__(self) -> str:
        return f"{self.level.name}: {self.limit or ', '.join(self.kernels)}"


def levels(layer: Layer, page_size: int, survey: Survey, seq_len: int = 4096) -> tuple[Level, ...]:
    """Each level with its kernels, up to the first that has none for some operation."""
    found = []
    for level, queries in QUERIES.items():
        kernels, limit = [], ""
        for op, needs in _needs(layer, page_size, level, queries, seq_len):
            able = next((kernel for kernel, reasons in survey(op, needs) if not reasons), None)
            if able is None:
                limit = _limit(op, needs, survey)
                break
            kernels.append(able.name)
        found.append(Level(level, tuple(kernels), limit))
        if limit:
            break
    return tuple(found)


def effective(found: tuple[Level, ...]) -> GraphLevel:
    """The highest level that is free of limits.

    >>> effective((Level(GraphLevel.SINGLE, ("a",)), Level(GraphLevel.UNIFORM, (), "paged"))).name
    'SINGLE'
    """
    return max((each.level for each in found if not each.limit), default=GraphLevel.NEVER)


def _needs(layer: Layer, page_size: int, level: GraphLevel, queries: int, seq_len: int) -> list[tuple[Op, Needs]]:
    if layer.family in ("mamba1", "mamba2"):
        return [(op, Needs(graph=level)) for op in (Op.CONV1D, Op.STATE_UPDATE)]
    op = Op.PAGED
    if layer.family == "mla":
        op, queries = Op.MLA_DECODE, min(queries, MAX_DECODE_QUERIES)
    attend = Needs(layer.causal, page_size, queries, seq_len, graph=level)
    return [(op, attend), (Op.CACHE_WRITE, Needs(page_size=page_size, graph=level))]


def _limit(op: Op, needs: Needs, survey: Survey) -> str:
    without = Needs(needs.causal, needs.page_size, needs.query_len, needs.seq_len)
    able = [kernel for kernel, reasons in survey(op, without) if not reasons]
    if not able:
        return f"no kernel serves {op}"
    declared = ", ".join(f"{kernel.name} declares {kernel.caps.graph_level.name}" for kernel in able)
    return f"no kernel for {op} can be captured; {declared}"
