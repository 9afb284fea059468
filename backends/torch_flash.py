"""PyTorch's fused attention on GPUs: the vendor's kernel where nothing but torch is installed.

`aten::_flash_attention_forward` is FlashAttention 2 under CUDA, which aligns causality to the bottom right. Under ROCm
the same operator is AOTriton's kernel: it aligns to the top left, and refuses or ignores what its schema offers beyond
(windows, ALiBi, `seqused_k`, `block_table`). The two agree on requests with as many keys as queries. So for ROCm a step
with other requests becomes two calls, every query on its context without a mask and the new tokens on themselves, and
a merge by LSE.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.backends.adapter import Adapter, Convention
from portable.kernel import KV, AttnOut, Kernel, KernelCaps, LseForm, Op, Requires, Segment
from portable.layer import Layer, LayerTensors
from portable.merge import lse_rows, merge_states
from portable.ragged import cu_from_lens
from portable.sets import ANY_SIZE, from_arch, multiple_of

Lens = npt.NDArray[np.int32]

CALL = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "max_query_len": "max_q",
    "max_seq_len": "max_k",
    "causal": "is_causal",
    "scale": "scale",
}
FIXED = {"dropout_p": 0.0, "return_debug_mask": False}
FLASH = "ops.aten._flash_attention_forward.default"

CUDA = Convention(
    module="torch",
    function=FLASH,
    names={**CALL, "window_left": "window_size_left", "window_right": "window_size_right"},
    fixed=FIXED,
    equal_value_dim=True,
    open_side=None,
    folds_single=True,
    returns={5: 1},
    lse=LseForm(empty="+inf"),
    zeroes_empty=False,
)
TOP_LEFT = Convention(
    module="portable.backends.torch_flash",
    function="top_left",
    names=CALL,
    fixed=FIXED,
    equal_value_dim=True,
    returns={2: 1},
    lse=LseForm(empty="nan"),  # not known, and told from lengths
    zeroes_empty=False,
)


def top_left(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """ROCm's operator, with the LSE as [H, T]: sources have [B, H, longest] and [H, T], so its axes are counted."""
    found, lse, *_ = torch.ops.aten._flash_attention_forward.default(**call)
    if lse.dim() == 3:
        tokens, heads = found.shape[:2]
        lse = lse_rows(lse, LseForm(layout="bhs"), heads, tokens, call[CALL["cu_seqlens_q"]])
    return found, lse


def _asks_lse(segment: Segment, layer: Layer) -> Any:
    return importlib.import_module("torch.nn.attention.varlen").AuxRequest(lse=True)


# The documented function above the operator, for a torch that has changed the operator.
VARLEN = Convention(
    module="torch.nn.attention.varlen",
    function="varlen_attn",
    names={
        "q": "query",
        "k": "key",
        "v": "value",
        "cu_seqlens_q": "cu_seq_q",
        "cu_seqlens_k": "cu_seq_k",
        "max_query_len": "max_q",
        "max_seq_len": "max_k",
        "scale": "scale",
        "window": "window_size",  # causal is exactly the tuple (-1, 0)
    },
    fixed={"enable_gqa": True},
    step={"return_aux": _asks_lse},
    equal_value_dim=True,
    folds_single=True,
    lse=LseForm(empty="+inf"),
    zeroes_empty=False,
)


class Split(NamedTuple):
    """A step whose causal requests are not square, as steps without that difficulty."""

    parts: tuple[Segment, Segment]  # every query on its context, without a mask; the last keys on themselves, causal
    open: Segment | None  # the step without causality, where some requests want that,
    causal: torch.Tensor | None  # and [T] bool, which rows do not


class TopLeft(Adapter):
    """Bottom-right causality from a callable that aligns it to the top left."""

    def prepare(self, segment: Segment, layer: Layer) -> Any:
        """The adapter's step where every request is square or none is causal, or a `Split`."""
        square, plain = segment.exact and (segment.host_query_lens == segment.host_seq_lens).all(), super().prepare
        if square or segment.causal is False or not segment.tokens.stop - segment.tokens.start:
            return plain(segment, layer)
        parts = tuple(replace(part, prepared=plain(part, layer)) for part in split(segment))
        if not isinstance(segment.causal, torch.Tensor):
            return Split((parts[0], parts[1]), None, None)
        whole = replace(segment, causal=False)
        tokens = segment.tokens.stop - segment.tokens.start
        request = torch.repeat_interleave(segment.cu_seqlens_q.diff().long(), output_size=tokens)
        return Split(
            (parts[0], parts[1]),
            replace(whole, prepared=plain(whole, layer)),
            segment.causal[request],
        )

    def attend(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of the step, of one call or of the parts of a `Split`."""
        step, plain = segment.prepared, super().attend
        if not isinstance(step, Split):
            plain(q, kv, segment, layer, tensors, out, lse)
            return

        def partial(part: Segment) -> tuple[torch.Tensor, torch.Tensor]:
            found = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            logs = q.new_empty((out.shape[1], out.shape[0]), dtype=torch.float32)
            plain(q, kv, part, layer, tensors, found, logs)
            return found, logs

        (context, context_lse), (new, new_lse) = map(partial, step.parts)
        if step.open is None:
            merge_states([context, new], [context_lse, new_lse], None, out, lse)
            return
        merged = merge_states([context, new], [context_lse, new_lse])
        if step.causal is not None:
            whole, whole_lse = partial(step.open)
            merged = AttnOut(
                torch.where(step.causal[:, None, None], merged.out, whole),
                torch.where(step.causal, merged.lse, whole_lse) if merged.lse is not None else None,
            )
        out.copy_(merged.out)
        if lse is not None and merged.lse is not None:
            lse.copy_(merged.lse)


def split(segment: Segment) -> tuple[Segment, Segment]:
    """Two segments of twice as many requests over the same rows and keys, some of them empty.

    Of a request with Sq queries and Sk keys the last n = min(Sq, Sk) of both make a square; its context is the keys
    before that, and queries before it see nothing.
    """
    context, n, empty = _lens(segment.host_query_lens, segment.host_seq_lens)
    queries, seq_lens = segment.cu_seqlens_q.diff(), segment.seq_lens
    there = (seq_lens - queries).clamp(min=0), torch.minimum(seq_lens, queries), (queries - seq_lens).clamp(min=0)
    none, zero = np.zeros_like(n), torch.zeros_like(queries)
    return (
        _pairs(segment, (segment.host_query_lens, none), (context, n), (queries, zero), there[:2], causal=False),
        _pairs(segment, (empty, n), (context, n), (there[2], there[1]), there[:2], causal=True),
    )


def _lens(queries: Lens, keys: Lens) -> tuple[Lens, Lens, Lens]:
    return np.maximum(keys - queries, 0), np.minimum(queries, keys), np.maximum(queries - keys, 0)


def _pairs(
    segment: Segment,
    host_queries: tuple[Lens, Lens],
    host_keys: tuple[Lens, Lens],
    queries: tuple[torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    *,
    causal: bool,
) -> Segment:
    """The segment whose requests are, in turn, of the first and of the second lengths."""
    query_lens, seq_lens = np.stack(host_queries, 1).ravel(), np.stack(host_keys, 1).ravel()
    seen = (seq_lens[query_lens > 0] > 0).any()
    return replace(
        segment,
        cu_seqlens_q=cu_from_lens(torch.stack(queries, 1).flatten()),
        seq_lens=torch.stack(keys, 1).flatten(),
        causal=causal,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)) if seen else 0,  # 0: nothing to call for
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
    )


DTYPES = frozenset({torch.float16, torch.bfloat16})
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
PLAIN = frozenset({"noncausal", "lse"})


def _caps(name: str, **given: Any) -> KernelCaps:
    return KernelCaps(
        op=Op.PREFILL,
        name=name,
        provider="torch",
        requires=(Requires("torch", ">=2.11"),),
        dtypes=DTYPES,
        head_dims=multiple_of(8, up_to=256),
        gqa_ratios=ANY_SIZE,
        tolerance=TOLERANCE,
        **given,
    )


def _kernels() -> Iterator[Kernel]:
    nvidia: dict[str, Any] = {"vendors": {"nvidia"}, "archs": from_arch("sm80")}
    # torch's wheels are built without ALiBi: "This flash attention build does not support alibi" (2.11 on an H100)
    yield Adapter(CUDA).kernel(_caps("torch.flash", features=PLAIN | {"window"}, **nvidia))
    caps = _caps("torch.varlen", features=PLAIN | {"window"}, **nvidia)
    yield Adapter(VARLEN).kernel(replace(caps, requires=(Requires("torch", ">=2.13"),)))
    # what AOTriton supports without an experimental switch
    amd: dict[str, Any] = {"vendors": {"amd"}, "archs": {"gfx90a", "gfx942", "gfx950"}}
    yield TopLeft(TOP_LEFT).kernel(_caps("torch.flash_rocm", features=PLAIN, **amd))


KERNELS = tuple(_kernels())
