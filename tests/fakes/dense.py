"""What the stand-ins for vendor callables share: attention by the reference, and the checks that real ones make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from portable.backends.reference import attend

HALVES = (torch.float16, torch.bfloat16)
Span = tuple[int, int]


@dataclass(frozen=True)
class Empty:
    """What a row without keys gets."""

    lse: float = -torch.inf
    out: float = 0.0


NOTHING = Empty()


def need(right: bool, message: str) -> None:
    """What a vendor's own check does."""
    if not right:
        raise RuntimeError(message)


def check_offsets(cu: torch.Tensor, name: str) -> list[Span]:
    """(start, end) of each request."""
    need(cu.dtype == torch.int32, f"{name} must have dtype int32")
    need(cu.is_contiguous(), f"{name} must be contiguous")
    ends = cu.tolist()
    need(ends[0] == 0 and ends == sorted(ends), f"{name} must rise from 0")
    return list(itertools.pairwise(ends))


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """dtypes, strides and heads."""
    for name, each in (("q", q), ("k", k), ("v", v)):
        need(each.dtype == q.dtype and q.dtype in HALVES, f"{name} has dtype {each.dtype}")
        need(each.stride(-1) == 1, f"{name} must have a contiguous last dimension")
    need(q.shape[-2] % k.shape[-2] == 0 and k.shape[-2] == v.shape[-2], "heads")


def contiguous(rows: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """The keys of each request of packed rows [T, H, D]."""
    need(rows.dim() == 3 and spans[-1][1] <= len(rows), f"offsets reach {spans[-1][1]} of {len(rows)} rows")
    return [rows[start:end] for start, end in spans]


def from_pages(pages: torch.Tensor, table: torch.Tensor, lens: Sequence[int]) -> list[torch.Tensor]:
    """The keys of each request of pages [pages, page_size, H, D]."""
    need(table.dtype == torch.int32 and table.stride(-1) == 1, "the block table must be int32, rows contiguous")
    need(pages.dim() == 4 and len(table) == len(lens), "pages and block table must fit")
    size, found = pages.shape[1], []
    for row, length in zip(table.tolist(), lens, strict=True):
        count = -(-length // size)
        need(count <= len(row), f"{length} tokens need {count} pages; the block table has {len(row)} columns")
        need(all(0 <= page < len(pages) for page in row[:count]), f"pages {row[:count]} of {len(pages)} are read")
        at = torch.tensor(row[:count], dtype=torch.long)
        found.append(pages[at].flatten(0, 1)[:length])
    return found


def lens_of(lens: torch.Tensor) -> list[int]:
    """Lengths [B] as numbers."""
    need(lens.dtype == torch.int32 and lens.is_contiguous(), "lengths must be int32 and contiguous")
    return lens.tolist()


def sides(window: Sequence[int], causal: bool) -> tuple[int | None, int | None]:
    """A window in which every negative number is an open side."""
    left, right = window
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def attention(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    scale: float,
    window: tuple[int | None, int | None],
    softcap: float = 0.0,
    alibi: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    empty: Empty = NOTHING,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """out [Sq, H, Dv] in the queries' dtype and lse [H, Sq] of each request, bottom-right aligned."""
    if alibi is not None:
        need(alibi.dtype == torch.float32 and alibi.shape[-1] == queries[0].shape[1], "slopes must be float32, [H]")
        need(alibi.stride(-1) == 1, "slopes must have a contiguous last dimension")
    outs, lses = [], []
    for q, k, v in zip(queries, keys, values, strict=True):
        given = dict(scale=scale, causal=False, window=window, softcap=softcap or None, alibi=alibi)
        plain = attend(q.float(), k.float(), v.float(), **given)
        out, lse = plain if sinks is None else attend(q.float(), k.float(), v.float(), **given, sinks=sinks.float())
        nothing = plain.lse == -torch.inf
        out = out.masked_fill(nothing.T[..., None], empty.out)
        if sinks is None:
            lse = lse.masked_fill(nothing, empty.lse)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return outs, lses
