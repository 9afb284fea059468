"""Launches paged_decode.cu: up to 8 query tokens a request over the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from portable.backends.hip.archs import FP8_NAMES, NAMES, on_gpus
from portable.backends.hip.launch import Function, target_of
from portable.kernel import FEATURES, KV, GraphLevel, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cdiv
from portable.sets import ANY_SIZE, Sizes, multiple_of

LOG2E = 1.4426950408889634
OPEN = 2**31 - 1  # of a side of the window
BLOCKS = 2  # that run on a compute unit at once
TURNS = 4  # blocks per place for one: even out ragged batches
FEWEST = 256  # keys of a part: 16 at a time, and the merge of a block's waves costs as much as 100


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """How the keys of a step are split, and where partial results go."""

    rows: int  # of a block
    row_blocks: int
    chunk: int  # keys of a part
    splits: int
    parts: torch.Tensor | None  # [T, H, splits, Dv] f32
    parts_lse: torch.Tensor | None  # [T, H, splits] f32, in units of log2


def prepare(segment: Segment, layer: Layer) -> Prepared:
    """Parts of equal size, so that long requests take more blocks: no length on the device is read."""
    requests, tokens = len(segment.seq_lens), segment.tokens.stop - segment.tokens.start
    most = layer.group * segment.max_query_len
    rows = most if most <= 2 else 4  # 8 would take 256 registers
    row_blocks = cdiv(most, rows)
    longest = segment.max_seq_len
    left = layer.window[0]
    if left is not None and segment.causal is True:
        longest = min(longest, left + segment.max_query_len)
    if layer.batch_invariant:
        chunk = 512
    else:
        places = BLOCKS * TURNS * (target_of(segment.seq_lens).compute_units or 64)
        lens = segment.host_seq_lens.clip(max=longest)
        keys = int(lens.sum()) * layer.num_kv_heads * row_blocks
        chunk = max(FEWEST, cdiv(cdiv(keys, places), FEWEST) * FEWEST) if requests else FEWEST
    splits = max(1, cdiv(longest, chunk))
    parts = parts_lse = None
    if splits > 1:
        parts = segment.seq_lens.new_empty((tokens, layer.num_heads, splits, layer.v_head_dim), dtype=torch.float32)
        parts_lse = parts.new_empty(parts.shape[:3])
    return Prepared(rows, row_blocks, chunk, splits, parts, parts_lse)


@cache
def _functions(
    dtype: torch.dtype, kv_dtype: torch.dtype, width: int, rows: int, vector: bool
) -> tuple[Function, Function]:
    """Both kernels; a row of up to `width` x 64 elements."""
    types = {"ELEMENT": NAMES[dtype], "STORED": (NAMES | FP8_NAMES)[kv_dtype]}
    sizes = {"EIGHTS": width, "ROWS": rows, "VECTOR": int(vector)}
    attend, combine = (
        Function("paged_decode", name, pointers, numbers, **types, **sizes)
        for name, pointers, numbers in (("attend", 14, "7q3q3q9i2i2f3i"), ("combine", 8, "7q9i2i"))
    )
    return attend, combine


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
    k, v, table = kv.k, kv.v, segment.block_table
    assert v is not None and table is not None
    tokens, heads, _ = q.shape
    if not tokens:
        return
    widest = max(layer.qk_head_dim, layer.v_head_dim)
    width = 1 if widest <= 64 else 2 if widest <= 128 else 4
    run, join = _functions(q.dtype, k.dtype, width, made.rows, _vector(k) and _vector(v))
    fp8 = k.dtype.itemsize == 1
    k_scale, v_scale = (tensors.k_scale, tensors.v_scale) if fp8 else (None, None)
    sinks = tensors.sinks if layer.sinks else None
    factor, softcap = layer.scale * LOG2E, 0.0
    if layer.softcap is not None:
        factor, softcap = layer.scale / layer.softcap, layer.softcap * LOG2E
    left, right = layer.window
    causal = segment.causal
    each = None if isinstance(causal, bool) else causal
    mask = OPEN if left is None else left, 0 if causal is True else OPEN if right is None else right
    strides = *q.stride()[:2], *out.stride()[:2], *((0, 0) if lse is None else lse.stride()), table.stride(0)
    requests = len(segment.seq_lens)
    page_size = k.shape[1]
    shift = page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1
    widths = layer.qk_head_dim, layer.v_head_dim
    sizes = heads, layer.group, *widths, page_size, shift, requests, made.chunk, made.splits
    lens = segment.cu_seqlens_q, segment.seq_lens, each
    run(
        (requests * layer.num_kv_heads * made.row_blocks, made.splits),
        (q, k, v, table, *lens, k_scale, v_scale, sinks, out, lse, made.parts, made.parts_lse),
        *strides, *k.stride()[:3], *v.stride()[:3], *sizes, *mask, factor, softcap, made.row_blocks,
        _step(k_scale), _step(v_scale),
    )  # fmt: skip
    if made.parts is not None:
        join(
            (tokens * heads, 1), (made.parts, made.parts_lse, *lens, sinks, out, lse), *strides, *sizes, *mask
        )  # fmt: skip


def _vector(pages: torch.Tensor) -> bool:
    """Whether every row starts at a multiple of 8 elements."""
    return not (pages.data_ptr() % (8 * pages.element_size()) or any(s % 8 for s in pages.stride()[:3]))


def _step(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.PAGED,
            name="hip.paged_decode",
            dtypes=frozenset({torch.float16, torch.bfloat16}),
            kv_dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz}),
            head_dims=multiple_of(8, up_to=256),
            gqa_ratios=ANY_SIZE,
            query_lens=Sizes(most=8),
            page_sizes=ANY_SIZE,
            features=FEATURES - {"alibi"},
            graph=GraphLevel.UNIFORM,
        ),
        attend,
        prepare,
    ),
)
