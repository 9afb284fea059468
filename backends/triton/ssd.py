"""The Mamba-2 scan of prompts (SSD): how the kernels of ssd_kernel.py are cut and launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from portable.backends.triton import ssm
from portable.backends.triton.archs import on_gpus
from portable.backends.triton.launch import launch, target_of
from portable.backends.triton.ssd_kernel import ssd_chunk_states, ssd_pass, ssd_prepare, ssd_scan
from portable.kernel import Kernel, Op
from portable.layer import Layer
from portable.ragged import cdiv, next_power_of_2, round_up
from portable.sets import multiple_of
from portable.states import PrefillStates, SsmTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel is cut: tokens that it takes at a time."""

    tokens: int
    lanes: int  # of a program: in warps, RDNA's would have half as many, and spill up to 122 registers in bf16
    stages: int
    options: Mapping[str, int] = field(default_factory=dict)  # of the vendor's compiler

    def launched(self, wave_size: int) -> dict[str, Any]:
        return {"num_warps": self.lanes // wave_size, "num_stages": self.stages, **self.options}


CHUNK_STATES = {"nvidia": Tile(tokens=32, lanes=128, stages=4), "amd": Tile(tokens=32, lanes=256, stages=1)}
SCAN = {"nvidia": Tile(tokens=64, lanes=128, stages=1), "amd": Tile(tokens=64, lanes=512, stages=1)}
DEEPEST = 128  # rows of N in a tile of `ssd_chunk_states`
PASSED = 512  # elements of a state that a program carries from chunk to chunk
WIDEST = 64  # columns of P in a tile


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    pool: torch.Tensor,
    states: PrefillStates,
    layer: Layer,
    tensors: SsmTensors,
    out: torch.Tensor,
) -> None:
    """x, z, out [T, H, P], dt [T, H], b, c [T, G, N], pool [slots, H, P, N]: tokens and states of a prefill part.

    Chunks are at most `layer.chunk` long, or 256 where it names none.
    """
    chunks, (heads, width, dim), groups = len(states.chunk_requests), pool.shape[1:], b.shape[1]
    if not chunks:
        return
    target, tokens, longest = target_of(x), len(x), layer.chunk or 256
    vendor, wave_size = target.vendor, target.wave_size
    span = max(16, next_power_of_2(longest))
    block_n, block_p = max(16, next_power_of_2(dim)), max(16, min(WIDEST, next_power_of_2(width)))
    columns = cdiv(width, block_p)
    summed, scan = (_fitted(tiles[vendor], x.dtype, span, block_n) for tiles in (CHUNK_STATES, SCAN))
    rows, single = scan.tokens, x.dtype == torch.float32
    if single:
        scan = replace(scan, lanes=max(scan.lanes, 256))
    blocks, deep = cdiv(longest, rows), min(DEEPEST // 4 if single else DEEPEST, block_n)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    row = round_up(tokens, 4)  # so that rows start at multiples of 16 bytes
    steps, sums, totals = empty(heads, row), empty(heads, row), empty(chunks, heads)
    products = empty(chunks, groups, blocks, rows, rows, dtype=x.dtype)
    local, before = empty(chunks, heads, dim, width), empty(chunks, heads, dim, width, dtype=x.dtype)
    some = next_power_of_2(max(1, min(heads, 4096 // span)))
    launch(
        ssd_prepare,
        (chunks, groups * blocks + cdiv(heads, some)),
        dt,
        b,
        c,
        dt.stride(),
        b.stride()[:2],
        c.stride()[:2],
        tensors.a,
        tensors.dt_bias,
        *tensors.dt_limit,
        steps,
        sums,
        row,
        totals,
        products,
        states.cu_chunks,
        heads,
        GROUPS=groups,
        DIM=dim,
        SOFTPLUS=tensors.dt_softplus,
        SPAN=span,
        HEADS=some,
        BLOCKS=blocks,
        ROWS=rows,
        BLOCK_N=block_n,
        num_warps=summed.lanes // wave_size,
    )
    launch(
        ssd_chunk_states,
        (heads * columns * cdiv(dim, deep), chunks),
        x,
        b,
        x.stride()[:2],
        b.stride()[:2],
        steps,
        sums,
        row,
        local,
        states.cu_chunks,
        heads,
        HEADS_PER_GROUP=heads // groups,
        WIDTH=width,
        DIM=dim,
        TOKENS=summed.tokens,
        BLOCK_P=block_p,
        BLOCK_N=deep,
        **summed.launched(wave_size),
    )
    whole = next_power_of_2(width)
    passed = max(1, min(block_n, PASSED // whole))
    launch(
        ssd_pass,
        (cdiv(dim, passed), heads, len(states.last_chunks)),
        local,
        before,
        totals,
        pool,
        pool.stride()[:3],
        states.has_initial,
        states.initial_indices,
        states.chunk_state_indices,
        states.last_chunks,
        heads,
        states.pad_slot,
        WIDTH=width,
        DIM=dim,
        BLOCK_P=whole,
        BLOCK_N=passed,
        num_warps=max(1, min(4, passed * whole // 256)),
    )
    launch(
        ssd_scan,
        (heads * columns, chunks),
        x,
        b,
        c,
        z,
        out,
        x.stride()[:2],
        b.stride()[:2],
        c.stride()[:2],
        (0, 0) if z is None else z.stride()[:2],
        out.stride()[:2],
        tensors.d,
        steps,
        sums,
        row,
        products,
        before,
        states.cu_chunks,
        heads,
        HEADS_PER_GROUP=heads // groups,
        GROUPS=groups,
        WIDTH=width,
        DIM=dim,
        BLOCKS=blocks,
        ROWS=rows,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        **scan.launched(wave_size),
    )


def _fitted(tile: Tile, dtype: torch.dtype, span: int, block_n: int) -> Tile:
    """The tile for chunks within `span` tokens: half the tokens for a state of 256.

    A quarter for float32: half spilled 16 to 30 registers on gfx90a, gfx942 and gfx950.
    """
    less = (4 if dtype == torch.float32 else 1) * max(1, block_n // 128)
    return replace(tile, tokens=max(16, min(tile.tokens // less, span)))


KERNELS = (
    Kernel(
        on_gpus(
            op=Op.SSD,
            name="triton.ssd",
            kv_dtypes=ssm.STATES,
            head_dims=multiple_of(1, up_to=256),
            families=frozenset({"mamba2"}),
            state_dims=multiple_of(1, up_to=256),
        ),
        ssd,
    ),
)
