"""Attention of many query tokens per request on Hopper: TMA, asynchronous matrix products and specialised warps.

The device code is `prefill_hopper_kernel.py`, in Gluon. It serves what prompts of today's models need at head dims of
64, 128, 192 and 256; the rest stays with `prefill.py`: by the caps, and, for lengths that the host does not know and
for views that no tensor map describes, in `prepare` and `attend` here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.backends.triton import prefill
from portable.backends.triton.archs import TOLERANCE
from portable.backends.triton.launch import Bound, Typed, bound, target_of
from portable.backends.triton.prefill_tiles import OPEN, longest_first
from portable.kernel import KV, Kernel, KernelCaps, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cdiv, cu_from_lens
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
SHAPES = 1024  # of tensors whose description is kept
PLACES = 4096  # of tensors whose descriptors are kept
BEGIN = 1.5  # what beginning a tile takes, in blocks
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """A step's tiles, heaviest first, or every head of every tile, by program: [n, 8] i32, see the kernel."""

    tiles: torch.Tensor
    programs: int
    total: int  # heads of tiles
    kernel: Bound
    launches: dict[tuple[bool, bool], Typed] = field(default_factory=dict)  # by whether there are an LSE and sinks


class Address(NamedTuple):
    """What a descriptor that is kept describes: it holds no memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Rows(NamedTuple):
    """A view of heads as a matrix of rows for the TMA, and how far apart heads and pages are in it."""

    map: Any
    rest: Any  # of the columns beyond a power of two; None where there are none
    head_column: int
    head_row: int
    page_row: int


def block_n(layer: Layer) -> int:
    """Keys of a block: of 240 registers a thread has 64 or 128 for the output, and BLOCK_N / 2 for the scores."""
    return 128 if layer.qk_head_dim <= 192 and layer.v_head_dim <= 128 else 64


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
    part = heads_at_a_time(layer, int(segment.host_seq_lens.sum()))
    listed = part < layer.num_heads and len(tiles) > 0
    total = len(tiles) * layer.num_heads
    if listed:
        tiles = by_program(tiles, blocks_of(tiles, segment, layer), layer.num_heads, part, programs)
    (there,) = upload([tiles], segment.seq_lens.device)
    return Items(there, programs, total, _kernel(segment, layer, listed))


def heads_at_a_time(layer: Layer, keys: int) -> int:
    """Query heads whose keys and values stay in the L2 while all tiles of a step read them.

    All of them where theirs are twice as much at most: with 128 heads of 4,096 keys at once, 320 MiB, the prefill of
    192/128 took 1,925 us for the 1,139 of 8 at a time, and with 16 heads, 40 MiB, 158 for the 158 of 8.
    """
    head = keys * (layer.qk_head_dim + layer.v_head_dim) * layer.dtype.itemsize
    if layer.num_kv_heads * head <= 2 * L2:
        return layer.num_heads
    kv_heads = next((n for n in range(layer.num_kv_heads, 1, -1) if not layer.num_kv_heads % n and n * head <= L2), 1)
    return kv_heads * layer.group


def blocks_of(tiles: Table, segment: Segment, layer: Layer) -> npt.NDArray[np.int64]:
    """[tiles] blocks of keys that each multiplies; with a mask that only the device knows, as if causal."""
    rows, keys, position = (tiles[:, i].astype(np.int64) for i in (1, 3, 4))
    left, right = (OPEN if side is None else side for side in layer.window)
    end = np.minimum(position + rows + (right if segment.causal is False else 0), keys)
    first = np.maximum(position - left, 0) // block_n(layer)
    blocks: npt.NDArray[np.int64] = np.maximum(cdiv(end, block_n(layer)) - first, 1)
    return blocks


def by_program(tiles: Table, blocks: npt.NDArray[np.int64], heads: int, part: int, programs: int) -> Table:
    """[tiles * heads, 8] items, `part` heads after `part` heads: the first of every program, the second of every one...

    In each round the heaviest go to the programs that had the least so far: those of 4,096 tokens and 128 heads differ
    by 1.4 % at the end, where a fixed order of the programs left one 46 % longer than their mean. 0.24 ms for them.
    """
    starts = range(0, heads, part)
    tile = np.concatenate([np.arange(len(tiles)).repeat(min(part, heads - start)) for start in starts])
    head = np.concatenate([np.tile(np.arange(start, min(start + part, heads)), len(tiles)) for start in starts])
    work, total = blocks[tile] + BEGIN, len(tile)
    item = np.full((-(-total // programs), programs), -1)
    had = np.zeros(programs)
    for number, places in enumerate(item):
        some = work[number * programs :][:programs]
        to = had.argsort(kind="stable")[: len(some)]
        heaviest = (-some).argsort(kind="stable")
        had[to] += some[heaviest]
        places[to] = heaviest + number * programs
    item = item[:, (item[-1] < 0).argsort(kind="stable")].reshape(-1)[:total]  # who has one more comes first
    listed: Table = tiles[tile[item]]
    listed[:, 6] = head[item]
    return listed


def _kernel(segment: Segment, layer: Layer, listed: bool) -> Bound:
    """The kernel with everything that is constant for the layers of a step."""
    width = power_of_2(layer.qk_head_dim)
    options = {
        "HEADS": layer.num_heads,
        "RATIO": layer.group,
        "WIDTH": width,
        "REST": layer.qk_head_dim - width,
        "V_WIDTH": layer.v_head_dim,
        "BLOCK_N": block_n(layer),
        "STAGES": 2,
        "PAGE": None if segment.block_table is None else segment.page_size,
        "CAUSAL": segment.causal if isinstance(segment.causal, bool) else None,
        "LEFT": layer.window[0] is not None,
        "LISTED": listed,
        "num_warps": 4,
    }
    return bound(device.attend_kernel, options)


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
    q_rows = rows_of(q, ROWS, False)
    k_rows, v_rows = rows_of(kv.k, block, pages is not None), rows_of(kv.v, block, pages is not None)
    if q_rows is None or k_rows is None or v_rows is None:
        segment = replace(segment, prepared=prefill.prepare(segment, layer))
        prefill.attend(q, kv, segment, layer, tensors, out, lse)
        return
    table, causal = segment.block_table, segment.causal
    left, right = layer.window
    kernel = items.launches.get((lse is None, layer.sinks))
    if kernel is None:
        kernel = items.launches[lse is None, layer.sinks] = Typed(items.kernel)
    lse_head, lse_token = (0, 0) if lse is None else lse.stride()
    kernel(
        (min(items.programs, items.total),),
        q_rows.map, k_rows.map, v_rows.map, q_rows.rest, k_rows.rest, out, lse,
        tensors.sinks if layer.sinks else None, items.tiles, items.total,
        None if causal is True or causal is False else causal.view(torch.uint8),
        OPEN if left is None else min(left, OPEN), OPEN if right is None else min(right, OPEN), layer.scale * LOG2E,
        table, 0 if table is None else table.stride(0), *q_rows[2:4], *k_rows[2:], *v_rows[2:],
        *out.stride()[:2], lse_head, lse_token,
    )  # fmt: skip


def rows_of(x: torch.Tensor, block: int, paged: bool) -> Rows | None:
    """[tokens, heads, width], or pages of it, as a matrix whose rows are a token apart; None where it is none.

    A head begins a number of columns further, or, where a head's tokens lie together, a number of rows.
    """
    return _placed(x.data_ptr(), x.shape, x.stride(), x.dtype, block, paged)


@lru_cache(PLACES)
def _placed(
    address: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, block: int, paged: bool
) -> Rows | None:
    """At an address: 1 us for descriptors that were checked at another, which check themselves for 10."""
    found = None if address % 16 else _described(shape, stride, dtype, block, paged)
    if found is None:
        return None
    made = []
    for each in found[:2]:
        made.append(None if each is None else object.__new__(TensorDescriptor))
        if each is not None:
            made[-1].__dict__.update(each.__dict__, base=Address(address, dtype))
    return Rows(made[0], made[1], *found[2:])


@lru_cache(SHAPES)
def _described(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, block: int, paged: bool) -> Rows | None:
    """The same at address 0."""
    token, head, last = stride[-3:]
    tokens, heads, width = shape[-3:]
    page = stride[0] if paged else 0
    if 0 in shape or last != 1 or token < width or page % token or (head >= token and head % token):
        return None
    if token * dtype.itemsize % 16:
        return None
    by_rows = head >= token
    head_row, head_column = (head // token, 0) if by_rows else (0, head)
    rows = (shape[0] - 1) * (page // token) * paged + (heads - 1) * head_row + tokens
    columns = (heads - 1) * head_column + width
    if columns > token or rows >= 2**31:
        return None
    first = power_of_2(width)
    maps = []
    for part in (first, width - first):
        layout = gl.NVMMASharedLayout.get_default_for([block, part], GLUON[dtype]) if part else None
        base = Address(0, dtype)
        maps.append(TensorDescriptor(base, [rows, columns], [token, 1], [block, part], layout) if part else None)
    return Rows(maps[0], maps[1], head_column, head_row, page // token)


def power_of_2(width: int) -> int:
    """The largest power of two that a width holds.

    >>> power_of_2(192), power_of_2(128)
    (128, 128)
    """
    return 1 << (width.bit_length() - 1)


def _caps(op: Op, name: str, **more: Any) -> KernelCaps:
    return KernelCaps(
        op=op,
        name=name,
        provider="triton",
        vendors=frozenset({"nvidia"}),
        archs=frozenset({"sm90"}),
        requires=(Requires("triton", ">=3.6,<3.10"),),  # Gluon is experimental: compiled with 3.6 and 3.9
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=one_of(64, 128, 192, 256),
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
