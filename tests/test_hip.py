"""The C++ kernels' sources, how they are compiled and kept, and that every launch packs what its kernel takes."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from portable.backends.hip import FILES, KERNELS, launch, runtime
from portable.backends.hip.objects import Store

ROOT = Path(__file__).parents[1]
SOURCES = [*sorted((ROOT / "backends" / "hip").glob("*.cu")), ROOT / "backends" / "hip" / "shim.h"]


def code_of(path: Path) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def test_every_source_has_a_launcher():
    assert {path.stem for path in SOURCES if path.suffix == ".cu"} == set(FILES)
    assert {kernel.name for kernel in KERNELS} >= {"hip.cache_write", "hip.cache_gather", "hip.merge"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_assumes_32_lanes(path: Path):
    """C45: a literal 32 or a mask of 32 bits is right on half of the devices."""
    text = code_of(path)
    assert not re.findall(r"(?<![\w.])(?:32|0x20)(?:[uUlL]*)(?![\w.])", text)
    assert "0xffffffff" not in text.lower()
    assert "asm" not in text and "__ballot" not in text and "__activemask" not in text


def test_the_hipified_sources_are_those_of_today():
    done = subprocess.run([sys.executable, ROOT / "ci" / "hipify.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "backends" / "hip" / "amd").iterdir()), ids=lambda path: path.name)
def test_no_cuda_name_is_left(path: Path):
    """What hipify leaves alone in silence (fp8 and bf16 types, lane masks, `__CUDA_ARCH__`) the shim does without."""
    left = set(re.findall(r"\b\w*(?:cuda|CUDA|nv_|nvcuda)\w*", code_of(path)))
    assert left <= {"__CUDACC_RTC__"}  # by which NVRTC says that it is NVRTC


def test_an_object_is_made_once_and_verified(tmp_path: Path):
    store, made = Store(tmp_path / "objects"), []

    def make() -> bytes:
        made.append(1)
        return b"code"

    assert [store.get("key", make) for _ in range(2)] == [b"code"] * 2 and len(made) == 1
    file = tmp_path / "objects" / "key"
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_bytes(hashlib.sha256(b"code").digest() + b"edoc")  # damaged, or not ours
    assert store.get("key", make) == b"code" and len(made) == 2
    assert not list(tmp_path.glob("objects/*.part"))


def test_what_failed_to_compile_is_not_kept(tmp_path: Path):
    store = Store(tmp_path)
    tmp_path.chmod(0o700)

    def fail() -> bytes:
        raise RuntimeError("cache.cu does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        store.get("key", fail)
    assert store.get("key", lambda: b"now") == b"now"


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tmp_path.chmod(0o777)
    (tmp_path / "key").write_bytes(hashlib.sha256(b"evil").digest() + b"evil")
    assert Store(tmp_path).get("key", lambda: b"good") == b"good"
    assert "others can write to it" in caplog.text


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    assert Store(tmp_path / "file" / "objects").get("key", lambda: b"code") == b"code"
    assert "are not kept" in caplog.text


def test_a_lock_file_of_a_dead_process_locks_nothing(tmp_path: Path):
    tmp_path.chmod(0o700)
    (tmp_path / "key.lock").write_text("pid 999999")
    begun = time.monotonic()
    assert Store(tmp_path).get("key", lambda: b"code") == b"code"
    assert time.monotonic() - begun < 5


def test_waiting_for_another_builder_ends_with_its_name(tmp_path: Path):
    tmp_path.chmod(0o700)
    with open(tmp_path / "key.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"key\.lock for 0\.2 s while it builds key"):
            Store(tmp_path, wait=0.2).get("key", lambda: b"code")


def _build(folder: Path, log: Path) -> None:
    def make() -> bytes:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        return b"code"

    assert Store(folder).get("key", make) == b"code"


def test_two_processes_build_once(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_build, args=(tmp_path / "objects", tmp_path / "log")) for _ in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(30)
    assert [each.exitcode for each in workers] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_loaded_library_is_found_by_its_name(tmp_path: Path):
    maps = tmp_path / "maps"
    lines = ("libamdhip64.so.7", "libamdhip64-0a1b2c3d.so", "libamdhip64-builtins.so.7", "libamdhip64x.so", "libc.so.6")
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 1 /opt/a b/{name}\n" for name in lines) + "7f02 rw-p 0\n")
    assert runtime.loaded("libamdhip64.so", maps) == ["/opt/a b/libamdhip64-0a1b2c3d.so", "/opt/a b/libamdhip64.so.7"]


def test_a_missing_library_is_named():
    with pytest.raises(RuntimeError, match=r"libnothing\.so was not found"):
        runtime.library("libnothing.so")


def test_a_tensor_of_no_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PORTABLE_DEVICE", raising=False)
    function = launch.Function("merge", "merge2", 7, "12q3i", ELEMENT="float")
    with pytest.raises(ValueError, match="no emulated device is active"):
        function((1, 1), (torch.zeros(1), *[None] * 6), *[0] * 15)


@pytest.mark.skipif(find_spec("nvidia") is None, reason="the package nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize("file", FILES)
def test_nvrtc_compiles_every_source(file: str):
    compiler = runtime.Compiler(runtime.NVIDIA)
    defines = {
        "cache": ("ROW=bf16", "STORED=e4m3fn"),
        "merge": ("ELEMENT=bf16",),
        "paged_decode": ("ELEMENT=bf16", "STORED=bf16", "EIGHTS=2", "ROWS=4", "VECTOR=1"),
    }[file]
    path, headers = launch.sources(file, "nvidia")
    object_ = compiler.compile(path.name, path.read_text(), headers, "sm_90", defines)
    assert object_.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"(?s)does not compile for sm_90: .*nothing"):
        compiler.compile("wrong.cu", "nothing", {}, "sm_90")


def test_the_cache_is_of_this_user(tmp_path: Path):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, -1)
    assert Store(tmp_path)._why_not() == "it belongs to user 12345, not to 0"


@pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is not installed")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_amd_code_is_within_its_means(arch: str, monkeypatch: pytest.MonkeyPatch):
    """The widest paged decodes, a cache of the layer's own type, and merging: no vector register spills."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    from build_objects import assembly, variants

    from portable.platform.emulated import clang

    wanted = (
        ("cache", ("ROW=bf16", "STORED=bf16")),
        ("merge", ("ELEMENT=bf16",)),
        *(("paged_decode", ("ELEMENT=bf16", "STORED=bf16", "EIGHTS=4", f"ROWS={rows}", "VECTOR=1")) for rows in (2, 4)),
    )
    assert {*wanted} <= {*variants()}
    for file, defines in wanted:
        text = assembly(file, defines, arch)
        facts = re.findall(r"^    \.(vgpr_spill_count|private_segment_fixed_size): +(\d+)", text, re.M)
        assert facts and all(value == "0" for _, value in facts), f"{file} {defines}: {facts}"
        assert all(int(size) <= 65536 for size in re.findall(r"^    \.group_segment_fixed_size: +(\d+)", text, re.M))
        assert re.search(r"(global|flat)_load_(dwordx4|b128)", text), f"{file} {defines} has no loads of 16 bytes"
    assert clang.assemble(text, arch).startswith(b"\x7fELF")
