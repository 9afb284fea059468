"""Pages that TMA would read whole, as several smaller ones each; version3.py tells why whole ones will not do."""

from __future__ import annotations

from dataclasses import replace

import torch

from portable.backends.adapter import Adapter
from portable.backends.reach import Reach
from portable.backends.views import View, Views, latent_parts
from portable.kernel import KV, Segment
from portable.layer import Layer, LayerTensors

PIECE = 32  # tokens: below the 64 keys of a tile, so that rows are read one by one


class Pieces(Adapter):
    """MLA decode over pages of multiples of `PIECE` tokens: the block table is spread once a step."""

    def rows(self, segment: Segment) -> Segment:
        """The segment over pieces of dense pages."""
        return segment if segment.page_size == PIECE else spread(segment, segment.page_size)

    def views(self, reach: Reach | None, width: int) -> Views:
        """Latent pages as values and keys, in pieces."""
        if (reach, width) not in self._views:
            self._views[reach, width] = Views(lambda kv: in_pieces(kv, width), reach)
        return self._views[reach, width]

    def attend(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of the step; over pages with gaps between them the table is spread anew."""
        apart = segment.page_size if kv.k.is_contiguous() else tokens_apart(kv.k)
        if apart != segment.page_size and segment.block_table is not None:
            segment = replace(segment, prepared=self.prepare(spread(segment, apart), layer))
        super().attend(q, kv, segment, layer, tensors, out, lse)


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
    pages, row = kv.k, kv.k.stride(1)
    count = ((len(pages) - 1) * tokens_apart(pages) + pages.shape[1]) // PIECE
    pieces = pages.as_strided((count, PIECE, pages.shape[2]), (PIECE * row, row, 1))
    return latent_parts(KV(pieces, None), width)
