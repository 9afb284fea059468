"""What a kernel declares, what it is asked, and the reasons for which it refuses.

A backend is a tuple `KERNELS` of `Kernel` values. How `run` is called depends on the operation:

    PREFILL, PAGED  run(q, kv, segment, layer, tensors, out, lse)    kv: contiguous K/V, or the pages
    MLA_DECODE      run(q, kv, segment, layer, tensors, out, lse)    q [T, H, rank + rope], kv.k the latent pages
    MERGE           run(outs, lses, sinks, out, lse)                 any number of parts, as `merge_states`;
                                                                     `out` may be one of `outs`, `lse` is none of `lses`
    CACHE_WRITE     run(k, v, kv, slot_mapping, layer, tensors)
    CACHE_GATHER    run(kv, segment, layer, tensors, out)            out: KV to write into, packed [Tk, Hkv, D] in the
                                                                     layer's dtype, dense; MLA: k [Tk, rank + rope]
    CACHE_COPY      run(source, target, pages, layer)                pages [n, 2] i64, (from, to); negative: no copy

For MLA, CACHE_WRITE takes k [T, rank + rope] and no v, or k [T, rank] and v [T, rope].

Recurrent layers; `states` is what `portable.states` says a kernel sees, and T its tokens. All [T, ...] may be strided
views with unit last stride. Pools hold any float type; a slot's memory is dense, the slots may lie apart.

    CONV1D          run(x, weight, bias, pool, states, out, silu)    x, out [T, C], weight [C, W], bias [C] or None;
                                                                     pool [slots, W - 1, C], the newest input last
    SSD             run(x, dt, b, c, z, pool, states, layer, tensors, out)    states: PrefillStates
    STATE_UPDATE    run(x, dt, b, c, z, pool, states, layer, tensors, out)    states: DecodeStates
    STATE_COPY      run(pools, copies, cu_copies)                    the pools of each group; copies [n, 2] i64,
                                                                     (from, to) of all groups; negative: no copy

Persistent metadata of graphs, changed on the device, without a wait:

    REFRESH         run(index, pages, cells)    index [E] i64, pages [E] i32, cells [n] i32 of a block table:
                                                cells[index] = pages; an index outside of the cells is no entry
    ADVANCE         run(seq_lens, block_table, slot_mapping, positions, page_size, max_seq_len)
                                                [n] i32, [n, W] i32, [n] i64, [n] i64 or None: a request of 1 to
                                                max_seq_len - 1 keys gets one more token, its slot and position;
                                                others get slot -1 and keep what they have
    COLLECT         run(table, rows, first, cells, pad, accepted, most, kept, copies)
                                                table [B, W] i32 or i64, rows and first [n] i32 or None (all rows, 0),
                                                cells [n, C] i32: those of row rows[i] from column first[i] on; `pad`
                                                behind the last column, and for a row below 0. accepted [m] i32 or i64
                                                or None, taken to be 1 to `most`: the first m rows begin accepted - 1
                                                columns further; kept [m] i32 or None gets what they are taken to be.
                                                copies: pairs ([k], [k]) of i32, i64 or bool, (from, to), one of each

x, z and out are [T, H, P] (z or None), dt [T, H], b and c [T, G, N], pool [slots, H, P, N] and `tensors` a SsmTensors:
state = exp(dt a) state + dt x b, out = (state c + d x) silu(z). Mamba-1 has a head per channel, so P is 1.
CONV1D takes both kinds of states. STATE_COPY copies the pairs cu_copies[g] to cu_copies[g + 1], [groups + 1] i32 on the
device, in every pool of pools[g], in the order of the list, so a slot may be read and then written. Groups share no
memory that is written, and run at the same time.

`out` [T, H, Dv] and `lse` [H, T] f32 (or None) are written in place and may be strided views; nothing is returned.
The Tk of a gather is what the segment's host lengths sum to; where these are bounds, rows beyond the last key are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.layer import Layer
from portable.sets import ANY_SIZE, NO_SIZE, Sizes, listed, short

if TYPE_CHECKING:
    from portable.platform.target import Target


class Op(str, Enum):
    """What `select` chooses a kernel for."""

    PREFILL = "prefill"  # contiguous K/V
    PAGED = "paged"  # decode, extend and verify over the cache
    MLA_DECODE = "mla_decode"
    MERGE = "merge"
    CACHE_WRITE = "cache_write"
    CACHE_GATHER = "cache_gather"
    CACHE_COPY = "cache_copy"
    CONV1D = "conv1d"
    SSD = "ssd"
    STATE_UPDATE = "state_update"
    STATE_COPY = "state_copy"
    REFRESH = "refresh"
    ADVANCE = "advance"
    COLLECT = "collect"

    __hash__ = str.__hash__  # in C: a plan looks up a kernel 3 to 8 times

    def __str__(self) -> str:
        return self.value


ATTENTION = frozenset({Op.PREFILL, Op.PAGED, Op.MLA_DECODE})
PAGES = frozenset({Op.PAGED, Op.MLA_DECODE, Op.CACHE_WRITE, Op.CACHE_GATHER, Op.CACHE_COPY})
RECURRENT = frozenset({Op.CONV1D, Op.SSD, Op.STATE_UPDATE})
FEATURES = frozenset({"window", "softcap", "sinks", "alibi", "noncausal", "lse", "batch_invariant"})


class GraphLevel(IntEnum):
    """Which batches a kernel may be captured for; a group of layers has the least of its kernels."""

    NEVER = 0
    SINGLE = 1  # one query token per request
    UNIFORM = 2  # the same number of query tokens per request
    VARLEN = 3  # any up to a limit
    ALWAYS = 4

    __hash__ = int.__hash__  # in C, as that of `Op`


class KV(NamedTuple):
    """Keys and values: contiguous [Tk, Hkv, D], or the pages of a cache; for MLA `v` is None."""

    k: torch.Tensor
    v: torch.Tensor | None


class AttnOut(NamedTuple):
    """out [T, H, Dv] in the layer's dtype; lse [H, T] float32, natural log, or None."""

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LseForm:
    """How a vendor callable returns its LSE; our own kernels follow the contract and keep the defaults.

    Where S, the greatest query length, or T is an axis, it may be longer than needed.
    """

    layout: str = "ht"  # "ht" [H, T], "th" [T, H], "bhs" [B, H, S], "bsh" [B, S, H], "bhs1" [B, H, S, 1]
    base: str = "e"  # or "2"
    empty: str = "-inf"  # what a row without keys holds: "-inf", "+inf", "0", "nan" or "sink" (-inf without one)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("layout", self.layout, ("ht", "th", "bhs", "bsh", "bhs1")),
            ("base", self.base, ("e", "2")),
            ("empty", self.empty, ("-inf", "+inf", "0", "nan", "sink")),
        ):
            if value not in known:
                raise ValueError(f"LseForm {name} is {value!r}; it must be one of {', '.join(known)}")


class Requires(NamedTuple):
    """A package that a kernel needs, by its distribution name, and the versions that will do."""

    package: str
    versions: str = ""  # a PEP 440 specifier set, ">=2.6,<3"; empty = any


class Needs(NamedTuple):  # which is made and looked up in a third of a dataclass's time, 3 to 8 times a plan
    """What a segment asks beyond the layer. Lengths are buckets: powers of two that hold the segment's.

    >>> Needs(page_size=16, query_len=1, seq_len=4096).causal
    True
    """

    causal: bool = True
    page_size: int | None = None  # tokens per page; None for contiguous K/V
    query_len: int = 1
    seq_len: int = 1
    lse: bool = False
    graph: GraphLevel = GraphLevel.NEVER
    num_pages: int | None = None  # of the cache; None where it is not known
    reqs: int = 1  # requests of the segment, a bucket as well, where measurements tell it apart; no kernel refuses it


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The part of a plan that one kernel serves in one call: consecutive requests of the batch.

    Host twins serve kernels whose loop is on the host; they are None for lengths known to the device only.
    """

    kernel: Kernel
    requests: slice  # rows of the batch
    tokens: slice  # query tokens of the batch
    cu_seqlens_q: torch.Tensor  # [n + 1] i32, starts at 0
    seq_lens: torch.Tensor  # [n] i32, context + new
    block_table: torch.Tensor | None  # [n, W] i32
    page_size: int
    causal: bool | torch.Tensor  # or [n] bool
    max_query_len: int
    max_seq_len: int
    host_query_lens: npt.NDArray[np.int32]  # [n]
    host_seq_lens: npt.NDArray[np.int32]  # [n]; upper bounds where `exact` is False
    exact: bool = True
    prepared: Any = None  # what the kernel's `prepare` made once for this step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCaps:
    """What a kernel can do. Everything defaults to *not supported*."""

    op: Op
    name: str
    provider: str
    vendors: Container[str] = frozenset()
    archs: Container[str] = frozenset()
    emulated: bool = False  # runs where device code is interpreted on CPU tensors
    requires: tuple[Requires, ...] = ()
    requires_on: Mapping[str, tuple[Requires, ...]] = field(default_factory=dict)  # besides, on a vendor's devices
    dtypes: Container[torch.dtype] = frozenset()
    kv_dtypes: Container[torch.dtype] = frozenset()  # beyond the layer's own dtype; of states as well
    head_dims: Sizes = NO_SIZE  # of q and k
    v_head_dims: Sizes | None = None  # None: as head_dims
    equal_value_dim: bool = False  # V must be as wide as K
    gqa_ratios: Sizes = NO_SIZE
    num_heads: Sizes = ANY_SIZE  # query heads
    query_lens: Sizes = ANY_SIZE  # per request
    uniform: bool = False  # all requests of a call have as many query tokens
    page_sizes: Sizes = NO_SIZE
    page_form: str = "table"  # or "csr"
    cache_layouts: Collection[str] = ("strided",)
    families: Container[str] = frozenset()  # of recurrent layers
    state_dims: Sizes = NO_SIZE
    conv_widths: Sizes = NO_SIZE
    features: frozenset[str] = frozenset()
    lse: LseForm = LseForm()
    # None: NEVER for attention, whose host numbers differ from step to step; ALWAYS for what is given tensors alone
    graph: GraphLevel | None = None
    pad_slot: int = -1  # what a padded row holds in slot_mapping and state_indices
    padded_seq_len: int = 0  # what a padded row holds in seq_lens
    max_block_id: int | None = None
    max_tensor_bytes: int | None = None  # that its offsets into q, K or V reach, where they have 32 bits
    max_seq_len: int | None = None
    tolerance: Mapping[torch.dtype, float] = field(default_factory=dict)  # of |error| beside a float64 oracle
    # keyword arguments of Layer.gqa or Layer.mla that the contract test adds to its own
    test_shapes: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if unknown := self.features - FEATURES:
            raise ValueError(f"{self.name}: features {sorted(unknown)} are not among {sorted(FEATURES)}")
        if self.page_form not in ("table", "csr"):
            raise ValueError(f"{self.name}: page_form is {self.page_form!r}; it must be 'table' or 'csr'")

    @property
    def graph_level(self) -> GraphLevel:
        """The level that is declared, or that of the operation."""
        if self.graph is not None:
            return self.graph
        return GraphLevel.NEVER if self.op in ATTENTION else GraphLevel.ALWAYS


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel is its caps and its function."""

    caps: KernelCaps
    run: Callable[..., Any]
    prepare: Callable[[Segment, Layer], Any] | None = None  # once per step and segment, on the host: no device sync
    plugin: str | None = None  # the plug-in that brought it, its version and a digest of its source

    @property
    def name(self) -> str:
        return self.caps.name

    def __repr__(self) -> str:
        return f"Kernel({self.caps.name})"

    def why_not_on(self, target: Target) -> tuple[str, ...]:
        """Every reason for which this kernel cannot run on a device, whatever the layer."""
        caps, reasons = self.caps, []
        if target.vendor not in caps.vendors:
            reasons.append(f"vendor {target.vendor!r} is not {listed(caps.vendors)}")
        elif target.arch not in caps.archs:
            reasons.append(f"arch {target.arch!r} is not {listed(caps.archs)}")
        if target.emulated and not caps.emulated:
            reasons.append("it does not run on an emulated device")
        return tuple(reasons)

    def why_not(self, target: Target, layer: Layer, needs: Needs) -> tuple[str, ...]:
        """Every reason for which this kernel cannot serve; empty when it can."""
        caps, reasons = self.caps, list(self.why_not_on(target))

        def ask(refused: bool | str | None, reason: str = "") -> None:
            if refused:
                reasons.append(refused if isinstance(refused, str) else reason)

        ask(layer.dtype not in caps.dtypes, f"dtype {short(layer.dtype)} is not {listed(caps.dtypes)}")
        qk_dim, v_dim = head_dims(caps.op, layer)
        ask(caps.head_dims.why_not("head_dim", qk_dim))
        if v_dim != qk_dim or caps.v_head_dims is not None:
            ask((caps.v_head_dims or caps.head_dims).why_not("v_head_dim", v_dim))
        ask(caps.equal_value_dim and v_dim != qk_dim, f"v_head_dim {v_dim} differs from head_dim {qk_dim}")
        if caps.op in PAGES:
            self._ask_pages(layer, needs, ask)
        if caps.op in ATTENTION:
            self._ask_attention(layer, needs, ask)
        if caps.op in RECURRENT:
            self._ask_states(layer, ask)
        if needs.graph > caps.graph_level:
            ask(True, f"graph level {needs.graph.name} is above {caps.graph_level.name}")
        return tuple(reasons)

    def _ask_pages(self, layer: Layer, needs: Needs, ask: Callable[..., None]) -> None:
        caps = self.caps
        ask(
            layer.kv_dtype != layer.dtype and layer.kv_dtype not in caps.kv_dtypes,
            f"kv_dtype {short(layer.kv_dtype)} is not {listed(caps.kv_dtypes)}",
        )
        ask(
            layer.cache_layout not in caps.cache_layouts,
            f"cache layout {layer.cache_layout!r} is not {listed(caps.cache_layouts)}",
        )
        if needs.page_size is not None:
            ask(caps.page_sizes.why_not("page_size", needs.page_size))
        if needs.num_pages is not None:
            self._ask_reach(layer, needs.num_pages, needs.page_size or 1, ask)

    def _ask_reach(self, layer: Layer, num_pages: int, page_size: int, ask: Callable[..., None]) -> None:
        """Whether it can address every page; a cache with gaps between its pages is looked at when it is there."""
        caps, last = self.caps, num_pages - 1
        if caps.max_block_id is not None:
            ask(last > caps.max_block_id, f"page {last} is above {caps.max_block_id}, the last that it can address")
        if caps.max_tensor_bytes is not None:
            heads = 1 if layer.family == "mla" else layer.num_kv_heads
            size = num_pages * page_size * heads * max(head_dims(caps.op, layer)) * layer.kv_dtype.itemsize
            ask(
                size > caps.max_tensor_bytes,
                f"{num_pages} pages have {size} bytes, above the {caps.max_tensor_bytes} that it can address",
            )

    def _ask_states(self, layer: Layer, ask: Callable[..., None]) -> None:
        caps = self.caps
        ask(layer.family not in caps.families, f"family {layer.family!r} is not {listed(caps.families)}")
        ask(
            layer.kv_dtype != layer.dtype and layer.kv_dtype not in caps.kv_dtypes,
            f"state dtype {short(layer.kv_dtype)} is not {listed(caps.kv_dtypes)}",
        )
        if caps.op is Op.CONV1D:
            ask(caps.conv_widths.why_not("conv_width", layer.conv_width))
        else:
            ask(caps.state_dims.why_not("state_dim", layer.state_dim))

    def _ask_attention(self, layer: Layer, needs: Needs, ask: Callable[..., None]) -> None:
        caps = self.caps
        ratio = layer.num_heads if caps.op is Op.MLA_DECODE else layer.group
        ask(caps.gqa_ratios.why_not("GQA ratio", ratio))
        ask(caps.num_heads.why_not("num_heads", layer.num_heads))
        ask(caps.query_lens.why_not("query length", needs.query_len))
        if caps.max_seq_len is not None:
            ask(needs.seq_len > caps.max_seq_len, f"sequence length {needs.seq_len} is above {caps.max_seq_len}")
        wanted = {
            "window": layer.window != (None, None),
            "softcap": layer.softcap is not None,
            "sinks": layer.sinks,
            "alibi": layer.alibi,
            "noncausal": not (needs.causal and layer.causal),
            "lse": needs.lse,
            "batch_invariant": layer.batch_invariant,
        }
        for feature, asked in wanted.items():
            ask(asked and feature not in caps.features, f"{feature} is not supported")


def head_dims(op: Op, layer: Layer) -> tuple[int, int]:
    """(width of K, width of V) as `op` sees them: MLA's cache operations see the latent."""
    if layer.family == "mla" and op in PAGES:
        return layer.latent_dim, layer.kv_lora_rank
    return layer.qk_head_dim, layer.v_head_dim
