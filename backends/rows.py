"""Where the rows of a step are: those without keys, those of a rectangular batch, and those of a query each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from portable.kernel import LseForm, Segment
from portable.layer import Layer
from portable.merge import has_keys, lse_rows
from portable.paging import PageCsr, num_pages, page_csr
from portable.ragged import ragged_arange
from portable.upload import upload


def token_csr(segment: Segment) -> PageCsr:
    """The slots of each request's keys, as pages of one token."""
    assert segment.block_table is not None
    pages = num_pages(segment.host_seq_lens, segment.page_size)
    csr = page_csr(segment.block_table, segment.seq_lens, segment.page_size, pages)
    return csr.of_tokens(int(segment.host_seq_lens.sum()))


def each_query(segment: Segment) -> Segment:
    """The same queries as requests of one query each, over the keys that it may see; windows are left as they are."""
    lens = segment.host_query_lens
    row, position = ragged_arange(lens)
    behind = lens[row] - position - 1  # queries of its request that follow
    device = segment.seq_lens.device
    request, later, ones = upload([row.astype(np.int64), behind, np.arange(len(row) + 1, dtype=np.int32)], device)
    keys, host_keys = segment.seq_lens[request], segment.host_seq_lens[row]
    causal = segment.causal[request] if isinstance(segment.causal, torch.Tensor) else segment.causal
    if isinstance(causal, torch.Tensor):
        keys = torch.where(causal, keys - later, keys)
    elif causal:
        keys, host_keys = keys - later, host_keys - behind
    return replace(
        segment,
        requests=slice(0, len(row)),
        cu_seqlens_q=ones,
        seq_lens=keys.clamp(min=0).to(torch.int32),
        block_table=None if segment.block_table is None else segment.block_table[request],
        causal=True,
        max_query_len=1,
        max_seq_len=int(host_keys.max(initial=0)),
        host_query_lens=np.ones(len(row), dtype=np.int32),
        host_seq_lens=host_keys.clip(min=0).astype(np.int32),
        exact=segment.exact and not isinstance(segment.causal, torch.Tensor),
    )


def may_be_empty(segment: Segment, layer: Layer) -> bool:
    """Whether some row may see no key, as far as the host knows."""
    queries, keys = segment.host_query_lens, segment.host_seq_lens
    bounded = segment.causal is not False or layer.window[1] is not None
    return not segment.exact or bool(((queries > 0) & ((keys == 0) | (bounded & (queries > keys)))).any())


def seen_rows(segment: Segment, layer: Layer) -> torch.Tensor:
    """[T] bool, the rows that see a key, from the lengths on the device."""
    tokens = segment.tokens.stop - segment.tokens.start
    return has_keys(segment.cu_seqlens_q, segment.seq_lens, tokens, segment.causal, layer.window)


def unseen_rows(segment: Segment, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that see no key, [T] bool, and the same as [T, 1, 1]."""
    found = ~seen_rows(segment, layer)
    return found, found[:, None, None]


def lse_of_rows(
    logs: torch.Tensor,
    form: LseForm,
    batch: tuple[int, int] | None,
    places: torch.Tensor | None,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
) -> torch.Tensor:
    """A vendor's LSE of this form as that of `lse`, [H, T], in natural log; `batch` and `places` are of `as_batch`."""
    heads, tokens = lse.shape
    if batch is not None:
        requests, queries = batch
        tokens = requests * queries
        if form.layout.startswith("b"):
            logs = logs.squeeze(-1) if form.layout == "bhs1" else logs
            logs = logs.permute(2, 0, 1) if form.layout == "bsh" else logs.transpose(0, 1)  # [H, B, Sq]
            logs, form = logs[..., :queries].flatten(1), LseForm(base=form.base)
    logs = lse_rows(logs, form, heads, tokens, cu_seqlens_q)
    return logs if places is None else logs[:, places]


def as_batch(segment: Segment) -> tuple[tuple[int, int], torch.Tensor | None, torch.Tensor | None]:
    """(B, Sq), the token at each place and the place of each token: queries stand at the end of their row.

    There a query of a shorter request is as far from the last key as it should be. None, None: nothing moves.
    """
    lens, longest = segment.host_query_lens, segment.max_query_len
    shape = len(lens), longest
    if (lens == longest).all():
        return shape, None, None
    row, position = ragged_arange(lens)
    places = row.astype(np.int64) * longest + (longest - lens[row]) + position
    sources = np.zeros(len(lens) * longest, dtype=np.int64)
    sources[places] = np.arange(len(places))
    there, here = upload([sources, places], segment.cu_seqlens_q.device)
    return shape, there, here
