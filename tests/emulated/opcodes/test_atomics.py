"""Atomics against a loop over lanes, with edge values, one address for several lanes, and returned values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulated_one import run_one

import portable.platform.emulated.buffer
import portable.platform.emulated.global_
import portable.platform.emulated.lds  # noqa: F401
from portable.platform.emulated.atomics import LDS, MEMORY, apply
from portable.platform.emulated.memory import Memory, MemoryFault
from portable.platform.emulated.spans import Span

LANE = np.arange(64, dtype=np.uint32)
SEVERAL = LANE % 5 * 8  # 5 cells of 8 bytes, 12 or 13 lanes each
Words = np.ndarray[Any, np.dtype[np.uint32]]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def halves(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], kind: torch.dtype) -> Callable[..., int]:
    def both(old: int, new: int) -> int:
        left, right = (torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16) for x in (old, new))
        total = function(left.view(kind), right.view(kind)).view(torch.int16).to(torch.int32)
        return int(total[0]) & 0xFFFF | (int(total[1]) & 0xFFFF) << 16

    return both


def floating(function: Callable[[Any, Any], Any], kind: type[np.floating[Any]]) -> Callable[..., int]:
    unsigned = f"u{np.dtype(kind).itemsize}"

    def apply(old: int, new: int) -> int:
        left, right = (np.array(x, unsigned).view(kind) for x in (old, new))
        with np.errstate(all="ignore"):
            return int(np.asarray(function(left, right), kind).view(unsigned))

    return apply


def smaller(left: Any, right: Any) -> Any:
    return right if np.isnan(left) or right < left else left


def larger(left: Any, right: Any) -> Any:
    return right if np.isnan(left) or right > left else left


def integer(name: str, bits: int) -> Callable[..., int]:
    """The ISA manual's operation on Python integers."""
    top = (1 << bits) - 1
    table: dict[str, Callable[..., int]] = {
        "add": lambda old, new: (old + new) & top,
        "sub": lambda old, new: (old - new) & top,
        "rsub": lambda old, new: (new - old) & top,
        "umin": lambda old, new: min(old, new),
        "umax": lambda old, new: max(old, new),
        "smin": lambda old, new: min(old, new, key=lambda x: signed(x, bits)),
        "smax": lambda old, new: max(old, new, key=lambda x: signed(x, bits)),
        "and": lambda old, new: old & new,
        "or": lambda old, new: old | new,
        "xor": lambda old, new: old ^ new,
        "inc": lambda old, new: 0 if old >= new else old + 1,
        "dec": lambda old, new: new if old == 0 or old > new else old - 1,
        "swap": lambda old, new: new,
        "wrxchg": lambda old, new: new,
        "cmpswap": lambda old, new, expected: new if old == expected else old,
        "cmpst": lambda old, expected, new: new if old == expected else old,
        "mskor": lambda old, mask, new: old & ~mask | new,
    }
    return table[name]


FLOATS: dict[str, Callable[..., int]] = {
    "add_f32": floating(np.add, np.float32),
    "min_f32": floating(smaller, np.float32),
    "max_f32": floating(larger, np.float32),
    "add_f64": floating(np.add, np.float64),
    "min_f64": floating(smaller, np.float64),
    "max_f64": floating(larger, np.float64),
    "pk_add_f16": halves(torch.add, torch.float16),
    "pk_add_bf16": halves(torch.add, torch.bfloat16),
}


def edges(name: str, bits: int, count: int) -> Words | np.ndarray[Any, Any]:
    """`count` values of the operation's type, extreme ones among them."""
    rng = np.random.default_rng(len(name) + bits)
    if name in FLOATS:
        kind = np.dtype({"16": np.float16, "32": np.float32, "64": np.float64}[name[-2:]])
        some = [0.0, -0.0, 1.5, -2.25, np.inf, -3e-8, 65504.0, 1e-40]
        if name == "pk_add_bf16":
            return rng.choice(np.array([0x3F803F81, 0x80000001, 0x7F7F3EAA, 0xBFC04000], np.uint32), count)
        with np.errstate(all="ignore"):
            values = rng.choice(np.array(some), count * (2 if kind.itemsize == 2 else 1)).astype(kind)
        return values.view(f"u{bits // 8}")
    top = (1 << bits) - 1
    return rng.choice(np.array([0, 1, 2, 5, top, top - 1, top >> 1, (top >> 1) + 1], f"u{bits // 8}"), count)


def in_order(
    cells: dict[int, int], where: Words, sources: list[Any], apply: Callable[..., int], lanes: list[int]
) -> list[int]:
    """Lane after lane; the values before."""
    old = []
    for lane in lanes:
        at = int(where[lane])
        old.append(cells[at])
        cells[at] = apply(cells[at], *(int(source[lane]) for source in sources))
    return old


def check(text: str, name: str, bits: int, count: int, form: str, apply: Callable[..., int], back: bool) -> None:
    kind = f"u{bits // 8}"
    cells = np.zeros(8, np.uint64).view(np.uint32) if bits == 32 else np.zeros(8, np.uint64)
    step = 8 // (bits // 8)
    cells[:] = edges(name, bits, len(cells))
    start = {8 * k: int(cells[k * step]) for k in range(8)}
    sources = [edges(name + "x" * k, bits, 128).reshape(2, 64) for k in range(count)]
    mem = Memory(1, 64, 2, 0)
    where = np.stack([SEVERAL, SEVERAL[::-1]])
    v: dict[int, Any] = {2: where}
    for k, source in enumerate(sources):
        v[10 + k * bits // 32] = np.ascontiguousarray(source)
    s: dict[int | str, int] = {}
    if form == "lds":
        mem.lds._span.units[1][:] = cells.view(np.uint8)
        mem.lds._written.units[1][:] = 0xFF
    else:
        address = mem.add(cells.view(np.uint8), "cells")
        s = {"s[4:5]": address, 6: 64, 7: 0}
        if form == "flat":
            v[2] = where + np.uint64(address)
    got = run_one(text, v, s, exec_mask=[(1 << 64) // 3, (1 << 64) - 1], waves=2, memory=mem)
    flat_where = where.reshape(-1)
    lanes = [*range(0, 64, 2), *range(64, 128)]
    old = in_order(start, flat_where, [source.reshape(-1) for source in sources], apply, lanes)
    after = mem.lds._span.units[1].view(kind) if form == "lds" else cells.view(kind)
    assert [int(after[k * step]) for k in range(8)] == list(start.values())
    if back:
        to = 10 if form == "buffer" else 20
        low = got.v[to].reshape(-1)[lanes].astype(np.uint64)
        high = got.v[to + 1].reshape(-1)[lanes].astype(np.uint64) if bits == 64 else np.uint64(0)
        assert (low | high << np.uint64(32)).tolist() == old
        if to == 20:
            assert not got.v[20, 0, 1::2].any()
    elif form != "buffer":
        assert not got.v[20].any()


def pair(start: int, words: int) -> str:
    return f"v{start}" if words == 1 else f"v[{start}:{start + words - 1}]"


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("form", ["global", "flat", "buffer"])
@pytest.mark.parametrize("name", MEMORY)
def test_atomics_on_global_memory(name: str, form: str, back: bool) -> None:
    operation = MEMORY[name]
    bits = 8 * operation.dtype.itemsize
    apply = FLOATS[name] if name in FLOATS else integer(name.removesuffix("_x2"), bits)
    words = bits // 32
    data, to, hint = pair(10, words * operation.sources), pair(20, words) + ", " if back else "", " sc0" if back else ""
    text = {
        "global": f"global_atomic_{name} {to}v2, {data}, s[4:5]{hint}",
        "flat": f"flat_atomic_{name} {to}v[2:3], {data}{hint}",
        "buffer": f"buffer_atomic_{name} {data}, v2, s[4:7], 0 offen{hint}",
    }[form]
    check(text, name, bits, operation.sources, form, apply, back)


@pytest.mark.parametrize("key", LDS, ids="_".join)
@pytest.mark.parametrize("back", [False, True])
def test_atomics_on_lds(key: tuple[str, str], back: bool) -> None:
    (name, kind), operation = key, LDS[key]
    if name == "wrxchg" and not back:
        return
    bits = 8 * operation.dtype.itemsize
    signs = {"u": "u", "i": "s"}
    plain = signs[kind[0]] + name if name in ("min", "max") and kind[0] in signs else name
    apply = FLOATS[f"{name}_{kind}"] if f"{name}_{kind}" in FLOATS else integer(plain, bits)
    words = bits // 32
    sources = ", ".join(pair(10 + k * words, words) for k in range(operation.sources))
    to = pair(20, words) + ", " if back else ""
    text = f"ds_{name}{'_rtn' if back else ''}_{kind} {to}v2, {sources}"
    check(text, f"{name}_{kind}", bits, operation.sources, "lds", apply, back)


def test_a_destination_may_be_the_address_or_the_data() -> None:
    mem = Memory(1, 64, 1, 0)
    cells = np.zeros(64, np.uint8)
    s = {"s[4:5]": mem.add(cells, "cells")}
    got = run_one("global_atomic_add v10, v2, v10, s[4:5] sc0", {2: np.zeros(64, np.uint32), 10: LANE}, s, memory=mem)
    assert got.v[10, 0].tolist() == np.cumsum([0, *range(63)]).tolist()
    assert cells.view(np.uint32)[0] == 63 * 32


def test_atomics_beyond_a_buffer_do_nothing_and_return_0() -> None:
    mem = Memory(1, 0, 1, 0)
    cells = np.full(64, 1, np.uint8)
    s = {"s[4:5]": mem.add(cells, "cells"), 6: 12, 7: 0}
    v = {2: LANE % 16 * 4, 10: np.full(64, 1, np.uint32)}
    got = run_one("buffer_atomic_add v10, v2, s[4:7], 0 offen sc0", v, s, memory=mem)
    assert cells.view(np.uint32).tolist() == [0x01010105] * 3 + [0x01010101] * 13
    assert got.v[10, 0, :5].tolist() == [0x01010101] * 3 + [0, 0]


def test_misaligned_and_uninitialised_atomics_are_reported() -> None:
    mem = Memory(1, 64, 1, 0)
    s = {"s[4:5]": mem.add(np.zeros(64, np.uint8), "cells", initialised=False)}
    with pytest.raises(MemoryFault, match="misaligned atomic of 4 bytes"):
        run_one("global_atomic_add v2, v3, s[4:5]", {2: np.full(64, 2)}, s, memory=mem)
    with pytest.raises(MemoryFault, match="uninitialised bytes of 'cells'"):
        run_one("global_atomic_add v2, v3, s[4:5]", s=s, memory=mem)
    with pytest.raises(MemoryFault, match="misaligned LDS atomic of 8 bytes at 4"):
        run_one("ds_add_u64 v2, v[3:4]", {2: np.full(64, 4)}, memory=mem)
    with pytest.raises(MemoryFault, match="uninitialised bytes of LDS"):
        run_one("ds_add_u32 v2, v3", memory=mem)


def test_the_operands_must_match_the_returned_value() -> None:
    for text in ("global_atomic_add v2, v3, off sc0", "ds_add_rtn_u32 v1, v2", "ds_cmpst_b32 v1, v2"):
        with pytest.raises(NotImplementedError, match="operands"):
            run_one(text, memory=Memory(1, 64, 1, 0))


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_least_and_greatest_floats_compare_as_the_manual_says(name, kind):
    """CDNA4's pseudo-code: src < tmp ? src : tmp, and >; so a NaN in memory stays, and a zero of the other sign too."""
    dtype = np.dtype({"f32": "f4", "f64": "f8"}[kind])
    old = np.array([np.nan, 1.0, 0.0, -0.0, 2.0, -np.inf], dtype)
    new = np.array([1.0, np.nan, -0.0, 0.0, 3.0, np.inf], dtype)
    cell = Span(old.view(np.uint8).copy())
    apply(cell, np.arange(6) * dtype.itemsize, LDS[name, kind], [new])
    expected = [np.nan, 1.0, 0.0, -0.0, *([2.0, -np.inf] if name == "min" else [3.0, np.inf])]
    got = cell.units[1].view(dtype)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[2:4]), [False, True])
