"""Checks who may import whom, from the source alone: python ci/layering.py [ROOT]; one violation a line, exit code 1.

ragged <- batch <- variants <- planners <- attention;  target <- kernel <- select;  backends are loaded by attention
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# The core: a module, and those of portable right below it. It may import these and all that they may import;
# "platform" stands for all below it. Modules that are not listed (the command line, bench, integrations, ...) are free,
# and the core may not import them.
CORE: dict[str, list[str]] = {
    "arguments": [],
    "layer": ["arguments"],
    "cache_dir": [],
    "child": [],
    "ragged": [],
    "upload": [],
    "lengths": ["ragged"],
    "order": ["ragged"],
    "paging": ["ragged"],
    "sets": [],
    "states": [],
    "plugins": [],
    "kernel": ["layer", "platform.target", "sets"],
    "cache": ["kernel", "paging"],
    "merge": ["kernel"],
    "first_import": ["cache_dir", "child"],
    # select: the type of a request only
    "packages": ["first_import", "platform.target", "select", "sets", "backends.packages"],
    "select": ["kernel", "packages", "platform"],
    "proof": ["kernel"],
    "plugin_kernels": ["conformance", "kernel", "platform", "plugins", "proof"],
    "verdicts": ["cache_dir", "child", "kernel", "packages", "plugins"],
    "levels": ["mla", "select"],
    "explain": ["levels", "select"],
    "view": ["lengths", "upload"],
    "block_table": ["arguments", "lengths"],
    "step_inputs": ["block_table", "paging", "upload"],
    "batch": ["order", "step_inputs", "view"],
    "sizes": ["batch", "kernel"],
    "padding": ["batch", "sizes"],
    "planned": ["sizes"],
    "staging": ["platform", "upload"],
    "mirror": ["batch"],
    "persistent": ["mirror", "padding", "platform", "staging"],
    "refresh": ["check", "persistent", "platform"],
    "validate": ["batch"],
    "chunks": ["batch"],
    "parts": ["batch", "layer"],
    "shards": ["batch", "layer"],
    "local_steps": ["batch", "layer", "sizes"],
    "variants": ["chunks", "local_steps", "padding", "parts", "shards", "validate"],
    "mha": ["cache", "chunks", "merge", "padding", "parts", "planned", "select"],
    "mla": ["cache", "chunks", "merge", "mha", "padding", "parts", "select"],
    "mla_weights": ["layer", "sets"],
    "mamba_places": ["batch"],
    "mamba_chunks": ["batch", "chunks", "mamba_places"],
    "mamba_copies": ["mamba_places", "upload"],
    "mamba_memory": ["mamba_places", "platform", "staging"],
    "mamba": ["layer", "mamba_chunks", "mamba_memory", "planned", "states"],
    "limits": ["batch"],
    "warmup": ["limits", "mha"],
    "check": ["mha", "mla", "mamba"],
    "ops": ["check"],
    "slot": ["ops", "refresh"],
    "mamba_decodes": ["mamba"],
    "mamba_slot": ["mamba_decodes", "ops", "refresh"],
    "mla_slot": ["mla_weights", "ops", "refresh"],
    "padded_plans": ["limits", "mla", "ops", "persistent"],
    "attention": ["explain", "padded_plans", "plugin_kernels", "slot", "variants", "verdicts", "warmup", "backends"],
    "mla_warmup": ["mla_slot", "warmup"],
    "mla_attention": ["attention", "mla_warmup"],
    "overlap": [],
    "copies": ["attention", "overlap"],
    "graphs": ["attention"],
    "mamba_warmup": ["mamba", "warmup"],
    "mamba_run": ["attention", "mamba_copies", "mamba_slot", "mamba_warmup"],
}
ORACLES = ["backends.reference", "backends.reference_mamba"]  # what the conformance kit holds kernels against
LOADERS = ("attention", "packages")  # of backends, inside functions: the kernels, and the facts of vendor packages
BACKENDS = [
    "backends",
    "cache",
    "cache_dir",
    "kernel",
    "layer",
    "merge",
    "packages",
    "paging",
    "platform",
    "ragged",
    "sets",
    "states",
    "upload",
]
PLATFORM = ["arguments", "layer", "platform", "plugins"]

# A library and the files that may import it, inside functions.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "flash_attn": ("backends/flash_attn",),
    "flash_attn_interface": ("backends/flash_attn",),
    "aiter": ("backends/aiter",),
    "flashinfer": ("backends/flashinfer",),
    "xformers": ("backends/xformers",),
    "vllm": ("portable/integrations", "portable/bench"),
    "sglang": ("portable/integrations", "portable/bench"),
    "transformers": ("portable/generate", "portable/model", "portable/integrations", "portable/bench"),
    "triton": ("backends/triton", "platform/"),
    "amdsmi": ("platform/",),
    "pynvml": ("platform/",),
    "numba": ("platform/emulated",),
}
AT_THE_TOP = {"triton": "backends/triton"}  # a Triton kernel is decorated where it is defined

VENDOR_WORD = re.compile(r"(?<![a-z0-9])(rocm|hip|cuda|nvidia|amd|gfx[0-9a-f]+|sm_?[0-9]{2,3})(?![a-z0-9])", re.I)


class Import(NamedTuple):
    line: int
    module: str
    lazy: bool  # inside a function, or for type checkers only


def imports(tree: ast.AST, package: str, lazy: bool = False) -> Iterator[Import]:
    """Every import below `tree`, by statement or by importlib; `package` resolves the relative ones."""
    for node in ast.iter_child_nodes(tree):
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, f"{base}.{alias.name}", lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and name_of(node.func) in ("import_module", "__import__"):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(node.lineno, first.value.rstrip("."), lazy)
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            yield from imports(ast.Module(node.body, []), package, lazy=True)
            yield from imports(ast.Module(node.orelse, []), package, lazy)
        else:
            yield from imports(node, package, inside)


def name_of(node: ast.expr) -> str:
    """`f` of `f` and of `m.f`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def below(name: str) -> set[str]:
    """What the core module `name` may import: what is listed, and all below that."""
    found: set[str] = set()
    todo = list(CORE[name])
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += CORE.get(one, [])
    return found - {name}


def under(module: str, allowed: Iterable[str]) -> bool:
    """Whether `module`, without "portable.", is one of `allowed`, below one, or a name in one."""
    return any(module == name or module.startswith(name + ".") for name in allowed)


def why_not(file: str, module: str, item: Import) -> str | None:
    """The rule that an import of `file` (path below the root) and `module` (its name) breaks, or None."""
    library, _, inner = item.module.partition(".")
    if places := LIBRARIES.get(library):
        if not file.startswith(places):
            return f"imports {library}, which only {' and '.join(places)} may"
        if not item.lazy and not file.startswith(AT_THE_TOP.get(library, "-")):
            return f"imports {library} at the top of the file; import it inside the function that needs it"
    if library != "portable":
        return None
    name = module.removeprefix("portable.")
    shown = ".".join(inner.split(".")[: 2 if under(inner, ["backends", "platform"]) else 1]) or "portable itself"
    if under(name, ["backends"]):
        return None if under(inner, BACKENDS) else f"imports {shown}; a backend may import {', '.join(BACKENDS)}"
    if under(name, ["platform"]):
        return None if under(inner, PLATFORM) else f"imports {shown}; platform may import {', '.join(PLATFORM)}"
    if under(name, ["conformance"]) and under(inner, ORACLES):
        return None
    if under(inner, ["backends"]) and not (name in LOADERS and item.lazy):
        return f"imports {shown}; only {' and '.join(LOADERS)} load backends, inside functions"
    if name in CORE and not under(inner, below(name)):
        return f"imports {shown}, which is not below {name} in CORE of ci/layering.py"
    return None


def violations(root: Path) -> Iterator[str]:
    """Every broken rule below `root`, as "file:line: what"."""
    for folder, prefix in (("portable", ""), ("backends", "portable."), ("platform", "portable.")):
        for path in sorted((root / folder).rglob("*.py")):  # enters no symlinked folder
            file = path.relative_to(root).as_posix()
            module = (prefix + file.removesuffix(".py").replace("/", ".")).removesuffix(".__init__")
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            text = path.read_text(encoding="utf-8")
            for item in imports(ast.parse(text, file), package):
                if reason := why_not(file, module, item):
                    yield f"{file}:{item.line}: {reason}"
            if folder == "portable" and not file.startswith("portable/integrations"):
                for number, line in enumerate(text.splitlines(), 1):
                    if word := VENDOR_WORD.search(line):
                        yield f"{file}:{number}: names a vendor ({word[0]}); that is for platform/ and backends/"


def main(root: Path) -> int:
    found = list(dict.fromkeys(violations(root)))  # one line for `from m import a, b`
    print("\n".join(found) or "layering: no violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
