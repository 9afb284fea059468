"""`portable new-vendor NAME`: a package that adds a vendor's devices and a kernel, complete and right on a CPU.

The files beside this one are the package of a vendor called "acme"; the command writes them with another name.
"""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path

from portable.plugins import KERNELS, PLATFORMS

HERE = Path(__file__).parent
FILES = {  # below the package's folder -> the file here
    "portable_acme/devices.py": "devices.py",
    "portable_acme/kernels.py": "kernels.py",
    "tests/test_acme.py": "checks.py",
}
TEXTS = {
    "portable_acme/__init__.py": '"""Acme for portable: its devices and its kernels."""\n',
    "pyproject.toml": f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "portable-acme"
version = "0.1.0"
description = "Acme devices and kernels for portable"
requires-python = ">=3.10"
dependencies = ["portable-attention"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."{PLATFORMS}"]
acme = "portable_acme.devices"

[project.entry-points."{KERNELS}"]
acme = "portable_acme.kernels"

[tool.setuptools]
packages = ["portable_acme"]

[tool.pytest.ini_options]
testpaths = ["tests"]
""",
    "README.md": """\
# portable-acme

Acme devices and kernels for portable.

    pip install -e .[test]
    portable doctor                                         # the plug-in, its kernel, and why no device is here
    portable conformance --kernel acme.paged --device cpu   # the kernel against the float64 oracle
    python -m pytest

`portable_acme/devices.py` says what the devices are and how to find one. `portable_acme/kernels.py` has the kernels:
each declares what it can do, and everything that it does not declare is refused before it runs.
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `portable new-vendor`."""
    parser.add_argument("name", help="the vendor's name: lower-case letters and digits, as torch calls its device type")
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="where to write (default: here)")


def run(args: argparse.Namespace) -> int:
    """Write the package; 0, or a ValueError for a name or a folder that will not do."""
    folder = args.into / f"portable-{args.name}"
    files = package(args.name)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give another name, or another folder with --into")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    print(f"{folder}: {', '.join(sorted(files))}")
    print(f"next: pip install -e {folder}, then portable doctor; {folder / 'README.md'} goes on from there")
    return 0


def package(name: str) -> dict[str, str]:
    """The files of a vendor's package, path -> text.

    Raises ValueError for a name that Python or portable cannot use.

    >>> sorted(package("zeta"))[-1]
    'tests/test_zeta.py'
    """
    from portable.attention import load_kernels
    from portable.platform.detect import reserved

    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or keyword.iskeyword(name):
        raise ValueError(f"name is {name!r}; it must be lower-case letters and digits, and no word of Python")
    providers = {kernel.caps.provider for kernel in load_kernels() if kernel.plugin is None}
    if name in reserved() | providers:
        raise ValueError(
            f"name is {name!r}, which portable has as a vendor, a kind of device or a provider of kernels; give another"
        )
    texts = TEXTS | {path: (HERE / file).read_text(encoding="utf-8") for path, file in FILES.items()}
    return {renamed(path, name): renamed(text, name) for path, text in texts.items()}


def renamed(text: str, name: str) -> str:
    """`text` with another name than "acme".

    >>> renamed("Acme: acme1, ACME_ON_CPU", "zeta")
    'Zeta: zeta1, ZETA_ON_CPU'
    """
    return text.replace("acme", name).replace("Acme", name.capitalize()).replace("ACME", name.upper())
