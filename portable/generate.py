"""The engine of `portable generate`: a transformers decoder, continuous batching and a paged KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.attention import Attention
from portable.batch import Batch
from portable.cache import token_bytes
from portable.generate_caches import allocate_caches, up_projections
from portable.generate_graphs import DecodeGraphs
from portable.generate_states import FAMILIES as RECURRENT
from portable.generate_states import Recurrent
from portable.layer import Layer, LayerTensors
from portable.mamba_run import Mamba
from portable.mla_attention import MlaAttention
from portable.model_attention import Call, answering
from portable.model_mamba import answering_states
from portable.platform.graphs import runtime
from portable.prefix import PrefixScheduler
from portable.schedule import Chunk, Request, Scheduler
from portable.state_slots import StateSlots

POOL_BYTES = 4 << 30  # the most that a pool takes when its size is left to us


class Token(NamedTuple):
    """One generated token, as it comes; `request.finish_reason` is set with its last."""

    request: Request
    id: int


OnLogits = Callable[[list[Request], torch.Tensor], None]


@dataclass(slots=True)
class Stats:
    """What a run of the engine took."""

    steps: int = 0
    graph_steps: int = 0  # that were replays of a captured graph
    prompt_tokens: int = 0  # computed: those of a preempted request count again
    generated_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy at temperature 0; else each request draws from its own generator, so that no other changes its text."""

    temperature: float = 0.0
    seed: int = 0
    _generators: dict[int, torch.Generator] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request, by logits [n, vocabulary]: one transfer to the host."""
        if not self.temperature:
            greedy: list[int] = logits.argmax(-1).tolist()
            return greedy
        logits = logits.float()
        chances = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)  # finite at any temperature
        drawn = [torch.multinomial(row, 1, generator=self._generator(request, row.device))
                 for row, request in zip(chances, requests, strict=True)]  # fmt: skip
        tokens: list[int] = torch.cat(drawn).tolist()
        return tokens

    def _generator(self, request: Request, device: torch.device) -> torch.Generator:
        if request.index not in self._generators:
            self._generators[request.index] = torch.Generator(device).manual_seed(self.seed + request.index)
        return self._generators[request.index]


class Engine:
    """A model, its pages, and one `Attention` or `MlaAttention` for each kind of layer.

    Args:
        model: loaded by `portable.models.load_model`.
        layers: what `discover_layers` found in it.
        num_pages, page_size: of the pool that all layers share the numbering of; each layer has its own tensors.
        prefill_chunk: prompt tokens per step.
        max_reqs: requests that run at once.
        max_seq_len: the longest sequence, prompt and answer.
        device: as for `Attention`; None for the model's.
        backend: as for `Attention`.
        prefix_caching: keep pages, and states at their ends, for requests that begin with the same tokens.
        graphs: capture steps that decode only, where the device has graphs.

    Raises:
        ValueError, UnsupportedError: a size below 1, an unknown backend, or a layer that no kernel serves.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Layer],
        *,
        num_pages: int,
        page_size: int = 16,
        prefill_chunk: int = 512,
        max_reqs: int = 64,
        max_seq_len: int = 131072,
        stop_ids: Iterable[int] = (),
        device: torch.device | str | None = None,
        backend: str | None = None,
        prefix_caching: bool = False,
        graphs: bool = True,
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.layers = tuple(layers)
        self.caches = allocate_caches(self.layers, num_pages, page_size, self.device)
        recurrent = any(layer.family in RECURRENT for layer in self.layers)
        of_scheduler: dict[str, Any] = {
            "num_pages": num_pages,
            "page_size": page_size,
            "prefill_chunk": prefill_chunk,
            "max_reqs": max_reqs,
            "stop_ids": frozenset(stop_ids),
        }
        slots: StateSlots | None = None
        if recurrent and prefix_caching:
            slots = StateSlots(
                max_reqs=max_reqs, num_checkpoints=4 * max_reqs, block_size=page_size, max_seq_len=max_seq_len
            )
        self.scheduler = PrefixScheduler(slots=slots, **of_scheduler) if prefix_caching else Scheduler(**of_scheduler)
        self.recurrent: Recurrent | None = None
        if recurrent:
            self.recurrent = Recurrent(
                self.layers,
                device=self.device if device is None else device,
                max_reqs=max_reqs,
                max_tokens=prefill_chunk + max_reqs,
                slots=slots,
                backend=backend,
            )
        sizes: dict[str, Any] = {
            "page_size": page_size,
            "device": self.device if device is None else device,
            "max_reqs": max_reqs,
            "max_tokens": prefill_chunk + max_reqs,
            "max_seq_len": max_seq_len,
            "backend": backend,
        }
        self.attentions: dict[Layer, Attention | MlaAttention] = {
            layer: (MlaAttention if layer.family == "mla" else Attention)(layer, **sizes)
            for layer in dict.fromkeys(self.layers)
            if layer.family not in RECURRENT
        }
        self.weights = up_projections(model, self.layers)
        self.stats = Stats()
        self.graphs: DecodeGraphs | None = None
        if graphs and runtime(self.device) is not None:
            self.graphs = DecodeGraphs(self.planners, self._forward, max_reqs)

    @property
    def planners(self) -> Mapping[Layer, Attention | MlaAttention | Mamba]:
        """What plans each kind of layer, in the order in which the model has them first."""
        found: dict[Layer, Attention | MlaAttention | Mamba] = {**self.attentions}
        if self.recurrent is not None:
            found |= self.recurrent.mambas
        return {layer: found[layer] for layer in dict.fromkeys(self.layers)}

    def generate(
        self, requests: Iterable[Request], sampling: Sampling | None = None, on_logits: OnLogits | None = None
    ) -> Generator[Token, None, None]:
        """Run requests to their ends, and give each token as it is sampled.

        Closing the iterator, or an exception in it, ends the others where they are, as "interrupted"; all pages are
        free afterwards.

        Args:
            on_logits: sees each step's requests that sample, with their logits [n, vocabulary].

        Raises:
            ValueError: a request can never fit the pool; nothing has run then.
        """
        scheduler, sampling = self.scheduler, sampling or Sampling()
        self.stats = Stats()
        before, start = scheduler.preemptions, time.perf_counter()
        try:
            for request in requests:
                scheduler.add(request)
            while chunks := scheduler.step():
                sampled = self._compute(chunks, sampling, on_logits)
                scheduler.commit(chunks, (token.id for token in sampled))
                self._count(chunks, sampled, time.perf_counter() - start)
                yield from sampled
        finally:
            scheduler.interrupt()
            self.stats.seconds = time.perf_counter() - start
            self.stats.preemptions = scheduler.preemptions - before

    def _count(self, chunks: list[Chunk], sampled: list[Token], seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += len(sampled)
        stats.prompt_tokens += sum(chunk.length for chunk in chunks if chunk.length > 1 or not chunk.start)
        if sampled and stats.first_token_seconds is None:
            stats.first_token_seconds = seconds

    @torch.inference_mode()
    def _compute(self, chunks: list[Chunk], sampling: Sampling, on_logits: OnLogits | None) -> list[Token]:
        """One packed forward of the model."""
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for chunk in chunks:
            end = chunk.start + chunk.length
            ids += chunk.request.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                last.append(len(ids) - 1)
        tokens = torch.tensor([ids, positions]).t()
        replay = self.graphs is not None and self.graphs.serves(chunks)
        steps = self._steps(chunks, self._decodes(chunks) if replay else self._batch(chunks))
        logits = self.graphs(steps, tokens) if self.graphs is not None and replay else None
        if logits is not None:
            self.stats.graph_steps += 1
        else:
            if replay:  # it could not be captured
                steps = {layer: _moved(step, self._batch(chunks)) for layer, step in steps.items()}
            plans = {layer: _plan(planner, steps[layer]) for layer, planner in self.planners.items()}
            keep = torch.tensor(last, dtype=torch.long, device=self.device)
            logits = self._forward(plans, tokens.to(self.device), keep)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        if not requests:
            return []
        if on_logits is not None:
            on_logits(requests, logits)
        return [Token(request, id) for request, id in zip(requests, sampling(logits, requests), strict=True)]

    def _steps(self, chunks: list[Chunk], batch: Batch) -> dict[Layer, Any]:
        """What each planner plans, once the running states are where the step stores them."""
        steps: dict[Layer, Any] = dict.fromkeys(self.attentions, batch)
        return steps if self.recurrent is None else steps | self.recurrent.asked(batch, chunks)

    def _forward(self, plans: Mapping[Layer, Any], tokens: torch.Tensor, last: torch.Tensor | int = 0) -> torch.Tensor:
        """Logits [n, V] of the tokens numbered `last`, 0 for all of them, from ids and positions [T, 2]."""
        with ExitStack() as stack:
            stack.enter_context(answering(self._answer(plans)))
            if self.recurrent is not None:
                stack.enter_context(answering_states(self.recurrent.answer(plans)))
            output = self.model(
                input_ids=tokens[None, :, 0], position_ids=tokens[None, :, 1], use_cache=False, logits_to_keep=last
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _batch(self, chunks: list[Chunk]) -> Batch:
        seq_lens, pages = self._pages(chunks)
        return Batch.from_lens(
            query_lens=[chunk.length for chunk in chunks],
            seq_lens=seq_lens,
            block_table=pages,
            page_size=self.scheduler.page_size,
            device=self.device,
        )

    def _decodes(self, chunks: list[Chunk]) -> Batch:
        """One new token each, on the host."""
        return Batch.decode(*self._pages(chunks), page_size=self.scheduler.page_size)

    def _pages(self, chunks: list[Chunk]) -> tuple[list[int], npt.NDArray[np.int32]]:
        """The lengths after a step, and the block table of its requests."""
        seq_lens = [chunk.start + chunk.length for chunk in chunks]
        width = -(-max(seq_lens) // self.scheduler.page_size)
        return seq_lens, self.scheduler.block_table[[chunk.request.row for chunk in chunks], :width]

    def _answer(self, plans: Mapping[Layer, Any]) -> Callable[[Call], torch.Tensor]:
        """The attention of this step: write the new tokens to their pages, then attend."""

        def answer(call: Call) -> torch.Tensor:
            layer, cache = self.layers[call.layer_idx], self.caches[call.layer_idx]
            attention, plan = self.attentions[layer], plans[layer]
            if isinstance(attention, MlaAttention):
                assert call.latents is not None
                q_nope, q_pe = call.q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
                k_pe = call.k[:, 0, layer.qk_nope_head_dim :]  # the same in every head
                attention.write(call.latents, k_pe, cache, plan)
                weights = self.weights[call.layer_idx]
                return attention.run(q_nope, q_pe, call.latents, k_pe, cache, plan, weights).out
            tensors = LayerTensors(sinks=call.sinks)
            attention.write(call.k, call.v, cache, plan, tensors)
            return attention.run(call.q, cache, plan, k=call.k, v=call.v, tensors=tensors).out

        return answer


def _plan(planner: Any, step: Batch | dict[str, Any]) -> Any:
    return planner.plan(**step) if isinstance(step, dict) else planner.plan(step)


def _moved(step: Batch | dict[str, Any], batch: Batch) -> Batch | dict[str, Any]:
    """The same step on another device."""
    return {**step, "batch": batch} if isinstance(step, dict) else batch


def enough_pages(
    requests: Sequence[Request], layers: Sequence[Layer], page_size: int, max_bytes: int = POOL_BYTES
) -> int:
    """Pages that hold all requests at once, or as many as fit `max_bytes`, but enough for the largest request.

    >>> layer = Layer.gqa(num_heads=2, head_dim=8, dtype=torch.float32)
    >>> enough_pages([Request(0, [1] * 10, 7), Request(1, [1], 1)], [layer], page_size=4)
    5
    """
    wanted = [-(-(len(r.prompt) + r.max_new_tokens - 1) // page_size) for r in requests]
    return max(max(wanted), min(sum(wanted), max_bytes // max(1, page_size * sum(map(token_bytes, layers)))))
