"""The plan of multi-head latent attention: which requests attend to the latents themselves, and which to heads.

A decode absorbs the up-projection into its queries and reads nothing but latents: (512 + 64) + 512 = 1,088
multiply-adds for each query, head and key of DeepSeek's widths. A prefill makes keys and values of the latents, 512 *
(128 + 128) for each key and head, and then takes 192 + 128 per query: less from 171 queries a request on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import Batch
from portable.chunks import ContextChunk, chunk_context
from portable.kernel import Kernel, Needs, Op, Segment
from portable.layer import Layer, UnsupportedError
from portable.lengths import Int32
from portable.mha import Choose, of_step, prepared, segment_of, segments_of
from portable.order import DECODE
from portable.planned import Padded, Planned
from portable.ragged import cdiv, next_power_of_2, round_down
from portable.select import REFERENCE
from portable.upload import upload

MAX_DECODE_QUERIES = 8  # a token and seven drafts to verify: what decode kernels are made for
WORKSPACE_MIB = 1024
WORKSPACE_TOKENS = 65_536  # keys of one call, beyond which longer calls gain nothing


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Pieces of the prefills' contexts that fill the workspace once. Both segments are of the same requests."""

    gather: Segment  # the pages of the pieces; no tokens
    attend: Segment  # the requests' queries over the pieces, without a mask; a request without a piece has no keys
    num_keys: int  # of all pieces


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Consecutive requests on the up-projected path."""

    tokens: slice  # their query tokens
    new: Segment | None  # their new tokens among themselves; None where all keys are in the pages
    context: tuple[Context, ...]  # empty where none of them has one

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All that attend."""
        return (*(() if self.new is None else (self.new,)), *(chunk.attend for chunk in self.context))


@dataclass(frozen=True, slots=True, eq=False)
class MlaSegments:
    """What one way of calling `run` executes."""

    decodes: tuple[Segment, ...]
    prefills: tuple[Prefill, ...]
    parts: tuple[MlaSegments, ...] = ()  # of a step in parts, whose outputs are merged; nothing else then

    @property
    def has_context(self) -> bool:
        """Whether contexts are to be gathered and merged: a fact of the host."""
        return any(prefill.context for prefill in self.prefills) or any(part.has_context for part in self.parts)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those that attend."""
        prefills = [segment for prefill in self.prefills for segment in prefill.segments]
        parts = [kernel for part in self.parts for kernel in part.kernels]
        return (*(segment.kernel for segment in (*self.decodes, *prefills)), *parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MlaPlan(Planned):
    """What `MlaAttention.run` executes for one step. It lives until the next plan on its slot."""

    batch: Batch
    segments: MlaSegments
    write: Kernel | None  # scatters the new tokens; None for a step that writes nothing
    handle: int  # the slot, as the registered ops know it
    padded: Padded | None = None  # of a step that is padded to a size
    parts: tuple[Batch, ...] = ()  # of a step in parts; `batch` is the one with the slots of the new tokens

    @property
    def of_cache(self) -> Batch:
        """The step, or a part of it, whose pages are those of the cache: a draft tree's own are of one token."""
        return self.parts[0] if self.parts else self.batch

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of the attention and of `write`."""
        return self.segments.kernels if self.write is None else (*self.segments.kernels, self.write)


def plan_mla(batch: Batch, layer: Layer, choose: Choose, *, workspace: int, lse: bool = False) -> MlaSegments:
    """The segments of a step, each with the kernel that `choose` gives for its bucket.

    Requests on a context with as few new tokens as the decode kernels take are decodes, all others prefills. In a
    batch that is in order each kind is one run of requests; in another order there are more runs.

    Args:
        workspace: context tokens that are up-projected at once; see `workspace_tokens`.
        lse: the caller wants the LSE of all tokens.

    Raises:
        ValueError: a prefill on a context whose length is a bound (`exact=False`), or a context without pages.
        UnsupportedError: a causal mask over keys that do not end with the new tokens.
    """
    if batch.block_table is None:
        is_decode = np.zeros(batch.padded_reqs, dtype=np.bool_)
    else:
        threshold, uniform = decode_threshold(batch, layer, choose)
        if batch.max_query_len <= threshold and batch.continues:  # the usual step, known at a glance
            whole = segment_of(batch, layer, choose, slice(0, batch.padded_reqs), Op.MLA_DECODE, lse)
            return MlaSegments((whole,), ())
        is_decode = _decodes(batch, threshold, uniform)
    decodes: list[Segment] = []
    prefills = []
    for requests in _runs(batch, is_decode):
        if is_decode[requests.start]:
            decodes.extend(segments_of(batch, layer, choose, requests, Op.MLA_DECODE, lse))
        else:
            prefills.append(_prefill(batch, layer, choose, requests, workspace, lse))
    return MlaSegments(tuple(decodes), tuple(prefills))


def _decodes(batch: Batch, threshold: int, uniform: bool) -> npt.NDArray[np.bool_]:
    """[B] which requests the decode kernel serves."""
    if uniform or not batch.self_attention:
        found: npt.NDArray[np.bool_] = batch.kinds(threshold, uniform=uniform) == DECODE
        return found
    queries = batch.query_lens
    found = (queries - 1).view(np.uint32) < threshold  # of 1 to `threshold`
    found &= batch.host_seq_lens > queries
    return found


def decode_threshold(batch: Batch, layer: Layer, choose: Choose) -> tuple[int, bool]:
    """New tokens up to which a request of the step decodes, and whether all decodes must have equally many."""
    if batch.max_query_len <= 1:
        return 1, False
    causal = layer.causal and batch.causal is True
    longest, reqs = next_power_of_2(batch.max_seq_len), next_power_of_2(batch.padded_reqs)

    def kernel(query_len: int) -> Kernel:
        return choose(Op.MLA_DECODE, Needs(causal, batch.page_size, query_len, longest, reqs=reqs))

    # A kernel that is asked last, when no other can, does not make a decode of a request that would be a prefill.
    single = kernel(1)
    for queries in (MAX_DECODE_QUERIES, MAX_DECODE_QUERIES // 2, MAX_DECODE_QUERIES // 4):
        found = kernel(queries)
        if found is single or found.caps.provider != REFERENCE:
            return queries, found.caps.uniform
    return 1, single.caps.uniform


def _runs(batch: Batch, is_decode: npt.NDArray[np.bool_]) -> list[slice]:
    """Consecutive requests of one kind; rows without new tokens belong to the run around them, those at its end not."""
    rows = is_decode.size
    if rows and batch.query_lens.min() > 0:
        edge = (is_decode[1:] != is_decode[:-1]).nonzero()[0]
        if not edge.size:
            return [slice(0, rows)]
        return [slice(a, b) for a, b in pairwise([0, *(edge + 1).tolist(), rows])]
    live = np.flatnonzero(batch.query_lens)
    if not live.size:
        return []
    kind = is_decode[live]
    edge = (kind[1:] != kind[:-1]).nonzero()[0]
    first = live[[0, *(edge + 1)]].tolist()
    last = live[[*edge, live.size - 1]].tolist()
    return [slice(a, b + 1) for a, b in zip(first, last, strict=True)]


def _prefill(batch: Batch, layer: Layer, choose: Choose, requests: slice, workspace: int, lse: bool) -> Prefill:
    """Requests whose latents are made keys and values; of a step whose keys do not end with its new tokens, all are."""
    if not batch.self_attention and batch.causal is not False:
        raise UnsupportedError("a causal mask over keys that do not end with the new tokens")
    queries, host_cu = batch.query_lens[requests], batch.host_cu_seqlens_q
    in_pages = batch.context_lens if batch.self_attention else batch.host_seq_lens
    contexts = in_pages[requests] * (queries > 0)
    chunks: list[ContextChunk] = []
    if contexts.any():
        if batch.block_table is None:
            raise ValueError("block_table is None; MLA reads the context of a request from its pages")
        batch.needs_exact("MLA's prefill on a context")
        chunks = chunk_context(contexts, workspace, batch.page_size, whole=layer.batch_invariant)
    spans = [slice(int(chunk.requests[0]), int(chunk.requests[-1]) + 1) for chunk in chunks]
    pieces = [_spread(chunk, span) for chunk, span in zip(chunks, spans, strict=True)]
    spans = [slice(requests.start + span.start, requests.start + span.stop) for span in spans]
    # The offsets of each run of requests too come by the one copy: on a device, to subtract them is a launch each.
    runs = dict.fromkeys((rows.start, rows.stop) for rows in (requests, *spans))
    offsets = [host_cu[a : b + 1] - host_cu[a] for a, b in runs]
    new_lens, *there = upload([queries, *pieces, *offsets], batch.device)
    cu_of = dict(zip(runs, there[len(pieces) :], strict=True))
    new = None
    if batch.self_attention:
        causal = batch.causal if isinstance(batch.causal, bool) else batch.causal[requests]
        seen, cu, logs = causal if layer.causal else False, cu_of[requests.start, requests.stop], lse or bool(chunks)
        new = prepared(_contiguous(batch, choose, requests, cu, queries, new_lens, seen, logs), of_step(layer))
    context = []
    for chunk, rows, host, lens in zip(chunks, spans, pieces, there, strict=False):
        attend = _contiguous(batch, choose, rows, cu_of[rows.start, rows.stop], host, lens, False, True)
        gather = Segment(
            kernel=choose(Op.CACHE_GATHER, Needs(page_size=batch.page_size)),
            requests=rows,
            tokens=slice(attend.tokens.start, attend.tokens.start),
            cu_seqlens_q=attend.cu_seqlens_q,
            seq_lens=lens,
            block_table=_table(batch, rows, int(chunk.starts[0]), attend.max_seq_len),
            page_size=batch.page_size,
            causal=False,
            max_query_len=attend.max_query_len,
            max_seq_len=attend.max_seq_len,
            host_query_lens=attend.host_query_lens,
            host_seq_lens=host,
        )
        context.append(Context(prepared(gather, layer), prepared(attend, of_step(layer)), int(host.sum())))
    return Prefill(slice(int(host_cu[requests.start]), int(host_cu[requests.stop])), new, tuple(context))


def _spread(chunk: ContextChunk, span: slice) -> Int32:
    """The lengths of a chunk's pieces, 0 for the requests between that have none."""
    if chunk.lens.size == span.stop - span.start:
        return chunk.lens
    lens = np.zeros(span.stop - span.start, dtype=np.int32)
    lens[chunk.requests - span.start] = chunk.lens
    return lens


def _contiguous(
    batch: Batch,
    choose: Choose,
    requests: slice,
    cu_seqlens_q: torch.Tensor,
    lens: Int32,
    seq_lens: torch.Tensor,
    causal: bool | torch.Tensor,
    lse: bool,
) -> Segment:
    """Requests over contiguous keys of these lengths."""
    host_cu, query_lens = batch.host_cu_seqlens_q, batch.query_lens[requests]
    max_query_len, max_seq_len = int(query_lens.max()), int(lens.max())
    needs = Needs(
        causal=causal is True,
        query_len=next_power_of_2(max_query_len),
        seq_len=next_power_of_2(max_seq_len),
        lse=lse,
    )
    return Segment(
        kernel=choose(Op.PREFILL, needs),
        requests=requests,
        tokens=slice(int(host_cu[requests.start]), int(host_cu[requests.stop])),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=None,
        page_size=batch.page_size,
        causal=causal,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        host_query_lens=query_lens,
        host_seq_lens=lens,
    )


def _table(batch: Batch, rows: slice, start: int, longest: int) -> torch.Tensor:
    """The pages of a chunk: those of its rows, but for the first one's, which begin at token `start`."""
    assert batch.block_table is not None
    width = cdiv(longest, batch.page_size)
    if not start:
        return batch.block_table[rows, :width]
    table = batch.block_table[rows]
    first = table[:1, start // batch.page_size :][:, :width]
    first = torch.nn.functional.pad(first, (0, width - first.shape[1]))
    return torch.cat([first, table[1:, :width]])


def workspace_tokens(layer: Layer, page_size: int, workspace: int | None = None) -> int:
    """Context tokens that are up-projected at once, in whole pages.

    Args:
        workspace: what the caller wants; None for as many as `WORKSPACE_MIB` hold, up to `WORKSPACE_TOKENS`, and a
            page at least. (128 heads of DeepSeek's widths in bfloat16 take 81 KiB a token: 12,912 of 16 a page.)

    Raises:
        ValueError: it holds no page.

    >>> workspace_tokens(Layer.mla(num_heads=128), page_size=16), workspace_tokens(Layer.mla(num_heads=16), 16, 1000)
    (12912, 992)
    """
    if workspace is None:
        fits = WORKSPACE_MIB * 2**20 // workspace_bytes(layer, 1)
        workspace = max(page_size, min(WORKSPACE_TOKENS, fits))
    if not isinstance(workspace, int) or workspace < page_size:
        raise ValueError(f"workspace is {workspace} tokens, less than a page of {page_size}; give it at least one page")
    return round_down(workspace, page_size)


def workspace_bytes(layer: Layer, tokens: int) -> int:
    """Bytes of so many context tokens: the gathered latents, and the K and V of every head.

    A kernel that takes V only as wide as K holds it once more.

    >>> workspace_bytes(Layer.mla(num_heads=128), 12912) >> 20
    1022
    """
    heads = layer.num_heads * (layer.qk_head_dim + layer.v_head_dim)
    return tokens * (layer.latent_dim + heads) * layer.dtype.itemsize
