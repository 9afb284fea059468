"""Chunked attention as a step of its own: each chunk that a request's queries touch becomes a request."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import at_least, named
from portable.batch import Batch
from portable.layer import UnsupportedError
from portable.lengths import Int32
from portable.ragged import cdiv, cu_from_lens, ragged_arange, round_up
from portable.sizes import Size
from portable.upload import upload
from portable.view import View


@named
def local(batch: Batch, chunk: int) -> Batch:
    """Chunked attention (Llama 4): a query sees the keys of its own chunk of positions, up to itself.

    Each chunk that a request's queries touch becomes a request of its own, in order of tokens, over that chunk's
    pages. The tokens and their slots stay as they are. `Batch.with_group` regathers the pages for another KV group.

    Raises:
        ValueError: chunk below 1, or lengths that are bounds.
        UnsupportedError: pages that do not divide the chunk, or contiguous K/V with a context.

    >>> batch = Batch.from_lens([4, 10, 5], [6, 17, 9], block_table=np.arange(27).reshape(3, 9), page_size=2)
    >>> virtual = local(batch, chunk=4)
    >>> virtual.query_lens.tolist(), virtual.host_seq_lens.tolist()
    ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1])
    >>> virtual.host_cu_seqlens_q.tolist()
    [0, 2, 4, 5, 9, 13, 14, 18, 19]
    """
    row, query_lens, lens, pages = _cut(batch, chunk)
    table, causal = batch.block_table, batch.causal
    if table is not None and isinstance(causal, bool) and (batch.query_lens == 1).all():
        return _local_decodes(batch, table, chunk, lens, pages)
    cut, view = _of_chunks(batch, row, query_lens, lens), None
    cu = cut.host_cu_seqlens_q
    if table is None and isinstance(causal, bool):
        cu_device, lens_device = upload((cu, lens), batch.device)
    else:
        rows, starts = row.astype(np.int64), np.zeros(0, np.int64)
        if table is not None:
            view = View(rows=rows, first_page=pages, width=_width(lens, chunk, batch.page_size), chunk=chunk)
            starts = view.starts(table)
        cu_device, lens_device, row_device, starts_device = upload((cu, lens, rows, starts), batch.device)
        if table is not None and view is not None:
            table = view.pick(table, starts_device)
        if isinstance(causal, torch.Tensor):
            causal = causal[row_device]
    return replace(cut, cu_seqlens_q=cu_device, seq_lens=lens_device, block_table=table, causal=causal, view=view)


def local_host(batch: Batch, chunk: int) -> Batch:
    """`local` of what the host has: tensors, and the block table, stay the step's, for a planner that reads the pages
    off it by the view.

    Raises:
        ValueError, UnsupportedError: as `local` does.

    >>> batch = Batch.from_lens([4, 1], [6, 9], block_table=np.arange(10).reshape(2, 5), page_size=2)
    >>> virtual = local_host(batch, chunk=4)
    >>> virtual.host_seq_lens.tolist(), virtual.view.rows.tolist(), virtual.view.first_page.tolist()
    ([4, 2, 1], [0, 0, 1], [0, 2, 4])
    """
    row, query_lens, lens, pages = _cut(batch, chunk)
    width = _width(lens, chunk, batch.page_size)
    view = View(rows=row.astype(np.int64), first_page=pages, width=width, picked=False, chunk=chunk)
    return replace(_of_chunks(batch, row, query_lens, lens), view=view)


class _Cut(NamedTuple):
    """The requests that `local` makes."""

    rows: npt.NDArray[np.integer]  # of the step
    query_lens: Int32
    seq_lens: Int32
    pages: npt.NDArray[np.int64]  # where each begins


def _cut(batch: Batch, chunk: int) -> _Cut:
    """The requests that `local` makes of a step, once it is found to take it."""
    at_least(1, chunk=index(chunk))
    batch.needs_exact("local attention")
    if batch.view is not None and batch.view.chunk is not None:
        raise UnsupportedError(
            f"the step is a local one already, of chunk {batch.view.chunk}: give local the plain batch"
        )
    if not batch.self_attention or batch.view is not None:
        raise UnsupportedError(
            "local attention of a derived step: its positions are not the sequence's; take local first"
        )
    if batch.block_table is not None and chunk % batch.page_size:
        raise UnsupportedError(
            f"chunk {chunk} is not a multiple of page_size {batch.page_size}; a chunk inside a page has no table"
        )
    context, seq_lens = batch.context_lens, batch.host_seq_lens
    if batch.block_table is None and context.any():
        raise UnsupportedError(
            f"local attention over contiguous K/V takes no context; row {int(context.argmax())} has one"
        )
    if (batch.query_lens == 1).all():  # each stays one, in the chunk that its token is in
        start = context // np.int32(chunk) * np.int32(chunk)
        pages = (start // batch.page_size).astype(np.int64)
        return _Cut(np.arange(seq_lens.size), batch.query_lens, seq_lens - start, pages)
    first = context // chunk
    touched = np.where(batch.query_lens > 0, (seq_lens - 1) // chunk - first + 1, 0)
    row, place = ragged_arange(touched)
    start = (first[row] + place) * chunk
    end = np.minimum(start + chunk, seq_lens[row])
    query_lens = (end - np.maximum(context[row], start)).astype(np.int32)
    return _Cut(row, query_lens, (end - start).astype(np.int32), (start // batch.page_size).astype(np.int64))


def _of_chunks(batch: Batch, row: npt.NDArray[np.integer], query_lens: Int32, lens: Int32) -> Batch:
    """The step on the host whose requests are chunks of those of another."""
    return replace(
        batch,
        query_lens=query_lens,
        host_cu_seqlens_q=cu_from_lens(query_lens),
        host_seq_lens=lens,
        is_prefilling=None if batch.is_prefilling is None else batch.is_prefilling[row],
        num_reqs=row.size,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
    )


def _local_decodes(batch: Batch, table: torch.Tensor, chunk: int, lens: Int32, pages: npt.NDArray[np.int64]) -> Batch:
    """`local` of one new token per request: each stays one."""
    width = _width(lens, chunk, batch.page_size)
    view = View(rows=np.arange(lens.size), first_page=pages, width=width, chunk=chunk)
    lens_device, starts = upload((lens, view.starts(table)), batch.device)
    return replace(
        batch,
        seq_lens=lens_device,
        block_table=view.pick(table, starts),
        host_seq_lens=lens,
        num_reqs=lens.size,
        max_seq_len=int(lens.max(initial=0)),
        view=view,
    )


def _width(lens: Int32, chunk: int, page_size: int) -> int:
    """Columns that the lengths reach, by 16 as long as the chunk has them: kernels are compiled for such strides."""
    return max(1, min(chunk // page_size, round_up(cdiv(int(lens.max(initial=0)), page_size), 16)))


@named
def local_capacity(num_reqs: int, num_tokens: int, chunk: int) -> int:
    """The most requests that `local` makes of a step of this size: what a captured graph must hold.

    A request of q tokens touches at most 1 + ceil((q - 1) / chunk) chunks: its first token may end one. The worst step
    gives each request one token, then a second to as many as there are tokens for, then chunk more for each further.

    >>> local_capacity(3, 19, 4), local_capacity(2, 2, 4)
    (9, 2)
    """
    at_least(0, num_reqs=index(num_reqs), num_tokens=index(num_tokens))
    at_least(1, chunk=index(chunk))
    reqs = min(num_reqs, num_tokens)
    beyond = num_tokens - reqs
    seconds = min(reqs, beyond)
    return reqs + seconds + (beyond - seconds) // chunk if reqs else 0


@named
def local_size(size: Size, chunk: int) -> Size:
    """The size that holds what `local` makes of any step of a size.

    >>> local_size(Size(8), 4), local_size(Size(3, 17, tokens=19), 4).reqs
    (Size(reqs=8, queries=1, tokens=None, seq_len=4, ahead=0), 9)
    """
    at_least(1, chunk=index(chunk))
    if size.uniform and size.queries == 1:
        return Size(size.reqs, seq_len=chunk)
    reqs = local_capacity(size.reqs, size.padded_tokens, chunk)
    return Size(reqs, min(size.queries, chunk), size.padded_tokens, chunk)
