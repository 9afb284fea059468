"""`portable bench`: this device's kernels, planning, dispatch and graphs, beside whatever peers are installed.

    portable bench                             every section but generation
    portable bench kernels graphs --quick      two sections, few sizes
    portable bench --generate                  whole models, beside transformers
    portable bench --json FILE --plots FOLDER  the numbers, and the roofline, latency and share of peak as pictures

Every number is of one run on one machine; what is compared was timed in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.platform.target import Target

SCHEMA = 1
SECTIONS = ("kernels", "planning", "dispatch", "graphs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `portable bench`."""
    add = parser.add_argument
    add("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--quick", action="store_true", help="few sizes")
    add("--device", help="a device (default: PORTABLE_DEVICE, or the best of this machine)")
    add("--json", metavar="FILE", nargs="?", const="-", help="write the numbers; without FILE print them, nothing else")
    add("--plots", metavar="FOLDER", help="write pictures")
    add("--budget", type=float, default=40.0, metavar="MS", help="of timing for each contestant (default: 40)")
    add("--generate", action="store_true", help="tokens per second beside transformers' own sdpa attention")
    add("--model", metavar="PATH", help="folder of a transformers decoder in safetensors (default: the small one)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate per prompt (default: 64)")
    add("--rounds", type=int, default=3, metavar="N", help="times that both are measured, in turn (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Measure as the flags say: 1 where a kernel gives a wrong result; a ValueError for bad flags."""
    from portable.bench.text import text
    from portable.cli import show
    from portable.platform.detect import detect

    for name in ("max_new_tokens", "rounds", "budget"):
        least = 0 if name == "budget" else 1
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if unknown := set(args.sections) - set(SECTIONS):
        raise ValueError(f"section {min(unknown)!r} is not known; the sections are {', '.join(SECTIONS)}")
    target = detect(args.device)
    if target.emulated:
        raise ValueError(f"--device is {args.device!r}; an emulated device has no speed to measure")
    chosen = args.sections or ([] if args.generate else SECTIONS)
    result = measure(target, chosen, args.quick, args.budget)
    if args.generate:
        from portable.bench.generation import measure_generate

        result["generate"] = measure_generate(args.model, args.max_new_tokens, args.rounds, args.device)
    written = json.dumps(finite(result), indent=1)
    if args.json == "-":
        print(written)
    else:
        if args.json:
            Path(args.json).write_text(written + "\n", encoding="utf-8")
        show("\n".join(text(result)))
    if args.plots:
        from portable.bench.plots import draw

        for path in draw(result, Path(args.plots)):
            print(f"{path}: written", file=sys.stderr)
    each = [one for row in result.get("kernels", {}).values() for one in row["contestants"].values()]
    return int(any(not one["ok"] and not one["failed"] for one in each))


def measure(target: Target, sections: Mapping[str, Any] | Any, quick: bool, budget_ms: float) -> dict[str, Any]:
    """The sections' numbers as plain values, with the machine, its ceilings and the peers that are absent."""
    import torch

    from portable.bench import ceilings, host, kernels

    result: dict[str, Any] = {"schema": SCHEMA, "machine": machine(target)}
    absent: dict[str, str] = {}
    if "kernels" in sections:
        works = list(kernels.workloads(target, quick))
        dtype, mib, size = (torch.float32, 128, 512) if target.device == "cpu" else (torch.bfloat16, 2048, 8192)
        note("ceilings")
        result["ceilings"] = ceilings.ceilings(torch.device(target.device), dtype, mib, size)
        result["kernels"] = dict(kernels.rows(target, works, absent, budget_ms, note))
    if "planning" in sections:
        note("planning")
        result["planning"] = host.planning(target, quick)
    if "dispatch" in sections:
        note("dispatch")
        result["dispatch"] = host.dispatch(target)
    if "graphs" in sections:
        note("graphs")
        result["graphs"] = host.graphs(target)
    note("")
    return {**result, "absent": absent}


def machine(target: Target) -> dict[str, Any]:
    """The device, and the versions of what runs on it."""
    from portable.explain import spell_target
    from portable.packages import installed

    found = installed(target, None)
    versions = {"python": platform.python_version(), "torch": found["torch"].version}
    versions |= {name: found[name].version for name in ("triton",) if name in found}
    if target.runtime:
        versions["built for"] = target.runtime
    return {"device": spell_target(target), "arch": target.arch, "name": target.name, "versions": versions}


def note(text: str) -> None:
    """Who is about to run, on a terminal's stderr; the next note writes over it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def finite(value: Any) -> Any:
    """JSON has no NaN: null.

    >>> finite({"a": [float("nan"), 1.0]})
    {'a': [None, 1.0]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and value != value else value
