"""Does a wrong instruction show? Drops one at a time from flash attention on the emulated devices:

python ci/mutate.py [--trials 200] [--seed 0] [FILE]

A trial counts where the dropped instruction was live (see portable.platform.emulated.liveness). It is detected if the
run is refused, faults, races or does not end, or if the float32 result has other bits than the kernel as compiled has
on the same emulator; `noticed_share` is what a comparison with float64 alone would have found.

The kernel divides once a row. Where it divides every element, a fifth of its instructions are steps of divisions, which
make up for each other's loss: 85% of 717 (gfx942) and 82% of 609 (gfx950) live instructions were detected then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from portable.platform.emulated import activate  # noqa: E402
from portable.platform.emulated.isa import Code, decode, instruction  # noqa: E402
from portable.platform.emulated.liveness import Liveness, liveness  # noqa: E402
from portable.platform.emulated.machine import BUDGET, Buffer, ExecutionError, launch, pack  # noqa: E402
from portable.platform.emulated.memory import MemoryFault  # noqa: E402
from portable.platform.emulated.waves import LANES, Array  # noqa: E402

ARCHS = ("gfx942", "gfx950")
HEADS, SEQ_LEN, DIM, ROWS, KEYS, WARPS, SCALE = 2, 150, 64, 64, 32, 4, 0.125
GRID = (-(-SEQ_LEN // ROWS), HEADS, 1)
TOLERANCE = 2e-3  # of the kernel's own test with float16
DTYPES = (torch.float16, torch.float16, torch.float16, torch.float32)  # q, k, v, out
GAP = 1 << 16  # bytes; a workgroup's rows of q take 8,192
# They write no register but MODE, and no memory.
LEFT_OUT: tuple[str, ...] = ("s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_barrier", "s_endpgm", "s_branch")
LEFT_OUT += ("s_cbranch", "s_setreg", "buffer_inv", "buffer_wbl2", "s_icache_inv", "s_dcache")


@dataclass(frozen=True)
class Trial:
    """One dropped instruction; `outcome` is "same bits", "other bits", "beyond tolerance", or why nothing resulted."""

    line: int
    text: str
    executed: bool
    live: bool
    outcome: str

    @property
    def detected(self) -> bool:
        return self.outcome != "same bits"

    @property
    def noticed(self) -> bool:
        """Without the unchanged kernel's bits to compare with."""
        return self.outcome not in ("same bits", "other bits")


class Attention:
    """A compiled kernel with fixed inputs."""

    def __init__(self, arch: str) -> None:
        attention_kernel = importlib.import_module("emulated.test_kernels").attention_kernel
        generator = torch.Generator().manual_seed(0)
        q, k, v, self.out = self.tensors = [separate((HEADS, SEQ_LEN, DIM), dtype) for dtype in DTYPES]
        for each in (q, k, v):
            each.copy_(torch.randn(each.shape, generator=generator))
        self.exact = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True, scale=SCALE
        )
        constants = {"rows": ROWS, "keys": KEYS, "dim": DIM, "stages": 2}
        options = {"num_warps": WARPS, "matrix_instr_nonkdim": 16}
        with activate(arch):
            compiled = attention_kernel[GRID](q, k, v, self.out, SEQ_LEN, SCALE, **constants, **options)
        self.code = decode(compiled.asm["amdgcn"], compiled.metadata.name)
        self.lds_bytes: int = compiled.metadata.shared
        self.buffers = [
            Buffer(name, each.numpy().view(np.uint8).reshape(-1))
            for name, each in zip(("q", "k", "v", "out"), self.tensors, strict=True)
        ]
        pointers: list[tuple[str, int | float]] = [("*", each.data_ptr()) for each in self.tensors]
        scratch = [("*", 0)] * 2  # global and profile scratch, of which this kernel uses none
        self.arguments = pack([*pointers, ("i32", SEQ_LEN), ("fp32", SCALE), *scratch])

    def run(self, code: Code, budget: int = BUDGET) -> Array:
        """The bits of the result."""
        self.out.fill_(torch.nan)
        launch(code, GRID, (WARPS * LANES, 1, 1), self.arguments, self.buffers, self.lds_bytes, budget)
        bits: Array = self.out.numpy().view(np.uint32).copy()
        return bits

    def liveness(self) -> Liveness:
        self.out.fill_(torch.nan)
        block = (WARPS * LANES, 1, 1)
        return liveness(self.code, GRID, block, self.arguments, self.buffers, self.lds_bytes)

    @property
    def error(self) -> float:
        """The largest difference of the last result from float64; NaN where it has one."""
        return float((self.out.double() - self.exact).abs().max())


def separate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros with nothing that a kernel may touch within `GAP` bytes of either end."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.zeros(size + 2 * GAP, dtype=torch.uint8)[GAP : GAP + size].view(dtype).view(shape)


def without(code: Code, number: int) -> Code:
    """The code with a no-op in the place of one instruction, so that labels stay where they are."""
    old, nop = code.instructions[number], instruction("s_nop 0")
    nop = replace(nop, line=old.line, source=old.source)
    return replace(code, instructions=(*code.instructions[:number], nop, *code.instructions[number + 1 :]))


def trials(arch: str, count: int, seed: int) -> list[Trial]:
    """Drop `count` different instructions, one at a time, chosen at random.

    Raises:
        RuntimeError: the kernel as compiled is wrong already.
    """
    attention = Attention(arch)
    found = attention.liveness()
    right = attention.run(attention.code)
    if not attention.error < TOLERANCE:
        raise RuntimeError(f"{arch}: the kernel as compiled is {attention.error:.2g} away from float64")
    instructions = attention.code.instructions
    candidates = [n for n, each in enumerate(instructions) if not each.name.startswith(LEFT_OUT)]
    done = []
    for number in random.Random(seed).sample(candidates, min(count, len(candidates))):
        try:
            bits = attention.run(without(attention.code, number), budget=found.total)
            if not attention.error < TOLERANCE:
                outcome = "beyond tolerance"
            else:
                outcome = "same bits" if np.array_equal(bits, right) else "other bits"
        except (ExecutionError, MemoryFault) as error:
            outcome = f"{type(error).__name__}: {error}"
        each, executed, live = instructions[number], bool(found.executed[number]), bool(found.live[number])
        done.append(Trial(each.line, each.text, executed, live, outcome))
    return sorted(done, key=lambda trial: trial.line)


def summary(arch: str, seed: int, done: Sequence[Trial]) -> dict[str, Any]:
    """What a result file keeps of an architecture's trials."""
    live = [trial for trial in done if trial.live]
    return {
        "arch": arch,
        "seed": seed,
        "trials": len(done),
        "live": len(live),
        "detected": sum(trial.detected for trial in live),
        "reported": sum("Error" in trial.outcome or "Fault" in trial.outcome for trial in live),
        "beyond_tolerance": sum(trial.outcome == "beyond tolerance" for trial in live),
        "other_bits": sum(trial.outcome == "other bits" for trial in live),
        "detected_share": round(sum(trial.detected for trial in live) / max(1, len(live)), 4),
        "noticed_share": round(sum(trial.noticed for trial in live) / max(1, len(live)), 4),
        "survivors": [{"line": trial.line, "text": trial.text} for trial in live if not trial.detected],
        "dead_but_detected": [asdict(trial) for trial in done if trial.detected and not trial.live],
    }


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="instructions dropped on each device")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("file", nargs="?", type=Path, help="where the result goes; belongs in ci/results/")
    options = parser.parse_args()
    results = [summary(arch, options.seed, trials(arch, options.trials, options.seed)) for arch in ARCHS]
    text = {
        "kernel": f"causal flash attention, fp16 in, fp32 out, {HEADS} heads, {SEQ_LEN} tokens, dim {DIM}, 2 stages",
        "triton": triton.__version__,
        "numpy": np.__version__,
        "archs": results,
    }
    written = json.dumps(text, indent=1) + "\n"
    print(written, end="")
    if options.file:
        options.file.write_text(written, encoding="utf-8")
    return int(any(result["detected_share"] < 0.85 or result["dead_but_detected"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
