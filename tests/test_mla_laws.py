"""What went wrong in MLA planners elsewhere, as laws: T27 and T34 to T44 of the seeds."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import launches
from mla_cases import make_step, mla_layer
from test_mla import LAYER, Chooser, step
from test_padded_plans import FIELDS, LIMITS, addresses, batch_of, sizes_and_steps
from torch.utils._python_dispatch import TorchDispatchMode

from portable import Batch, MlaAttention, MlaWeights
from portable.backends import reference, reference_steps
from portable.mla import plan_mla
from portable.padding import padded
from portable.sizes import Size

ROOT = Path(__file__).parent.parent
SOURCES = [file for folder in ("portable", "backends", "platform") for file in (ROOT / folder).rglob("*.py")]


def close(found, right, tolerance):
    torch.testing.assert_close(found.double(), right, atol=tolerance, rtol=tolerance)


def test_a_refusal_is_one_sentence():
    """T27: two strings with a comma between them are a tuple, and no message."""
    for file in {file.resolve() for file in SOURCES}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and getattr(raised.func, "id", "") in ("ValueError", "UnsupportedError"):
                assert len(raised.args) == 1 and not isinstance(raised.args[0], ast.Tuple), (file, node.lineno)


def test_a_plan_cannot_be_changed():
    """T34: the split of a step that was turned into another one, beside metadata that were not."""
    attn = MlaAttention(LAYER, page_size=4, device="cpu", workspace=8)
    plan = attn.plan(make_step(LAYER, [1, 9, 20], [9, 30, 5]).batch)
    (prefill,) = plan.segments.prefills
    for made in (plan, plan.segments, prefill, prefill.context[0], prefill.new, plan.segments.decodes[0]):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)
    again = attn.plan(make_step(LAYER, [1, 1, 1], [10, 39, 25]).batch)
    assert (len(plan.segments.prefills), len(again.segments.prefills), len(again.segments.decodes)) == (1, 0, 1)


def test_each_segment_counts_from_its_own_first_token_up_to_its_own_longest():
    """T35: offsets of the whole batch, and a context's length for tokens that attend to each other alone."""
    found = plan_mla(step([2, 1, 30, 12, 4], [700, 90, 0, 5000, 40]), LAYER, Chooser(), workspace=4096)
    decodes, (prefill,) = found.decodes, found.prefills
    assert [d.cu_seqlens_q.tolist() for d in decodes] == [[0, 2, 3], [0, 4]]
    assert [(d.max_query_len, d.max_seq_len) for d in decodes] == [(2, 702), (4, 44)]
    new = prefill.new
    assert (new.cu_seqlens_q.tolist(), new.max_query_len, new.max_seq_len) == ([0, 30, 42], 30, 30)
    first, second = (chunk.attend for chunk in prefill.context)
    for chunk, keys in ((first, 4096), (second, 5000 - 4096)):
        assert chunk.cu_seqlens_q.tolist() == [0, 12] and (chunk.max_query_len, chunk.max_seq_len) == (12, keys)


@pytest.fixture
def device_kernels(monkeypatch):
    """The reference, as kernels that a graph may hold."""
    kernels = tuple(launches(kernel) for kernel in (*reference.KERNELS, *reference_steps.KERNELS))
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)


def test_a_padded_plan_is_the_eager_build_where_the_last_one_was_with_nothing_of_it_left(device_kernels):
    """T36, T39: rows and tails of the table are written in every step; capture and replay have one builder."""
    attn, seen = MlaAttention(LAYER, **LIMITS), {}

    @settings(max_examples=20)
    @given(sizes_and_steps())
    def check(case):
        size, steps = case
        for seed, rows in enumerate(steps):
            batch = batch_of(rows, seed=seed)
            plan, wide = attn.plan(batch, pad_to=size), padded(batch, size)
            for name in FIELDS:
                there, wanted = getattr(plan.batch, name), getattr(wide, name)
                if name == "block_table":
                    assert not there[:, wanted.shape[1] :].any() and not there[len(rows) :].any()
                    there = there[:, : wanted.shape[1]]
                assert torch.equal(there, wanted), name
            assert seen.setdefault(size, addresses(plan)) == addresses(plan)

    check()


def test_padding_never_advances(device_kernels):
    """T43."""
    attn = MlaAttention(LAYER, **LIMITS)
    plan = attn.plan(batch_of([(1, 6), (1, 3)]), pad_to=Size(4, ahead=2))
    for turn in range(2):
        assert attn.advance(plan).tolist() == [7 + turn, 4 + turn, 0, 0]
        assert plan.batch.seq_lens.tolist() == [8 + turn, 5 + turn, 0, 0]
        assert plan.batch.slot_mapping[2:].tolist() == [-1, -1] and not plan.batch.block_table[2:].any()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_plan_of_many_chunks_is_one_copy_of_a_pinned_block_of_its_own(unpinned):
    """T37: an array that somebody changes must not be on its way to the device."""
    table = torch.zeros(3, 40, dtype=torch.int32, device="meta")
    queries, lens = np.array([20, 9, 12], np.int32), np.array([320, 609, 12], np.int32)
    batch = Batch.from_lens(queries, lens, block_table=table, page_size=16)
    unpinned.clear()
    with Calls() as calls:
        found = plan_mla(batch, LAYER, Chooser(), workspace=256)
    assert len(found.prefills[0].context) == 4
    assert (
        unpinned == [True]
        and calls.names["_to_copy"] == 1
        and not calls.names["copy_"]
        and not calls.names["_local_scalar_dense"]
    )


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_a_table_of_zeros_is_a_table(kind):
    """T38: an array of many rows is neither true nor false, and page 0 is a page."""
    made = make_step(LAYER, [2, 11], [2, 3], page_size=16)
    pages = torch.full_like(made.pages, torch.nan)
    pages[:2] = made.pages[made.batch.block_table[:, 0].long()]
    table = kind(np.array([[0], [1]], np.int32))
    for row, each in ((0, kind(np.zeros((1, 1), np.int32))), (slice(0, 2), table)):
        queries, lens = np.array([2, 11])[row], np.array([4, 14])[row]
        batch = Batch.from_lens(np.atleast_1d(queries), np.atleast_1d(lens), block_table=each, page_size=16)
        tokens = batch.num_tokens
        part = dataclasses.replace(
            made, batch=batch, pages=pages.clone(), q=made.q[:tokens], new=made.new[:tokens],
            latents=made.latents[: batch.num_reqs],
        )  # fmt: skip
        attn = MlaAttention(LAYER, page_size=16, device="cpu")
        close(part.run(attn).out, part.right(LAYER)[0], 1e-10)


@settings(max_examples=25)
@given(st.tuples(*(st.integers(1, 9) for _ in range(4))), st.integers(1, 9), st.sampled_from(["torch", "reference"]))
def test_layers_of_any_widths_are_served(widths, heads, backend):
    """T40: 576 and the name of one kernel stood in the class of all."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layer = mla_layer(num_heads=heads, **dict(zip(names, (width * 2 for width in widths), strict=True)))
    made = make_step(layer, [1, 10, 3], [6, 9, 0])
    attn = MlaAttention(layer, page_size=4, device="cpu", workspace=4, backend=backend)
    close(made.run(attn).out, made.right(layer)[0], 1e-10)


def test_a_quantised_projection_is_read_once_and_in_no_step():
    """T44: a product with the identity is for the time when a model is loaded."""
    applied = []

    class Packed(torch.nn.Module):
        def forward(self, x):
            applied.append(x.shape)
            return x @ made.weights_of_all.T

    made = make_step(LAYER, [1, 12], [9, 5])
    made.weights_of_all = torch.cat(list(made.weights), 1).flatten(0, 1)
    weights = MlaWeights.from_kv_b_proj(Packed(), LAYER)
    assert all(torch.equal(a, b) for a, b in zip(weights, made.weights, strict=True))
    once, linear = (LAYER.kv_lora_rank, LAYER.kv_lora_rank), (2, LAYER.kv_lora_rank)
    assert applied == [once, linear, linear]  # and a look whether it is linear, at two sizes
    part = dataclasses.replace(made, weights=weights)
    attn = MlaAttention(LAYER, page_size=4, device="cpu", workspace=8)
    for _ in range(3):
        close(part.run(attn).out, made.right(LAYER)[0], 1e-10)
    assert len(applied) == 3
