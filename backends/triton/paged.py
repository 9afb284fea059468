"""Attention over the pages of a cache: decode, verify and extend in one kernel, cut into items by `schedule`.

The rows of a tile are the (query token, query head) pairs of a request that share a KV head, so that K and V are read
once for all of them. An item is a tile and a range of its keys; where the range is not all of them, the program
leaves a partial result, and a second kernel joins the parts of each tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.fp8 import FLAVOURS
from portable.backends.triton.launch import Bound, bound, target_of
from portable.backends.triton.paged_kernel import attend_kernel
from portable.backends.triton.paged_load import even
from portable.backends.triton.paged_result import LOG2E, combine_kernel
from portable.backends.triton.paged_tiles import Tile, rows_of, tile_of
from portable.backends.triton.schedule import OPEN, Schedule, schedule
from portable.backends.triton.strides import common_step
from portable.backends.triton.xcd import room, run_of
from portable.kernel import FEATURES, KV, GraphLevel, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.platform.target import Target
from portable.ragged import cdiv, next_power_of_2  # Triton's own take 2.8 us each
from portable.sets import ANY_SIZE, Sizes, multiple_of

LONG = 16  # query tokens from which on rows of a tile are counted as live: else each length had kernels of its own
JOINS = 16  # rows that a compute unit joins at once; where few tiles are split, most of more programs would find none


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What one step's layers share: the list of work, room for partial results, and the kernels by their constants."""

    work: Schedule
    tile: Tile
    block_m: int
    rows: int  # of a tile that may be live
    run: int  # items that may read the same keys, where an XCD takes them together
    parts: torch.Tensor | None  # [slots, Hkv, rows, Dv] f32
    parts_lse: torch.Tensor | None  # [slots, Hkv, rows] f32, in units of log2
    joins: int  # the most programs of the second kernel
    kernels: dict[tuple[object, ...], tuple[Bound, Bound]]


def prepare(segment: Segment, layer: Layer, tile: Tile | None = None) -> Prepared:
    """List the segment's work on its device."""
    target = target_of(segment.seq_lens)
    block_m = rows_of(layer, segment.max_query_len)
    rows = block_m if segment.max_query_len >= LONG else min(block_m, layer.group * segment.max_query_len)
    tiles = cdiv(layer.group * segment.max_query_len, block_m)
    run = run_of(tiles, target.xcds)
    units = target.compute_units or 64
    few = 2 * len(segment.seq_lens) * tiles * layer.num_kv_heads <= units and not layer.batch_invariant
    tile = tile or tile_of(target, layer, block_m, few)
    once = -(-units * tile.programs // layer.num_kv_heads)
    work = schedule(
        segment,
        layer.window,
        layer.group,
        block_m,
        tile.block_n,
        enough=max(1, tile.enough // tile.block_n),
        once=once,
        wanted=once * tile.turns,
        multiple=room(1, target.xcds, run),
        fixed=layer.batch_invariant,
    )
    parts = parts_lse = None
    if work.slots:
        shape = (work.slots, layer.num_kv_heads, rows)
        parts = torch.empty((*shape, layer.v_head_dim), dtype=torch.float32, device=segment.seq_lens.device)
        parts_lse = parts.new_empty(shape)
    return Prepared(work, tile, block_m, rows, run, parts, parts_lse, JOINS * units, {})


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
    work, k, v, table = made.work, kv.k, kv.v, segment.block_table
    assert v is not None and table is not None
    k_scale = v_scale = None
    pairs = False
    fp8 = k.dtype.itemsize == 1
    if fp8:
        k_scale, v_scale = tensors.k_scale, tensors.v_scale
        narrow = min(layer.qk_head_dim, layer.v_head_dim) <= 16  # half of which is less than a product takes
        pairs = not narrow and layer.dtype.itemsize == 2 and even(k) and even(v)
        k, v = (each.view(torch.int16 if pairs else torch.uint8) for each in (k, v))
    k_strides, v_strides = k.stride(), v.stride()
    page_size = k.shape[1]
    wide = max(k_strides[1], v_strides[1]) * page_size >= 1 << 31
    out_token, out_head, _ = out.stride()
    strides = *q.stride()[:2], *k_strides[:3], *v_strides[:3], out_token, out_head
    step = 1
    if (layer.qk_head_dim | layer.v_head_dim) % (32 if pairs else 16):
        step = common_step(*strides)
        strides = tuple(stride // step for stride in strides)
    key = (step, wide, pairs, k_scale is not None and k_scale.numel() > 1, v_scale is not None and v_scale.numel() > 1)
    found = made.kernels.get(key)
    if found is None:
        found = made.kernels[key] = _kernels(target_of(q), layer, segment, *key)
    attend_bound, combine_bound = found
    sinks, alibi = tensors.sinks if layer.sinks else None, tensors.alibi if layer.alibi else None
    factor, softcap = layer.scale * LOG2E.value, layer.softcap
    if softcap is not None:
        softcap, factor = softcap * LOG2E.value, 2 * factor / softcap
    left, right = layer.window
    causal = segment.causal
    lse_head, lse_token = (0, 0) if lse is None else lse.stride()
    num_items = len(work.items)
    if not num_items:
        return
    attend_bound(
        (num_items * layer.num_kv_heads,),
        q,
        k,
        v,
        out,
        lse,
        sinks,
        alibi,
        k_scale,
        v_scale,
        None if causal is True or causal is False else causal,
        table,
        work.items,
        work.counts,
        made.parts,
        made.parts_lse,
        factor,
        softcap,
        OPEN if left is None else min(left, OPEN),
        0 if causal is True else OPEN if right is None else min(right, OPEN),
        *strides,
        lse_head,
        lse_token,
        table.stride(0),
    )
    if made.parts is not None:
        combine_bound(
            (min(len(work.merges) * layer.num_kv_heads * made.rows, made.joins),),
            out,
            lse,
            sinks,
            work.merges,
            work.counts,
            made.parts,
            made.parts_lse,
            out_token,
            out_head,
            lse_head,
            lse_token,
        )


NATIVE = {torch.float8_e4m3fn: ("e4m3fn", tl.float8e4nv), torch.float8_e4m3fnuz: ("e4m3fnuz", tl.float8e4b8)}
PDL = ("wgmma", "tcgen05")  # matrix instructions of the devices that have programmatic dependent launch


def fp8_options(target: Target, layer: Layer) -> dict[str, Any]:
    """How a kernel reads the bytes of a cache."""
    flavour, (name, native) = FLAVOURS.get(layer.kv_dtype), NATIVE.get(layer.kv_dtype, ("", None))
    return {"FP8": None if flavour is None else tuple(flavour), "NATIVE": native if target.fp8 == name else None}


def launch_options(target: Target) -> dict[str, bool]:
    """Whether a kernel begins while the one before it ends."""
    pdl = target.vendor == "nvidia" and target.matrix in PDL
    return {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}


def _kernels(
    target: Target,
    layer: Layer,
    segment: Segment,
    step: int,
    wide: bool,
    pairs: bool,
    k_per_head: bool,
    v_per_head: bool,
) -> tuple[Bound, Bound]:
    """Both kernels with everything that is constant for the layers of a step."""
    made: Prepared = segment.prepared
    tile = made.tile
    shape = {
        "GROUP": layer.group,
        "KV_HEADS": layer.num_kv_heads,
        "ROWS": made.rows,
        "BLOCK_M": made.block_m,
        "WIDTH_V": layer.v_head_dim,
        "PAD_V": next_power_of_2(layer.v_head_dim),
        **launch_options(target),
    }
    attend_options = {
        "XCDS": target.xcds,
        "RUN": made.run,
        "CAUSAL": segment.causal if isinstance(segment.causal, bool) else None,
        "LEFT": layer.window[0] is not None,
        "MASKED": tile.masked,
        "SCALES": (int(k_per_head), int(v_per_head)),
        "PAGE": segment.page_size,
        "WIDE": wide,
        "BLOCK_N": tile.block_n,
        "WIDTH_K": layer.qk_head_dim,
        "PAD_K": next_power_of_2(layer.qk_head_dim),
        **fp8_options(target, layer),
        "PAIRS": pairs,
        "STEP": step,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **tile.options,
    }
    return bound(attend_kernel, shape | attend_options), bound(combine_kernel, {**shape, "SPLITS": 16, "num_warps": 4})


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.PAGED,
            name="triton.paged",
            kv_dtypes=frozenset(FLAVOURS),
            head_dims=multiple_of(8, up_to=256, at_least=16),
            gqa_ratios=ANY_SIZE,
            page_sizes=Sizes(most=256),
            features=FEATURES,
            graph=GraphLevel.ALWAYS,
        ),
        attend,
        prepare,
    ),
)
