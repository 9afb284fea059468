"""Prefix caching of pages and of states: who owns what over random requests, and what is found again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from portable import models
from portable.generate import Engine
from portable.mamba_copies import plan_state_copies
from portable.prefix import PrefixScheduler
from portable.schedule import Request
from portable.state_slots import StateSlots


class Pools:
    """What a model would have written: the tokens up to each place of a page, and up to each state."""

    def __init__(self, scheduler):
        self.scheduler, self.slots = scheduler, scheduler.slots
        self.pages = {}
        self.states = {}

    def compute(self, chunks):
        size, scheduler, slots = self.scheduler.page_size, self.scheduler, self.slots
        if slots is not None:
            moves = slots.before(chunks)
            for source, target in plan_state_copies(moves, slots.table).tolist():
                self.store(target, self.states[source])
        for chunk in chunks:
            request, end = chunk.request, chunk.start + chunk.length
            tokens = tuple(request.tokens)
            for place in range(end):
                page = scheduler.block_table[request.row, place // size]
                if place < chunk.start:
                    assert self.pages[page, place % size] == tokens[: place + 1], "a cached page is of other tokens"
                else:
                    assert page not in scheduler._users, "a cached page is written"
                    self.pages[page, place % size] = tokens[: place + 1]
            if slots is not None:
                row = slots.table[request.row]
                if chunk.start:
                    running = slots.states.running[request.row]
                    assert self.states[row[running]] == tokens[: chunk.start], "a request goes on from another state"
                self.store(row[(end - 1) // size], tokens[:end])
                if end // size > chunk.start // size:
                    self.store(row[end // size - 1], tokens[: end // size * size])

    def store(self, slot, tokens):
        assert slot >= 0 and slot not in self.slots._users, "a checkpoint is written"
        self.states[int(slot)] = tokens

    def check_owners(self):
        scheduler, slots = self.scheduler, self.slots
        held = Counter(page for request in scheduler.running for page in request.pages)
        for page, users in scheduler._users.items():
            assert held[page] == users
        private = [page for page in held if page not in scheduler._users]
        assert all(held[page] == 1 for page in private)
        everything = [*private, *scheduler.free_pages, *scheduler._users]
        assert sorted(everything) == list(range(scheduler.num_pages))
        assert set(scheduler._idle) == {page for page, users in scheduler._users.items() if not users}
        if slots is None:
            return
        assert slots._checkpoints.keys() <= scheduler._page.keys(), "a state outlived its prefix"
        rows = Counter(slots.table[slots.table >= 0].tolist())
        assert rows.keys().isdisjoint(slots.free)
        for slot, users in slots._users.items():
            assert rows[slot] == users
        private = [slot for slot in rows if slot not in slots._users]
        assert all(rows[slot] == 1 for slot in private)
        assert sorted([*private, *slots.free, *slots._users]) == list(range(slots.num_slots))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=9
    ),
    st.integers(1, 4),
    st.integers(2, 9),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_every_page_and_state_has_one_writer_and_holds_exactly_its_tokens(
    asked, size, chunk, rows, recurrent, extra, random
):
    """Requests begin with one of three texts, in a pool that is as small as the largest needs, and a little more."""
    texts = [[random.randint(0, 3) for _ in range(14)] for _ in range(3)]
    requests = [
        Request(i, texts[text][:length] + [random.randint(0, 3) for _ in range(more)], new)
        for i, (text, length, more, new) in enumerate(asked)
    ]
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    slots = None
    if recurrent:
        slots = StateSlots(max_reqs=rows, num_checkpoints=extra, block_size=size, max_seq_len=longest)
    pages = -(-longest // size) + extra
    scheduler = PrefixScheduler(slots=slots, num_pages=pages, page_size=size, prefill_chunk=chunk, max_reqs=rows)
    pools = Pools(scheduler)
    for request in requests:
        scheduler.add(request)
    for _ in range(1000):
        chunks = scheduler.step()
        if not chunks:
            break
        pools.compute(chunks)
        scheduler.commit(chunks, [random.randint(0, 3) for chunk in chunks if chunk.samples])
        pools.check_owners()
    assert scheduler.done
    assert all(request.finish_reason == "length" for request in requests)
    assert len(scheduler.free_pages) + len(scheduler._idle) == pages


def run(scheduler, request):
    scheduler.add(request)
    starts = []
    while chunks := scheduler.step():
        starts += [(chunk.start, chunk.length) for chunk in chunks]
        if scheduler.slots is not None:
            scheduler.slots.before(chunks)
        scheduler.commit(chunks, [7] * sum(chunk.samples for chunk in chunks))
    return starts


def test_the_least_recently_used_end_of_a_prefix_goes_first():
    scheduler = PrefixScheduler(num_pages=5, page_size=2, prefill_chunk=20, max_reqs=1)
    assert run(scheduler, Request(0, [1, 2, 3, 4, 5, 6, 7], 1)) == [(0, 7)]
    assert run(scheduler, Request(1, [9, 9, 9, 9, 9], 1)) == [(0, 5)]  # takes the free pages, and that of 5, 6
    assert run(scheduler, Request(2, [1, 2, 3, 4, 5, 6, 7], 1)) == [(4, 3)]


def test_states_decide_how_much_of_a_prefix_counts():
    slots = StateSlots(max_reqs=1, num_checkpoints=4, block_size=2, max_seq_len=20)
    scheduler = PrefixScheduler(slots=slots, num_pages=20, page_size=2, prefill_chunk=5, max_reqs=1)
    run(scheduler, Request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))  # ends steps at 5 and 9: states of 4 and 8 tokens
    assert run(scheduler, Request(1, [1, 2, 3, 4, 5, 6, 7, 0], 1))[0][0] == 4
    assert run(scheduler, Request(2, [1, 2, 3, 4, 5, 6, 7, 8, 0], 1))[0][0] == 8
    assert run(scheduler, Request(3, [1, 2, 3, 4], 1))[0][0] == 0  # a token is left to compute


def test_blocks_and_pages_are_of_one_size():
    slots = StateSlots(max_reqs=1, num_checkpoints=4, block_size=2, max_seq_len=20)
    with pytest.raises(ValueError, match="slots has block_size 2; it must be page_size 4"):
        PrefixScheduler(slots=slots, num_pages=20, page_size=4, prefill_chunk=5, max_reqs=1)


def test_a_model_of_attention_alone_has_prefixes_too():
    pytest.importorskip("transformers")
    model = tiny_model("llama")
    layers = models.discover_layers(model)
    prompt = np.random.default_rng(0).integers(0, 256, 21).tolist()
    alone = Request(0, prompt, 5)
    list(Engine(model, layers, num_pages=20, page_size=4, max_reqs=1).generate([alone]))
    engine = Engine(model, layers, num_pages=20, page_size=4, max_reqs=1, prefix_caching=True)
    for index in range(2):
        again = Request(index, prompt, 5)
        list(engine.generate([again]))
        assert again.generated == alone.generated
    assert engine.scheduler.hits == 20
