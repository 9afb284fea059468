"""MLA over steps in parts, and over keys that do not end with the new tokens: trees, shared prefixes, many queries."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from mla_cases import NOPE, RANK, ROPE, Step, make_step, mla_layer

from portable import Batch, MlaAttention, UnsupportedError
from portable.mla import plan_mla
from portable.parts import prefix, tree

LAYER, PAGE = mla_layer(), 4


def run(made: Step, step, **more):
    attn = MlaAttention(LAYER, page_size=PAGE, device="cpu", workspace=2 * PAGE, **more)
    plan = attn.plan(step)
    kv_c, k_pe = made.new.split([RANK, ROPE], -1)
    attn.write(kv_c, k_pe, made.pages, plan)
    q_nope, q_pe = made.q.split([NOPE, ROPE], -1)
    return plan, attn.run(q_nope, q_pe, kv_c, k_pe, made.pages, plan, made.weights, return_lse=True)


def close(found, right):
    for got, want, tolerance in zip(found, right, (1e-10, 1e-6), strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_shared_prefix_read_once_equals_the_whole_step(backend):
    draw, up_projected = random.Random(1), set()
    for n in range(40):
        pages = draw.randint(1, 4)
        rows = [(draw.choice((0, 1, 2, 9, 17)), pages * PAGE + draw.choice((0, 0, 3, 11))) for _ in range(5)]
        rows.append((1, pages * PAGE))
        made = make_step(LAYER, *([row[i] for row in rows] for i in range(2)), page_size=PAGE, seed=n)
        table = made.batch.block_table
        for row, latents in enumerate(made.latents):
            table[row, :pages] = table[0, :pages]
            latents[: pages * PAGE] = made.latents[0][: pages * PAGE]
        made.batch = Batch.from_lens(
            made.batch.query_lens, made.batch.host_seq_lens, block_table=table.numpy(), page_size=PAGE
        )
        plan, found = run(made, prefix(made.batch, pages * PAGE), backend=backend)
        up_projected |= {plan.segments.parts[0].has_context}
        close(found, made.right(LAYER))
    assert up_projected == {False, True}  # up to 8 queries decode


@pytest.mark.parametrize("nodes", [3, 12], ids=["few nodes decode", "many are a prefill without new tokens"])
def test_each_node_of_a_draft_tree_sees_the_text_its_ancestors_and_itself(nodes):
    parents = np.array([[-1, *(draw.randrange(-1, i) for i in range(1, nodes))] for draw in map(random.Random, (0, 1))])
    text = make_step(LAYER, [1, 1], [6, 12], page_size=PAGE)  # seven and thirteen committed tokens
    for row, latents in enumerate(text.latents):  # written before: the tree stands on all of them
        slot = len(latents) - 1
        text.pages[text.batch.block_table[row, slot // PAGE], slot % PAGE] = latents[slot]
    first = len(text.pages) * PAGE
    pages = torch.cat([text.pages, torch.full((2 * nodes // PAGE + 1, *text.pages.shape[1:]), torch.nan)])
    slots = first + torch.randperm(2 * nodes, generator=torch.Generator().manual_seed(0)).view(2, nodes)
    drafted = make_step(LAYER, [nodes, nodes], [0, 0])
    made = dataclasses.replace(text, pages=pages, q=drafted.q, new=drafted.new)
    latents = []
    for row in range(2):
        for node in range(nodes):
            above, line = node, []
            while above >= 0:
                line.insert(0, made.new[row * nodes + above])
                above = parents[row, above]
            latents.append(torch.cat([text.latents[row], torch.stack(line)]))
    depth = max(len(each) - len(text.latents[i // nodes]) for i, each in enumerate(latents))
    step = tree(made.batch, torch.from_numpy(parents), slots, depth)
    plan, found = run(made, step)
    assert plan.segments.has_context == (nodes > 8)
    single = Batch.from_lens([1] * len(latents), [len(each) for each in latents])
    close(found, dataclasses.replace(made, batch=single, latents=latents).right(LAYER))


def test_what_no_part_can_be_is_named():
    made = make_step(LAYER, [1, 1], [8, 8], page_size=PAGE)
    made.batch.block_table[1, :1] = made.batch.block_table[0, :1]
    attn = MlaAttention(LAYER, page_size=PAGE, device="cpu")
    with pytest.raises(UnsupportedError, match=r"in Parts .* not padded to a size"):
        attn.plan(prefix(made.batch, PAGE), pad_to=2)
    odd = dataclasses.replace(make_step(LAYER, [9], [8], page_size=PAGE).batch, self_attention=False)
    with pytest.raises(UnsupportedError, match="a causal mask over keys that do not end with the new tokens"):
        plan_mla(odd, LAYER, attn._kernels, workspace=8)
    spread = torch.full((8, 2 * PAGE, LAYER.latent_dim), 0.0, dtype=LAYER.dtype)[:, :PAGE]
    step = tree(made.batch, torch.tensor([[-1], [-1]]), torch.tensor([[5], [6]]), 1)
    with pytest.raises(ValueError, match="pages of 1 tokens need equal steps"):
        run(dataclasses.replace(made, pages=spread), step)
