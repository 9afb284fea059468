"""A few small calls that show whether a vendor's kernel, as it is installed here, keeps the contract.

Each is about one thing that vendor releases have got wrong in silence: the diagonal when queries and keys differ in
number, the edge of a window, rows without a key, the tail of a page, a feature that is taken and then ignored, the base
and the layout of the LSE. Memory that holds no data is NaN. A dozen calls with at most 64 tokens: 20 to 40 ms on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable.backends.reference import attend
from portable.backends.selftest_inputs import Inputs, Lens, drawn, inputs_of, into_pages, on
from portable.kernel import ATTENTION, KV, GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, default_scale
from portable.merge import merge_states
from portable.ragged import next_power_of_2

if TYPE_CHECKING:
    from portable.platform.target import Target

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
HEADS = ((8, 2), (8, 1), (4, 4), (16, 2), (16, 1), (128, 1))  # query heads, KV heads
DIMS = ((128, 128), (64, 64), (192, 128), (256, 256), (32, 32), (16, 16), (64, 128))
RANKS = ((512, 64), (64, 16))  # of MLA
PAGE_SIZES = (16, 64, 32, 128, 256, 1)
LEAST_LSE = 1e-3  # an LSE is a float32 sum of rounded products, whatever the layer's dtype
UNLIKE = 1.7  # times the default scale: a kernel that takes its own is wrong


@dataclass(frozen=True)
class Trial:
    """One call: what it is about, in words, and what is asked."""

    about: str
    lens: Lens
    layer: Mapping[str, Any] = field(default_factory=dict)  # what differs from the plain layer
    causal: bool = True

    def single(self) -> Trial:
        """The same with one query for each request, for kernels that take no more."""
        return replace(self, lens=tuple((min(1, queries), keys) for queries, keys in self.lens))


EXTEND: Lens = ((3, 7), (2, 37))
TRIALS = (
    Trial("the first tokens of requests", ((5, 5), (19, 19))),
    Trial("one query for each request", ((1, 1), (1, 18), (1, 33))),
    Trial("more keys than queries", EXTEND),
    Trial("rows without a key", ((4, 2), (1, 0), (3, 3))),
    Trial("requests without a query", ((0, 3), (1, 3), (0, 0), (1, 8))),
    Trial("keys on both sides", EXTEND, causal=False),
    Trial("the edge of a window", ((9, 9), (2, 37)), {"window": (3, 0)}),
    Trial("a window of one key", EXTEND, {"window": (0, 0)}),
    Trial("softcap", EXTEND, {"softcap": 1.0}),
    Trial("sinks", EXTEND, {"sinks": True}),
    Trial("alibi", EXTEND, {"alibi": True}),
    Trial("values narrower than keys", EXTEND, {"v_head_dim": 64}),
    Trial("an fp8 cache", EXTEND, {"kv_dtype": "fp8"}),
    Trial("several queries for each request", ((3, 8), (3, 33))),
    Trial("six queries for each request", ((6, 8), (6, 33))),
)


def fault(kernel: Kernel, target: Target) -> str | None:
    """What a kernel does wrong on a device, as a sentence, or None; waits for the device.

    What the kernel refuses is not tried. An exception of the kernel is a fault too, and so is a kernel of which nothing
    could be tried.

    >>> from portable.backends.reference import KERNELS
    >>> from portable.platform.detect import detect
    >>> fault(KERNELS[0], detect("cpu")) is None
    True
    """
    device = torch.device(target.device)
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        return _fault(kernel, target)


def _fault(kernel: Kernel, target: Target) -> str | None:
    if kernel.caps.op not in ATTENTION:
        return f"no self-test is known for {kernel.caps.op}"
    plain = next(plain_layers(kernel, target), None)
    if plain is None:
        return "it serves no layer that the self-test knows"
    layer, page_size = plain
    tried = 0
    for listed in TRIALS:
        asked = asked_of(listed, layer, target, kernel.caps.op)
        if asked is None:
            continue
        able = (each for each in (listed, listed.single()) if not refused(kernel, target, asked, each, page_size))
        if (trial := next(able, None)) is None:
            continue
        lse = not kernel.why_not(target, asked, needs_of(trial, page_size, lse=True))
        tried += 1
        if found := attempt(trial.about, partial(check, kernel, trial, asked, page_size, target, lse)):
            return found
    if not tried:
        return "it refuses everything that the self-test asks"
    needs = Needs(True, page_size, 1, 64, lse=True)
    if not kernel.why_not(target, layer, needs):
        return attempt("a merge of two parts", partial(check_merge, kernel, layer, page_size, target))
    return None


def refused(kernel: Kernel, target: Target, layer: Layer, trial: Trial, page_size: int | None) -> bool:
    return bool(kernel.why_not(target, layer, needs_of(trial, page_size, lse=False)))


def attempt(about: str, run: Callable[[], str | None]) -> str | None:
    """The sentence of a failed trial."""
    try:
        wrong = run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"{about}: {wrong}" if wrong else None


def plain_layers(kernel: Kernel, target: Target) -> Iterator[tuple[Layer, int | None]]:
    """Layers without features that the kernel serves, with a page size."""
    caps = kernel.caps
    sizes = (None,) if caps.op is Op.PREFILL else PAGE_SIZES
    for dtype, layout, page_size in itertools.product(DTYPES, caps.cache_layouts, sizes):
        layers: Iterator[Layer]
        if caps.op is Op.MLA_DECODE:
            layers = (
                Layer.mla(num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, dtype=dtype, scale=0.11)
                for (heads, _), (rank, rope) in itertools.product(HEADS, RANKS)
            )
        else:
            layers = (
                Layer.gqa(
                    num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, dtype=dtype,
                    scale=UNLIKE * default_scale(dim), cache_layout=layout,
                )
                for (dim, v_dim), (heads, kv_heads) in itertools.product(DIMS, HEADS)
            )  # fmt: skip
        for layer in layers:
            if not kernel.why_not(target, layer, Needs(True, page_size, 1, 64)):
                yield layer, page_size


def asked_of(trial: Trial, layer: Layer, target: Target, op: Op) -> Layer | None:
    """The layer of a trial; None where the device, the family or the operation has no such thing."""
    changes = dict(trial.layer)
    if "kv_dtype" in changes:
        if target.fp8 not in FP8 or op is Op.PREFILL:
            return None
        changes["kv_dtype"] = FP8[target.fp8]
    if changes.get("v_head_dim", 0) >= layer.v_head_dim or (layer.family == "mla" and changes.keys() - {"kv_dtype"}):
        return None
    return replace(layer, **changes)


def needs_of(trial: Trial, page_size: int | None, *, lse: bool) -> Needs:
    queries, keys = (next_power_of_2(max(1, *(pair[i] for pair in trial.lens))) for i in range(2))
    return Needs(trial.causal, page_size, queries, keys, lse, GraphLevel.NEVER)


def check(kernel: Kernel, trial: Trial, layer: Layer, page_size: int | None, target: Target, lse: bool) -> str | None:
    """What is wrong with one call."""
    inputs = inputs_of(kernel, trial.lens, layer, page_size, target.device, trial.causal)
    got, got_lse = call(kernel, layer, inputs, lse)
    if not torch.equal(inputs.q.cpu(), inputs.queries):
        return "it wrote into q"
    want, want_lse, size = right(trial.lens, layer, trial.causal)
    return wrong("out", got, want, size, tolerance(kernel, layer)) or (
        wrong("lse", got_lse, want_lse, want_lse.abs(), max(LEAST_LSE, tolerance(kernel, layer)))
        if got_lse is not None
        else None
    )


def check_merge(kernel: Kernel, layer: Layer, page_size: int | None, target: Target) -> str | None:
    """One query on each of two sets of keys, merged by LSE. As many queries as heads: shapes say nothing of layouts."""
    heads = layer.num_heads if layer.num_heads <= 16 else 4
    whole: Lens = tuple((1, 9 + 2 * r) for r in range(heads))
    both = inputs_of(kernel, whole, layer, page_size, target.device)
    parts, at = [], np.cumsum([0, *(keys for _, keys in whole)])
    for first in (True, False):
        lens: Lens = tuple((1, 2 if first else keys - 2) for _, keys in whole)
        rows = np.concatenate(
            [np.arange(a, a + 2) if first else np.arange(a + 2, b) for a, b in itertools.pairwise(at)]
        )
        part = inputs_of(kernel, lens, layer, page_size, target.device)
        kept = KV(both.k[rows].to(layer.kv_dtype), both.v[rows].to(layer.kv_dtype))
        if layer.family == "mla":
            kept = KV(kept.k[:, 0], None)
        if page_size is not None:
            kept, _ = into_pages(kept, lens, layer, page_size)
        part.q, part.kv = both.q, on(target.device, kept)
        parts.append(call(kernel, layer, part, True))
    lses = [lse for _, lse in parts if lse is not None]
    merged = merge_states([out for out, _ in parts], lses)
    want, want_lse, size = right(whole, layer, True)
    most = tolerance(kernel, layer)
    return wrong("out", merged.out, want, size, 2 * most) or (
        None if merged.lse is None else wrong("lse", merged.lse, want_lse, want_lse.abs(), max(LEAST_LSE, most))
    )


def call(kernel: Kernel, layer: Layer, inputs: Inputs, lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, width = len(inputs.q), inputs.v.shape[-1]
    out = torch.full((tokens, layer.num_heads, width), torch.nan, dtype=layer.dtype, device=inputs.q.device)
    got = torch.full((layer.num_heads, tokens), torch.nan, device=inputs.q.device) if lse else None
    with torch.no_grad():
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, got)
    return out.cpu(), None if got is None else got.cpu()


@lru_cache(maxsize=64)
def right(lens: Lens, layer: Layer, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is right, and how large the terms of each sum are."""
    found, tokens, keys = [], 0, 0
    q, _, tensors, every_k, every_v = drawn(lens, layer)
    for queries, length in lens:
        k, v = every_k[keys : keys + length], every_v[keys : keys + length]
        given = attend(
            q[tokens : tokens + queries], k, torch.cat([v, v.abs()], -1),
            scale=layer.scale, causal=causal and layer.causal, window=layer.window, softcap=layer.softcap,
            sinks=tensors.sinks, alibi=tensors.alibi, compute=torch.float64,
        )  # fmt: skip
        found.append(given)
        tokens, keys = tokens + queries, keys + length
    out, size = torch.cat([part.out for part in found]).chunk(2, -1)
    lse = torch.cat([part.lse for part in found if part.lse is not None], 1)
    return out, lse, size


def tolerance(kernel: Kernel, layer: Layer) -> float:
    return 2 * kernel.caps.tolerance.get(layer.dtype, 1e-2)


def wrong(name: str, got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, most: float) -> str | None:
    """How far a result is off, relative to 1 + `size`; infinities must be the same."""
    errors = ((got.double() - want).abs() / (1 + size)).nan_to_num(nan=math.inf)
    errors = errors.masked_fill(~want.isfinite(), math.inf).masked_fill(got == want, 0)
    worst = float(errors.max()) if errors.numel() else 0.0
    return f"{name} is wrong by {worst:.2g}, above {most:.2g}" if worst > most else None
