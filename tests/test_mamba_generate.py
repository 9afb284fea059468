"""Models with recurrent layers: every step's logits are transformers', whatever the chunks, preemptions and caches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import END, RECURRENT, save, tiny_model

from portable import models
from portable.cli import main
from portable.generate import Engine, enough_pages
from portable.model_attention import answering
from portable.model_mamba import answering_states
from portable.schedule import Chunk, Request

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request):
    """The same weights run by portable and by transformers."""
    return tiny_model(request.param), tiny_model(request.param, "eager")


def random_tokens(length, seed=1):
    return torch.randint(0, END, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_engine(model, requests, *, page_size=16, num_pages=None, **more):
    layers = models.discover_layers(model)
    num_pages = enough_pages(requests, layers, page_size) if num_pages is None else num_pages
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    sizes = {"max_reqs": len(requests), "max_seq_len": longest, **more}
    return Engine(model, layers, page_size=page_size, num_pages=num_pages, **sizes)


def check_logits(eager, request, seen):
    with torch.inference_mode():
        expected = eager(input_ids=torch.tensor([request.tokens[:-1]]), use_cache=False).logits[0]
    expected = expected[len(request.prompt) - 1 :]
    assert expected.std() > 0.1  # logits that tell tokens apart
    torch.testing.assert_close(torch.stack(seen), expected, rtol=0, atol=1e-4)
    assert request.generated == expected.argmax(-1).tolist()


def run(engine, requests):
    seen = {request.index: [] for request in requests}

    def on_logits(sampled, logits):
        for request, row in zip(sampled, logits, strict=True):
            seen[request.index].append(row.clone())

    list(engine.generate(requests, on_logits=on_logits))
    return seen


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("page_size", "num_pages", "chunk", "lengths"),
    [(1, 60, 7, (1, 30, 17, 3, 9)), (16, 4, 7, (14, 14, 14, 1, 30)), (4, 40, 64, (25, 38, 3))],
)
def test_logits_and_tokens_are_those_of_transformers(pair, page_size, num_pages, chunk, lengths, prefix_caching):
    model, eager = pair
    requests = [Request(i, random_tokens(length, i), 8) for i, length in enumerate(lengths)]
    engine = make_engine(
        model, requests, page_size=page_size, num_pages=num_pages, prefill_chunk=chunk, prefix_caching=prefix_caching
    )
    seen = run(engine, requests)
    assert engine.stats.preemptions > 0 or num_pages == 40
    for request in requests:
        check_logits(eager, request, seen[request.index])


def test_a_cached_prefix_is_not_computed_again_and_changes_no_logits(pair):
    model, eager = pair
    shared = random_tokens(30)
    prompts = [shared + random_tokens(5, seed) for seed in (2, 3)] + [shared[:25], shared + random_tokens(9, 4)]
    requests = [Request(i, prompt, 6) for i, prompt in enumerate(prompts)]
    engine = make_engine(model, requests, page_size=4, prefill_chunk=16, max_reqs=2, prefix_caching=True)
    computed = 0
    for request in requests:  # one after the other, so that each finds what the others left
        seen = run(engine, [request])
        computed += engine.stats.prompt_tokens
        check_logits(eager, request, seen[request.index])
    assert engine.scheduler.hits == 16 + 16 + 24  # where a step ended its last whole page, and kept the states
    assert computed == sum(map(len, prompts)) - engine.scheduler.hits
    assert engine.scheduler.slots is not None and len(engine.scheduler.slots.free) < engine.scheduler.slots.num_slots


def test_slots_and_pages_come_back_after_any_end(pair):
    model, _ = pair
    requests = [Request(i, random_tokens(20, i % 2), 12) for i in range(4)]
    engine = make_engine(model, requests, page_size=4, num_pages=17, prefill_chunk=6, max_reqs=3, prefix_caching=True)
    tokens = engine.generate(requests)
    for _ in range(9):
        next(tokens)
    tokens.close()
    scheduler, slots = engine.scheduler, engine.scheduler.slots
    assert slots is not None and (slots.table == -1).all()
    assert sorted([*scheduler.free_pages, *scheduler._idle]) == list(range(17))
    assert sorted([*slots.free, *slots._idle]) == list(range(slots.num_slots))


SPLITS = 300


@pytest.mark.parametrize("family", RECURRENT)
def test_chunked_prefill_at_every_split_point_is_one_shot(family):
    """Row i reads its first i tokens in one step and the rest in another; all rows at once, with all their logits."""
    layers = {"num_hidden_layers": 2} if family == "bamba" else {"num_hidden_layers": 1}
    model = tiny_model(family, **layers, vocab_size=40, eos_token_id=None, pad_token_id=None)
    tokens = [token % 40 for token in random_tokens(SPLITS)]
    requests = [Request(i, tokens, 1) for i in range(SPLITS)]
    engine = make_engine(model, requests, page_size=SPLITS, num_pages=SPLITS, prefill_chunk=SPLITS**2)
    engine.scheduler.block_table = np.arange(SPLITS)[:, None]
    for request in requests:
        request.row = request.index
    logits = torch.empty(SPLITS, SPLITS, 40)
    for chunks in (
        [Chunk(request, 0, request.index, False) for request in requests[1:]],
        [Chunk(request, request.index, SPLITS - request.index, True) for request in reversed(requests)],
    ):
        at = [[chunk.request.row for chunk in chunks for _ in range(chunk.length)],
              [place for chunk in chunks for place in range(chunk.start, chunk.start + chunk.length)]]  # fmt: skip
        logits[at[0], at[1]] = forward(engine, model, chunks, [tokens[place] for place in at[1]], at[1])
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), rtol=1e-5, atol=1e-4)
    for pools in engine.recurrent.pools.values():
        for pool in pools:
            assert pool.abs().amax(tuple(range(1, pool.dim()))).min() > 0.1
            torch.testing.assert_close(pool, pool[:1].expand_as(pool), rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def forward(engine, model, chunks, ids, places):
    batch = engine._batch(chunks)
    plans = {layer: attention.plan(batch) for layer, attention in engine.attentions.items()}
    with answering(engine._answer(plans)), answering_states(engine.recurrent.plan(batch, chunks)):
        inputs = torch.tensor([ids, places])
        return model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False).logits[0]


@pytest.fixture(scope="module", params=RECURRENT)
def folder(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("more", [[], ["--prefix-caching", "--page-size", "4"]], ids=["plain", "prefix caching"])
def test_the_command_line_gives_the_tokens_of_transformers(folder, more, capsys):
    prompts = ["the state of a layer", "the state of a machine", "b", "the state of a layer is"]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    sizes = ["--max-new-tokens", "9", "--prefill-chunk", "7"]
    code = main(["generate", "--model", str(folder), *given, *sizes, *more, "--device", "cpu", "--check", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [result["check"]["identical"] for result in document["results"]] == [True] * 4
    kinds = {kernels["family"]: kernels for kernels in document["kernels"]}
    recurrent = next(kinds[family] for family in ("mamba1", "mamba2") if family in kinds)
    assert {"conv1d", "decode", "prefill", "copy"} <= recurrent.keys()
    assert ("gqa" in kinds) == (document["model"] == "bamba")


def test_a_folder_explains_its_layers(folder, capsys):
    assert main(["explain", "--model", str(folder), "--arch", "gfx942"]) == 0
    text = capsys.readouterr().out
    assert "state_update (decode): " in text
    assert ("paged" in text) == folder.name.startswith("bamba")


def test_an_activation_that_no_kernel_has_is_refused():
    model = tiny_model("mamba2", hidden_act="gelu")
    with pytest.raises(models.ModelError, match="Mamba2Mixer has activation 'gelu', and not 'silu'"):
        models.discover_layers(model)


def test_transformers_own_forward_is_left_as_it_is(pair):
    """Outside of the engine a model that portable has looked at answers as before, with its cache."""
    model, eager = pair
    models.discover_layers(model)
    ids = torch.tensor([random_tokens(12)])
    assert models.eager_tokens(model, ids[0].tolist(), 5, ()) == models.eager_tokens(eager, ids[0].tolist(), 5, ())
