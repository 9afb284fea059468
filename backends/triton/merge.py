"""Merging attention over disjoint sets of keys by LSE: any number of parts in one pass, each with its own strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import KEPT, Typed, bound, target_of
from portable.kernel import Kernel, Op
from portable.ragged import cdiv, next_power_of_2
from portable.sets import ANY_SIZE

MOST_PARTS = 8  # of one launch; each is a pointer and three strides among the arguments
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """8 tokens are 32 bytes of an LSE [H, T], the least that a load takes from memory."""

    tokens: int
    heads: int
    width: int  # of the head dim, at most
    warps: int


TILES = {"nvidia": Tile(8, 4, 128, 4), "amd": Tile(16, 4, 128, 4)}


@triton.jit(do_not_specialize=["num_tokens", "lse_head", "lse_token"])
def _merge(
    outs,  # N pointers
    lses,
    strides,  # token, head, LSE head, LSE token of each part
    sinks,
    out,
    lse,
    out_token,
    out_head,
    lse_head,
    lse_token,
    num_tokens,
    num_heads,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    # rows of a tile are (token, head), so that the heads of a token are one run of memory
    row = tl.arange(0, TOKENS * HEADS)
    token, head = row // HEADS, (row % HEADS + tl.program_id(1) * HEADS).to(tl.int64)
    live = (first + token < num_tokens) & (head < num_heads)
    top = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, head < num_heads, 0.0).to(tl.float32)
    logs = ()
    for i in tl.static_range(N):
        at = lses[i] + first * strides[4 * i + 3] + head * strides[4 * i + 2] + token * strides[4 * i + 3]
        log = tl.load(at, live, float("-inf"))
        log = tl.where(log == float("inf"), float("-inf"), log)
        top = tl.maximum(top, log, propagate_nan=tl.PropagateNan.ALL)
        logs += (log,)  # type: ignore[assignment]
    base = tl.where(top == float("-inf"), 0.0, top)  # keeps (-inf) - (-inf) out of the exponents
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    if sinks is not None:
        total += tl.exp2((tl.load(sinks + head, head < num_heads, 0.0).to(tl.float32) - base) * LOG2_E)
    for i in tl.static_range(N):
        total += tl.exp2((logs[i] - base) * LOG2_E)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    if lse is not None:
        at = lse + first * lse_token + head * lse_head + token * lse_token
        tl.store(at, base + tl.log2(total) * LN_2, live)
    for begin in tl.static_range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        merged = tl.zeros([TOKENS * HEADS, BLOCK], tl.float32)
        for i in tl.static_range(N):
            some = live & (logs[i] != float("-inf"))  # what an empty part holds is not read: it may be NaN
            at = outs[i] + first * strides[4 * i] + (token * strides[4 * i] + head * strides[4 * i + 1])[:, None]
            part = tl.load(at + column[None, :], some[:, None] & (column < WIDTH)[None, :], 0.0).to(tl.float32)
            merged += part * (tl.exp2((logs[i] - base) * LOG2_E) * inverse)[:, None]
        at = out + first * out_token + (token * out_token + head * out_head)[:, None] + column[None, :]
        tl.store(at, merged.to(out.dtype.element_ty), live[:, None] & (column < WIDTH)[None, :])


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """All parts, `MOST_PARTS` at a time; `out` may be one of `outs`."""
    if len(outs) > MOST_PARTS:
        some, log = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        merge(outs[:MOST_PARTS], lses[:MOST_PARTS], None, some, log)
        merge((some, *outs[MOST_PARTS:]), (log, *lses[MOST_PARTS:]), sinks, out, lse)
        return
    if not out.numel():
        return
    made = _merging(
        target_of(out).vendor,
        out.shape,
        tuple([s for o, x in zip(outs, lses, strict=True) for s in (*o.stride()[:2], *x.stride())]),
        sinks is not None,
        lse is not None,
    )
    results = *out.stride()[:2], *((0, 0) if lse is None else lse.stride())
    made.launch(made.grid, tuple(outs), tuple(lses), made.strides, sinks, out, lse, *results, *made.sizes)


class _Merging(NamedTuple):
    """What a merge of such sizes and strides launches."""

    launch: Typed
    grid: tuple[int, int]
    strides: tuple[int, ...]
    sizes: tuple[int, int]  # tokens, heads


@lru_cache(KEPT)
def _merging(vendor: str, shape: torch.Size, strides: tuple[int, ...], sinks: bool, lse: bool) -> _Merging:
    """`sinks` and `lse` are here for `Typed`, for each may be None."""
    tokens, heads, width = shape
    tile = TILES[vendor]
    options = {
        "N": len(strides) // 4,
        "WIDTH": width,
        "TOKENS": tile.tokens,
        "HEADS": tile.heads,
        "BLOCK": min(tile.width, next_power_of_2(width)),
        "num_warps": tile.warps,
    }
    grid = cdiv(tokens, tile.tokens), cdiv(heads, tile.heads)
    return _Merging(Typed(bound(_merge, options)), grid, strides, (tokens, heads))


KERNELS = (Kernel(on_gpus(op=Op.MERGE, name="triton.merge", head_dims=ANY_SIZE, gqa_ratios=ANY_SIZE), merge),)
