"""Attention of many query tokens per request, over contiguous K/V and over pages: launcher and caps.

`prefill_kernel` has the kernel, `prefill_tiles` its sizes and the order of its work.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.fp8 import FLAVOURS
from portable.backends.triton.launch import launch, target_of
from portable.backends.triton.prefill_kernel import FAR, LOG2E, attention
from portable.backends.triton.prefill_tiles import NO_BF16_CONVERSION, OPEN, VECTOR_PAGES, Work, pieces, plan
from portable.backends.triton.strides import common_step
from portable.backends.triton.xcd import room
from portable.kernel import FEATURES, KV, GraphLevel, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.sets import ANY_SIZE, Sizes, multiple_of

# (what the matrix units take, what is stored) -> Triton's type, which the device converts
NATIVE: dict[tuple[str | None, torch.dtype], Any] = {
    ("e4m3fn", torch.float8_e4m3fn): tl.float8e4nv,
    ("e4m3fnuz", torch.float8_e4m3fnuz): tl.float8e4b8,
}


def prepare(segment: Segment, layer: Layer) -> Work:
    """The tiles of a step, the longest first where the host knows the lengths; see `prefill_tiles.plan`."""
    return plan(segment, layer, target_of(segment.seq_lens))


def attend(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    tensors: LayerTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Serve PREFILL and PAGED: `segment.block_table` tells which."""
    assert kv.v is not None
    work: Work = segment.prepared
    tile, target = work.tile, work.target
    if not work.tiles:
        return
    paged = segment.block_table is not None
    stored = kv.k.dtype
    fp8 = FLAVOURS.get(stored)
    native = NATIVE.get((target.fp8, stored))
    k, v = (pages.view(torch.uint8) if fp8 else pages for pages in (kv.k, kv.v))
    (k_page, k_token, k_head), (v_page, v_token, v_head) = (
        pages.stride()[:3] if paged else (0, *pages.stride()[:2]) for pages in (k, v)
    )
    k_scale, v_scale = (tensors.k_scale, tensors.v_scale) if fp8 else (None, None)
    per_head = any(scale is not None and scale.numel() > 1 for scale in (k_scale, v_scale))
    if per_head:
        k_scale, v_scale = (s if s is None else s.expand(layer.num_kv_heads).contiguous() for s in (k_scale, v_scale))
    causal = segment.causal if isinstance(segment.causal, torch.Tensor) else None
    left, right = (OPEN if side is None else min(side, OPEN) for side in layer.window)
    scale, softcap = layer.scale * LOG2E.value, 0.0
    if layer.softcap is not None:
        scale, softcap = 2 * scale / layer.softcap, layer.softcap * LOG2E.value
    near = max(k_token, v_token) < FAR.value
    strides = *q.stride()[:2], k_page, k_token, k_head, v_page, v_token, v_head, *out.stride()[:2]
    step = common_step(*strides) if (layer.qk_head_dim | layer.v_head_dim) % 16 else 1
    qk_main, qk_tail = pieces(layer.qk_head_dim, tile.piece)
    v_main, v_tail = pieces(layer.v_head_dim, tile.piece)
    launch(
        attention,
        (room(work.tiles, target.xcds) * layer.num_kv_heads,),
        q, k, v, out, lse, work.order, segment.cu_seqlens_q, segment.seq_lens, work.key_starts, segment.block_table,
        causal, tensors.sinks if layer.sinks else None, tensors.alibi if layer.alibi else None, k_scale, v_scale,
        *(strides if step == 1 else [stride // step for stride in strides]),
        0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
        segment.block_table.stride(0) if segment.block_table is not None else 0,
        len(segment.seq_lens), work.tiles, left, 0 if segment.causal is True else right, scale, softcap,
        KV_HEADS=layer.num_kv_heads, GROUP=layer.group, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        PAGE=segment.page_size if paged else None, FP8=None if fp8 is None else tuple(fp8), NATIVE=native,
        QK_MAIN=qk_main, QK_TAIL=qk_tail, QK_WIDTH=layer.qk_head_dim,
        V_MAIN=v_main, V_TAIL=v_tail, V_WIDTH=layer.v_head_dim,
        LEFT=layer.window[0] is not None, SOFTCAP=layer.softcap is not None,
        SCALE_HEADS=per_head, NEAR=near, STEP=step,
        HALF_UP=layer.dtype is torch.bfloat16 and target.arch in NO_BF16_CONVERSION,
        SCALAR_PAGE=target.arch not in VECTOR_PAGES, EDGE_STAGES=tile.edge_stages, XCDS=target.xcds,
        num_warps=tile.warps, num_stages=tile.stages, **tile.options,
    )  # fmt: skip


HEAD_DIMS = multiple_of(8, up_to=256, at_least=16)
_SHARED = {
    "head_dims": HEAD_DIMS,
    "v_head_dims": HEAD_DIMS,
    "gqa_ratios": ANY_SIZE,
    "features": FEATURES,
    "graph": GraphLevel.ALWAYS,
}
KERNELS = (
    Kernel(on_gpus(op=Op.PREFILL, name="triton.prefill", **_SHARED), attend, prepare),
    Kernel(
        on_gpus(
            op=Op.PAGED,
            name="triton.prefill_paged",
            query_lens=Sizes(least=16),
            kv_dtypes=frozenset(FLAVOURS),
            page_sizes=Sizes(most=256),
            **_SHARED,
        ),
        attend,
        prepare,
    ),
)
