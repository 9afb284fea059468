"""Host time of a captured step: python ci/bench.py graphs [--device cuda] [--json FILE]

"steps" is the host time of one decode step of a captured model, however many layers it has: new pages, a batch of
lengths and pages on the host, and its plan, with what brings both to the device, for one KV group. Each step is one
token longer than the last, so that a request gets a page in every 16th. `bench.py planning` measures the plan alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.planning import BARE, HEADS
from portable import Attention, Batch, Layer, attention
from portable.block_table import BlockTable

PAGE = 16
WIDTHS = (512, 2048, 8192)  # columns of a block table
ROUNDS = 300


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cpu", help="of the steps (default: cpu, with kernels that prepare nothing)"
    )
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
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
