"""What a layer's kernels compile before the first step: the launches of representative steps, without their data.

Our kernels are compiled for constants, for the arguments that there are, and for strides of the caller's tensors (1, a
multiple of 16, or neither); numbers and addresses that vary from step to step do not count. Constants follow from the
query length, the number of requests, and the width of the block table: from whether work is split, above all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from portable.batch import Batch
from portable.cache import cache_shapes
from portable.kernel import KV, GraphLevel, Kernel, Needs, Op, Segment
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.limits import Limits
from portable.mha import Choose, plan_segments, prepared, segment_of
from portable.ragged import next_power_of_2

Record = Callable[[], AbstractContextManager[list[Any]]]
Launch = Callable[[Layer, Choose, Batch, KV, LayerTensors, bool], None]


@cache
def recordable(provider: str) -> bool:
    """Whether a provider's kernels are ours, of a backend with a module `launch` that lists what they launch.

    >>> recordable("triton"), recordable("reference")
    (True, False)
    """
    try:
        return find_spec(f"portable.backends.{provider}.launch") is not None
    except ImportError:  # the backend is one file, or a plug-in's
        return False


def steps(limits: Limits, query_lens: Iterable[int]) -> Iterator[Batch]:
    """Steps of every query length, with lengths that the host knows and that it does not."""
    for batch in _steps(limits, query_lens):
        yield batch
        yield replace(batch, exact=False)


def _steps(limits: Limits, query_lens: Iterable[int]) -> Iterator[Batch]:
    for query_len in query_lens:
        most = max(1, min(limits.max_reqs, limits.max_tokens // query_len))
        for reqs in sorted({n for n in (1, 4, 16, 64, most) if n <= most}):
            for width in limits.widths:
                seq_len = min(limits.max_seq_len, width * limits.page_size)
                if query_len <= seq_len:
                    yield step([query_len] * reqs, [seq_len] * reqs, width, limits.page_size)
            yield step([query_len] * reqs, [query_len] * reqs, limits.widths[-1], limits.page_size)  # first chunks


def step(query_lens: list[int], seq_lens: list[int], width: int, page_size: int) -> Batch:
    """A step that is planned and not run: its tensors are on the CPU, whatever the device, and nobody reads them."""
    cu, rows = np.array([0, *np.cumsum(query_lens)], np.int32), len(seq_lens)
    return Batch.from_tensors(
        torch.from_numpy(cu),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.empty((rows, width), dtype=torch.int32, device="cpu"),
        torch.empty(int(cu[-1]), dtype=torch.int64, device="cpu"),
        page_size=page_size,
        host_cu_seqlens_q=cu,
        host_seq_lens=np.array(seq_lens, np.int32),
    )


def caches(layer: Layer, page_size: int) -> Iterator[KV]:
    """Pages without memory, within 2 GiB and beyond: where there are buffer loads, 32-bit offsets read the former."""
    page = min(math.prod(shape) for shape in cache_shapes(layer, 1, page_size) if shape) * layer.kv_dtype.itemsize
    for num_pages in (16, (1 << 31) // page + 16):
        k, v = cache_shapes(layer, num_pages, page_size)
        yield KV(meta(k, layer.kv_dtype), None if v is None else meta(v, layer.kv_dtype))


@contextmanager
def recorded(modules: Iterable[Any], target: Any) -> Iterator[list[Any]]:
    """Within the block the launches of each backend's module `launch` are listed, and nothing runs."""
    with ExitStack() as stack:
        yield [stack.enter_context(module.recorded(target)) for module in modules]


def warm(
    layer: Layer,
    choose: Choose,
    record: Record,
    build: Callable[[list[Any]], int],
    batches: Iterable[Batch],
    pages: tuple[KV, ...],
    tensors: LayerTensors,
    lses: tuple[bool, ...],
    launch: Launch | None = None,
) -> int:
    """Compile what the steps launch; how many kernels that are.

    Args:
        record: within `record()` launches are listed, and nothing runs.
        build: compiles what listed launches need; how many kernels were not there.
        launch: what one layer of a step may launch; None: as `Attention` does.
    """
    compiled = 0
    for batch in batches:
        with record() as calls:
            for lse in lses:
                for kv in pages:
                    (launch or _launch)(layer, choose, batch, kv, tensors, lse)
        compiled += build(calls)
    return compiled


def _launch(layer: Layer, choose: Choose, batch: Batch, kv: KV, tensors: LayerTensors, lse: bool) -> None:
    """Everything that one layer of a step may launch."""
    q = meta((batch.num_tokens, layer.num_heads, layer.qk_head_dim), layer.dtype)
    new = KV(*(meta((batch.num_tokens, layer.num_kv_heads, n), layer.dtype) for n in (q.shape[-1], layer.v_head_dim)))
    out = meta((batch.num_tokens, layer.num_heads, layer.v_head_dim), layer.dtype)
    log = meta((layer.num_heads, batch.num_tokens), torch.float32) if lse else None
    for contiguous in (False, True):
        for segment in _ours(batch, layer, choose, lse, contiguous):
            at = segment.tokens
            keys = kv if segment.block_table is not None else KV(*(part[at] for part in new if part is not None))
            logs = None if log is None else log[:, at]
            segment.kernel.run(q[at], keys, segment, layer, tensors, out[at], logs)
    writes = [choose(Op.CACHE_WRITE, Needs(page_size=batch.page_size))]
    if not batch.exact:  # as the lengths of a captured step are
        for level in levels(batch):
            with suppress(UnsupportedError):
                writes.append(choose(Op.CACHE_WRITE, Needs(page_size=batch.page_size, graph=level)))
                found = segment_of(batch, layer, choose, slice(0, batch.padded_reqs), Op.PAGED, lse, level)
                if recordable(found.kernel.caps.provider):
                    found.kernel.run(q, kv, prepared(found, layer), layer, tensors, out, log)
        change_metadata(choose, batch)
    for write in dict.fromkeys(writes):
        if recordable(write.caps.provider):
            write.run(*new, kv, batch.slot_mapping, layer, tensors)


def levels(batch: Batch) -> tuple[GraphLevel, GraphLevel]:
    """What a kernel must declare to be captured for steps of requests like these: of one length each, and of any."""
    return GraphLevel.SINGLE if batch.max_query_len == 1 else GraphLevel.UNIFORM, GraphLevel.VARLEN


def change_metadata(choose: Choose, batch: Batch) -> None:
    """What brings a captured step's metadata up to date on the device."""
    rows, numbers = batch.padded_reqs, (meta((8,), torch.int64), meta((8,), torch.int32))
    lens, table, slots = batch.seq_lens, batch.block_table, meta((rows,), torch.int64)
    for kernel in _each_level(choose, Op.REFRESH, batch):
        kernel.run(*numbers, meta((8,), torch.int32))
    for kernel in _each_level(choose, Op.ADVANCE, batch):
        for positions in (None, slots):
            kernel.run(lens, table, slots, positions, batch.page_size, batch.max_seq_len)


def _each_level(choose: Choose, op: Op, batch: Batch) -> Iterator[Kernel]:
    """The kernels of ours that are chosen for captured steps."""
    for level in levels(batch):
        with suppress(UnsupportedError):
            kernel = choose(op, Needs(graph=level))
            if recordable(kernel.caps.provider):
                yield kernel


def _ours(batch: Batch, layer: Layer, choose: Choose, lse: bool, contiguous: bool = False) -> Iterator[Segment]:
    """The segments whose kernels are ours; others are chosen, and compile nothing here."""

    def chosen(op: Op, needs: Needs) -> Any:
        kernel = choose(op, needs)
        return kernel if recordable(kernel.caps.provider) else _Without(kernel.caps)

    for segment in plan_segments(batch, layer, chosen, contiguous=contiguous, lse=lse):
        if recordable(segment.kernel.caps.provider):
            yield segment


@dataclass(frozen=True, slots=True)
class _Without:
    """A kernel that is chosen and not prepared."""

    caps: Any
    prepare: None = None


def example(layer: Layer) -> LayerTensors:
    """The tensors that a layer cannot do without, and scales per tensor for a cache that takes some."""
    heads = meta((layer.num_heads,), torch.float32)
    scale = meta((), torch.float32) if layer.kv_dtype.itemsize == 1 else None
    return LayerTensors(heads if layer.sinks else None, heads if layer.alibi else None, scale, scale)


def needs(
    layer: Layer, limits: Limits, query_lens: Iterable[int], lses: tuple[bool, ...]
) -> Iterator[tuple[Op, Needs]]:
    """All that planning may ask of `select`; for a step that is captured there may be none."""
    longest = next_power_of_2(limits.max_seq_len)
    for graph in (GraphLevel.NEVER, GraphLevel.SINGLE, GraphLevel.UNIFORM, GraphLevel.VARLEN):
        yield Op.CACHE_WRITE, Needs(page_size=limits.page_size, graph=graph)
    for query_len in dict.fromkeys(next_power_of_2(n) for n in query_lens):
        captured = (GraphLevel.SINGLE if query_len == 1 else GraphLevel.UNIFORM, GraphLevel.VARLEN)
        for lse in lses:
            for seq_len in (1 << i for i in range(longest.bit_length())):
                yield Op.PREFILL, Needs(layer.causal, None, query_len, seq_len, lse)
                for graph in (GraphLevel.NEVER, *captured):
                    yield Op.PAGED, Needs(layer.causal, limits.page_size, query_len, seq_len, lse, graph)


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
