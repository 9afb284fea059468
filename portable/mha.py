"""The plan of multi-head and grouped-query attention: which kernel serves which requests of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from portable.batch import Batch
from portable.kernel import PAGES, GraphLevel, Kernel, Needs, Op, Segment
from portable.layer import Layer
from portable.order import is_ordered, split
from portable.planned import Padded, Planned
from portable.ragged import next_power_of_2

Choose = Callable[[Op, Needs], Kernel]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MhaPlan(Planned):
    """What `Attention.run` executes for one step. It lives until the next plan on its slot.

    Of a step that is padded to a size, `parts` is the padded step over tensors that never move; their host twins hold
    the most that any step of the size has.
    """

    parts: tuple[Batch, ...]  # the step, or its parts
    segments: tuple[tuple[Segment, ...], ...]  # of each part
    write: Kernel | None  # scatters the new tokens; None for a step that writes nothing
    handle: int  # the slot, as the registered ops know it
    padded: Padded | None = None  # of a step that is padded to a size

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All that the plan may run."""
        write = () if self.write is None else (self.write,)
        return (*(segment.kernel for part in self.segments for segment in part), *write)

    @property
    def batch(self) -> Batch:
        """The step, or the part of it that holds the slots of the new tokens."""
        return self.parts[-1]


def plan_segments(batch: Batch, layer: Layer, choose: Choose, *, contiguous: bool, lse: bool) -> tuple[Segment, ...]:
    """One segment per region of the batch, each with the kernel that `choose` gives for its bucket.

    First chunks attend to the contiguous K/V of the step when the caller has them (`contiguous`), all else to the
    pages. A batch whose requests are in another order is right too, as a single segment over the pages.
    """
    rows = batch.padded_reqs
    if batch.block_table is not None and batch.continues:  # decodes, or drafts to verify: one region, known at a glance
        return (segment_of(batch, layer, choose, slice(0, rows), Op.PAGED, lse),)
    first_token = batch.host_cu_seqlens_q.item
    return tuple(
        segment
        for requests, op in _regions(batch, contiguous)
        if first_token(requests.stop) > first_token(requests.start)
        for segment in segments_of(batch, layer, choose, requests, op, lse)
    )


def _regions(batch: Batch, contiguous: bool) -> Iterator[tuple[slice, Op]]:
    if batch.block_table is None:
        yield slice(0, batch.num_reqs), Op.PREFILL  # padding has no keys in contiguous K/V, whatever its length
        return
    kind = batch.kinds()
    if not is_ordered(kind):
        yield slice(0, batch.padded_reqs), Op.PAGED
        return
    regions = split(kind, batch.host_cu_seqlens_q)
    yield regions.decodes.requests, Op.PAGED
    yield regions.extends.requests, Op.PAGED
    first = regions.prefills.requests
    if first.start == first.stop:
        return
    whole = (batch.query_lens[first] == batch.host_seq_lens[first]).all()  # a row without new tokens may have a context
    yield first, Op.PREFILL if contiguous and whole else Op.PAGED


def segments_of(batch: Batch, layer: Layer, choose: Choose, requests: slice, op: Op, lse: bool) -> tuple[Segment, ...]:
    """The requests as one segment; over pages, as one for each run of equal query lengths where the kernel needs it."""
    whole = segment_of(batch, layer, choose, requests, op, lse)
    if not whole.kernel.caps.uniform or op not in PAGES:
        return (whole,)
    lens = whole.host_query_lens
    edges = [0, *((lens[1:] != lens[:-1]).nonzero()[0] + 1).tolist(), lens.size]
    if len(edges) == 2:
        return (whole,)
    rows = [slice(requests.start + a, requests.start + b) for a, b in pairwise(edges) if lens[a]]
    return tuple(segment_of(batch, layer, choose, each, op, lse) for each in rows)


def segment_of(
    batch: Batch,
    layer: Layer,
    choose: Choose,
    requests: slice,
    op: Op,
    lse: bool,
    graph: GraphLevel = GraphLevel.NEVER,
) -> Segment:
    """Consecutive requests of the batch, over their pages or over the contiguous K/V of the step.

    For a graph the kernel is one that can be captured, and what it prepares is left to whoever captures that.
    """
    query_lens, seq_lens, cu, paged = batch.query_lens, batch.host_seq_lens, batch.cu_seqlens_q, op in PAGES
    lens, table, causal = batch.seq_lens, batch.block_table if paged else None, batch.causal
    if requests.start == 0 and requests.stop == query_lens.size:  # nothing to cut: 7 us less
        tokens = slice(0, batch.host_cu_seqlens_q.item(-1))
        max_query_len, max_seq_len = batch.max_query_len, batch.max_seq_len
    else:
        at = batch.host_cu_seqlens_q
        tokens = slice(int(at[requests.start]), int(at[requests.stop]))
        query_lens, seq_lens, lens = query_lens[requests], seq_lens[requests], lens[requests]
        max_query_len, max_seq_len = int(query_lens.max()), int(seq_lens.max())
        cu = cu[requests.start : requests.stop + 1]
        if tokens.start:
            cu = cu - tokens.start
        if table is not None:
            table = table[requests]
        if not isinstance(causal, bool):
            causal = causal[requests]
    kernel = choose(
        op,
        Needs(
            causal=layer.causal and causal is True,
            page_size=batch.page_size if paged else None,
            query_len=next_power_of_2(max_query_len),
            seq_len=next_power_of_2(max_seq_len),
            lse=lse,
            graph=graph,
            reqs=next_power_of_2(len(query_lens)) if op is Op.MLA_DECODE else 1,
        ),
    )
    segment = Segment(
        kernel=kernel,
        requests=requests,
        tokens=tokens,
        cu_seqlens_q=cu,
        seq_lens=lens,
        block_table=table,
        page_size=batch.page_size,
        causal=causal if layer.causal else False,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
        exact=batch.exact,
    )
    return segment if graph else prepared(segment, layer if paged else of_step(layer))


def of_step(layer: Layer) -> Layer:
    """The layer as kernels over the K and V of a step see it: those are of its own dtype, whatever its cache stores."""
    return layer if layer.kv_dtype is layer.dtype else _of_step(layer)


@cache
def _of_step(layer: Layer) -> Layer:
    return replace(layer, kv_dtype=layer.dtype)


def prepared(segment: Segment, layer: Layer) -> Segment:
    """A segment that nobody has seen yet, with what its kernel makes of it once for all layers of a step."""
    if segment.kernel.prepare is not None:
        object.__setattr__(segment, "prepared", segment.kernel.prepare(segment, layer))  # `replace` takes 3 us
    return segment


def prepare(segment: Segment, layer: Layer) -> Any:
    """What the segment's kernel makes once for all layers of a step; None where it makes nothing."""
    return None if segment.kernel.prepare is None else segment.kernel.prepare(segment, layer)
