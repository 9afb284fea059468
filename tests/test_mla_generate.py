"""DeepSeek models on latent pages: every step's logits are those of transformers' eager attention."""

from __future__ import annotations

import pytest
import torch
from tiny_models import END, tiny_model

from portable import MlaAttention, mla, model_attention, models
from portable.generate import Engine, enough_pages
from portable.schedule import Request

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def pair(request):
    return tiny_model(request.param), tiny_model(request.param, "eager")


@pytest.mark.parametrize("page_size", [1, 64])
def test_tokens_and_logits_are_those_of_eager_attention(pair, page_size, monkeypatch):
    """Prompts in chunks of 40 on contexts that are gathered 64 tokens at a time, beside decodes and first chunks."""
    monkeypatch.setattr(mla, "WORKSPACE_TOKENS", 64)
    model, eager = pair
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, END, (n,), generator=generator).tolist() for n in (1, 200, 17, 63, 130)]
    requests = [Request(i, prompt, 8) for i, prompt in enumerate(prompts)]
    layers = models.discover_layers(model)
    assert [layer.family for layer in layers] == ["mla"] * 3
    engine = Engine(
        model,
        layers,
        page_size=page_size,
        num_pages=enough_pages(requests, layers, page_size),
        prefill_chunk=40,
        max_reqs=len(requests),
    )
    (attention,) = engine.attentions.values()
    assert isinstance(attention, MlaAttention) and engine.caches[0].v is None
    plans, plan = [], attention.plan

    def planned(batch):
        plans.append(plan(batch).segments)
        return attention._slots[0].plan

    monkeypatch.setattr(attention, "plan", planned)
    logits = {request.index: [] for request in requests}

    def on_logits(sampled, rows):
        for request, row in zip(sampled, rows, strict=True):
            logits[request.index].append(row.clone())

    list(engine.generate(requests, on_logits=on_logits))
    chunks = [len(prefill.context) for segments in plans for prefill in segments.prefills]
    assert 0 in chunks and max(chunks) > 1 and any(s.decodes and s.prefills for s in plans)
    for request in requests:
        with torch.inference_mode():
            expected = eager(input_ids=torch.tensor([request.tokens[:-1]]), use_cache=False).logits[0]
        expected = expected[len(request.prompt) - 1 :]
        torch.testing.assert_close(torch.stack(logits[request.index]), expected, rtol=0, atol=1e-4)
        assert request.generated == expected.argmax(-1).tolist()


def test_a_layer_is_watched_once_and_gives_its_latents_to_its_own_call():
    model = tiny_model("deepseek_v3")
    for _ in range(2):
        models.discover_layers(model)
        for layer in model.model.layers:
            assert len(layer.self_attn.kv_b_proj._forward_pre_hooks) == 1
            assert model_attention.LATENTS not in vars(layer.self_attn)


def test_a_model_whose_queries_pick_their_keys_is_refused(tmp_path):
    models.transformers().DeepseekV32Config(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match="index_topk is 2048"):
        models.layers_of(tmp_path)
