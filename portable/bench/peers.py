"""Other projects' kernels as contestants, where they are installed; an absent one has its reason.

Projects whose kernels portable serves itself are contestants by those. Each function here takes a Problem and gives a
call that takes the number of a rotation, or None where the peer does not serve the workload. What an engine does once a
step is done before the timing. Arguments go by name, and only those that the installed version has.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from portable.bench.problem import Problem
from portable.bench.workloads import FP8
from portable.platform.detect import detect
from portable.ragged import cdiv, next_power_of_2

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
    """The arguments that a function of the installed version takes: all of them, where it takes any name.

    >>> known(lambda a, b: a, a=1, c=2), known(lambda a, **more: a, a=1, c=2)
    ({'a': 1}, {'a': 1, 'c': 2})
    """
    names = names_of(getattr(function, "__func__", function))  # the class's: an object is not kept
    return arguments if names is None else {name: value for name, value in arguments.items() if name in names}


@cache
def names_of(function: Any) -> frozenset[str] | None:
    """A function's parameters; None: any. Kept, since some calls are timed with what the host does for them."""
    parameters = inspect.signature(function).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)


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
    widths = {"head_dim_qk": layer.qk_head_dim, "head_dim_vo": layer.v_head_dim}
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
            pages = {"page_size": work.page_size, **heads, **how}
            if problem.max_query_len == 1:  # it has one width, and takes any name: only its own may be asked
                wrapper = package.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=layer.group >= 4)
                asked = {"indptr": starts, "indices": indices, "last_page_len": last, **pages}
                asked |= {"head_dim": layer.qk_head_dim}
            else:
                wrapper = package.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
                names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
                asked = dict(zip(names, (problem.cu_seqlens_q, starts, indices, last), strict=True))
                asked |= {"causal": True, **pages, **widths}
        wrapper.plan(**known(wrapper.plan, **asked))
        made.append(wrapper)

    def call(i: int) -> object:
        turn = problem.rotations[i]
        if work.page_size is None:
            return made[i].run(turn.q, turn.kv.k, turn.kv.v)
        return made[i].run(turn.q, (turn.kv.k, turn.kv.v))

    return call


def unified(problem: Problem, function: Any) -> Call | None:
    """The one Triton kernel for decode and prefill over pages that two engines carry, each in its own version.

    One of them cuts the keys of few short queries where it is given scratch, as its metadata builder sizes it.
    """
    work, layer = problem.work, problem.work.layer
    if work.page_size is None or layer.kv_dtype == FP8:
        return None
    one = torch.ones((len(work.seq_lens), layer.num_kv_heads), device=problem.device)
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.to(layer.dtype)
    window = (-1, -1) if layer.window[0] is None else layer.window
    few = 128 // layer.num_kv_heads  # requests below which keys are cut
    rows = (few * min(problem.max_query_len, 8), layer.num_heads, SPLITS)
    parts = torch.empty(*rows, next_power_of_2(layer.v_head_dim), device=problem.device)
    tops, totals = (torch.empty(rows, device=problem.device) for _ in range(2))

    def call(i: int) -> None:
        turn = problem.rotations[i]
        function(
            **known(
                function, q=turn.q, k=turn.kv.k, v=turn.kv.v, out=turn.out, cu_seqlens_q=problem.cu_seqlens_q,
                max_seqlen_q=problem.max_query_len, seqused_k=problem.seq_lens, max_seqlen_k=problem.max_seq_len,
                softmax_scale=layer.scale, causal=True, window_size=window, block_table=table_of(problem, i),
                softcap=0.0, q_descale=None, k_descale=one, v_descale=one, sinks=sinks, seq_threshold_3D=few,
                num_par_softmax_segments=SPLITS, softmax_segm_output=parts, softmax_segm_max=tops,
                softmax_segm_expsum=totals,
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
    blocks = size * cdiv(layer.num_heads, min(16, layer.group))
    wanted = (detect(str(device)).compute_units or 1) * max(1.0, math.log2(problem.max_seq_len / 64))  # its own rule
    keys = cdiv(problem.max_seq_len, min(SPLITS, max(1, math.ceil(wanted / blocks))))
    splits = ((problem.seq_lens + keys - 1) // keys).int()
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
