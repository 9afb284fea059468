"""Vendors' kernels on this machine: python -m benchmarks.vendors [--json FILE], from ci/

* The time of each one's self-test: the first run in this process, and the median and the most of three more.
* What each adapter adds to a call: `benchmarks.adapters`.
* aiter's Triton attention, which runs where Triton does: the contract, with its caps widened to this device.

With the `site` of staged peers on the path (`ci/card` puts it there), vLLM's copies of FA3 and FlashMLA are installed
packages. `ci/prove.py` and the conformance kit run their contract.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import contract_cells
import torch

from benchmarks import adapters
from portable import available_kernels, detect
from portable.attention import load_kernels
from portable.backends.selftest import fault
from portable.conformance import cells
from portable.kernel import ATTENTION, Kernel
from portable.platform.target import Target
from portable.proof import source_hash

GOAL = 50.0  # ms of a self-test
ELSEWHERE = "aiter.varlen_triton_017"
PARTS = ("self-tests", "aiter", "adapters")


def vendors() -> Iterator[Kernel]:
    """Attention kernels of others that are offered here: not what compiles at its first call."""
    ours = ("triton", "hip", "reference")
    return (k for k in available_kernels() if k.caps.op in ATTENTION and k.caps.provider not in ours)


def self_tests(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    fault(next(k for k in load_kernels() if k.name == "reference.paged"), target)  # so that what all share is there
    for kernel in vendors():
        took, problem = [], None
        for _ in range(4):
            start = time.perf_counter()
            wrong = fault(kernel, target)
            took.append((time.perf_counter() - start) * 1e3)
            problem = problem or wrong
        times = {"first": took[0], "median": statistics.median(took[1:]), "most": max(took[1:])}
        found = {"self_test": problem or "passed", "self_test_ms": {key: round(ms, 1) for key, ms in times.items()}}
        print(f"{kernel.name:45} {found}", flush=True)
        yield kernel.name, {**found, "source": source_hash(kernel)}


def widened(target: Target) -> dict[str, Any] | None:
    """The contract of aiter's Triton attention on a device that its package is not for; None where it is not there."""
    kernel, adapter = next(pair for pair in adapters.adapted() if pair[0].name == ELSEWHERE)
    try:
        importlib.import_module(adapter.convention.module)
    except ImportError:
        return None
    caps = replace(kernel.caps, vendors=frozenset({target.vendor}), archs=frozenset({target.arch}), requires=())
    kernel = replace(kernel, caps=caps)
    passed, failed = contract_cells.run(kernel, cells.cases(kernel, target), target.device)
    problem = fault(kernel, target)
    found = {"contract": {"cells": passed, "failures": failed}, "self_test": problem or "passed"}
    print(f"{kernel.name:45} {found}", flush=True)
    return found | {"source": source_hash(kernel)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vendors", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to a file")
    parser.add_argument("--only", default="", help=f"parts, of {', '.join(PARTS)} (default: all)")
    args = parser.parse_args()
    target, only = detect(), args.only.split(",") if args.only else PARTS
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    kernels: dict[str, dict[str, Any]] = dict(self_tests(target)) if "self-tests" in only else {}
    if "aiter" in only and target.device != "cpu" and (found := widened(target)):
        kernels[ELSEWHERE] = found
    if "adapters" in only:
        for name, us in adapters.added([]):
            kernels.setdefault(name, {})["adds_us"] = us
    versions = {"card": target.name, "torch": torch.__version__}
    result = {"arch": target.arch, "at": versions}
    if args.json:
        lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(kernels.items())]
        head = json.dumps(result, indent=1).removesuffix("\n}")
        args.json.write_text(head + ',\n "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    slow = [name for name, each in kernels.items() if each.get("self_test_ms", {}).get("median", 0.0) > GOAL]
    wrong = [name for name, each in kernels.items() if each.get("self_test", "passed") != "passed"]
    print(f"{len(kernels)} kernels; self-tests over {GOAL:g} ms: {slow}; not passed: {wrong}")
    return int(bool(wrong) or any(each.get("contract", {}).get("failures") for each in kernels.values()))


if __name__ == "__main__":
    raise SystemExit(main())
