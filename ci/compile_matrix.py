"""Every Triton kernel, compiled ahead of time for every architecture: its registers, spills, LDS, loads, products.

    python ci/compile_matrix.py --check       the limits hold, and the committed table is what compiles now
    python ci/compile_matrix.py --update      writes ci/results/compile-matrix.json
    python ci/compile_matrix.py --archs sm86  the limits hold for architectures that the table leaves out
    python ci/compile_matrix.py --aiter       beside aiter's Triton attention: ci/results/compile-aiter.json

The kernels' own launchers are called, with their launches recorded, so tiles and arguments are those of real launches,
and so is what Triton assumes of them: multiples of 16, and storages within 2 GiB or beyond. Nothing needs a GPU.
Numbers are compared where Triton's version is the table's; the limits hold for any.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import compile_cases
import compile_facts

TABLE = Path(__file__).parent / "results" / "compile-matrix.json"
ARCHS = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201", "sm90", "sm80", "sm100")
RDNA = ("gfx1100", "gfx1201")
# What spills vector registers there; nothing else may
SPILLS_ON_RDNA = {
    "decode d256 softcap | attend_kernel",
    "verify 8 d256 8 heads a KV head | attend_kernel",
    "conv1d 5376 channels | _conv1d",
    "mamba2 float32 | ssd_scan",
}
# Words of cases whose kernels spill on no NVIDIA architecture either; others do, where that was the fastest
MLA = ("mla", "192/128")
MLA_ALONE = ("sm86", "sm89", "sm120")  # architectures of which the table has these cases and no others


def jobs(archs: Sequence[str] = ARCHS) -> Iterator[tuple[str, str]]:
    """(arch, case): the archs that are built for first, so that the slowest do not come last."""
    for arch in (*archs, *(MLA_ALONE if archs == ARCHS else ())):
        for name, case in compile_cases.CASES.items():
            if (case.archs is None or arch in case.archs) and (arch in archs or any(word in name for word in MLA)):
                yield arch, name


def compiled(job: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Rows of one case on one arch, by "case kernel arch"; a kernel that differs from launch to launch is numbered."""
    arch, name = job
    rows: dict[str, dict[str, Any]] = {}
    for function, made in compile_cases.compiled(compile_cases.CASES[name], arch):
        key, number = f"{name} | {function} | {arch}", 2
        while key in rows:
            key, number = f"{name} | {function} {number} | {arch}", number + 1
        rows[key] = compile_facts.facts(made, arch)
    return rows


def table(processes: int, archs: Sequence[str] = ARCHS) -> dict[str, Any]:
    import triton

    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for found in pool.map(compiled, list(jobs(archs))):
            rows |= found
    return {"triton": triton.__version__, "rows": dict(sorted(rows.items()))}


def faults(made: dict[str, Any]) -> list[str]:
    """What no default tile may do, a sentence each."""
    found = []
    for key, row in made["rows"].items():
        case, kernel, arch = key.split(" | ")
        products = kernel.startswith(("attend", "attention", "ssd")) and kernel != "ssd_pass"
        spills = arch in RDNA and f"{case} | {kernel}" in SPILLS_ON_RDNA
        # 32 keys of 64 bytes are 4 bytes for each lane of 8 waves
        least = 4 if kernel == "attention" and "fp8" in case else 16
        wrong = compile_facts.faults(row, arch, kernel.split()[0], products, spills, least)
        found += [f"{key}: {fault}" for fault in wrong]
        if row.get("stack") and any(word in case for word in MLA):
            found.append(f"{key}: {row['stack']} bytes of registers are spilled a lane")
    return found


def differences(made: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What differs from the table; not the code's size on RDNA, which is not the same each time: 42,936 or 42,940."""
    old, new = before["rows"], made["rows"]
    found = [f"{key}: not in the table" for key in new.keys() - old.keys()]
    found += [f"{key}: in the table, and no longer compiled" for key in old.keys() - new.keys()]
    for key in new.keys() & old.keys():
        sized = not key.endswith(RDNA)
        changed = [
            f"{k} {old[key].get(k)} -> {v}"
            for k, v in new[key].items()
            if old[key].get(k) != v and (sized or k != "bytes")
        ]
        found += [f"{key}: {', '.join(changed)}"] if changed else []
    return sorted(found)


def written(made: dict[str, Any]) -> str:
    """JSON with a line per row."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in made["rows"].items())
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in made.items() if key != "rows")
    return f'{{\n{head}"rows": {{\n{rows}\n}}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    parser.add_argument("--update", action="store_true", help="write the committed table")
    parser.add_argument("--archs", default=",".join(ARCHS), help="of these only, the limits and no table")
    parser.add_argument("--aiter", action="store_true", help="compare with aiter's Triton attention")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    if arguments.aiter:
        import compile_aiter

        return compile_aiter.main()
    start, archs = time.monotonic(), tuple(arguments.archs.split(","))
    if arguments.update and archs != ARCHS:
        parser.error("--update writes the whole table; give no --archs")
    made = table(arguments.processes, archs)
    print(f"{len(made['rows'])} kernels compiled by triton {made['triton']} in {time.monotonic() - start:.0f} s")
    wrong = faults(made)
    if arguments.update:
        TABLE.write_text(written(made))
    elif arguments.check and archs == ARCHS:
        before = json.loads(TABLE.read_text())
        if before["triton"] == made["triton"]:
            wrong += differences(made, before)
        else:
            print(f"the table is of triton {before['triton']}: only the limits are checked")
    elif archs == ARCHS:
        print(written(made))
    for each in wrong:
        print(each)
    if wrong:
        print(f"{len(wrong)} faults; python ci/compile_matrix.py --update writes the table anew")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
