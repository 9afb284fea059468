"""HIP C++ on an emulated device: kernels of a source, launched on CPU tensors and arrays.

Device code takes raw pointers, numbers and structs. There are no torch headers for it, no hip_fp16.h and no
hip_bf16.h; `_Float16` and `__bf16` are types of the compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from portable.platform.emulated import clang, driver
from portable.platform.emulated.arguments import Arguments, pack
from portable.platform.emulated.clang import Parameter, Signature
from portable.platform.emulated.data import Object, link, objects, references
from portable.platform.emulated.isa import Code, decode
from portable.platform.emulated.waves import Array

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a `Module`; calling it launches it."""

    code: Code
    signature: Signature
    data: Mapping[str, Array]  # [bytes] uint8 by symbol: constants, read-only, and variables, of the whole module

    def __call__(self, grid: int | Sequence[int], block: int | Sequence[int], *arguments: Any, lds: int = 0) -> None:
        """Run on the device of the enclosing `with activate(arch)`, to the end.

        Args:
            grid: workgroups, x or (x, y, z).
            block: threads of a workgroup, likewise.
            arguments: CPU tensors, numpy arrays or None for pointers; numbers; the bytes of structs.
            lds: bytes of dynamic LDS (`extern __shared__`), on top of what the kernel declares.

        Raises:
            TypeError: the wrong number of arguments, or one of the wrong kind.
            ValueError: a number out of range, an impossible grid or block, a tensor that is not on the CPU.
            RuntimeError: no device is active, or one of another architecture.
            ExecutionError, MemoryFault: as `machine.launch`.
        """
        name, threads, parameters = self.signature
        emulation = driver.current()
        grid, block = _three("grid", grid), _three("block", block)
        if block[0] * block[1] * block[2] > threads:
            raise ValueError(f"block {block} has more threads than the {threads} that {name} was compiled for")
        if lds < 0:
            raise ValueError(f"lds={lds} is negative")
        if len(arguments) != len(parameters):
            names = ", ".join(each.name for each in parameters)
            raise TypeError(f"{name} takes {len(parameters)} arguments ({names}), not {len(arguments)}")
        given = emulation.arguments()
        for parameter, value in zip(parameters, arguments, strict=True):
            place = f"argument {parameter.name} of {name}"
            if parameter.kind == "*":
                data = _pointer(place, parameter.name, value, given).to_bytes(8, "little")
            else:
                data = _number(place, parameter.kind, parameter.size, value)
            given.place(parameter.offset, data)
        code = link(self.code, {symbol: given.pointer(symbol, each) for symbol, each in self.data.items()})
        static = int(self.code.facts.get("group_segment_fixed_size", 0))
        emulation.run(code, grid, block, given, static + lds)


@dataclass(frozen=True, slots=True)
class Module:
    """The kernels of one source: `module["scale"]`, `module["scale<float>"]`, or by a mangled name."""

    name: str
    arch: str
    assembly: str
    signatures: Mapping[str, Signature] = field(repr=False)  # by symbol
    _kernels: dict[str, Kernel] = field(default_factory=dict, repr=False)
    _data: dict[str, Array] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Kernel:
        """Decoded when it is first asked for.

        Raises:
            KeyError: no such kernel, or several, of which only mangled names tell one from another.
            NotImplementedError: a kernel that calls a function, or reads a constant that holds an address.
        """
        found = [symbol for symbol, each in self.signatures.items() if name in (symbol, each.name)]
        if len(found) != 1:
            several = f"{name!r} is one of {', '.join(found)} in" if found else f"{name!r} is no kernel of"
            raise KeyError(f"{several} {self.name}, which has {', '.join(s.name for s in self.signatures.values())}")
        (symbol,) = found
        if symbol not in self._kernels:
            signature = self.signatures[symbol]
            code = replace(decode(self.assembly, symbol), name=signature.name)
            data = {each: self._variable(code.name, each) for each in references(code)}
            self._kernels[symbol] = Kernel(code, signature, data)
        return self._kernels[symbol]

    def _variable(self, kernel: str, symbol: str) -> Array:
        """Its bytes, the same for every kernel and every launch."""
        if symbol not in self._data:
            found = objects(self.assembly).get(symbol, "a function that is not inlined")
            if not isinstance(found, Object):
                raise NotImplementedError(f"{kernel} uses {symbol}, {found or 'data with addresses in it'}")
            self._data[symbol] = np.frombuffer(found.data if found.constant else bytearray(found.data), np.uint8)
        return self._data[symbol]


def compile(source: str | Path, arch: str, options: Sequence[str] = (), cache: Path | None = None) -> Module:
    """Compile HIP C++, or take what the same text was compiled to before.

    Args:
        source: text, or a `Path` of a file, whose folder is searched for what it includes. Files that are included in
            quotes count as part of the text; those of other folders, given in `options`, do not. What a kernel uses of
            HIP (`threadIdx`, `__shared__`) comes with `#include <hip/hip_runtime.h>`.
        arch: "gfx942" or "gfx950".
        options: more of clang's, such as "-DHEAD_DIM=128".
        cache: the folder where compiled sources are kept, `cache_dir()` by default.

    Raises:
        ValueError: an architecture without emulation, or a source that does not compile; clang's words follow.
        RuntimeError: the compiler or headers are not installed; the message says what to install.
    """
    if arch not in driver.DEVICES:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(driver.DEVICES)}")
    if isinstance(source, str) and "\n" not in source and source.endswith((".hip", ".cu", ".cpp", ".h")):
        raise ValueError(f"source is {source!r}, the name of a file; it must be the text itself, or a Path")
    name = source.name if isinstance(source, Path) else "source.hip"
    return Module(name, arch, *compiled(source, arch, options, cache))


def compiled(
    source: str | Path, arch: str, options: Sequence[str] = (), cache: Path | None = None
) -> tuple[str, dict[str, Signature]]:
    """The assembly of `compile` and its kernels by symbol, for any architecture of AMD."""
    folder = source.resolve().parent if isinstance(source, Path) else None
    name, text = (source.name, source.read_text()) if isinstance(source, Path) else ("source.hip", source)
    parts = [clang.version(), arch, json.dumps(list(options)), name, text]
    if folder:
        parts += _headers(text, (folder,), {})
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    file = (cache or cache_dir()) / f"{key[:32]}.json"
    if not file.is_file():
        _write(file, json.dumps(clang.build(text, name, folder, arch, options)))
    assembly, kernels = json.loads(file.read_text())
    return assembly, {
        symbol: Signature(plain, threads, tuple(Parameter(*each) for each in parameters))
        for symbol, (plain, threads, parameters) in kernels.items()
    }


def cache_dir() -> Path:
    """Where compiled sources are kept: `hip` in `PORTABLE_CACHE_DIR`, or in the user's cache of this project."""
    if chosen := os.environ.get("PORTABLE_CACHE_DIR"):
        return Path(chosen) / "hip"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "portable" / "hip"


def _headers(text: str, folders: tuple[Path, ...], seen: dict[Path, str]) -> list[str]:
    """The texts of what a text includes in quotes, and what that includes, as far as it is found in `folders`."""
    for name in INCLUDE.findall(text):
        for file in ((folder / name).resolve() for folder in folders):
            if file.is_file() and file not in seen:
                seen[file] = file.read_text()
                _headers(seen[file], (file.parent, *folders), seen)
    return list(seen.values())


def _write(file: Path, text: str) -> None:
    """Whole or not at all, whoever else writes it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        part.write(text)
    os.replace(part.name, file)


def _three(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    x, y, z = (*given, 1, 1, 1)[:3]
    if len(given) > 3 or min(x, y, z) < 1:
        raise ValueError(f"{name}={value} is not one to three positive numbers")
    return x, y, z


def _pointer(place: str, name: str, value: Any, given: Arguments) -> int:
    if value is None:
        return 0
    if not isinstance(value, np.ndarray) and not hasattr(value, "data_ptr"):
        raise TypeError(f"{place} is a pointer; it takes a CPU tensor, an array or None, not {value!r}")
    return given.pointer(name, value)


def _number(place: str, kind: str, size: int, value: Any) -> bytes:
    """The bytes of an argument that is not a pointer."""
    if kind == "bytes":
        data = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.generic) else b""
        if len(data) != size:
            raise TypeError(f"{place} is a struct of {size} bytes, not {value!r}")
        return data
    if kind.startswith("i"):
        if not isinstance(value, (Integral, np.bool_)):
            raise TypeError(f"{place} is an integer of {size} bytes, not {value!r}")
        number, bits = int(value), 8 * size
        least, most = (0, 1) if kind == "i1" else (-(1 << bits - 1), (1 << bits) - 1)
        if not least <= number <= most:
            raise ValueError(f"{place} is an integer of {size} bytes from {least} to {most}, not {number}")
        return (number & (1 << bits) - 1).to_bytes(size, "little")
    if not isinstance(value, Real):
        raise TypeError(f"{place} is a floating-point number of {size} bytes, not {value!r}")
    try:
        return pack([(kind, float(value))])
    except OverflowError:
        raise ValueError(f"{place} is a floating-point number of {size} bytes, too few for {value!r}") from None
