"""What is measured: the shapes of every row, as data. Lengths are tokens; a page of None is contiguous K/V."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from portable import Layer
from portable.bench.workloads import FP8, Workload, decode, log_uniform, shrunk

__all__ = ["FP8", "SECTIONS", "Workload", "decode", "log_uniform", "shrunk"]
PAGES = (16, 64)


def decode_32_8() -> Iterator[Workload]:
    """D1: every grid point with a KV of 128 MiB and more, and the two small ones."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    for page in PAGES:
        yield from grid("D1", layer, page, ((1, 1), (1, 8), (1, 32), (8, 8), (8, 32), (64, 1), (64, 8), (64, 32)))
        yield from grid("D1", layer, page, ((256, 1), (256, 8), (256, 32)))


def decode_64_8() -> Iterator[Workload]:
    """D2 with d=128 and D3 with d=64."""
    yield from grid(
        "D2", Layer.gqa(num_heads=64, num_kv_heads=8, head_dim=128), 16, ((1, 32), (64, 1), (64, 8), (64, 32))
    )
    points = ((8, 8), (64, 1), (64, 8), (256, 1), (256, 8))
    yield from grid("D3", Layer.gqa(num_heads=64, num_kv_heads=8, head_dim=64), 16, points)


def grid(tag: str, layer: Layer, page: int, points: tuple[tuple[int, int], ...]) -> Iterator[Workload]:
    for size, thousands in points:
        yield decode(f"{tag} {size}x{thousands}k", layer, [1024 * thousands] * size, page)


def ragged() -> Iterator[Workload]:
    """Log-uniform lengths, in the order drawn, beside as many tokens spread evenly."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    for page in PAGES:
        for count, least, most, seed in ((64, 128, 32768, 20), (256, 16, 8192, 21)):
            lens = log_uniform(count, least, most, seed)
            each, more = divmod(sum(lens), count)
            yield decode(f"ragged {count}", layer, lens, page)
            yield decode(f"equal {count}", layer, [each + 1] * more + [each] * (count - more), page)


def verify() -> Iterator[Workload]:
    """1, 4 and 8 new tokens on 64 requests of 8k, new ones included."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    for page in PAGES:
        for new in (1, 4, 8):
            yield decode(f"verify {new}", layer, [8192] * 64, page, new)


def prefill() -> Iterator[Workload]:
    """P1: causal prefill over contiguous K/V."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    draw = random.Random(7)
    mixed = [128, 4096, *(draw.randrange(128, 4097) for _ in range(14))]
    for name, lens in (("P1a 1x8192", [8192]), ("P1b 8x2048", [2048] * 8), ("P1c mixed 16", mixed)):
        yield Workload(name=name, layer=layer, query_lens=tuple(lens), seq_lens=tuple(lens), page_size=None)


def extend() -> Iterator[Workload]:
    """P2: 4 x 512 new tokens on 8,192 each. D5: 60 decodes at 4k and 4 prefills of 512, in one call."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    for page in PAGES:
        yield decode("P2 4x512 on 8k", layer, [8192 + 512] * 4, page, 512)
        yield Workload(
            name=f"D5 60 decodes, 4 prefills page {page}",
            layer=layer,
            query_lens=(1,) * 60 + (512,) * 4,
            seq_lens=(4096,) * 60 + (512,) * 4,
            page_size=page,
        )


def fp8() -> Iterator[Workload]:
    """A cache of e4m3fn under bf16 queries, beside a bf16 cache."""
    layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
    for page in PAGES:
        yield decode("bf16 64x8k", layer, [8192] * 64, page)
        yield decode("fp8 64x8k", replace(layer, kv_dtype=FP8), [8192] * 64, page)


def sinks() -> Iterator[Workload]:
    """gpt-oss: sinks and a window of 128 tokens."""
    layer = Layer.gqa(num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True)
    for page in PAGES:
        yield decode("sinks, window 128", layer, [8192] * 64, page)


SECTIONS = {
    "d1": decode_32_8,
    "d23": decode_64_8,
    "ragged": ragged,
    "verify": verify,
    "prefill": prefill,
    "extend": extend,
    "fp8": fp8,
    "sinks": sinks,
}
