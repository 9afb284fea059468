"""What MLA's steps compile, beside what `portable.warmup` says of all: a decode's kernels, and those of a chunk.

A chunk of contexts is gathered, attended to and merged. What its kernels are compiled for follows from the requests
that have a piece in it, and from whether it begins within a context: up to three workspaces of context show all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from portable.batch import Batch
from portable.kernel import KV, GraphLevel, Kernel, Needs, Op
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.limits import Limits
from portable.mha import Choose
from portable.mla import MAX_DECODE_QUERIES, plan_mla
from portable.mla_slot import Latents, MlaSlot
from portable.mla_weights import MlaWeights
from portable.ragged import next_power_of_2
from portable.warmup import Launch, change_metadata, meta, recordable, step
from portable.warmup import steps as any_steps


def needs(
    layer: Layer, limits: Limits, query_lens: Iterable[int], lses: tuple[bool, ...]
) -> Iterator[tuple[Op, Needs]]:
    """All that planning may ask of `select`."""
    longest, page_size = next_power_of_2(limits.max_seq_len), limits.page_size
    yield Op.CACHE_WRITE, Needs(page_size=page_size)
    yield Op.CACHE_GATHER, Needs(page_size=page_size)
    yield Op.MERGE, Needs()
    seq_lens = [1 << i for i in range(longest.bit_length())]
    for query_len in dict.fromkeys(next_power_of_2(n) for n in query_lens):
        for seq_len in seq_lens:
            for lse in (False, True):  # new tokens that a context is merged with need theirs
                yield Op.PREFILL, Needs(layer.causal, None, query_len, seq_len, lse)
            yield Op.PREFILL, Needs(False, None, query_len, seq_len, True)
            for reqs in (1 << i for i in range(next_power_of_2(limits.max_reqs).bit_length())):
                for lse in lses if query_len <= MAX_DECODE_QUERIES else ():
                    yield Op.MLA_DECODE, Needs(layer.causal, page_size, query_len, seq_len, lse, reqs=reqs)


def steps(limits: Limits, query_lens: Iterable[int], workspace: int) -> Iterator[Batch]:
    """Decodes as everywhere; prefills with contexts that fill up to three workspaces."""
    lens = tuple(query_lens)
    yield from any_steps(limits, (n for n in lens if n <= MAX_DECODE_QUERIES))
    width = limits.widths[-1]
    for query_len in lens:
        most = max(1, min(limits.max_reqs, limits.max_tokens // query_len))
        for reqs in (*(1 << i for i in range(20) if 1 << i < most), most):
            room = limits.max_seq_len - query_len
            fill = min(room, max(1, 3 * workspace // reqs))
            for context in sorted({0, min(room, 1), min(room, limits.page_size + 1), fill}):
                yield step([query_len] * reqs, [query_len + context] * reqs, width, limits.page_size)
        if query_len < min(limits.max_tokens, limits.max_seq_len) and limits.max_reqs > 1:  # a chunk behind a token
            yield step([1, query_len], [1, query_len + 1], width, limits.page_size)


def multiply(layer: Layer, device: torch.device, limits: Limits, query_lens: Iterable[int]) -> None:
    """The products around decodes, once: what the device's library of them makes at first, no graph may hold."""
    heads, rank, widths = layer.num_heads, layer.kv_lora_rank, (layer.qk_nope_head_dim, layer.v_head_dim)
    weights = MlaWeights(*(torch.zeros(heads, width, rank, dtype=layer.dtype, device=device) for width in widths))
    for queries in (n for n in query_lens if n <= MAX_DECODE_QUERIES):
        for tokens in {queries * min(reqs, limits.max_reqs) for reqs in (1, 4, 16, 64)}:
            new = partial(torch.zeros, dtype=layer.dtype, device=device)
            weights.absorb(new(tokens, heads, widths[0]), new(tokens, heads, layer.qk_rope_head_dim))
            weights.expand(new(tokens, heads, rank), new(tokens, heads, widths[1]))


def launches(workspace: int, asked: Iterable[tuple[Op, Needs]]) -> Launch:
    """Everything that one layer of a step may launch.

    Args:
        workspace: context tokens that are up-projected at once.
        asked: all that is asked of `select`: which kernel decodes depends on how many requests there are and how long
            they are, and on whether the step is captured, so each one that does for any decodes in every step.
    """
    decodes = [need for op, need in asked if op is Op.MLA_DECODE]
    decoders: dict[tuple[int, bool], tuple[Kernel | None, ...]] = {}

    @cache
    def of(kernel: Kernel) -> Any:  # the same each time: planning asks which of two kernels is the other
        return kernel if recordable(kernel.caps.provider) else _Silent(kernel.caps)

    def launch(layer: Layer, choose: Choose, batch: Batch, kv: KV, tensors: LayerTensors, lse: bool) -> None:
        tokens, heads, rank = batch.num_tokens, layer.num_heads, layer.kv_lora_rank
        nope, rope, v_dim = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        shapes = ((tokens, heads, nope), (tokens, heads, rope), (tokens, rank), (tokens, rope))
        new = Latents(*(meta(shape, layer.dtype) for shape in shapes))
        weights = MlaWeights(*(meta((heads, width, rank), layer.dtype) for width in (nope, v_dim)))
        parts = meta((tokens, rank + rope), layer.dtype).split([rank, rope], -1)  # as the latents of one product come
        out = meta((tokens, heads, v_dim), layer.dtype)
        log = meta((heads, tokens), torch.float32) if lse else None

        like = next_power_of_2(batch.max_query_len), lse
        if like not in decoders:
            of_kind = (need for need in decodes if (need.query_len, need.lse) == like)
            found = dict.fromkeys(each for need in of_kind for each in _decoders(choose, need))
            decoders[like] = tuple(found) or (None,)
        for decoder in decoders[like]:

            def chosen(op: Op, need: Needs, decoder: Kernel | None = decoder) -> Any:
                kernel = decoder if decoder and op is Op.MLA_DECODE else choose(op, need)
                return of(kernel)

            slot = MlaSlot(layer, chosen, workspace)
            segments = plan_mla(batch, layer, chosen, workspace=workspace, lse=lse)
            slot.run(segments, tokens, new, kv.k, weights, tensors, out, log)
            write = chosen(Op.CACHE_WRITE, Needs(page_size=batch.page_size))
            for kv_c, k_pe in product((new.kv_c, parts[0]), (new.k_pe, parts[1])):
                write.run(kv_c, k_pe, kv, batch.slot_mapping, layer, tensors)
        if not batch.exact:
            change_metadata(choose, batch)

    return launch


def _decoders(choose: Choose, need: Needs) -> Iterator[Kernel]:
    """The kernels of a step that is run, and of one that is captured: of requests of one length, and of any."""
    uniform = GraphLevel.SINGLE if need.query_len == 1 else GraphLevel.UNIFORM
    for level in (GraphLevel.NEVER, uniform, GraphLevel.VARLEN):
        with suppress(UnsupportedError):
            yield choose(Op.MLA_DECODE, need._replace(graph=level))


@dataclass(frozen=True, slots=True)
class _Silent:
    """A kernel that is chosen, and launches nothing that is compiled here."""

    caps: Any
    prepare: None = None

    def run(self, *arguments: Any) -> None: ...
