"""`portable generate`: prompts in, text out, and which kernels did it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from portable import models
from portable.default_model import DEFAULT_MODEL, default_model
from portable.generate import Engine, Sampling, enough_pages
from portable.generate_output import (
    Blocks,
    Job,
    Printer,
    Quiet,
    Stream,
    check_line,
    document,
    kernel_lines,
    note,
    progress,
)
from portable.layer import UnsupportedError
from portable.platform.detect import detect
from portable.schedule import Request

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_REQS = 64
INTERRUPTED = 130  # what a shell reports after Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `portable generate`."""
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeat it for several at once")
    add("--prompts-file", metavar="FILE", help="a file of prompts, one per line; - reads standard input")
    add("--model", metavar="PATH", help=f"folder of a transformers decoder in safetensors (default: {DEFAULT_MODEL})")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate per prompt (default: 64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default); above, sample")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling; prompt i draws from seed + i (default: 0)")
    add("--page-size", type=int, default=16, metavar="N", help="tokens per page of the KV cache (default: 16)")
    add("--num-pages", type=int, metavar="N", help="pages of the KV cache (default: enough, up to 4 GiB)")
    add("--prefill-chunk", type=int, default=512, metavar="N", help="prompt tokens per step (default: 512)")
    add("--device", help="a device's name in torch, or emulated:ARCH (default: the best of this machine)")
    add("--dtype", choices=sorted(DTYPES), help="of the model (default: float32 on a CPU, else bfloat16)")
    add("--backend", metavar="NAME", help="force a backend or kernel, or op=name,... (default: the best)")
    add("--prefix-caching", action="store_true", help="keep pages and states for prompts that begin alike")
    add("--no-graphs", action="store_true", help="launch each kernel of a decode by itself, and capture no graphs")
    add("--check", action="store_true", help="compare with transformers' eager attention, greedy in float32")
    add("--json", action="store_true", help="print one JSON document, nothing else")


def run(args: argparse.Namespace) -> int:
    """Generate as the flags say.

    Returns:
        The exit code: 0, 1 where --check found a difference, 130 after Ctrl-C.

    Raises:
        ValueError: bad input, in one line that names the flag or value and what would do.
    """
    try:
        job = prepare(args)
    except UnsupportedError as error:
        raise UnsupportedError("; ".join(line.strip() for line in str(error).splitlines())) from error
    return report(job, args)


def prepare(args: argparse.Namespace) -> Job:
    """Load the model, and refuse what the flags ask and it cannot do."""
    start = time.perf_counter()
    _check_numbers(args)
    prompts = _prompts(args)
    target = detect(args.device)
    dtype = DTYPES[args.dtype or ("float32" if args.check or target.device == "cpu" else "bfloat16")]
    if args.check and dtype is not torch.float32:
        raise ValueError(f"--dtype {args.dtype} cannot be checked: --check compares in float32")
    path = Path(args.model) if args.model is not None else default_model(note)
    config = models.load_config(path)
    tokenizer = models.load_tokenizer(path)
    requests = _requests(args, tokenizer, prompts, models.context_length(config))
    model = models.load_model(path, dtype=dtype, device=target.device)
    layers = models.discover_layers(model)
    stop = models.stop_ids(model)
    num_pages = args.num_pages
    engine = Engine(
        model,
        layers,
        num_pages=enough_pages(requests, layers, args.page_size) if num_pages is None else num_pages,
        page_size=args.page_size,
        prefill_chunk=args.prefill_chunk,
        max_reqs=min(MAX_REQS, len(requests)),
        max_seq_len=max(len(request.prompt) + request.max_new_tokens for request in requests),
        stop_ids=stop,
        device=args.device,
        backend=args.backend,
        prefix_caching=args.prefix_caching,
        graphs=not args.no_graphs,
    )
    for request in requests:
        engine.scheduler.check(request)
    sampling = Sampling(args.temperature, args.seed)
    return Job(model, tokenizer, engine, prompts, requests, sampling, stop, time.perf_counter() - start)


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("max_new_tokens", 1), ("page_size", 1), ("num_pages", 1), ("prefill_chunk", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if args.seed >= 2**62:
        raise ValueError(f"--seed is {args.seed}; it must be below 2**62")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise ValueError(f"--temperature is {args.temperature}; it must be finite and at least 0, which is greedy")
    if args.check and args.temperature:
        raise ValueError(f"--temperature {args.temperature} cannot be checked: --check compares greedy tokens")


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts_file == "-":
        prompts += _lines(sys.stdin.read())
    elif args.prompts_file is not None:
        try:
            prompts += _lines(Path(args.prompts_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {args.prompts_file} cannot be read: {models.one_line(error)}") from error
    for index, prompt in enumerate(prompts):
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError(f"prompt {index} is not valid UTF-8; give it as text, or in a --prompts-file")
    if not prompts:
        raise ValueError("there are no prompts; give --prompt TEXT, or --prompts-file FILE with one per line")
    return prompts


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _requests(args: argparse.Namespace, tokenizer: Any, prompts: list[str], context: int) -> list[Request]:
    requests = []
    for index, prompt in enumerate(prompts):
        ids = models.encode(tokenizer, prompt)
        if len(ids) >= context:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; the model's context of {context} leaves no room for an answer, "
                f"so shorten it to at most {context - 1}"
            )
        requests.append(Request(index, ids, min(args.max_new_tokens, context - len(ids))))
    return requests


def report(job: Job, args: argparse.Namespace) -> int:
    """Generate, print, and check where asked."""
    for line in kernel_lines(job.engine):
        note(line)
    printer: Printer = Quiet() if args.json else Stream(job) if len(job.prompts) == 1 else Blocks(job)
    code = 0
    try:
        with progress(job) as advance, closing(job.engine.generate(job.requests, job.sampling)) as tokens:
            for token in tokens:
                printer.put(token)
                advance(token)
    except KeyboardInterrupt:
        code = INTERRUPTED
    printer.end()
    checks = None
    if args.check and not code:
        try:
            checks = [check(job, request) for request in job.requests]
        except KeyboardInterrupt:
            code = INTERRUPTED
        else:
            code = 0 if all(entry["identical"] for entry in checks) else 1
    if args.json:
        print(json.dumps(document(job, checks), indent=2))
        return code
    for request, entry in zip(job.requests, checks or (), strict=False):
        note(f"check {request.index}: {check_line(entry)}")
    if code == INTERRUPTED:
        note("interrupted")
    stats = job.engine.stats
    preempted = f", {stats.preemptions} preemptions" if stats.preemptions else ""
    replayed = f", {stats.graph_steps} of {stats.steps} steps by captured graphs" if stats.graph_steps else ""
    took = f"{stats.generated_tokens} tokens in {stats.seconds:.2f} s{preempted}{replayed}"
    note(f"{took}: {stats.tokens_per_second:.1f} tokens per second")
    return code


def check(job: Job, request: Request) -> dict[str, Any]:
    """Our token ids against those of transformers' eager attention."""
    ours = request.generated
    theirs = models.eager_tokens(job.model, list(request.prompt), request.max_new_tokens, job.stop_ids)
    if ours == theirs:
        return {"identical": True, "tokens": len(ours)}
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return {"identical": False, "first_difference": at, "portable": ours[at : at + 1], "eager": theirs[at : at + 1]}
