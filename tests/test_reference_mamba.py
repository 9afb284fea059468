"""The oracle of recurrent layers against other ways to say the same, and the contract against wrong kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import conv1d, silu, softplus

import portable
from portable.backends import reference_mamba as reference
from portable.backends import torch_mamba
from portable.chunks import aligned_chunks
from portable.conformance import cells, contract, recurrent
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer
from portable.states import DecodeStates, PrefillStates, SsmTensors

KERNELS = {kernel.caps.op: kernel for kernel in reference.KERNELS}
FAST = KERNELS | {kernel.caps.op: kernel for kernel in torch_mamba.KERNELS}
LAYERS = (
    Layer.mamba2(num_heads=4, head_dim=3, state_dim=5, num_groups=2, dtype=torch.float64, state_dtype=torch.float64),
    Layer.mamba1(num_channels=6, state_dim=4, dtype=torch.float64, state_dtype=torch.float64),
)
WIDTH = 4
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.family)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(context: int, new: int, slot: int, source: int | None = None) -> PrefillStates:
    """One request that leaves its state in a slot, from the state of `source`, or of the slot itself."""
    pieces = aligned_chunks([context], [new], 8)
    return PrefillStates(
        requests=slice(0, 1),
        tokens=slice(0, new),
        cu_seqlens_q=integers(0, new),
        has_initial=torch.tensor([context > 0]),
        initial_indices=integers(slot if source is None else source),
        state_indices=integers(slot),
        cu_chunks=torch.tensor(pieces.cu_seqlens),
        chunk_requests=torch.tensor(pieces.request),
        chunk_state_indices=integers(*[-1] * (len(pieces.request) - 1), *[slot] * (new > 0)),
        last_chunks=torch.tensor(pieces.last),
        checkpoint_chunks=None,
        conv_requests=integers(0),
        conv_offsets=integers(0),
        conv_block=64,
        max_query_len=new,
        pad_slot=-1,
    )


def decode(slots: list[list[int]], initial: list[int], lens: list[int]) -> DecodeStates:
    cu = integers(0, *torch.tensor(lens).cumsum(0).tolist())
    most = max(lens)
    return DecodeStates(
        slice(0, len(lens)), slice(0, sum(lens)), cu, integers(*initial), torch.tensor(slots).int(), None, most, -1
    )


class Sequence:
    """One sequence of a layer: its inputs, and what the oracle makes of pieces of it."""

    def __init__(self, layer: Layer, tokens: int, seed: int = 0, kernels: dict[Op, Kernel] = KERNELS) -> None:
        normal = torch.Generator().manual_seed(seed)
        heads, groups, dim = layer.num_heads, layer.num_groups, layer.state_dim
        shapes = ((heads, layer.qk_head_dim), (heads,), (groups, dim), (groups, dim), (heads, layer.qk_head_dim))
        self.parts = [torch.randn(tokens, *shape, generator=normal).double() for shape in shapes]
        rates = torch.randn(*((heads, dim) if layer.family == "mamba1" else (heads,)), generator=normal)
        rest = (torch.randn(heads, generator=normal).double() for _ in range(2))
        self.tensors = SsmTensors(-rates.double().exp(), *rest)
        self.kernels, self.layer, self.pool = (
            kernels,
            layer,
            torch.full((4, heads, layer.qk_head_dim, dim), torch.nan, dtype=torch.float64),
        )
        channels = heads * layer.qk_head_dim
        self.x, self.weight = self.parts[0].reshape(tokens, -1), torch.randn(channels, WIDTH, generator=normal).double()
        self.conv_pool = torch.full((4, WIDTH - 1, channels), torch.nan, dtype=torch.float64)

    def run(self, first: int, end: int, states: PrefillStates | DecodeStates) -> torch.Tensor:
        """Both operations of tokens [first, end), side by side."""
        x, dt, b, c, z = (part[first:end] for part in self.parts)
        out, conv = torch.empty_like(x), torch.empty_like(self.x[first:end])
        op = Op.SSD if isinstance(states, PrefillStates) else Op.STATE_UPDATE
        self.kernels[op].run(x, dt, b, c, z, self.pool, states, self.layer, self.tensors, out)
        self.kernels[Op.CONV1D].run(self.x[first:end], self.weight, None, self.conv_pool, states, conv, True)
        return torch.cat([out.flatten(1), conv], 1)


def dense(sequence: Sequence) -> torch.Tensor:
    """All tokens at once, without states: attention whose mask is a product of decays."""
    x, dt, b, c, z = sequence.parts
    heads, group = x.shape[1], x.shape[1] // b.shape[1]
    steps = softplus(dt + sequence.tensors.dt_bias)  # [T, H]
    sums = (steps[..., None] * sequence.tensors.a.reshape(heads, -1)).cumsum(0)  # [T, H, 1 or N]
    decay = sums[:, None] - sums[None]  # [T, T, H, 1 or N]
    mask = torch.ones(len(x), len(x)).tril().bool()[..., None, None]
    decay = torch.where(mask, decay, -torch.inf).exp()
    keys, queries = (part.repeat_interleave(group, 1) for part in (b, c))
    weights = (queries[:, None] * keys[None] * decay).sum(-1)  # [T, T, H]
    out = torch.einsum("ijh,jh,jhp->ihp", weights, steps, x) + sequence.tensors.d[:, None] * x
    return (out * silu(z)).flatten(1)


@each_layer
@given(tokens=st.integers(1, 20), seed=st.integers(0, 9))
def test_a_scan_is_attention_with_decays(layer, tokens, seed):
    sequence = Sequence(layer, tokens, seed)
    got = sequence.run(0, tokens, prefill(0, tokens, 1))
    conv = conv1d(sequence.x.T[None], sequence.weight[:, None], groups=len(sequence.weight), padding=WIDTH - 1)
    want = torch.cat([dense(sequence), silu(conv[0, :, :tokens].T)], 1)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernels", [KERNELS, FAST], ids=["reference", "torch"])
@each_layer
@given(pieces=st.lists(st.integers(1, 80) | st.integers(1, 3), min_size=1, max_size=6), drafts=st.booleans())
def test_pieces_give_what_one_call_gives(kernels, layer, pieces, drafts):
    """Prefills and decodes in any order: outputs, and both states, are those of the whole."""
    whole, parts, at = Sequence(layer, sum(pieces)), Sequence(layer, sum(pieces), kernels=kernels), 0
    want, got = whole.run(0, sum(pieces), prefill(0, sum(pieces), 1)), []
    for turn, new in enumerate(pieces):
        if drafts and turn % 2:
            got += [parts.run(at, at + new, decode([[3] * (new - 1) + [1]], [1], [new]))]
        else:
            got += [parts.run(at, at + new, prefill(at, new, 1))]
        at += new
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-10, atol=1e-10)
    for pool, right in ((parts.pool, whole.pool), (parts.conv_pool, whole.conv_pool)):
        torch.testing.assert_close(pool[1], right[1], rtol=1e-10, atol=1e-10)


@each_layer
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_rejected_draft_leaves_the_state_of_what_was_accepted(layer, accepted):
    plain, drafted = Sequence(layer, 8), Sequence(layer, 8)
    for sequence in (plain, drafted):
        sequence.run(0, 4, prefill(0, 4, 0))
    drafted.run(4, 7, decode([[1, 2, 3]], [0], [3]))
    plain.run(4, 4 + accepted, prefill(4, accepted, 0))
    for pool, right in ((drafted.pool, plain.pool), (drafted.conv_pool, plain.conv_pool)):
        torch.testing.assert_close(pool[accepted], right[0])


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_piece_shorter_than_the_window_keeps_the_shared_prefix(new, goes_on):
    """Its state goes to its own slot, made of the old inputs (or zeros, whatever the slot held) and the new ones."""
    pool = torch.full((3, 3, 1), torch.nan)
    pool[1] = torch.tensor([[1.0], [2.0], [3.0]])
    states = prefill(3 if goes_on else 0, new, slot=2, source=1)
    x, out = torch.arange(4.0, 4 + new)[:, None], torch.empty(new, 1)
    reference.conv1d(x, torch.ones(1, 4), None, pool, states, out, False)
    front = [1.0, 2.0, 3.0] if goes_on else [0.0, 0.0, 0.0]
    assert pool[2, :, 0].tolist() == (front + x[:, 0].tolist())[-3:]
    assert pool[1, :, 0].tolist() == [1.0, 2.0, 3.0]
    assert out[-1].item() == sum(([*front, *x[:, 0].tolist()])[-4:])


@pytest.mark.parametrize("kernels", [KERNELS, FAST], ids=["reference", "torch"])
@given(st.lists(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=9), min_size=1, max_size=3))
def test_copies_run_in_order(kernels, lists):
    """As assignments one after the other do, in every pool of each group; a list is never half done."""
    groups, want = [], []
    for pairs in lists:
        groups.append([torch.arange(6.0)[:, None].repeat(1, 3), torch.arange(6)[:, None, None].repeat(1, 2, 2)])
        want.append(list(range(6)))
        for come, go in pairs:
            if come >= 0 and go >= 0:
                want[-1][go] = want[-1][come]
    copies = torch.tensor(list(chain(*lists)), dtype=torch.int64).reshape(-1, 2)
    cu_copies = integers(0, *torch.tensor([len(pairs) for pairs in lists]).cumsum(0).tolist())
    kernels[Op.STATE_COPY].run(groups, copies, cu_copies)
    for pools, held in zip(groups, want, strict=True):
        assert all(pool.flatten(1)[:, 0].tolist() == held for pool in pools)


# What kernels have been seen to do, each as a change to the right ones.


def edited(**fields: object) -> Callable[..., None]:
    """The kernel sees other states than it is given."""

    def run(*given: object) -> None:
        states = next(value for value in given if isinstance(value, PrefillStates | DecodeStates))
        known = {name: make(states) for name, make in fields.items() if hasattr(states, name)}  # type: ignore[operator]
        changed = [replace(states, **known) if value is states else value for value in given]
        RUN[0](*changed)

    return run


def without(**fields: object) -> Callable[..., None]:
    """The kernel ignores a tensor of the layer."""

    def run(*given: object) -> None:
        RUN[0](*[value._replace(**fields) if isinstance(value, SsmTensors) else value for value in given])

    return run


def not_gated(x, dt, b, c, z, *rest):
    RUN[0](x, dt, b, c, None, *rest)


def groups_interleaved(x, dt, b, c, z, pool, states, layer, tensors, out):
    order = torch.arange(b.shape[1]).repeat(pool.shape[1] // b.shape[1])
    RUN[0](x, dt, b[:, order], c[:, order], z, pool, states, layer, tensors, out)


def padding_too(x, *rest):
    RUN[0](x, *rest)
    next(each for each in reversed(rest) if isinstance(each, torch.Tensor))[-1] = 0


def not_activated(x, weight, bias, pool, states, out, activate):
    RUN[0](x, weight, bias, pool, states, out, False)


def no_bias(x, weight, bias, *rest):
    RUN[0](x, weight, None, *rest)


def window_reversed(x, weight, *rest):
    RUN[0](x, weight.flip(1), *rest)


RUN: list[Callable[..., None]] = [reference.scan]  # the right kernel
SEEN = edited(initial_indices=lambda states: torch.full_like(states.initial_indices, states.pad_slot))
ANYWAY = edited(has_initial=lambda states: torch.ones_like(states.has_initial))
NEIGHBOUR = edited(initial_indices=lambda states: states.initial_indices.roll(1))
FORGOTTEN = edited(
    chunk_state_indices=lambda states: torch.full_like(states.chunk_state_indices, states.pad_slot),
    state_indices=lambda states: torch.full_like(states.state_indices, states.pad_slot),
)
FAULTS = {
    Op.SSD: {
        "no initial state": SEEN,
        "a state of nobody": ANYWAY,
        "a neighbour's state": NEIGHBOUR,
        "no states stored": FORGOTTEN,
        "no d": without(d=None),
        "no bias": without(dt_bias=None),
        "no softplus": without(dt_softplus=False),
        "no limit": without(dt_limit=(0.0, float("inf"))),
        "not gated": not_gated,
        "groups interleaved": groups_interleaved,
        "padding written": padding_too,
    },
    Op.STATE_UPDATE: {"no initial state": SEEN, "a neighbour's state": NEIGHBOUR, "no states stored": FORGOTTEN},
    Op.CONV1D: {
        "no initial state": SEEN,
        "a state of nobody": ANYWAY,
        "no states stored": FORGOTTEN,
        "not activated": not_activated,
        "no bias": no_bias,
        "window reversed": window_reversed,
        "padding written": padding_too,
    },
}


@pytest.mark.parametrize(("op", "fault"), [(op, fault) for op, faults in FAULTS.items() for fault in faults])
def test_the_contract_sees(op, fault):
    RUN[:] = [KERNELS[op].run]
    wrong = replace(KERNELS[op], run=FAULTS[op][fault])
    with pytest.raises((AssertionError, IndexError), match=r"wrong|written|out of bounds"):
        for case in cells.cases(KERNELS[op], portable.detect("cpu")):
            contract.check(wrong, case)


def test_the_contract_sees_wrong_copies():
    def at_once(pools, copies, cu_copies):
        for group, (first, end) in zip(pools, pairwise(cu_copies.tolist()), strict=True):
            live = copies[first:end][(copies[first:end] >= 0).all(1)]
            for pool in group:
                pool[live[:, 1]] = pool[live[:, 0]].clone()

    def group_of_a_pair_ignored(pools, copies, cu_copies):
        reference.state_copy([list(chain(*pools))], copies[: cu_copies[-1]], integers(0, int(cu_copies[-1])))

    def list_to_its_end(pools, copies, cu_copies):
        reference.state_copy(pools, copies, torch.cat([cu_copies[:-1], integers(len(copies))]))

    for wrong in (at_once, group_of_a_pair_ignored, list_to_its_end):
        with pytest.raises(AssertionError, match="differ"):
            for case in cells.cases(KERNELS[Op.STATE_COPY], portable.detect("cpu")):
                contract.check(replace(KERNELS[Op.STATE_COPY], run=wrong), case)


def test_every_step_of_the_contract_is_asked():
    for op in (Op.CONV1D, Op.SSD, Op.STATE_UPDATE):
        steps = {case.call.step for case in cells.cases(KERNELS[op], portable.detect("cpu"))}
        assert steps == set(recurrent.AXES[op]["step"])


def test_a_kernel_says_what_it_cannot():
    caps = replace(KERNELS[Op.SSD].caps, families={"mamba2"}, kv_dtypes=(), dtypes={torch.bfloat16})
    kernel, target = Kernel(caps, reference.scan), portable.detect("cpu")
    assert kernel.why_not(target, Layer.mamba2(num_heads=4, state_dtype=torch.bfloat16), Needs()) == ()
    reasons = kernel.why_not(target, Layer.mamba1(num_channels=4), Needs())
    assert reasons[0] == "family 'mamba1' is not one of mamba2" and "state dtype float32" in reasons[1]
