"""Speculative decoding of whole models with recurrent layers: tokens, logits and states are those without drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import END, RECURRENT, tiny_model

from portable import Batch, Mamba, RunningStates, allocate_states, models
from portable.generate import Engine
from portable.mamba_copies import plan_state_copies
from portable.model_attention import answering
from portable.model_mamba import Bound, answering_states
from portable.order import order

pytest.importorskip("transformers")

DRAFTS, PAGE, ANSWER = 3, 8, 22
PROMPTS = (5, 19, 12)
ROWS = len(PROMPTS)
CHUNK = 7  # of a prompt that is read in a step


class Group:
    """Every second recurrent layer: a table, a block size and a type of states of their own."""

    def __init__(self, layers, number, mode, rows, drafts=DRAFTS):
        self.block, self.mode = (4, 6)[number], mode
        dtype = (torch.float32, torch.float64)[number]
        own = [i for i, layer in enumerate(layers) if layer.family in ("mamba1", "mamba2")][number::2]
        kinds = {i: replace(layers[i], kv_dtype=dtype) for i in own}
        self.mambas = {
            kind: Mamba(kind, device="cpu", mode=mode, block_size=None if mode == "none" else self.block,
                        num_draft=drafts)
            for kind in kinds.values()
        }  # fmt: skip
        width = 1 + drafts if mode == "none" else 60 // self.block + drafts
        slots = np.random.default_rng(number).permutation(rows * width + 5)
        self.table = slots[: rows * width].reshape(rows, width)
        self.layers, self.pools = kinds, {i: allocate_states(kind, len(slots), "cpu") for i, kind in kinds.items()}
        for pools in self.pools.values():
            for pool in pools:
                pool.fill_(torch.nan)
        self.states = None
        if mode != "none":
            self.states = RunningStates(rows, block_size=self.block, mode=mode, num_draft=drafts)
        self.accepted = np.ones(rows, np.int32)
        self.pending = np.zeros((0, 2), np.int64)  # of the step before, not copied yet

    def before(self, rows, computed, scheduled):
        """The pools, and what is to be copied: what the last step left, then what this one needs."""
        pairs, self.pending = self.pending, self.pending[:0]
        if self.states is not None:
            moves = self.states.before(rows, computed, scheduled)
            pairs = np.concatenate([pairs, plan_state_copies(moves, self.table)])
        return list(self.pools.values()), pairs

    def plan(self, batch, rows):
        given = {"num_accepted": self.accepted[rows]}
        if self.states is not None:
            given = {"running": self.states.running[rows], "num_accepted": self.states.accepted[rows]}
        return {kind: mamba.plan(batch, self.table[rows], **given) for kind, mamba in self.mambas.items()}

    def after(self, rows, computed, scheduled, drafts, accepted):
        self.accepted[rows] = accepted
        if self.states is not None:
            moves = self.states.after(rows, computed, scheduled, drafts, accepted)
            self.pending = plan_state_copies(moves, self.table)

    def slot(self, row):
        """That of the state to go on from."""
        if self.states is None:
            return self.table[row, self.accepted[row] - 1]
        return self.table[row, self.states.running[row] + self.states.accepted[row] - 1]


class Served:
    """A model, its attention, and groups of its recurrent layers."""

    def __init__(self, family, mode, rows=ROWS, drafts=DRAFTS):
        self.model = tiny_model(family)
        layers = models.discover_layers(self.model)
        width = -(-60 // PAGE)
        self.engine = Engine(self.model, layers, num_pages=rows * width, page_size=PAGE, max_reqs=rows, max_seq_len=60)
        self.pages = np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
        self.groups = [Group(layers, number, mode, rows, drafts) for number in range(2)]
        assert all(group.pools for group in self.groups)

    @torch.inference_mode()
    def step(self, rows, tokens, computed, reading):
        """The logits of each row's new tokens; rows are ordered as a plan wants them."""
        scheduled = [len(each) for each in tokens]
        next(iter(self.groups[0].mambas.values())).copy(
            *(group.before(rows, computed, scheduled) for group in self.groups)
        )
        batch = Batch.from_lens(scheduled, np.add(computed, scheduled), block_table=self.pages[rows], page_size=PAGE,
                                is_prefilling=reading)  # fmt: skip
        plans = {layer: attention.plan(batch) for layer, attention in self.engine.attentions.items()}
        bound = {}
        for group in self.groups:
            made = group.plan(batch, rows)
            bound |= {i: Bound(group.mambas[kind], group.pools[i], made[kind]) for i, kind in group.layers.items()}
        ids = [token for each in tokens for token in each]
        at = [c + j for c, n in zip(computed, scheduled, strict=True) for j in range(n)]
        with answering(self.engine._answer(plans)), answering_states(bound.__getitem__):
            inputs = torch.tensor([ids, at])
            logits = self.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False).logits[0]
        return logits.split(scheduled)


def guesses(rng, plain, at):
    """Up to DRAFTS tokens behind those that are known: the right ones up to a point."""
    right = plain[at : at + int(rng.integers(0, DRAFTS + 1))]
    wrong = int(rng.integers(0, DRAFTS + 1))
    return right[:wrong] + [(token + 1) % END for token in right[wrong:]]


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("family", RECURRENT)
def test_drafts_change_no_token_no_logits_and_no_state(family, mode):
    """Three requests that come one after the other: prompts in chunks beside verified drafts, greedy to the end."""
    eager, served = tiny_model(family, "eager"), Served(family, mode)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, END, (length,), generator=generator).tolist() for length in PROMPTS]
    plain = [[*prompt, *models.eager_tokens(eager, prompt, ANSWER, ())] for prompt in prompts]
    rng, known, computed = np.random.default_rng(1), [list(prompt) for prompt in prompts], [0] * len(prompts)
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]
    rejected = taken = steps = 0
    while any(len(known[row]) < len(plain[row]) for row in range(len(prompts))):
        rows = [row for row in range(len(prompts)) if steps >= 2 * row and len(known[row]) < len(plain[row])]
        new, drafts = {}, {}
        for row in rows:
            pending = known[row][computed[row] :]
            drafts[row] = guesses(rng, plain[row], len(known[row])) if len(pending) == 1 and computed[row] else []
            new[row] = pending[:CHUNK] + drafts[row]
        q, c = (np.array(values, np.int32) for values in ([len(new[r]) for r in rows], [computed[r] for r in rows]))
        reading = np.array([computed[row] + CHUNK < len(prompts[row]) or (not drafts[row] and len(new[row]) > 1)
                            for row in rows])  # fmt: skip
        by = order(q, c, threshold=1 + DRAFTS, is_prefilling=reading, short_extends_as_decodes=False)
        rows = [rows[i] for i in by]
        found = served.step(rows, [new[row] for row in rows], c[by].tolist(), reading[by])
        accepted = []
        for row, logits in zip(rows, found, strict=True):
            k = len(drafts[row])
            choices = logits[len(new[row]) - k - 1 :].argmax(-1).tolist()
            right = next((j for j in range(k) if drafts[row][j] != choices[j]), k)
            accepted.append(1 + right)
            seen[row].append(logits[: len(new[row]) - k + right])
            computed[row] += len(new[row]) - k + right
            rejected, taken = rejected + k - right, taken + right
            if computed[row] >= len(known[row]):
                known[row] += choices[: right + 1]
        for group in served.groups:
            group.after(rows, c[by], q[by], [len(drafts[row]) for row in rows], accepted)
        steps += 1
    assert rejected > 9 and taken > 9
    for row, tokens in enumerate(plain):
        assert known[row][: len(tokens)] == tokens
        with torch.inference_mode():
            want = eager(input_ids=torch.tensor([known[row][: computed[row]]]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(seen[row]), want, rtol=0, atol=1e-4)
    next(iter(served.groups[0].mambas.values())).copy(
        *((list(group.pools.values()), group.pending) for group in served.groups)
    )
    check_states(served, family, prompts, known, computed)


def check_states(served, family, prompts, known, computed):
    """Of each sequence's end, and of every block that became full: the states of the prefix, read in one step."""
    whole = Served(family, "all", drafts=0)
    for row, count in enumerate(computed):
        whole.step([row], [known[row][:count]], [0], np.array([True]))
        for group, right in zip(served.groups, whole.groups, strict=True):
            pairs = [(group.slot(row), right.table[row, (count - 1) // right.block])]
            for column in range(count // group.block):
                # in the mode "align" a prompt leaves the states of some blocks only
                if group.mode == "all" or (group.mode == "align" and (column + 1) * group.block > len(prompts[row])):
                    pairs.append((group.table[row, column], right.table[row, column]))
            come, go = (list(slots) for slots in zip(*pairs, strict=True))
            for i, pools in group.pools.items():
                for pool, wanted in zip(pools, right.pools[i], strict=True):
                    assert wanted[go].abs().amax(tuple(range(1, wanted.dim()))).min() > 1e-3
                    torch.testing.assert_close(pool[come], wanted[go], rtol=1e-4, atol=1e-5)
