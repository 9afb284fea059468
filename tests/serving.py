"""Random serving steps through captured graphs, beside the same kernels run eagerly and a float64 reference.

Requests join, read their prompts in chunks, decode, verify drafts and leave. Pages and states of requests that left
are filled with NaN. After every step

* what the replayed graph gave is, bit by bit, what the same kernels give when they are run eagerly on caches of their
  own, planned at the same padded size on another slot;
* it is as near as the type allows to float64 attention, planned without padding on a third set of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from serving_layers import DRAFTS, PAGE, Heads, Latents, States

from portable import Batch, Layer
from portable.graphs import Graphs
from portable.sizes import Size, least

EAGER = 100  # a plan slot that no graph has


@dataclass(eq=False)
class Request:
    """A sequence: what of it is in the caches, and the tokens of its last step that count."""

    row: int
    prompt: int
    length: int = 0
    accepted: int = 1

    @property
    def prefilling(self) -> bool:
        return self.length < self.prompt


@dataclass
class Step:
    """Requests and their new tokens: decodes, then what goes on with a prompt, then what begins one."""

    kind: str  # "decode", "verify" or "mixed"
    requests: list[Request]
    query_lens: list[int]

    @property
    def seq_lens(self) -> list[int]:
        return [request.length + n for request, n in zip(self.requests, self.query_lens, strict=True)]


class Pages:
    """A KV group: its block table, and which pages are free."""

    def __init__(self, num_reqs: int, width: int, rng: np.random.Generator) -> None:
        self.table = np.zeros((num_reqs, width), np.int32)
        self.free = rng.permutation(num_reqs * width).tolist()
        self.owned: list[list[int]] = [[] for _ in range(num_reqs)]

    def grow(self, row: int, tokens: int) -> None:
        owned = self.owned[row]
        while len(owned) * PAGE < tokens:
            owned.append(self.free.pop())
            self.table[row, len(owned) - 1] = owned[-1]

    def release(self, row: int) -> list[int]:
        pages, self.owned[row] = self.owned[row], []
        self.free = pages + self.free  # the longest free is taken first
        return pages


class Serving:
    """A stack of layers, the requests that it serves, and the graphs of the steps that a size holds.

    Every third of them is planned from tensors of the device, as an engine keeps them.

    Args:
        layers: of one page size; their groups count from 0.
        max_len: tokens of the longest sequence.
        chunk: tokens of the longest chunk of a prompt.
        tolerance: of an output beside the reference, where the largest of its layer in the step is 1 or above.
    """

    def __init__(
        self,
        layers: Sequence[Heads],
        sizes: Sequence[Size],
        *,
        device: str,
        max_reqs: int,
        max_len: int,
        chunk: int,
        tolerance: float,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.layers, self.device, self.tolerance = layers, device, tolerance
        self.max_reqs, self.max_len, self.chunk = max_reqs, max_len, chunk
        self.rng, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.groups = [
            Pages(max_reqs, -(-max_len // PAGE), self.rng) for _ in range(1 + max(layer.group for layer in layers))
        ]
        self.requests: list[Request] = []
        self.counts: dict[str, int] = {}
        self.planned = self.replayed = 0
        self.worst = [0.0] * len(layers)  # of each layer, beside the reference
        self.sizes = tuple(sizes)
        self.graphs = Graphs(
            lambda plans, x: self.forward("graph", plans, x), [layer.planner for layer in layers], self.sizes, **options
        )

    def forward(self, way: str, plans: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        """x [T, the widths of all layers] to their outputs side by side."""
        parts = x.split([layer.width for layer in self.layers], 1)
        return torch.cat(
            [layer.forward(way, part, plan) for layer, part, plan in zip(self.layers, parts, plans, strict=True)], 1
        )

    def run(self, steps: int) -> None:
        """So many random steps.

        Raises:
            AssertionError: a step was wrong; the message says which.
        """
        for number in range(steps):
            step = self.draw()
            try:
                self.check(step)
            except AssertionError as error:
                lens = list(zip(step.query_lens, step.seq_lens, strict=True))
                raise AssertionError(f"step {number}, {step.kind} of (new, all) {lens}: {error}") from error
            self.end(step)

    # what the requests do

    def draw(self) -> Step:
        rng = self.rng
        while len(self.requests) < self.max_reqs and (not self.requests or rng.random() < 0.3):
            row = min(set(range(self.max_reqs)) - {request.row for request in self.requests})
            self.requests.append(Request(row, int(rng.integers(1, self.max_len // 2))))
        ready = [request for request in self.requests if not request.prefilling]
        reading = [request for request in self.requests if request.prefilling]
        rng.shuffle(ready)
        ready = ready[: max(1, int(rng.integers(0, len(ready) + 3)))] if ready else []
        if reading and (not ready or rng.random() < 0.3):
            reading = sorted(reading[: int(rng.integers(1, 3))], key=lambda request: -request.length)
            lens = [self.chunk_of(request) for request in reading]
            return self.grown(Step("mixed", [*ready, *reading], [*[1] * len(ready), *lens]))
        verify = rng.random() < 0.4
        return self.grown(Step("verify" if verify else "decode", ready, [1 + DRAFTS * verify] * len(ready)))

    def chunk_of(self, request: Request) -> int:
        """New tokens of a prompt, and all the rest where that is not longer than a verification."""
        left, most = request.prompt - request.length, int(self.rng.integers(9, self.chunk - DRAFTS))
        return left if left <= most + 1 + DRAFTS else most

    def grown(self, step: Step) -> Step:
        for group in self.groups:
            for request, length in zip(step.requests, step.seq_lens, strict=True):
                group.grow(request.row, length)
        return step

    def end(self, step: Step) -> None:
        """What was accepted is there; who is long enough, or has lost its patience, leaves."""
        self.counts[step.kind] = self.counts.get(step.kind, 0) + 1
        for request, new in zip(step.requests, step.query_lens, strict=True):
            request.accepted = int(self.rng.integers(1, new + 1)) if step.kind == "verify" else 1
            request.length += request.accepted if step.kind == "verify" else new
        for request in list(self.requests):
            if request.length + 1 + DRAFTS > self.max_len or self.rng.random() < 0.02:
                self.requests.remove(request)
                pages = [group.release(request.row) for group in self.groups]
                for layer in self.layers:
                    layer.forget(self.slots[request.row] if isinstance(layer, States) else pages[layer.group])

    @property
    def slots(self) -> np.ndarray:
        """The state slots of each row of the block tables."""
        return np.arange(self.max_reqs * (1 + DRAFTS), dtype=np.int32).reshape(-1, 1 + DRAFTS)

    # what the layers do

    def asked(self, step: Step, device: str) -> list[Any]:
        """What each layer's `plan` takes."""
        rows = [request.row for request in step.requests]
        width = -(-max(step.seq_lens) // PAGE)
        batches = [
            Batch.from_lens(
                step.query_lens,
                step.seq_lens,
                block_table=group.table[rows, :width],
                page_size=PAGE,
                is_prefilling=[request.prefilling for request in step.requests],
                device=device,
            )
            for group in self.groups
        ]
        accepted = [request.accepted for request in step.requests]
        return [layer.asked(batches[layer.group], self.slots[rows], accepted) for layer in self.layers]

    def check(self, step: Step) -> None:
        tokens, width = sum(step.query_lens), sum(layer.width for layer in self.layers)
        x = torch.randn(tokens, width, generator=self.generator).to(self.layers[0].layer.dtype)
        near = x.to(self.device)
        with torch.inference_mode():
            right = self.forward("oracle", self.plans("oracle", self.asked(step, "cpu")), x.double())
            asked = self.asked(step, "cpu" if self.planned % 3 else str(self.layers[0].planner.device))
            self.planned += 1
            reading = step.kind == "mixed" and any(isinstance(layer, States | Latents) for layer in self.layers)
            first = asked[0]["batch"] if isinstance(asked[0], dict) else asked[0]
            size = None if reading else least(self.sizes, first)
            if size is None:
                asked = self.asked(step, self.device)
                out = self.forward("graph", self.plans("graph", asked), near)
                eager = self.forward("eager", self.plans("eager", asked), near)
            else:
                self.replayed += 1
                out = self.graphs(asked, near).clone()
                padded = torch.nn.functional.pad(near, (0, 0, 0, size.padded_tokens - tokens))
                eager = self.forward("eager", self.plans("eager", asked, pad_to=size), padded)[:tokens]
        assert torch.equal(out, eager), f"the graph's result is not the eager one: {self.where(out, eager)}"
        ours, at = out.double().cpu(), 0
        for number, layer in enumerate(self.layers):
            columns = slice(at, at := at + layer.layer.num_heads * layer.layer.v_head_dim)
            error = (ours[:, columns] - right[:, columns]).abs().amax(1) / right[:, columns].abs().max().clamp(min=1)
            self.worst[number] = max(self.worst[number], error.max().item())
            token = int(error.nan_to_num(nan=torch.inf).argmax())
            assert error[token] <= self.tolerance, f"layer {number}, token {token} is off by {error[token]:.2e}"

    def plans(self, way: str, asked: Sequence[Any], **options: Any) -> list[Any]:
        """A plan for each layer, in a slot of its own: of the graphs, the slots that those have."""
        first = EAGER if way == "eager" else 0
        layers = enumerate(zip(self.layers, asked, strict=True), first)
        return [layer.plan(way, each, slot=slot, **options) for slot, (layer, each) in layers]

    def where(self, one: torch.Tensor, other: torch.Tensor) -> str:
        """The layers and tokens in which results differ most."""
        differ, at, found = (one - other).abs().nan_to_num(nan=torch.inf), 0, []
        for number, layer in enumerate(self.layers):
            part = differ[:, at : (at := at + layer.layer.num_heads * layer.layer.v_head_dim)].amax(1)
            if part.max() > 0:
                found.append(f"layer {number} token {int(part.argmax())} by {part.max().item():.2e}")
        return ", ".join(found)


def on_device(device: str, *, small: bool = False, seed: int = 0) -> Serving:
    """A stack of every kind of layer in bfloat16, at sizes that a GPU's kernels serve."""
    reqs, most, dtype = (3, 96, torch.bfloat16) if small else (8, 288, torch.bfloat16)
    limits = {"max_reqs": reqs, "max_tokens": reqs + 128, "max_seq_len": most}
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype}
    states = Layer.mamba2(num_heads=8, head_dim=64, state_dim=64, chunk=64, dtype=dtype)
    pages = reqs * -(-most // PAGE)
    layers = [
        Heads(Layer.gqa(**heads), 0, device, pages, limits),
        Heads(Layer.gqa(**heads, window=50, sinks=True), 1, device, pages, limits),
        Heads(Layer.gqa(**heads, chunk=64), 1, device, pages, limits),
        Latents(Layer.mla(num_heads=16, dtype=dtype), 0, device, pages, limits),
        States(states, 0, device, reqs * (1 + DRAFTS), limits),
    ]
    sizes = [Size(rows, queries) for queries in (1, 1 + DRAFTS) for rows in ((reqs,) if small else (1, 2, 4, reqs))]
    return Serving(layers, sizes, device=device, max_reqs=reqs, max_len=most, chunk=48, tolerance=3e-2, seed=seed)
