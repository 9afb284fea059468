"""Packages as they are found on machines: absent, broken, of another project, incomplete, and right."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portable import packages
from portable.backends.packages import PACKAGES
from portable.cache_dir import cache_dir
from portable.kernel import Kernel, KernelCaps, Needs, Op, Requires
from portable.layer import Layer, UnsupportedError
from portable.packages import Package, VendorPackage, inspect, installed, why_closed
from portable.platform.detect import describe
from portable.select import Choice, parse_requested, select
from portable.sets import ANY, ANY_SIZE

ROOT = Path(__file__).parent.parent
KNOWN = {package.name: package for package in PACKAGES}
AITER = "def flash_attn_varlen_func(): ...\n"
MLA = "def mla_decode_fwd(): ...\n"
FLASH = "def flash_attn_varlen_func(): ...\ndef flash_attn_with_kvcache(): ...\n"


def install(site: Path, files: dict[str, str], **distributions: str) -> None:
    """Write modules, path -> source, and the metadata of distributions, name (with _) -> version."""
    for path, source in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    for name, version in distributions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the only place for packages, in a process that has imported none of those that it will hold."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if not path.endswith("-packages"))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(packages, "_opened", {})
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", raising=False)
    names = ("aiter", "flash_attn", "flash_attn_2_cuda")
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]
    sys.modules.update(hidden)


def kernel(provider: str, *required: str) -> Kernel:
    caps = KernelCaps(
        op=Op.PREFILL,
        name=f"{provider}.prefill",
        provider=provider,
        vendors={"amd"},
        archs=ANY,
        dtypes=ANY,
        head_dims=ANY_SIZE,
        gqa_ratios=ANY_SIZE,
        requires=tuple(Requires(package) for package in required),
    )
    return Kernel(caps, run=print)


KERNELS = (kernel("aiter", "amd-aiter"), kernel("flash_attn", "flash-attn"), kernel("triton"), kernel("reference"))


def choose(requested: str | None = None) -> Choice:
    request, target = parse_requested(requested), describe("gfx942")
    layer, order = Layer.gqa(num_heads=4, head_dim=64), {"prefill": ("aiter", "flash_attn", "triton")}
    return select(Op.PREFILL, target, layer, Needs(), request, installed(target, request), KERNELS, order)


# C05: a vendor library that cannot be imported here


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("raise RuntimeError('0 active drivers')", "importing aiter raised RuntimeError: 0 active drivers"),
        ("raise ImportError('no jax')", "importing aiter raised ImportError: no jax"),
        ("raise KeyError('gfx000')", "importing aiter raised KeyError: 'gfx000'"),
        ("raise OSError('libamdhip64.so:\\n not found')", "importing aiter raised OSError: libamdhip64.so: not found"),
        ("print('leaving'); sys.exit(3)", "importing aiter raised SystemExit: 3"),
        ("from aiter import ops", "importing aiter raised RuntimeError: deep inside"),
    ],
)
def test_an_import_that_fails_is_tried_once_and_quoted(
    site: Path, capfd: pytest.CaptureFixture[str], statement: str, problem: str
) -> None:
    source = f"""\
        import os, sys
        with open({str(site / "imports")!r}, "a") as file:
            print(os.getpid(), file=file)
        print("noise")
        print("more noise", file=sys.stderr)
        {statement}
        """
    deep = "raise RuntimeError('deep inside')"
    install(site, {"aiter/__init__.py": textwrap.dedent(source), "aiter/ops/__init__.py": deep}, amd_aiter="0.1.7")
    assert installed()["amd-aiter"].version == "0.1.7"
    assert not (site / "imports").exists()
    assert {installed()["amd_aiter"].problem for _ in range(3)} == {problem}
    here = str(os.getpid())
    assert [each == here for each in (site / "imports").read_text().split()] == [False, True]  # the first is elsewhere
    assert capfd.readouterr() == ("", "")
    assert dict(choose().rejected)["aiter.prefill"] == (f"amd-aiter 0.1.7 cannot be used: {problem}",)


def test_the_first_import_of_a_version_is_in_another_process_and_the_next_are_not(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = str(site / "imports")
    source = f"import os\nwith open({told!r}, 'a') as file:\n    print(os.getpid(), file=file)\n{AITER}"
    install(site, {"aiter/__init__.py": source, "aiter/ops.py": "", "aiter/mla.py": MLA}, amd_aiter="0.1.7")

    def processes() -> list[str]:
        """Where it is imported by a process that has not imported it: "elsewhere", "here"."""
        packages._opened.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        (site / "imports").write_text("")
        assert installed()["amd-aiter"].problem is None
        here = str(os.getpid())
        return ["here" if each == here else "elsewhere" for each in (site / "imports").read_text().split()]

    assert processes() == ["elsewhere", "here"]
    assert processes() == ["here"]
    (site / "aiter/__init__.py").write_text(f"{source}\n")  # a checkout changes without a new version
    assert processes() == ["elsewhere", "here"]
    (site / "amd_aiter-0.1.7.dist-info").rename(site / "amd_aiter-0.1.8.dist-info")
    metadata = site / "amd_aiter-0.1.8.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.1.7", "0.1.8"))
    assert processes() == ["elsewhere", "here"]
    assert processes() == ["here"]
    for fact in ("node", "machine"):  # a folder that several machines share
        monkeypatch.setattr(platform, fact, lambda: "another")
        assert processes() == ["elsewhere", "here"]


def notes(site: Path) -> list[Path]:
    return list((site / "cache").rglob("*.json"))


@pytest.mark.parametrize("source", ["raise RuntimeError('no GPU')", "import sys; sys.exit()", "x = 1"])
def test_an_import_that_fails_is_not_noted_as_one_that_went_well(site: Path, source: str) -> None:
    install(site, {"aiter/__init__.py": source, "aiter/ops.py": ""}, amd_aiter="0.1.7")
    assert installed()["amd-aiter"].problem is not None and notes(site) == []


def test_what_others_print_is_not_taken_for_the_end_of_an_import(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, {"noise/sitecustomize.py": "print(1); print(2)", "aiter/ops.py": ""}, amd_aiter="0.1.7")
    (site / "aiter" / "__init__.py").write_text(f"import os\nos.getpid() == {os.getpid()} or os._exit(5)")
    monkeypatch.setenv("PYTHONPATH", str(site / "noise"))
    sys.path.insert(0, str(site / "noise"))
    assert installed()["amd-aiter"].problem == "importing aiter ended its process with code 5: it wrote nothing"
    assert notes(site) == []


def test_what_other_threads_print_while_it_is_imported_elsewhere_is_not_lost(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(3)\n{AITER}"
    install(site, {"aiter/__init__.py": source, "aiter/ops.py": "", "aiter/mla.py": MLA}, amd_aiter="0.1.7")
    ended = threading.Event()

    def engine() -> None:
        for number in range(5):
            time.sleep(0.2)
            print("engine", number)
        ended.set()

    threading.Thread(target=engine).start()
    assert installed()["amd-aiter"].problem is None and ended.is_set()
    assert capsys.readouterr().out.split("\n") == [*(f"engine {number}" for number in range(5)), ""]


def test_without_a_home_the_cache_is_a_folder_of_the_user_among_the_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PORTABLE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without a passwd entry
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"portable-{os.getuid()}"
    for _ in range(2):
        assert cache_dir() == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache_dir() == folder
    folder.chmod(0o777)  # who can write there could put compiled code there
    assert cache_dir() == Path(os.devnull) / "portable"


def test_where_no_process_can_be_had_a_package_is_imported_here(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, {"aiter/__init__.py": AITER, "aiter/ops.py": "", "aiter/mla.py": MLA}, amd_aiter="0.1.7")
    monkeypatch.setattr(sys, "path", [site, *sys.path])  # a Path, which Python passes over
    for nothing in (None, os.devnull, "/bin/true"):  # the last two: which cannot be run, and which says nothing
        monkeypatch.setattr(sys, "executable", nothing)
        packages._opened.clear()
        assert installed()["amd-aiter"].problem is None
    assert not (site / "cache").exists()


def test_ctrl_c_during_an_import_is_not_swallowed(site: Path) -> None:
    install(site, {"aiter/__init__.py": "raise KeyboardInterrupt", "aiter/ops.py": ""}, amd_aiter="0.1.7")
    with pytest.raises(KeyboardInterrupt):
        choose()


def test_what_the_user_leaves_out_is_never_imported(site: Path) -> None:
    install(site, {"aiter/__init__.py": "raise RuntimeError", "aiter/ops.py": ""}, amd_aiter="0.1.7")
    assert choose("triton").kernel.name == "triton.prefill"
    assert choose("prefill=reference").kernel.name == "reference.prefill"
    assert installed(describe("sm90"))["amd-aiter"].problem == "it serves amd, not nvidia"
    assert packages._opened == {}


def test_a_library_that_ends_the_process_is_harmless_to_import_portable_and_to_those_who_force_another(
    tmp_path: Path,
) -> None:
    install(tmp_path, {"aiter/__init__.py": "import os\nos._exit(9)", "aiter/ops.py": ""}, amd_aiter="0.1.7")
    code = """
import torch, portable
layer = portable.Layer.gqa(num_heads=2, head_dim=8, dtype=torch.float32)
portable.Attention(layer, page_size=4, device="cpu", backend="reference").explain()
"""
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# C06: flash_attn is absent, there without its compiled module, or told to do without

MISSING = (
    "flash-attn 2.8.3 cannot be used: its compiled module flash_attn_2_cuda is not there; "
    "build flash-attn with it, or set FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE"
)


@pytest.mark.parametrize(
    ("there", "extension", "variable", "problem"),
    [
        (False, False, False, "flash-attn is not installed"),
        (True, False, False, MISSING),
        (True, False, True, None),
        (True, True, False, None),
    ],
)
def test_a_flash_attn_that_cannot_be_used_costs_only_those_who_ask_for_it(
    site: Path, monkeypatch: pytest.MonkeyPatch, there: bool, extension: bool, variable: bool, problem: str | None
) -> None:
    if there:
        install(site, {"flash_attn/__init__.py": FLASH}, flash_attn="2.8.3")
    if extension:
        install(site, {"flash_attn_2_cuda.py": ""})
    if variable:
        monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    assert choose("triton").kernel.name == "triton.prefill"
    assert "flash_attn" not in sys.modules
    if problem is None:
        assert choose().kernel.name == choose("flash_attn").kernel.name == "flash_attn.prefill"
    else:
        assert choose().kernel.name == "triton.prefill"
        assert dict(choose().rejected)["flash_attn.prefill"] == (problem,)
        with pytest.raises(UnsupportedError) as error:
            choose("flash_attn")
        assert f"flash_attn.prefill: {problem}" in str(error.value)


@pytest.mark.parametrize("variable", [False, True])
def test_one_build_of_flash_attn_is_chosen_by_the_variable(
    site: Path, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    install(site, {"flash_attn/__init__.py": FLASH, "flash_attn_2_cuda.py": ""}, flash_attn="2.8.3")
    if variable:
        monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    problems = {build: installed()[f"flash-attn[{build}]"].problem for build in ("ck", "triton")}
    absent = "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE is not set; it chooses FlashAttention 2 on Triton"
    assert problems == (
        {"ck": "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE is set", "triton": None}
        if variable
        else {"ck": None, "triton": absent}
    )


# C07: the name aiter


def test_a_module_of_another_project_is_told_from_the_vendors(site: Path) -> None:
    install(site, {"aiter/__init__.py": "raise RuntimeError('it must not be imported')"}, aiter="0.13.20191203")
    sentence = f"module 'aiter' at {site / 'aiter' / '__init__.py'} is not AMD AITER; install amd-aiter"
    assert installed()["amd-aiter"] == Package(None, sentence)
    assert choose().kernel.name == "triton.prefill"
    assert dict(choose().rejected)["aiter.prefill"] == (f"amd-aiter is not installed: {sentence}",)


def test_a_namesake_in_front_of_the_right_package_is_a_problem_of_it(site: Path) -> None:
    install(site, {"aiter/__init__.py": ""}, amd_aiter="0.1.7")
    package = installed()["amd-aiter"]
    assert package.version == "0.1.7"
    assert package.problem is not None and package.problem.endswith("is not AMD AITER; install amd-aiter")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"aiter/__init__.py": "", "aiter/mla.py": MLA}, "it has no aiter.flash_attn_varlen_func"),
        ({"aiter/__init__.py": AITER, "aiter/mla.py": ""}, "it has no aiter.mla.mla_decode_fwd"),
        ({"aiter/__init__.py": AITER}, "it has no aiter.mla.mla_decode_fwd"),
        (
            {"aiter/__init__.py": AITER, "aiter/mla.py": "import nowhere"},
            "importing aiter raised ModuleNotFoundError: No module named 'nowhere'",
        ),
        ({"aiter/__init__.py": AITER, "aiter/mla.py": MLA}, None),
    ],
)
@pytest.mark.parametrize("distribution", ["amd_aiter", "aiter"])
def test_a_missing_symbol_is_named(site: Path, files: dict[str, str], problem: str | None, distribution: str) -> None:
    install(site, {**files, "aiter/ops/__init__.py": ""}, **{distribution: "0.1.7"})
    if problem is None:
        assert choose().kernel.name == "aiter.prefill"
    else:
        assert dict(choose().rejected)["aiter.prefill"] == (f"amd-aiter 0.1.7 cannot be used: {problem}",)


def test_a_module_without_a_distribution_has_no_version_to_rely_on(site: Path) -> None:
    install(site, {"aiter/__init__.py": AITER, "aiter/ops.py": ""})
    package = installed()["amd-aiter"]
    assert package.version is None
    assert package.problem is not None and package.problem.endswith("belongs to no distribution; install amd-aiter")


def test_a_folder_that_another_package_shares_is_not_the_package(site: Path) -> None:
    install(site, {"flash_attn/cute/__init__.py": FLASH}, flash_attn_4="4.0.0b36")
    assert "flash-attn" not in installed()
    assert installed()["flash-attn-4"].problem is None


# what may be imported


def test_a_package_of_other_vendors_is_not_imported() -> None:
    aiter, triton = KNOWN["amd-aiter"], KNOWN["triton"]
    assert why_closed(aiter, describe("sm90"), None) == "it serves amd, not nvidia"
    assert why_closed(aiter, describe("gfx942"), None) is None
    assert why_closed(triton, describe("x86_64"), parse_requested("aiter")) is None


@pytest.mark.parametrize(
    ("requested", "closed"),
    [
        ("triton", True),
        ("aiter", False),
        ("aiter.varlen", False),
        ("triton,paged=aiter", False),
        ("paged=triton", False),
    ],
)
def test_a_package_is_closed_when_another_provider_is_forced_for_everything(requested: str, closed: bool) -> None:
    reason = why_closed(KNOWN["amd-aiter"], describe("gfx942"), parse_requested(requested))
    assert reason == (f"backend {requested!r} leaves it out" if closed else None)


def test_lookups_are_lazy_and_by_canonical_name() -> None:
    stub = VendorPackage(name="No_Such.Thing", module="no_such_thing", title="Nothing")
    assert inspect(stub) is None
    here = installed(known=(stub,))
    assert (list(here), len(here)) == ([], 0)
    assert here["PyTest"] == Package(pytest.__version__)
    with pytest.raises(KeyError):
        here["no-such-thing"]


def test_kernels_and_packages_agree_about_providers_and_vendors() -> None:
    from portable.attention import load_kernels

    for kernel in load_kernels():
        for name, _ in kernel.caps.requires:
            package = KNOWN.get(name)
            assert package is not None, f"{kernel.name} requires {name}, which backends/packages.py does not list"
            assert package.provider in (None, kernel.caps.provider), kernel.name
