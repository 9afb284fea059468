"""Recurrent layers on a GPU, beside mamba_ssm's Triton kernels: python ci/benchmarks/mamba.py [--peers DIR]

`mamba_stage.py DIR` gets the peers. Shapes are those of Mamba2-2.7B, and 64 heads in 8 groups; bf16, states in float32.
Bytes of a rate are what must be read and written once; the card's own copy is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

from benchmarks.timing import Job, Measure, contest, relative_error  # noqa: E402
from portable.attention import load_kernels  # noqa: E402
from portable.cache import allocate_states  # noqa: E402
from portable.chunks import aligned_chunks  # noqa: E402
from portable.kernel import Kernel, Op  # noqa: E402
from portable.layer import Layer  # noqa: E402
from portable.ragged import cdiv  # noqa: E402
from portable.states import DecodeStates, PrefillStates, SsmTensors  # noqa: E402

LAYERS = {
    "80 heads, 1 group": Layer.mamba2(num_heads=80),
    "64 heads, 8 groups": Layer.mamba2(num_heads=64, num_groups=8),
}
MAMBA1 = Layer.mamba1(num_channels=5120)
CONV_BLOCK = 64
BATCH = 256
COPIES = 16
Calls = Callable[[], list[Callable[[], object]] | None]


def kernel(op: Op, layer: Layer) -> Kernel:
    return next(
        each
        for each in load_kernels()
        if each.caps.provider == "triton" and each.caps.op is op and layer.family in each.caps.families
    )


def prefill(lens: list[int], chunk: int, device: str) -> PrefillStates:
    """Requests from the start, request i in slot i."""
    new = np.array(lens, np.int32)
    pieces = aligned_chunks(0 * new, new, chunk)
    slots = np.where(np.isin(np.arange(len(pieces.request)), pieces.last), pieces.request, -1)
    blocks = cdiv(new, CONV_BLOCK)

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=device)

    rows = np.arange(len(new))
    return PrefillStates(
        requests=slice(0, len(new)),
        tokens=slice(0, int(new.sum())),
        cu_seqlens_q=integers([0, *np.cumsum(new)]),
        has_initial=torch.zeros(len(new), dtype=torch.bool, device=device),
        initial_indices=integers(rows),
        state_indices=integers(rows),
        cu_chunks=integers(pieces.cu_seqlens),
        chunk_requests=integers(pieces.request),
        chunk_state_indices=integers(slots),
        last_chunks=integers(pieces.last),
        checkpoint_chunks=None,
        conv_requests=integers(np.repeat(rows, blocks)),
        conv_offsets=integers(np.concatenate([np.arange(count) for count in blocks])),
        conv_block=CONV_BLOCK,
        max_query_len=int(new.max()),
        pad_slot=-1,
    )


def decode(requests: int, device: str) -> DecodeStates:
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    cu = torch.arange(requests + 1, dtype=torch.int32, device=device)
    return DecodeStates(slice(0, requests), slice(0, requests), cu, rows, rows[:, None], None, 1, -1)


@dataclass
class Problem:
    """The tensors of one layer: x, b and c are columns of what the convolution returns."""

    layer: Layer
    tokens: int
    device: str

    def __post_init__(self) -> None:
        layer, tokens = self.layer, self.tokens
        heads, width, groups, dim = layer.num_heads, layer.qk_head_dim, layer.num_groups, layer.state_dim
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = layer.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        inner = heads * width
        self.channels = inner + 2 * groups * dim
        self.mixed = normal(tokens, self.channels)
        x, b, c = self.mixed.split([inner, groups * dim, groups * dim], 1)
        self.x, self.b, self.c = (
            x.unflatten(1, (heads, width)),
            b.unflatten(1, (groups, dim)),
            c.unflatten(1, (groups, dim)),
        )
        self.dt = normal(tokens, heads)
        one = layer.family == "mamba1"
        a = torch.arange(1, dim + 1, dtype=torch.float32, device=self.device).repeat(heads, 1) if one else None
        self.tensors = SsmTensors(
            a=-(torch.linspace(1, 16, heads, device=self.device) if a is None else a),
            d=torch.ones(heads, device=self.device),
            dt_bias=torch.linspace(-6.9, -2.3, heads, device=self.device),
        )
        self.weight, self.bias = normal(self.channels, layer.conv_width), normal(self.channels)
        self.out = torch.empty((tokens, heads, width), dtype=layer.dtype, device=self.device)

    def pool(self, slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        layer = self.layer
        return torch.zeros(
            (slots, layer.num_heads, layer.qk_head_dim, layer.state_dim), dtype=dtype, device=self.device
        )

    def nbytes(self, slots: int, itemsize: int = 4) -> int:
        """x, dt, b, c and out once; a state per slot read and written."""
        return (
            2 * (self.mixed.numel() + self.dt.numel() + self.out.numel()) + 2 * itemsize * slots * self.pool(1).numel()
        )


def ours(op: Op, problem: Problem, pool: torch.Tensor, states: Any) -> Calls:
    run = kernel(op, problem.layer).run
    p = problem
    call = partial(run, p.x, p.dt, p.b, p.c, None, pool, states, p.layer, p.tensors, p.out)
    return lambda: [call]


def peer_scan(problem: Problem, lens: list[int]) -> Calls:
    """One sequence, or several as rows of a batch of equal lengths."""
    scan: Callable[..., Any] = import_module("mamba_ssm.ops.triton.ssd_combined")._mamba_chunk_scan_combined_fwd
    p, t, rows = problem, problem.tensors, len(lens)

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(rows, -1, *x.shape[1:]) if rows > 1 else x[None]

    def call() -> object:
        out = scan(
            batched(p.x),
            batched(p.dt),
            t.a,
            batched(p.b),
            batched(p.c),
            p.layer.chunk,
            D=t.d,
            dt_bias=t.dt_bias,
            dt_softplus=True,
        )
        return torch.flatten(out[0], 0, 1)

    return lambda: [call]


def peer_update(problem: Problem, pool: torch.Tensor, rows: torch.Tensor) -> Calls:
    update = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    p, t = problem, problem.tensors
    heads, width, dim = pool.shape[1:]
    a = t.a[:, None, None].expand(heads, width, dim)
    assert t.d is not None and t.dt_bias is not None
    d, bias = (x[:, None].expand(heads, width) for x in (t.d, t.dt_bias))
    dt = p.dt[:, :, None].expand(-1, heads, width)

    def call() -> object:
        return update(pool, p.x, dt, a, p.b, p.c, d, None, bias, True, rows)

    return lambda: [call]


def copied(device: str, layers: int) -> tuple[int, dict[str, Calls], torch.Tensor]:
    """Bytes, the contestants and what they write in one pool: states of two groups of layers, each by its own pairs."""
    layer = LAYERS["80 heads, 1 group"]
    pools = [pool.normal_() for _ in range(layers) for pool in allocate_states(layer, 3 * COPIES, device)]
    groups, each = (pools[: 2 * cdiv(layers, 2)], pools[2 * cdiv(layers, 2) :]), torch.arange(COPIES, device=device)
    pairs = [torch.stack([each, each + (1 + g) * COPIES], 1) for g in range(2)]
    copies, cu_copies = torch.cat(pairs), COPIES * torch.arange(3, dtype=torch.int32, device=device)
    run = next(each.run for each in load_kernels() if each.name == "triton.state_copy")

    def one_by_one() -> None:
        for group, listed in zip(groups, pairs, strict=True):
            for pool in group:
                pool[listed[:, 1]] = pool[listed[:, 0]]

    calls: dict[str, Calls] = {
        "portable": lambda: [partial(run, groups, copies, cu_copies)],
        "a pool at a time": lambda: [one_by_one],
    }
    return 2 * COPIES * sum(pool[0].nbytes for pool in pools), calls, pools[0][COPIES : 2 * COPIES]


def sections(device: str, tokens: int, peers: bool) -> Iterator[tuple[str, int, list[Job]]]:
    """(name, bytes, contestants); the first is ours, and the error of the others is beside it."""
    problem = Problem(MAMBA1, tokens, device)
    states = prefill([tokens], 256, device)
    calls = {"portable": ours(Op.SSD, problem, problem.pool(1), states)}
    yield f"scan 1x{tokens}, 5120 channels", problem.nbytes(1), jobs(calls, problem)
    for name, layer in (*LAYERS.items(), ("5120 channels", MAMBA1)):
        for dtype in (torch.float32, torch.bfloat16):
            problem = Problem(layer, BATCH, device)
            pool, running = problem.pool(BATCH, dtype), decode(BATCH, device)
            calls = {"portable": ours(Op.STATE_UPDATE, problem, pool, running)}
            if peers and layer.family == "mamba2":
                calls["mamba_ssm"] = peer_update(problem, problem.pool(BATCH, dtype), running.initial_indices)
            label = f"update batch {BATCH}, {name}, {str(dtype)[6:]} states"
            yield label, problem.nbytes(BATCH, dtype.itemsize), jobs(calls, problem)
    layer = LAYERS["80 heads, 1 group"]
    parts: tuple[tuple[int, Any], ...] = ((tokens, prefill([tokens], 256, device)), (BATCH, decode(BATCH, device)))
    for count, made in parts:
        problem = Problem(layer, count, device)
        pool = torch.zeros((BATCH, 3, problem.channels), dtype=torch.bfloat16, device=device)
        out = torch.empty_like(problem.mixed)
        run = partial(kernel(Op.CONV1D, layer).run, problem.mixed, problem.weight, problem.bias, pool, made, out, True)
        moved = 4 * problem.mixed.numel() + (4 * pool.numel() if count == BATCH else 0)
        calls = {"portable": lambda run=run: [run]}  # type: ignore[misc]
        yield f"conv1d {'1x' if count == tokens else 'update batch '}{count}", moved, jobs(calls, problem, out)
    moved, copying, written = copied(device, max(1, tokens // 1024))
    yield f"copy {COPIES} states of {max(1, tokens // 1024)} layers", moved, jobs(copying, problem, written)
    for lens in ([tokens], [tokens // 16] * 16):
        for name, layer in LAYERS.items():
            problem = Problem(layer, tokens, device)
            pool, states = problem.pool(len(lens)), prefill(lens, layer.chunk or 256, device)
            calls = {"portable": ours(Op.SSD, problem, pool, states)}
            if peers:
                calls["mamba_ssm"] = peer_scan(problem, lens)
            yield f"ssd {len(lens)}x{lens[0]}, {name}", problem.nbytes(len(lens)), jobs(calls, problem)


def jobs(calls: dict[str, Calls], problem: Problem, out: torch.Tensor | None = None) -> list[Job]:
    """Contestants; the peer's result is beside what ours left."""
    mine = problem.out if out is None else out
    kept: list[torch.Tensor] = []
    errors: dict[str, float] = {}

    def error(name: str, result: object) -> float:
        """Of the first call: a state moves on with each."""
        if name == "portable" and not kept:
            kept.append(mine.clone())
        if name not in errors:
            errors[name] = relative_error(result if isinstance(result, torch.Tensor) else mine, kept[0])
        return errors[name]

    outputs = {"portable": [mine]}
    return [
        Job(name, each, outputs.get(name, [torch.empty(1, device=mine.device)]), partial(error, name), 0.03)
        for name, each in calls.items()
    ]


def copy_rate(device: str, mib: int) -> float:
    """TB/s of a kernel that copies, read and written bytes."""
    x = torch.empty(mib << 19, dtype=torch.bfloat16, device=device).normal_()
    y = torch.empty_like(x)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x), "times": lambda: torch.mul(x, 1, out=y)}
    made = [Job(name, partial(list, [call]), [y[:1]], lambda _: 0.0, 1.0) for name, call in ways.items()]
    return 4e-6 * len(x) / min(each.us for each in contest(made, 20.0, 10.0, lambda _: True).values())


def tune_briefly() -> None:
    """The peers time 42 configurations at their first call, 0.2 s each: 25 ms are enough to rank them."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    for name in (
        "ssd_combined",
        "selective_state_update",
        "ssd_bmm",
        "ssd_chunk_scan",
        "ssd_chunk_state",
        "ssd_state_passing",
    ):
        for value in vars(import_module(f"mamba_ssm.ops.triton.{name}")).values():
            if isinstance(value, Autotuner):
                value._do_bench = partial(do_bench, warmup=5, rep=20)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder that mamba_stage.py filled")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="sections whose names hold this")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=30.0, help="ms of timing for each contestant")
    args = parser.parse_args(argv)
    peers = args.peers is not None
    if peers:
        sys.path.insert(0, str(args.peers))
        try:
            tune_briefly()
        except Exception as problem:
            print(f"mamba_ssm does not import here, so it takes no part: {type(problem).__name__}: {problem}")
            peers = False
    gpu = args.device != "cpu"
    found: dict[str, Any] = {"copy TB/s": {str(mib): copy_rate(args.device, mib) for mib in (64, 512) if gpu}}
    print(found, flush=True)
    for name, moved, contestants in sections(args.device, args.tokens, peers):
        if args.only not in name:
            continue
        measured: dict[str, Measure] = contest(contestants, args.budget, 20.0, lambda _: True)
        found[name] = {"bytes": moved, **{who: asdict(each) for who, each in measured.items()}}
        for who, each in measured.items():
            rate = moved * 1e-6 / each.us
            print(
                f"{name:48} {who:10} {each.us:9.1f} us {rate:6.3f} TB/s  error {each.error:.2e} {each.failed}",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
