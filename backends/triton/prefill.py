"""Attention of many query tokens per request, over contiguous K/V and over pages: launcher and caps.

`prefill_kernel` has the kernel, `prefill_tiles` its sizes and the order of its work.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from portable.backends.triton.archs import on_gpus
from portable.backends.triton.fp8 import FLAVOURS
from portable.backends.triton.launch import Bound, bound, target_of
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
    if not work.tiles:
        return
    k, v, table = kv.k, kv.v, segment.block_table
    stored, k_scale, v_scale, per_head = k.dtype, None, None, False
    if stored.itemsize == 1:
        k, v, k_scale, v_scale = k.view(torch.uint8), v.view(torch.uint8), tensors.k_scale, tensors.v_scale
        per_head = any([scale is not None and scale.numel() > 1 for scale in (k_scale, v_scale)])
    if per_head:
        k_scale, v_scale = (s if s is None else s.expand(layer.num_kv_heads).contiguous() for s in (k_scale, v_scale))
    k_page = v_page = 0
    if table is None:
        (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
    else:
        (k_page, k_token, k_head, _), (v_page, v_token, v_head, _) = k.stride(), v.stride()
    strides = *q.stride()[:2], k_page, k_token, k_head, v_page, v_token, v_head, *out.stride()[:2]
    step = 1
    if (layer.qk_head_dim | layer.v_head_dim) % 16:
        step = common_step(*strides)
        strides = tuple([stride // step for stride in strides])
    key = (stored, per_head, max(k_token, v_token) < FAR.value, step)
    kernel = work.kernels.get(key)
    if kernel is None:
        kernel = work.kernels[key] = _kernel(work, segment, layer, *key)
    causal = segment.causal
    left, right = layer.window
    scale, softcap = layer.scale * LOG2E.value, 0.0
    if layer.softcap is not None:
        scale, softcap = 2 * scale / layer.softcap, layer.softcap * LOG2E.value
    kernel(
        (room(work.tiles, work.target.xcds) * layer.num_kv_heads,),
        q, k, v, out, lse, work.order, segment.cu_seqlens_q, segment.seq_lens, work.key_starts, table,
        None if causal is True or causal is False else causal,
        tensors.sinks if layer.sinks else None, tensors.alibi if layer.alibi else None, k_scale, v_scale,
        *strides, *((0, 0) if lse is None else lse.stride()), 0 if table is None else table.stride(0),
        len(segment.host_seq_lens), work.tiles, OPEN if left is None else min(left, OPEN),
        0 if causal is True else OPEN if right is None else min(right, OPEN), scale, softcap,
    )  # fmt: skip


def _kernel(
    work: Work, segment: Segment, layer: Layer, stored: torch.dtype, per_head: bool, near: bool, step: int
) -> Bound:
    """The kernel with everything that is constant for the layers of a step."""
    tile, target, fp8 = work.tile, work.target, FLAVOURS.get(stored)
    qk_main, qk_tail = pieces(layer.qk_head_dim, tile.piece, tile.parts)
    v_main, v_tail = pieces(layer.v_head_dim, tile.piece, tile.parts)
    options = {
        "KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.group,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "PAGE": None if segment.block_table is None else segment.page_size,
        "FP8": None if fp8 is None else tuple(fp8),
        "NATIVE": NATIVE.get((target.fp8, stored)),
        "QK_MAIN": qk_main,
        "QK_TAIL": qk_tail,
        "QK_WIDTH": layer.qk_head_dim,
        "V_MAIN": v_main,
        "V_TAIL": v_tail,
        "V_WIDTH": layer.v_head_dim,
        "PARTS": tile.parts,
        "LEFT": layer.window[0] is not None,
        "SOFTCAP": layer.softcap is not None,
        "SCALE_HEADS": per_head,
        "NEAR": near,
        "STEP": step,
        "HALF_UP": layer.dtype is torch.bfloat16 and target.arch in NO_BF16_CONVERSION,
        "SCALAR_PAGE": target.arch not in VECTOR_PAGES,
        "EDGE_STAGES": tile.edge_stages,
        "XCDS": target.xcds,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return bound(attention, options | dict(tile.options))


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
