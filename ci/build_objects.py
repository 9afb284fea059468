"""Compiles backends/hip for AMD into backends/hip/objects, for a wheel: users' machines then compile nothing.

    PORTABLE_OBJECTS="--arch gfx942 gfx950" python -m build --wheel --no-isolation

builds them into the wheel alone: setup.py calls this file with what the variable holds.

The recipe is that of the emulated tests (platform/emulated/clang.py), so what ran there is what is loaded on a card.
hipRTC is the fallback at run time, for what is not here; nobody has run it yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from portable.backends.hip import FILES  # noqa: E402
from portable.backends.hip.archs import AMD, FP8_NAMES, NAMES  # noqa: E402
from portable.backends.hip.paged_decode import cut_for, defines  # noqa: E402
from portable.backends.hip.sources import OBJECTS, name_of, sources  # noqa: E402
from portable.backends.hip.state_copy import UNITS  # noqa: E402
from portable.platform.emulated import clang  # noqa: E402


def variants() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(file, defines) of every kernel that a layer with an aligned cache can ask for."""
    types, fp8 = NAMES.values(), FP8_NAMES.values()
    for row, stored in product(types, (*types, *fp8)):
        yield "cache", (f"ROW={row}", f"STORED={stored}")
    for element in types:
        yield "merge", (f"ELEMENT={element}",)
    for unit in UNITS:
        yield "state_copy", (f"UNIT={unit}",)
    yield "refresh", ()
    layers = product((torch.float16, torch.bfloat16), (64, 128, 256), (1, 2, 4, 8), (True, False))
    for dtype, width, most, full in layers:
        for kv_dtype, wide in product((dtype, torch.float8_e4m3fn, torch.float8_e4m3fnuz), (True, False)):
            if wide == (kv_dtype.itemsize == 1) or (kv_dtype.itemsize == 1 and not full):
                named = defines(dtype, kv_dtype, cut_for(width, most, "amd", wide), full=full)
                yield "paged_decode", tuple(f"{name}={value}" for name, value in named.items())


def assembly(file: str, defines: tuple[str, ...], arch: str) -> str:
    path, _ = sources(file, "amd")
    text, _ = clang.build(path.read_text(), path.name, path.parent, arch, [f"-D{each}" for each in defines])
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=sorted(AMD), choices=sorted(AMD))
    parser.add_argument("--only", nargs="+", default=sorted(FILES), choices=sorted(FILES), help="sources")
    parser.add_argument("--into", type=Path, default=OBJECTS)
    given = parser.parse_args()
    wanted = [(file, names) for file, names in variants() if file in given.only]
    for arch in given.arch:
        folder = given.into / arch
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.co"):
            stale.unlink()

        def build(one: tuple[str, tuple[str, ...]], arch: str = arch, folder: Path = folder) -> None:
            made = clang.assemble(assembly(*one, arch), arch)
            (folder / name_of(*one, "amd")).write_bytes(made)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler is a process of its own
            list(pool.map(build, wanted))
        print(f"{arch}: {len(wanted)} objects")
    return 0


if __name__ == "__main__":
    sys.exit(main())
