"""HIP C++ to assembly, with compilers and headers that are Python packages.

clang, its C++ library and musl's headers are of `ziglang`; clang's HIP headers of `clang-include-cleaner`, of the same
LLVM release; the HIP runtime's headers and the device libraries of `triton`. The machine's own compilers, headers and
ROCm are never used.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# what the device libraries call the architectures; those that are emulated are `driver.DEVICES`
ISA = {"gfx90a": 9010, "gfx942": 9402, "gfx950": 9500, "gfx1100": 11000, "gfx1201": 12001}
# Switches of the device libraries: rounding as IEEE has it, denormals, waves of 64 lanes on CDNA.
SWITCHES = """
#define SWITCH const __attribute__((address_space(4), visibility("hidden"), weak))
SWITCH char __oclc_finite_only_opt = 0, __oclc_unsafe_math_opt = 0, __oclc_daz_opt = 0;
SWITCH char __oclc_correctly_rounded_sqrt32 = 1, __oclc_wavefrontsize64 = ISA < 10000;
SWITCH int __oclc_ISA_version = ISA, __oclc_ABI_version = 600;
"""
# What an installed libc++ has in its header __config_site, which ziglang's has not.
LIBCXX = {
    "HARDENING_MODE_DEFAULT": "_LIBCPP_HARDENING_MODE_NONE",
    "ASSERTION_SEMANTIC_DEFAULT": "_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
    "ABI_VERSION": "1",
    "ABI_NAMESPACE": "__1",
    "HAS_MUSL_LIBC": "1",
}
FLAGS = ["-x", "hip", "--target=x86_64-linux-musl", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc"]
FLAGS += ["-include", "__clang_hip_runtime_wrapper.h", "-D__HIP_PLATFORM_AMD__=1", "-std=c++17", "-O3"]
FLAGS += ["-gline-tables-only", "-fdebug-compilation-dir=.", "-fuse-cuid=none"]
# IR has the types of arguments, which the metadata of assembly has not
FLAGS += ["-emit-llvm", "-S", "-fdiscard-value-names", "-fhip-kernel-arg-name"]
KERNEL = re.compile(
    r"^define .*amdgpu_kernel void @([\w.$]+)\((.*?)\)(?= \w*unnamed| comdat| #)(?:.*!dbg (!\d+))?", re.M
)
TYPES = {"i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64"}  # LLVM's types, and arguments.pack's
TYPES |= {"half": "fp16", "bfloat": "bf16", "float": "fp32", "double": "fp64"}


class Parameter(NamedTuple):
    """What a kernel takes: `kind` is "*" for a pointer, a type of `arguments.pack`, or "bytes" for a struct."""

    name: str
    kind: str
    offset: int  # bytes, in the kernel's arguments
    size: int


class Signature(NamedTuple):
    """Of a kernel: its name in the source ("scale<float>"), most threads of a workgroup, and what it takes."""

    name: str
    threads: int
    parameters: tuple[Parameter, ...]


class Tools(NamedTuple):
    """Where everything lies."""

    clang: Path
    headers: Path  # of clang
    amd: Path  # of HIP; the device libraries lie beside them


@cache
def tools() -> Tools:
    """What is installed.

    Raises:
        RuntimeError: something is not.
    """
    wanted = {
        "ziglang": ("ziglang", "zig"),
        "clang-include-cleaner": ("clang_include_cleaner", "data/lib/clang/*/include/__clang_hip_runtime_wrapper.h"),
        "triton": ("triton", "backends/amd/include/hip/hip_runtime.h"),
    }
    found, absent = [], []
    for distribution, (module, pattern) in wanted.items():
        spec = find_spec(module)
        files = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
        found += files[-1:]
        if not files:
            absent.append(distribution)
    if absent:
        raise RuntimeError(f"HIP is compiled with packages that are not installed: pip install {' '.join(absent)}")
    zig, wrapper, runtime = found
    return Tools(zig, wrapper.parent, runtime.parents[1])


@cache
def version() -> str:
    """Of everything that a compiled kernel depends on, beside its source."""
    clang, headers, amd = tools()
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in (*_device_libraries(amd), amd / "hip" / "hip_version.h"):
        digest.update(path.read_bytes())
    return f"{_run([clang, 'clang', '--version'])} {headers.parent.name} {digest.hexdigest()}"


def build(
    text: str, name: str, folder: Path | None, arch: str, options: Sequence[str]
) -> tuple[str, dict[str, Signature]]:
    """Assembly with source lines, and its kernels by symbol.

    Raises:
        ValueError: the source does not compile; clang's words follow.
    """
    clang, headers, amd = tools()
    library = clang.parent / "lib"
    search = [headers / "cuda_wrappers", library / "libcxx" / "include", headers]
    search += [library / "libc" / "include" / each for each in ("x86_64-linux-musl", "generic-musl")]
    flags = [f"-D_LIBCPP_{key}={value}" for key, value in LIBCXX.items()]
    flags += [f"-I{folder}"] if folder else []
    for each in (*search, amd):
        flags += ["-isystem", str(each)]
    target = (clang, "clang", "-target", "amdgcn-amd-amdhsa", "-nogpulib", f"-mcpu={arch}")
    with tempfile.TemporaryDirectory(prefix="portable-hip-") as scratch:
        work = Path(scratch)
        (work / name).write_text(text)
        (work / "switches.c").write_text(SWITCHES)
        switches = ("-x", "c", f"-DISA={ISA[arch]}", "-O2", "-emit-llvm", "-c", "switches.c", "-o", "switches.bc")
        _run((*target, *switches), work)
        for bitcode in (*_device_libraries(amd), work / "switches.bc"):
            flags += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(bitcode)]
        _run((clang, "clang", *FLAGS, f"--offload-arch={arch}", *flags, *options, name, "-o", "kernels.ll"), work)
        rest = ("-x", "ir", "-O3", "-Xclang", "-disable-llvm-passes", "-S", "kernels.ll", "-o", "kernels.s")
        _run((*target, *rest), work)
        assembly, typed = (work / "kernels.s").read_text(), (work / "kernels.ll").read_text()
    return assembly, signatures(typed, assembly)


def assemble(assembly: str, arch: str) -> bytes:
    """The code object that a driver loads."""
    clang = tools().clang
    with tempfile.TemporaryDirectory(prefix="portable-hip-") as scratch:
        work = Path(scratch)
        (work / "kernels.s").write_text(assembly)
        target = (clang, "clang", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", "kernels.s", "-o", "kernels.o")
        _run(target, work)
        _run((clang, "ld.lld", "-shared", "kernels.o", "-o", "kernels.co"), work)
        return (work / "kernels.co").read_bytes()


def signatures(typed: str, assembly: str) -> dict[str, Signature]:
    """What kernels take, by symbol: types from their IR, the rest from the metadata of the assembly."""
    facts = {}
    kernels = assembly[assembly.rfind("\namdhsa.kernels:") + 1 :].split("\namdhsa.")[0]
    for entry in kernels.split("\n  - ")[1:]:
        arguments: list[tuple[str, int, int]] = []
        for argument in re.split(r"\n {6}- ", entry):
            found = dict(re.findall(r"^\s*\.(\w+): +(\S+)$", argument, re.MULTILINE))
            if found.get("value_kind", "hidden").startswith("hidden"):
                continue
            name = found.get("name", f"number {len(arguments)}")
            arguments.append((name, int(found["offset"]), int(found["size"])))
        own = dict(re.findall(r"^ {4}\.(\w+): +(\S+)$", entry, re.MULTILINE))
        facts[own["name"]] = (int(own["max_flat_workgroup_size"]), arguments)
    defined = {symbol: rest for symbol, *rest in KERNEL.findall(typed)}
    out = {}
    for symbol, (threads, arguments) in facts.items():
        types, debug = defined[symbol]
        named = re.search(rf'^{debug} = .*?DISubprogram\(name: "([^"]*)"', typed, re.MULTILINE)
        kinds = [_kind(each) for each in re.findall(r"(\S.*?) %\d+(?:, |$)", types)]
        parameters = (Parameter(a[0], kind, a[1], a[2]) for a, kind in zip(arguments, kinds, strict=True))
        out[symbol] = Signature(named[1] if named else symbol, threads, tuple(parameters))
    return out


def _kind(typed: str) -> str:
    """Of a parameter in IR: its type, then what is known of it."""
    if typed.startswith("ptr"):
        return "bytes" if "byref(" in typed else "*"
    return TYPES.get(typed.split()[0], "bytes")


def _device_libraries(amd: Path) -> tuple[Path, ...]:
    return tuple(amd.parent / "lib" / f"{name}.bc" for name in ("ockl", "ocml"))


def _run(command: Sequence[object], folder: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout
