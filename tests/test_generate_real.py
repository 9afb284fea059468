"""The default model, real and trained: eight prompts as one batch give the token ids of eager attention."""

from __future__ import annotations

import os

import pytest
import torch

from portable import models
from portable.default_model import default_model
from portable.generate import Engine
from portable.models import ModelError
from portable.schedule import Request

pytest.importorskip("transformers")
NEW = 12
PROMPTS = (
    "What is the capital of France?",
    "Repeat the last word of this text: " + "the quick brown fox jumps over the lazy dog, " * 21,
    "Summarize in one sentence: " + "rain falls on the hills and runs to the sea, " * 19,
    "Hi!",
    "Count from one to ten.",
    "Name three primary colours and say in one sentence why a printer uses other ones.",
    "Which planet is the largest?",
    "What is 7 times 8?",
)


@pytest.fixture(scope="module")
def real():
    """The model, its tokenizer, its layers, the prompts' token ids, and what eager attention answers."""
    try:
        folder = default_model()
    except ModelError as error:
        if os.environ.get("CI"):
            raise  # the main job must not go unshown in every lane
        pytest.skip(f"the default model is not here: {error}")
    model = models.load_model(folder, dtype=torch.float32, device="cpu")
    tokenizer = models.load_tokenizer(folder)
    prompts = [models.encode(tokenizer, prompt) for prompt in PROMPTS]
    stop = models.stop_ids(model)
    expected = [models.eager_tokens(model, prompt, NEW, stop) for prompt in prompts]
    return model, tokenizer, models.discover_layers(model), prompts, stop, expected


def test_the_capital_of_france(real):
    _, tokenizer, _, _, _, expected = real
    assert "Paris" in tokenizer.decode(expected[0])


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 290), (16, 32), (256, 5)])
def test_token_ids_are_those_of_eager_attention(real, page_size, num_pages):
    model, tokenizer, layers, prompts, stop, expected = real
    assert len({len(prompt) for prompt in prompts}) >= 6
    requests = [Request(i, prompt, NEW) for i, prompt in enumerate(prompts)]
    engine = Engine(
        model,
        layers,
        page_size=page_size,
        num_pages=num_pages,
        prefill_chunk=64,
        max_reqs=len(prompts),
        stop_ids=stop,
    )
    list(engine.generate(requests))
    assert [request.generated for request in requests] == expected
    assert engine.stats.preemptions > 0
    assert len(engine.scheduler.free_pages) == num_pages
    assert "Paris" in tokenizer.decode(requests[0].generated)
