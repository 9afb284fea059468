"""Attempts to break graphs: failing captures, dropped objects, modes, slots that are used for everything in turns."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from launched import captured
from recording import RULES, CaptureError, Recorder

from portable import Attention, Batch, Layer, Mamba, MlaAttention, MlaWeights, UnsupportedError
from portable.backends import reference, reference_mamba, reference_steps
from portable.block_table import BlockTable
from portable.graphs import Graphs
from portable.kernel import Op
from portable.padding import padded
from portable.platform.graphs import recording, tensors, using
from portable.sizes import Size, ladder
from portable.upload import ALIGNMENT
from portable.variants import cross

PAGE, WIDTH, REQS, PAGES = 4, 8, 5, 60
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
LIMITS = {"page_size": PAGE, "device": "cpu", "max_reqs": REQS, "max_tokens": 40, "max_seq_len": PAGE * WIDTH}
ORACLES = (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
ROWS = np.arange(REQS * WIDTH).reshape(REQS, WIDTH)  # pages of each request


@pytest.fixture
def recorder(request, monkeypatch):
    """A vendor's runtime (the stricter one's), and the reference as kernels that it captures."""
    kernels = captured(*ORACLES)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    recorder = Recorder(RULES[getattr(request, "param", "amd")])
    with using(recorder):
        yield recorder


class World:
    """Attention over pages, its caches, and what it is asked for at random."""

    def __init__(self, seed=0, **layer):
        self.attn, self.rng = Attention(Layer.gqa(**HEADS, **layer), **LIMITS), np.random.default_rng(seed)
        self.cache = tuple(torch.randn(PAGES, PAGE, 2, 8) for _ in range(2))

    def forward(self, plans, q, k, v):
        self.attn.write(k, v, self.cache, plans[0])
        return self.attn.run(q, self.cache, plans[0]).out

    def graphs(self, sizes, **options):
        return Graphs(self.forward, [self.attn], sizes, **options)

    def step(self, queries=1, reqs=None):
        """Of any number of requests, on pages in any order, with a table of any width that holds them."""
        rng, rows = self.rng, self.rng.integers(0, REQS + 1) if reqs is None else reqs
        new = np.full(rows, queries)
        lens = new + rng.integers(0, PAGE * WIDTH - queries + 1, rows) // rng.integers(1, 9)
        width = max(int(-(-lens.max(initial=1) // PAGE)), int(rng.integers(1, WIDTH + 4)))
        table = np.full((rows, width), PAGES - 1)
        table[:, :WIDTH] = rng.permuted(ROWS, axis=1)[rng.permutation(REQS)[:rows], :width]
        return Batch.from_lens(new, lens, block_table=table, page_size=PAGE)

    def inputs(self, step):
        return tuple(torch.randn(step.num_tokens, heads, 8) for heads in (4, 2, 2))

    def right(self, step, q):
        """By a plan of the step as it is, once its tokens are written."""
        return self.attn.run(q, self.cache, self.attn.plan(step, slot=99)).out

    def check(self, graphs, step):
        given = self.inputs(step)
        torch.testing.assert_close(graphs(step, *given), self.right(step, given[0]))


@pytest.mark.parametrize("layer", [{}, {"window": 6}, {"chunk": 8}], ids=["full", "window", "local"])
def test_slots_that_are_planned_padded_and_as_they_are_in_turns(recorder, layer):
    """Two objects, whose slots are used for padded and for other plans as well; batches of none to all requests."""
    world, kinds = World(**layer), set()
    sizes = [*ladder(REQS), *ladder(REQS, queries=4)], [Size(REQS), Size(REQS, 4), Size(REQS, 6, tokens=24)]
    objects = [world.graphs(each, slot=10 * i) for i, each in enumerate(sizes)]
    for _ in range(60):
        graphs, step = objects[world.rng.integers(2)], world.step(world.rng.choice([1, 4]))
        q, k, v = world.inputs(step)
        kind = str(world.rng.choice(["graph", "graph", "padded", "as it is"]))
        if kind == "graph":
            out = graphs(step, q, k, v)
        elif kind == "padded":
            size = graphs.size_of(step)
            more = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, size.padded_tokens - len(x))) for x in (q, k, v)]
            out = world.forward([world.attn.plan(step, pad_to=size, slot=graphs.slot)], *more)
            assert not out[step.num_tokens :].any()
            out = out[: step.num_tokens]
        else:
            out = world.forward([world.attn.plan(step, slot=graphs.slot)], q, k, v)
        kinds.add((kind, step.num_reqs))
        torch.testing.assert_close(out, world.right(step, q), msg=lambda text, kind=kind: f"{kind}: {text}")
    assert {("graph", 0), ("graph", REQS), ("padded", 0)} <= kinds


def test_a_table_that_is_written_read_by_part_and_left_alone_in_turns(recorder):
    """Rows of a `BlockTable` that grow, shrink, move and go, with arrays of the host in between, on two slots."""
    world, table, lens = World(seed=3), BlockTable(REQS, WIDTH), np.zeros(REQS, np.int64)
    objects = [world.graphs(ladder(REQS), slot=slot) for slot in (0, 4)]
    for turn in range(50):
        rng, row = world.rng, int(world.rng.integers(REQS))
        lens[row] = rng.integers(1, PAGE * WIDTH)
        pages = rng.permutation(ROWS[row])[: -(-lens[row] // PAGE)]
        table.clear(row)
        table.write(row, 0, pages)
        if turn % 7 == 0:  # requests trade their places, pages and all
            other, kept = (row + 1) % REQS, table.pages[row].copy()
            table.move(other, row)
            table.write(other, 0, kept)
            lens[[row, other]] = lens[[other, row]]
        live = int(rng.integers(0, REQS + 1))
        live = live if lens[:live].all() else int((lens == 0).argmax())
        given = table if turn % 3 else table.pages[:live].copy()
        world.check(
            objects[rng.integers(2)], Batch.from_lens([1] * live, lens[:live], block_table=given, page_size=PAGE)
        )


@pytest.mark.parametrize("recorder", RULES, indirect=True)
def test_a_capture_that_fails_leaves_all_as_it_was(recorder):
    world = World()
    good, step = world.graphs([1, REQS], slot=5), world.step(reqs=3)
    world.check(good, step)
    faults = {
        "reads": (lambda *x: float(x[0].sum()), CaptureError),
        "waits": (lambda *x: recorder.synchronize(), CaptureError),
        "raises": (lambda *x: {}["thrown"], KeyError),
    }
    for name, (fault, error) in faults.items():
        now = [True]

        def forward(plans, *given, name=name, now=now, fault=fault):
            out = world.forward(plans, *given)
            if now[0] and (name != "raises" or recorder.is_current_stream_capturing()):
                fault(out)
            return out

        graphs = Graphs(forward, [world.attn], [2, REQS])
        with pytest.raises(error):
            graphs(step, *world.inputs(step))
        assert not graphs.captured and not recorder.is_current_stream_capturing()
        assert recorder.current_stream() == "the caller's"
        world.check(good, step)
        now[0] = False
        world.check(graphs, step)
        world.check(graphs, world.step(reqs=2))
        assert graphs.captured == (Size(REQS), Size(2))


def test_a_capture_that_the_runtime_gives_up_tells_what_was_wrong_in_it():
    """As torch does it: its error at the end hides the one before, and it stays on the stream of the capture."""

    class Module:
        stream, CUDAGraph = 0, object

        def current_stream(self, device):
            return self.stream

        def set_stream(self, stream):
            self.stream = stream

        @contextmanager
        def graph(self, graph, pool=None):
            self.stream = 1
            try:
                yield
            except ValueError:
                raise RuntimeError("operation failed due to a previous error during capture") from None
            self.stream = 0

    module, device = Module(), torch.device("cpu")
    with recording(module, object(), device):
        pass
    with pytest.raises(ValueError, match="read a tensor") as found, recording(module, object(), device, pool=(0, 1)):
        raise ValueError("read a tensor")
    assert "previous error" in str(found.value.__cause__) and module.stream == 0


def test_an_object_is_dropped_while_another_one_runs(recorder):
    world = World()
    keep, views = world.graphs(ladder(REQS)), []
    for turn in range(3):
        other = world.graphs([*ladder(REQS), *ladder(REQS, queries=2)], slot=3)
        for reqs in (1, 3, 5):
            world.check(keep, world.step(reqs=reqs))
            world.check(other, world.step(queries=1 + turn % 2, reqs=reqs))
        step = world.step(reqs=4)
        given = world.inputs(step)
        views.append((other(step, *given), world.right(step, given[0])))
        del other
        gc.collect()
        world.check(keep, world.step(reqs=2))
    for out, right in views:  # a result outlives the object that it came from
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("made", [True, False])
def test_what_is_made_in_inference_mode_is_used_outside_and_the_other_way_round(recorder, made, used):
    world = World()
    graphs = world.graphs([REQS, Size(REQS, 2)])
    for turn, mode in enumerate((made, used, made, used)):
        with torch.inference_mode(mode):
            world.check(graphs, world.step(queries=1 + turn % 2, reqs=1 + turn))
            plan = world.attn.plan(world.step(reqs=2), pad_to=REQS, slot=7)
            world.attn.plan(world.step(reqs=2), slot=7)
            assert not plan.batch.seq_lens.is_inference() and not plan.batch.block_table.is_inference()


def test_padded_plans_lie_in_the_callers_workspace(recorder):
    for attn in (
        Attention(Layer.gqa(**HEADS, chunk=8), **LIMITS),
        MlaAttention(Layer.mla(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=4, dtype=torch.float32), **LIMITS),
    ):
        need, step = attn.workspace_bytes(slots=2), World().step(reqs=3)
        memory = torch.full((need,), 7, dtype=torch.uint8)
        attn.use_workspace(memory[1:])  # of any address
        for slot in range(2):
            batch = attn.plan(step, pad_to=4, slot=slot).batch
            for tensor in (batch.seq_lens, batch.block_table, batch.slot_mapping):
                assert memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + need
                assert tensor.data_ptr() % ALIGNMENT == 0
        with pytest.raises(ValueError, match=r"workspace has \d+ bytes left, and a slot takes \d+"):
            attn.plan(step, pad_to=4, slot=2)
        attn.plan(step, pad_to=2 + REQS // 2, slot=1)  # a slot that has its memory keeps it
    for wrong in (
        torch.zeros(9), torch.zeros(9, 2, dtype=torch.uint8), torch.zeros(18, dtype=torch.uint8)[::2],
        torch.zeros((), dtype=torch.uint8), torch.zeros(9, dtype=torch.int8), torch.zeros(1).byte().expand(9),
        torch.zeros(9, dtype=torch.uint8, device="meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"workspace is .* on .*; it must be \[n\] uint8 on cpu, dense"):
            attn.use_workspace(wrong)
    with torch.inference_mode(), pytest.raises(ValueError, match="workspace is an inference tensor"):
        attn.use_workspace(torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="slots is 0"):
        attn.workspace_bytes(slots=0)


@pytest.mark.parametrize("first", [*range(17), 127])
def test_a_workspace_of_any_address_is_aligned_within_and_holds_the_slots_it_was_measured_for(recorder, first):
    attn, step = World().attn, World().step(reqs=3)
    need, memory = attn.workspace_bytes(slots=2), torch.full((1 << 17,), 7, dtype=torch.uint8)
    with torch.inference_mode(first % 2 == 0):
        attn.use_workspace(memory[first : first + need])
        plans = [attn.plan(step, pad_to=REQS, slot=slot) for slot in range(2)]
    for tensor in tensors([plan.parts for plan in plans]):
        assert tensor.data_ptr() % 16 == 0  # what kernels prepare besides is not in it
    assert memory[:first].eq(7).all() and memory[first + need :].eq(7).all()


def test_a_workspace_that_is_too_small_or_in_use_is_refused_when_it_is_given(recorder):
    attn = World().attn
    need = attn.workspace_bytes(slots=1)
    memory = torch.zeros(3 * need, dtype=torch.uint8)
    first = -memory.data_ptr() % ALIGNMENT
    short = need - ALIGNMENT - 1
    for start, size, left in ((first, short, short), (first + 1, need - 2, short), (first, 0, 0)):
        said = f"{size} bytes, {left} of them from a multiple of {ALIGNMENT} on, and a slot takes {need - ALIGNMENT};"
        with pytest.raises(ValueError, match=f"workspace has {said} it must be workspace_bytes"):
            attn.use_workspace(memory[start : start + size])
    attn.use_workspace(memory[:need])
    attn.plan(World().step(reqs=1), pad_to=2)
    for start, end in ((0, 3 * need), (0, need), (need - 2 * ALIGNMENT, 3 * need)):
        with pytest.raises(ValueError, match="workspace holds a plan slot already; give memory"):
            attn.use_workspace(memory[start:end])
    attn.use_workspace(memory[need:])
    attn.plan(World().step(reqs=1), pad_to=2, slot=1)


def test_steps_of_other_kinds_keep_memory_of_their_own(recorder):
    """The same size with slots and without, causal and not, on one slot: what a graph of one reads, another leaves."""
    world = World()
    first, second = world.step(reqs=3), world.step(reqs=2)
    kinds = [
        (lambda step: step),
        lambda step: replace(step, slot_mapping=None),
        lambda step: replace(step, causal=False),
    ]
    for _ in range(3):
        for kind in kinds:
            for step in (first, second):
                plan = world.attn.plan(kind(step), pad_to=4)
                assert plan.batch.seq_lens.tolist() == [*step.host_seq_lens, *[0] * (4 - step.num_reqs)]
                assert (plan.batch.slot_mapping is None) is (kind is kinds[1])


def test_what_finished_requests_left_in_padded_rows_stays_out_of_the_plan(recorder):
    """An engine's own padding, whose lengths and flags are those of requests that are gone."""
    world, computed = World(), np.array([9, 20, 3, 0], np.int32)
    new, prompt = np.array([1, 1, 0, 0], np.int32), np.array([5, 8, 100, 7])
    batch = Batch.from_tensors(
        torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        torch.from_numpy(computed + new),
        torch.from_numpy(ROWS[:4].astype(np.int32)),
        torch.tensor([2 * PAGE + 1, WIDTH * PAGE + 20]),
        page_size=PAGE,
        is_prefilling=computed < prompt,
        num_reqs=2,
    )
    graphs = world.graphs([4])
    world.check(graphs, replace(batch, is_prefilling=None))
    plan = world.attn.plan(batch, pad_to=4)
    assert plan.batch.seq_lens.tolist() == [10, 21, 0, 0] and plan.batch.slot_mapping.tolist()[2:] == [-1, -1]
    assert not plan.batch.block_table[2:].any()
    slots = np.array([[5], [2], [7], [2]])
    mamba = Mamba(Layer.mamba2(num_heads=2, head_dim=4, state_dim=8, dtype=torch.float32), device="cpu", max_reqs=4)
    assert mamba.plan(batch, slots, pad_to=4).decode.state_indices.flatten().tolist() == [5, 2, -1, -1]


def test_lengths_of_any_integer_type_come_to_where_the_capture_read_them(recorder):
    """Captured at four times 1; then three requests and a pad, then four of 3, each on other pages."""
    world, where = World(), set()
    graphs = world.graphs([4])
    for lens in ([1, 1, 1, 1], [5, 9, 2], [3, 3, 3, 3]):
        for dtype in (np.int64, np.int32):
            table = world.rng.permutation(PAGES)[: len(lens) * WIDTH].reshape(-1, WIDTH).astype(dtype)
            lengths = np.array(lens, dtype)
            step = Batch.from_lens(np.ones_like(lengths), lengths, block_table=table, page_size=PAGE)
            world.check(graphs, step)
            plan = world.attn.plan(step, pad_to=4)
            wanted = padded(step, Size(4))
            for name in ("cu_seqlens_q", "seq_lens", "slot_mapping", "block_table"):
                there = getattr(plan.batch, name)
                assert torch.equal(there, getattr(wanted, name)), name
                where.add((name, there.data_ptr()))
    assert len(where) == 4


def test_objects_may_share_a_slot_and_inputs_may_want_gradients(recorder):
    """Each call plans anew, so what another one left in the slot is gone."""
    world = World()
    objects = [world.graphs(ladder(REQS)) for _ in range(2)]
    for turn in range(12):
        step = world.step(reqs=1 + turn % REQS)
        given = [x.requires_grad_(turn % 3 == 0) for x in world.inputs(step)]
        with torch.no_grad():
            wanted = objects[turn % 2](step, *given).clone()
            torch.testing.assert_close(wanted, world.right(step, given[0]))
        assert torch.equal(objects[turn % 2](step, *given), wanted)


def test_chunks_do_not_advance_on_the_device(recorder):
    world = World(chunk=8)
    with pytest.raises(UnsupportedError, match="pad_to has ahead 2; a layer with chunks does not advance"):
        world.attn.plan(world.step(reqs=1), pad_to=Size(2, ahead=2))


def test_more_sizes_take_no_more_memory(recorder):
    """Their tables are views of one, and not a copy for each."""
    world, where, prepared = World(), set(), 0
    for size in (*ladder(REQS), Size(REQS, 4), Size(REQS, 6, tokens=24)):
        plan = world.attn.plan(world.step(size.queries, reqs=1), pad_to=size)
        where.add(plan.batch.block_table.data_ptr())
        prepared += plan.segments[0][0].prepared.nbytes
    assert len(where) == 1 and world.attn.workspace_bytes() < world.attn.workspace_bytes(slots=1) + prepared


def test_steps_of_other_kinds_have_graphs_of_their_own(recorder):
    world = World(5)
    graphs = Graphs(lambda plans, q: world.attn.run(q, world.cache, plans[0]).out, [world.attn], [Size(2, 3)])
    step = Batch.from_lens([3, 3], [9, 7], block_table=ROWS[:2], page_size=PAGE)
    kinds = step, replace(step, causal=False), cross(step, np.array([5, 2]), torch.tensor(ROWS[2:4], dtype=torch.int32))
    q = torch.randn(6, 4, 8)
    for _ in range(2):
        for each in kinds:
            wanted = world.attn.run(q, world.cache, world.attn.plan(each, slot=99)).out
            torch.testing.assert_close(graphs(each, q), wanted)
    assert graphs.captured == (Size(2, 3),)


@pytest.mark.parametrize("rows", [5, 7])
def test_inputs_have_a_row_for_each_new_token(recorder, rows):
    world = World(6)
    graphs, step = world.graphs([Size(2, 3)]), Batch.from_lens([3, 3], [9, 7], block_table=ROWS[:2], page_size=PAGE)
    with pytest.raises(ValueError, match=f"an input has {rows} rows; the step has 6 new tokens"):
        graphs(step, torch.randn(rows, 4, 8), *world.inputs(step)[1:])
    world.check(graphs, step)


@pytest.mark.parametrize("pad_to", [None, 2])
def test_a_step_that_cannot_be_planned_leaves_no_plan_of_two_steps(monkeypatch, pad_to):
    failing = []

    def prepare(segment, layer):
        if failing:
            raise UnsupportedError("out of luck")
        return (segment.seq_lens + 7) // 8  # as `captured` prepares

    kernels = [replace(each, prepare=prepare) if each.caps.op is Op.PAGED else each for each in captured(*ORACLES)]
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    world, q = World(7), torch.randn(2, 4, 8)
    first, second = (Batch.from_lens([1, 1], lens, block_table=ROWS[:2], page_size=PAGE) for lens in ([9, 7], [3, 2]))
    world.attn.plan(second, pad_to=pad_to)
    plan = world.attn.plan(first, pad_to=pad_to)
    wanted = world.attn.run(q, world.cache, plan).out
    failing.append(None)
    with pytest.raises(UnsupportedError, match="out of luck"):
        world.attn.plan(second, pad_to=pad_to)
    failing.clear()
    if pad_to is None:
        assert torch.equal(world.attn.run(q, world.cache, plan).out, wanted)
    else:
        with pytest.raises(ValueError, match="plan is stale"):
            world.attn.run(q, world.cache, plan)
    assert torch.equal(world.attn.run(q, world.cache, world.attn.plan(first, pad_to=pad_to)).out, wanted)
    with pytest.raises(ValueError, match="the batch has 33 tokens in one sequence"):
        world.attn.plan(Batch.from_lens([1], [33], block_table=[range(9)], page_size=PAGE), pad_to=pad_to)
    world.attn.run(q, world.cache, world.attn.plan(first, pad_to=pad_to))


@pytest.mark.parametrize("where", ["host", "device"])
def test_steps_advance_as_far_as_their_pages_reach(recorder, monkeypatch, where):
    if where == "device":
        for module in ("persistent", "refresh"):
            monkeypatch.setattr(f"portable.{module}.near", lambda batch: False)
    attn = World(8).attn
    for lens, table in (([8], [[5, 6]]), ([PAGE * WIDTH], [range(WIDTH + 1)])):
        with pytest.raises(ValueError, match="and 1 more read"):
            attn.plan(Batch.from_lens([1], lens, block_table=table, page_size=PAGE), pad_to=Size(1, ahead=1))
    plan = attn.plan(Batch.from_lens([1], [7], block_table=[[5, 6]], page_size=PAGE), pad_to=Size(1, ahead=1))
    assert attn.advance(plan).tolist() == [7]
    with pytest.raises(ValueError, match="the plan has advanced 1 times"):
        attn.advance(plan)


def test_pages_below_zero_are_refused_once_a_step_reaches_them(recorder):
    attn = World(9).attn

    def plan(lens, table, **options):
        step = Batch.from_lens([1] * len(lens), lens, block_table=table, page_size=PAGE)
        return attn.plan(step, pad_to=Size(2, **options))

    for _ in range(2):
        with pytest.raises(ValueError, match="is -1; a live page id"):
            plan([4], [[5, -1]], ahead=2)
        plan([9, 4], [[5, 6, 7], [8, -1, 9]])
        with pytest.raises(ValueError, match="is -1; a live page id"):
            plan([10, 10], [[5, 6, 7], [8, -1, 9]])
        plan([10, 10], [[5, 6, 7], [8, 1, 9]])


def test_every_other_row_of_a_table_is_not_the_table(recorder):
    world, table = World(10), BlockTable(REQS, WIDTH)
    for row in range(4):
        table.write(row, 0, ROWS[row])
    step = Batch.from_lens([1, 1], [9, 7], block_table=table, page_size=PAGE)
    other = step.with_group(torch.from_numpy(table.rows(4))[::2], None, PAGE)
    q = torch.randn(2, 4, 8)
    wanted = world.attn.run(q, world.cache, world.attn.plan(other, slot=99)).out
    assert torch.equal(world.attn.run(q, world.cache, world.attn.plan(other, pad_to=2)).out, wanted)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("where", ["host", "device"])
def test_latents_of_many_and_few_requests_replay_one_capture(recorder, monkeypatch, page, where):
    """40 requests, 3, then 64, of two groups; and in a size of any lengths, idle requests of no length among them."""
    if where == "device":
        for module in ("persistent", "refresh"):
            monkeypatch.setattr(f"portable.{module}.near", lambda batch: False)
    layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
                      dtype=torch.float64)  # fmt: skip
    width, rng = 128 // page, np.random.default_rng(page)
    limits = {"page_size": page, "device": "cpu", "max_reqs": 64, "max_tokens": 256, "max_seq_len": 128}
    attn, exact = MlaAttention(layer, **limits), MlaAttention(layer, **limits, backend="reference")
    weights = MlaWeights.from_kv_b_proj(torch.randn(2 * 14, 16, dtype=layer.dtype), layer)
    pools = [torch.randn(64 * width, page, 20, dtype=layer.dtype) for _ in range(2)]

    def forward(plans, *x):
        for plan, pool in zip(plans, pools, strict=True):
            attn.write(*x[2:], pool, plan)
        return tuple(attn.run(*x, pool, plan, weights).out for plan, pool in zip(plans, pools, strict=True))

    graphs = Graphs(forward, [attn, attn], [Size(64), Size(8, 4, tokens=20)])
    for reqs, idle in ((40, False), (3, False), (64, False), (8, True), (0, False), (5, True), (64, False)):
        new = rng.integers(0, 4, reqs) if idle else np.ones(reqs, int)
        new[2:3] *= not idle
        new *= np.cumsum(new) <= 20 if idle else 1
        lens = new + rng.integers(0, 124, reqs) * (new > 0)
        tables = [rng.permutation(64 * width).reshape(64, width)[:reqs] for _ in pools]
        groups = [Batch.from_lens(new, lens, block_table=table, page_size=page) for table in tables]
        x = [torch.randn(new.sum(), *shape, dtype=layer.dtype) for shape in ((2, 8), (2, 4), (16,), (4,))]
        for out, group, pool in zip(graphs(groups, *x), groups, pools, strict=True):
            torch.testing.assert_close(out, exact.run(*x, pool, exact.plan(group), weights).out)
    assert len(graphs.captured) == 2
