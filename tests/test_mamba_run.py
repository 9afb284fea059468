"""`Mamba`: a sequence in pieces, beside others, gives what it gives alone and whole; states and refusals."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from launched import launches

import portable
from portable import Batch, Layer, Mamba, RunningStates, SsmTensors, allocate_states
from portable.backends import reference_mamba
from portable.kernel import Op
from portable.mamba_copies import plan_state_copies
from portable.mamba_slot import one_pad_slot

MAMBA2 = Layer.mamba2(num_heads=4, head_dim=6, state_dim=8, num_groups=2, chunk=4, dtype=torch.float32)
MAMBA1 = Layer.mamba1(num_channels=10, state_dim=8, chunk=4, dtype=torch.float32)


class Tokens:
    """Random inputs of a layer for a sequence, and its weights."""

    def __init__(self, layer, length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.Generator().manual_seed(7)

        def randn(*shape, of=generator):
            return torch.randn(*shape, generator=of)

        self.layer = layer
        heads, width, shared = layer.num_heads, layer.qk_head_dim, (layer.num_groups, layer.state_dim)
        self.x, self.dt = randn(length, layer.conv_channels), randn(length, heads)
        self.z = randn(length, heads, width)
        self.bc = randn(length, 2, *shared)  # of Mamba-1, whose B and C come from elsewhere
        a = (heads, layer.state_dim) if layer.family == "mamba1" else (heads,)
        self.weight, self.bias = randn(layer.conv_channels, 4, of=weights), randn(layer.conv_channels, of=weights)
        self.tensors = SsmTensors(-randn(*a, of=weights).exp(), randn(heads, of=weights), randn(heads, of=weights))

    def step(self, mamba, pools, plan, parts):
        """The outputs of parts (Tokens, slice) of a step, in its order."""
        layer = self.layer
        x, dt, z, bc = (
            torch.cat([getattr(tokens, name)[at] for tokens, at in parts]) for name in ("x", "dt", "z", "bc")
        )
        x = mamba.conv(x, pools.conv, plan, self.weight, self.bias)
        b, c = bc[:, 0], bc[:, 1]
        if layer.family == "mamba2":
            wide, shared = layer.num_heads * layer.qk_head_dim, layer.num_groups * layer.state_dim
            x, b, c = x.split([wide, shared, shared], -1)
            b, c = (part.unflatten(-1, (layer.num_groups, layer.state_dim)) for part in (b, c))
        x = x.unflatten(-1, (layer.num_heads, layer.qk_head_dim))
        return mamba.run(x, dt, b, c, pools.ssm, plan, self.tensors, z=z)

    def whole(self):
        mamba, pools = Mamba(self.layer, device="cpu"), allocate_states(self.layer, 1, "cpu")
        length = len(self.x)
        out = self.step(mamba, pools, mamba.plan(Batch.from_lens([length], [length]), [[0]]), [(self, slice(None))])
        return out, pools


def poisoned(layer, slots):
    pools = allocate_states(layer, slots, "cpu")
    for pool in pools:
        pool.fill_(torch.nan)
    return pools


@pytest.mark.parametrize("layer", [MAMBA2, MAMBA1], ids=["mamba2", "mamba1"])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_pieces_beside_others_in_any_mode_give_the_whole(layer, mode):
    """Chunks of 1 to 6 tokens, among them decodes, of three sequences; every block end has the state up to there."""
    sequences = [Tokens(layer, length, seed) for seed, length in enumerate((19, 8, 14))]
    block = 4
    mamba = Mamba(layer, device="cpu", mode=mode, block_size=None if mode == "none" else block)
    pools = poisoned(layer, 20)
    table = np.random.default_rng(0).permutation(20)[:18].reshape(3, 6)
    states = None if mode == "none" else RunningStates(3, block_size=block, mode=mode)
    done, outs = [0, 0, 0], [[], [], []]
    rng = np.random.default_rng(1)
    while rows := [row for row in range(3) if done[row] < len(sequences[row].x)]:
        new = {row: min(int(rng.integers(1, 7)), len(sequences[row].x) - done[row]) for row in rows}
        rows.sort(key=lambda row: 2 if not done[row] else new[row] > 1)
        c, q = [done[row] for row in rows], [new[row] for row in rows]
        running = None
        if states is not None:
            mamba.copy(([pools], plan_state_copies(states.before(rows, c, q), table)))
            running = states.running[rows]
        plan = mamba.plan(Batch.from_lens(q, np.add(c, q)), table[rows], running=running)
        parts = [(sequences[row], slice(done[row], done[row] + new[row])) for row in rows]
        found = sequences[0].step(mamba, pools, plan, parts).split(q)
        if states is not None:
            moves = states.after(rows, c, q, [0] * len(rows), [1] * len(rows))
            assert moves.rows.size == 0
        for row, out in zip(rows, found, strict=True):
            outs[row].append(out)
            done[row] += new[row]
    for row, tokens in enumerate(sequences):
        whole, end = tokens.whole()
        torch.testing.assert_close(torch.cat(outs[row]), whole, rtol=1e-5, atol=2e-5)
        last = 0 if mode == "none" else (len(tokens.x) - 1) // block
        for pool, expected in zip(pools, end, strict=True):
            torch.testing.assert_close(pool[table[row, last]], expected[0], rtol=1e-5, atol=2e-5)
        for column in range(len(tokens.x) // block if mode == "all" else 0):
            part = Tokens(layer, len(tokens.x), row)
            part.x, part.dt, part.z, part.bc = (
                getattr(part, n)[: (column + 1) * block] for n in ("x", "dt", "z", "bc")
            )
            for pool, expected in zip(pools, part.whole()[1], strict=True):
                torch.testing.assert_close(pool[table[row, column]], expected[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("layer", [MAMBA2, MAMBA1], ids=["mamba2", "mamba1"])
def test_rejected_drafts_leave_no_trace(layer):
    """Verify steps of a token and two drafts, of which 0 to 2 count; the drafts are another sequence's tokens."""
    right, wrong = Tokens(layer, 16), Tokens(layer, 16, seed=5)
    mamba = Mamba(layer, device="cpu", num_draft=2)
    pools, table = poisoned(layer, 4), [[2, 0, 3]]
    plan = mamba.plan(Batch.from_lens([4], [4]), table)
    outs, done, count = [right.step(mamba, pools, plan, [(right, slice(0, 4))])], 4, 1
    for accepted in (1, 3, 2, 1, 3, 2):
        plan = mamba.plan(Batch.from_lens([3], [done + 3], is_prefilling=[False]), table, num_accepted=[count])
        parts = [(right, slice(done, done + accepted)), (wrong, slice(done + accepted, done + 3))]
        outs.append(right.step(mamba, pools, plan, parts)[:accepted])
        done, count = done + accepted, accepted
        if done + 3 > 16:
            break
    torch.testing.assert_close(torch.cat(outs), right.whole()[0][:done], rtol=1e-5, atol=2e-5)


def test_a_padded_step_writes_live_states_alone(monkeypatch):
    kernels = tuple(launches(kernel) for kernel in reference_mamba.KERNELS)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    mamba = Mamba(MAMBA2, device="cpu", max_reqs=4)
    pools = allocate_states(MAMBA2, 9, "cpu")
    for pool in pools:
        pool.copy_(torch.randn(pool.shape))
    before = [pool.clone() for pool in pools]
    tokens = Tokens(MAMBA2, 4)
    plan = mamba.plan(Batch.from_lens([1, 1, 1], [9, 3, 5]), [[5], [2], [7]], pad_to=4)
    out = tokens.step(mamba, pools, plan, [(tokens, slice(None))])
    assert plan.decode.state_indices.flatten().tolist() == [5, 2, 7, -1]
    assert not out[3].any()
    assert mamba.workspace_bytes() == mamba._slots[0].nbytes > 0
    for pool, old in zip(pools, before, strict=True):
        changed = (pool != old).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [2, 5, 7]


def test_a_second_group_of_a_padded_step_leaves_the_first_groups_memory(monkeypatch):
    """Both are captured: their addresses stay from step to step, and each keeps its own slots."""
    kernels = tuple(launches(kernel) for kernel in reference_mamba.KERNELS)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    mamba, seen = Mamba(MAMBA2, device="cpu", max_reqs=4), []
    for table, others in (([[5], [2], [7]], [[15], [12], [17]]), ([[1], [3]], [[11], [13]])):
        batch = Batch.from_lens([1] * len(table), [9] * len(table))
        plan = mamba.plan(batch, table, pad_to=4)
        kept = [getattr(plan.decode, name).clone() for name in ("initial_indices", "state_indices")]
        other = mamba.with_group(plan, np.array(others), slot=1)
        assert torch.equal(plan.decode.initial_indices, kept[0]) and torch.equal(plan.decode.state_indices, kept[1])
        rows = [-1] * (4 - len(table))
        assert plan.decode.state_indices.flatten().tolist() == [slot for (slot,) in table] + rows
        assert other.decode.state_indices.flatten().tolist() == [slot for (slot,) in others] + rows
        seen.append([each.decode.state_indices.data_ptr() for each in (plan, other)])
    assert seen[0] == seen[1] and len(set(seen[0])) == 2


def test_a_checkpoint_in_a_shared_slot_is_not_written():
    """Two requests go on from a prefix's state in a slot of its own, by chunks that are shorter than the window."""
    shared, mamba = Tokens(MAMBA2, 6), Mamba(MAMBA2, device="cpu", mode="all", block_size=4)
    pools = poisoned(MAMBA2, 5)
    shared.step(mamba, pools, mamba.plan(Batch.from_lens([4], [4]), [[3, -1]]), [(shared, slice(0, 4))])
    kept = [pool[3].clone() for pool in pools]
    plan = mamba.plan(Batch.from_lens([2, 2], [6, 6]), [[3, 1], [3, 2]])
    out = shared.step(mamba, pools, plan, [(shared, slice(4, 6))] * 2)
    assert all(torch.equal(pool[3], old) for pool, old in zip(pools, kept, strict=True))
    torch.testing.assert_close(out.view(2, 2, 4, 6), shared.whole()[0][4:].expand(2, 2, 4, 6), rtol=1e-5, atol=2e-5)


def test_two_groups_with_other_state_types_share_a_step():
    half = Layer.mamba2(num_heads=4, head_dim=6, state_dim=8, num_groups=2, chunk=4, dtype=torch.float32,
                        state_dtype=torch.float64)  # fmt: skip
    tokens = Tokens(MAMBA2, 5)
    mamba = Mamba(MAMBA2, device="cpu", max_reqs=2)
    one, two = poisoned(MAMBA2, 2), poisoned(MAMBA2, 3)
    plan = mamba.plan(Batch.from_lens([5], [5]), [[1]])
    other = mamba.with_group(plan, np.array([[2]]), slot=1)
    outs = [tokens.step(mamba, pools, made, [(tokens, slice(None))]) for pools, made in ((one, plan), (two, other))]
    assert torch.equal(*outs)
    assert torch.equal(one.ssm[1], two.ssm[2])
    assert allocate_states(half, 1, "cpu").ssm.dtype == torch.float64
    with pytest.raises(ValueError, match="slot 0 holds the plan itself"):
        mamba.with_group(plan, np.array([[0]]), slot=0)


def test_copies_run_in_all_pools_by_one_call():
    mamba = Mamba(MAMBA2, device="cpu", mode="align", block_size=4)
    layers = [allocate_states(MAMBA2, 6, "cpu", torch.float16) for _ in range(3)]
    for pools in layers:
        for pool in pools:
            pool.copy_(torch.randn(pool.shape))
    before = [[pool.clone() for pool in pools] for pools in layers]
    states, table = RunningStates(2, block_size=4), np.array([[0, 1], [0, 3]])
    moves = states.before([0, 1], [4, 4], [1, 2])
    mamba.copy((layers, plan_state_copies(moves, table)))
    for pools, old in zip(layers, before, strict=True):
        for pool, was in zip(pools, old, strict=True):
            assert torch.equal(pool, was[[0, 0, 2, 0, 4, 5]])
    assert plan_state_copies(moves, table).tolist() == [[0, 1], [0, 3]]


def test_groups_of_other_layers_types_and_block_sizes_are_copied_by_one_launch():
    """Each group's pools by its own pairs; a step in which no group moves a state launches nothing."""
    runs = []
    mamba = Mamba(MAMBA2, device="cpu", mode="align", block_size=4)
    kernel = mamba.choices["copy"].kernel

    def run(pools, copies, cu_copies):
        runs.append(cu_copies.tolist())
        kernel.run(pools, copies, cu_copies)

    mamba.choices = {"copy": replace(mamba.choices["copy"], kernel=replace(kernel, run=run))}
    double = replace(MAMBA1, dtype=torch.bfloat16, kv_dtype=torch.float64)
    groups, wanted = [], []
    for block, layer, table in (
        (4, MAMBA2, [[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]),  # two requests behind a shared prefix
        (8, double, [[5, 2, 6], [5, 4, 1]]),
        (64, MAMBA1, [[3], [4]]),
    ):
        pools = [allocate_states(layer, 9, "cpu") for _ in range(2)]
        for pool in (pool for pair in pools for pool in pair):
            pool.copy_(torch.arange(9).view(-1, *[1] * (pool.dim() - 1)).expand(pool.shape))
        moves = RunningStates(2, block_size=block).before([0, 1], [8, 8], [1, 9])
        groups.append((pools, plan_state_copies(moves, np.array(table))))
        wanted.append(list(range(9)))
        for come, go in groups[-1][1].tolist():
            wanted[-1][go] = come
    assert [len(pairs) for _, pairs in groups] == [2, 2, 0]
    mamba.copy(*groups)
    assert runs == [[0, 2, 4, 4]]
    for (pools, _), right in zip(groups, wanted, strict=True):
        assert all(pool.flatten(1).T.tolist() == [right] * pool[0].numel() for pair in pools for pool in pair)
    mamba.copy(*((pools, pairs[:0]) for pools, pairs in groups))
    mamba.copy()
    assert len(runs) == 1


def test_copies_to_where_no_pool_is_are_refused():
    mamba, pools = Mamba(MAMBA2, device="cpu"), allocate_states(MAMBA2, 4, "cpu")
    with pytest.raises(ValueError, match="a pool has 4 slots; its group copies slot 4"):
        mamba.copy(([pools], np.array([[1, 2]])), ([pools], np.array([[4, 2]])))
    with pytest.raises(ValueError, match="a pool is on meta; this Mamba runs on cpu"):
        mamba.copy(([allocate_states(MAMBA2, 4, "meta")], np.array([[1, 2]])))


def test_kernels_that_skip_other_slots_do_not_share_a_plan():
    kernels = [choice.kernel for choice in Mamba(MAMBA2, device="cpu").choices.values()]
    other = replace(kernels[0], caps=replace(kernels[0].caps, name="other", pad_slot=0))
    assert one_pad_slot(*kernels) == -1 and one_pad_slot(other, other) == 0
    with pytest.raises(portable.UnsupportedError, match="skips slot -1 and other skips slot 0"):
        one_pad_slot(other, *kernels[1:])


def test_a_compiled_layer_serves_later_steps_without_a_recompile():
    mamba, tokens = Mamba(MAMBA2, device="cpu"), Tokens(MAMBA2, 12)
    pools, others = allocate_states(MAMBA2, 4, "cpu"), allocate_states(MAMBA2, 4, "cpu")
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    def layer(x, pool, plan):
        return mamba.conv(x, pool, plan, tokens.weight, tokens.bias)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for step, slot in enumerate((2, 3, 2)):
        at = slice(4 * step, 4 * step + 4)
        plan = mamba.plan(Batch.from_lens([4], [4 * step + 4]), [[slot]])
        with torch.inference_mode():
            assert torch.equal(compiled(tokens.x[at], pools.conv, plan), layer(tokens.x[at], others.conv, plan))
    assert len(frames) == 1
    torch._dynamo.reset()


def test_choices_tell_why():
    mamba = Mamba(MAMBA2, device="cpu", backend="reference")
    assert {choice.kernel.name for choice in mamba.choices.values()} == {
        f"reference.{op}" for op in (Op.CONV1D, Op.SSD, Op.STATE_UPDATE, Op.STATE_COPY)
    }
    text = str(Mamba(MAMBA2, device="cpu").explain())
    assert text.splitlines()[1].startswith("layer   mamba2, 4 heads of 6 in 2 groups, state_dim 8")
    assert re.search(r"^ssd .*\n    not for cpu: kernels of triton \(\d\)$", text, re.MULTILINE)


def test_a_plan_lives_until_the_next_on_its_slot():
    mamba, pools, tokens = Mamba(MAMBA2, device="cpu"), allocate_states(MAMBA2, 4, "cpu"), Tokens(MAMBA2, 3)
    first = mamba.plan(Batch.from_lens([3], [3]), [[0]])
    other = mamba.plan(Batch.from_lens([3], [3]), [[1]], slot=1)
    tokens.step(mamba, pools, first, [(tokens, slice(None))])
    mamba.plan(Batch.from_lens([3], [3]), [[0]])
    tokens.step(mamba, pools, other, [(tokens, slice(None))])
    with pytest.raises(ValueError, match="plan is stale"):
        tokens.step(mamba, pools, first, [(tokens, slice(None))])
    handle = other.handle
    del mamba, other
    gc.collect()
    with pytest.raises(ValueError, match=f"handle {handle} belongs to no plan"):
        portable.ops.state_conv(tokens.x, tokens.weight, None, pools.conv, tokens.x.clone(), True, handle)


@pytest.mark.parametrize(("lens", "in_place"), [((1, 3), False), ((1, 1, 1, 1), True)])
def test_an_out_that_is_an_input_is_written_in_place_by_decodes_alone(lens, in_place):
    """A kernel's programs read rows of a prompt that others write: Triton's left a wrong state of `conv(x, out=x)`."""
    mamba, tokens = Mamba(MAMBA2, device="cpu"), Tokens(MAMBA2, 5)
    plan = mamba.plan(Batch.from_lens(lens, [9] * len(lens)), [[row] for row in range(len(lens))])
    slot, seen = mamba._slot(0), []

    def watched(kernel):
        def run(*given):
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            out, x = tensors[-1], tensors[0]
            seen.append(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
            return kernel.run(*given)

        return replace(kernel, run=run)

    slot.convolve, slot.update, slot.prefill = map(watched, (slot.convolve, slot.update, slot.prefill))
    for first in (0, 1):  # the rows themselves, and those behind them
        results = []
        for shared in (False, True):
            pools, memory = allocate_states(MAMBA2, 4, "cpu"), tokens.x.clone()
            x, out = memory[:4], memory[first : first + 4] if shared else None
            results.append((mamba.conv(x, pools.conv, plan, tokens.weight, out=out), pools.conv))
            memory = tokens.z.clone()
            x, out = memory[:4], memory[first : first + 4] if shared else None
            given = tokens.dt[:4], *tokens.bc[:4].unbind(1), pools.ssm, plan, tokens.tensors
            results[-1] += mamba.run(x, *given, out=out), pools.ssm
            assert all(seen) is (shared and in_place and not first) and (any(seen) is all(seen))
            seen.clear()
        for alone, together in zip(*results, strict=True):
            assert torch.equal(alone, together)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 5)}, r"x has shape \[3, 5\]; it must be \[3, 56\]"),
        ({"x": torch.zeros(3, 56, dtype=torch.float64)}, "x is float64; the layer says float32"),
        ({"weight": torch.zeros(56, 3)}, r"weight has shape \[56, 3\]; it must be \[56, 4\]"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]"),
        ({"pool": torch.zeros(4, 56, 3)}, r"the convolution's pool has shape \[4, 56, 3\]; it must be \[4, 3, 56\]"),
        ({"pool": torch.zeros(1, 3, 56)}, "the convolution's pool has 1 slots; the step uses slot 2"),
        ({"out": torch.zeros(56).expand(3, 56)}, r"out has strides \[0, 1\]; its rows share memory"),
    ],
)
def test_a_convolution_names_what_does_not_fit(change, message):
    mamba, tokens = Mamba(MAMBA2, device="cpu"), Tokens(MAMBA2, 3)
    plan = mamba.plan(Batch.from_lens([3], [3]), [[2]])
    given = {"x": tokens.x, "weight": tokens.weight, "bias": tokens.bias, "pool": torch.zeros(4, 3, 56), **change}
    with pytest.raises(ValueError, match=message):
        mamba.conv(given["x"], given["pool"], plan, given["weight"], given["bias"], out=given.get("out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, 5)}, r"x has shape \[3, 4, 5\]; it must be \[3, 4, 6\]"),
        ({"dt": torch.zeros(3, 1)}, r"dt has shape \[3, 1\]; it must be \[3, 4\]"),
        ({"b": torch.zeros(3, 1, 8)}, r"b has shape \[3, 1, 8\]; it must be \[3, 2, 8\]"),
        ({"z": torch.zeros(2, 4, 6)}, "z has shape"),
        ({"pool": torch.zeros(4, 4, 8, 6)}, "the scan's pool has shape"),
        ({"pool": torch.zeros(4, 4, 6, 8, dtype=torch.float16)}, "the scan's pool is float16; the layer says float32"),
        ({"tensors": SsmTensors(torch.zeros(4, 8))}, r"tensors.a has shape \[4, 8\]; it must be \[4\]"),
        ({"tensors": SsmTensors(torch.zeros(4), torch.zeros(3))}, r"tensors.d has shape \[3\]"),
        ({"out": torch.zeros(4, 6).expand(3, 4, 6)}, r"out has strides \[0, 6, 1\]; its rows share memory"),
    ],
)
def test_a_scan_names_what_does_not_fit(change, message):
    mamba = Mamba(MAMBA2, device="cpu")
    plan = mamba.plan(Batch.from_lens([3], [3]), [[2]])
    given = {"x": torch.zeros(3, 4, 6), "dt": torch.zeros(3, 4), "b": torch.zeros(3, 2, 8), "c": torch.zeros(3, 2, 8),
             "pool": torch.zeros(4, 4, 6, 8), "tensors": SsmTensors(torch.zeros(4)), "z": None, **change}  # fmt: skip
    z = given.pop("z")
    x, dt, b, c, pool, tensors = (given[name] for name in ("x", "dt", "b", "c", "pool", "tensors"))
    with pytest.raises(ValueError, match=message):
        mamba.run(x, dt, b, c, pool, plan, tensors, z=z, out=given.get("out"))


def test_what_a_mamba_was_not_made_for_is_refused():
    with pytest.raises(ValueError, match=r"layer\.family is 'gqa'; Mamba serves 'mamba1' and 'mamba2' layers"):
        Mamba(Layer.gqa(num_heads=2, head_dim=8), device="cpu")
    with pytest.raises(ValueError, match="block_size is 0"):
        Mamba(MAMBA2, device="cpu", mode="align")
    with pytest.raises(ValueError, match="mode is 'some'; it must be one of 'none', 'align', 'all'"):
        Mamba(MAMBA2, device="cpu", mode="some")
    with pytest.raises(ValueError, match="num_slots is 0"):
        allocate_states(MAMBA2, 0)
    mamba = Mamba(MAMBA2, device="cpu", max_reqs=2, max_tokens=4)
    with pytest.raises(ValueError, match="table has dtype float64"):
        mamba.plan(Batch.from_lens([1], [4]), np.array([[2.5]]))
    with pytest.raises(ValueError, match="the batch has 3 requests, above the 2"):
        mamba.plan(Batch.from_lens([1] * 3, [4] * 3), [[0]] * 3)
    with pytest.raises(ValueError, match="the batch has 5 tokens, above the 4"):
        mamba.plan(Batch.from_lens([5], [5]), [[0]])
    with pytest.raises(ValueError, match="pad_to has 3 requests, above the 2 that this Mamba"):
        mamba.plan(Batch.from_lens([1], [5]), [[0]], pad_to=3)
