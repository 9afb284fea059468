"""Attention of many query tokens per request on Hopper: TMA, asynchronous matrix products and specialised warps.

The device code is `prefill_hopper_kernel.py`, in Gluon. It serves what prompts of today's models need at head dims of
64, 128 and 256; the rest stays with `prefill.py`: by the caps, and, for lengths that the host does not know and for
views that no tensor map describes, in `prepare` and `attend` here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from portable.backends.triton import prefill
from portable.backends.triton.archs import TOLERANCE
from portable.backends.triton.launch import target_of
from portable.backends.triton.prefill_tiles import OPEN, longest_first
from portable.kernel import KV, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cu_from_lens
from portable.sets import ANY_SIZE, Sizes, one_of
from portable.upload import upload

device: Any
try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from portable.backends.triton import prefill_hopper_kernel as device
except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
    device = None

LOG2E = 1.4426950408889634
ROWS = 64  # of q in one copy: what a warpgroup has
BLOCK_M = 2 * ROWS
L2 = 24 << 20  # bytes of K and V that may be in use at a time: half of an H100's L2, whose halves hold copies


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """A step's tiles, heaviest first: [tiles, 8] i32, see the kernel."""

    tiles: torch.Tensor
    keys: int  # of all requests
    programs: int


class Rows(NamedTuple):
    """A view of heads as a matrix of rows for the TMA, and how far apart heads and pages are in it."""

    map: Any
    head_column: int
    head_row: int
    page_row: int


def block_n(layer: Layer) -> int:
    """Keys of a block: of 240 registers a thread has 64 or 128 for the output, and BLOCK_N / 2 for the scores."""
    return 128 if max(layer.qk_head_dim, layer.v_head_dim) <= 128 else 64


def prepare(segment: Segment, layer: Layer) -> Items | Any:
    """The tiles of a step; what `prefill.prepare` makes where only the device knows the lengths."""
    if not segment.exact:
        return prefill.prepare(segment, layer)
    order = longest_first(segment, layer, BLOCK_M * layer.group)
    request, first = order[:, 0], order[:, 1] * BLOCK_M
    query_lens, seq_lens = segment.host_query_lens[request], segment.host_seq_lens[request]
    tiles = np.zeros((len(order), 8), np.int32)
    tiles[:, 0] = cu_from_lens(segment.host_query_lens)[request] + first
    tiles[:, 1] = np.minimum(query_lens - first, BLOCK_M)
    tiles[:, 2] = cu_from_lens(segment.host_seq_lens)[request] if segment.block_table is None else 0
    tiles[:, 3] = seq_lens
    tiles[:, 4] = seq_lens - query_lens + first
    tiles[:, 5] = request
    programs = target_of(segment.seq_lens).compute_units or 1
    (there,) = upload([tiles], segment.seq_lens.device)
    return Items(there, int(segment.host_seq_lens.sum()), programs)


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
    items, keys = segment.prepared, block_n(layer)
    if not isinstance(items, Items):
        prefill.attend(q, kv, segment, layer, tensors, out, lse)
        return
    if not len(items.tiles):
        return
    pages = None if segment.block_table is None else segment.page_size
    block = keys if pages is None else min(keys, pages)
    q_rows = rows_of(q, ROWS, paged=False)
    k_rows, v_rows = (rows_of(each, block, paged=pages is not None) for each in (kv.k, kv.v))
    if q_rows is None or k_rows is None or v_rows is None:
        segment = replace(segment, prepared=prefill.prepare(segment, layer))
        prefill.attend(q, kv, segment, layer, tensors, out, lse)
        return
    table, causal = segment.block_table, segment.causal
    left, right = (OPEN if side is None else min(side, OPEN) for side in layer.window)
    total = len(items.tiles) * layer.num_heads
    with torch.cuda.device(q.device):
        device.attend_kernel[(min(items.programs, total),)](
            q_rows.map, k_rows.map, v_rows.map, out, lse, tensors.sinks if layer.sinks else None, items.tiles, total,
            causal.view(torch.uint8) if isinstance(causal, torch.Tensor) else None, left, right, layer.scale * LOG2E,
            table, 0 if table is None else table.stride(0), *q_rows[1:3], *k_rows[1:], *v_rows[1:],
            out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
            HEADS=layer.num_heads, PART=layer.num_heads, RATIO=layer.group,
            WIDTH=layer.qk_head_dim, V_WIDTH=layer.v_head_dim, BLOCK_N=keys, STAGES=2, PAGE=pages,
            CAUSAL=causal if isinstance(causal, bool) else None, LEFT=layer.window[0] is not None,
            num_warps=4, enable_fp_fusion=True,  # Triton 3.10 turns its default
        )  # fmt: skip


def heads_at_a_time(layer: Layer, keys: int) -> int:
    """Query heads whose keys and values stay in the L2 while all tiles of a step read them."""
    head = keys * (layer.qk_head_dim + layer.v_head_dim) * layer.dtype.itemsize
    kv_heads = next((n for n in range(layer.num_kv_heads, 1, -1) if not layer.num_kv_heads % n and n * head <= L2), 1)
    return kv_heads * layer.group


def rows_of(x: torch.Tensor, block: int, paged: bool) -> Rows | None:
    """[tokens, heads, width], or pages of it, as a matrix whose rows are a token apart; None where it is none.

    A head begins a number of columns further, or, where a head's tokens lie together, a number of rows.
    """
    token, head, last = x.stride()[-3:]
    tokens, heads, width = x.shape[-3:]
    page = x.stride(0) if paged else 0
    if not x.numel() or last != 1 or token < width or page % token or (head >= token and head % token):
        return None
    if x.data_ptr() % 16 or token * x.itemsize % 16:
        return None
    by_rows = head >= token
    head_row, head_column = (head // token, 0) if by_rows else (0, head)
    rows = (x.shape[0] - 1) * (page // token) * paged + (heads - 1) * head_row + tokens
    columns = (heads - 1) * head_column + width
    if columns > token or rows >= 2**31:
        return None
    layout = gl.NVMMASharedLayout.get_default_for([block, width], GLUON[x.dtype])
    tensor_map = TensorDescriptor(x, [rows, columns], [token, 1], [block, width], layout)
    return Rows(tensor_map, head_column, head_row, page // token)


def _caps(op: Op, name: str, **more: Any) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=name,
        provider="triton",
        vendors=frozenset({"nvidia"}),
        archs=frozenset({"sm90"}),
        requires=(Requires("triton", ">=3.6,<3.10"),),  # Gluon is experimental: compiled with 3.6 and 3.9
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=one_of(64, 128, 256),
        v_head_dims=one_of(64, 128, 256),
        gqa_ratios=ANY_SIZE,
        query_lens=Sizes(least=BLOCK_M // 2),  # with fewer, the tiles of prefill.py, which hold all heads of a group
        features=frozenset({"window", "sinks", "noncausal", "lse"}),
        tolerance={dtype: TOLERANCE[dtype] for dtype in (torch.float16, torch.bfloat16)},
        **more,
    )


KERNELS: tuple[Kernel, ...] = ()
if device is not None:
    GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
    KERNELS = (
        Kernel(_caps(Op.PREFILL, "triton.prefill_hopper"), attend, prepare),
        Kernel(
            _caps(Op.PAGED, "triton.prefill_hopper_paged", page_sizes=one_of(16, 32, 64, 128, 256)), attend, prepare
        ),
    )
