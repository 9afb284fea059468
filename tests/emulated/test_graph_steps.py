"""Serving steps through captured launches of Triton and C++ kernels, on the emulated device."""

from __future__ import annotations

import pytest
import torch
from recording import RULES, Recorder
from serving import Serving
from serving_layers import DRAFTS, PAGE, Heads, Latents, States

pytest.importorskip("triton")

from portable import detect
from portable.layer import Layer
from portable.platform import graphs
from portable.sizes import Size

MOST, REQS, DEVICE = 48, 2, "emulated:gfx942"
LIMITS = {"max_reqs": REQS, "max_tokens": 64, "max_seq_len": MOST}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16}
LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
KINDS = {
    "attention": lambda: [Heads(Layer.gqa(**HEADS, window=20, sinks=True), 0, DEVICE, REQS * MOST // PAGE, LIMITS)],
    "latents": lambda: [
        Latents(Layer.mla(num_heads=4, **LATENTS, dtype=torch.bfloat16), 0, DEVICE, REQS * MOST // PAGE, LIMITS)
    ],
    "states": lambda: [
        States(
            Layer.mamba2(num_heads=2, head_dim=16, state_dim=16, chunk=16, dtype=torch.bfloat16),
            0,
            DEVICE,
            REQS * (1 + DRAFTS),
            LIMITS,
        )
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_replays_are_the_eager_run_and_near_the_reference(kind, monkeypatch):
    monkeypatch.setenv("PORTABLE_DEVICE", DEVICE)
    with graphs.using(Recorder(RULES["amd"], detect(DEVICE))):
        sizes = [Size(REQS, queries) for queries in (1, 1 + DRAFTS)]
        stack = Serving(KINDS[kind](), sizes, device="cpu", max_reqs=REQS, max_len=MOST, chunk=18, tolerance=3e-2)
        stack.run(8)
    assert stack.counts["decode"] and stack.counts["verify"]


def test_steps_of_the_device_come_to_the_graph_by_one_launch(monkeypatch):
    """Of a chunked layer, whose pages are read off the engine's own table."""
    monkeypatch.setenv("PORTABLE_DEVICE", DEVICE)
    for module in ("persistent", "refresh", "attention"):
        monkeypatch.setattr(f"portable.{module}.near", lambda batch: False)
    layer = Heads(Layer.gqa(**HEADS, chunk=2 * PAGE), 0, DEVICE, REQS * MOST // PAGE, LIMITS)
    with graphs.using(Recorder(RULES["amd"], detect(DEVICE))):
        sizes = [Size(REQS, queries) for queries in (1, 1 + DRAFTS)]
        stack = Serving([layer], sizes, device="cpu", max_reqs=REQS, max_len=MOST, chunk=18, tolerance=3e-2, seed=1)
        stack.run(6)
    assert stack.replayed > 2
