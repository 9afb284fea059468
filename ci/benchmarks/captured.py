"""Steps through captured graphs on a GPU: python ci/bench.py captured [--steps N] [--seconds S] [--json FILE]

"decode" is SmolLM2-135M's shape with random weights in the engine of `portable generate`, with and without graphs.
"serving" is random steps of tests/serving.py over every kind of layer: each replay is compared, bit by bit, with an
eager run of the same padded plan, and with float64. They run in processes of their own, with a seed each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PROCESSES = 8
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT, PAGE = 48, 16


def decode(device: str) -> dict[str, Any]:
    """Tokens a second of decodes, eager and through graphs, and whether they are the same tokens."""
    from portable import models

    transformers = models.transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.08
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="portable"
        ).eval()
    layers, found = models.discover_layers(model), {}
    for batch, new in ((1, 96), (8, 48)):
        eager, graphs = (generate(model, layers, batch, new, graphs=way) for way in (False, True))
        same = sum(one == other for one, other in zip(eager.pop("ids"), graphs.pop("ids"), strict=True))
        rates = eager["tokens a second"], graphs["tokens a second"]
        found[f"batch {batch}"] = {
            "eager": rates[0], "graphs": rates[1], "ratio": rates[1] / rates[0], "same ids": f"{same}/{batch}",
            "replays": graphs["replays"], "why not": graphs["why not"],
        }  # fmt: skip
        print(f"decode, batch {batch}: eager {rates[0]:.0f} tokens/s, graphs {rates[1]:.0f}, same ids {same}/{batch}")
    return found


def generate(model: Any, layers: Any, batch: int, new: int, *, graphs: bool) -> dict[str, Any]:
    """The better of two runs, behind the steps that read prompts and capture."""
    from portable.generate import Engine, enough_pages
    from portable.schedule import Request

    def requests() -> list[Any]:
        draw = [torch.Generator().manual_seed(row) for row in range(batch)]
        prompts = [torch.randint(0, 49000, (PROMPT + 3 * row,), generator=draw[row]).tolist() for row in range(batch)]
        return [Request(row, prompt, new) for row, prompt in enumerate(prompts)]

    most = PROMPT + 3 * batch + new
    pages = enough_pages(requests(), layers, PAGE) + 8
    engine = Engine(model, layers, num_pages=pages, page_size=PAGE, max_reqs=batch, max_seq_len=most, graphs=graphs)
    best = 0.0
    for _ in range(2):
        asked, start, tokens = requests(), 0.0, 0
        for _ in engine.generate(asked):
            tokens += 1
            if tokens == 2 * batch:
                torch.cuda.synchronize()
                start = time.perf_counter()
        torch.cuda.synchronize()
        best = max(best, (tokens - 2 * batch) / (time.perf_counter() - start))
    why_not = engine.graphs.why_not if engine.graphs else None
    return {
        "tokens a second": best,
        "ids": [request.generated for request in asked],
        "replays": engine.stats.graph_steps,
        "why not": why_not,
    }


def serve(device: str, seed: int, steps: int, seconds: float, *, small: bool) -> dict[str, Any]:
    """Random steps of one seed, until one is wrong or the time is up."""
    sys.path.insert(0, str(ROOT / "tests"))
    on_device = import_module("serving").on_device

    torch.set_num_threads(1)
    start, done, error, stack = time.perf_counter(), 0, None, None
    try:
        stack = on_device(device, small=small, seed=seed)
        while done < steps and time.perf_counter() - start < seconds:
            stack.run(1)
            done += 1
    except Exception as reason:
        traceback.print_exc(limit=12)
        error = f"{type(reason).__name__}: {reason}"[:600]
    found = {"seed": seed, "steps": done, "error": error, "seconds": round(time.perf_counter() - start, 1)}
    if stack is None:
        return found | {"replayed": 0, "counts": {}}
    choices = [choice for each in stack.layers for choice in each.planner.choices.values()]
    return found | {
        "replayed": stack.replayed,
        "counts": stack.counts,
        "worst": stack.worst,
        "captured": [str(size) for size in stack.graphs.captured],
        "kernels": sorted({choice.kernel.name for choice in choices}),
    }


def serving(device: str, steps: int, seconds: float) -> dict[str, Any]:
    """The steps of all processes."""
    each = -(-steps // PROCESSES)
    command = [sys.executable, str(ROOT / "ci" / "bench.py"), "captured", "--device", device, "--steps", str(each)]
    processes = [
        subprocess.Popen([*command, "--seconds", str(seconds), "--seed", str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(PROCESSES)
    ]
    found, end = [], time.monotonic() + seconds + 30
    for seed, process in enumerate(processes):
        try:
            told = process.communicate(timeout=max(1.0, end - time.monotonic()))[0].strip().splitlines()
            found.append(json.loads(told[-1]))
        except (subprocess.TimeoutExpired, ValueError, IndexError) as reason:
            process.kill()
            found.append({"seed": seed, "steps": 0, "replayed": 0, "error": f"{type(reason).__name__}", "counts": {}})
    total = {name: sum(run[name] for run in found) for name in ("steps", "replayed")}
    kinds = {name: sum(run["counts"].get(name, 0) for run in found) for name in ("decode", "verify", "mixed")}
    errors = [run["error"] for run in found if run["error"]]
    print(f"serving: {total['steps']} steps, {total['replayed']} replayed, {kinds}; {len(errors)} processes failed")
    for error in errors:
        print("  " + error)
    return total | {"counts": kinds, "errors": errors, "runs": found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1000, help="of serving, all processes together (default: 1000)")
    parser.add_argument("--seconds", type=float, default=60, help="for the steps (default: 60)")
    parser.add_argument("--seed", type=int, help="serve in this process, and print a line of JSON")
    parser.add_argument("--small", action="store_true", help="with --seed: fewer requests, shorter sequences")
    parser.add_argument("--only", choices=("decode", "serving"), help="one of the two")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args(arguments)
    if args.seed is not None:
        run = serve(args.device, args.seed, args.steps, args.seconds, small=args.small)
        print(json.dumps(run), flush=True)
        return int(run["error"] is not None)
    found: dict[str, Any] = {"torch": torch.__version__, "cpus": os.cpu_count()}
    if args.device.startswith("cuda"):
        found["card"] = torch.cuda.get_device_name(args.device)

    def keep() -> None:
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if args.only != "serving":
        try:
            found["decode"] = decode(args.device)
        except Exception as reason:
            traceback.print_exc(limit=8)
            found["decode"] = {"error": f"{type(reason).__name__}: {reason}"[:600]}
        keep()
    if args.only != "decode":
        found["serving"] = serving(args.device, args.steps, args.seconds)
        keep()
    return int("error" in found.get("decode", {}) or bool(found.get("serving", {}).get("errors")))


if __name__ == "__main__":
    sys.exit(main())
