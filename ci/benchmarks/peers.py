"""Other projects' kernels as contestants. What a machine does not have is left out, with the reason in `absent`.

Each peer is a function from a Problem to a call that takes the number of a rotation; one that cannot serve the
workload returns None. Metadata and plans are made before the timing, as their engines do once a step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.problem import Problem
from benchmarks.stage import FA3, unpacked
from benchmarks.workloads import FP8
from portable.kernel import KV

Call = Callable[[int], object]
Q_SCALE = 1.25


class Peer(NamedTuple):
    start: Callable[[Problem], Call | None]
    tolerance: float = 1.5e-2


def load(root: Path | None, absent: dict[str, str], seen: Callable[[str], bool]) -> dict[str, Peer]:
    """Every peer of this machine, by name; `seen` is told which library is about to load, and may refuse."""
    found: dict[str, Peer] = {}
    if not torch.cuda.is_available():
        absent["peers"] = "no GPU"
        return found
    found["torch flash"] = Peer(torch_flash)
    found["torch cudnn"] = Peer(torch_cudnn)
    if root is None:
        absent["fa3, vllm, aiter"] = "no folder of staged peers was given (--peers)"
        return found
    site = unpacked(root)
    sys.path.insert(0, str(site))
    try:
        if seen("fa3"):
            torch.ops.load_library(str(site / FA3))
            found["fa3"] = Peer(fa3)
            found["fa3 fp8 q"] = Peer(fa3_fp8, 8e-2)
    except (OSError, RuntimeError) as error:
        absent["fa3"] = str(error)[:200]
    for name, module, start in (
        ("vllm unified", "vllm.v1.attention.ops.triton_unified_attention", vllm_unified),
        ("vllm split-kv", "vllm.v1.attention.ops.triton_decode_attention", vllm_split),
        ("aiter unified", "aiter.ops.triton.unified_attention", aiter_unified),
    ):
        if loaded := module_of(name, module, absent):
            found[name] = Peer(partial(start, module=loaded), 4e-2)
    return found


def calls(problem: Problem, peer: Peer) -> Sequence[Callable[[], object]] | None:
    """One for each rotation; None where the peer does not serve the workload."""
    call = peer.start(problem)
    return None if call is None else [partial(call, i) for i in range(len(problem.rotations))]


def module_of(name: str, module: str, absent: dict[str, str]) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        absent[name] = f"{type(error).__name__}: {error}"[:200]
        return None


def fa3(problem: Problem, fp8: bool = False) -> Call | None:
    """FlashAttention 3 as vLLM calls it: scheduler metadata made before, splits of its own choice."""
    work, layer = problem.work, problem.work.layer
    if (layer.kv_dtype == FP8) != fp8:
        return None
    batch, page, paged = len(work.seq_lens), work.page_size, work.page_size is not None
    heads, kv_heads, width, dtype = layer.num_heads, layer.num_kv_heads, layer.qk_head_dim, layer.kv_dtype
    left, right = (-1 if side is None else side for side in layer.window)
    cu, lens, lengths = problem.cu_seqlens_q, problem.seq_lens, (problem.max_query_len, problem.max_seq_len)
    ops = torch.ops._vllm_fa3_C
    metadata = None
    if paged:
        sizes = (batch, *lengths, heads, kv_heads, width, layer.v_head_dim)
        none = (None,) * 4
        metadata = ops.get_scheduler_metadata(
            *sizes, dtype, lens, cu, *none, page, 0, True, left, right, False, 0, None, 0
        )
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.bfloat16()
    scales: tuple[torch.Tensor | None, ...] = (None, None, None)
    queries = [turn.q for turn in problem.rotations]
    if fp8:
        queries = [(q.float() / Q_SCALE).to(FP8) for q in queries]
        k_scale, v_scale = problem.tensors.k_scale, problem.tensors.v_scale
        assert k_scale is not None and v_scale is not None
        scales = tuple(
            s.view(1, 1).expand(batch, kv_heads) for s in (torch.full_like(k_scale, Q_SCALE), k_scale, v_scale)
        )

    def call(i: int) -> None:
        turn = problem.rotations[i]
        keys = None if paged else cu
        used = lens if paged else None
        ops.fwd(
            queries[i], turn.kv.k, turn.kv.v, None, None, None, turn.out, cu, keys, None, None, used, *lengths,
            turn.block_table, None, None, None, None, None, *scales, layer.scale, True, left, right, 0.0, True,
            metadata, 0, None, 0, sinks, 1, 0, None,
        )  # fmt: skip

    return call


def fa3_fp8(problem: Problem) -> Call | None:
    """It takes an fp8 cache with queries in fp8 too only, so its error is larger."""
    return fa3(problem, fp8=True)


def vllm_unified(problem: Problem, module: Any) -> Call | None:
    """With the scratch that lets it split short queries, sized as its metadata builder does."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is None:
        return None
    threshold = 128 // layer.num_kv_heads
    rows = threshold * min(problem.max_query_len, 8)
    device, batch = problem.device, len(work.seq_lens)
    partial = torch.empty(rows, layer.num_heads, 16, layer.v_head_dim, device=device)
    most, total = (torch.empty(rows, layer.num_heads, 16, device=device) for _ in range(2))
    one = torch.ones((), device=device)
    k_scale, v_scale = (
        (one if scale is None else scale).expand(batch, layer.num_kv_heads)
        for scale in (problem.tensors.k_scale, problem.tensors.v_scale)
    )
    modes = module.KVQuantMode
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.bfloat16()
    window = (-1, -1) if layer.window[0] is None else layer.window

    def call(i: int) -> None:
        turn = problem.rotations[i]
        module.unified_attention(
            q=turn.q, k=turn.kv.k, v=turn.kv.v, out=turn.out, cu_seqlens_q=problem.cu_seqlens_q,
            max_seqlen_q=problem.max_query_len, seqused_k=problem.seq_lens, max_seqlen_k=problem.max_seq_len,
            softmax_scale=layer.scale, causal=True, window_size=window, block_table=turn.block_table, softcap=0.0,
            q_descale=None, k_descale=k_scale, v_descale=v_scale, seq_threshold_3D=threshold,
            num_par_softmax_segments=16, softmax_segm_output=partial, softmax_segm_max=most,
            softmax_segm_expsum=total, sinks=sinks,
            kv_quant_mode=modes.FP8_PER_TENSOR if layer.kv_dtype == FP8 else modes.NONE,
        )  # fmt: skip

    return call


def vllm_split(problem: Problem, module: Any) -> Call | None:
    """The split-KV decode that vLLM drives for MLA, with that rule for the number of splits."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is None or problem.max_query_len > 1 or layer.sinks or layer.window[0] is not None:
        return None
    splits = min(1 << max(0, (problem.max_seq_len // 512 - 1).bit_length()), 264)
    batch, device = len(work.seq_lens), problem.device
    logits = torch.empty(batch, layer.num_heads, splits, layer.v_head_dim + 1, device=device)
    lse = torch.empty(batch, layer.num_heads, dtype=layer.dtype, device=device)
    one = torch.ones((), device=device)
    k_scale, v_scale = (one if s is None else s for s in (problem.tensors.k_scale, problem.tensors.v_scale))

    def call(i: int) -> None:
        turn = problem.rotations[i]
        module.decode_attention_fwd(
            turn.q, turn.kv.k, turn.kv.v, turn.out, lse, turn.block_table, problem.seq_lens, logits, splits,
            layer.scale, work.page_size, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    return call


def aiter_unified(problem: Problem, module: Any) -> Call | None:
    """Tuned for MI300X, its AMD-only launch options removed: indicative."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is None or layer.kv_dtype == FP8:
        return None
    one = torch.ones(1, device=problem.device)
    sinks = None if problem.tensors.sinks is None else problem.tensors.sinks.bfloat16()
    window = (-1, -1) if layer.window[0] is None else layer.window

    def call(i: int) -> None:
        turn = problem.rotations[i]
        module.unified_attention(
            q=turn.q, k=turn.kv.k, v=turn.kv.v, out=turn.out, cu_seqlens_q=problem.cu_seqlens_q,
            max_seqlen_q=problem.max_query_len, seqused_k=problem.seq_lens, max_seqlen_k=problem.max_seq_len,
            softmax_scale=layer.scale, causal=True, window_size=window, block_table=turn.block_table, softcap=0.0,
            q_descale=None, k_descale=one, v_descale=one, sinks=sinks,
        )  # fmt: skip

    return call


def torch_flash(problem: Problem) -> Call | None:
    """PyTorch's FlashAttention 2, packed."""
    if problem.work.page_size is not None:
        return None
    cu, length = problem.cu_seqlens_q, problem.max_seq_len
    run = torch.ops.aten._flash_attention_forward

    def call(i: int) -> object:
        turn = problem.rotations[i]
        scale = problem.work.layer.scale
        return run(turn.q, turn.kv.k, turn.kv.v, cu, cu, length, length, 0.0, True, False, scale=scale)[0]

    return call


def torch_cudnn(problem: Problem) -> Call | None:
    """cuDNN's attention through PyTorch; requests of equal length only."""
    work, layer = problem.work, problem.work.layer
    if work.page_size is not None or len(set(work.seq_lens)) > 1:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length = len(work.seq_lens), work.seq_lens[0]

    def call(i: int) -> object:
        turn = problem.rotations[i]
        q, k, v = (t.view(batch, length, *t.shape[1:]).transpose(1, 2) for t in (turn.q, *turn.kv) if t is not None)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=layer.scale, enable_gqa=layer.group > 1
            )
        return found.transpose(1, 2).reshape(turn.out.shape)  # a view: cuDNN's output is packed like its queries

    return call


def merges(absent: dict[str, str]) -> dict[str, Callable[..., object]]:
    """name -> f(out, lse, out_a, lse_a, out_b, lse_b), lse [H, T]."""
    module = module_of("vllm merge", "vllm.v1.attention.ops.triton_merge_attn_states", absent)
    if module is None:
        return {}
    return {"vllm merge": lambda out, lse, a, la, b, lb: module.merge_attn_states(out, a, la, b, lb, output_lse=lse)}


def cache_writes(absent: dict[str, str]) -> dict[str, Callable[[torch.Tensor, torch.Tensor, KV, torch.Tensor], object]]:
    """name -> f(k, v, pages, slots)."""

    def index_copy(k: torch.Tensor, v: torch.Tensor, kv: KV, slots: torch.Tensor) -> None:
        for new, pages in ((k, kv.k), (v, kv.v)):
            assert pages is not None
            pages.flatten(0, 1).index_copy_(0, slots, new)

    found: dict[str, Callable[..., object]] = {"torch index_copy": index_copy}
    module = module_of("vllm cache", "vllm.v1.attention.ops.triton_reshape_and_cache_flash", absent)
    if module is not None:
        one = torch.ones(1, device="cuda")

        def write(k: torch.Tensor, v: torch.Tensor, kv: KV, slots: torch.Tensor) -> None:
            module.triton_reshape_and_cache_flash(k, v, kv.k, kv.v, slots, "auto", one, one)

        found["vllm cache"] = write
    return found
