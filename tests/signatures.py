"""The signatures of vendor packages, read from the files that their registry serves; nothing of them is executed here.

A file is downloaded once into the cache folder, by pip, which compares its sha256 with the one in signatures.json
before it opens it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from portable.cache_dir import cache_dir

DOWNLOAD = 120  # seconds


@dataclass(frozen=True)
class Release:
    """One file of a registry."""

    package: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}-{self.version}"


RELEASES = tuple(Release(**entry) for entry in json.loads(Path(__file__).with_suffix(".json").read_text()))


class Away(Exception):
    """The registry cannot be reached."""


def fetched(release: Release) -> Path:
    """The file of a release.

    Raises:
        Away: it is not here and cannot be had.
        ValueError: what came is another file.
    """
    folder = cache_dir() / "vendor-packages"
    file = folder / release.file
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / f"{release.file}.{os.getpid()}.txt"
        wanted.write_text(f"{release.package}=={release.version} --hash=sha256:{release.sha256}\n")
        kind = "--only-binary" if release.file.endswith(".whl") else "--no-binary"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
        ]
        command += [kind, release.package, "--dest", str(folder), "--requirement", str(wanted)]
        # the metadata of a source distribution: it asks for no compiler then
        environ = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DOWNLOAD)
        except subprocess.TimeoutExpired as error:
            raise Away(f"no answer in {DOWNLOAD} s") from error
        finally:
            wanted.unlink()
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise ValueError(f"{release.file} is not the file of sha256 {release.sha256}")
        if done.returncode or not file.exists():
            raise Away(" ".join(done.stderr.split())[-300:])
    if hashlib.sha256(file.read_bytes()).hexdigest() != release.sha256:
        raise ValueError(f"{file} is not the file of sha256 {release.sha256}")
    return file


class Sources:
    """The Python modules of a release, as syntax trees."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files  # path -> source
        self._trees: dict[str, ast.Module] = {}

    def path_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.files), None)

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> ast.FunctionDef | None:
        """A function of a module, or of the one from which that imports it."""
        path = self.path_of(module)
        if path is None or (module, name) in seen:
            return None
        if path not in self._trees:
            self._trees[path] = ast.parse(self.files[path])
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        seen |= {(module, name)}
        found = None
        for node in statements(self._trees[path]):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found = node
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                source = ".".join(part for part in (base, node.module) if part)
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self.find(source, wanted, seen) or found
        return found

    def signature(self, module: str, dotted: str) -> Callable[..., Any] | None:
        """Something with the signature of `module`.`dotted`, for `inspect`."""
        *more, name = dotted.split(".")
        node = self.find(".".join((module, *more)), name)
        if node is None:
            return None

        def stand_in() -> None: ...

        stand_in.__signature__ = inspect.Signature(list(parameters(node.args)))  # type: ignore[attr-defined]
        return stand_in


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, those below `if`, `try` and `with` included."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from statements(node)


def parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    first = len(plain) - len(arguments.defaults)  # the first that has a default
    for i, each in enumerate(plain):
        kind = kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        yield kinds(each.arg, kind, default=kinds.empty if i < first else None)
    if arguments.vararg:
        yield kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg:
        yield kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)


@cache
def sources(release: Release) -> Sources:
    """The modules that a release installs; raises as `fetched`."""
    file = fetched(release)
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            return Sources({n: archive.read(n).decode() for n in archive.namelist() if n.endswith(".py")})
    with tarfile.open(file) as archive:
        found = {}
        for member in archive:
            _, _, name = member.name.partition("/")
            if name.startswith("flash_attn/") and name.endswith(".py") and (stream := archive.extractfile(member)):
                found[name] = stream.read().decode()
        return Sources(found)
