"""`portable explain`: the choice of kernels for this machine or a described one, and a layer given by flags.

With --isa, what the assembly text of compiled kernels says of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from portable.explain import cases_of, explain, unused_packages
from portable.kernel import Kernel
from portable.layer import CACHE_LAYOUTS, Layer
from portable.packages import Package, installed, known_packages
from portable.select import Request, parse_requested, requested_from_env
from portable.sets import short

if TYPE_CHECKING:
    from portable.platform.target import Target

SCHEMA = 1
PAGE_SIZE = 16
DTYPES = {
    **{short(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{short(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)},
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `portable explain`."""
    machine = parser.add_argument_group("machine (this one when --arch is not given)")
    machine.add_argument("--arch", metavar="NAME", help="explain for a described architecture, on any machine")
    machine.add_argument("--product", metavar="P", help="the product of --arch, which fixes its compute units")
    machine.add_argument("--device", metavar="D", help="a device of this machine")
    machine.add_argument(
        "--with", dest="with_", metavar="NAME=VERSION", action="append", default=[], help="as if it were installed"
    )
    machine.add_argument("--without", metavar="NAME", action="append", default=[], help="as if it were not installed")
    machine.add_argument("--backend", metavar="B", help="force a provider or kernel, or op=name,...")
    layer = parser.add_argument_group("layer")
    layer.add_argument("--model", metavar="PATH", type=Path, help="the layers of a local model folder")
    layer.add_argument("--num-heads", type=int, metavar="H", help="query heads (32)")
    layer.add_argument("--num-kv-heads", type=int, metavar="H", help="KV heads (8)")
    layer.add_argument("--head-dim", type=int, metavar="D", help="width of a head (128)")
    layer.add_argument("--v-head-dim", type=int, metavar="D", help="width of a value head (as --head-dim)")
    layer.add_argument("--dtype", metavar="T", help="of q and the output (bfloat16)")
    layer.add_argument("--kv-dtype", metavar="T", help="of the cache (as --dtype); fp8 is the target's own flavour")
    layer.add_argument("--window", type=int, metavar="W", help="sliding window: the token and the W - 1 before it")
    layer.add_argument("--softcap", type=float, metavar="C", help="scores become C tanh(scores / C)")
    layer.add_argument("--sinks", action="store_true", help="one more logit per head")
    layer.add_argument("--alibi", action="store_true", help="a slope per head times the distance")
    layer.add_argument("--non-causal", action="store_true", help="every key is visible")
    layer.add_argument("--mla", action="store_true", help="multi-head latent attention, DeepSeek's widths")
    layer.add_argument("--cache-layout", metavar="L", help=f"one of {', '.join(CACHE_LAYOUTS)}")
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE, metavar="N", help="tokens per page (16)")
    parser.add_argument("--lse", action="store_true", help="the log-sum-exp is wanted as well")
    parser.add_argument(
        "--isa",
        metavar="FILE",
        type=Path,
        help="instead: resources and loops of the kernels in a file of assembly text",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the reasons of every kernel")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 1 when an operation has no kernel, or a compiled kernel cannot be launched."""
    if args.isa is not None:
        return _run_isa(args)
    from portable.attention import load_kernels, verdicts_on
    from portable.cli import show
    from portable.platform.detect import describe, detect, nearest

    if args.product and not args.arch:
        raise ValueError(f"--product {args.product} describes no machine of its own; give --arch as well")
    if args.arch and args.device:
        raise ValueError(
            f"--device {args.device} is of this machine and --arch {args.arch} of another; give one of them"
        )
    target = describe(args.arch, args.product) if args.arch else detect(args.device)
    request = parse_requested(args.backend, "--backend") or requested_from_env(os.environ)
    named = dict(_named(text) for text in args.with_)
    kernels = load_kernels()
    available = _packages(target, request, kernels, named, args.without, described=bool(args.arch))
    real = not (args.arch or named or args.without)
    notes = unused_packages(named, kernels)
    if args.arch and target.family == "unknown":
        near = f"; near it: {known}" if (known := nearest(args.arch)) else ""
        notes += (f"arch {target.arch} is in no table, so it has only what every {target.vendor} device has{near}",)
    explanations = [
        explain(
            target,
            layer,
            page_size=args.page_size,
            kernels=kernels,
            installed=available,
            requested=request,
            cases=cases_of(layer, max(args.page_size, 1), lse=args.lse),
            notes=notes,
            verdict=verdicts_on(target, installed(target, request)) if real else None,
        )
        for layer in _layers(args, target)
    ]
    if args.json:
        data = {"schema": SCHEMA, "target": asdict(target), "explanations": [e.data() for e in explanations]}
        print(json.dumps(data, indent=2, sort_keys=True))
    else:
        show("\n\n".join(map(str, explanations)))
    return 0 if all(explanation.complete for explanation in explanations) else 1


def _run_isa(args: argparse.Namespace) -> int:
    from portable.cli import show
    from portable.platform.emulated.static import read

    given = {**vars(args), "page_size": args.page_size != PAGE_SIZE, "command": None, "isa": None, "json": None}
    if others := sorted(
        name for name, value in given.items() if value != [] and value is not None and value is not False
    ):
        flags = ", ".join(f"--{name.rstrip('_').replace('_', '-')}" for name in others)
        raise ValueError(f"--isa reads compiled kernels, which {flags} would not change; leave it out")
    kernels = read(args.isa)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "kernels": [kernel.data() for kernel in kernels]}, indent=2))
    else:
        show("\n\n".join(map(str, kernels)))
    return 1 if any(kernel.faults for kernel in kernels) else 0


def parse_dtype(name: str, target: Target) -> torch.dtype:
    """A dtype by its name; "fp8" is the target's flavour.

    Raises:
        ValueError: a name that is not known, or "fp8" for a target that has none.
    """
    if name == "fp8":
        if target.fp8 is None:
            raise ValueError(f"dtype 'fp8': {target.arch} has no fp8 of its own; name one of {', '.join(DTYPES)}")
        return DTYPES[f"float8_{target.fp8}"]
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; it must be one of {', '.join(DTYPES)}, fp8")
    return DTYPES[name]


def _named(text: str) -> tuple[str, str]:
    name, _, version = (part.strip() for part in text.partition("="))
    version = version.lstrip("=")
    if not name or not version:
        raise ValueError(f"--with {text!r} does not say what is installed; write NAME=VERSION, as in triton=3.6")
    try:
        Version(version)
    except InvalidVersion:
        raise ValueError(f"--with {text!r} has the version {version!r}, which is not like 1.2.3") from None
    return name, version


def _packages(
    target: Target,
    request: Request | None,
    kernels: Sequence[Kernel],
    named: Mapping[str, str],
    without: Sequence[str],
    *,
    described: bool,
) -> Mapping[str, str | Package]:
    """This machine's packages, or those that come with portable for a described one, then what the user says."""
    here = installed(target, request)
    found: dict[str, str | Package] = {}
    if described:
        bundled = [package for package in known_packages() if package.bundled]
        # what only these devices' torch brings is there with it, whatever this machine has
        found = {package.name: "with torch" for package in bundled if target.vendor in package.vendors}
        found |= {each.name: version for each in bundled if each.name in here and (version := here[each.name].version)}
    else:
        names = {*here, *(name for kernel in kernels for name, _ in kernel.caps.requires)}
        found = {canonicalize_name(name): here[name] for name in names if name in here}
    found.update((canonicalize_name(name), version) for name, version in named.items())
    for name in without:
        found.pop(canonicalize_name(name), None)
    return found


def _layers(args: argparse.Namespace, target: Target) -> list[Layer]:
    dtype = None if args.dtype is None else parse_dtype(args.dtype, target)
    given = {
        "num_heads": args.num_heads,
        "num_kv_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "v_head_dim": args.v_head_dim,
        "window": args.window,
        "softcap": args.softcap,
        "sinks": args.sinks or None,
        "alibi": args.alibi or None,
        "causal": False if args.non_causal else None,
        "cache_layout": args.cache_layout,
        "kv_dtype": None if args.kv_dtype is None else parse_dtype(args.kv_dtype, target),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.model is not None:
        from portable.models import layers_of

        if given:
            raise ValueError(f"--model says what the layers are; {', '.join(given)} cannot be given with it")
        return list(dict.fromkeys(layers_of(args.model, dtype)))
    if args.mla:
        if others := sorted(given.keys() - {"num_heads", "v_head_dim", "kv_dtype"}):
            raise ValueError(f"--mla layers have no {', '.join(others)} to choose; leave it out")
        return [Layer.mla(**{"num_heads": 32, "dtype": dtype or torch.bfloat16, **given})]
    usual = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": dtype or torch.bfloat16}
    return [Layer.gqa(**{**usual, **given})]
