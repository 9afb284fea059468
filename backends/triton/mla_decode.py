"""MLA decode over the latent cache, cut into items by `schedule`: ranks up to 512, any page size and number of heads.

The rows of a tile are the (query token, head) pairs of a request: all heads share the latent rows, so a tile reads
each of them once for all. Where a tile's keys are split, a second kernel joins the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.fp8 import FLAVOURS
from portable.backends.triton.launch import Bound, bound, target_of
from portable.backends.triton.mla_decode_combine import combine_mla_kernel, shape_of
from portable.backends.triton.mla_decode_kernel import attend_mla_kernel
from portable.backends.triton.mla_decode_tiles import Tile, padded, tile_of
from portable.backends.triton.paged import LONG, fp8_options, launch_options
from portable.backends.triton.paged_result import LOG2E
from portable.backends.triton.schedule import Schedule, schedule
from portable.kernel import KV, GraphLevel, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.platform.target import Target
from portable.sets import Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What one step's layers share: the list of work, room for partial results, and the kernels by their constants."""

    work: Schedule
    tile: Tile
    rows: int  # of a tile that may be live
    parts: torch.Tensor | None  # [slots, rows, rank] f32
    parts_lse: torch.Tensor | None  # [slots, rows] f32, in units of log2
    kernels: dict[bool, tuple[Bound, Bound]]


def prepare(segment: Segment, layer: Layer, tile: Tile | None = None) -> Prepared:
    """List the segment's work on its device."""
    target = target_of(segment.seq_lens)
    tile = tile or tile_of(target, layer, segment.max_query_len)
    rows = tile.block_m if segment.max_query_len >= LONG else min(tile.block_m, layer.num_heads * segment.max_query_len)
    once = (target.compute_units or 64) * tile.programs
    work = schedule(
        segment,
        (None, None),
        layer.num_heads,
        tile.block_m,
        tile.block_n,
        enough=max(1, tile.enough // tile.block_n),
        once=once,
        wanted=once * tile.turns,
        fixed=layer.batch_invariant,
    )
    parts = parts_lse = None
    if work.slots:
        device = segment.seq_lens.device
        parts = torch.empty((work.slots, rows, layer.kv_lora_rank), dtype=torch.float32, device=device)
        parts_lse = parts.new_empty((work.slots, rows))
    return Prepared(work, tile, rows, parts, parts_lse, {})


def attend(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """One layer of a step that was prepared; see `portable.kernel` for the arguments."""
    made: Prepared = segment.prepared
    work, k, table, causal = made.work, kv.k, segment.block_table, segment.causal
    assert table is not None
    num_items = len(work.items)
    if not num_items:
        return
    k_scale = None
    if k.dtype.itemsize == 1:
        k, k_scale = k.view(torch.uint8), tensors.k_scale
    k_page, k_row = k.stride()[:2]
    wide = k_row * k.shape[1] >= 1 << 31
    found = made.kernels.get(wide)
    if found is None:
        found = made.kernels[wide] = _kernels(target_of(q), layer, segment, wide)
    attend_bound, combine_bound = found
    out_token, out_head, _ = out.stride()
    lse_head, lse_token = (0, 0) if lse is None else lse.stride()
    attend_bound(
        (num_items,),
        q,
        k,
        out,
        lse,
        k_scale,
        causal if isinstance(causal, torch.Tensor) else None,
        table,
        work.items,
        work.counts,
        made.parts,
        made.parts_lse,
        layer.scale * LOG2E.value,
        *q.stride()[:2],
        k_page,
        k_row,
        out_token,
        out_head,
        lse_head,
        lse_token,
        table.stride(0),
    )
    if made.parts is not None:
        combine_bound(
            (len(work.merges) * made.rows * combine_bound.options["CHUNKS"],),
            out,
            lse,
            work.merges,
            work.counts,
            made.parts,
            made.parts_lse,
            out_token,
            out_head,
            lse_head,
            lse_token,
        )


def _kernels(target: Target, layer: Layer, segment: Segment, wide: bool) -> tuple[Bound, Bound]:
    """Both kernels with everything that is constant for the layers of a step."""
    made: Prepared = segment.prepared
    tile = made.tile
    shape = {
        "HEADS": layer.num_heads,
        "ROWS": made.rows,
        "BLOCK_M": tile.block_m,
        "RANK": layer.kv_lora_rank,
        **launch_options(target),
    }
    attend_options = {
        "CAUSAL": segment.causal if isinstance(segment.causal, bool) else None,
        "PAGE": segment.page_size,
        "WIDE": wide,
        "BLOCK_N": tile.block_n,
        "PIECES": tile.pieces,
        "PAD_V": padded(layer.kv_lora_rank),
        "ROPE": layer.qk_rope_head_dim,
        "PAD_ROPE": padded(layer.qk_rope_head_dim),
        **fp8_options(target, layer),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **tile.options,
    }
    combine_options = shape_of(layer.kv_lora_rank, len(made.work.items) // max(1, 2 * len(made.work.merges)))
    return bound(attend_mla_kernel, shape | attend_options), bound(combine_mla_kernel, shape | combine_options)


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.MLA_DECODE,
            name="triton.mla_decode",
            kv_dtypes=frozenset(FLAVOURS),
            head_dims=Sizes(most=576),
            v_head_dims=Sizes(most=512),  # 16 queries of 1,024 columns and more do not fit a gfx942, or spill
            gqa_ratios=Sizes(most=128),
            page_sizes=Sizes(most=256),
            features=frozenset({"noncausal", "lse", "batch_invariant"}),
            graph=GraphLevel.ALWAYS,
        ),
        attend,
        prepare,
    ),
)
