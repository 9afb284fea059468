"""Serving steps through captured graphs, without a GPU: right for every step, and wrong where metadata is stale."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from launched import captured
from recording import RULES, CaptureError, Recorder
from serving import Serving, on_device
from serving_layers import DRAFTS, PAGE, Heads, Latents, States

from portable import attention, refresh, slot
from portable.backends import reference, reference_mamba, reference_steps
from portable.kernel import Op
from portable.layer import Layer
from portable.persistent import Persistent
from portable.platform import graphs as captures
from portable.sizes import Size

MOST, REQS = 96, 4
LIMITS = {"max_reqs": REQS, "max_tokens": 64, "max_seq_len": MOST}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
PAGES = REQS * MOST // PAGE
LATENTS = Layer.mla(
    num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, dtype=torch.float32
)
STATES = Layer.mamba2(num_heads=2, head_dim=4, state_dim=8, chunk=8, dtype=torch.float32)
KINDS = {
    "full": (Heads, Layer.gqa(**HEADS), 0, PAGES),
    "full, other group": (Heads, Layer.gqa(**HEADS), 1, PAGES),
    "window": (Heads, Layer.gqa(**HEADS, window=20, sinks=True), 1, PAGES),
    "local": (Heads, Layer.gqa(**HEADS, chunk=2 * PAGE), 1, PAGES),
    "latents": (Latents, LATENTS, 0, PAGES),
    "states": (States, STATES, 0, REQS * (1 + DRAFTS)),
}
ORACLES = captured(*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)


@pytest.fixture(params=sorted(RULES))
def rules(request):
    return RULES[request.param]


@pytest.fixture
def kernels(monkeypatch):
    """Replaces the kernels of some operations; all are launches that read the device, as those of a GPU."""

    def replace(**others):
        chosen = tuple(others.get(kernel.caps.op.value, kernel) for kernel in ORACLES)
        monkeypatch.setattr(attention, "load_kernels", lambda: chosen)

    replace()
    return replace


def serving(*kinds, seed=0, more=()):
    layers = [make(layer, group, "cpu", rows, LIMITS) for make, layer, group, rows in map(KINDS.get, kinds)]
    sizes = [*(Size(reqs, queries) for queries in (1, 1 + DRAFTS) for reqs in (2, REQS)), *more]
    return Serving(layers, sizes, device="cpu", max_reqs=REQS, max_len=MOST, chunk=24, tolerance=1e-5, seed=seed)


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        (("full", "window", "local", "latents", "states"), 40),
        (("full", "full, other group"), 30),
    ],
    ids=["every kind", "two groups"],
)
def test_replays_are_the_eager_run_and_near_the_reference(kernels, rules, kinds, steps):
    recorder = Recorder(rules)
    with captures.using(recorder):
        stack = serving(*kinds)
        stack.run(steps)
    assert stack.counts["decode"] and stack.counts["verify"] and stack.counts["mixed"]
    assert {size.queries for size in stack.graphs.captured} == {1, 1 + DRAFTS}
    assert recorder.replays >= stack.counts["decode"] + stack.counts["verify"]


def test_every_tensor_of_a_plan_stays_where_the_capture_found_it(kernels):
    """Of 100 replays: of each layer's plan all tensors, with their shapes and strides, whatever the step came from."""
    with captures.using(Recorder()):
        stack = serving("full", "full, other group", "local", "latents", "states", seed=4)
        usual, seen, counted = stack.graphs._plan, {}, {"decode": 0, "verify": 0}

        def planned(each, size):
            plans = usual(each, size)
            tensors = [captures.tensors(dataclasses.replace(plan, padded=None)) for plan in plans]
            where = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for of_layer in tensors for x in of_layer]
            assert min(map(len, tensors)) > 3 and seen.setdefault(size, where) == where
            counted["verify" if size.queries > 1 else "decode"] += 1
            return plans

        stack.graphs._plan = planned
        while sum(counted.values()) < 100 + len(seen):  # a capture plans once more
            stack.run(5)
    assert len(seen) == 4 and min(counted.values()) > 30


def test_steps_of_any_lengths_are_replayed_too(kernels, rules):
    with captures.using(Recorder(rules)):
        stack = serving("full", "window", "local", more=[Size(REQS, 24, tokens=52)])
        stack.run(25)
    assert stack.replayed == 25 and stack.counts["mixed"] > 4


def test_steps_that_the_device_has_are_replayed_too(kernels, monkeypatch):
    """The tensors of the host stand for a device's, state slots and counts of accepted tokens in turns."""
    for module in ("persistent", "refresh", "attention"):
        monkeypatch.setattr(f"portable.{module}.near", lambda batch: False)
    for module in ("places", "memory", "decodes"):
        monkeypatch.setattr(f"portable.mamba_{module}.far", torch.is_tensor)
    usual, turns = States.asked, iter(range(1000))

    def asked(self, batch, slots, accepted):
        turn, found = next(turns), usual(self, batch, slots, accepted)
        return found | {name: torch.tensor(x) for bit, (name, x) in enumerate(found.items()) if turn >> bit & 1 and bit}

    monkeypatch.setattr(States, "asked", asked)
    with captures.using(Recorder()):
        stack = serving("full", "window", "local", "latents", "states", seed=2)
        stack.run(30)
    assert stack.replayed > 15 and len(stack.graphs.captured) == 4


@pytest.mark.device
def test_replays_on_a_gpu():
    stack = on_device("cuda")
    stack.run(60)
    assert stack.replayed > 20 and len(stack.graphs.captured) > 3


# Faults: each is what an implementation could do, and must not pass


def fails(*kinds, steps=20, change=None):
    """Whether serving notices, within a few steps."""
    with captures.using(Recorder()):
        stack = serving(*kinds)
        if change is not None:
            change(stack)
        with pytest.raises((AssertionError, CaptureError)):
            stack.run(steps)


def test_metadata_in_new_memory_at_each_step_is_noticed(kernels, monkeypatch):
    plan = attention.Attention.plan

    def anew(self, step, *, pad_to=None, slot=0):
        if pad_to is not None:
            self._slots.pop(slot, None)
        return plan(self, step, pad_to=pad_to, slot=slot)

    monkeypatch.setattr(attention.Attention, "plan", anew)
    fails("full")


def test_lengths_and_slots_that_are_not_refreshed_are_noticed(kernels, monkeypatch):
    monkeypatch.setattr(Persistent, "_bring", lambda self, step, turn, place: self._place(place))
    fails("full")


def test_pages_that_are_not_refreshed_are_noticed(kernels, monkeypatch):
    def copied(self, step, turn, place):
        self.staging.copy(step.bytes, step.turns[turn].bytes)

    monkeypatch.setattr(Persistent, "_bring", copied)
    fails("full")


def test_a_number_of_the_host_in_a_graph_is_noticed(kernels):
    def change(stack):
        forward = stack.forward

        def cut(way, plans, x):
            out = forward(way, plans, x)
            if way == "graph":
                out[getattr(plans[0], "num_tokens", len(x)) :] = 0
            return out

        stack.forward = cut

    fails("full", change=change)


def test_counts_of_parts_that_are_stale_are_noticed(kernels, monkeypatch):
    prepare, made = refresh.prepare, {}

    def once(segment, layer):
        if id(segment) not in made:
            made[id(segment)] = prepare(segment, layer), segment
        return made[id(segment)][0]

    monkeypatch.setattr(refresh, "prepare", once)
    fails("full")


def test_padding_that_is_written_to_a_live_page_is_noticed(kernels):
    write = next(kernel for kernel in ORACLES if kernel.caps.op is Op.CACHE_WRITE)
    wrong = dataclasses.replace(write, caps=dataclasses.replace(write.caps, pad_slot=0))
    kernels(cache_write=wrong)
    fails("full", steps=40)


def test_a_group_in_the_memory_of_another_is_noticed(kernels, monkeypatch):
    renew, memories = slot.Slot.renew_padded, []

    def shared(self, batch, size, memory):
        return renew(self, batch, size, lambda: memories[0] if memories else memories.append(memory()) or memories[0])

    monkeypatch.setattr(slot.Slot, "renew_padded", shared)
    fails("full", "full, other group")
