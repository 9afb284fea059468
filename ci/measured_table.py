"""Writes the README's table of measurements from ci/results: python ci/measured_table.py [--check]"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]

from benchmarks.table import markdown  # noqa: E402

BLOCK = re.compile(r"(<!-- measured: [^\n]*-->\n).*?(<!-- end of measured -->)", re.DOTALL)


def measured(results: Path) -> str:
    """Every committed run of the attention benchmark: where, with what, and its rows."""
    files = sorted(results.glob("attention-*.json"), key=lambda file: (len(file.name), file.name))
    return "\n".join(described(json.loads(file.read_text(encoding="utf-8"))) for file in files)


def described(result: dict[str, Any]) -> str:
    machine, ceilings = result["machine"], result["ceilings"]
    peers = ", ".join(f"{name} {found['version']}" for name, found in machine.get("peers", {}).items())
    versions = f"torch {machine['torch']}, Triton {machine['triton']}" + (f", peers from {peers}" if peers else "")
    speed = ""
    if not math.isnan(ceilings["read TB/s"]):  # else the run left them out
        read, matmul = ceilings["read TB/s"], ceilings["matmul TFLOP/s"]
        speed = f" that reads {read:.2f} TB/s, multiplies at {matmul:.0f} TFLOP/s (bf16)"
    return f"One {machine['card']}{speed}; {versions}.\n\n{markdown(result)}"


def main(check: bool) -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    wanted = BLOCK.sub(lambda block: block[1] + measured(ROOT / "ci" / "results") + block[2], text)
    if check:
        if wanted != text:
            print("README.md: the measurements are not those of ci/results; run python ci/measured_table.py")
        return int(wanted != text)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the README's measurements from ci/results.")
    parser.add_argument("--check", action="store_true", help="only say whether they are that already")
    sys.exit(main(parser.parse_args().check))
