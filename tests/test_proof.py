"""Where a proof holds: what of a kernel's source may change without it, and what may not."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from portable import attention, proof
from portable.backends import reference
from portable.kernel import Kernel
from portable.proof import committed, source_hash

KERNELS = {kernel.name: kernel for kernel in attention.load_kernels()}
FILES = {
    "__init__.py": "",
    "kernels.py": "from dataclasses import replace\n"
    "from portable.backends.reference import KERNELS as OURS\n"
    "from portable.kernel import Kernel\n"
    "from proved_pkg.inner.launch import merge\n"
    "KERNELS = (Kernel(replace(OURS[3].caps, name='vendor.merge', provider='vendor'), merge),)\n",
    "inner/__init__.py": "",
    "inner/launch.py": "from proved_pkg.inner import tiles\ndef merge(*given):\n    return tiles.SIZE\n",
    "inner/tiles.py": "SIZE = 4\n",
    "csrc/merge.cu": "__global__ void merge() {}\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A vendor's package whose kernel is made of more than the module that holds its function."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        path = tmp_path / "proved_pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path / "proved_pkg"
    for name in [name for name in sys.modules if name.partition(".")[0] == "proved_pkg"]:
        del sys.modules[name]


def of_package() -> Kernel:
    kernel: Kernel = importlib.import_module("proved_pkg.kernels").KERNELS[0]
    return kernel


CHANGES: dict[str, Callable[[Path], object]] = {
    "the function's file": lambda at: (at / "inner/launch.py").write_text("changed"),
    "a module that it uses": lambda at: (at / "inner/tiles.py").write_text("SIZE = 8\n"),
    "its caps' file": lambda at: (at / "kernels.py").write_text("changed"),
    "device code": lambda at: (at / "csrc/merge.cu").write_text("__global__ void merge() { }\n"),
    "a file's name": lambda at: (at / "csrc/merge.cu").rename(at / "csrc/join.cu"),
    "a new file": lambda at: (at / "inner/more.py").write_text(""),
    "a compiled module": lambda at: (at / "_C.so").write_bytes(b"\x7fELF"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_proof_of_a_packages_kernel_ends_with_any_change_of_the_package(package: Path, what: str) -> None:
    before = source_hash(of_package())
    assert source_hash(of_package()) == before
    CHANGES[what](package)
    assert source_hash(of_package()) != before


def test_what_python_derives_from_a_source_changes_nothing(package: Path) -> None:
    before = source_hash(of_package())
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "kernels.cpython-311.pyc").write_bytes(b"x")
    assert source_hash(of_package()) == before


def test_where_the_package_stands_is_no_part_of_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_hash(of_package())
    moved = package.rename(package.parent / "elsewhere")
    monkeypatch.setattr(sys.modules["proved_pkg"], "__path__", [str(moved)])
    assert source_hash(of_package()) == before


def test_a_function_within_another_is_found(package: Path) -> None:
    kernel = of_package()
    bound = replace(kernel, run=functools.partial(kernel.run, 1))
    assert source_hash(bound) == source_hash(kernel)


def test_a_plug_in_that_only_declares_is_told_by_its_mark() -> None:
    """The function of an adapter is portable's own, whoever declares its conventions."""
    kernel = KERNELS["flash_attn.varlen"]
    assert source_hash(replace(kernel, plugin="acme 1.0 1234")) != source_hash(replace(kernel, plugin="acme 1.0 5678"))


def test_an_adapters_proof_ends_with_the_file_that_declares_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, module in (
        ("flash_attn_3.varlen", "portable.backends.flash_attn.version3"),
        ("flash_mla.decode", "portable.backends.flash_mla"),
        ("torch.flash", "portable.backends.torch_flash"),
        ("aiter.varlen", "portable.backends.aiter"),
    ):
        before = source_hash(KERNELS[name])
        copy = tmp_path / "changed.py"
        copy.write_bytes(Path(str(sys.modules[module].__file__)).read_bytes() + b"\n")
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[module], "__file__", str(copy))
            assert source_hash(KERNELS[name]) != before, name


def test_a_function_of_ours_is_its_file_and_what_its_names_reach() -> None:
    """And not what lists it: a record of a device holds although another kernel of the folder changed."""
    merge = next(kernel for kernel in reference.KERNELS if kernel.name == "reference.merge")
    reached: set[str] = set()
    proof._reached("portable.backends.reference", reached)
    assert reached == {"portable.backends.pages", "portable.backends.reference", "portable.merge"}
    assert list(proof._homes(merge)) == ["portable.backends.reference"]
    assert list(proof._homes(KERNELS["hip.merge"])) == ["portable.backends.hip.merge"]


@pytest.mark.parametrize(
    ("had", "present", "counts"),
    [
        ({"vllm": "0.33.0"}, {"vllm": "0.33.0", "amd-aiter": "0.1.8"}, True),
        ({"vllm": "0.33.0"}, {"vllm": "0.34.0"}, False),
        ({"vllm": "0.33.0"}, {}, True),  # it is not here, so there is no other
        ({}, {"vllm": "0.33.0"}, False),
        ({}, {}, True),
    ],
)
def test_a_record_of_another_release_of_the_vendors_package_does_not_count(
    tmp_path: Path, had: dict[str, str], present: dict[str, str], counts: bool
) -> None:
    kernel = KERNELS["vllm_flash_attn_3.varlen"]
    run = {"arch": "sm90", "versions": had, "kernels": {kernel.name: {"source": source_hash(kernel)}}}
    (tmp_path / "contract-sm90.json").write_text(json.dumps(run))
    assert bool(list(committed(tmp_path, kernel, present))) == counts
