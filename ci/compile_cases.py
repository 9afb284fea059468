"""Representative layers and steps for each Triton kernel, and how their launches are recorded and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import compile_states
import numpy as np
import torch

from portable.backends.triton import (
    cache,
    copy,
    gather,
    merge,
    mla_decode,
    mla_decode_hopper,
    paged,
    prefill,
    prefill_hopper,
    tables,
)
from portable.backends.triton.launch import Call, recorded
from portable.cache import cache_shapes
from portable.conformance.inputs import gathered
from portable.kernel import KV, Kernel, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.platform.detect import describe
from portable.platform.target import Target

UNITS = {"gfx90a": 104, "gfx942": 304, "gfx950": 256}  # of an MI250X's die, an MI300X and an MI350X
BEYOND = (2 << 30) + 1  # bytes of a cache: past what 32-bit offsets reach


@dataclass(frozen=True)
class Case:
    """A call of a kernel, which only launches."""

    run: Callable[[Target], None]
    archs: tuple[str, ...] | None = None  # None: all


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel(module: Any, op: Op, name: str | None = None) -> Kernel:
    kernels: tuple[Kernel, ...] = module.KERNELS
    return next(each for each in kernels if each.caps.op is op and name in (None, each.name))


def segment(which: Kernel, layer: Layer, query_lens: list[int], seq_lens: list[int], page_size: int | None) -> Segment:
    """Its small tensors are on the CPU, whose values planning may read; a GPU's are at multiples of 16 as well."""
    queries, keys = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    width = 0 if page_size is None else -(-int(keys.max()) // page_size)
    made = Segment(
        kernel=which,
        requests=slice(0, len(queries)),
        tokens=slice(0, int(queries.sum())),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
        seq_lens=torch.tensor(keys),
        block_table=None if page_size is None else torch.zeros((len(queries), width), dtype=torch.int32),
        page_size=page_size or 1,
        causal=True,
        max_query_len=int(queries.max()),
        max_seq_len=int(keys.max()),
        host_query_lens=queries,
        host_seq_lens=keys,
    )
    return made if which.prepare is None else replace(made, prepared=which.prepare(made, layer))


def tensors_of(layer: Layer) -> LayerTensors:
    one = meta(1, dtype=torch.float32) if layer.kv_dtype != layer.dtype else None
    heads = meta(layer.num_heads, dtype=torch.float32)
    return LayerTensors(heads if layer.sinks else None, heads if layer.alibi else None, one, one)


def pages_of(layer: Layer, page_size: int) -> KV:
    row = page_size * layer.num_kv_heads * layer.qk_head_dim * layer.kv_dtype.itemsize
    k, v = cache_shapes(layer, BEYOND // row + 1, page_size)
    return KV(meta(*k, dtype=layer.kv_dtype), None if v is None else meta(*v, dtype=layer.kv_dtype))


def attention(
    which: Callable[[], Kernel],
    queries: int,
    keys: int,
    page_size: int | None,
    lse: bool = False,
    requests: int = 8,
    archs: tuple[str, ...] | None = None,
    **layer: Any,
) -> Case:
    """`which` is called late: a kernel's file may define it for some machines only."""

    def run(target: Target) -> None:
        fp8 = {"e4m3fnuz": torch.float8_e4m3fnuz}.get(target.fp8 or "", torch.float8_e4m3fn)
        kv_dtype = fp8 if layer.get("kv_dtype") == "fp8" else None
        made = Layer.gqa(**{**layer, "kv_dtype": kv_dtype})
        step = segment(which(), made, [queries] * requests, [keys] * requests, page_size)
        tokens = requests * queries
        if page_size is None:
            kv = KV(
                meta(requests * keys, made.num_kv_heads, made.qk_head_dim, dtype=made.dtype),
                meta(requests * keys, made.num_kv_heads, made.v_head_dim, dtype=made.dtype),
            )
        else:
            kv = pages_of(made, page_size)
        out = meta(tokens, made.num_heads, made.v_head_dim, dtype=made.dtype)
        logs = meta(made.num_heads, tokens, dtype=torch.float32) if lse else None
        q = meta(tokens, made.num_heads, made.qk_head_dim, dtype=made.dtype)
        which().run(q, kv, step, made, tensors_of(made), out, logs)

    return Case(run, archs)


def latent(module: Any, queries: int, page_size: int, archs: tuple[str, ...] | None = None, **layer: Any) -> Case:
    """MLA decode of 8 requests at 8,192 keys."""

    def run(target: Target) -> None:
        fp8 = {"e4m3fnuz": torch.float8_e4m3fnuz}.get(target.fp8 or "", torch.float8_e4m3fn)
        made = Layer.mla(**{**layer, "kv_dtype": fp8 if layer.get("kv_dtype") == "fp8" else None})
        which, tokens = kernel(module, Op.MLA_DECODE), 8 * queries
        step = segment(which, made, [queries] * 8, [8192] * 8, page_size)
        q = meta(tokens, made.num_heads, made.latent_dim, dtype=made.dtype)
        out = meta(tokens, made.num_heads, made.kv_lora_rank, dtype=made.dtype)
        logs = meta(made.num_heads, tokens, dtype=torch.float32)
        which.run(q, pages_of(made, page_size), step, made, tensors_of(made), out, logs)

    return Case(run, archs)


def merging(parts: int, tokens: int, heads: int, width: int) -> Case:
    def run(target: Target) -> None:
        outs = [meta(tokens, heads, width) for _ in range(parts)]
        lses = [meta(heads, tokens, dtype=torch.float32) for _ in range(parts)]
        merge.merge(outs, lses, None, meta(tokens, heads, width), meta(heads, tokens, dtype=torch.float32))

    return Case(run)


def caching(layer: Layer) -> Case:
    def run(target: Target) -> None:
        pages, tokens = pages_of(layer, 16), 512
        mla = layer.family == "mla"
        k = meta(tokens, layer.kv_lora_rank) if mla else meta(tokens, layer.num_kv_heads, layer.qk_head_dim)
        v = meta(tokens, layer.qk_rope_head_dim) if mla else meta(tokens, layer.num_kv_heads, layer.v_head_dim)
        slots = meta(tokens, dtype=torch.int64)
        kernel(cache, Op.CACHE_WRITE).run(k, v, pages, slots, layer, tensors_of(layer))
        gathers = kernel(gather, Op.CACHE_GATHER)
        gathered(segment(gathers, layer, [1] * 8, [1000] * 8, 16), layer, tensors_of(layer), pages)
        kernel(copy, Op.CACHE_COPY).run(pages, pages, meta(64, 2, dtype=torch.int64), layer)

    return Case(run)


def listing() -> Case:
    def run(target: Target) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        tables.slot_mapping(integers(8, 64), integers(100), integers(100).long(), 16)
        tables.page_table_from_tokens(integers(16, 4096), integers(8), integers(8), 16, 64)
        tables.page_csr(integers(8, 64), integers(8), 16, 512)

    return Case(run)


def paged_kernel() -> Kernel:
    return kernel(paged, Op.PAGED)


def prefill_kernel() -> Kernel:
    return kernel(prefill, Op.PREFILL)


def chunk_kernel() -> Kernel:
    return kernel(prefill, Op.PAGED)


def hopper_kernel() -> Kernel:
    return kernel(prefill_hopper, Op.PREFILL)


def hopper_chunk_kernel() -> Kernel:
    return kernel(prefill_hopper, Op.PAGED)


HOPPER = ("sm90",) if prefill_hopper.KERNELS else ()  # a Triton without Gluon has none
RDNA = ("gfx1100", "gfx1201")

FEW = ("sm80", "sm90", "sm100")
RARE = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm90")  # for layers that few models have
D128: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
D64: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "sinks": True}
D192: dict[str, Any] = {"num_heads": 16, "head_dim": 192, "v_head_dim": 128}
D256: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "softcap": 50.0}
WIDE: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 192}
EVERY: dict[str, Any] = {"alibi": True, "softcap": 30.0, "sinks": True, "window": 128}
CASES: dict[str, Case] = {
    "decode d128": attention(paged_kernel, 1, 8192, 16, **D128),
    "decode d128 fp8": attention(paged_kernel, 1, 8192, 64, **D128, kv_dtype="fp8"),
    "decode d64 window sinks": attention(paged_kernel, 1, 8192, 16, **D64, window=128),
    "decode d256 softcap": attention(paged_kernel, 1, 8192, 16, **D256),
    "verify 8 d128": attention(paged_kernel, 8, 8192, 16, **D128, lse=True),
    "verify 8 d256 8 heads a KV head": attention(paged_kernel, 8, 8192, 16, num_heads=32, num_kv_heads=4, head_dim=256),
    "decode d64": attention(paged_kernel, 1, 8192, 16, **(D64 | {"sinks": False})),
    "decode d80": attention(paged_kernel, 1, 8192, 16, num_heads=32, num_kv_heads=8, head_dim=80),
    # rows that 8 divides and 16 does not; pages that are no power of two
    "decode d72": attention(paged_kernel, 1, 8192, 7, archs=RARE, num_heads=16, num_kv_heads=4, head_dim=72),
    "decode d120": attention(paged_kernel, 1, 8192, 16, archs=RARE, num_heads=16, num_kv_heads=4, head_dim=120),
    # few requests have another tile than many
    "decode d128 1 request": attention(paged_kernel, 1, 8192, 16, requests=1, archs=FEW, **D128),
    "decode d64 1 request": attention(paged_kernel, 1, 8192, 16, requests=1, archs=FEW, **(D64 | {"sinks": False})),
    "verify 8 d128 1 request": attention(paged_kernel, 8, 8192, 16, requests=1, archs=FEW, **D128),
    "prefill d128": attention(prefill_kernel, 4096, 4096, None, **D128, lse=True),
    "prefill d128 float16": attention(prefill_kernel, 4096, 4096, None, **D128, dtype=torch.float16),
    "prefill d64 window sinks": attention(prefill_kernel, 4096, 4096, None, **D64, window=128),
    "prefill 192/128": attention(prefill_kernel, 4096, 4096, None, **D192),
    "prefill 192/128 float32": attention(prefill_kernel, 4096, 4096, None, **D192, dtype=torch.float32),
    "prefill d256 softcap": attention(prefill_kernel, 4096, 4096, None, **D256),
    "prefill d120": attention(prefill_kernel, 4096, 4096, None, archs=RARE, num_heads=16, num_kv_heads=4, head_dim=120),
    "prefill d192": attention(prefill_kernel, 4096, 4096, None, archs=RARE, **WIDE),
    "prefill d192 every feature": attention(prefill_kernel, 4096, 4096, None, archs=RARE, **WIDE, **EVERY, lse=True),
    "prefill 192/128 every feature": attention(prefill_kernel, 4096, 4096, None, archs=RARE, **D192, **EVERY, lse=True),
    "chunk d256 every feature": attention(chunk_kernel, 2048, 8192, 16, archs=RARE, **(D256 | EVERY)),
    "chunk d192 fp8 alibi": attention(chunk_kernel, 2048, 8192, 16, archs=RARE, **WIDE, alibi=True, kv_dtype="fp8"),
    "chunk d80 fp8": attention(
        chunk_kernel, 2048, 8192, 64, archs=RARE, num_heads=16, num_kv_heads=4, head_dim=80, kv_dtype="fp8"
    ),
    "chunk d128": attention(chunk_kernel, 2048, 8192, 16, **D128),
    "chunk d128 fp8": attention(chunk_kernel, 2048, 8192, 64, **D128, kv_dtype="fp8"),
    "hopper prefill d128": attention(hopper_kernel, 4096, 4096, None, archs=HOPPER, **D128, lse=True),
    "hopper prefill d64 window sinks": attention(hopper_kernel, 4096, 4096, None, archs=HOPPER, **D64, window=128),
    "hopper prefill 192/128": attention(hopper_kernel, 4096, 4096, None, archs=HOPPER, **D192),
    "hopper chunk d128": attention(hopper_chunk_kernel, 2048, 8192, 16, archs=HOPPER, **D128),
    "mla decode 16 heads": latent(mla_decode, 1, 64, num_heads=16),
    "mla decode 16 heads page 1": latent(mla_decode, 1, 1, num_heads=16),
    "mla decode 16 heads fp8": latent(mla_decode, 1, 64, num_heads=16, kv_dtype="fp8"),
    "mla decode 128 heads": latent(mla_decode, 1, 64, num_heads=128),
    "mla decode 16 heads float32": latent(mla_decode, 1, 64, num_heads=16, dtype=torch.float32),
    "mla decode rank 32 float32": latent(mla_decode, 1, 64, RDNA, num_heads=16, kv_lora_rank=32, dtype=torch.float32),
    "mla decode rank 32 fp8 page 1": latent(mla_decode, 1, 1, RDNA, num_heads=16, kv_lora_rank=32, kv_dtype="fp8"),
    "mla verify 4 16 heads": latent(mla_decode, 4, 16, num_heads=16),
    "hopper mla decode 16 heads": latent(mla_decode_hopper, 1, 64, HOPPER, num_heads=16),
    "hopper mla verify 4 128 heads": latent(mla_decode_hopper, 4, 16, HOPPER, num_heads=128),
    "merge 2 d128": merging(2, 8192, 32, 128),
    "cache d128": caching(Layer.gqa(**D128)),
    "cache d128 fp8": caching(Layer.gqa(**D128, kv_dtype=torch.float8_e4m3fn)),
    "cache mla": caching(Layer.mla(num_heads=16)),
    "tables": listing(),
    **{name: Case(run) for name, run in compile_states.CALLS.items()},
}


def compiled(case: Case, arch: str) -> Iterator[tuple[str, Any]]:
    """(name, what Triton compiled) of every different kernel that the case launches on an arch."""
    target = describe(arch)
    target = replace(target, compute_units=target.compute_units or UNITS.get(arch, 64))
    with recorded(target) as calls:
        case.run(target)
    seen = set()
    with active(target):
        for call in calls:
            made = build(call)
            if made.hash not in seen:
                seen.add(made.hash)
                yield call.kernel.kernel.__name__, made


def build(call: Call) -> Any:
    options = {"enable_fp_fusion": True, **call.kernel.options}
    return call.kernel.kernel.warmup(*call.arguments, grid=call.grid, **options)


class active:
    """Makes a device that is not here Triton's active one, for compiling."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.driver import DriverBase

        amd = target.vendor == "amd"
        for_ = GPUTarget("hip", target.arch, target.wave_size) if amd else GPUTarget("cuda", int(target.arch[2:]), 32)

        class Driver(DriverBase):  # type: ignore[misc]
            def __init__(self) -> None:
                self.utils = None

            is_active = classmethod(lambda cls: False)

            def get_current_target(self) -> Any:
                return for_

            def get_current_device(self) -> str:
                return target.arch  # kernels are kept by it

            def get_current_stream(self, device: Any = None) -> int:
                return 0

            def get_active_torch_device(self) -> torch.device:
                return torch.device("cpu")

            def get_device_interface(self) -> Any:
                return torch.cpu

            def map_python_to_cpp_type(self, kind: str) -> str:
                return kind

            def get_benchmarker(self) -> Any:
                raise NotImplementedError("nothing runs here")

        self.driver = Driver()

    def __enter__(self) -> None:
        from triton.runtime import driver

        self.before = driver._active
        driver.set_active(self.driver)

    def __exit__(self, *_: object) -> None:
        from triton.runtime import driver

        driver.set_active(self.before)
