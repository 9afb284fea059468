"""What launching the Triton kernels of recurrent layers reads and assumes, without running them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import portable
from portable.kernel import Needs, Op
from portable.layer import Layer
from portable.states import DecodeStates, PrefillStates, SsmTensors

pytest.importorskip("triton")

from portable.attention import load_kernels
from portable.backends.triton import conv1d, scan, ssd, state_copy, state_update
from portable.backends.triton.launch import recorded

KERNELS = (*conv1d.KERNELS, *ssd.KERNELS, *scan.KERNELS, *state_update.KERNELS, *state_copy.KERNELS)
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "sm80", "sm90")
MAMBA2 = Layer.mamba2(num_heads=6, head_dim=16, state_dim=32, num_groups=2)
MAMBA1 = Layer.mamba1(num_channels=40)
each_arch = pytest.mark.parametrize("arch", ARCHS)


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Meta tensors have no values: whatever reads one fails."""
    return torch.empty(shape, dtype=dtype, device="meta")


def prefill(requests: int, chunks: int, tokens: int) -> PrefillStates:
    return PrefillStates(
        requests=slice(0, requests),
        tokens=slice(0, tokens),
        cu_seqlens_q=meta(requests + 1),
        has_initial=meta(requests, dtype=torch.bool),
        initial_indices=meta(requests),
        state_indices=meta(requests),
        cu_chunks=meta(chunks + 1),
        chunk_requests=meta(chunks),
        chunk_state_indices=meta(chunks),
        last_chunks=meta(requests),
        checkpoint_chunks=None,
        conv_requests=meta(chunks),
        conv_offsets=meta(chunks),
        conv_block=32,
        max_query_len=tokens,
        pad_slot=-1,
    )


def decode(requests: int, tokens: int) -> DecodeStates:
    return DecodeStates(
        requests=slice(0, requests),
        tokens=slice(0, requests * tokens),
        cu_seqlens_q=meta(requests + 1),
        initial_indices=meta(requests),
        state_indices=meta(requests, tokens),
        num_accepted=None,
        max_query_len=tokens,
        pad_slot=-1,
    )


def launches(arch: str, layer: Layer, states: PrefillStates | DecodeStates):
    """Of a convolution, and of a scan or an update."""
    heads, width, groups, dim = layer.num_heads, layer.qk_head_dim, layer.num_groups, layer.state_dim
    tokens = max(1, states.tokens.stop)

    def rows(*shape: int) -> torch.Tensor:
        return meta(tokens, *shape, dtype=layer.dtype)

    rates = meta(*((heads, dim) if layer.family == "mamba1" else (heads,)), dtype=torch.float32)
    pool, conv_pool = (
        meta(9, heads, width, dim, dtype=layer.kv_dtype),
        meta(9, layer.conv_width - 1, heads, dtype=layer.dtype),
    )
    op = Op.SSD if isinstance(states, PrefillStates) else Op.STATE_UPDATE
    kernel = next(each for each in KERNELS if each.caps.op is op and layer.family in each.caps.families)
    with recorded(portable.describe(arch)) as calls:
        weight = meta(heads, layer.conv_width, dtype=layer.dtype)
        conv1d.conv1d(rows(heads), weight, None, conv_pool, states, rows(heads), True)
        x, dt, b, c, out = rows(heads, width), rows(heads), rows(groups, dim), rows(groups, dim), rows(heads, width)
        kernel.run(x, dt, b, c, None, pool, states, layer, SsmTensors(rates), out)
    return calls


@each_arch
@pytest.mark.parametrize("layer", [MAMBA1, MAMBA2], ids=lambda layer: layer.family)
def test_a_step_reads_nothing_from_the_device(arch, layer, no_sync):
    with no_sync():
        prompts, decodes = launches(arch, layer, prefill(3, 5, 700)), launches(arch, layer, decode(4, 3))
    assert len(prompts) == 1 + {"mamba1": 3, "mamba2": 4}[layer.family]
    assert len(decodes) == 2


@pytest.mark.parametrize("layer", [MAMBA1, MAMBA2], ids=lambda layer: layer.family)
def test_a_part_without_requests_launches_nothing(layer):
    assert not launches("gfx942", layer, prefill(0, 0, 0))
    assert not launches("gfx942", layer, decode(0, 1))


@each_arch
@pytest.mark.parametrize("dim", [8, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_products_cover_a_chunk(arch, dim, dtype):
    """Both kernels cut a chunk alike; a block of float32, or of a deep state, takes no more memory than one of bf16."""
    for chunk in (1, 8, 64, 256, 300):
        layer = Layer.mamba2(num_heads=3, head_dim=16, state_dim=dim, chunk=chunk, dtype=dtype)
        prepare, local, passed, scanned = launches(arch, layer, prefill(2, 3, 500))[1:]
        made, used = prepare.kernel.options, scanned.kernel.options
        assert (made["ROWS"], made["BLOCKS"]) == (used["ROWS"], used["BLOCKS"])
        assert made["ROWS"] * made["BLOCKS"] >= chunk and made["SPAN"] >= chunk
        assert used["ROWS"] * max(dim, 128) * dtype.itemsize <= 64 * 128 * 2
        assert local.grid[1] == scanned.grid[1] == prepare.grid[0] == 3 and passed.grid[2] == 2


def test_only_the_number_of_requests_and_chunks_changes_a_launch():
    """What a graph freezes is the grid; lengths, slots and chunk ends are read on the device."""
    one, other = (launches("gfx942", MAMBA2, replace(prefill(3, 5, 700), max_query_len=n)) for n in (300, 700))
    assert [call.grid for call in one] == [call.grid for call in other]
    assert [call.kernel.options for call in one] == [call.kernel.options for call in other]


def test_copies_of_all_pools_are_one_launch():
    pools = [torch.zeros(4, 3, 40), torch.zeros(4, 4, 32, 32, dtype=torch.bfloat16), torch.zeros(4, 7)[:, :5]]
    pairs, groups = torch.tensor([[0, 1]]), [pools[:1], [], pools[1:]]
    with recorded(portable.describe("gfx942")) as calls:
        state_copy.state_copy(groups, pairs, torch.tensor([0, 0, 0, 1]).int())
        state_copy.state_copy(groups, pairs[:0], torch.zeros(4).int())
        state_copy.state_copy([], pairs, torch.zeros(1).int())
    assert len(calls) == 1
    assert calls[0].arguments[0][:, 3].tolist() == [0, 2, 2, 2]
    assert calls[0].grid == (1 + 2 + 1,)  # 480, 8192 and 20 bytes in words of 4: 1024 of them a program


def test_words_are_as_wide_as_every_pool_allows():
    even, odd = torch.zeros(4, 2048), torch.zeros(4, 3, dtype=torch.bfloat16)
    assert state_copy._tables.of([[even]])[1] == 16
    assert state_copy._tables.of([[even], [odd]])[1] == 2
    rows, *_ = state_copy._tables.of([[], [even]])
    assert rows.tolist() == [[even.data_ptr(), 8192, 8192, 1]]


def test_the_same_memory_as_another_type_is_another_pool():
    pools = [torch.zeros(4, 6), torch.zeros(4, 6)]
    one = torch.tensor([0, 1]).int()
    with recorded(portable.describe("gfx942")) as calls:
        state_copy.state_copy([pools[:1]], torch.tensor([[0, 1]]), one)
        state_copy.state_copy([[pools[0].view(torch.bfloat16)[:, :6]]], torch.tensor([[0, 1]]), one)
        state_copy.state_copy([[pools[0].view(torch.int32)]], torch.tensor([[0, 1]]), one)
    assert [call.arguments[0][0, 2].item() for call in calls] == [24, 12, 24]


def test_a_slot_with_gaps_is_refused():
    with pytest.raises(ValueError, match=r"pools\[1\]\[0\] has strides \(12, 4, 1\)"):
        state_copy._tables.of([[torch.zeros(4, 3)], [torch.zeros(4, 3, 4)[..., :3]]])


@each_arch
def test_every_recurrent_operation_is_served(arch):
    target = portable.describe(arch)
    for layer in (MAMBA1, MAMBA2, Layer.mamba2(num_heads=80), Layer.mamba2(num_heads=64, num_groups=8)):
        for op in (Op.CONV1D, Op.SSD, Op.STATE_UPDATE):
            able = [each for each in KERNELS if each.caps.op is op and not each.why_not(target, layer, Needs())]
            assert len(able) == 1


def test_other_layers_are_refused():
    target = portable.describe("gfx942")
    for kernel in KERNELS:
        if kernel.caps.op in (Op.SSD, Op.STATE_UPDATE):
            assert any(
                "family 'gqa'" in reason
                for reason in kernel.why_not(target, Layer.gqa(num_heads=1, head_dim=64), Needs())
            )
    assert set(KERNELS) <= set(load_kernels())
