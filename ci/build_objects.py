"""Compiles backends/hip for AMD into backends/hip/objects, for a wheel: users' machines then compile nothing.

    PORTABLE_OBJECTS="" python -m build --wheel --no-isolation       a release: every architecture
    PORTABLE_OBJECTS="--arch gfx942 gfx950" python -m build --wheel --no-isolation
    python ci/build_objects.py --check                               compiles all, looks at them and keeps none

setup.py calls this file with what the variable holds, and the objects are in the wheel alone. The recipe is that of the
emulated tests (platform/emulated/clang.py), so what ran there is what is loaded on a card. hipRTC is the fallback at
run time, for what is not here; nobody has run it yet.

An object is named by what it is made from. One that is there is not made again, so a build that was ended goes on; one
that nothing asks for any more is removed. An object that spills, that takes more LDS than a workgroup may have, or that
reads memory in pieces where 16 bytes are meant is a fault, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
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
from portable.platform.amd import ARCHS  # noqa: E402
from portable.platform.emulated import clang  # noqa: E402

WIDE = {16: {"dwordx4", "b128"}, 12: {"dwordx3", "b96"}, 8: {"dwordx2", "b64"}, 4: {"dword", "b32"}}  # loads, by bytes
Variant = tuple[str, tuple[str, ...]]  # file, defines


def variants(arch: str = "gfx90a") -> Iterator[Variant]:
    """(file, defines) of every kernel that a layer with an aligned cache can ask for, each once."""
    return iter(dict.fromkeys(_variants(arch)))


def _variants(arch: str) -> Iterator[Variant]:
    types, fp8 = NAMES.values(), FP8_NAMES.values()
    for row, stored in product(types, (*types, *fp8)):
        yield "cache", (f"ROW={row}", f"STORED={stored}")
    for element in types:
        yield "merge", (f"ELEMENT={element}",)
    for unit in UNITS:
        yield "state_copy", (f"UNIT={unit}",)
    yield "refresh", ()
    layers = product((torch.float16, torch.bfloat16), (64, 128, 256), (1, 2, 4, 8, 16), (True, False))
    for dtype, width, most, full in layers:
        for kv_dtype, wide in product((dtype, torch.float8_e4m3fn, torch.float8_e4m3fnuz), (True, False)):
            if wide == (kv_dtype.itemsize == 1) or (kv_dtype.itemsize == 1 and not full):
                named = defines(dtype, kv_dtype, cut_for(width, most, arch, wide, kv_dtype.itemsize == 1), full=full)
                yield "paged_decode", tuple(f"{name}={value}" for name, value in named.items())


def assembly(file: str, defines: tuple[str, ...], arch: str) -> str:
    path, _ = sources(file, "amd")
    text, _ = clang.build(path.read_text(), path.name, path.parent, arch, [f"-D{each}" for each in defines])
    return text


def faults(file: str, defines: tuple[str, ...], arch: str, text: str) -> list[str]:
    """What code of a variant may not do, a sentence each."""
    found = []
    counted = re.findall(r"^    \.(\w+): +(\d+)$", text, re.MULTILINE)
    if not any(name == "vgpr_spill_count" for name, _ in counted):
        found.append("there are no facts of its kernels")
    for name, value in ((name, int(value)) for name, value in counted):
        if name in ("vgpr_spill_count", "private_segment_fixed_size") and value:
            found.append(f"{name} is {value}")
        if name == "group_segment_fixed_size" and value > (most := ARCHS[arch].shared_memory):
            found.append(f"it takes {value} bytes of LDS, and a workgroup may have {most}")
    if file == "paged_decode":
        found += [] if reads_whole(defines, text) else ["no loop reads K and V by whole vectors"]
    # refresh moves lists of numbers, state_copy what its unit says
    elif file in ("cache", "merge") or "UNIT=16" in defines:
        found += [] if set(loads(text)) & WIDE[16] else ["no load is of 16 bytes"]
        found += ["loads of 4 and 12 bytes are one of 16"] if set(loads(text)) & WIDE[12] else []
    return [f"{file} {' '.join(defines)} | {arch}: {each}" for each in found]


def loads(text: str) -> list[str]:
    """Of memory, in an assembly: "dwordx4", "b128", ..."""
    return re.findall(r"\b(?:global|flat)_load_(\w+)", text)


def reads_whole(defines: tuple[str, ...], text: str) -> bool:
    """Whether a loop reads K and V by vectors, and else numbers of pages only.

    A vector is 16 bytes, or 8 elements where rows are no multiple of 16 bytes.
    """
    named = dict(each.split("=") for each in defines)
    vector = WIDE[int(named["VEC"]) * (1 if named["STORED"] in FP8_NAMES.values() else 2)]
    every = (loads(loop) for loop in loops(text))
    return any(len([each for each in one if each in vector]) >= 2 and {*one} <= vector | WIDE[4] for one in every)


def loops(text: str) -> Iterator[str]:
    """The lines of each loop of an assembly."""
    lines = text.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if re.match(r"\.?L?BB\d+_\d+:", line)}
    for number, line in enumerate(lines):
        back = re.search(r"s_c?branch\w* (\.?L?BB\d+_\d+)", line)
        if back and labels[back[1]] <= number:
            yield "\n".join(lines[labels[back[1]] : number + 1])


def build(variant: Variant, arch: str, folder: Path | None) -> list[str]:
    """Make one object, whole or not at all, where it is not there; its faults."""
    file = None if folder is None else folder / name_of(*variant, "amd")
    if file is not None and file.is_file():
        return []
    text = assembly(*variant, arch)
    wrong = faults(*variant, arch, text)
    made = clang.assemble(text, arch)
    if file is not None and not wrong:
        part = file.with_suffix(".part")
        part.write_bytes(made)
        part.replace(file)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=sorted(AMD), choices=sorted(AMD))
    parser.add_argument("--only", nargs="+", default=sorted(FILES), choices=sorted(FILES), help="sources")
    parser.add_argument("--into", type=Path, default=OBJECTS)
    parser.add_argument("--check", action="store_true", help="keep nothing")
    given = parser.parse_args()
    wrong: list[str] = []
    for arch in given.arch:
        wanted = [(file, names) for file, names in variants(arch) if file in given.only]
        start, folder = time.monotonic(), None if given.check else given.into / arch
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            asked = {name_of(*variant, "amd") for variant in variants(arch)}
            for stale in (path for path in folder.iterdir() if path.name not in asked):
                stale.unlink()
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler is a process of its own
            found = list(pool.map(lambda one, arch=arch, folder=folder: build(one, arch, folder), wanted))
        wrong += (each for one in found for each in one)
        print(f"{arch}: {len(wanted)} objects in {time.monotonic() - start:.0f} s", flush=True)
    print("\n".join(wrong) if wrong else "no faults")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
