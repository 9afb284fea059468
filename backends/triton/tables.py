"""`portable.paging` in one launch each: slots of tokens, page tables and compressed rows, from tensors on the device.

The functions have the names, arguments and results of those in `portable.paging`, which need 3 to 12 launches.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from portable.backends.triton.launch import KEPT, Bound, bound
from portable.paging import PageCsr
from portable.ragged import next_power_of_2

BLOCK = 256


@triton.jit
def _slot_mapping(
    block_table, requests, positions, slots, table_stride, num_tokens, width, page_size, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < num_tokens
    request = tl.load(requests + token, live, 0).to(tl.int64)
    position = tl.load(positions + token, live, 0).to(tl.int64)
    column = position // page_size
    page = tl.load(block_table + request * table_stride + column, live & (column < width), 0).to(tl.int64)
    tl.store(slots + token, page * page_size + position % page_size, live)


def slot_mapping(
    block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor:
    """[T] int64; see `portable.paging.slot_mapping`."""
    tokens = positions.numel()
    slots = torch.empty(tokens, dtype=torch.int64, device=block_table.device)
    if tokens:
        _slot_mapping_kernel()(
            (-(-tokens // BLOCK),),
            block_table,
            requests,
            positions,
            slots,
            block_table.stride(0),
            tokens,
            block_table.shape[1],
            page_size,
        )
    return slots


@cache
def _slot_mapping_kernel() -> Bound:
    return bound(_slot_mapping, {"BLOCK": BLOCK})


@triton.jit
def _page_table(
    req_to_token,
    rows,
    seq_lens,
    offsets,
    table,
    token_stride,
    num_tokens,
    width,
    page_size,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = column * page_size
    live = (column < width) & (first < tl.load(seq_lens + request))
    at = first
    if offsets is not None:
        at += tl.load(offsets + request)
    at = tl.minimum(at, num_tokens - 1)
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(req_to_token + row * token_stride + at, live, 0)
    tl.store(table + request.to(tl.int64) * width + column, (slot // page_size).to(tl.int32), column < width)


def page_table_from_tokens(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    width: int,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, width] int32; see `portable.paging.page_table_from_tokens`."""
    requests = rows.numel()
    table = torch.empty(requests, width, dtype=torch.int32, device=req_to_token.device)
    if requests and width:
        block, kernel = _page_table_kernel(width)
        kernel(
            (requests, -(-width // block)),
            req_to_token,
            rows,
            seq_lens,
            offsets,
            table,
            req_to_token.stride(0),
            req_to_token.shape[1],
            width,
            page_size,
        )
    return table


@lru_cache(KEPT)
def _page_table_kernel(width: int) -> tuple[int, Bound]:
    block = min(BLOCK, next_power_of_2(width))
    return block, bound(_page_table, {"BLOCK": block})


@triton.jit
def _page_csr(
    block_table,
    seq_lens,
    indptr,
    indices,
    last_page_len,
    table_stride,
    width,
    num_requests,
    num_pages,
    page_size,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program b < num_requests writes row b, and the one behind them what no row has. Each adds up the pages before its
    # row: at 1,024 requests that is 4 KiB to read, less than a second launch costs.
    request = tl.program_id(0)
    each = tl.arange(0, REQUESTS)
    lens = tl.load(seq_lens + each, each < num_requests, 0)
    pages = (lens + page_size - 1) // page_size
    start = tl.sum(tl.where(each < request, pages, 0))
    tl.store(indptr + request, start)
    if request < num_requests:
        length = tl.load(seq_lens + request)
        count = (length + page_size - 1) // page_size
        tl.store(last_page_len + request, tl.where(length > 0, (length - 1) % page_size + 1, 0))
        for begin in range(0, count, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            live = column < count
            row = block_table + request.to(tl.int64) * table_stride
            page = tl.load(row + tl.minimum(column, width - 1), live, 0)
            tl.store(indices + start + column, page.to(tl.int32), live & (start + column < num_pages))
    else:
        for begin in range(start, num_pages, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            tl.store(indices + column, tl.zeros([BLOCK], tl.int32), column < num_pages)


def page_csr(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int) -> PageCsr:
    """See `portable.paging.page_csr`; `block_table` has a column at least."""
    requests, device = seq_lens.numel(), block_table.device
    indptr = torch.empty(requests + 1, dtype=torch.int32, device=device)
    indices = torch.empty(num_pages, dtype=torch.int32, device=device)
    last = torch.empty(requests, dtype=torch.int32, device=device)
    _page_csr_kernel(requests)(
        (requests + 1,),
        block_table,
        seq_lens,
        indptr,
        indices,
        last,
        block_table.stride(0),
        block_table.shape[1],
        requests,
        num_pages,
        page_size,
    )
    return PageCsr(indptr, indices, last, page_size)


@lru_cache(KEPT)
def _page_csr_kernel(requests: int) -> Bound:
    return bound(_page_csr, {"REQUESTS": next_power_of_2(max(1, requests)), "BLOCK": BLOCK})
