"""Planning alone, from a batch that is ready, beside vLLM's metadata builders, which do the same: `bench.py planning`.

Each call gets a batch that nobody has planned yet, which is made outside of the time. Both sides take turns, call by
call, so that what slows the machine slows both. "low" is the 10th percentile, and the ratio that of both lows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import builders
from portable import Attention, Batch, Layer, MlaAttention, attention
from portable.backends import reference, reference_mamba, reference_steps
from portable.block_table import BlockTable
from portable.kernel import GraphLevel
from portable.mamba_run import Mamba

SIZES = (1, 16, 64, 256, 1024)
ROUNDS = 400
SECONDS = 4.0  # of a row at a size, after which it ends
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
# Kernels of the CPU with nothing to prepare, which may be captured: planning is all that is timed.
BARE = tuple(
    replace(kernel, caps=replace(kernel.caps, graph=GraphLevel.ALWAYS))
    for kernel in (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
)
Ready = Callable[[], Callable[[], object]]  # a call to time, on a batch of its own


def rows(size: int, theirs: dict[str, builders.Builder]) -> dict[str, dict[str, Ready]]:
    """For each row who does it, and what makes ready."""
    ones, longs = np.ones(size, np.int32), np.full(size, 4096, np.int32)
    limits = {"device": "cpu", "max_reqs": size, "max_tokens": size + 2048}
    paged = {"page_size": 64, "max_seq_len": 32768} | limits
    table = np.arange(size * 64, dtype=np.int32).reshape(size, 64)
    logged = BlockTable(size, 512)
    for row in range(size):
        logged.write(row, 0, table[row])
    prefills = min(4, size)
    new = np.where(np.arange(size) < size - prefills, 1, 512).astype(np.int32)
    all_ = np.where(new == 1, 4096, 1536).astype(np.int32)
    narrow = np.arange(size * 1250, dtype=np.int32).reshape(size, 1250)
    slots = np.arange(size, dtype=np.int32)[:, None]

    def decode() -> Batch:
        return Batch.from_lens(ones, longs, block_table=table, page_size=64)

    def single() -> Batch:
        return Batch.decode(longs, logged, page_size=64)

    def mixed() -> Batch:
        return Batch.from_lens(new, all_, block_table=table, page_size=64)

    def long() -> Batch:
        return Batch.from_lens(ones, np.full(size, 20000, np.int32), block_table=narrow, page_size=16)

    mha = Attention(Layer.gqa(**HEADS), **paged)  # type: ignore[arg-type]
    mla = MlaAttention(Layer.mla(num_heads=16), **paged)  # type: ignore[arg-type]
    mamba = Mamba(Layer.mamba2(num_heads=80), **limits)  # type: ignore[arg-type]
    chunked = Attention(Layer.gqa(**HEADS, chunk=8192), **paged | {"page_size": 16})  # type: ignore[arg-type]
    graph = {"pad_to": size, "slot": 1}
    calls: dict[str, tuple[Callable[[], Batch], Callable[[Batch], object]]] = {
        "MHA decode": (decode, mha.plan),
        "MHA decode for a graph": (single, lambda batch: mha.plan(batch, **graph)),
        "MHA decode for a graph from an array": (decode, lambda batch: mha.plan(batch, pad_to=size, slot=2)),
        "MHA mixed": (mixed, mha.plan),
        "MLA decode": (decode, mla.plan),
        "MLA decode for a graph": (single, lambda batch: mla.plan(batch, **graph)),
        "MLA mixed": (mixed, mla.plan),
        "Mamba-2 decode": (decode, lambda batch: mamba.plan(batch, slots)),
        "Mamba-2 decode for a graph": (single, lambda batch: mamba.plan(batch, slots, **graph)),
        "Mamba-2 mixed": (mixed, lambda batch: mamba.plan(batch, slots)),
        "local decode": (long, chunked.plan),
    }
    found: dict[str, dict[str, Ready]] = {}
    for name, (make, plan) in calls.items():
        found[name] = {"portable": _ours(make, plan)}
        if name in theirs:
            found[name]["vllm"] = _theirs(make, theirs[name])
    for name, make in (("Batch.from_lens", decode), ("Batch.from_lens mixed", mixed), ("Batch.decode", single)):
        found[name] = {"portable": _itself(make)}
    return found


def _ours(make: Callable[[], Batch], plan: Callable[[Batch], object]) -> Ready:
    def ready() -> Callable[[], object]:
        batch = make()
        return lambda: plan(batch)

    return ready


def _theirs(make: Callable[[], Batch], builder: builders.Builder) -> Ready:
    return lambda: builder(make())


def _itself(make: Callable[[], Batch]) -> Ready:
    return lambda: make


def in_turns(sides: dict[str, Ready]) -> dict[str, dict[str, float]]:
    """The 10th percentile and the median of each side's calls, us."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + SECONDS
    gc.disable()
    for number in range(ROUNDS + 10):
        for name, ready in sides.items():
            call = ready()
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if number >= 10:
                times[name].append(took * 1e6)
        if number > 10 and time.perf_counter() > end:
            break
    gc.enable()
    return {
        name: dict(zip(("low", "median"), np.percentile(each, (10, 50)).round(2).tolist(), strict=True))
        for name, each in times.items()
    }


def measure(folder: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """All rows, or those of these names, at all sizes: {row: {size: {side: {"low": us, "median": us}, "ratio": r}}}.

    Args:
        folder: vLLM's wheel, unpacked; None for an installed one.
    """
    theirs = builders.load(folder)
    if theirs is None:
        print("vllm: left out, it is not installed; --vllm DIR names an unpacked wheel")
    found: dict[str, Any] = {}
    with mock.patch.object(attention, "load_kernels", lambda: BARE):
        for size in SIZES:
            for name, sides in rows(size, theirs or {}).items():
                if names and name not in names:
                    continue
                times: dict[str, Any] = in_turns(sides)
                if "vllm" in times:
                    times["ratio"] = round(times["portable"]["low"] / times["vllm"]["low"], 2)
                found.setdefault(name, {})[str(size)] = times
    for name, sizes in found.items():
        print(name)
        for size, times in sizes.items():
            beside = f"   vllm {times['vllm']['low']:8.1f} {times['vllm']['median']:8.1f}" if "vllm" in times else ""
            ratio = f"   {times['ratio']:.2f}x" if "vllm" in times else ""
            ours = times["portable"]
            print(f"  {size:>5}: us, low and median {ours['low']:8.1f} {ours['median']:8.1f}{beside}{ratio}")
    return found
