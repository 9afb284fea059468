"""The engine: every step's logits are eager attention's, whatever the pages, the chunks and the preemptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import END, FAMILIES, save, tiny_model

import portable
from portable import generate_cli, models
from portable.cli import main
from portable.generate import Engine, Sampling, enough_pages
from portable.schedule import Request

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model folder without a stop token."""
    return save(tmp_path_factory.mktemp("endless"), eos_token_id=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """The same weights under portable's attention and under transformers' own."""
    return tiny_model(request.param), tiny_model(request.param, "eager")


def random_prompts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, END, (length,), generator=generator).tolist() for length in lengths]


def make_engine(model, requests, page_size=16, num_pages=None, **more):
    layers = models.discover_layers(model)
    num_pages = enough_pages(requests, layers, page_size) if num_pages is None else num_pages
    return Engine(model, layers, page_size=page_size, num_pages=num_pages, **{"max_reqs": len(requests), **more})


@pytest.mark.parametrize(
    ("page_size", "num_pages", "chunk", "lengths"),
    [(1, 60, 7, (1, 30, 17, 3, 9)), (16, 4, 7, (14, 14, 14, 1, 30)), (256, 3, 64, (252, 254, 3))],
)
def test_logits_and_tokens_are_those_of_eager_attention(pair, page_size, num_pages, chunk, lengths):
    model, eager = pair
    requests = [Request(i, prompt, 8) for i, prompt in enumerate(random_prompts(lengths))]
    engine = make_engine(model, requests, page_size, num_pages, prefill_chunk=chunk)
    seen = {request.index: [] for request in requests}

    def on_logits(sampled, logits):
        for request, row in zip(sampled, logits, strict=True):
            seen[request.index].append(row.clone())

    tokens = list(engine.generate(requests, on_logits=on_logits))
    assert engine.stats.preemptions > 0
    assert sorted(engine.scheduler.free_pages) == list(range(num_pages))
    for request in requests:
        assert [token.id for token in tokens if token.request is request] == request.generated
        with torch.inference_mode():
            expected = eager(input_ids=torch.tensor([request.tokens[:-1]]), use_cache=False).logits[0]
        expected = expected[len(request.prompt) - 1 :]
        actual = torch.stack(seen[request.index])
        assert expected.std() > 0.1  # logits that tell tokens apart
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
        assert request.generated == expected.argmax(-1).tolist()


def test_a_request_samples_the_same_text_alone_and_in_company():
    model = tiny_model("llama")
    prompts = random_prompts([5, 12, 3])

    def run_together(chosen, **more):
        requests = [Request(i, prompts[i], 10) for i in chosen]
        list(make_engine(model, requests, **more).generate(requests, Sampling(temperature=0.8, seed=3)))
        return [request.generated for request in requests]

    alone = [run_together([i])[0] for i in range(3)]
    assert run_together([0, 1, 2]) == alone
    assert run_together([2, 0, 1], page_size=1, num_pages=25, prefill_chunk=4) == [alone[2], alone[0], alone[1]]
    twins = [Request(i, prompts[0], 10) for i in range(2)]
    list(make_engine(model, twins).generate(twins, Sampling(temperature=0.8, seed=3)))
    assert twins[0].generated == alone[0] != twins[1].generated


def test_generation_stops_at_a_stop_token_and_keeps_it():
    model = tiny_model("llama")
    (prompt,) = random_prompts([9])
    free, stopped = Request(0, prompt, 6), Request(0, prompt, 6)
    list(make_engine(model, [free]).generate([free]))
    list(make_engine(model, [stopped], stop_ids=[free.generated[2]]).generate([stopped]))
    end = free.generated.index(free.generated[2]) + 1
    assert (stopped.generated, stopped.finish_reason) == (free.generated[:end], "stop")


def test_closing_the_iterator_interrupts_and_frees_the_pages():
    model = tiny_model("llama")
    requests = [Request(i, prompt, 50) for i, prompt in enumerate(random_prompts([4, 6]))]
    engine = make_engine(model, requests)
    tokens = engine.generate(requests)
    first = next(tokens)
    tokens.close()
    assert first.request.generated == [first.id]
    assert {request.finish_reason for request in requests} == {"interrupted"}
    assert engine.scheduler.done and len(engine.scheduler.free_pages) == engine.scheduler.num_pages


def test_training_mode_and_other_callers_of_the_attention_are_refused():
    model = tiny_model("llama")
    with pytest.raises(portable.UnsupportedError, match="serves portable's engine"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))


# The command line


def generate(*flags):
    return main(["generate", *(str(flag) for flag in flags)])


def test_one_prompt_streams_its_text(folder, capsys):
    assert generate("--model", folder, "--prompt", "abc", "--max-new-tokens", 5, "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert generate("--model", folder, "--prompt", "abc", "--max-new-tokens", 5, "--device", "cpu", "--json") == 0
    assert out.strip() == json.loads(capsys.readouterr().out)["results"][0]["text"].strip()
    for phase in ("decode", "prefill", "cache write"):
        assert f"\n{phase}: " in f"\n{err}"
    assert "5 tokens in" in err and "tokens per second" in err


def test_json_holds_everything_and_the_check_passes(folder, capsys, tmp_path):
    listed = tmp_path / "prompts"
    listed.write_text("one\n\ntwo and a half\n", encoding="utf-8")
    flags = ("--model", folder, "--prompt", "abc", "--prompts-file", listed, "--max-new-tokens", 6, "--device", "cpu")
    assert generate(*flags, "--page-size", 4, "--prefill-chunk", 3, "--check", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in document["results"]] == ["abc", "one", "two and a half"]
    for result in document["results"]:
        assert result["finish_reason"] in ("stop", "length") and 1 <= len(result["token_ids"]) <= 6
        assert result["check"] == {"identical": True, "tokens": len(result["token_ids"])}
    (kernels,) = document["kernels"]
    assert kernels["layers"] == [0, 1, 2] and kernels["decode"]["kernel"] and kernels["cache_write"]["how"]
    assert document["stats"]["generated_tokens"] == sum(len(r["token_ids"]) for r in document["results"])
    assert document["tokens_per_second"] > 0 and document["load_seconds"] > 0


def test_several_prompts_are_printed_with_their_texts(folder, capsys):
    assert generate("--model", folder, "--prompt", "abc", "--prompt", "defg", "--max-new-tokens", 3) == 0
    out = capsys.readouterr().out
    assert "> abc\n" in out and "> defg\n" in out


def test_a_difference_fails_the_check(folder, capsys, monkeypatch):
    monkeypatch.setattr(models, "eager_tokens", lambda model, prompt, most, stop: [300])
    assert generate("--model", folder, "--prompt", "abc", "--max-new-tokens", 2, "--check", "--device", "cpu") == 1
    assert "differs from transformers' eager attention at token 0: " in capsys.readouterr().err


def test_an_answer_ends_with_the_context(tmp_path, capsys):
    folder = save(tmp_path, max_position_embeddings=8)
    assert generate("--model", folder, "--prompt", "12345", "--device", "cpu", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert len(result["token_ids"]) <= 3 and result["finish_reason"] in ("stop", "length")


ONE = ("--prompt", "abc")
BAD = {
    "no prompts": ((), "there are no prompts; give --prompt"),
    "missing prompts file": (("--prompts-file", "/nowhere/at/all"), "--prompts-file /nowhere/at/all cannot be read"),
    "unknown backend": ((*ONE, "--backend", "warp"), "'warp'"),
    "unknown device": ((*ONE, "--device", "abacus"), "'abacus'"),
    "unknown arch": ((*ONE, "--device", "emulated:gfx1"), "'emulated:gfx1'"),
    "not a number": ((*ONE, "--temperature", "nan"), "--temperature is nan; it must be finite"),
    "infinite": ((*ONE, "--temperature", "inf"), "--temperature is inf; it must be finite"),
    "negative": ((*ONE, "--temperature", "-1"), "--temperature is -1.0; it must be finite and at least 0"),
    "empty pages": ((*ONE, "--page-size", "0"), "--page-size is 0; it must be at least 1"),
    "no pages": ((*ONE, "--num-pages", "0"), "--num-pages is 0; it must be at least 1"),
    "empty chunks": ((*ONE, "--prefill-chunk", "0"), "--prefill-chunk is 0; it must be at least 1"),
    "nothing to do": ((*ONE, "--max-new-tokens", "0"), "--max-new-tokens is 0; it must be at least 1"),
    "small pool": (
        (*ONE, "--num-pages", "2", "--page-size", "4", "--max-new-tokens", "9"),
        "num_pages 2 of page_size 4 cannot hold prompt 0: its 3 tokens and max_new_tokens 9 cache up to 11 tokens, "
        "which need 3 pages",
    ),
    "long prompt": (("--prompt", "x" * 8192), "prompt 0 has 8192 tokens; the model's context of 8192 leaves no room"),
    "sampled check": ((*ONE, "--check", "--temperature", "1"), "--temperature 1.0 cannot be checked"),
    "narrow check": ((*ONE, "--check", "--dtype", "bfloat16"), "--dtype bfloat16 cannot be checked"),
    "no model folder": ((*ONE, "--model", "/nowhere/at/all"), "model folder /nowhere/at/all does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, name):
    flags, words = BAD[name]
    assert generate("--model", folder, "--device", "cpu", *flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("portable: error: ") and err.count("\n") == 1
    assert words in err


def test_a_folder_without_a_config_is_bad_input(tmp_path, capsys):
    assert generate("--model", tmp_path, *ONE, "--device", "cpu") == 2
    err = capsys.readouterr().err
    assert f"model folder {tmp_path} has no config.json" in err and err.count("\n") == 1


def start(*flags):
    env = {**os.environ, "PYTHONPATH": str(Path(portable.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "portable", "generate", *(str(flag) for flag in flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_at_once_with_what_there_is(tmp_path, as_json):
    folder = save(tmp_path, eos_token_id=None)
    more = ("--json",) if as_json else ("--prompt", "another")
    process = start("--model", folder, *ONE, *more, "--max-new-tokens", 8000, "--device", "cpu")
    for line in process.stderr:
        if line.startswith("cache write: "):
            break
    time.sleep(2)  # into the generation, which would take minutes
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    if as_json:
        (result,) = json.loads(out)["results"]
        assert result["finish_reason"] == "interrupted" and len(result["token_ids"]) < 8000
    else:
        assert "> abc\n" in out and "> another\n" in out
        assert "interrupted" in err and "tokens per second" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_keeps_exactly_what_there_was(endless, capsys, monkeypatch, as_json):
    usual, given = Engine.generate, []

    def some(self, *args, **kwargs):
        for token in usual(self, *args, **kwargs):
            if len(given) == 5:
                raise KeyboardInterrupt
            given.append(token.id)
            yield token

    monkeypatch.setattr(Engine, "generate", some)
    flags = ["--max-new-tokens", 500, "--device", "cpu", *(["--json"] if as_json else [])]
    assert generate("--model", endless, *ONE, *flags) == 130
    out, err = capsys.readouterr()
    if as_json:
        (result,) = json.loads(out)["results"]
        assert result["token_ids"][:5] == given and len(result["token_ids"]) <= 6
        assert result["finish_reason"] == "interrupted"
    else:
        assert out.strip() and "interrupted" in err


def test_each_flag_reaches_the_engine(endless, monkeypatch):
    seen = {}
    monkeypatch.setattr(generate_cli, "report", lambda job, args: seen.update(job=job) or 0)
    flags = dict(page_size=4, num_pages=77, prefill_chunk=3, temperature=0.5, seed=9, max_new_tokens=7)
    words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), value)]
    assert generate("--model", endless, *ONE, "--device", "cpu", "--backend", "reference", *words) == 0
    engine, sampling = seen["job"].engine, seen["job"].sampling
    assert (engine.scheduler.page_size, engine.scheduler.num_pages, engine.scheduler.prefill_chunk) == (4, 77, 3)
    assert (sampling.temperature, sampling.seed) == (0.5, 9) and seen["job"].requests[0].max_new_tokens == 7
    (attention,) = set(engine.attentions.values())
    assert {choice.kernel.caps.provider for choice in attention.choices.values()} == {"reference"}


def test_a_bar_is_drawn_on_a_terminal(endless, capsys, monkeypatch):
    rich = pytest.importorskip("rich.progress")
    drawn = []
    usual = rich.Progress.update
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(rich.Progress, "update", lambda *a, **k: drawn.append(k) or usual(*a, **k))
    flags = ("--prompt", "de", "--max-new-tokens", 3, "--device", "cpu")
    assert generate("--model", endless, *ONE, *flags) == 0
    assert [step["completed"] for step in drawn][-1] == 2 and "6 tokens" in drawn[-1]["description"]


def test_bench_measures_both(endless, capsys):
    flags = ("--device", "cpu", "--max-new-tokens", "2", "--rounds", "1", "--json")
    assert main(["bench", "--generate", "--model", str(endless), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["generate"]
    rates = [found[name]["tokens_per_second"] for name in ("portable", "transformers")]
    assert found["ratio"] == rates[0] / rates[1] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--page-size", 10**9, "--num-pages", 10**6), "GiB"),
        (("--seed", 10**23), "--seed is"),
        (("--prompt", "\udcff"), "prompt 1 is not valid UTF-8"),
    ],
)
def test_what_no_machine_can_do_is_one_line(endless, capsys, flags, message):
    assert generate("--model", endless, *ONE, "--device", "cpu", *flags) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_tiny_temperature_is_greedy(endless, capsys):
    texts = []
    for temperature in (0, 1e-45):
        assert generate("--model", endless, *ONE, "--device", "cpu", "--temperature", temperature, "--json") == 0
        texts.append(json.loads(capsys.readouterr().out)["results"][0]["token_ids"])
    assert texts[0] == texts[1]
