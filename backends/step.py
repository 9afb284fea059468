"""What all layers of a step share: the arguments that a callable gets in it, and where its rows go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from portable.backends.convention import CSR, Convention
from portable.backends.reach import Reach, reach_of
from portable.backends.rows import as_batch, may_be_empty, token_csr, unseen_rows
from portable.backends.turns import Caches, Turns, turns
from portable.backends.views import grouped, grouped_lse, parts, turned_lse
from portable.kernel import GraphLevel, Segment, head_dims
from portable.layer import Layer
from portable.paging import num_pages, page_csr
from portable.ragged import cu_from_lens, ragged_arange

FAR = 2**30  # keys: a right side that is open in effect, and that a position may be added to in 32 bits


@dataclass(slots=True)  # frozen, one takes 2 us more to make
class Step:
    """What all layers of a step share."""

    function: Callable[..., Any]
    segment: Segment  # as the callable sees it
    calls: tuple[dict[str, Any], ...] = ()  # two where requests differ in being causal; none where no row has a key
    causal: torch.Tensor | None = None  # [T] bool: the rows for which the first of two calls is right
    unseen: tuple[torch.Tensor, torch.Tensor] | None = None  # rows without a key, [T] and [T, 1, 1] bool; None: no row
    sets: tuple[bool, bool] | None = None  # whether out, and the LSE, is set where no key is seen; None: all see one
    batch: tuple[int, int] | None = None  # (B, Sq) where q is [B, Sq, H, D]
    sources: torch.Tensor | None = None  # [B * Sq] i64, the token at each place; None where it is the same
    places: torch.Tensor | None = None  # [T] i64, the place of each token
    grouped: Turns | None = None  # `out` as [B, Sq, ...], where no row has to move
    dense: Turns | None = None  # the same where it is dense; None of others
    queries: Turns | None = None  # q as one of the two
    dense_rows: bool = False  # whether q is made dense before it is looked at
    plain: bool = False  # whether what is returned is as `out` grouped so
    logs: tuple[int, ...] | None = None  # the shape of an LSE that is copied as it is
    lse_as: Turns | None = None  # `lse` seen in that shape; None where it has it
    parts: Turns | None = None  # q as its columns that are qv, and those that are q
    wide: int = 0  # what q, K and V are padded to; 0: they are as wide as they should be
    reach: Reach | None = None  # of the callable's addresses
    takes_out: bool = False  # whether it is given something to write its output to
    direct: bool = False  # whether that may be `out` itself, where it is dense
    views: Caches | None = None  # what the cache is given as; None: as it is
    indices: dict[int, torch.Tensor] | None = None  # where keys are, for pages so far apart; dense ones come first


def step_of(
    convention: Convention,
    function: Callable[..., Any],
    segment: Segment,
    layer: Layer,
    fixed: dict[str, Any],
    caches: Callable[[Reach | None, int], Caches],
) -> Step:
    """The step of a segment whose arguments, masks aside, are `fixed`; `caches` gives the views of its caches."""
    caps, form = segment.kernel.caps, convention.lse
    batch = sources = places = rows = indices = None
    logs: tuple[int, ...] | None = None
    lse_as = None
    if convention.rows == "batch":
        batch, sources, places = as_batch(segment)
    if isinstance(segment.causal, torch.Tensor):
        request = torch.from_numpy(ragged_arange(segment.host_query_lens)[0])
        rows = segment.causal[request.to(segment.causal.device).long()]
    ways = (bool(segment.causal),) if rows is None else (True, False)
    unseen = unseen_rows(segment, layer) if may_be_empty(segment, layer) else None
    sets = not convention.zeroes_empty, not (form.empty == "sink" or (form.empty == "-inf" and not layer.sinks))
    key_dim, width = head_dims(caps.op, layer)
    wide = max(key_dim, width) if convention.equal_value_dim and key_dim != width else 0
    reach = reach_of(caps, convention.address_window)
    paged = segment.block_table is not None
    if paged and convention.pages != "page":
        indices = {segment.page_size: fixed[convention.names["kv_indices"]]}
    # what a graph replays has other lengths
    unset = not any(sets) or (unseen is None and caps.graph_level is GraphLevel.NEVER)
    straight = len(ways) == 1 and sources is None  # rows of results are those of q
    parted = turns(parts, (width, key_dim - width)) if "qv" in convention.names else None
    rows_as = dense_as = queries = None
    if batch is not None and sources is None:
        rows_as, dense_as = turns(grouped, batch), turns(grouped, batch, dense=True)
        queries = turns(grouped, batch, dense=convention.dense_rows and reach is None)
    if form.base == "e":
        tokens = segment.tokens.stop - segment.tokens.start
        if form.layout == "ht" and batch is None:
            logs = (layer.num_heads, tokens)
        elif straight and form.layout == "th" and batch is None:
            logs, lse_as = (tokens, layer.num_heads), turns(turned_lse, ())
        elif straight and form.layout == "bhs" and batch is not None:
            logs, lse_as = (batch[0], layer.num_heads, batch[1]), turns(grouped_lse, batch)
    takes_out = "out" in convention.names and (batch is None or batch[1] == 1 or not convention.out_of_single)
    return Step(
        function,
        segment,
        tuple({**fixed, **masks(convention, layer, causal)} for causal in ways),
        rows,
        unseen,
        None if unset else sets,
        batch,
        sources,
        places,
        rows_as,
        dense_as,
        queries,
        convention.dense_rows and (queries is None or parted is not None or reach is not None),
        straight and not wide,
        logs,
        lse_as,
        parted,
        wide,
        reach,
        takes_out,
        straight and wide in (0, width),
        caches(reach, width) if paged and (convention.pages != "page" or layer.family == "mla") else None,
        indices,
    )


def arguments(convention: Convention, segment: Segment, layer: Layer) -> dict[str, Any]:
    """What a step fixes, masks aside, by the callable's keywords."""
    names = convention.names
    longest = segment.max_query_len
    if convention.folds_single and longest == 1 and (segment.host_query_lens != 1).any():
        longest = 2  # a longer grid costs nothing, and rows stay with their requests
    known: dict[str, Any] = {
        "cu_seqlens_q": segment.cu_seqlens_q,
        "seq_lens": segment.seq_lens,
        "max_query_len": longest,
        "max_seq_len": segment.max_seq_len,
        "block_table": segment.block_table,
        "page_size": segment.page_size,
        "scale": layer.scale,
        "softcap": layer.softcap or 0.0,
    }
    if "cu_seqlens_k" in names:
        square = segment.exact and (segment.host_query_lens == segment.host_seq_lens).all()
        known["cu_seqlens_k"] = segment.cu_seqlens_q if square else cu_from_lens(segment.seq_lens)
    if any(name in names for name in CSR):
        assert segment.block_table is not None
        if convention.pages != "page":
            csr, known["page_size"] = token_csr(segment), 1
        else:
            pages = num_pages(segment.host_seq_lens, segment.page_size)
            csr = page_csr(segment.block_table, segment.seq_lens, segment.page_size, pages)
        known |= zip(CSR, (csr.indptr, csr.indices, csr.last_page_len), strict=True)
    said = {keyword: known[name] for name, keyword in names.items() if name in known}
    made = {keyword: make(segment, layer) for keyword, make in convention.step.items()}
    return {**convention.fixed, **said, **made}


def masks(convention: Convention, layer: Layer, causal: bool) -> dict[str, Any]:
    """Causality and window. A callable with an argument for the first closes the right side itself, as a rule."""
    names = convention.names
    left, right = layer.window
    literal = convention.literal_right and left is not None
    if causal:
        right = None if "causal" in names and not literal else 0
    elif literal and right is None:
        right = FAR
    left, right = (convention.open_side if side is None else side for side in (left, right))
    window = (left, right, *convention.window_more)
    known = {"causal": causal, "window": window, "window_left": left, "window_right": right}
    return {names[name]: value for name, value in known.items() if name in names}
