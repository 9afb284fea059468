"""`portable bench`: this device's kernels, planning, dispatch and graphs, beside whatever peers are installed.

    portable bench                             every section but generation
    portable bench kernels graphs --quick      two sections, few sizes
    portable bench --generate                  whole models, beside transformers
    portable bench --json FILE --plots FOLDER  the numbers, and the roofline, latency and share of peak as pictures
    portable bench --read FILE --plots FOLDER  the same of a run elsewhere, where matplotlib is

Every number is of one run on one machine; what is compared was timed in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.files import write_whole

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
    add("--read", metavar="FILE", help="show, or draw, a run that --json wrote, of any machine; nothing is measured")
    add("--budget", type=float, default=40.0, metavar="MS", help="of timing for each contestant (default: 40)")
    add("--generate", action="store_true", help="tokens per second beside transformers' own sdpa attention")
    add("--model", metavar="PATH", help="folder of a transformers decoder in safetensors (default: the small one)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate per prompt (default: 64)")
    add("--rounds", type=int, default=3, metavar="N", help="times that both are measured, in turn (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Measure as the flags say: 1 where a kernel gives a wrong result; a ValueError for bad flags."""
    from portable.bench import plots
    from portable.bench.text import text
    from portable.cli import show

    for name in ("max_new_tokens", "rounds", "budget"):
        least = 0 if name == "budget" else 1
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if unknown := set(args.sections) - set(SECTIONS):
        raise ValueError(f"section {min(unknown)!r} is not known; the sections are {', '.join(SECTIONS)}")
    if args.plots:
        plots.figures()  # that they can be drawn, before minutes are spent
    result = read(Path(args.read)) if args.read else measured(args)
    if args.json == "-":
        print(written(result))
    else:
        show("\n".join(text(result)))
    if args.plots:
        for path in plots.draw(result, Path(args.plots)):
            print(f"{path}: written", file=sys.stderr)
    each = [one for row in result.get("kernels", {}).values() for one in row["contestants"].values()]
    return int(any(not one["ok"] and not one["failed"] for one in each))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """A run as the flags say, kept in their file as it goes."""
    from portable.platform.detect import detect

    target = detect(args.device)
    if target.emulated:
        raise ValueError(f"--device is {args.device!r}; an emulated device has no speed to measure")
    chosen = args.sections or ([] if args.generate else SECTIONS)
    keep = partial(write, Path(args.json)) if args.json not in (None, "-") else nothing
    result = measure(target, chosen, args.quick, args.budget, keep)
    if args.generate:
        from portable.bench.generation import measure_generate

        result["generate"] = measure_generate(args.model, args.max_new_tokens, args.rounds, args.device)
        keep(result)
    return result


def measure(
    target: Target, sections: Collection[str], quick: bool, budget_ms: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The sections' numbers as plain values, with the machine, its ceilings and the peers that are absent.

    `keep` is told of them after each row and section: what was measured outlives a run that is ended.
    """
    import torch

    from portable.bench import ceilings, host, kernels

    absent: dict[str, str] = {}
    result: dict[str, Any] = {"schema": SCHEMA, "machine": machine(target), "absent": absent}
    keep(result)  # a file that cannot be written is found out now
    if "kernels" in sections:
        works = list(kernels.workloads(target, quick))
        dtype, mib, size = (torch.float32, 128, 512) if target.device == "cpu" else (torch.bfloat16, 2048, 8192)
        note("ceilings")
        result["ceilings"] = ceilings.ceilings(torch.device(target.device), dtype, mib, size)
        result["kernels"] = {}
        for name, row in kernels.rows(target, works, absent, budget_ms, note):
            result["kernels"][name] = row
            keep(result)
    ways: dict[str, Callable[[Target], dict[str, Any]]] = {
        "planning": partial(host.planning, quick=quick),
        "dispatch": host.dispatch,
        "graphs": host.graphs,
    }
    for section in (name for name in ways if name in sections):
        note(section)
        result[section] = ways[section](target)
        keep(result)
    note("")
    return result


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


def written(result: dict[str, Any]) -> str:
    return json.dumps(finite(result), indent=1)


def write(path: Path, result: dict[str, Any]) -> None:
    write_whole(path, written(result) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A run that was written; a ValueError where the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = found["schema"] == SCHEMA and "machine" in found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--read is {str(path)!r}, which is no run of this command: {error}") from None
    if not whole:
        raise ValueError(f"--read is {str(path)!r}, which is no run of this command of schema {SCHEMA}")
    for row in found.get("kernels", {}).values():  # what JSON has not
        for each in row["contestants"].values():
            each |= {name: math.nan for name, value in each.items() if value is None}
    return dict(found)


def nothing(result: dict[str, Any]) -> None:
    """What is kept of a run without a file."""


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
