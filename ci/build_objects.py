"""Compiles backends/hip for AMD into backends/hip/objects, for a wheel: users' machines then compile nothing.

The recipe is that of the emulated tests (platform/emulated/clang.py), so what ran there is what is loaded on a card.
hipRTC is the fallback at run time, for what is not here; nobody has run it yet.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from portable.backends.hip.archs import AMD, FP8_NAMES, NAMES  # noqa: E402
from portable.backends.hip.launch import OBJECTS, name_of, sources  # noqa: E402
from portable.platform.emulated import clang  # noqa: E402


def variants() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(file, defines) of every kernel that a layer with an aligned cache can ask for."""
    types, fp8 = NAMES.values(), FP8_NAMES.values()
    for row, stored in product(types, (*types, *fp8)):
        yield "cache", (f"ROW={row}", f"STORED={stored}")
    for element in types:
        yield "merge", (f"ELEMENT={element}",)
    for element, eighths, rows in product(("fp16", "bf16"), (1, 2, 4), (1, 2, 4)):
        for stored in (element, "e4m3fn", "e4m3fnuz"):
            sizes = (f"EIGHTS={eighths}", f"ROWS={rows}", "VECTOR=1")
            yield "paged_decode", (f"ELEMENT={element}", f"STORED={stored}", *sizes)


def assembly(file: str, defines: tuple[str, ...], arch: str) -> str:
    path, _ = sources(file, "amd")
    text, _ = clang.build(path.read_text(), path.name, path.parent, arch, [f"-D{each}" for each in defines])
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=sorted(AMD), choices=sorted(AMD))
    archs = parser.parse_args().arch
    for arch in archs:
        shutil.rmtree(OBJECTS / arch, ignore_errors=True)
        (OBJECTS / arch).mkdir(parents=True)
        for file, defines in variants():
            made = clang.assemble(assembly(file, defines, arch), arch)
            (OBJECTS / arch / name_of(file, defines, "amd")).write_bytes(made)
        print(f"{arch}: {len(list((OBJECTS / arch).iterdir()))} objects")
    return 0


if __name__ == "__main__":
    sys.exit(main())
