"""Other projects' kernels as contestants, where they are installed; an absent one has its reason.

Projects whose kernels portable serves itself are contestants by those. Each function here takes a Problem and gives a
call that takes the number of a rotation, or None where the peer does not serve the workload. What an engine does once a
step is done before the timing. Arguments go by name, and only those that the installed version has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from portable.bench.problem import Problem
from portable.bench.workloads import FP8

Call = Callable[[int], object]
WORKSPACE = 128 << 20  # bytes, as its documentation has it
SPLITS = 16  # of the keys of a request, at most


class Peer(NamedTuple):
    modules: tuple[str, ...]  # where it may be, the newest place first
    name: str  # of the function in the module; empty: the module itself
    start: Callable[[Problem, Any], Call | None]
    tolerance: float = 1.5e-2


def load(device: torch.device, absent: dict[str, str], peers: Mapping[str, Peer] | None = None) -> dict[str, Any]:
    """name -> (peer, its function) of those that can be imported; why the others cannot is put into `absent`."""
    found: dict[str, Any] = {}
    for name, peer in (PEERS if peers is None else peers).items():
        if device.type == "cpu":
            absent[name] = "it needs a GPU"
            continue
        for module in peer.modules:
            try:
                imported = importlib.import_module(module)
                found[name] = peer, getattr(imported, peer.name) if peer.name else imported
                break
            except Exception as error:  # a package that is there and broken, too
                absent[name] = f"{type(error).__name__}: {error}"[:200]
        if name in found:
            absent.pop(name, None)
    return found


def calls(problem: Problem, peer: Peer, function: Any) -> Sequence[Callable[[], object]] | None:
    """One for each rotation; None where the peer does not serve the workload."""
    call = peer.start(problem, function)
    return None if call is None else [partial(call, i) for i in range(len(problem.rotations))]


def known(function: Any, **arguments: Any) -> dict[str, Any]:
    """The arguments that a function of the installed version takes.

    >>> known(lambda a, b: a, a=1, c=2)
    {'a': 1}
    """
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def table_of(problem: Problem, i: int) -> torch.Tensor:
    table = problem.rotations[i].block_table
    assert table is not None
    return table


def rows_of(problem: Problem, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of each request one after another, where each request's begin, and how full its last one is."""
    page = problem.work.page_size
    assert page is not None
    counts = (problem.seq_lens + page - 1) // page
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    table = table_of(problem, i)
    live = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return table[live], starts, ((problem.seq_lens - 1) % page + 1).int()


def flashinfer(problem: Problem, package: Any) -> Call | None:
    """Its wrappers, planned: the decode one for single tokens, else the paged or the ragged prefill."""
    work, layer = problem.work, problem.work.layer
    if layer.sinks or layer.kv_dtype == FP8:
        return None
    heads = {"num_qo_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}
    widths = {"head_dim": layer.qk_head_dim, "head_dim_qk": layer.qk_head_dim, "head_dim_vo": layer.v_head_dim}
    left = -1 if layer.window[0] is None else layer.window[0]
    how = {"sm_scale": layer.scale, "window_left": left, "q_data_type": layer.dtype, "kv_data_type": layer.kv_dtype}
    made = []
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device=problem.device)  # of one call after the other
    for i in range(len(problem.rotations)):
        if work.page_size is None:
            wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
            cu = problem.cu_seqlens_q
            asked = {"qo_indptr": cu, "kv_indptr": cu, "causal": True, **heads, **widths, **how}
        else:
            indices, starts, last = rows_of(problem, i)
            pages = {"page_size": work.page_size, **heads, **widths, **how}
            if problem.max_query_len == 1:
                wrapper = package.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=layer.group >= 4)
                asked = {"indptr": starts, "indices": indices, "last_page_len": last, **pages}
            else:
                wrapper = package.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
                names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
                asked = dict(zip(names, (problem.cu_seqlens_q, starts, indices, last), strict=True))
                asked |= {"causal": True, **pages}
        wrapper.plan(**known(wrapper.plan, **asked))
        made.append(wrapper)

    def call(i: int) -> object:
        turn = problem.rotations[i]
        if work.page_size is None:
            return made[i].run(turn.q, turn.kv.k, turn.kv.v)
        return made[i].run(turn.q, (turn.kv.k, turn.kv.v))

    return call


def unified(problem: Problem, function: Any) -> Call | None:
    """The one Triton kernel for decode and prefill over pages that two engines carry, each in its own version."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is None or layer.kv_dtype == FP8:
        return None
    one = torch.ones((len(work.seq_lens), layer.num_kv_heads), device=problem.device)
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.to(layer.dtype)
    window = (-1, -1) if layer.window[0] is None else layer.window

    def call(i: int) -> None:
        turn = problem.rotations[i]
        function(
            **known(
                function, q=turn.q, k=turn.kv.k, v=turn.kv.v, out=turn.out, cu_seqlens_q=problem.cu_seqlens_q,
                max_seqlen_q=problem.max_query_len, seqused_k=problem.seq_lens, max_seqlen_k=problem.max_seq_len,
                softmax_scale=layer.scale, causal=True, window_size=window, block_table=table_of(problem, i),
                softcap=0.0, q_descale=None, k_descale=one, v_descale=one, sinks=sinks,
            )
        )  # fmt: skip

    return call


def split(problem: Problem, function: Any) -> Call | None:
    """A Triton decode in parts of the keys, over slots of one token: every page is named by its tokens."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is None or problem.max_query_len > 1 or layer.kv_dtype == FP8 or layer.window[0] is not None:
        return None
    size, device = len(work.seq_lens), problem.device
    starts = torch.nn.functional.pad(problem.seq_lens.cumsum(0), (1, 0)).int()
    logits = torch.empty(size, layer.num_heads, SPLITS, layer.v_head_dim, device=device)
    lse = torch.empty(size, layer.num_heads, SPLITS, device=device)
    splits = ((problem.seq_lens + 511) // 512).clamp(1, SPLITS).int()
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.to(layer.dtype)
    tokens = [tokens_of(problem, i) for i in range(len(problem.rotations))]

    def call(i: int) -> None:
        turn = problem.rotations[i]
        assert turn.kv.v is not None
        function(
            **known(
                function, q=turn.q, k_buffer=turn.kv.k.flatten(0, 1), v_buffer=turn.kv.v.flatten(0, 1), o=turn.out,
                kv_indptr=starts, kv_indices=tokens[i], attn_logits=logits, attn_lse=lse, num_kv_splits=splits,
                max_kv_splits=SPLITS, sm_scale=layer.scale, k_scale=1.0, v_scale=1.0, logit_cap=0.0, sinks=sinks,
            )
        )  # fmt: skip

    return call


def tokens_of(problem: Problem, i: int) -> torch.Tensor:
    """The slot of every token of every request, one request after another, i64."""
    page, table = problem.work.page_size, table_of(problem, i)
    assert page is not None
    places = [torch.arange(length, device=table.device) for length in problem.work.seq_lens]
    return torch.cat([table[r, at // page].long() * page + at % page for r, at in enumerate(places)])


PEERS: Mapping[str, Peer] = {
    "flashinfer": Peer(("flashinfer",), "", flashinfer),
    "vllm unified": Peer(("vllm.v1.attention.ops.triton_unified_attention",), "unified_attention", unified, 4e-2),
    "aiter unified": Peer(
        ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention"),
        "unified_attention",
        unified,
        4e-2,
    ),
    "sglang decode": Peer(
        (
            "sglang.kernels.ops.attention.decode_attention",
            "sglang.srt.layers.attention.triton_ops.decode_attention",
        ),
        "decode_attention_fwd",
        split,
        4e-2,
    ),
}
