"""Long work in pieces: contexts cut to fit a workspace, and prompts cut where recurrent states are kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from portable.lengths import Int32, Lens, as_lens
from portable.ragged import cdiv, cu_from_lens, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class ContextChunk:
    """Pieces of requests' contexts that fill the workspace once; only the first may be a continuation."""

    requests: Int32  # [n] rows of the batch, ascending
    starts: Int32  # [n] first context token of each piece, on a page boundary
    lens: Int32  # [n] tokens of each piece, all above 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return int(self.lens.sum())

    @property
    def cu_seqlens(self) -> Int32:
        """[n + 1] where each piece starts in the workspace."""
        return cu_from_lens(self.lens)


def chunk_context(context_lens: Lens, workspace: int, page_size: int, *, whole: bool = False) -> list[ContextChunk]:
    """Contexts packed into chunks of at most `workspace` tokens, each as full as whole pages allow.

    Every context token is in exactly one chunk. A request that does not fit goes on as the first of the next chunk,
    from a page boundary. Requests without a context are in no chunk (a decode has none to unpack: pass 0 for it), so
    the number of chunks grows with the pages there are, not with the longest request times their number.

    Args:
        context_lens: [B] tokens of each request that are in the cache, in batch order.
        workspace: tokens that fit at once; at least one page.
        page_size: tokens per page. For a context spread over ranks, of a page of each: its rows of a chunk then start
            on a page of every rank.
        whole: a request that does not fit into the rest of a chunk begins the next one, so that where it is cut depends
            on its own length alone. The chunks are then not all full.

    Raises:
        ValueError: the workspace holds no page.

    >>> for chunk in chunk_context([300, 0, 50], workspace=256, page_size=16):
    ...     print(chunk.requests.tolist(), chunk.starts.tolist(), chunk.lens.tolist())
    [0] [0] [256]
    [0, 2] [256, 0] [44, 50]
    """
    lens = as_lens("context_lens", context_lens)
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    if workspace < page_size:
        raise ValueError(f"workspace is {workspace} tokens, less than a page of {page_size}; give it at least one page")
    room = workspace // page_size
    pages = -(-lens.astype(np.int64) // page_size)
    if 0 < pages.sum() <= room:
        some = lens.nonzero()[0].astype(np.int32)
        return [ContextChunk(some, np.zeros(some.size, np.int32), lens[some])]
    # of the requests in front: a request's place on one long shelf of pages
    before = _whole(pages, room) if whole else np.cumsum(pages) - pages
    count = np.where(pages > 0, (before + pages - 1) // room - before // room + 1, 0)
    request, place = ragged_arange(count)
    chunk = before[request] // room + place
    first = np.maximum(chunk * room - before[request], 0) * page_size
    last = np.minimum(((chunk + 1) * room - before[request]) * page_size, lens[request])
    starts, sizes = first.astype(np.int32), (last - first).astype(np.int32)
    edges = np.searchsorted(chunk, np.arange(int(chunk.max(initial=-1)) + 2))
    return [ContextChunk(request[a:b], starts[a:b], sizes[a:b]) for a, b in pairwise(edges)]


def _whole(pages: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """Where each request begins on the shelf, if those that would be cut by the end of a chunk begin behind it."""
    before, place = np.zeros_like(pages), 0
    for i, count in enumerate(pages.tolist()):
        if place % room + count > room:
            place = cdiv(place, room) * room
        before[i] = place
        place += count
    return before


@dataclass(frozen=True, slots=True, eq=False)
class AlignedChunks:
    """Pieces of new tokens that end where a scan keeps its state; see `aligned_chunks`."""

    cu_seqlens: Int32  # [C + 1] tokens
    request: Int32  # [C] row of each chunk
    last: Int32  # [B] last chunk of each request; -1 for one without new tokens
    ends: Int32  # [C] tokens of the request's whole sequence up to the chunk's end


def aligned_chunks(context_lens: Lens, query_lens: Lens, chunk: int) -> AlignedChunks:
    """New tokens cut at multiples of `chunk` in each sequence's own positions; no chunk crosses requests or is empty.

    >>> found = aligned_chunks([3, 0, 8], [6, 0, 4], chunk=4)
    >>> found.cu_seqlens.tolist(), found.request.tolist(), found.last.tolist()
    ([0, 1, 5, 6, 10], [0, 0, 0, 2], [2, -1, 3])
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    context, new = as_lens("context_lens", context_lens), as_lens("query_lens", query_lens)
    if context.size != new.size:
        raise ValueError(f"context_lens has {context.size} rows and query_lens {new.size}; both have one per request")
    return chunks_of(context, new, chunk)


def chunks_of(context: Int32, new: Int32, chunk: int) -> AlignedChunks:
    """`aligned_chunks` of arrays that are known to be right: to look at them costs a third of the rest."""
    end = context.astype(np.int64) + new  # in int64: the multiple behind it may lie past int32
    first = context // chunk
    count = np.where(new > 0, (end + (chunk - 1)) // chunk - first, 0)
    total = np.cumsum(count)
    request = np.arange(new.size, dtype=np.int32).repeat(count)
    multiple = first + 1 - (total - count)  # that a request's first chunk ends at, over the place of that chunk
    ends = np.minimum((np.arange(request.size) + multiple[request]) * chunk, end[request])
    cu_seqlens = np.zeros(request.size + 1, np.int32)
    cu_seqlens[1:] = ends + (cu_from_lens(new)[1:] - end)[request]
    return AlignedChunks(
        cu_seqlens, request, np.where(count > 0, total - 1, -1).astype(np.int32), ends.astype(np.int32)
    )
