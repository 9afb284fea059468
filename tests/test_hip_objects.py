"""The C++ kernels' objects: which are built before a release, which are loaded, and how others are kept (C47)."""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portable.backends.hip import objects, paged_decode, runtime, sources
from portable.backends.hip.objects import Store
from portable.layer import Layer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ci/build_objects.py"""
    monkeypatch.syspath_prepend(ROOT / "ci")
    import build_objects

    return build_objects


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the run-time compiler of either vendor was asked for; nothing is compiled."""
    asked: list[tuple[Any, ...]] = []

    def compiler_of(vendor: str) -> Any:
        def compile(*given: Any) -> bytes:
            asked.append((vendor, *given))
            return f"{vendor} {len(asked)}".encode()

        names = replace(runtime.names_of(vendor), **changed.get("names", {}))
        return SimpleNamespace(names=names, version=changed.get("version", "compiler 1.0"), compile=compile)

    changed: dict[str, Any] = {}
    compiler_of.changed = changed  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "compiler_of", compiler_of)
    monkeypatch.setattr(sources, "OBJECTS", tmp_path / "wheel")
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "cache"))
    sources._unverified.cache_clear()
    yield asked
    sources._unverified.cache_clear()


# what a release builds


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_every_decode_over_an_aligned_cache_has_an_object(builder: ModuleType, arch: str) -> None:
    """Of any head dims, GQA ratio and query tokens, in the types that the caps declare."""
    known, (kernel,) = {*builder.variants(arch)}, paged_decode.KERNELS
    widths = [width for width in range(8, 257, 8) if width in kernel.caps.head_dims]
    for qk, v, group, queries in itertools.product(widths, (*widths[7::8], *widths[:2]), (1, 2, 3, 8), (1, 2, 8)):
        for dtype in kernel.caps.dtypes:
            for kv_dtype in (dtype, *kernel.caps.kv_dtypes):
                shape = {"num_heads": group, "num_kv_heads": 1, "head_dim": qk, "v_head_dim": v}
                layer = Layer.gqa(**shape, dtype=dtype, kv_dtype=kv_dtype)
                cut = paged_decode.cut_of(layer, queries, arch)
                named = paged_decode.defines(dtype, kv_dtype, cut, full=(qk, v) == (cut.width, cut.width))
                variant = "paged_decode", tuple(f"{name}={value}" for name, value in named.items())
                assert variant in known, f"{qk}/{v}, {group} x {queries}, {dtype} over {kv_dtype}: {variant}"


def test_a_build_that_was_ended_goes_on(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(builder, "assembly", lambda *one: asked.append(one) or "text")
    monkeypatch.setattr(builder, "faults", lambda file, *rest: ["it spills"] if file == "cache" else [])
    monkeypatch.setattr(builder.clang, "assemble", lambda text, arch: b"code")
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "merge-of-another-source.co").write_bytes(b"old")
    (tmp_path / "gfx942" / "refresh.part").write_bytes(b"half")
    command = ["build_objects.py", "--arch", "gfx942", "--into", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*command, "--only", "merge", "refresh"])
    assert builder.main() == 0
    wanted = [one for one in builder.variants() if one[0] in ("merge", "refresh")]
    files = {sources.name_of(*one, "amd") for one in wanted}
    assert len(asked) == len(wanted) == 4 and {path.name for path in (tmp_path / "gfx942").iterdir()} == files
    assert builder.main() == 0 and len(asked) == 4
    monkeypatch.setattr("sys.argv", [*command, "--only", "cache"])
    assert builder.main() == 1, "code with a fault is not kept"
    assert {path.name for path in (tmp_path / "gfx942").iterdir()} == files


@pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is not installed")
def test_code_that_spills_or_reads_in_pieces_is_refused(builder: ModuleType) -> None:
    defines = ("ELEMENT=bf16",)
    text = builder.assembly("merge", defines, "gfx942")
    for before, after, said in (
        (".vgpr_spill_count: 0", ".vgpr_spill_count: 3", "vgpr_spill_count is 3"),
        (".private_segment_fixed_size: 0", ".private_segment_fixed_size: 80", "private_segment_fixed_size is 80"),
        (".group_segment_fixed_size: 0", ".group_segment_fixed_size: 65552", "65552 bytes of LDS, and a workgroup"),
        ("load_dwordx4", "load_dwordx2", "no load is of 16 bytes"),
        (".vgpr_spill_count", ".other", "there are no facts of its kernels"),
    ):
        found = builder.faults("merge", defines, "gfx942", re.sub(before.replace(": ", ": +"), after, text))
        assert found and all(each.startswith("merge ELEMENT=bf16 | gfx942: ") and said in each for each in found)
    assert builder.faults("merge", defines, "gfx942", text) == []


def test_a_decode_reads_whole_vectors_in_a_loop(builder: ModuleType) -> None:
    loop = "BB0_1:\n global_load_dword v1\n{}\n s_cbranch_scc1 BB0_1\n global_load_ushort v2\n"
    whole = loop.format(" global_load_dwordx4 v[4:7]\n" * 2)
    pairs = loop.format(" global_load_dwordx2 v[4:5]\n" * 2)
    pieces = loop.format(" global_load_dwordx4 v[4:7]\n" * 2 + " global_load_ushort v8")
    reads = builder.reads_whole
    assert reads(("STORED=bf16", "VEC=8"), whole) and reads(("STORED=e4m3fn", "VEC=16"), whole)
    assert not reads(("STORED=bf16", "VEC=8"), pairs) and reads(("STORED=e4m3fn", "VEC=8"), pairs)
    assert not reads(("STORED=bf16", "VEC=8"), pieces)


def test_the_emulator_runs_what_a_release_builds(builder: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                                 tmp_path: Path) -> None:  # fmt: skip
    """The same text, folder, architecture and options go into the same compiler."""
    from portable.platform.emulated import hip

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(builder.clang, "build", lambda *given: asked.append(given) or ("", {}))
    builder.assembly("merge", ("ELEMENT=bf16",), "gfx942")
    monkeypatch.setattr(hip.clang, "version", lambda: "1")
    hip.compile(sources.HIPIFIED / "merge.hip", "gfx942", ["-DELEMENT=bf16"], tmp_path)
    resolved = [(*given[:2], given[2].resolve(), *given[3:]) for given in asked]
    assert len(asked) == 2 and resolved[0] == resolved[1]


# what is loaded


def test_an_object_of_the_wheel_comes_first_and_is_not_labelled(
    made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = sources.OBJECTS / "gfx942" / sources.name_of("merge", ("ELEMENT=bf16",), "amd")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of the wheel")
    assert sources.code("merge", ("ELEMENT=bf16",), "amd", "gfx942") == b"of the wheel"
    assert not made and not caplog.text


def test_hiprtc_is_the_fallback_and_labelled_unverified_once(made: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for defines in (("ELEMENT=bf16",), ("ELEMENT=fp16",)):
            sources.code("merge", defines, "amd", "gfx950")
    assert [(vendor, name, defines) for vendor, name, _, _, _, defines in made] == [
        ("amd", "merge.hip", ("ELEMENT=bf16",)),
        ("amd", "merge.hip", ("ELEMENT=fp16",)),
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "hipRTC compiles it, which is unverified" in caplog.text and "gfx950" in caplog.text
    sources.code("merge", ("ELEMENT=bf16",), "nvidia", "sm90")
    assert made[-1][:2] == ("nvidia", "merge.cu") and len(caplog.records) == 1


def test_an_object_of_another_source_is_not_loaded(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    file = sources.OBJECTS / "gfx942" / sources.name_of("merge", (), "amd")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of the wheel")
    path, headers = sources.sources("merge", "amd")
    edited = {name: text + "\n" for name, text in headers.items()}
    monkeypatch.setattr(sources, "sources", lambda file, vendor: (path, edited))
    assert sources.code("merge", (), "amd", "gfx942") == b"amd 1"


# how others are kept


def test_the_key_has_all_that_an_object_depends_on(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, headers, defines, architecture, flags and the compiler's version: each alone makes another object."""
    changed: dict[str, Any] = runtime.compiler_of.changed  # type: ignore[attr-defined]
    path, headers = sources.sources("merge", "nvidia")

    def asked(defines: tuple[str, ...] = ("ELEMENT=bf16",), arch: str = "sm90") -> bool:
        before = len(made)
        sources.code("merge", defines, "nvidia", arch)
        return len(made) > before

    assert asked() and not asked()
    assert asked(defines=("ELEMENT=fp16",)) and asked(arch="sm80")
    changed["version"] = "compiler 1.1"
    assert asked() and not asked()
    changed["names"] = {"options": (*runtime.NVIDIA.options, "--use_fast_math")}
    assert asked() and not asked()
    edited = {name: text + "\n" for name, text in headers.items()}
    monkeypatch.setattr(sources, "sources", lambda file, vendor: (path, edited))
    assert asked() and not asked()
    other = path.parent / "cache.cu"
    monkeypatch.setattr(sources, "sources", lambda file, vendor: (other, edited))
    assert asked() and not asked()


@pytest.mark.parametrize("damage", [b"", b"x", b"code", bytes(32) + b"code"], ids=len)
def test_a_file_that_is_cut_or_changed_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path / "objects")
    assert store.get("key", lambda: b"code") == b"code"
    (tmp_path / "objects" / "key").write_bytes(damage)
    assert store.get("key", lambda: b"again") == b"again"
    assert store.get("key", lambda: pytest.fail("it was mended")) == b"again"


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "objects")
    assert store.get("key", lambda: b"code") == b"code"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert store.get("key", lambda: b"mine") == b"mine"
    monkeypatch.undo()
    assert store.get("key", lambda: b"") == b"code"


def _holds(folder: Path) -> None:
    def make() -> bytes:
        (folder / "begun").touch()
        time.sleep(60)
        return b"late"

    Store(folder).get("key", make)


def test_a_lock_dies_with_its_owner(tmp_path: Path) -> None:
    """A process that is killed while it compiles leaves nothing that others wait for, and no half of an object."""
    folder = tmp_path / "objects"
    owner = multiprocessing.get_context("fork").Process(target=_holds, args=(folder,), daemon=True)
    owner.start()
    end = time.monotonic() + 20
    while not (folder / "begun").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert owner.pid is not None
    with pytest.raises(TimeoutError, match="while it builds key"):
        Store(folder, wait=0.1).get("key", lambda: b"code")
    os.kill(owner.pid, signal.SIGKILL)
    owner.join(20)
    begun = time.monotonic()
    assert Store(folder).get("key", lambda: b"code") == b"code" and time.monotonic() - begun < 5
    assert {path.name for path in folder.iterdir()} == {"begun", "key", "key.lock"}


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_where_nothing_can_be_written_objects_are_read_or_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    folder = tmp_path / "objects"
    assert Store(folder).get("there", lambda: b"code") == b"code"

    def refuse(*given: Any, **named: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
    assert Store(folder).get("there", lambda: pytest.fail("it is there")) == b"code" and not caplog.text
    count = itertools.count()
    assert Store(folder).get("new", lambda: f"made {next(count)}".encode()) == b"made 0"
    assert next(count) == 1 and "compiled kernels are not kept" in caplog.text


def test_an_object_that_cannot_be_put_in_place_is_used_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(objects.os, "replace", full)
    count = itertools.count()
    assert Store(tmp_path / "objects").get("key", lambda: f"made {next(count)}".encode()) == b"made 0"
    assert next(count) == 1 and "a compiled kernel is not kept" in caplog.text
    assert [path.name for path in (tmp_path / "objects").iterdir()] == ["key.lock"]


def test_a_compilers_own_error_is_not_taken_for_the_folders(tmp_path: Path) -> None:
    def make() -> bytes:
        count.append(1)
        raise PermissionError("libnvrtc.so cannot be read")

    count: list[int] = []
    with pytest.raises(PermissionError, match="libnvrtc"):
        Store(tmp_path / "objects").get("key", make)
    assert len(count) == 1


def test_threads_build_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.2)
        return b"code"

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Store(tmp_path / "objects").get("key", make), range(4)))
    assert found == [b"code"] * 4 and len(made) == 1
