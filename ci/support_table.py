"""Writes the README's support table from what the kernels declare: python ci/support_table.py [--check]"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from portable.attention import load_kernels  # noqa: E402
from portable.kernel import ATTENTION, PAGES, Kernel, Op  # noqa: E402
from portable.matrix.lanes import read  # noqa: E402
from portable.proof import committed  # noqa: E402
from portable.sets import ANY, Sizes, listed  # noqa: E402

RULES = read(ROOT / "ci" / "matrix.toml").rules
COMPILED = {  # beside those that are emulated
    "triton": ("gfx90a", "gfx1100", "gfx1201", "sm80", "sm90", "sm100"),
    "hip": ("gfx90a", "gfx1100", "gfx1201", "sm90"),
}
BLOCK = re.compile(r"(<!-- table: [^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)


def table() -> str:
    """A row for each kernel, in order of operation; kernels that differ in name only, such as releases, share one."""
    head = "| kernel | devices | dtypes | head dim | page | features | proof |\n|---|---|---|---|---|---|---|\n"
    kernels = sorted(load_kernels(), key=lambda kernel: (list(Op).index(kernel.caps.op), kernel.name))
    rows: dict[tuple[str, ...], list[str]] = {}
    for kernel in kernels:
        name, *cells = row(kernel)
        rows.setdefault((str(kernel.caps.op), *cells), []).append(name)
    return head + "".join(
        f"| {', '.join(names)} ({op}) | {' | '.join(cells)} |\n" for (op, *cells), names in rows.items()
    )


def row(kernel: Kernel) -> Iterable[str]:
    caps = kernel.caps
    yield f"`{kernel.name}`"
    yield "any" if caps.vendors is ANY else f"{names(caps.vendors)}: {names(caps.archs)}"
    fp8 = (
        " + fp8 cache" if any("float8" in str(dtype) for dtype in getattr(caps.kv_dtypes, "__iter__", tuple)()) else ""
    )
    yield names(caps.dtypes) + fp8
    yield sizes(caps.head_dims)
    yield sizes(caps.page_sizes) if caps.op in PAGES else "-"
    yield ", ".join(sorted(caps.features)) if caps.op in ATTENTION else "-"
    yield "; ".join(filter(None, proofs(kernel)))


def names(values: object) -> str:
    return listed(values).removeprefix("one of ").replace("bfloat", "bf").replace("float", "fp")


def sizes(allowed: Sizes) -> str:
    if allowed.only is not None:
        return ", ".join(map(str, sorted(allowed.only)))
    step = "any" if allowed.multiple == 1 else f"x{allowed.multiple}"
    return step + (f" to {allowed.most}" if allowed.most else "")


def proofs(kernel: Kernel) -> Iterable[str]:
    """Where the contract test passed: this machine's kind at every change, others by a committed run."""
    caps, runs = kernel.caps, list(committed(ROOT / "ci" / "results", kernel))
    measured = list(dict.fromkeys(run["arch"] for run in runs if run["level"] == "measured"))
    if caps.vendors is ANY or "cpu" in caps.vendors:
        yield "CPU: measured in CI"
    if caps.provider in COMPILED:  # tests/emulated/test_contract.py, ci/compile_matrix.py, tests/test_hip.py
        if caps.emulated:
            yield "gfx942, gfx950: emulated in CI"
        built = [arch for arch in COMPILED[caps.provider] if arch in caps.archs and arch not in measured]
        yield f"{', '.join(built)}: compiled in CI" if built else ""
    if any(rule.level == "fake" and any(fnmatchcase(kernel.name, each) for each in rule.kernels) for rule in RULES):
        yield "fake in CI"
    yield from (f"{arch}: measured" for arch in measured)


def main(check: bool) -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    wanted = BLOCK.sub(lambda block: block[1] + table() + block[2], text)
    if check:
        if wanted != text:
            print("README.md: the support table is not what the kernels declare; run python ci/support_table.py")
        return int(wanted != text)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the README's support table from what the kernels declare.")
    parser.add_argument("--check", action="store_true", help="only say whether it is that already")
    sys.exit(main(parser.parse_args().check))
