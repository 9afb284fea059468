"""Compiles every variant of backends/hip for NVIDIA, with NVRTC and no GPU: python ci/compile_hip.py [ARCH ...]"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from build_objects import variants  # noqa: E402

from portable.backends.hip import runtime  # noqa: E402
from portable.backends.hip.archs import NVIDIA  # noqa: E402
from portable.backends.hip.sources import sources  # noqa: E402


def fault(arch: str, file: str, defines: tuple[str, ...]) -> str | None:
    """Why a variant does not compile for an architecture, or None."""
    path, headers = sources(file, "nvidia")
    try:
        runtime.Compiler(runtime.NVIDIA).compile(path.name, path.read_text(), headers, f"sm_{arch[2:]}", defines)
    except RuntimeError as error:
        return f"{file} {' '.join(defines)} | {arch}: {error}"
    return None


def main(archs: list[str]) -> int:
    start = time.monotonic()
    jobs = [(arch, *variant) for arch in archs or sorted(NVIDIA) for variant in variants(arch)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        wrong = [found for found in pool.map(fault, *zip(*jobs, strict=True), chunksize=4) if found]
    print("\n".join([*wrong, f"{len(jobs)} objects, {len(wrong)} faults, in {time.monotonic() - start:.0f} s"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
