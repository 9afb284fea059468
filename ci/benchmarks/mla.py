"""MLA on a GPU beside FlashMLA, FA3 and FlashInfer: python ci/bench.py mla [--peers DIR] [--grid] [--out FILE]

Decode and verify of DeepSeek's 512 + 64 latent columns in bf16 over pages of 64 tokens, prompts of 192/128, and the
write of latents. `--peers` names a folder that `bench.py attention --stage` filled; kernels of installed vendors take
part through their adapters as well. "dispatched" is what a planned step runs, as a contestant of its own. Rotations use
other pages until 256 MB were touched; metadata and work lists are made before the timing.

`--grid` adds the shapes that a platform's `MEASURED` is made of, without the oracle, with fewer rotations, and with the
selected kernel's own time in the place of "dispatched".
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

from benchmarks.mla_problems import Decode, Problem, Shape, able  # noqa: E402
from benchmarks.mla_prompts import Prompt, Write  # noqa: E402
from benchmarks.stage import FA3, FLASH_MLA, FLASHINFER, unpacked  # noqa: E402
from benchmarks.timing import Measure, contest  # noqa: E402
from portable.attention import load_kernels  # noqa: E402
from portable.proof import source_hash  # noqa: E402

POINTS = [(batch, keys) for batch in (1, 16, 128) for keys in (1024, 8192, 32768)]
GRID = [
    Shape(heads, batch, keys, new, page)
    for new, page in ((4, 64), (1, 64), (4, 16), (1, 16))
    for heads in (16, 128, 32, 64)
    for batch in ((1, 4, 16, 64, 256) if new == 1 else (1, 16, 64))
    for keys in (1024, 4096, 16384, 65536)
    if batch * keys <= 1 << 22
]
KEPT = 24 << 30  # bytes, the pool of pages among them
SLACK = 1.03  # of the fastest kernel's time, which a dispatched step may take


class Row(NamedTuple):
    """A workload: made when its turn comes."""

    section: str  # rows of a section need the same kernels, so one process compiles for them
    name: str
    problem: Callable[[torch.Tensor], Problem]  # of a pool of latents
    quick: bool = False


def rows(grid: bool, small: int) -> Iterator[Row]:
    """What is measured; `small` divides the numbers of keys and tokens, down to 64, to try the harness."""

    def cut(length: int) -> int:
        return max(64, length // small)

    shapes = {f"H{heads} b{b} {n}": Shape(heads, b, n) for heads in (16, 128) for b, n in POINTS}
    shapes |= {f"X q{new}": Shape(16, 64, 8192, new) for new in (1, 4)}
    for name, shape in shapes.items():
        yield Row(kind(shape), name, partial(Decode, shape._replace(keys=cut(shape.keys))))
    for heads, tokens in ((16, 4096), (128, 4096), (128, 3000), (32, 8192)):
        name = f"P3 H{heads}"
        yield Row(name, f"{name} {tokens} 192/128", partial(Prompt, heads, cut(tokens)))
    yield Row("write", "cache write 8192x576", partial(Write, cut(8192)))
    for shape in GRID if grid else ():
        problem = partial(Decode, shape._replace(keys=cut(shape.keys)), quick=True)
        yield Row(kind(shape), f"{kind(shape)} b{shape.batch} {shape.keys}", problem, True)


def kind(shape: Shape) -> str:
    return f"H{shape.heads} q{shape.new} page{shape.page}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py mla", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder that bench.py attention --stage filled")
    parser.add_argument("--grid", action="store_true", help="also the shapes that selection is made of")
    parser.add_argument("--only", default="", help="sections that begin with one of these, with commas")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--limit", type=float, default=240, help="seconds for the whole run")
    parser.add_argument("--budget", type=float, default=40, help="ms of timing for each contestant")
    parser.add_argument("--compile", type=float, default=0, help="seconds of compiling first, a process a section")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide the sizes by this, to try the harness")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    end = time.monotonic() + args.limit
    torch.manual_seed(1)
    wanted = tuple(args.only.split(","))
    todo = [row for row in rows(args.grid, args.shrink) if row.section.startswith(wanted)]
    if args.warm:
        warm(todo, torch.device(args.device))
        return
    if args.compile:
        compiled([*dict.fromkeys(row.section for row in todo)], argv, args.compile)
    result = measured(todo, args, end)
    if args.out:
        args.out.write_text(written(result), encoding="utf-8")


def compiled(sections: list[str], argv: list[str], seconds: float) -> None:
    """Sections at once, a process each, and one that tests the vendors' kernels; what was not ready is told."""
    end, command = time.monotonic() + seconds, [sys.executable, str(ROOT / "ci" / "bench.py"), "mla", *argv, "--warm"]
    code = "from portable import available_kernels; available_kernels()"
    children = {"self-tests": subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment())}
    for section in sections:
        children[section] = subprocess.Popen([*command, "--only", section], env=environment())
    for name, child in children.items():
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.returncode:
            print(f"{name}: not compiled, exit code {child.returncode}", flush=True)
    print(f"compiled, {seconds - end + time.monotonic():.0f} s", flush=True)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def warm(todo: list[Row], device: torch.device) -> None:
    """The first call of what is compiled, on a few pages."""
    pool = latents(1 << 12, device)
    with torch.no_grad():
        for row in todo:
            problem = row.problem(pool)
            for job in problem.jobs([kernel for kernel in load_kernels() if kernel.caps.provider == "triton"]):
                calls = job.calls()
                if calls:
                    calls[0]()


def latents(tokens: int, device: torch.device) -> torch.Tensor:
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device=device)
    for part in pool.split(1 << 20):
        part.normal_()
    return pool


def measured(todo: list[Row], args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Every row, as far as time allows."""
    device = torch.device(args.device)
    kernels, peers = able(device), raw_peers(args.peers)
    named = {kernel.name: kernel for kernel in kernels}
    result: dict[str, Any] = {**machine(device), "sources": {}, "selected": {}, "rows": {}, "grid": {}}
    ratios: dict[str, float] = {}
    with torch.no_grad():
        pool = latents(max(1 << 12, (1 << 22) // args.shrink), device)
        for row in todo:
            if time.monotonic() > end:
                print(f"out of time before {row.name}", flush=True)
                break
            problem = row.problem(pool)
            jobs = [*problem.jobs(kernels)]
            if not row.quick:
                jobs = [*problem.dispatched(), *jobs, *problem.peers(peers)]
            budget, first = (args.budget / 6, 4.0) if row.quick else (args.budget, 10.0)
            found = contest(jobs, budget, first, lambda name: True)
            graphs = any(measure.graph for measure in found.values())  # a CPU has none: call by call, all of them
            times = {who: round(m.us, 2) for who, m in found.items() if m.ok and m.graph is graphs}
            told = ""
            if chosen := problem.selected():
                best = min((us for who, us in times.items() if who in named), default=math.nan)
                ratios[row.name] = times.get("dispatched", times.get(chosen, math.nan)) / best
                result["selected"][row.name] = chosen
                told = f"{chosen} {ratios[row.name]:.3f}"
            result["grid" if row.quick else "rows"][row.name] = times
            result["sources"] |= {who: source_hash(named[who]) for who in times if who.startswith("triton")}
            print(row.name, {who: shown(m, graphs) for who, m in found.items()}, told, flush=True)
            del problem, jobs
            if device.type == "cuda" and torch.cuda.memory_reserved() > KEPT:
                gc.collect()  # graphs keep their memory from all others, as long as a cycle keeps them
                torch.cuda.empty_cache()
    slower = {name: round(ratio, 3) for name, ratio in ratios.items() if not ratio <= SLACK}
    print(f"{len(ratios)} dispatched, {len(slower)} above {SLACK} of the fastest single kernel: {slower}", flush=True)
    return result


def shown(measure: Measure, graphs: bool) -> str:
    if measure.failed or measure.graph is not graphs:
        return measure.failed[:120] or "not captured"
    return f"{measure.us:.4g}" if measure.ok else f"{measure.us:.4g} WRONG {measure.error:.2g}"


def raw_peers(folder: Path | None) -> dict[str, Any]:
    """Vendors' operators without an adapter; a library that an adapter loaded is there already."""
    found: dict[str, Any] = {}
    for name, file, library, operator in (
        ("fa3", FA3, "_vllm_fa3_C", "fwd"),
        ("flashmla", FLASH_MLA, "_flashmla_C", "dense_decode_fwd"),
    ):
        try:
            if folder and not hasattr(getattr(torch.ops, library), operator):
                torch.ops.load_library(str(unpacked(folder) / file))
        except (OSError, RuntimeError) as error:
            print(f"{name}: {str(error)[:150]}", flush=True)
        if hasattr(getattr(torch.ops, library), operator):
            found[name] = getattr(torch.ops, library)
    try:
        if folder:
            found["flashinfer"] = flashinfer(unpacked(folder))
    except (ImportError, OSError, RuntimeError) as error:
        print(f"flashinfer: {str(error)[:150]}", flush=True)
    return found


def flashinfer(site: Path) -> Any:
    """Its module, loaded by tvm-ffi alone."""
    if not (site / FLASHINFER).exists():
        raise FileNotFoundError(f"{site.parent} was filled without it")
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # or its import compiles what an older torch has not
    sys.path.insert(0, str(site))
    try:
        return importlib.import_module("tvm_ffi").load_module(str(site / FLASHINFER))
    finally:
        sys.path.remove(str(site))  # an adapter would find vLLM there, after kernels were looked up


def machine(device: torch.device) -> dict[str, Any]:
    import platform

    import triton

    return {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "unit": "us, graph replay, median",
        "note": "",
    }


def written(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, dict) and key != "versions":
            text = "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
