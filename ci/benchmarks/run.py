"""The run: a child process measures row by row; its parent restarts it behind whatever kills or hangs it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings, peers, small, subjects
from benchmarks.problem import Pool, Problem, build
from benchmarks.timing import Broken, Job, Measure, contest
from benchmarks.workloads import SECTIONS, shrunk
from portable.attention import load_kernels
from portable.kernel import Kernel, Op
from portable.layer import UnsupportedError

ALL = ("ceilings", *SECTIONS, "merge", "cache_write", "host")
BROKEN = 77  # exit code of a child that lost its device


def main(argv: list[str]) -> int:
    from benchmarks import table

    parser = argparse.ArgumentParser(prog="bench.py attention", description="Attention kernels beside their peers.")
    parser.add_argument("--only", default=",".join(ALL), help=f"sections, of {', '.join(ALL)}")
    parser.add_argument("--rows", default="", help="only workloads that this pattern finds")
    parser.add_argument("--who", default="", help="only contestants that this pattern finds, in 'row|contestant'")
    parser.add_argument("--peers", type=Path, help="folder that --stage filled")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--limit", type=float, default=540, help="seconds for the whole run")
    parser.add_argument("--patience", type=float, default=60, help="seconds for one contestant")
    parser.add_argument("--budget", type=float, default=40, help="ms of timing for each contestant")
    parser.add_argument("--provider", default="triton", help="of portable's kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", action="store_true", help="tiny shapes, to try the harness on a CPU")
    parser.add_argument("--stage", type=Path, metavar="FOLDER", help="only download the peers, into this folder")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the rows of a result")
    parser.add_argument("--details", type=Path, metavar="FILE", help="only print every workload of a result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(ALL):
        parser.error(f"{', '.join(sorted(unknown))}: the sections are {', '.join(ALL)}")
    if args.details:
        print(table.details(json.loads(args.details.read_text(encoding="utf-8"))), end="")
        return 0
    if args.table:
        print(table.markdown(json.loads(args.table.read_text(encoding="utf-8"))), end="")
        return 0
    if args.stage:
        from benchmarks.stage import stage

        stage(args.stage)
        return 0
    if args.device == "cpu" and not args.shrink:
        parser.error("attention is measured on a GPU, and torch has none here; --device cpu --shrink tries the harness")
    if args.child:
        return child(args)
    result = supervise(args, argv)
    print(table.markdown(result), end="")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if any(result[part] for part in ("rows", "ceilings", "host")) else 1


def supervise(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Run children until one gets through; what was running when one died is left out of the next."""
    end = time.monotonic() + args.limit
    root = str(Path(__file__).parents[2])  # the checkout's package, whatever is installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        records, current, lost = state / "records", state / "current", state / "lost"
        records.touch()
        lost.touch()
        while time.monotonic() < end:
            current.write_text("start", encoding="utf-8")
            command = [sys.executable, "-u", str(Path(__file__).parents[1] / "bench.py"), "attention", *argv]
            process = subprocess.Popen([*command, "--child", str(state)], env=environment)
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() > end or time.time() - current.stat().st_mtime > args.patience:
                    process.kill()
                    process.wait()
            if process.returncode == 0:
                break
            where = current.read_text(encoding="utf-8")
            how = "ended behind its time" if process.returncode == -9 else f"exit code {process.returncode}"
            print(f"lost at {where!r}, {how}", flush=True)
            if where == "start":
                break  # nothing can be measured here
            with lost.open("a", encoding="utf-8") as file:
                file.write(where + "\n")
        lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
        dead = lost.read_text(encoding="utf-8").splitlines()
    return gathered(lines, dead)


def gathered(lines: list[dict[str, Any]], dead: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": {}, "absent": {}, "ceilings": {}, "host": {}, "rows": {}}
    for line in lines:
        for key, value in line.items():
            result[key].update(value)
    for where in dead:
        name, _, who = where.partition("|")
        if name in ("load", "ceilings", "host"):
            result["absent"][where] = "the process died or hung"
            continue
        row = result["rows"].setdefault(name, {"contestants": {}})
        row["contestants"].setdefault(who, asdict(Measure(failed="the process died or hung")))
    return result


def child(args: argparse.Namespace) -> int:
    """Measure what the records do not hold yet."""
    torch.manual_seed(1)
    device = torch.device(args.device)
    state: Path = args.child
    text = (state / "records").read_text(encoding="utf-8")
    done = {name for line in text.splitlines() for part in json.loads(line).values() for name in part}
    lost = set((state / "lost").read_text(encoding="utf-8").splitlines())
    chosen = args.only.split(",")

    def record(**parts: Any) -> None:
        with (state / "records").open("a", encoding="utf-8") as file:
            file.write(json.dumps(parts) + "\n")

    def seen(row: str) -> Callable[[str], bool]:
        """For the contestants of a row: note who is next, unless it was lost before or is not wanted."""

        def next_is(name: str) -> bool:
            where = f"{row}|{name}"
            (state / "current").write_text(where, encoding="utf-8")
            return where not in lost and re.search(args.who, where) is not None

        return next_is

    absent: dict[str, str] = {}
    with torch.no_grad():
        try:
            found = peers.load(args.peers, absent, seen("load"))
            mine = {op: list(subjects.kernels(args.provider, op, absent)) for op in OPS}
            record(machine=machine(args, mine), absent=absent)
            if "ceilings" in chosen and "matmul TFLOP/s" not in done:
                sizes = (64, 256) if device.type == "cpu" else (4096, 8192)
                record(ceilings=ceilings.ceilings(device, seen("ceilings"), *sizes))
            works = [work for section in chosen if section in SECTIONS for work in SECTIONS[section]()]
            works = [shrunk(work) if args.shrink else work for work in works if re.search(args.rows, work.name)]
            works = [work for work in works if work.name not in done]
            pool = Pool(device, works)
            for number, work in enumerate(works):
                begun = time.perf_counter()
                problem = build(work, pool)
                warm_ms = 150.0 if number == 0 else 40.0
                measured = contest(jobs(problem, mine, found), args.budget, warm_ms, seen(work.name))
                report(work.name, measured, begun)
                row = {"bytes": work.kv_bytes, "flops": work.flops, "selected": selected(problem, mine)}
                record(rows={work.name: {**row, "contestants": {k: asdict(v) for k, v in measured.items()}}})
                del problem
            del pool
            others(args, chosen, done, mine, found, absent, record, seen)
        except Broken as error:
            print(error, flush=True)
            return BROKEN
    return 0


OPS = (Op.PAGED, Op.PREFILL, Op.MERGE, Op.CACHE_WRITE)


def jobs(problem: Problem, mine: dict[Op, list[Kernel]], found: dict[str, peers.Peer]) -> Iterator[Job]:
    outputs = [turn.out for turn in problem.rotations]
    among = mine[op_of(problem)]
    for kernel in among:
        if not subjects.why_not(problem, kernel):
            calls = partial(subjects.calls, problem, kernel)
            yield Job(f"portable {kernel.name}", calls, outputs, problem.error, 1.5e-2)
    if mixed(problem):
        yield Job(PLANNED, partial(subjects.planned_calls, problem, among), outputs, problem.error, 1.5e-2)
    for name, peer in found.items():
        yield Job(name, partial(peers.calls, problem, peer), outputs, problem.error, peer.tolerance)


PLANNED = "portable as planned"


def mixed(problem: Problem) -> bool:
    """Whether `Attention.run` makes several calls of it."""
    return problem.work.page_size is not None and min(problem.work.query_lens) == 1 < problem.max_query_len


def op_of(problem: Problem) -> Op:
    return Op.PAGED if problem.work.page_size else Op.PREFILL


def selected(problem: Problem, mine: dict[Op, list[Kernel]]) -> str:
    """The contestant that `Attention.run` would be; of kernels that no backend lists yet, none."""
    op = op_of(problem)
    among = [kernel for kernel in mine[op] if kernel in load_kernels()]
    if mixed(problem):
        return PLANNED if among else ""
    try:
        return f"portable {subjects.chosen(problem, among, op, subjects.needs_of(problem)).name}"
    except UnsupportedError:
        return ""


def others(
    args: argparse.Namespace,
    chosen: list[str],
    done: set[str],
    mine: dict[Op, list[Kernel]],
    found: dict[str, peers.Peer],
    absent: dict[str, str],
    record: Callable[..., None],
    seen: Callable[[str], Callable[[str], bool]],
) -> None:
    """The sections that are not attention."""
    device = torch.device(args.device)
    tokens = 64 if args.shrink else 8192
    rows: dict[str, Callable[..., dict[str, Measure]]] = {}
    if "merge" in chosen:
        rows["merge"] = partial(small.merge, mine[Op.MERGE], absent, device, tokens)
    if "cache_write" in chosen:
        for page in (16, 64):
            name = f"cache write page {page}"
            rows[name] = partial(small.cache_write, mine[Op.CACHE_WRITE], absent, device, tokens, page)
    for name, measure in rows.items():
        if name not in done:
            begun = time.perf_counter()
            measured = measure(seen(name))
            report(name, measured, begun)
            record(rows={name: {"contestants": {k: asdict(v) for k, v in measured.items()}}})
    if "host" in chosen:
        times = small.host(mine[Op.PAGED], found, device, seen("host"))
        for name, each in times.items():
            print(f"host: {name}: {each}", flush=True)
        record(host=times)


def report(name: str, measured: dict[str, Measure], begun: float) -> None:
    """One line: us of each, '!' where the output is wrong."""
    times = (
        f"{who} {each.us:.4g}{'' if each.ok else f' WRONG {each.error:.2g}'}"
        if not each.failed
        else f"{who}: {each.failed[:150]}"
        for who, each in measured.items()
    )
    print(f"{name:28} ({time.perf_counter() - begun:4.1f} s)  {'  '.join(times)}", flush=True)


def machine(args: argparse.Namespace, mine: dict[Op, list[Kernel]]) -> dict[str, Any]:
    """Card, clocks, versions, and the sources that were measured."""
    from portable.proof import source_hash

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "kernels": {kernel.name: source_hash(kernel) for kernels in mine.values() for kernel in kernels},
    }
    if args.peers and (manifest := args.peers / "manifest.json").exists():
        found["peers"] = json.loads(manifest.read_text(encoding="utf-8"))
    if args.device != "cpu":
        found |= {"card": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
        asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
            found |= dict(zip(asked.split(","), (part.strip() for part in answer[0].split(",")), strict=True))
        except (OSError, IndexError, subprocess.TimeoutExpired) as error:
            found["nvidia-smi"] = str(error)
    found["cpus"] = os.cpu_count()
    return found
