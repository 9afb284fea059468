"""Every argument of every public call, replaced by what it cannot be: refused by name, or rightly accepted."""

import inspect
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

import portable
from portable import (
    KV,
    Attention,
    Batch,
    BlockTable,
    Graphs,
    Layer,
    LayerTensors,
    Mamba,
    MlaAttention,
    MlaWeights,
    Needs,
    Op,
    RunningStates,
    Size,
    SsmTensors,
    allocate_cache,
    allocate_states,
    variants,
)
from portable.arguments import fits, hints_of, named
from portable.attention import load_kernels
from portable.mamba_copies import Moves

GQA = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
MLA = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, dtype=torch.float32)
MAMBA = Layer.mamba2(num_heads=2, head_dim=4, state_dim=8, dtype=torch.float32)
SMALL = dict(device="cpu", max_reqs=4, max_tokens=16)
ATTENTION = Attention(GQA, page_size=4, max_seq_len=16, **SMALL)
LATENT = MlaAttention(MLA, page_size=4, max_seq_len=16, **SMALL)
STATES = Mamba(MAMBA, **SMALL)
RUNNING, BLOCKS = RunningStates(4, block_size=4), BlockTable(rows=4, width=4)
MOVES = Moves(np.array([0]), np.array([0], np.int32), np.array([1], np.int32))


class Device:
    """The members of a device's module that `Graphs` takes; its graphs do nothing."""

    def graph_pool_handle(self) -> None: ...


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


TABLE, SLOTS, STATE_SLOTS = int32([0, 1], [2, 3]), torch.tensor([4, 8, 9, 10]), np.array([[1], [2]])
STEP = Batch.from_lens([1, 3], [5, 3], block_table=TABLE, page_size=4)
EACH = dict(causal=True, is_prefilling=[False, True])
LIMITS = dict(device="cpu", max_reqs=4, max_tokens=64, max_seq_len=64, num_pages=8, backend="reference")
TYPES = dict(dtype=torch.float32, kv_dtype=torch.float32, scale=1.0, batch_invariant=False)
SSM = dict(state_dim=8, conv_width=4, chunk=64, dtype=torch.float32, state_dtype=torch.float32)
ORDER = dict(threshold=1, uniform=False, short_extends_as_decodes=True)
GROUP = dict(block_table=TABLE, slot_mapping=SLOTS, slot=1)
COUNTS = dict(rows=[0], computed=[4], scheduled=[1])


def pages() -> KV:
    return allocate_cache(GQA, 8, 4, "cpu")


def graphs() -> Graphs:
    return Graphs(lambda plans, x: x, [STATES], [Size(4)], runtime=Device())


# Each public call, with a value for every parameter that it has; made anew each time, since tensors are written to and
# a plan lives until the next one.
CALLS: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    Layer.gqa: lambda: dict(
        num_heads=4, head_dim=8, num_kv_heads=2, v_head_dim=8, window=(3, 0), softcap=2.0, sinks=False, alibi=False,
        chunk=4, causal=True, cache_layout="strided", **TYPES),
    Layer: lambda: dict(asdict(GQA)),
    Layer.mla: lambda: dict(
        num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, **TYPES),
    Layer.mamba2: lambda: dict(num_heads=2, head_dim=4, num_groups=1, **SSM),
    Layer.mamba1: lambda: dict(num_channels=4, **SSM),
    Size: lambda: dict(reqs=4, queries=2, tokens=6, seq_len=64, ahead=0),
    Batch.from_lens: lambda: dict(
        query_lens=[1, 3], seq_lens=[5, 3], block_table=TABLE, page_size=4, device="cpu", **EACH),
    Batch.decode: lambda: dict(seq_lens=np.array([5, 3]), block_table=TABLE.numpy(), page_size=4),
    Batch.from_tensors: lambda: dict(
        cu_seqlens_q=int32(0, 1, 4), seq_lens=int32(5, 3), block_table=TABLE, slot_mapping=SLOTS, page_size=4,
        host_cu_seqlens_q=[0, 1, 4], host_seq_lens=[5, 3], exact=True, num_reqs=2, **EACH),
    Batch.from_token_table: lambda: dict(
        req_to_token=torch.arange(16).reshape(2, 8), rows=torch.tensor([0, 1]), query_lens=[1, 3], seq_lens=[5, 3],
        page_size=4, offsets=[0, 0], **EACH),
    STEP.with_group: lambda: dict(block_table=TABLE, slot_mapping=SLOTS, page_size=4),
    STEP.kinds: lambda: ORDER,
    STEP.split: lambda: ORDER,
    STEP.is_ordered: lambda: ORDER,
    variants.local: lambda: dict(batch=STEP, chunk=4),
    variants.local_size: lambda: dict(size=Size(4), chunk=4),
    variants.local_capacity: lambda: dict(num_reqs=4, num_tokens=8, chunk=4),
    variants.cross: lambda: dict(batch=STEP, encoder_lens=np.array([3, 0]), block_table=TABLE, page_size=4),
    variants.encoder: lambda: dict(
        encoder_lens=np.array([3, 0]), block_table=TABLE, page_size=4, first=np.array([True, False])),
    variants.draft: lambda: dict(batch=STEP, step=0),
    variants.verify: lambda: dict(batch=STEP, num_draft=1),
    variants.trim: lambda: dict(batch=STEP, left=3),
    variants.dead_pages: lambda: dict(batch=STEP, left=3),
    variants.shard: lambda: dict(batch=STEP, world=2, rank=0, block_table=TABLE, page_size=4, interleave=1),
    variants.shard_lens: lambda: dict(lens=np.array([5, 3]), world=2, rank=0, interleave=1),
    variants.prefix: lambda: dict(
        batch=Batch.from_lens([1], [5], block_table=TABLE[:1], page_size=4), length=4),
    variants.prefix_pays: lambda: dict(batch=STEP, length=512),
    variants.tree: lambda: dict(
        batch=STEP, parents=torch.tensor([[-1], [-1]]), slots=torch.tensor([[20], [21]]), depth=1),
    Attention: lambda: dict(layer=GQA, page_size=4, **LIMITS),
    ATTENTION.plan: lambda: dict(step=STEP, pad_to=None, slot=0),
    ATTENTION.warmup: lambda: dict(query_lens=(1,), return_lse=False, cache=pages(), tensors=LayerTensors()),
    ATTENTION.write: lambda: dict(
        k=normal(4, 2, 8), v=normal(4, 2, 8), cache=pages(), plan=ATTENTION.plan(STEP), tensors=LayerTensors()),
    ATTENTION.run: lambda: dict(
        q=normal(4, 4, 8), cache=pages(), plan=ATTENTION.plan(STEP), k=normal(4, 2, 8), v=normal(4, 2, 8),
        tensors=LayerTensors(), out=normal(4, 4, 8), return_lse=True),
    ATTENTION.update_block_table: lambda: dict(plan=ATTENTION.plan(STEP), **GROUP),
    ATTENTION.workspace_bytes: lambda: dict(slots=1),
    ATTENTION.use_workspace: lambda: dict(workspace=torch.zeros(1 << 16, dtype=torch.uint8)),
    ATTENTION.advance: lambda: dict(plan=ATTENTION.plan(STEP)),
    MlaAttention: lambda: dict(layer=MLA, page_size=4, workspace=64, **LIMITS),
    LATENT.plan: lambda: dict(step=STEP, pad_to=None, slot=0),
    LATENT.warmup: lambda: dict(
        query_lens=(1,), return_lse=False, cache=torch.zeros(8, 4, 20), tensors=LayerTensors()),
    LATENT.write: lambda: dict(
        kv_c=normal(4, 16), k_pe=normal(4, 4), cache=torch.zeros(8, 4, 20), plan=LATENT.plan(STEP),
        tensors=LayerTensors()),
    LATENT.run: lambda: dict(
        q_nope=normal(4, 2, 8), q_pe=normal(4, 2, 4), kv_c=normal(4, 16), k_pe=normal(4, 4),
        cache=torch.zeros(8, 4, 20), plan=LATENT.plan(STEP), weights=MlaWeights(normal(2, 8, 16), normal(2, 6, 16)),
        tensors=LayerTensors(), out=normal(4, 2, 6), return_lse=True),
    LATENT.update_block_table: lambda: dict(plan=LATENT.plan(STEP), **GROUP),
    LATENT.workspace_bytes: lambda: dict(slots=1),
    LATENT.use_workspace: lambda: dict(workspace=torch.zeros(1 << 16, dtype=torch.uint8)),
    LATENT.advance: lambda: dict(plan=LATENT.plan(STEP)),
    MlaWeights.from_kv_b_proj: lambda: dict(source=normal(28, 16), layer=MLA),
    Mamba: lambda: dict(
        layer=MAMBA, device="cpu", mode="align", block_size=4, num_draft=0, max_reqs=4, max_tokens=64,
        backend="reference"),
    STATES.warmup: lambda: dict(
        tensors=SsmTensors(-torch.rand(2), normal(2), normal(2)), gated=True, bias=True, conv_dtype=torch.float32),
    STATES.plan: lambda: dict(
        batch=STEP, table=STATE_SLOTS, num_accepted=[1, 1], running=[-1, -1], checkpoints=[-1, -1], pad_to=None,
        slot=0),
    STATES.with_group: lambda: dict(plan=STATES.plan(STEP, STATE_SLOTS), table=STATE_SLOTS, slot=1),
    STATES.conv: lambda: dict(
        x=normal(4, 24), pool=torch.zeros(4, 3, 24), plan=STATES.plan(STEP, STATE_SLOTS), weight=normal(24, 4),
        bias=normal(24), silu=True, out=normal(4, 24)),
    STATES.run: lambda: dict(
        x=normal(4, 2, 4), dt=normal(4, 2), b=normal(4, 1, 8), c=normal(4, 1, 8), pool=torch.zeros(4, 2, 4, 8),
        plan=STATES.plan(STEP, STATE_SLOTS), tensors=SsmTensors(-torch.rand(2), normal(2), normal(2)),
        z=normal(4, 2, 4), out=normal(4, 2, 4)),
    STATES.copy: lambda: dict(groups=(([allocate_states(MAMBA, 4, "cpu")], np.array([[1, 2]])),)),
    allocate_states: lambda: dict(layer=MAMBA, num_slots=4, device="cpu", conv_dtype=torch.float32),
    RunningStates: lambda: dict(max_reqs=4, block_size=4, mode="align", num_draft=0),
    RUNNING.before: lambda: COUNTS,
    RUNNING.after: lambda: dict(**COUNTS, drafts=[0], accepted=[1]),
    RUNNING.forget: lambda: dict(rows=([0],)),
    portable.plan_state_copies: lambda: dict(moves=MOVES, table=[[1, 2]]),
    Graphs: lambda: dict(
        fn=lambda plans, x: x, attentions=[STATES], sizes=[Size(4)], budget=1, slot=0, runtime=Device()),
    graphs().size_of: lambda: dict(steps=Batch.from_lens([1], [5])),
    BlockTable: lambda: dict(rows=4, width=4),
    BLOCKS.write: lambda: dict(row=0, column=1, pages=[1, 2]),
    BLOCKS.put: lambda: dict(rows=[0], columns=[1], pages=[2]),
    BLOCKS.move: lambda: dict(source=0, target=1),
    BLOCKS.clear: lambda: dict(row=0),
    BLOCKS.rows: lambda: dict(count=2),
    BLOCKS.since: lambda: dict(version=0),
    portable.merge_states: lambda: dict(
        outs=[normal(3, 2, 4)] * 2, lses=[normal(2, 3)] * 2, sinks=normal(2), out=normal(3, 2, 4), lse=normal(2, 3)),
    portable.copy_pages: lambda: dict(layer=GQA, source=pages(), target=pages(), pages=[(0, 1)]),
    allocate_cache: lambda: dict(layer=GQA, num_pages=2, page_size=4, device="cpu"),
    portable.detect: lambda: dict(device="cpu", machine=None),
    portable.describe: lambda: dict(arch="gfx942", product="MI300X"),
    portable.available_kernels: lambda: dict(device="cpu"),
    portable.select: lambda: dict(
        op=Op.PREFILL, target=ATTENTION.target, layer=GQA, needs=Needs(), requested=None, installed={},
        kernels=load_kernels(), order=None, verdict=None),
}  # fmt: skip


# What the message calls an argument, where it is not its name.
CALLED = {
    ("from_kv_b_proj", "source"): "kv_b_proj",
    ("select", "requested"): "backend",
    ("select", "kernels"): "kernel",
}
# What is taken, though no annotation says so, or refused in torch's words.
TAKEN = {
    *((f"Batch.{name}", "threshold", "float") for name in ("kinds", "split", "is_ordered")),  # lengths are held to it
    *(("prefix_pays", "length", kind) for kind in ("float", "negative")),
    ("BlockTable.since", "version", "negative"),  # too long ago
    *(("Graphs", "runtime", kind) for kind in ("none", "text", "float", "negative", "dtype")),  # any object
    *(("merge_states", name, "dtype") for name in ("sinks", "out", "lse")),  # cast
    *(("merge_states", name, "shape") for name in ("out", "lse")),
}


RUNS = ATTENTION.run, ATTENTION.write, LATENT.run, LATENT.write, STATES.run, STATES.conv  # a step's tensors alone

UNCHECKED = {
    "Batch.needs_exact",  # of variants
    "Graphs.capture",  # a device's
}


def wrong(kind: str, value: Any) -> Any:
    """What stands for a value: of its own shape with another dtype, or the other way round, where it is a tensor."""
    if kind in ("dtype", "shape"):
        if not isinstance(value, torch.Tensor):
            return torch.ones(3, dtype=torch.complex64)
        return value.to(torch.complex64) if kind == "dtype" else value[..., None, None]
    return {"none": None, "text": "text", "float": 1.5, "negative": -1}[kind]


def said(call: Callable[..., Any], given: dict[str, Any]) -> Exception | None:
    kinds = inspect.signature(call).parameters
    several = [name for name in given if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL]
    rest = [each for name in several for each in given[name]]
    try:
        call(*rest, **{name: value for name, value in given.items() if name not in several})
    except Exception as error:
        return error
    return None


def test_every_public_call_is_here():
    public = [getattr(portable, name) for name in portable.__all__] + [
        getattr(variants, name) for name in variants.__all__
    ]
    called = {inspect.unwrap(getattr(call, "__func__", call)) for call in CALLS}
    missing = {each.__qualname__ for each in public if inspect.isfunction(each) and inspect.unwrap(each) not in called}
    for owner in (Attention, MlaAttention, Mamba, Graphs, BlockTable, RunningStates, Batch, Layer):
        for name, member in inspect.getmembers(owner, inspect.isroutine):
            if name.startswith("_"):
                continue
            takes = len(inspect.signature(member).parameters) > (0 if inspect.ismethod(member) else 1)
            if takes and inspect.unwrap(getattr(member, "__func__", member)) not in called:
                missing.add(f"{owner.__name__}.{name}")
    assert missing == UNCHECKED


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_what_an_argument_cannot_be_is_refused_by_name(call):
    make, parameters = CALLS[call], inspect.signature(call).parameters
    hints = hints_of(inspect.unwrap(call.__init__ if isinstance(call, type) else call))
    assert set(make()) == set(parameters), "every parameter has a value"
    found = []
    for argument, parameter in parameters.items():
        for kind in ("none", "text", "float", "negative", "dtype", "shape"):
            given = make()
            if kind == "shape" and not isinstance(given[argument], torch.Tensor):
                continue
            value = wrong(kind, given[argument])
            several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            error = said(call, given | {argument: (value,) if several else value})
            if (call.__qualname__, argument, kind) in TAKEN:
                continue
            if error is None:
                flag = hints[argument] is bool  # taken by its truth
                if not flag and (kind not in ("none", "text", "float") or not fits(value, hints[argument])):
                    found.append(f"{argument}={kind}: accepted")
                continue
            words = rf"\b({argument}|{CALLED.get((call.__name__, argument), argument)})s?\b"
            if not isinstance(error, TypeError | ValueError) or not re.search(words, str(error)):
                found.append(f"{argument}={kind}: {error!r}"[:200])
    assert not found, "\n" + "\n".join(found)


def test_what_is_wrong_inside_an_argument_is_named():
    given = CALLS[ATTENTION.run]()
    for changed, message in (
        (
            {"cache": given["cache"][:1]},
            r"cache is a tuple \(Tensor\); it must be a tuple \(a tensor, a tensor or None\) or None",
        ),
        ({"tensors": LayerTensors(sinks="text")}, "tensors.sinks is 'text'; it must be a tensor or None"),
        ({"tensors": (None, None)}, r"tensors is a tuple \(NoneType, NoneType\); it must be a LayerTensors"),
    ):
        with pytest.raises(TypeError, match=message):
            ATTENTION.run(**given | changed)
    with pytest.raises(TypeError, match=r"query_lens is a list \(float\); it must be a sequence \(each an int\)"):
        ATTENTION.warmup(query_lens=[1.5])
    with pytest.raises(ValueError, match="table is ragged; its rows must be equally long"):
        STATES.plan(STEP, [[1], [2, 3]])


def test_what_lies_on_another_device_is_named():
    """Operations of torch on the meta device run nothing, so what runs is asked on a device."""
    given = CALLS[variants.tree]()
    for name in ("parents", "slots"):
        with pytest.raises(ValueError, match=f"{name} is on meta; the batch is on cpu"):
            variants.tree(**given | {name: given[name].to("meta")})


@pytest.mark.device
@pytest.mark.parametrize("call", RUNS, ids=lambda call: call.__qualname__)
def test_a_tensor_on_another_device_is_refused_by_name(call):
    for argument, value in CALLS[call]().items():
        if isinstance(value, torch.Tensor):
            error = said(call, CALLS[call]() | {argument: value.cuda()})
            assert isinstance(error, ValueError) and re.search(rf"\b{argument}\b", str(error)), (argument, error)


def test_what_stands_for_what_an_annotation_says_is_taken():
    """Numbers of numpy, and plain tuples for named ones."""
    k, v = allocate_cache(GQA, np.int64(8), np.int32(4), "cpu")
    ATTENTION.write(normal(4, 2, 8), normal(4, 2, 8), (k, v), ATTENTION.plan(STEP))
    portable.copy_pages(GQA, (k, v), (k, v), [(np.int64(0), 1)])
    STATES.copy(([tuple(allocate_states(MAMBA, 4, "cpu"))], np.array([[1, 2]])))
    assert variants.draft(STEP, np.int64(0)).num_tokens == 2


def test_an_error_that_no_argument_explains_stays_as_it_is():
    class Stop(Exception): ...

    def fail(x: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        named(fail)(1)
    with pytest.raises(TypeError, match=r"fail\(\) missing 1 required positional argument: 'x'"):
        named(fail)()
