"""Tokens per second of whole models, beside transformers' own attention on the same machine."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from portable import models
from portable.default_model import default_model
from portable.generate import Engine, enough_pages
from portable.generate_output import note
from portable.platform.detect import detect
from portable.schedule import Request

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea and the people who sail on it.",
    "Explain in two sentences why the sky is blue during the day and red in the evening.",
    "List five prime numbers.",
    "Summarise the story of a fox who wanted grapes that hung too high, and say what it teaches those who hear it.",
    "How do I boil an egg?",
    "Name three rivers in Africa, and for each of them one country that it flows through on its way to the sea.",
    "Why do cats purr?",
)


def measure_generate(model: str | None, max_new_tokens: int, rounds: int, device: str | None) -> dict[str, Any]:
    """The same prompts as one batch, by portable and by transformers' `generate` with sdpa, in turn.

    Both generate exactly `max_new_tokens` for each prompt, greedily. transformers pads the prompts on the left to one
    length, as it must; portable packs them.
    """
    target = detect(device)
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    path = Path(model) if model is not None else default_model(note)
    tokenizer = models.load_tokenizer(path)
    ours = models.load_model(path, dtype=dtype, device=target.device)
    prompts = [models.encode(tokenizer, prompt) for prompt in PROMPTS]
    layers = models.discover_layers(ours)
    requests = _requests(prompts, max_new_tokens)
    engine = Engine(
        ours,
        layers,
        num_pages=enough_pages(requests, layers, 16),
        max_reqs=len(prompts),
        max_seq_len=max(map(len, prompts)) + max_new_tokens,
        device=device,
    )
    packed = _rounds(lambda: _portable(engine, prompts, max_new_tokens), target.device)
    padded = _rounds(lambda: _transformers(ours, prompts, max_new_tokens), target.device)
    times: dict[str, list[float]] = {"portable": [], "transformers": []}
    for _ in range(rounds):
        times["portable"].append(packed())
        times["transformers"].append(padded())
    tokens = len(prompts) * max_new_tokens
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    kernels = {phase: choice.kernel.name for phase, choice in engine.planners[layers[0]].choices.items()}
    return {
        "portable": {"tokens_per_second": rates["portable"], "how": ", ".join(dict.fromkeys(kernels.values()))},
        "transformers": {"tokens_per_second": rates["transformers"], "how": "generate, sdpa, left-padded"},
        "ratio": rates["portable"] / rates["transformers"],
        "rounds": rounds,
        "seconds": times,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "device": target.name,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": models.transformers().__version__,
        },
    }


def _requests(prompts: list[list[int]], max_new_tokens: int) -> list[Request]:
    return [Request(i, prompt, max_new_tokens) for i, prompt in enumerate(prompts)]


def _rounds(once: Any, device: str) -> Any:
    """A function that times one run to its end, after one that warms up."""

    def timed() -> float:
        start = time.perf_counter()
        once()
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    timed()
    return timed


def _portable(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> None:
    requests = _requests(prompts, max_new_tokens)
    for _ in engine.generate(requests):
        pass
    if any(len(request.generated) != max_new_tokens for request in requests):
        raise RuntimeError("a request stopped early; the engine was made without stop tokens")


def _transformers(model: Any, prompts: list[list[int]], max_new_tokens: int) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    usual, implementation = model.generation_config, model.config._attn_implementation
    model.generation_config = models.transformers().GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, pad_token_id=0
    )
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask)
    finally:
        model.generation_config = usual
        model.set_attn_implementation(implementation)
