"""The device twins give what `portable.paging` gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from portable import paging
from portable.platform.emulated import activate
from portable.platform.emulated.driver import DEVICES

tables = pytest.importorskip("portable.backends.triton.tables")
each_arch = pytest.mark.parametrize("arch", DEVICES)


def drawn(seed: int, requests: int, width: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table [B, width] int32, seq_lens [B] int32 of 0 to width * page_size)."""
    generator = np.random.default_rng(seed)
    table = generator.permutation(requests * width).reshape(requests, width).astype(np.int32)
    return torch.from_numpy(table), torch.from_numpy(
        generator.integers(0, width * page_size + 1, requests).astype(np.int32)
    )


@each_arch
def test_slots(arch):
    table, lens = drawn(0, 5, 7, 48)
    requests = torch.arange(5).repeat_interleave(lens.long())
    positions = torch.cat([torch.arange(n) for n in lens.tolist()])
    want = paging.slot_mapping(table, requests, positions, 48)
    with activate(arch):
        assert torch.equal(tables.slot_mapping(table, requests, positions, 48), want)
        assert tables.slot_mapping(table, requests[:0], positions[:0], 48).shape == (0,)


def test_a_slot_past_32_bits():
    table = torch.tensor([[2**31 - 2]], dtype=torch.int32)
    with activate("gfx942"):
        slots = tables.slot_mapping(table, torch.tensor([0]), torch.tensor([15]), 16)
    assert slots.tolist() == [(2**31 - 2) * 16 + 15]


@each_arch
@pytest.mark.parametrize("page_size", (1, 4, 24))
def test_page_tables_from_token_tables(arch, page_size):
    table, lens = drawn(1, 6, 5, page_size)
    slots = (table.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1).to(torch.int32)
    rows, offsets = torch.tensor([4, 0, 5]), torch.tensor([0, 1, 2]) * page_size
    for given in (None, offsets):
        arguments = (slots, rows, (lens[rows] - (0 if given is None else given)).clamp(min=0), page_size, 6, given)
        with activate(arch):
            assert torch.equal(tables.page_table_from_tokens(*arguments), paging.page_table_from_tokens(*arguments))


@each_arch
@pytest.mark.parametrize(("requests", "width", "page_size"), ((1, 1, 1), (5, 7, 16), (70, 3, 24), (3, 300, 2)))
def test_compressed_rows(arch, requests, width, page_size):
    table, lens = drawn(2, requests, width, page_size)
    exact = paging.num_pages(lens.numpy(), page_size)
    for count in (exact, exact + 300):
        want = paging.page_csr(table, lens, page_size, count)
        with activate(arch):
            got = tables.page_csr(table, lens, page_size, count)
        for name in ("indptr", "indices", "last_page_len"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_no_requests():
    table = torch.zeros(0, 3, dtype=torch.int32)
    with activate("gfx942"):
        csr = tables.page_csr(table, torch.zeros(0, dtype=torch.int32), 4, 5)
    assert csr.indptr.tolist() == [0] and csr.indices.tolist() == [0] * 5
