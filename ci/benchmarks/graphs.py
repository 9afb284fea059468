"""Host time of planning: python ci/bench.py graphs [--device cuda] [--peer FILE] [--json FILE]

"steps" is the host time of one decode step of a captured model, however many layers it has: new pages, a batch of
lengths and pages on the host, and its plan, with what brings both to the device, for one KV group. Each step is one
token longer than the last, so that a request gets a page in every 16th. "planning" is the plan alone, from a batch that
is ready: what an engine's metadata builder does, whose times FILE holds as `{"name": {"batch": {"med":
microseconds}}}`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from portable import Attention, Batch, Layer, MlaAttention, attention
from portable.backends import reference, reference_mamba, reference_steps
from portable.block_table import BlockTable
from portable.kernel import GraphLevel
from portable.mamba_run import Mamba

PAGE = 16
WIDTHS = (512, 2048, 8192)  # columns of a block table
ROUNDS = 300
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
# Kernels of the CPU with nothing to prepare, which may be captured: planning is all that is timed.
BARE = tuple(
    replace(kernel, caps=replace(kernel.caps, graph=GraphLevel.ALWAYS))
    for kernel in (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
)
PEERS = {  # what a builder of the peer's does, beside the same here
    "MHA decode, for a graph": "vllm FlashAttention build decode (AOT stub + full CG copy)",
    "MLA decode": "vllm MLACommon build decode",
    "MLA mixed": "vllm MLACommon build mixed (4 prefills 512, ctx 1024)",
    "Mamba-2 decode, for a graph": "vllm Mamba2 build decode",
    "local decode": "vllm make_local_attention_virtual_batches decode (8192 chunk)",
}


def microseconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median time of a call."""
    times = []
    for number in range(rounds + 20):
        start = time.perf_counter()
        call()
        if number >= 20:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def step_times(device: str, size: int, width: int, *, logged: bool) -> dict[str, float]:
    """Medians of a plan, and of all of a step: pages for who needs one, the batch, and its plan.

    Args:
        logged: the table is a `BlockTable`, which knows what was written; else an array that is looked through.
    """
    options = {"max_reqs": size, "max_tokens": size, "max_seq_len": width * PAGE, "page_size": PAGE}
    attn = Attention(Layer.gqa(**HEADS), device=device, **options)  # type: ignore[arg-type]
    rng, steps = np.random.default_rng(size), ROUNDS + 20
    lens = rng.integers(1, width * PAGE - steps, size, dtype=np.int32)
    pages = rng.permutation(size * width).astype(np.int32).reshape(size, width)
    log, table = BlockTable(size, width), np.zeros((size, width), np.int32)
    for row, count in enumerate(-(-lens // PAGE)):
        log.write(row, 0, pages[row, :count])
        table[row, :count] = pages[row, :count]
    plans, whole = [], []
    for _ in range(steps):
        start = time.perf_counter()
        rows = np.flatnonzero(lens % PAGE == 0)
        columns = lens[rows] // PAGE
        if logged:
            log.put(rows, columns, pages[rows, columns])
        else:
            table[rows, columns] = pages[rows, columns]
        lens = lens + np.int32(1)
        batch = Batch.decode(lens, log if logged else table, page_size=PAGE)
        ready = time.perf_counter()
        attn.plan(batch, pad_to=size)
        end = time.perf_counter()
        plans.append(end - ready)
        whole.append(end - start)
        if device != "cpu":
            torch.cuda.synchronize()  # as a step of a model would: the copy of the last plan but one has long passed
    return {"plan": statistics.median(plans[20:]) * 1e6, "step": statistics.median(whole[20:]) * 1e6}


def planning(size: int) -> dict[str, float]:
    """The plan alone, of a step of `size` requests on the CPU."""
    ones, longs = np.ones(size, np.int32), np.full(size, 4096, np.int32)
    options = {"device": "cpu", "max_reqs": size, "max_tokens": size + 2048}
    paged = {"page_size": 64, "max_seq_len": 32768} | options
    table = np.arange(size * 64, dtype=np.int32).reshape(size, 64)
    decode = Batch.from_lens(ones, longs, block_table=table, page_size=64)
    prefills = min(4, size)
    new = np.where(np.arange(size) < size - prefills, 1, 512).astype(np.int32)
    all_ = np.where(new == 1, 4096, 1536).astype(np.int32)
    mixed = Batch.from_lens(new, all_, block_table=table, page_size=64)
    narrow = np.arange(size * 1250, dtype=np.int32).reshape(size, 1250)
    local = Batch.from_lens(ones, np.full(size, 20000, np.int32), block_table=narrow, page_size=16)
    with mock.patch.object(attention, "load_kernels", lambda: BARE):
        mha = Attention(Layer.gqa(**HEADS), **paged)  # type: ignore[arg-type]
        mla = MlaAttention(Layer.mla(num_heads=16), **paged)  # type: ignore[arg-type]
        mamba = Mamba(Layer.mamba2(num_heads=80), **options)  # type: ignore[arg-type]
        chunked = Attention(Layer.gqa(**HEADS, chunk=8192), **paged | {"page_size": 16})  # type: ignore[arg-type]
        slots = np.arange(size, dtype=np.int32)[:, None]
        calls: dict[str, Callable[[], object]] = {
            "MHA decode": lambda: mha.plan(decode),
            "MHA decode, for a graph": lambda: mha.plan(decode, pad_to=size, slot=1),
            "MLA decode": lambda: mla.plan(decode),
            "MLA decode, for a graph": lambda: mla.plan(decode, pad_to=size, slot=1),
            "MLA mixed": lambda: mla.plan(mixed),
            "Mamba-2 decode": lambda: mamba.plan(decode, slots),
            "Mamba-2 decode, for a graph": lambda: mamba.plan(decode, slots, pad_to=size, slot=1),
            "local decode": lambda: chunked.plan(local),
        }
        return {name: microseconds(call) for name, call in calls.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cpu", help="of the steps (default: cpu, with kernels that prepare nothing)"
    )
    parser.add_argument("--peer", metavar="FILE", help="times of another engine's metadata builders on this machine")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bare = mock.patch.object(attention, "load_kernels", lambda: BARE) if args.device == "cpu" else mock.MagicMock()
    with bare:
        steps = {
            f"{size} x {width}, {kind}": step_times(args.device, size, width, logged=kind == "BlockTable")
            for kind in ("BlockTable", "array")
            for width in WIDTHS
            for size in (16, 256)
        }
    for name, found in steps.items():
        print(f"{name:24}: plan {found['plan']:6.1f} us, the step {found['step']:6.1f}")
    ratio = steps["256 x 512, BlockTable"]["step"] / steps["16 x 512, BlockTable"]["step"]
    print(f"  256 requests: {ratio:.2f}x the time of 16 (goal: at most 1.3x, and 60 us)")
    alone = {size: planning(size) for size in (1, 64, 256, 1024)}
    peer = json.loads(Path(args.peer).read_text(encoding="utf-8")) if args.peer else {}
    for name in alone[1]:
        line = ", ".join(f"{size}: {found[name]:.1f}" for size, found in alone.items())
        theirs = peer.get(PEERS.get(name, ""), {})
        beside = ", ".join(f"{size}: {found['med']:.1f}" for size, found in theirs.items() if int(size) in alone)
        print(f"planning {name:28} us at {line}" + (f"; peer at {beside}" if beside else ""))
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        device = "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
        result = {
            "versions": versions,
            "machine": platform.machine(),
            "device": device,
            "unit": "us of host time, median",
            "steps": steps,
            "ratio_256_to_16": ratio,
            "planning": alone,
            "peer": {name: {size: found["med"] for size, found in peer[PEERS[name]].items()} for name in PEERS}
            if peer
            else {},
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
