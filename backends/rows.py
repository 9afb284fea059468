"""Where the rows of a step are: those without keys, those of a rectangular batch, and the slots of pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from portable.kernel import KV, KernelCaps, Segment
from portable.layer import Layer, UnsupportedError
from portable.merge import has_keys
from portable.paging import PageCsr, num_pages, page_csr
from portable.ragged import ragged_arange
from portable.upload import upload

ANOTHER = "Name another backend, or give Attention its num_pages, so that one is chosen that can"


def token_csr(segment: Segment) -> PageCsr:
    """The slots of each request's keys, as pages of one token."""
    assert segment.block_table is not None
    pages = num_pages(segment.host_seq_lens, segment.page_size)
    csr = page_csr(segment.block_table, segment.seq_lens, segment.page_size, pages)
    return csr.of_tokens(int(segment.host_seq_lens.sum()))


def as_slots(kv: KV, indices: torch.Tensor, page_size: int, *, paged: bool = False) -> tuple[KV, torch.Tensor]:
    """Pages [pages, page_size, ...] as slots [N, H, D], and slot numbers that skip what lies between two pages.

    Latent pages have one head. `paged`: each slot is a page of one token, [N, 1, H, D].

    Raises:
        ValueError: pages that do not lie a whole number of tokens apart, the same in K and V.
    """
    k, v = kv
    if k.is_contiguous() and (v is None or v.is_contiguous()):
        if v is not None and not paged:
            return KV(k.flatten(0, 1), v.flatten(0, 1)), indices
        one = (-1, 1) if paged else (-1,)
        k = k.view(*one, *(k.shape[2:] if k.dim() == 4 else (1, k.shape[2])))
        return KV(k, None if v is None else v.view(*one, *v.shape[2:])), indices
    steps = {each.stride(0) / each.stride(1) for each in kv if each is not None}
    step = steps.pop()
    if steps or step != int(step):
        strides = " and ".join(str(list(each.stride())) for each in kv if each is not None)
        raise ValueError(f"caches have strides {strides}; their pages must be the same whole number of tokens apart")
    if step != page_size:
        indices = indices + indices // page_size * (int(step) - page_size)

    def slots(pages: torch.Tensor) -> torch.Tensor:
        count = (len(pages) - 1) * int(step) + page_size
        found = pages.as_strided((count, *pages.shape[2:]), pages.stride()[1:])
        found = found if pages.dim() == 4 else found.unsqueeze(1)
        return found.unsqueeze(1) if paged else found

    return KV(slots(k), None if v is None else slots(v)), indices


def check_reach(
    caps: KernelCaps,
    window: int | None,
    num_pages: int | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
) -> None:
    """Raise an UnsupportedError for memory that a kernel's offsets do not reach; they would wrap without a word.

    Args:
        window: bytes whose multiples K and V may not cross; None: any addresses.
        num_pages: of the cache; None for contiguous K and V.
    """
    if caps.max_block_id is not None and num_pages is not None and num_pages - 1 > caps.max_block_id:
        raise UnsupportedError(
            f"the cache has {num_pages} pages; {caps.name} can address {caps.max_block_id + 1}. {ANOTHER}"
        )
    most = caps.max_tensor_bytes
    if window is None and most is None:
        return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        reach = 0 if tensor is None else tensor.nbytes
        if tensor is None or not reach:
            continue
        if not tensor.is_contiguous():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            reach = (last + 1) * tensor.itemsize
        if most is not None and reach > most:
            raise UnsupportedError(f"{name} extends over {reach} bytes; {caps.name} can address {most}. {ANOTHER}")
        if window is not None and name != "q" and tensor.data_ptr() % window + reach > window:
            raise UnsupportedError(
                f"{name} crosses a multiple of {window} bytes in memory, where addresses of {caps.name} wrap. {ANOTHER}"
            )


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
