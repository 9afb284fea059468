"""What `portable generate` prints: text as it comes, the kernels and why, the comparison, the JSON document."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from portable import models
from portable.generate import Engine, Sampling, Token
from portable.layer import Layer
from portable.schedule import Request
from portable.select import Choice


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that can be refused has been; only the work is left."""

    model: Any
    tokenizer: Any
    engine: Engine
    prompts: list[str]
    requests: list[Request]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    load_seconds: float

    def text(self, request: Request) -> str:
        """What was generated for a request, without special tokens."""
        text: str = self.tokenizer.decode(request.generated, skip_special_tokens=True)
        return text


class Printer(Protocol):
    """Where the tokens go."""

    def put(self, token: Token) -> None: ...
    def end(self) -> None:
        """No more tokens come, though requests may be unfinished."""


class Quiet:
    """Prints nothing: the document comes at the end."""

    def put(self, token: Token) -> None:
        pass

    def end(self) -> None:
        pass


class Stream:
    """One prompt: its text, word by word."""

    def __init__(self, job: Job) -> None:
        self.streamer = models.transformers().TextStreamer(job.tokenizer, skip_special_tokens=True)

    def put(self, token: Token) -> None:
        self.streamer.put(torch.tensor([token.id]))

    def end(self) -> None:
        self.streamer.end()


class Blocks:
    """Several prompts: each with its text below it, as it finishes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.unfinished = dict.fromkeys(job.requests)

    def put(self, token: Token) -> None:
        if token.request.finish_reason:
            self._print(token.request)

    def end(self) -> None:
        for request in tuple(self.unfinished):
            self._print(request)

    def _print(self, request: Request) -> None:
        del self.unfinished[request]
        print(f"> {self.job.prompts[request.index]}\n{self.job.text(request)}\n", flush=True)


@contextmanager
def progress(job: Job) -> Iterator[Callable[[Token], None]]:
    """A bar on a terminal, for several prompts and where rich is installed; gives what to call for each token."""
    try:
        rich = importlib.import_module("rich.progress") if sys.stderr.isatty() and len(job.prompts) > 1 else None
    except ModuleNotFoundError:
        rich = None
    if rich is None:
        yield lambda token: None
        return
    counts = "{task.completed} of {task.total} prompts"
    columns = ("{task.description}", rich.BarColumn(), counts, rich.TimeElapsedColumn())
    console = importlib.import_module("rich.console").Console(stderr=True)
    bar = rich.Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    with bar:
        task = bar.add_task("0 tokens", total=len(job.prompts))
        tokens = finished = 0

        def advance(token: Token) -> None:
            nonlocal tokens, finished
            tokens += 1
            finished += bool(token.request.finish_reason)
            bar.update(task, description=f"{tokens} tokens", completed=finished)

        yield advance


def check_line(entry: dict[str, Any]) -> str:
    """A comparison as people read it.

    >>> check_line({"identical": True, "tokens": 8})
    "identical to transformers' eager attention, 8 token ids"
    """
    if entry["identical"]:
        return f"identical to transformers' eager attention, {entry['tokens']} token ids"
    ours, theirs = (str(entry[side][0]) if entry[side] else "no token" for side in ("portable", "eager"))
    return f"differs from transformers' eager attention at token {entry['first_difference']}: {ours} is not {theirs}"


def document(job: Job, checks: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What --json prints."""
    engine, stats = job.engine, job.engine.stats
    results = [
        {
            "prompt": prompt,
            "text": job.text(request),
            "token_ids": request.generated,
            "prompt_tokens": len(request.prompt),
            "finish_reason": request.finish_reason or "interrupted",
        }
        for prompt, request in zip(job.prompts, job.requests, strict=True)
    ]
    if checks is not None:
        results = [{**result, "check": entry} for result, entry in zip(results, checks, strict=True)]
    return {
        "model": job.model.config.model_type,
        "device": str(engine.device),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "page_size": engine.scheduler.page_size,
        "num_pages": engine.scheduler.num_pages,
        "results": results,
        "kernels": [
            {
                "layers": [i for i, other in enumerate(engine.layers) if other == layer],
                "family": layer.family,
                "window": layer.window[0],
                **{phase: _choice(choice) for phase, choice in attention.choices.items()},
            }
            for layer, attention in engine.planners.items()
        ],
        "tokens_per_second": stats.tokens_per_second,
        "load_seconds": job.load_seconds,
        "stats": asdict(stats),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "kernel": choice.kernel.name,
        "how": choice.how,
        "rejected": {name: list(reasons) for name, reasons in choice.rejected},
        "alternatives": list(choice.alternatives),
    }


RECURRENT = {"mamba1": "Mamba-1", "mamba2": "Mamba-2"}


def kernel_lines(engine: Engine) -> Iterator[str]:
    """Which kernel serves each phase, and why: a line each, for each kind of layer."""
    for layer, attention in engine.planners.items():
        kind = f" ({_kind(layer)})" if len(engine.planners) > 1 else ""
        for phase, choice in attention.choices.items():
            yield f"{phase.replace('_', ' ')}{kind}: {choice.kernel.name}, {why(choice)}"


def _kind(layer: Layer) -> str:
    if layer.family in RECURRENT:
        return RECURRENT[layer.family]
    return "full attention" if layer.window[0] is None else f"window of {layer.window[0] + 1}"


def why(choice: Choice) -> str:
    """How a kernel was chosen: what it came before, and each first reason against others, of which several may have it.

    >>> from portable.backends.torch_native import KERNELS
    >>> rejected = ("one", ("no fp8",)), ("two", ("no lse", "no sinks")), ("three", ("no lse",))
    >>> why(Choice(KERNELS[0].caps.op, KERNELS[0], rejected))
    'automatic; one cannot: no fp8; 2 kernels cannot: no lse'
    """
    parts = [choice.how]
    if choice.alternatives:
        parts.append(f"before {', '.join(choice.alternatives)}")
    names: dict[str, list[str]] = {}
    for name, reasons in choice.rejected:
        names.setdefault(reasons[0], []).append(name)
    for reason, some in names.items():
        parts.append(f"{some[0] if len(some) == 1 else f'{len(some)} kernels'} cannot: {reason}")
    return "; ".join(parts)


def note(line: str) -> None:
    """What is not the answer goes to standard error."""
    print(line, file=sys.stderr, flush=True)
