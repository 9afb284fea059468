"""Measurements of this checkout, as ratios within one run: python ci/bench.py [planning] [local] [--json FILE]

`python ci/bench.py attention` measures the attention kernels on a GPU, and `graphs` what a step of captured decodes and
its planning cost the host: see ci/benchmarks.

Peers are looked up when it runs and left out with a message where they are absent; nothing of them is kept here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from portable import Attention, Batch, Layer
from portable.variants import local

SEEDS = Path(__file__).parents[2] / "shared" / "seeds"
BATCHES = (1, 4, 16, 64, 256, 1024)


def microseconds(call: Callable[[], object], repeat: int = 200) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def planning() -> dict[str, Any]:
    """A Batch and its MHA plan, from 64 to 1,024 requests with a block table of 512 columns."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    attn = Attention(layer, page_size=16, device="cpu", max_reqs=1024, max_tokens=1 << 20, backend="reference")
    rng = np.random.default_rng(0)
    found = {}
    for size in (64, 256, 1024):
        table = rng.integers(0, 60000, (size, 512), dtype=np.int32)
        lens = rng.integers(1, 8000, size, dtype=np.int32)
        ones = np.ones(size, np.int32)

        def step(ones: Any = ones, lens: Any = lens, table: Any = table) -> object:
            return attn.plan(Batch.from_lens(ones, lens, block_table=table, page_size=16))

        found[size] = microseconds(step)
    print("planning a decode step, us:", {size: round(value) for size, value in found.items()})
    print(f"  1,024 requests: {found[1024] / found[64]:.2f}x the time of 64 (goal: at most 1.6x, and 250 us)")
    return {"microseconds": found, "ratio_1024_to_64": found[1024] / found[64]}


def local_batches() -> dict[str, Any]:
    """`variants.local` beside the function of the seed document that it replaces, on the same steps."""
    seed = seed_function()
    if seed is None:
        print(f"local: left out, {SEEDS.name} is not beside this checkout")
        return {}
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for kind, chunk, page_size in (("decode", 8192, 16), ("mixed", 8192, 16), ("mixed", 1024, 64)):
        for size in BATCHES:
            lens = rng.integers(100, 30000, size, dtype=np.int32)
            new = (
                np.ones(size, np.int32)
                if kind == "decode"
                else np.minimum(lens, rng.integers(1, 3000, size, dtype=np.int32))
            )
            table = rng.integers(0, 60000, (size, 2048), dtype=np.int32)
            batch = Batch.from_lens(new, lens, block_table=table, page_size=page_size)

            def ours(batch: Batch = batch, chunk: int = chunk) -> object:
                return local(batch, chunk)

            args = (chunk, batch.host_cu_seqlens_q, lens, torch.from_numpy(table), page_size)

            def theirs(args: tuple[Any, ...] = args) -> object:
                return seed(*args)

            pairs = [(microseconds(ours, 20), microseconds(theirs, 20)) for _ in range(7)]
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            found[f"{kind} {chunk}/{page_size} {size}"] = {"portable": mine, "seed": other, "ratio": other / mine}
            print(
                f"local, {kind:6} chunk {chunk}, page {page_size}, {size:5} requests: "
                f"{mine:8.0f} us, the seed's {other:8.0f} us: {other / mine:.2f}x"
            )
    return found


def seed_function() -> Callable[..., Any] | None:
    """The seed's function, out of the document's text; None where there is none."""
    for path in sorted(SEEDS.glob("003_*.txt")):
        text = path.read_text(encoding="utf-8")
        start = text.find("def make_local_attention_virtual_batches(")
        end = text.find("block_table_local\n", text.find("return seqlens_q_local", start))
        if start >= 0 and end > start:
            space: dict[str, Any] = {"np": np, "torch": torch, "cdiv": lambda a, b: -(a // -b)}
            exec(text[start : end + len("block_table_local\n")], space)
            function: Callable[..., Any] = space["make_local_attention_virtual_batches"]
            return function
    return None


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"planning": planning, "local": local_batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    results: dict[str, Any] = {"versions": versions, "machine": platform.machine()}
    for name in args.parts or PARTS:
        results[name] = PARTS[name]()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["attention"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from benchmarks.run import main as attention

        sys.exit(attention(sys.argv[2:]))
    if sys.argv[1:2] == ["graphs"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from benchmarks.graphs import main as graphs

        graphs(sys.argv[2:])
        sys.exit()
    main()
