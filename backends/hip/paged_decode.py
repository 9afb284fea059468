"""Launches paged_decode.cu: up to 8 query tokens a request over the pages of a cache."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt
import torch

from portable.backends.hip.archs import FP8_NAMES, NAMES, on_gpus
from portable.backends.hip.launch import (
    Function,
    Launch,
    Launches,
    addresses,
    divide,
    floats,
    nothing,
    row_strides,
    rows_key,
    scale_step,
    target_of,
)
from portable.kernel import FEATURES, KV, GraphLevel, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cdiv
from portable.sets import ANY_SIZE, Sizes, multiple_of

DIVIDE = "iIi"
STEP = struct.Struct(f"@8Nqi{DIVIDE * 3}")  # what the layers of a step share: table to splits of the kernel's arguments
LOG2E = 1.4426950408889634
OPEN = 2**31 - 1  # of a side of the window
INVARIANT = 512  # keys of a part where results must not depend on the batch
LEAST = 64  # keys of a part: on an H100, 1,024 keys of one request took 10.8 us in parts of 32 and 9.2 in parts of 64
MOST_PARTS = 256  # of a row: their weights wait in shared memory
MATRIX = frozenset({"gfx942", "gfx950"})  # of AMD's; gfx90a takes subnormal numbers for 0
OVERHEAD = 64  # keys that a block could read while it starts and ends


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a block is laid out; see the source."""

    lanes: int  # that share keys
    loads: int  # vectors of a lane
    vec: int  # elements of a vector
    rows: int
    keys: int
    threads: int
    blocks: int  # that run on a compute unit at once
    shared: int  # 1: queries wait in shared memory
    matrix: int = 0  # 1: on matrix units, of whose operands four lanes have a line

    @property
    def width(self) -> int:
        return (4 if self.matrix else self.lanes) * self.loads * self.vec

    @property
    def step(self) -> int:
        """Keys that a block reads in a turn."""
        return self.threads // self.lanes * self.keys


# a launch, good for the pages, K's and V's, that it looks at, where they were, and for the layer that it holds on to
_Launch = tuple[Launch, Callable[[], torch.Tensor | None], Callable[[], torch.Tensor | None], int, int, Layer | None]
UNKNOWN: _Launch = nothing, nothing, nothing, 0, 0, None  # for no pages
_launches: Launches[_Launch] = Launches()


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """How the keys of a step are split, and where partial results go."""

    cut: Cut
    row_blocks: int  # of a KV head of a request
    scaled: bool
    chunk: int  # least keys of a part
    splits: int  # most parts
    blocks: int  # of the launch
    kind: int  # of the step, for a prepared launch: its cut, row_blocks, and whether causal for all
    table: ReferenceType[torch.Tensor]
    step: bytes  # of `STEP`, for this table
    numbers: tuple[int, ...]  # pairs, chunk and splits, as divisors
    parts: torch.Tensor | None  # [pairs, splits, rows, width] f32
    tops: torch.Tensor | None  # [pairs, splits, rows] f32: about the highest score, in units of log2
    totals: torch.Tensor | None  # the same: sums of weights
    arrived: torch.Tensor | None  # [pairs] i32: parts that are done

    @property
    def shared(self) -> tuple[torch.Tensor | None, ...]:
        return self.parts, self.tops, self.totals, self.arrived


def cut_of(layer: Layer, queries: int, arch: str) -> Cut:
    """For requests of up to so many query tokens."""
    most = layer.group * (1 if layer.batch_invariant else queries)
    widths = layer.qk_head_dim, layer.v_head_dim
    wide = layer.kv_dtype.itemsize == 1 and not any(width % 16 for width in widths)
    return cut_for(max(widths), most, arch, wide, layer.kv_dtype.itemsize == 1)


def cut_for(width: int, most: int, arch: str, wide: bool = False, fp8: bool = False) -> Cut:
    """For rows of up to so many elements, and so many of them that share a key; wide: 16 bytes are 16 elements.

    On an H100, us for 8 requests of 8,192 keys of 128: of 4 rows 97 on matrix units and 103 without, of 8 rows 98 and
    127, of 1 row 98 and 96. For one such request of 8 rows, 19 in blocks of 256 threads and 22 in blocks of 128; of 4
    rows 19 in both, and at 1,024 keys 8.6 and 8.0. On an H200, us for 1 and 8 requests of 8,192 keys: 4 rows of 64
    elements 11.4 and 39.3 in blocks of 256 threads, 11.9 and 46.8 in blocks of 128; 2 rows of 128 elements 15.5 and
    71.5 by four keys, 16.5 and 79.8 by two, 16.4 and 72.4 on matrix units. Without those, four keys of 16 elements take
    more registers than a gfx950 has for vectors (48 to 116 were spilled), so AMD has two.
    """
    amd = arch.startswith("gfx")
    width = 64 if width <= 64 else 128 if width <= 128 else 256
    units = (not amd or arch in MATRIX) and width <= 128 and (not fp8 or (wide and width > 64))
    if units and most > 2:
        vec, rows = 16 if fp8 else 8, 8 if most <= 8 else 16
        lanes, threads = (64, 256) if amd else (32, 128 if most <= 4 and width > 64 else 256)
        blocks = 1 if (threads, lanes, width) == (256, 32, 128) else 2
        return Cut(lanes, width // 4 // vec, vec, rows, 16, threads, blocks, 0, 1)
    rows = 1 if most == 1 else 2 if most == 2 else 4
    if wide and amd:
        return Cut(width // 16, 1, 16, rows, 2, 128, 3, 1)
    if wide or (most >= 8 and not amd):
        vec = 16 if wide else 8
        return Cut(width // 16, 16 // vec, vec, rows, 4, 128, 2, 1)
    return Cut(width // 8, 1, 8, rows, 4 if rows <= 2 else 2, 256, 2, 0)


def prepare(segment: Segment, layer: Layer) -> Prepared:
    """Parts of as many keys as make the blocks that run at once end together: no length on the device is read."""
    target = target_of(segment.seq_lens)
    cut = cut_of(layer, segment.max_query_len, target.arch)
    rows, heads = layer.group * segment.max_query_len, len(segment.seq_lens) * layer.num_kv_heads
    longest = segment.max_seq_len
    left = layer.window[0]
    if left is not None and segment.causal is True:
        longest = min(longest, left + segment.max_query_len)
    places = cut.blocks * (target.compute_units or 64)
    # Blocks of 8 rows read keys twice, but are faster where those of 16 leave half of the places empty. On an H200, us
    # for one request of 128 heads: of 1,024 keys, 64 blocks for 132 places, 8.3 and 9.9; of 8,192 keys 19.2 and 17.9.
    halves = 2 * heads * cdiv(rows, 16) * cdiv(longest, cut.step)
    if cut.rows == 16 and halves <= places and not layer.batch_invariant:
        cut = replace(cut, rows=8)
    row_blocks = cdiv(rows, cut.rows)
    pairs = heads * row_blocks
    if layer.batch_invariant:
        chunk, splits = INVARIANT, cdiv(longest, INVARIANT)
    elif not segment.exact:  # short requests are cut finer on the device
        chunk = max(LEAST, cut.step)
        splits = min(cdiv(longest, chunk), places // max(1, pairs))
    else:
        chunk = _chunk(segment.host_seq_lens.clip(max=longest), pairs, places, cut.step)
        splits = cdiv(longest, chunk)
    splits = max(1, min(splits, MOST_PARTS))  # the device makes them longer
    parts = tops = totals = arrived = None
    if splits > 1:
        parts = segment.seq_lens.new_empty((pairs, splits, cut.rows, cut.width), dtype=torch.float32)
        tops, totals = (parts.new_empty(parts.shape[:3]) for _ in range(2))
        arrived = segment.seq_lens.new_zeros(pairs)
    causal, table = segment.causal, segment.block_table
    assert table is not None
    kind = _kind(cut, row_blocks, causal is True)
    shared = parts, tops, totals, arrived
    numbers = *divide(max(1, pairs)), *divide(chunk), *divide(splits)
    step = _step_of(segment, shared, numbers)
    scaled = layer.kv_dtype.itemsize == 1
    return Prepared(cut, row_blocks, scaled, chunk, splits, pairs * splits, kind, ref(table), step, numbers, *shared)


_kinds = count()


@cache
def _kind(*facts: object) -> int:
    """A number that stands for equal facts and no others: a launch's key is hashed each time."""
    return next(_kinds)


def _of_step(segment: Segment, shared: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a step's layers share, in the kernel's order."""
    causal = segment.causal if isinstance(segment.causal, torch.Tensor) else None
    return segment.block_table, segment.cu_seqlens_q, segment.seq_lens, causal, *shared


def _step_of(segment: Segment, shared: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]) -> bytes:
    table = segment.block_table
    assert table is not None
    return STEP.pack(*addresses(*_of_step(segment, shared)), table.stride(0), table.shape[1], *numbers)


def _chunk(lens: npt.NDArray[np.int32], pairs: int, places: int, step: int) -> int:
    """Keys of a part: of those that fill the places once to four times, the one that takes least time."""
    if not len(lens):
        return LEAST
    each, longest = pairs // len(lens), int(lens.max())
    total, best, least = int(lens.sum()) * each, step, float("inf")
    for turns in range(1, 5):
        # all parts of one size, or the longest requests cut evenly
        for keys in (cdiv(total, turns * places), cdiv(longest, max(1, turns * places // pairs))):
            chunk = cdiv(max(keys, LEAST), step) * step
            blocks = int(np.maximum(1, -(-lens // chunk)).sum()) * each
            cost = cdiv(blocks, places) * (min(chunk, longest) + OVERHEAD)
            if cost < least:
                best, least = chunk, cost
    return best


def defines(
    dtype: torch.dtype, kv_dtype: torch.dtype, cut: Cut, vector: bool = True, full: bool = True
) -> dict[str, str | int]:
    """What the source leaves open. vector: rows of the cache start at whole vectors; full: they fill the cut."""
    types: dict[str, str | int] = {"ELEMENT": NAMES[dtype], "STORED": (NAMES | FP8_NAMES)[kv_dtype]}
    sizes = {name.upper(): value for name, value in asdict(cut).items()}
    return types | sizes | {"VECTOR": int(vector), "FULL": int(full)}


@cache
def _function(dtype: torch.dtype, kv_dtype: torch.dtype, cut: Cut, vector: bool, full: bool) -> Function:
    names = defines(dtype, kv_dtype, cut, vector, full)
    return Function("paged_decode", "attend", f"8N{STEP.size}s", f"6q2Iq2Iq2i{DIVIDE * 4}2i2f2i", **names)


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
    k, v = kv
    assert v is not None
    if not q.numel():
        return
    k_at, v_at = k.data_ptr(), v.data_ptr()
    lse_key = None if lse is None else lse.stride()
    key: tuple[Any, ...] = id(layer), id(k), made.kind, rows_key(q), rows_key(out), lse_key
    k_scale = v_scale = None
    k_scale_at = v_scale_at = 0
    if made.scaled:
        k_scale, v_scale = floats(tensors.k_scale), floats(tensors.v_scale)
        k_scale_at, v_scale_at = addresses(k_scale, v_scale)
        key += scale_step(k_scale), scale_step(v_scale)
    sinks = floats(tensors.sinks) if layer.sinks else None
    launch, k_known, v_known, k_start, v_start, _ = _launches.known.get(key, UNKNOWN)
    if k_known() is not k or v_known() is not v or k_start != k_at or v_start != v_at:
        launch, *_ = known = _launch(q, kv, segment, layer, (k_scale, v_scale, sinks), out, lse)
        if q.is_cuda:
            _launches.keep(key, known)
    same = made.table() is segment.block_table
    launch(
        made.blocks, q.data_ptr(), k_at, v_at, k_scale_at, v_scale_at, 0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        made.step if same else _step_of(segment, made.shared, made.numbers),
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    kv: KV,
    segment: Segment,
    layer: Layer,
    factors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],  # K's and V's scales, sinks
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> _Launch:
    made: Prepared = segment.prepared
    k, v = kv
    assert v is not None
    cut, widths = made.cut, (layer.qk_head_dim, layer.v_head_dim)
    vector, full = _vector(k, cut.vec) and _vector(v, cut.vec), widths == (cut.width, cut.width)
    factor, softcap = layer.scale * LOG2E, 0.0
    if layer.softcap is not None:
        factor, softcap = layer.scale / layer.softcap, layer.softcap * LOG2E
    left, right = layer.window
    k_page, k_offset, k_head = k.stride()[:3]
    v_page, v_offset, v_head = v.stride()[:3]
    given = q, k, v, *factors, out, lse, *_of_step(segment, made.shared)
    fixed = (
        *row_strides(q), *row_strides(out), *((0, 0) if lse is None else lse.stride()),
        k_page, k_offset, k_head, v_page, v_offset, v_head,
        *widths, *divide(k.shape[1]), *divide(layer.group), *divide(layer.num_kv_heads), *divide(made.row_blocks),
        OPEN if left is None else left, 0 if segment.causal is True else OPEN if right is None else right,
        factor, softcap, scale_step(factors[0]), scale_step(factors[1]),
    )  # fmt: skip
    whole = cut_of(layer, segment.max_query_len, target_of(q).arch)
    if whole.rows == 16 and not layer.batch_invariant:  # which of the two a step takes, `prepare` says
        for rows in (16, 8):
            _function(q.dtype, k.dtype, replace(whole, rows=rows), vector, full).foresee()
    function = _function(q.dtype, k.dtype, cut, vector, full)
    return function.prepare(given, fixed, threads=cut.threads), ref(k), ref(v), k.data_ptr(), v.data_ptr(), layer


def _vector(pages: torch.Tensor, vec: int) -> bool:
    """Whether every row starts at a multiple of `vec` elements."""
    return not (pages.data_ptr() % (vec * pages.element_size()) or any(s % vec for s in pages.stride()[:3]))


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
            # blocks of 16 rows, whatever the device: `prepare`
            test_shapes=({"num_heads": 16, "num_kv_heads": 1, "head_dim": 64, "batch_invariant": True},),
        ),
        attend,
        prepare,
    ),
)
