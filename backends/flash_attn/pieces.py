"""Pages that TMA would read whole, as several smaller ones each; version3.py tells why whole ones will not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from portable.backends.adapter import Adapter, Convention, Step
from portable.backends.views import View, latent_parts, slot_indices
from portable.kernel import KV, Segment
from portable.layer import Layer

PIECE = 32  # tokens: below the 64 keys of a tile, so that rows are read one by one


class Pieces(Adapter):
    """MLA decode over pages of multiples of `PIECE` tokens: the block table is spread once a step."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self._slots = convention.names["block_table"]

    def rows(self, segment: Segment) -> Segment:
        """The segment over pieces of dense pages."""
        return spread(segment, segment.page_size)

    def prepare(self, segment: Segment, layer: Layer) -> Step:
        """The adapter's step, whose table is of dense pages."""
        step = super().prepare(segment, layer)
        if step.calls:
            step.indices = {segment.page_size // PIECE: step.calls[0][self._slots]}
        return step

    def views(self, width: int) -> Callable[[KV], View]:
        """Latent pages as values and keys, in pieces."""
        return partial(in_pieces, width=width)

    def _indices(self, step: Step, apart: int) -> torch.Tensor:
        """The table over pages with gaps, anew in each call: in a graph each replay finds the table of its step."""
        assert step.indices is not None
        ((dense, table),) = step.indices.items()
        return slot_indices(table, dense, apart)


def spread(segment: Segment, apart: int) -> Segment:
    """The segment over the pieces of pages that lie `apart` tokens from each other."""
    assert segment.block_table is not None
    each = torch.arange(segment.page_size // PIECE, dtype=torch.int32, device=segment.block_table.device)
    table = segment.block_table[:, :, None] * (apart // PIECE) + each
    return replace(segment, block_table=table.flatten(1), page_size=PIECE, prepared=None)


def tokens_apart(pages: torch.Tensor) -> int:
    """From a page [page_size, width] to the next.

    Raises:
        ValueError: it is no multiple of `PIECE` tokens.

    >>> tokens_apart(torch.zeros(3, 2, 64, 8)[:, 1])
    128
    """
    if len(pages) < 2:
        return pages.shape[1]
    step, rest = divmod(pages.stride(0), PIECE * pages.stride(1))
    if rest:
        raise ValueError(
            f"cache has strides {list(pages.stride())}; its pages must be a multiple of {PIECE} rows apart"
        )
    return step * PIECE


def in_pieces(kv: KV, width: int) -> View:
    """Latent pages as pieces of them: values, of their first `width` columns, and keys, of the others."""
    pages, row, apart = kv.k, kv.k.stride(1), tokens_apart(kv.k)
    count = ((len(pages) - 1) * apart + pages.shape[1]) // PIECE
    pieces = pages.as_strided((count, PIECE, pages.shape[2]), (PIECE * row, row, 1))
    return latent_parts(KV(pieces, None), width)._replace(apart=apart // PIECE)
