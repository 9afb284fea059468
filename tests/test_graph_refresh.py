"""What brings a step's metadata to the device: as many copies and launches as there may be, and the right values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from launched import launches

from portable import Attention, Batch, Layer, attention, persistent
from portable.backends import reference, reference_steps
from portable.kernel import Op
from portable.padding import padded
from portable.sizes import Size
from portable.staging import Staging
from portable.variants import local, local_size

PAGE, WIDTH, PAGES = 4, 8, 90
LIMITS = {"page_size": PAGE, "device": "cpu", "max_reqs": 5, "max_tokens": 40, "max_seq_len": PAGE * WIDTH}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}


@pytest.fixture
def counted(monkeypatch):
    """Copies from the host and launches of metadata kernels since it was cleared; steps are taken for a device's."""
    found = []

    def counting(kernel):
        def run(*args):
            found.append(kernel.caps.op)
            return kernel.run(*args)

        return replace(kernel, run=run)

    kernels = [launches(kernel) for kernel in reference.KERNELS]
    kernels += [counting(launches(kernel)) for kernel in reference_steps.KERNELS]
    monkeypatch.setattr(attention, "load_kernels", lambda: tuple(kernels))
    copy = Staging.copy
    monkeypatch.setattr(Staging, "copy", lambda self, *ranges: (found.append("copy"), copy(self, *ranges))[1])
    monkeypatch.setattr(persistent, "near", lambda batch: False)
    for module in ("portable.refresh", "portable.attention"):
        monkeypatch.setattr(f"{module}.near", lambda batch: False)
    return found


def step_of(rng, size, width, causal=True):
    rows = int(rng.integers(1, size.reqs + 1))
    most = min(size.queries, size.padded_tokens // rows)
    new = np.full(rows, size.queries) if size.uniform else rng.integers(1, most + 1, rows)
    lens = new + rng.integers(0, PAGE * min(WIDTH, width) - new + 1)
    table = rng.permutation(PAGES)[: rows * width].reshape(rows, width)
    return Batch.from_lens(new, lens, block_table=table, page_size=PAGE, causal=causal)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("size", [Size(5), Size(3, 4), Size(4, 9, tokens=20)], ids=str)
def test_a_step_of_a_device_is_one_copy_and_two_launches(counted, size, chunk):
    """Of tables narrower, as wide and wider than ours, with lengths that the host knows and that it does not."""
    attn, rng = Attention(Layer.gqa(**HEADS, chunk=chunk), **LIMITS), np.random.default_rng(1)
    for turn in range(24):
        batch = step_of(rng, size, int(rng.integers(WIDTH - 3, WIDTH + 4)))
        given = batch if chunk or turn % 2 else replace(batch, exact=False, host_seq_lens=batch.host_seq_lens + 1)
        if given.max_seq_len > LIMITS["max_seq_len"]:
            continue
        counted.clear()
        plan = attn.plan(given, pad_to=size)
        if turn:  # the first is captured too
            assert counted.count("copy") == 1 and counted.count(Op.COLLECT) == 1 and len(counted) <= 3
        wanted = padded(batch, size) if chunk is None else padded(local(batch, chunk), local_size(size, chunk))
        found, pages = plan.batch, -(-wanted.host_seq_lens // PAGE)
        for name in ("cu_seqlens_q", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        for row, count in enumerate(pages):
            assert torch.equal(found.block_table[row, :count], wanted.block_table[row, :count])
        assert not found.block_table[wanted.num_reqs if chunk is None else len(pages) :].any()


def test_what_differs_between_requests_comes_with_them(counted):
    attn, rng, size = Attention(Layer.gqa(**HEADS), **LIMITS), np.random.default_rng(2), Size(5, 4)
    for turn in range(6):
        batch = step_of(rng, size, WIDTH)
        batch = replace(batch, causal=torch.from_numpy(rng.random(batch.num_reqs) < 0.5))
        counted.clear()
        plan = attn.plan(batch, pad_to=size)
        assert not turn or (counted.count("copy"), counted.count(Op.COLLECT), len(counted) <= 3) == (1, 1, True)
        assert plan.batch.causal.tolist() == [*batch.causal.tolist(), *[True] * (5 - batch.num_reqs)]


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("chunk", [None, 8])
def test_another_groups_table_is_read_as_the_first_ones_was(counted, monkeypatch, chunk, far):
    if not far:
        for module in ("persistent", "refresh", "attention"):
            monkeypatch.setattr(f"portable.{module}.near", lambda batch: True)
    attn, rng, size = (
        Attention(Layer.gqa(**HEADS, chunk=chunk), **LIMITS),
        np.random.default_rng(3),
        Size(4, 9, tokens=20),
    )
    for turn in range(6):
        batch = step_of(rng, size, WIDTH)
        plan = attn.plan(batch, pad_to=size)
        table = torch.from_numpy(rng.permutation(PAGES)[: batch.num_reqs * WIDTH].reshape(-1, WIDTH).astype(np.int32))
        slots = torch.from_numpy(rng.permutation(PAGES * PAGE)[: batch.num_tokens])
        kept = plan.batch.block_table.clone()
        counted.clear()
        found = attn.update_block_table(plan, table, slots, slot=1).batch
        assert not turn or counted.count("copy") == 1
        group = batch.with_group(table, slots, PAGE)
        wanted = padded(group, size) if chunk is None else padded(local(group, chunk), local_size(size, chunk))
        assert torch.equal(found.slot_mapping, wanted.slot_mapping) and torch.equal(found.seq_lens, wanted.seq_lens)
        for row, count in enumerate(-(-wanted.host_seq_lens // PAGE)):
            assert torch.equal(found.block_table[row, :count], wanted.block_table[row, :count])
        assert torch.equal(plan.batch.block_table, kept)
