"""Decodes of whole models by captured graphs, without a GPU: the same token ids as without, or no capture at all."""

from __future__ import annotations

import logging

import pytest
import torch
from launched import launches
from recording import RULES, Recorder
from tiny_models import END, save, tiny_model

from portable import attention, models
from portable.backends import reference, reference_mamba, reference_steps
from portable.cli import main
from portable.generate import Engine, Sampling, enough_pages
from portable.platform import graphs
from portable.schedule import Request

pytest.importorskip("transformers")

LENGTHS = (1, 14, 6, 3, 9)
CAPTURED = ("llama", "gemma2", "qwen3", "deepseek_v2 without experts", "mamba2", "bamba", "mamba")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels whose launches can be captured, as a GPU's."""
    found = tuple(
        launches(kernel) for kernel in (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
    )
    monkeypatch.setattr(attention, "load_kernels", lambda: found)


@pytest.fixture(params=sorted(RULES))
def recorder(request):
    recorder = Recorder(RULES[request.param])
    with graphs.using(recorder):
        yield recorder


def requests_of(new=7):
    generator = torch.Generator().manual_seed(1)
    return [Request(i, torch.randint(0, END, (n,), generator=generator).tolist(), new) for i, n in enumerate(LENGTHS)]


def generated(model, *, sampling=None, **options):
    """The tokens of all requests, and the engine."""
    requests, layers = requests_of(), models.discover_layers(model)
    pages = enough_pages(requests, layers, 4)
    given = {"num_pages": pages, "page_size": 4, "prefill_chunk": 8, "max_reqs": 4, "max_seq_len": 64} | options
    engine = Engine(model, layers, **given)
    list(engine.generate(requests, sampling))
    return [request.generated for request in requests], engine


def made(family):
    if family.startswith("deepseek"):
        return tiny_model("deepseek_v2", first_k_dense_replace=3)
    return tiny_model(family)


@pytest.mark.parametrize("family", CAPTURED)
def test_token_ids_are_those_without_graphs(recorder, family):
    model = made(family)
    expected, engine = generated(model, graphs=False)
    assert engine.graphs is None and not recorder.replays
    actual, engine = generated(model)
    assert actual == expected
    assert engine.graphs.why_not is None and engine.stats.graph_steps > engine.stats.steps / 3
    assert 1 < len(engine.graphs.graphs.captured) <= 3


@pytest.mark.parametrize("more", [{"num_pages": 11}, {"prefix_caching": True}], ids=["preemption", "prefix caching"])
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_token_ids_are_those_without_graphs_where_pages_and_states_move(recorder, family, more):
    model = made(family)
    expected, before = generated(model, graphs=False, **more)
    actual, engine = generated(model, **more)
    assert actual == expected and engine.stats.graph_steps > 5
    assert engine.stats.preemptions == before.stats.preemptions and (
        "num_pages" not in more or before.stats.preemptions
    )


def test_sampled_tokens_are_the_same_too(recorder):
    model = made("llama")
    expected, actual = (generated(model, sampling=Sampling(0.9, seed=2), graphs=way)[0] for way in (False, True))
    assert actual == expected


def test_a_model_that_reads_tensors_on_the_host_is_run_without_graphs(recorder, caplog):
    model = made("llama")
    usual = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: usual(x) * (1 if x.abs().max().item() > 0 else 2)
    expected, _ = generated(model, graphs=False)
    with caplog.at_level(logging.WARNING, "portable"):
        actual, engine = generated(model)
    assert actual == expected and engine.stats.graph_steps == 0
    assert "waits for the device" in engine.graphs.why_not
    assert sum("decodes are not captured" in record.message for record in caplog.records) == 1


def test_kernels_that_cannot_be_captured_are_run_without_graphs(recorder, monkeypatch, caplog):
    monkeypatch.setattr(attention, "load_kernels", lambda: reference.KERNELS)
    model = made("llama")
    expected, _ = generated(model, graphs=False)
    with caplog.at_level(logging.WARNING, "portable"):
        actual, engine = generated(model)
    assert actual == expected and engine.stats.graph_steps == 0 and not recorder.replays
    assert "no kernel can serve" in engine.graphs.why_not


def test_the_command_line_captures_unless_told_not_to(recorder, tmp_path, capsys):
    folder = str(save(tmp_path))
    flags = ["generate", "--model", folder, "--prompt", "abc", "--max-new-tokens", "5", "--device", "cpu", "--json"]
    assert main([*flags, "--no-graphs"]) == 0
    without = capsys.readouterr().out
    assert not recorder.replays and '"graph_steps": 0' in without
    assert main(flags) == 0
    captured = capsys.readouterr().out
    assert recorder.replays and '"graph_steps": 4' in captured
    ids = [text[text.index('"token_ids"') : text.index("]")] for text in (without, captured)]
    assert ids[0] == ids[1]
