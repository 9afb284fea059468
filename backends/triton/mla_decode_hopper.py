"""MLA decode on Hopper: TMA, asynchronous matrix products and specialised warps, every multiprocessor equally long.

The device code is `mla_decode_hopper_kernel.py`, in Gluon. A kernel on the device cuts all blocks of keys into one
range for each multiprocessor, across requests, so that ragged batches take no longer than even ones. fp8 caches, other
page sizes and many query tokens stay with `mla_decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from portable.backends.triton import mla_decode
from portable.backends.triton.archs import TOLERANCE
from portable.backends.triton.launch import Bound, bound, launch, target_of
from portable.backends.triton.mla_decode_combine import combine_mla_kernel, shape_of
from portable.backends.triton.paged_result import LOG2E
from portable.kernel import KV, GraphLevel, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.sets import Sizes, one_of

device: Any
try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from portable.backends.triton import mla_decode_hopper_kernel as device
    from portable.backends.triton import mla_decode_hopper_load as load
except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
    device = None

ROWS, BLOCK_N, VECTOR = 64, 32, 256
FEW = 16  # rows for which products of 16 rows are faster: 217 us where these, of 64, take 224
SHAPES = 1024  # maps that are kept
STAGES = 4  # blocks of 36 KiB beside 72 KiB of queries, of the 227 KiB that a multiprocessor has


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """A step's work on the device; see `ranges_kernel`."""

    starts: torch.Tensor  # [groups + 2, 2] i32
    merges: torch.Tensor  # [min(requests, groups) * tiles, 8] i32
    counts: torch.Tensor  # [2] i32, as the kernel that joins parts reads it
    groups: int
    tiles: int  # of a request
    rows: int  # of a tile that may be live
    parts: torch.Tensor  # [tiles * (requests + groups), rows, rank] f32
    parts_lse: torch.Tensor
    kernel: Bound
    combine: Bound


def prepare(segment: Segment, layer: Layer) -> Any:
    """The ranges of a step; what `mla_decode.prepare` makes of few rows, and of tiles that leave no splits."""
    requests = len(segment.seq_lens)
    units = target_of(segment.seq_lens).compute_units or 1
    tiles = triton.cdiv(segment.max_query_len * layer.num_heads, ROWS)
    few = segment.max_query_len * layer.num_heads <= FEW
    if few or tiles > units // 2 or not requests:
        return mla_decode.prepare(segment, layer)
    groups, at = units // tiles, segment.seq_lens.device
    rows = min(ROWS, segment.max_query_len * layer.num_heads)
    starts = torch.empty((groups + 2, 2), dtype=torch.int32, device=at)
    merges = torch.empty((min(requests, groups) * tiles, 8), dtype=torch.int32, device=at)
    counts = torch.full((2,), len(merges), dtype=torch.int32, device=at)
    parts = torch.empty((tiles * (requests + groups), rows, layer.kv_lora_rank), dtype=torch.float32, device=at)
    combine = {
        "HEADS": layer.num_heads,
        "ROWS": rows,
        "BLOCK_M": ROWS,
        "PDL": True,
        "launch_pdl": True,
        **shape_of(layer.kv_lora_rank, groups // requests),
    }
    launch(
        load.ranges_kernel, (requests,), segment.cu_seqlens_q, segment.seq_lens, starts, merges, requests, groups, 2,
        TILES=tiles, BY_REQUEST=requests <= groups, BLOCK_N=BLOCK_N, OVERHEAD=load.OVERHEAD.value, VECTOR=VECTOR,
        num_warps=4,
    )  # fmt: skip
    options = {
        "HEADS": layer.num_heads,
        "TILES": tiles,
        "LIVE": rows,
        "HALF": layer.kv_lora_rank // 2,
        "ROPE": layer.qk_rope_head_dim,
        "STAGES": STAGES,
        "PAGE": segment.page_size,
        "CAUSAL": segment.causal if isinstance(segment.causal, bool) else None,
        "num_warps": 4,
    }
    kernels = bound(device.attend_mla_hopper_kernel, options), bound(combine_mla_kernel, combine)
    return Ranges(starts, merges, counts, groups, tiles, rows, parts, parts.new_empty(parts.shape[:2]), *kernels)


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
    made, table, causal = segment.prepared, segment.block_table, segment.causal
    assert table is not None
    k_rows = rows_of(kv.k)
    if not isinstance(made, Ranges) or k_rows is None or q.data_ptr() % 16:
        if isinstance(made, Ranges):
            segment = replace(segment, prepared=mla_decode.prepare(segment, layer))
        mla_decode.attend(q, kv, segment, layer, tensors, out, lse)
        return
    if q.stride(0) != q.stride(1) * q.shape[1] or q.stride(1) * q.itemsize % 16:
        q = q.contiguous()
    matrix, k_page = k_rows
    queries = q.as_strided((q.shape[0] * q.shape[1], q.shape[2]), (q.stride(1), 1))
    half, rope, block = layer.kv_lora_rank // 2, layer.qk_rope_head_dim, min(segment.page_size, BLOCK_N)
    requests = len(segment.seq_lens)
    lse_head, lse_token = (0, 0) if lse is None else lse.stride()
    made.kernel(
        (made.groups * made.tiles,),
        map_of(queries, ROWS, half), map_of(queries, ROWS, rope), map_of(matrix, block, half),
        map_of(matrix, block, rope), out, lse, made.parts, made.parts_lse, made.starts, segment.cu_seqlens_q,
        segment.seq_lens, causal.view(torch.uint8) if isinstance(causal, torch.Tensor) else None, table, requests,
        layer.scale * LOG2E.value, k_page, table.stride(0), out.stride(0), out.stride(1), lse_head, lse_token,
    )  # fmt: skip
    made.combine(
        (len(made.merges) * made.rows * made.combine.options["CHUNKS"],),
        out, lse, made.merges, made.counts, made.parts, made.parts_lse,
        out.stride(0), out.stride(1), lse_head, lse_token,
    )  # fmt: skip


def rows_of(pages: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Pages [pages, page size, width] as a matrix of rows, and how many rows apart pages are; None where it is none."""
    page, row, last = pages.stride()
    size, width = pages.shape[1:]
    if last != 1 or row < width or page % row or row * pages.itemsize % 16 or pages.data_ptr() % 16:
        return None
    count = (len(pages) - 1) * (page // row) + size
    if not len(pages) or count >= 1 << 31:
        return None
    return pages.as_strided((count, width), (row, 1)), page // row


_maps: dict[tuple[Any, ...], dict[str, Any]] = {}


def map_of(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """For the TMA: boxes of a matrix. One that was checked serves others of its kind: 1 us, where checks take 10."""
    key = (matrix.shape, matrix.stride(), matrix.dtype, rows, columns)
    if key not in _maps:
        if len(_maps) >= SHAPES:
            _maps.clear()
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON[matrix.dtype])
        made = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
        _maps[key] = {name: value for name, value in made.__dict__.items() if name != "base"}
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_maps[key], base=matrix)
    return made


KERNELS: tuple[Kernel, ...] = ()
if device is not None:
    GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
    KERNELS = (
        Kernel(
            KernelCaps(
                op=Op.MLA_DECODE,
                name="triton.mla_decode_hopper",
                provider="triton",
                vendors=frozenset({"nvidia"}),
                archs=frozenset({"sm90"}),
                requires=(Requires("triton", ">=3.6,<3.10"),),  # Gluon is experimental: compiled with 3.6 and 3.9
                dtypes=frozenset({torch.float16, torch.bfloat16}),
                head_dims=one_of(80, 576),
                v_head_dims=one_of(64, 512),
                gqa_ratios=Sizes(most=128),
                query_lens=Sizes(most=8),
                page_sizes=one_of(16, 32, 64, 128, 256),
                features=frozenset({"noncausal", "lse"}),
                graph=GraphLevel.ALWAYS,
                tolerance={dtype: TOLERANCE[dtype] for dtype in (torch.float16, torch.bfloat16)},
            ),
            attend,
            prepare,
        ),
    )
