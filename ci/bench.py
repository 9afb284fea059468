"""Measurements of this checkout, as ratios within one run: python ci/bench.py [planning] [local] [--json FILE]

`planning` is the time of a plan from a batch that is ready, beside vLLM's metadata builders where vLLM is installed or
`--vllm DIR` names its wheel unpacked (`pip download --no-deps vllm`); `local` that of `variants.local`.
`python ci/bench.py attention` measures the attention kernels on a GPU, `hip` the C++ kernels beside their Triton twins,
`graphs` what a step of captured decodes and its planning cost the host, and `captured` runs steps through graphs on a
GPU beside eager ones: see ci/benchmarks.

Peers are looked up when it runs and left out with a message where they are absent; nothing of them is kept here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from portable import Batch
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


def planning(vllm: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Each kind of plan, and the batch before it, beside what vLLM's metadata builders take: benchmarks/planning.py."""
    sys.path.insert(0, str(Path(__file__).parent))
    from benchmarks.planning import measure

    return measure(vllm, names)


def local_batches(vllm: Path | None, names: Sequence[str]) -> dict[str, Any]:
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


PARTS: dict[str, Callable[[Path | None, Sequence[str]], dict[str, Any]]] = {
    "planning": planning,
    "local": local_batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="for planning: vLLM's wheel, unpacked")
    parser.add_argument("--rows", default="", metavar="NAME,...", help="for planning: these rows only")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    results: dict[str, Any] = {"versions": versions, "machine": platform.machine()}
    for name in args.parts or PARTS:
        results[name] = PARTS[name](args.vllm, args.rows.split(",") if args.rows else ())
    if "vllm.version" in sys.modules:
        versions["vllm"] = sys.modules["vllm.version"].__version__
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
    if sys.argv[1:2] == ["mla"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from benchmarks.mla import main as mla

        mla(sys.argv[2:])
        sys.exit()
    if sys.argv[1:2] == ["hip"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from benchmarks.twins import main as twins

        sys.exit(twins(sys.argv[2:]))
    if sys.argv[1:2] == ["captured"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from benchmarks.captured import main as captured

        sys.exit(captured(sys.argv[2:]))
    main()
