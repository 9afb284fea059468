"""The C++ kernels beside their Triton twins, on a GPU: python ci/bench.py hip [--json FILE] [--only PATTERN]

Device time is that of graph replay, each pair in turns; every output is checked. Host time is that of an eager call in
a loop, on so little work that the device keeps up; latency that of one from its start to its result, on an idle device.
bf16, 8 KV heads of 128, 32 query heads where none are named.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.problem import Pool, Problem, build
from benchmarks.small import LAYER, cache_write, copy_job, merge
from benchmarks.timing import Job, Measure, contest, finish, relative_error
from benchmarks.workloads import FP8, Workload, decode
from portable.attention import load_kernels
from portable.bench.problem import keys_of
from portable.bench.subjects import calls, segment
from portable.kernel import KV, Kernel, Needs, Op
from portable.layer import Layer, LayerTensors
from portable.platform.detect import detect

Row = Callable[[list[Kernel], torch.device], dict[str, Measure]]
BUDGET, WARM = 40.0, 100.0  # ms of timing, and before it
WRITES = (8192, 256, 128, 64, 16)  # tokens
GATHERS = ((8192, 8), (8192, 64), (128, 2), (64, 1))  # tokens, requests
MERGES = (8192, 256, 128, 64, 1)  # tokens
DECODES = tuple((size, keys) for keys in (1024, 8192, 32768) for size in (1, 8, 64))
GROUPED = tuple((heads, size, keys) for heads in (64, 128, 16, 8) for size, keys in ((1, 1024), (1, 8192), (8, 8192)))
LOOP = 200  # calls of a host's time
SHORT = (8, 64, 128, 255)  # tokens of an eager call from start to end


class Subject(NamedTuple):
    name: str
    op: Op
    run: Row


def subjects() -> Iterator[Subject]:
    """Every row of the record."""
    for tokens, requests in GATHERS:
        yield Subject(f"gather {tokens}/{requests}", Op.CACHE_GATHER, partial(gather, tokens=tokens, requests=requests))
    for tokens in WRITES:
        yield Subject(f"write {tokens}", Op.CACHE_WRITE, partial(written, tokens=tokens))
    for tokens in MERGES:
        yield Subject(f"merge {tokens}", Op.MERGE, partial(merged, tokens=tokens))
    for name, layer, size, keys in decodes():
        yield Subject(f"decode {size}x{keys}{name}", Op.PAGED, partial(decoded, work=work_of(layer, size, keys)))


def decodes() -> Iterator[tuple[str, Layer, int, int]]:
    """What a row adds to its name, layer, requests, keys of each."""
    for size, keys in (*DECODES, (1, 64)):
        yield "", LAYER, size, keys
    for heads, size, keys in GROUPED:
        yield f", {heads} query heads", replace(LAYER, num_heads=heads), size, keys
    for size, keys in ((1, 1024), (1, 8192), (8, 8192)):
        yield ", fp8", replace(LAYER, kv_dtype=FP8), size, keys
    for size in (1, 8):
        yield ", width 64", Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=64), size, 8192


def work_of(layer: Layer, size: int, keys: int) -> Workload:
    return decode("decode", layer, [keys] * size, 16)


def anyone(_: str) -> bool:
    return True


def written(kernels: list[Kernel], device: torch.device, tokens: int) -> dict[str, Measure]:
    return cache_write(kernels, {}, device, tokens, 16, anyone)


def merged(kernels: list[Kernel], device: torch.device, tokens: int) -> dict[str, Measure]:
    return merge(kernels, {}, device, tokens, anyone)


def gather(kernels: list[Kernel], device: torch.device, tokens: int, requests: int) -> dict[str, Measure]:
    """K and V of as many tokens, packed, beside a copy of as many bytes."""
    work = work_of(LAYER, requests, tokens // requests)
    problem = build(work, Pool(device, [work]))
    turn = problem.rotations[0]
    want = [torch.cat([keys_of(part, work, turn, r, None) for r in range(requests)]) for part in turn.kv]

    rows = [[torch.empty_like(part) for part in want] for _ in problem.rotations]

    def error(_: object) -> float:
        return max(relative_error(part, right) for part, right in zip(rows[0], want, strict=True))

    jobs = [
        Job(
            f"portable {kernel.name}",
            partial(gathers, problem, kernel, rows),
            [part for each in rows for part in each],
            error,
            1e-9,
        )
        for kernel in kernels
    ]
    return contest([*jobs, copy_job(4 * want[0].nbytes, device)], BUDGET, WARM, anyone)


def gathers(problem: Problem, kernel: Kernel, rows: list[list[torch.Tensor]]) -> list[Callable[[], object]]:
    """A call for each rotation, into rows of its own; what `prepare` makes is not timed."""
    made: list[Callable[[], object]] = []
    for number, (each, out) in enumerate(zip(problem.rotations, rows, strict=True)):
        part = segment(problem, kernel, number)
        if kernel.prepare is not None:
            part = replace(part, prepared=kernel.prepare(part, LAYER))
        made.append(partial(kernel.run, each.kv, part, LAYER, LayerTensors(), KV(*out)))
    return made


def decoded(kernels: list[Kernel], device: torch.device, work: Workload) -> dict[str, Measure]:
    problem = build(work, Pool(device, [work]))
    outputs = [turn.out for turn in problem.rotations]
    jobs = [
        Job(f"portable {kernel.name}", partial(calls, problem, kernel), outputs, problem.error, 1e-2)
        for kernel in kernels
    ]
    return contest(jobs, BUDGET, WARM, anyone)


def eager(kernels: list[Kernel], device: torch.device, tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of a write, a gather and a merge of so many tokens, and what as many requests of 64 keys take.

    That is a decode, a copy of a page and of two states each, new pages in a table, a step more, and an engine's table
    brought; and page tables in one launch, where Triton is among the providers.
    """
    bf16: Any = {"dtype": torch.bfloat16, "device": device}
    work = work_of(LAYER, tokens, 64)
    problem = build(work, Pool(device, [work]))
    kv = problem.rotations[0].kv
    k, v = (torch.randn(tokens, LAYER.num_kv_heads, LAYER.qk_head_dim, **bf16) for _ in range(2))
    slots = torch.arange(tokens, device=device)
    parts = [torch.randn(tokens, LAYER.num_heads, LAYER.v_head_dim, **bf16) for _ in range(3)]
    lses = [torch.randn(LAYER.num_heads, tokens, device=device) for _ in range(3)]
    few = work_of(LAYER, 1, tokens)
    gathered = build(few, Pool(device, [few]))
    states = [torch.zeros(2 * tokens, LAYER.num_kv_heads, LAYER.qk_head_dim, **bf16) for _ in range(2)]
    pairs = torch.arange(2 * tokens, device=device).view(2, tokens).T.contiguous()
    lens = torch.full((tokens,), 63, dtype=torch.int32, device=device)
    table = torch.zeros(tokens, 8, dtype=torch.int32, device=device)
    pages = torch.stack([slots, slots + tokens], 1)
    pool = KV(*(torch.zeros(2 * tokens, 16, LAYER.num_kv_heads, LAYER.qk_head_dim, **bf16) for _ in range(2)))
    step = {
        Op.CACHE_COPY: (pool, pool, pages, LAYER),
        Op.STATE_COPY: ([states], pairs, torch.tensor([0, tokens], dtype=torch.int32, device=device)),
        Op.REFRESH: (slots, lens, table.view(-1)),
        Op.ADVANCE: (lens, table, slots.clone(), slots.clone(), 16, 64),
        Op.COLLECT: (table, None, None, table.clone(), 0),
    }
    for kernel in kernels:
        if kernel.caps.op is Op.CACHE_WRITE:
            yield kernel.name, partial(kernel.run, k, v, kv, slots, LAYER, LayerTensors())
        elif kernel.caps.op is Op.CACHE_GATHER:
            yield kernel.name, gathers(gathered, kernel, [[k.clone(), v.clone()] for _ in gathered.rotations])[0]
        elif kernel.caps.op is Op.MERGE:
            yield kernel.name, partial(kernel.run, parts[1:], lses[1:], None, parts[0], lses[0])
        elif kernel.caps.op is Op.PAGED:
            yield kernel.name, calls(problem, kernel)[0]
        elif kernel.caps.op in step:
            yield kernel.name, partial(kernel.run, *step[kernel.caps.op])
    if any(kernel.caps.provider == "triton" for kernel in kernels):
        from portable.backends.triton import tables

        yield "triton slot_mapping", partial(tables.slot_mapping, table, slots, lens, 16)
        yield "triton page_table", partial(tables.page_table_from_tokens, table, slots, lens, 16, 4)
        yield "triton page_csr", partial(tables.page_csr, table, lens, 16, 4 * tokens)


def prompts(kernels: list[Kernel], device: torch.device, tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of one prompt of so many tokens, 64 at least: packed keys, and keys in pages."""
    tokens = max(64, tokens)
    for op, page in ((Op.PREFILL, None), (Op.PAGED, 16)):
        work = Workload(name="prompt", layer=LAYER, query_lens=(tokens,), seq_lens=(tokens,), page_size=page)
        problem = build(work, Pool(device, [work]))
        needs = Needs(page_size=page, query_len=tokens, seq_len=tokens)
        for kernel in kernels:
            if kernel.caps.op is op and not kernel.why_not(detect(str(device)), LAYER, needs):
                yield f"{kernel.name} prompt", calls(problem, kernel)[0]


def by_triton(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """What a call launches, by Triton's own launcher, and nothing else that the call does."""
    from portable.backends.triton.launch import recorded

    with recorded(detect(str(device))) as launches:
        call()

    def run() -> None:
        for each in launches:
            each.kernel.kernel[each.grid](*each.arguments, **each.kernel.options)

    return run


def finished(call: Callable[[], object], device: torch.device) -> float:
    """us from an eager call on an idle device to its result: the median of `LOOP` calls, behind a tenth more."""
    times = []
    for _ in range(LOOP + LOOP // 10):
        finish((), device)
        start = time.perf_counter()
        call()
        finish((), device)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[LOOP // 10 :])


def in_a_loop(call: Callable[[], object], device: torch.device) -> float:
    """us of the host in a call: the least of 21 loops, behind one that does not count, for others share the host."""
    times = []
    for _ in range(22):
        finish((), device)
        start = time.perf_counter()
        for _ in range(LOOP):
            call()
        times.append(1e6 * (time.perf_counter() - start) / LOOP)
    return min(times[1:])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py hip", description="The C++ kernels beside their Triton twins.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows that this pattern finds")
    parser.add_argument("--providers", default="hip,triton", help="whose kernels, the first beside the others")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    device, providers = torch.device(args.device), args.providers.split(",")
    target, needs = detect(str(device)), Needs(page_size=16, query_len=1, seq_len=64)
    among = [kernel for kernel in load_kernels() if kernel.caps.provider in providers]
    found = [kernel for kernel in among if not kernel.why_not(target, LAYER, needs)]
    if not found:
        parser.error(f"--providers {args.providers} --device {device}: none of their kernels runs there")
    rows: dict[str, dict[str, Measure]] = {}
    for subject in subjects():
        kernels = [kernel for kernel in found if kernel.caps.op is subject.op]
        if kernels and re.search(args.only, subject.name):
            rows[subject.name] = subject.run(kernels, device)
            print(subject.name, {name: each.failed or round(each.us, 2) for name, each in rows[subject.name].items()})

    def timed(tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
        yield from eager(found, device, tokens)
        yield from prompts(among, device, tokens)

    host, latency = dict[str, float](), dict[str, float]()
    if re.search(args.only, "host"):
        for name, call in timed(8):
            host[name] = in_a_loop(call, device)
            if name.startswith("triton") and device.type == "cuda":
                host[f"{name} by Triton's launcher"] = in_a_loop(by_triton(call, device), device)
        print("host", {name: round(us, 2) for name, us in host.items()})
    for tokens in SHORT if re.search(args.only, "latency") else ():
        latency |= {f"{name} {tokens}": finished(call, device) for name, call in timed(tokens)}
    print("latency", {name: round(us, 2) for name, us in latency.items()})
    if args.json:
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        measured = {name: {who: asdict(each) for who, each in row.items()} for name, row in rows.items()}
        record = {"card": card, "versions": {"torch": torch.__version__}, "rows": measured}
        record |= {"host us": host, "latency us": latency}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(not all(each.ok for row in rows.values() for each in row.values()))
