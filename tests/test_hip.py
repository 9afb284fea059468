"""The C++ kernels' sources, how they are compiled and kept, and that every launch packs what its kernel takes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import multiprocessing
import re
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from portable.backends.hip import FILES, KERNELS, cache, launch, paged_decode, runtime, sources
from portable.backends.hip.objects import Store
from portable.backends.packages import PACKAGES
from portable.conformance.inputs import segment
from portable.kernel import KV, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.packages import Package, inspect
from portable.platform.detect import describe
from portable.ragged import cdiv

ROOT = Path(__file__).parents[1]
SOURCES = [path for glob in ("*.cu", "*.h") for path in sorted((ROOT / "backends" / "hip").glob(glob))]
LANES = (  # what is right on half of the devices: 32 lanes, their mask or their number of bits, PTX
    r"(?<![\w.])(?:32|31|0x20|0x1f)[uUlL]*(?![\w.])(?<!>> 31)",
    r"0xf{8}(?!f)",
    r"~0[uU]?(?![\w.])",
    r"\basm\b|__ballot|__activemask|__popc\b|__ffs\b",
    r"1[uU]?\s*<<\s*(?:\w*lane|threadIdx)",
)


def decode_defines(
    width: int, most: int, kv_dtype: torch.dtype = torch.bfloat16, arch: str = "gfx942"
) -> tuple[str, ...]:
    """Of a paged decode of bfloat16."""
    byte = kv_dtype.itemsize == 1
    cut = paged_decode.cut_for(width, most, arch, byte, byte)
    named = paged_decode.defines(torch.bfloat16, kv_dtype, cut)
    return tuple(f"{name}={value}" for name, value in named.items())


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
    if path.name == "shim.h":  # which names NVIDIA's lanes to intrinsics that ask for them
        text = re.sub(r"#define \w+\(.*_sync\(~0u.*", "", text)
    assert assumed(text) == []


def assumed(text: str) -> list[str]:
    return [found[0] for pattern in LANES for found in re.finditer(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize(
    "line",
    [
        "int lane = threadIdx.x % 32;",
        "lane = threadIdx.x & 31u;",
        "for (int i = 0x10; i < 0x20; ++i)",
        "__shfl_xor_sync(0xFFFFFFFFu, x, 1);",
        "__any_sync(~0u, x);",
        'asm volatile("bar.sync 0;");',
        "if (__ballot_sync(mask, x))",
        "unsigned mine = 1u << lane;",
        "int n = __popc(__activemask());",
    ],
)
def test_the_lint_sees_what_assumes_32_lanes(line: str):
    assert assumed(line)


def test_the_hipified_sources_are_those_of_today():
    done = subprocess.run([sys.executable, ROOT / "ci" / "hipify.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LEFT_ALONE = (  # by hipify, without a word; the sources do without them, or the shim has them for both vendors
    "#include <cuda_fp8.h>",
    "#include <mma.h>",
    "__nv_fp8_e4m3",
    "__CUDA_ARCH__",
    "__CUDACC_RTC__",
    "0xffffffff",
    "__shfl_xor_sync",
    "__any_sync",
    "__nv_half2float",
    "__nv_float2half_rn",
    "__ballot_sync",
    "__activemask",
    'asm volatile("membar.gl;")',
    "__CUDACC_VER_MAJOR__",
    "__nv_atomic_fetch_add",
    "__hmma_m16n16k16_mma_f32f32",
    "__mma_bf16_m16n16k16_mma_f32",
)
IN_HEADERS = {  # behind `#if`, beside what hipRTC and clang have instead
    "shim.h": (
        "__CUDACC_RTC__",
        "__shfl_xor_sync",
        "__any_sync",
        "__nv_half2float",
        "__nv_float2half_rn",
        "__CUDACC_VER_MAJOR__",
        "__nv_atomic_fetch_add",
    ),
    "paged_matrix.h": ("__hmma_m16n16k16_mma_f32f32", "__mma_bf16_m16n16k16_mma_f32"),
}


def test_what_hipify_leaves_alone_is_in_headers_or_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "ci")
    from hipify import converted

    (made,) = converted({"names.cu": "\n".join(("#include <cuda_runtime.h>", *LEFT_ALONE)) + "\n"}).values()
    assert made.splitlines()[-len(LEFT_ALONE) :] == list(LEFT_ALONE) and "hip/hip_runtime.h" in made
    for path in SOURCES:
        for name in LEFT_ALONE:
            assert name not in code_of(path) or name in IN_HEADERS.get(path.name, ()), f"{path.name}: {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "backends" / "hip" / "amd").iterdir()), ids=lambda path: path.name)
def test_no_cuda_name_is_left(path: Path):
    left = set(re.findall(r"\b\w*(?:cuda|CUDA|nv_|nvcuda)\w*", code_of(path)))
    assert left <= set(IN_HEADERS["shim.h"])


class OnGpu:
    """As much of a tensor of the first GPU as a launch needs."""

    def get_device(self) -> int:
        return 0


def launched(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> tuple[launch.Function, list[tuple[object, ...]]]:
    """A function on a driver that only writes down: (grid and block..., stream, bytes of arguments)."""
    calls: list[tuple[object, ...]] = []

    def call(config: Any, function: Any, parameters: None, extra: Any) -> int:
        _, data, _, size, end = extra._obj
        length = ctypes.c_size_t.from_address(size).value
        numbers = runtime.CONFIG.unpack_from(config._obj)
        calls.append((*numbers, ctypes.string_at(data, length)))
        assert parameters is None and end is None
        return status

    def check(status: int, doing: str) -> None:
        raise RuntimeError(f"{doing}: error {status}")

    function = launch.Function("cache", "write", "2Pi", "qf", ROW="bf16")
    driver = SimpleNamespace(launch=call, names=runtime.NVIDIA, check=check)
    function._functions[0] = driver, ctypes.c_void_p(5)  # type: ignore[assignment]
    monkeypatch.setattr(launch, "raw_stream", lambda device: 77 + device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return function, calls


def test_a_launch_packs_what_it_is_given_before_what_stays(monkeypatch: pytest.MonkeyPatch):
    function, calls = launched(monkeypatch)
    run = function.prepare([OnGpu()], [1 << 40, 0.5], y=2, threads=128)  # type: ignore[list-item]
    for x, address in ((7, 1 << 50), (8, 0)):
        run(x, address, 4096, -3)
    assert calls == [
        (x, 2, 1, 128, 1, 1, 0, 77, struct.pack("@2Piqf", address, 4096, -3, 1 << 40, 0.5))
        for x, address in ((7, 1 << 50), (8, 0))
    ]


def test_a_launch_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    function, _ = launched(monkeypatch, status=700)
    with pytest.raises(RuntimeError, match="launch of write: error 700"):
        function.prepare([OnGpu()], [0, 0.0])(1, 0, 0, 0)  # type: ignore[list-item]


def test_the_launch_of_numbers_gets_those_of_the_struct():
    """What HIP has in place of a launch by a configuration."""
    calls: list[tuple[Any, ...]] = []
    driver = object.__new__(runtime.Driver)
    driver.names = runtime.AMD
    driver._library = SimpleNamespace(hipModuleLaunchKernel=lambda *given: calls.append(given) or 0)
    config = ctypes.create_string_buffer(runtime.CONFIG.pack(1, 2, 3, 4, 5, 6, 0, 1 << 40))
    assert driver._launch_by_numbers(ctypes.byref(config), "function", None, "extra") == 0
    ((function, *sizes, stream, parameters, extra),) = calls
    assert (function, sizes, parameters, extra) == ("function", [1, 2, 3, 4, 5, 6, 0], None, "extra")
    assert stream.value == 1 << 40


def test_prepared_launches_belong_to_a_thread_and_are_forgotten_at_some_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "REMEMBERED", 2)
    launches: launch.Launches[int] = launch.Launches()
    for key in range(3):
        launches.keep(key, key)
    assert launches.known == {2: 2}
    seen: list[dict[Any, int]] = []
    thread = threading.Thread(target=lambda: seen.append(dict(launches.known)))
    thread.start()
    thread.join()
    assert seen == [{}]


def test_a_write_that_was_prepared_for_other_pages_or_scales_is_not_used(monkeypatch: pytest.MonkeyPatch):
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    kv = KV(*torch.zeros(2, 3, 4, 2, 8, dtype=torch.float8_e4m3fn))
    k, slots, scale = torch.zeros(1, 2, 8, dtype=torch.float16), torch.zeros(1, dtype=torch.int64), torch.tensor(2.0)
    made: list[KV] = []

    def prepare(k: Any, v: Any, kv: KV, slots: Any, layer: Layer, scales: cache.Scales) -> Any:
        made.append(kv)
        return cache._prepared(lambda *_: None, 1, 0, kv, scales, layer)

    monkeypatch.setattr(cache, "_prepare_write", prepare)
    monkeypatch.setattr(cache, "_writes", launch.Launches())
    monkeypatch.setattr(cache, "_alike", launch.Launches())
    monkeypatch.setattr(cache, "_for", lambda *_: None)  # pages that lie alike share one: test_hip_launches.py

    def new(kv: KV, tensors: LayerTensors = LayerTensors(v_scale=scale)) -> bool:  # noqa: B008
        """Whether a write is prepared, after one to the first pages was."""
        key = id(layer), id(kv.k), True, True, torch.int64
        cache._writes.keep(key, first)
        before = len(made)
        cache.write(k, k, kv, slots, layer, tensors)
        return len(made) > before

    first = prepare(k, k, kv, slots, layer, (None, scale))
    assert not new(kv) and not new(kv, LayerTensors(v_scale=scale + 1)) and not new(kv, LayerTensors())
    assert new(kv, LayerTensors(v_scale=torch.ones(2)))
    first = prepare(k, k, kv, slots, layer, (None, torch.ones(2)))
    assert not new(kv, LayerTensors(v_scale=torch.zeros(2))) and new(kv, LayerTensors(v_scale=torch.ones(2, 2)[0, :1]))
    assert new(kv, LayerTensors(v_scale=torch.ones(4)[::2])) and new(kv)
    assert not new(kv, LayerTensors(v_scale=torch.ones(2, dtype=torch.bfloat16)))  # read as float32
    assert new(KV(kv.k, kv.k)) and new(KV(kv.v, kv.v)) and new(KV(kv.v.clone(), kv.v))
    first = prepare(k, k, kv, slots, layer, (None, scale))
    for pages in kv:  # which grow in place
        pages.data = torch.zeros(50, *pages.shape[1:], dtype=pages.dtype)
        assert new(kv)
        first = prepare(k, k, kv, slots, layer, (None, scale))


def test_a_write_of_one_row_says_nothing_about_the_strides_of_more(monkeypatch: pytest.MonkeyPatch):
    """A row of V out of a fused product is dense; beside it K is none, whose heads are padded."""
    layer, kv = (
        Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float16),
        KV(*torch.zeros(2, 3, 4, 2, 8, dtype=torch.float16)),
    )
    padded, fused = torch.zeros(4, 2, 16, dtype=torch.float16)[..., :8], torch.zeros(4, 99, dtype=torch.float16)
    seen: list[tuple[int, ...]] = []

    def prepare(self: launch.Function, tensors: Any, fixed: tuple[int, ...], *sizes: int) -> Any:
        return lambda *_: seen.append(fixed[16:20])  # strides of K's and V's tokens and heads

    monkeypatch.setattr(launch.Function, "prepare", prepare)
    monkeypatch.setattr(cache, "_writes", launch.Launches())
    monkeypatch.setattr(cache, "_alike", launch.Launches())
    monkeypatch.setattr(cache, "_for", lambda *_: None)  # pages that lie alike share one: test_hip_launches.py
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # else nothing is kept
    for count in (1, 4, 1):
        k, v = padded[:count], fused[:count, :16].view(count, 2, 8)
        cache.write(k, v, kv, torch.zeros(count, dtype=torch.int64), layer, LayerTensors())
    assert seen == [(32, 16, 16, 8), (32, 16, 99, 8), (32, 16, 16, 8)]


def test_a_gather_that_was_prepared_for_other_pages_scales_or_tables_is_not_used(monkeypatch: pytest.MonkeyPatch):
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    kv, scale = KV(*torch.zeros(2, 3, 4, 2, 8, dtype=torch.float8_e4m3fn)), torch.tensor(2.0)
    made: list[KV] = []

    def prepare(kv: KV, k: Any, v: Any, segment: Segment, layer: Layer, scales: cache.Scales) -> Any:
        made.append(kv)
        return cache._prepared(lambda *_: None, 1, 0, kv, scales, layer)

    monkeypatch.setattr(cache, "_prepare_gather", prepare)
    monkeypatch.setattr(cache, "_gathers", launch.Launches())
    monkeypatch.setattr(cache, "_alike", launch.Launches())
    monkeypatch.setattr(cache, "_for", lambda *_: None)  # pages that lie alike share one: test_hip_launches.py
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # else nothing is kept
    kernel = next(kernel for kernel in cache.KERNELS if kernel.caps.op is Op.CACHE_GATHER)

    def new(kv: KV, lens: tuple[int, ...] = (5, 8), width: int = 2, **tensors: torch.Tensor) -> bool:
        """Whether a gather is prepared."""
        table = torch.zeros(len(lens), width, dtype=torch.int32)
        part = segment(kernel, [(1, each) for each in lens], layer, table, 4)
        before = len(made)
        rows = torch.empty(2, sum(lens), 2, 8, dtype=layer.dtype)
        cache.gather(
            kv, part, layer, LayerTensors(v_scale=scale, **tensors), KV(rows[0], None if kv.v is None else rows[1])
        )
        return len(made) > before

    assert new(kv) and not new(kv) and not new(kv, lens=(1, 2))
    assert new(kv, lens=(1, 2, 3)) and new(kv, width=3) and new(kv, k_scale=torch.ones(2))
    assert new(KV(kv.k, kv.k)) and new(KV(kv.v, kv.v))
    pages = kv.k.clone()
    assert new(KV(pages, pages.clone()))  # whose V is gone now
    assert new(KV(pages, None))
    whole = torch.zeros(6, 4, 2, 8, dtype=torch.float8_e4m3fn)
    pages = whole[:3]
    assert new(KV(pages, pages)) and not new(KV(pages, pages))
    pages.data = whole  # which grows where it is: a debug build knows how many there are
    assert new(KV(pages, pages)) and not new(KV(pages, pages))


def test_a_decode_of_another_cut_is_prepared_for_itself(monkeypatch: pytest.MonkeyPatch):
    """On NVIDIA two cuts of 8 rows differ in threads alone."""
    layer = Layer.gqa(num_heads=4, num_kv_heads=4, head_dim=128)
    kv, launched = KV(*torch.zeros(2, 4, 16, 4, 128, dtype=torch.bfloat16)), []

    def prepare(q: Any, kv: KV, segment: Segment, *rest: Any) -> paged_decode._Launch:
        threads = segment.prepared.cut.threads
        places = kv.k.data_ptr(), kv.v.data_ptr()
        return lambda *_: launched.append(threads), ref(kv.k), ref(kv.v), *places, layer

    monkeypatch.setattr(paged_decode, "_launch", prepare)
    monkeypatch.setattr(paged_decode, "_launches", launch.Launches())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # else nothing is kept
    for queries in (4, 8, 4):
        with launch.recorded(describe("sm90")):
            made = segment(paged_decode.KERNELS[0], ((queries, 60),), layer, torch.zeros(1, 4, dtype=torch.int32), 16)
        q = torch.zeros(queries, 4, 128, dtype=torch.bfloat16)
        paged_decode.attend(q, kv, made, layer, LayerTensors(), torch.empty_like(q), None)
    assert launched == [128, 256, 128] and len(paged_decode._launches.known) == 2


@pytest.mark.parametrize(
    "rows, lens, changes",
    [
        (8, [1024], {}),
        (16, [1025], {}),  # 72 blocks of 16 rows for 132 compute units
        (8, [512] * 2, {}),
        (16, [1024] * 2, {}),
        (8, [8192], {"window": 1000}),
        (8, [8192], {"num_kv_heads": 1, "num_heads": 16}),  # of eight devices that share the heads
        (16, [64], {"batch_invariant": True}),
        (8, [64], {"num_heads": 64}),
    ],
)
def test_a_step_of_few_blocks_is_cut_into_halves_of_them(rows: int, lens: list[int], changes: dict[str, Any]):
    """By what the host knows: of a captured step the longest that it may have."""
    layer = Layer.gqa(**{"num_heads": 128, "num_kv_heads": 8, "head_dim": 128, **changes})
    table = torch.zeros(len(lens), cdiv(max(lens), 16), dtype=torch.int32)
    with launch.recorded(describe("sm90", "H200")):
        part = segment(paged_decode.KERNELS[0], [(1, n) for n in lens], layer, table, 16)
        bounded = replace(part, seq_lens=part.seq_lens // 2, exact=False)
        for made in (part.prepared, paged_decode.prepare(bounded, layer)):
            assert made.cut == replace(paged_decode.cut_of(layer, 1, "sm90"), rows=rows)
            assert made.row_blocks == layer.group // rows
            pairs = len(lens) * layer.num_kv_heads * made.row_blocks
            assert made.splits == 1 or made.parts.shape == (pairs, made.splits, rows, 128)


def test_a_decode_of_other_strides_or_scales_is_prepared_for_itself(monkeypatch: pytest.MonkeyPatch):
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    kv, made = KV(*torch.zeros(2, 4, 16, 2, 16, dtype=torch.float8_e4m3fn)), 0

    def prepare(q: Any, kv: KV, *rest: Any) -> paged_decode._Launch:
        nonlocal made
        made += 1
        return lambda *_: None, ref(kv.k), ref(kv.v), kv.k.data_ptr(), kv.v.data_ptr(), layer

    monkeypatch.setattr(paged_decode, "_launch", prepare)
    monkeypatch.setattr(paged_decode, "_launches", launch.Launches())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # else nothing is kept

    def new(q: torch.Tensor, out: torch.Tensor, kv: KV = kv, **scales: torch.Tensor) -> bool:
        """Whether a decode is prepared."""
        before, lens = made, [(1, 20)] * len(q)
        with launch.recorded(describe("sm90")):
            part = segment(paged_decode.KERNELS[0], lens, layer, torch.zeros(len(q), 2, dtype=torch.int32), 16)
        paged_decode.attend(q, kv, part, layer, LayerTensors(**scales), out, None)
        return made > before

    def rows(tokens: int, heads: int = 2) -> torch.Tensor:
        return torch.zeros(tokens, heads, 16, dtype=torch.float16)[:, :2]

    assert new(rows(3), rows(3)) and not new(rows(1), rows(1)) and not new(rows(8), rows(8))
    assert new(rows(3, 6), rows(3)) and new(rows(3, 4), rows(3)) and new(rows(3), rows(3, 6))
    assert not new(rows(5, 6), rows(5)) and not new(rows(5), rows(5, 6))
    one = torch.zeros(8, 99, dtype=torch.float16)[:, :32].view(8, 2, 16)
    assert not new(one[:1], rows(1, 6)) and new(one[:4], rows(4, 6))  # dense is the one row alone
    scale = torch.ones(2)
    assert not new(rows(3), rows(3), k_scale=scale[0]) and new(rows(3), rows(3), k_scale=scale)
    assert new(rows(3), rows(3), v_scale=scale) and new(rows(3), rows(3), v_scale=torch.ones(4)[::2])
    assert not new(rows(3), rows(3), v_scale=torch.zeros(2)) and new(rows(3), rows(3), KV(kv.k, kv.k))
    assert not new(rows(3), rows(3), v_scale=torch.ones(2, dtype=torch.bfloat16))  # read as float32
    kv.v.data = kv.v.clone()
    assert new(rows(3), rows(3))


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


def test_a_library_is_where_the_linker_would_find_it_and_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    linker, name = tmp_path / "ld.so.cache", "libnothing.so"
    known, other = tmp_path / f"{name}.1", tmp_path / "path" / name
    assert runtime.where(name, linker) is None
    linker.write_bytes(f"1.1\0{name}.2\0{tmp_path / name}.2\0{name}.1\0{known}\0".encode())
    assert runtime.where(name, linker) is None  # it is listed, and gone
    known.write_text("no library, which shows where it is loaded")
    assert runtime.where(name, linker) == str(known)
    other.parent.mkdir()
    other.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":/nowhere:{other.parent}")
    assert runtime.where(name, linker) == str(other)


def test_nvrtc_is_there_or_objects_are_or_the_reason_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (nvrtc,) = (package for package in PACKAGES if package.name == "nvrtc")
    monkeypatch.setattr(sources, "OBJECTS", tmp_path)
    library, loads = runtime.library, []

    def load(name: str) -> Any:
        loads.append(name)
        return library("libnothing.so")

    def found(file: str | None) -> Package:
        sources.nvrtc_here.cache_clear()
        monkeypatch.setattr(runtime, "where", lambda name: file if name == "libnvrtc.so" else None)
        monkeypatch.setattr(runtime, "library", load)
        here = inspect(nvrtc)
        sources.nvrtc_here.cache_clear()
        assert here is not None
        return here

    assert found("/opt/lib/libnvrtc.so.13.0") == Package("13.0") and found("libnvrtc.so").problem is None
    assert not loads
    absent = found(None)
    assert (
        absent.version is None
        and absent.problem is not None
        and "libnvrtc.so is neither beside torch" in absent.problem
    )
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "merge-1.co").touch()
    assert found(None).version is not None


def test_an_nvrtc_in_a_folder_of_the_loader_that_no_list_names_is_there(monkeypatch: pytest.MonkeyPatch):
    """As in a conda environment, whose folder is in the RPATH of its Python alone."""
    monkeypatch.setattr(runtime, "where", lambda name: None)
    monkeypatch.setattr(runtime, "library", lambda name: name)
    sources.nvrtc_here.cache_clear()
    here = sources.nvrtc_here()
    sources.nvrtc_here.cache_clear()
    assert here == Package("of no version")


def test_a_tensor_of_no_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PORTABLE_DEVICE", raising=False)
    function = launch.Function("merge", "merge2", "7P", "iiIiiIiii8I4Ii", ELEMENT="float")
    with pytest.raises(ValueError, match="no emulated device is active"):
        function.prepare([torch.zeros(1)] * 7, [0] * 22)


@pytest.mark.skipif(find_spec("nvidia") is None, reason="the package nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize("file", FILES)
def test_nvrtc_compiles_every_source(file: str):
    compiler = runtime.Compiler(runtime.NVIDIA)
    defines = {
        "cache": ("ROW=bf16", "STORED=e4m3fn"),
        "merge": ("ELEMENT=bf16",),
        "paged_decode": decode_defines(128, 8, arch="sm90"),
        "state_copy": ("UNIT=16",),
        "refresh": (),
    }[file]
    path, headers = sources.sources(file, "nvidia")
    object_ = compiler.compile(path.name, path.read_text(), headers, "sm_90", defines)
    assert object_.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"(?s)does not compile for sm_90: .*nothing"):
        compiler.compile("wrong.cu", "nothing", {}, "sm_90")


@pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is not installed")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_amd_code_is_within_its_means(arch: str, monkeypatch: pytest.MonkeyPatch):
    """Of every source, the widest of its variants: no spills, LDS within limits, loads of 16 bytes."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    from build_objects import faults, variants

    from portable.platform.emulated import clang, hip

    wanted = (
        ("cache", ("ROW=bf16", "STORED=bf16")),
        ("cache", ("ROW=float", "STORED=float")),
        ("merge", ("ELEMENT=bf16",)),
        ("merge", ("ELEMENT=float",)),
        ("state_copy", ("UNIT=16",)),
        ("refresh", ()),  # and advance
        ("paged_decode", decode_defines(256, 4, arch=arch)),
        ("paged_decode", decode_defines(128, 8, arch=arch)),
        ("paged_decode", decode_defines(256, 4, torch.float8_e4m3fnuz, arch)),
    )
    assert {*wanted} <= {*variants(arch)} and {file for file, _ in wanted} == set(FILES)
    for file, defines in wanted:  # by the cache of compiled sources: 125 s of a core where it has none
        text, _ = hip.compiled(sources.sources(file, "amd")[0], arch, [f"-D{each}" for each in defines])
        assert faults(file, defines, arch, text) == []
    assert clang.assemble(text, arch).startswith(b"\x7fELF")


def test_a_debug_build_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    layer = Layer.gqa(num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float16)
    kv, k = KV(*torch.zeros(2, 3, 4, 2, 8, dtype=torch.float16)), torch.zeros(1, 2, 8, dtype=torch.float16)
    kernel = next(kernel for kernel in cache.KERNELS if kernel.caps.op is Op.CACHE_GATHER)
    for value, checked in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("PORTABLE_DEBUG", value)
        with launch.recorded(describe("sm90")) as functions:
            cache.write(k, k, kv, torch.zeros(1, dtype=torch.int64), layer, LayerTensors())
            part = segment(kernel, [(1, 1)], layer, torch.zeros(1, 1, dtype=torch.int32), 4)
            cache.gather(kv, part, layer, LayerTensors(), KV(k.clone(), k.clone()))
        assert [each.name for each in functions if each.file == "cache"] == ["write", "gather"]
        assert all(("CHECKED=1" in each.defines) is checked for each in functions if each.file == "cache")


@pytest.mark.skipif(find_spec("nvidia") is None, reason="the package nvidia-cuda-nvrtc is not installed")
def test_nvrtc_compiles_a_debug_build():
    compiler, (path, headers) = runtime.Compiler(runtime.NVIDIA), sources.sources("cache", "nvidia")
    names = "ROW=bf16", "STORED=e4m3fn"
    made = [compiler.compile(path.name, path.read_text(), headers, "sm_90", names + m) for m in ((), ("CHECKED=1",))]
    assert made[0] != made[1]


@pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is not installed")
def test_only_a_debug_build_ends_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "ci")
    from build_objects import assembly, faults

    defines = "ROW=bf16", "STORED=bf16"
    for arch in ("gfx942", "gfx1201"):
        assert "s_trap" not in assembly("cache", defines, arch)
        text = assembly("cache", (*defines, "CHECKED=1"), arch)
        assert "s_trap" in text and faults("cache", defines, arch, text) == []
