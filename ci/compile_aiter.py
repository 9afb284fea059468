"""aiter's Triton attention kernels, compiled beside ours for MI300 and MI350: how busy prefill's hot loop can keep the
matrix units, and the registers and occupancy of decode.

The wheel is fetched by name into a cache when this runs, and its files are imported without the package's own set-up,
which builds for a GPU. aiter's launchers are called as they are, with their tiles. Nothing of aiter is kept here.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
import zipfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import compile_cases
import compile_facts
import torch

from portable.platform.detect import describe

ARCHS = ("gfx942", "gfx950")
TABLE = Path(__file__).parent / "results" / "compile-aiter.json"
CACHE = Path.home() / ".cache" / "portable" / "aiter"
COLUMNS = ("vgprs", "agprs", "vector_spills", "shared", "occupancy", "busy")
THEIRS = {"prefill": "_attn_fwd", "decode": "kernel_unified_attention_3d"}
COMPARED = {"prefill": ("busy",), "decode": ("registers", "occupancy")}
HEADS = {"d128": (32, 8, 128), "d64": (64, 8, 64)}


def fetched() -> Path | None:
    """The folder with aiter's files; None where no index has them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--pre"]
        if subprocess.run([*command, "-d", str(CACHE), "amd-aiter"], check=False).returncode:
            return None
    wheel = max(CACHE.glob("*.whl"))
    folder = CACHE / wheel.stem
    if not folder.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("aiter/ops/triton/")])
    return folder


class Recorder:
    """Stands for a kernel of aiter's: `kernel[grid](...)` compiles for the active device."""

    def __init__(self, kernel: Any, found: list[tuple[str, Any]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            self.found.append((self.kernel.__name__, self.kernel.warmup(*arguments, grid=(1,), **options)))

        return compile_only


def theirs(job: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Rows of aiter's kernels on an arch, by "case kernel"."""
    arch, folder = job
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(Path(folder, *name.split(".")))]
    unused = types.ModuleType("unused")  # another implementation, whose autotuning lists Triton 3.9 refuses
    unused.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules["aiter.ops.triton._triton_kernels.flash_attn_triton_amd"] = unused
    target = describe(arch)
    units = compile_cases.UNITS[arch]
    rows: dict[str, dict[str, Any]] = {}
    with compile_cases.active(target):
        properties = types.SimpleNamespace(multi_processor_count=units, gcnArchName=arch, name=arch)
        cuda: Any = torch.cuda  # this process ends with the arch
        cuda.current_device = lambda: 0
        cuda.get_device_properties = lambda device=None: properties
        for name, (heads, kv_heads, width) in HEADS.items():
            for step, run in (("decode", decode), ("prefill", prefill)):
                found: list[tuple[str, Any]] = []
                run(found, heads, kv_heads, width)
                for kernel, made in found:
                    rows[f"{step} {name} | {kernel}"] = compile_facts.facts(made, arch)
    return rows


def decode(found: list[tuple[str, Any]], heads: int, kv_heads: int, width: int) -> None:
    module: Any = importlib.import_module("aiter.ops.triton.unified_attention")
    for name in ("kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments"):
        kernel = getattr(module, name)
        setattr(module, name, Recorder(getattr(kernel, "kernel", None) or kernel, found))
    meta = compile_cases.meta
    pages = compile_cases.BEYOND // (16 * kv_heads * width * 2) + 1
    cache = meta(pages, 16, kv_heads, width)
    q, out = meta(8, heads, width), meta(8, heads, width)
    starts, lengths = meta(9, dtype=torch.int32), meta(8, dtype=torch.int32)
    table = meta(8, 512, dtype=torch.int32)
    module.unified_attention(
        q, cache, cache, out, starts, 1, lengths, 8192, width**-0.5, True, (-1, -1), table, 0.0, None, None, None
    )


def prefill(found: list[tuple[str, Any]], heads: int, kv_heads: int, width: int) -> None:
    module: Any = importlib.import_module("aiter.ops.triton.mha")
    kernel = module._attn_fwd
    module._attn_fwd = Recorder(getattr(kernel, "kernel", None) or kernel, found)
    meta = compile_cases.meta
    tokens, starts = 8 * 4096, meta(9, dtype=torch.int32)
    q, k = meta(tokens, heads, width), meta(tokens, kv_heads, width)
    module.flash_attn_varlen_func(q, k, k, starts, starts, 4096, 4096, causal=True)


def ours(arch: str) -> dict[str, dict[str, Any]]:
    rows = {}
    plain: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64}
    cases = {
        "decode d128": compile_cases.CASES["decode d128"],
        "prefill d128": compile_cases.attention(compile_cases.prefill_kernel, 4096, 4096, None, **compile_cases.D128),
        "decode d64": compile_cases.attention(compile_cases.paged_kernel, 1, 8192, 16, **plain),
        "prefill d64": compile_cases.attention(compile_cases.prefill_kernel, 4096, 4096, None, **plain),
    }
    for name, case in cases.items():
        for kernel, made in compile_cases.compiled(case, arch):
            rows[f"{name} | {kernel}"] = compile_facts.facts(made, arch)
    return rows


def value(row: dict[str, Any], what: str) -> float:
    return float(row["vgprs"] + row["agprs"] if what == "registers" else row[what])


def main() -> int:
    folder = fetched()
    if folder is None:
        print("amd-aiter is on no package index here: nothing is compared")
        return 0
    import triton

    result: dict[str, Any] = {"aiter": folder.name.split("-")[1], "triton": triton.__version__, "archs": {}}
    behind = []
    for arch in ARCHS:
        with get_context("spawn").Pool(1) as pool:  # aiter keeps what it found of a device
            other = pool.apply(theirs, ((arch, str(folder)),))
        mine = ours(arch)
        compared = {}
        for case in sorted({key.split(" | ")[0] for key in mine}):
            step = case.split()[0]
            (mine_of,) = (row for key, row in mine.items() if key.startswith(f"{case} | att"))
            for what in COMPARED[step]:
                us, them = value(mine_of, what), value(other[f"{case} | {THEIRS[step]}"], what)
                compared[f"{case} {what}"] = {"ours": us, "aiter": them}
                good = us <= them if what == "registers" else us >= them
                print(f"{arch} {case:13} {what:10} ours {us:g}, aiter {them:g}{'' if good else '   <- behind'}")
                behind += [] if good else [f"{arch} {case} {what}"]
        rows = {**{f"ours {k}": v for k, v in mine.items()}, **{f"aiter {k}": v for k, v in other.items()}}
        kept = {k: {column: row[column] for column in COLUMNS} for k, row in sorted(rows.items())}
        result["archs"][arch] = {"compared": compared, "kernels": kept}
    result["behind"] = behind
    TABLE.write_text(json.dumps(result, indent=1) + "\n")
    return 0
