"""LDS instructions against plain numpy indexing, uninitialised reads, and races between waves."""

from typing import Any

import numpy as np
import pytest
from emulated_one import run_one

import portable.platform.emulated.lds  # noqa: F401
from portable.platform.emulated.isa import instruction
from portable.platform.emulated.memory import Memory, MemoryFault
from portable.platform.emulated.transfer import LDS_LOADS, LDS_STORES
from portable.platform.emulated.waves import HANDLERS, Array, Group, Waves

LANE = np.arange(64, dtype=np.uint32)
OLD = 0xDEADBEEF
ALL = (1 << 64) - 1


def filled(lds: int, waves: int = 1) -> tuple[Memory, Array]:
    """A memory whose LDS holds random bytes, and a copy of them."""
    mem = Memory(1, lds, waves, 0)
    raw = mem.lds._span.units[1]
    raw[:] = np.random.default_rng(lds).integers(0, 256, raw.size, np.uint8)
    mem.lds._written.units[1][:] = 0xFF
    return mem, raw.copy()


def registers(name: str, words: int) -> str:
    return name if words == 1 else f"v[{name[1:]}:{int(name[1:]) + words - 1}]"


@pytest.mark.parametrize("name", LDS_LOADS)
@pytest.mark.parametrize("step", [16, 18, 19])
def test_reads_of_every_width_and_alignment(name: str, step: int) -> None:
    size, signed, half = LDS_LOADS[name]
    mem, raw = filled(2048)
    words = max(1, size // 4)
    state = {0: LANE * step} | {4 + k: np.full(64, OLD) for k in range(words)}
    got = run_one(f"ds_read_{name} {registers('v4', words)}, v0 offset:5", state, exec_mask=ALL // 3, memory=mem)
    for lane in range(64):
        part = raw[lane * step + 5 :][:size].tobytes()
        want = [int.from_bytes(part[k : k + 4], "little", signed=signed) & 0xFFFFFFFF for k in range(0, size, 4)]
        if half == "low":
            want = [(OLD & 0xFFFF0000) | (want[0] & 0xFFFF)]
        elif half == "high":
            want = [(OLD & 0xFFFF) | (want[0] & 0xFFFF) << 16]
        assert got.v[4 : 4 + words, 0, lane].tolist() == (want if lane % 2 == 0 else [OLD] * words)


@pytest.mark.parametrize("name", LDS_STORES)
@pytest.mark.parametrize("step", [16, 18, 19])
def test_writes_of_every_width_and_alignment(name: str, step: int) -> None:
    size, shift = LDS_STORES[name]
    mem, want = filled(2048)
    words = max(1, size // 4)
    values = np.random.default_rng(1).integers(0, 1 << 32, (words, 64), np.uint32)
    state = {0: LANE * step} | {4 + k: values[k] for k in range(words)}
    run_one(f"ds_write_{name} v0, {registers('v4', words)} offset:5", state, exec_mask=ALL // 3, memory=mem)
    for lane in range(0, 64, 2):
        part = (values[:, lane] >> np.uint32(shift)).tobytes()[:size]
        want[lane * step + 5 :][:size] = np.frombuffer(part, np.uint8)
    np.testing.assert_array_equal(mem.lds._span.units[1], want)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("stride", ["", "st64"])
def test_pairs_of_reads_and_writes(bits: int, stride: str) -> None:
    mem, raw = filled(8192)
    words, unit = bits // 32, (bits // 8) * (64 if stride else 1)
    got = run_one(
        f"ds_read2{stride}_b{bits} {registers('v4', 2 * words)}, v0 offset0:1 offset1:3", {0: LANE * 16}, memory=mem
    )
    for k, offset in enumerate((1, 3)):
        for word in range(words):
            at = LANE * 16 + offset * unit + 4 * word
            np.testing.assert_array_equal(got.v[4 + k * words + word, 0], raw.view(np.uint32)[at // 4])
    values = {4 + k: LANE * 7 + k for k in range(2 * words)}
    first, second = registers("v4", words), registers(f"v{4 + words}", words)
    run_one(f"ds_write2{stride}_b{bits} v0, {first}, {second} offset1:2", {0: LANE * 4 * words} | values, memory=mem)
    want = raw.copy().view(np.uint32)
    for k, second_at in enumerate((0, 2)):
        for lane in range(64):
            first_word = (lane * 4 * words + second_at * unit) // 4
            want[first_word : first_word + words] = [values[4 + k * words + word][lane] for word in range(words)]
    np.testing.assert_array_equal(mem.lds._span.units[4], want)


@pytest.mark.parametrize(("name", "bits"), [("b64_tr_b16", 16), ("b64_tr_b8", 8), ("b96_tr_b6", 6), ("b64_tr_b4", 4)])
def test_transposed_reads(name: str, bits: int) -> None:
    """Lane t of 16 gets column t of the matrix of 16 columns that the 16 lanes' 8 bytes form, row after row; 12 bytes
    of 6 bits. Modular's documentation says so of 16 bits (a 4 x 16 tile a row of lanes), the CDNA4 manual of none."""
    size = 12 if bits == 6 else 8
    mem, raw = filled(64 * size + 8)
    order = np.random.default_rng(0).permutation(64).astype(np.uint32)
    text = f"ds_read_{name} v[4:{3 + size // 4}], v0"
    got = run_one(f"{text} offset:8", {0: order * size}, exec_mask=0xFFFF0000FFFF, memory=mem)
    for block in (0, 2):
        rows = b"".join(raw[int(order[16 * block + lane]) * size + 8 :][:size].tobytes() for lane in range(16))
        stream = int.from_bytes(rows, "little")
        for lane in range(16):
            column = [stream >> (bits * (row * 16 + lane)) & ((1 << bits) - 1) for row in range(8 * size // bits)]
            want = sum(element << (bits * row) for row, element in enumerate(column))
            value = sum(int(got.v[4 + k, 0, 16 * block + lane]) << 32 * k for k in range(size // 4))
            assert value == want
    assert not got.v[4:6, 0, 16:32].any()
    with pytest.raises(NotImplementedError, match="lanes of 16 inactive"):
        run_one(text, {0: LANE * size}, exec_mask=0x7FFF, memory=mem)


def test_addresses_wrap_in_32_bits() -> None:
    mem, raw = filled(64)
    got = run_one("ds_read_b32 v1, v0 offset:16", {0: np.full(64, -8, np.int32)}, memory=mem)
    assert got.v[1, 0, 0] == raw.view(np.uint32)[2]


def test_bounds_are_those_of_the_request_and_each_workgroup_has_its_own() -> None:
    mem, state = Memory(2, 12, 1, 0), Waves(2, 1, 0, 0)
    group = Group(state, np.arange(2), True, mem, "gfx942", {})
    state.v[1] = np.array([[7], [9]])
    for text in ("ds_write_b32 v0, v1 offset:8", "ds_read_b32 v2, v0 offset:8"):
        HANDLERS[text.split()[0]](group, instruction(text))
    assert state.v[2, :, 0].tolist() == [7, 9]
    line = instruction("ds_read_b32 v2, v0 offset:9", 3, "k.py:4")
    with pytest.raises(
        MemoryFault, match=r"out-of-bounds LDS read of 4 bytes at 9 of 12 .* k.py:4, workgroup 0, wave 0"
    ):
        HANDLERS[line.name](group, line)
    with pytest.raises(MemoryFault, match="of 0 by"):
        run_one("ds_write_b8 v0, v1", memory=Memory(1, 0, 1, 0))


def test_unknown_modifiers_are_refused() -> None:
    for text in (
        "ds_read_b32 v1, v0 gds",
        "ds_read2_b32 v[1:2], v0 offset:4",
        "ds_write_b32 v0, |v1|",
        "ds_write_b32 v0",
    ):
        with pytest.raises(NotImplementedError, match="line 0"):
            run_one(text, memory=Memory(1, 64, 1, 0))


def test_uninitialised_reads_name_the_lanes() -> None:
    mem = Memory(1, 1024, 1, 0)
    run_one("ds_write_b16 v0, v1", {0: LANE * 4}, memory=mem)
    run_one("ds_read_u16 v2, v0", {0: LANE * 4}, memory=mem)
    run_one("ds_write_b16 v0, v1 offset:2", {0: LANE * 4}, exec_mask=ALL ^ 0b1100, memory=mem)
    with pytest.raises(MemoryFault, match="read of 4 uninitialised bytes of LDS") as caught:
        run_one("ds_read_b32 v2, v0", {0: LANE * 4}, memory=mem)
    assert caught.value.lanes == (2, 3)


class Workgroup:
    """Two waves of one workgroup that execute one at a time or together."""

    def __init__(self) -> None:
        self.memory, self.waves = Memory(1, 1024, 2, 0), Waves(1, 2, 0, 0)
        self.waves.v[0] = LANE * 4

    def run(self, text: str, *at: int, **v: Any) -> None:
        for name, value in v.items():
            self.waves.v[int(name[1:])] = value
        line = instruction(text)
        HANDLERS[line.name](Group(self.waves, np.array(at), len(at) == 2, self.memory, "gfx942", {}), line)

    def barrier(self) -> None:
        self.memory.barrier(np.array([0]))


def test_a_read_after_another_waves_write_needs_a_barrier() -> None:
    group = Workgroup()
    group.run("ds_write_b32 v0, v0", 0)
    group.run("ds_read_b32 v1, v0", 0)
    with pytest.raises(MemoryFault, match="data race in LDS: read of 4 bytes written by wave 0 since") as caught:
        group.run("ds_read_b32 v1, v0", 1)
    assert caught.value.wave == 1 and len(caught.value.lanes) == 64
    group.barrier()
    group.run("ds_read_b32 v1, v0", 0, 1)


def test_a_write_after_another_waves_read_needs_a_barrier_where_it_changes_something() -> None:
    group = Workgroup()
    group.run("ds_write_b32 v0, v0", 0)
    group.barrier()
    group.run("ds_read_b128 v[4:7], v1", 0, v1=np.tile(LANE % 8 * 16, (2, 1)))
    group.run("ds_write_b32 v0, v0", 1)
    with pytest.raises(MemoryFault, match="write of 2 bytes read by wave 0") as caught:
        group.run("ds_write_b16 v0, v1", 1, v1=LANE * 4 + 1)
    assert caught.value.lanes == tuple(range(32)), "the read covered 128 bytes"
    group.barrier()
    group.run("ds_write_b16 v0, v1", 1)


def test_waves_may_write_the_same_value_together_but_not_different_ones() -> None:
    group = Workgroup()
    group.run("ds_write_b32 v0, v0", 0, 1)
    group.run("ds_read_b32 v1, v0", 0, 1)  # each reads what it wrote
    with pytest.raises(MemoryFault, match=r"write of 4 bytes written by wave [01]"):
        group.run("ds_write_b32 v0, v1 offset:512", 0, 1, v1=np.stack([LANE, LANE + 1]))
    group = Workgroup()
    group.run("ds_write_b64 v0, v[2:3]", 0, v0=LANE * 8, v2=LANE, v3=LANE)
    with pytest.raises(MemoryFault, match="write of 4 bytes written by wave 0"):
        group.run("ds_write_b32 v0, v2 offset:4", 1, v2=LANE + 1)


def test_neighbouring_bytes_are_no_race() -> None:
    group = Workgroup()
    group.run("ds_write_b8 v0, v0", 0)
    group.run("ds_write_b8 v0, v0 offset:1", 1)
    group.run("ds_write_b16 v0, v0 offset:2", 1)
    with pytest.raises(MemoryFault, match="read of 4 bytes written by wave 1"):
        group.run("ds_read_b32 v1, v0", 0)


def test_atomics_race_with_plain_accesses_only() -> None:
    group = Workgroup()
    group.run("ds_write_b32 v0, v0", 0)
    with pytest.raises(MemoryFault, match="atomic of 4 bytes written by wave 0"):
        group.run("ds_add_u32 v0, v0", 1)
    group.barrier()
    group.run("ds_add_u32 v0, v0", 0, 1)
    group.run("ds_add_u32 v0, v0", 1)
    with pytest.raises(MemoryFault, match="read of 4 bytes changed by an atomic by wave 0"):
        group.run("ds_read_b32 v1, v0", 1)
    group.barrier()
    group.run("ds_read_b32 v1, v0", 1)
    assert (group.waves.v[1, 1] == 4 * group.waves.v[0, 1]).all()


def test_workgroups_do_not_race_and_a_barrier_is_one_workgroups() -> None:
    mem, state = Memory(2, 256, 2, 0), Waves(2, 2, 0, 0)
    state.v[0] = LANE * 4
    state.v[1] = np.arange(4)[:, None]

    def run(text: str, *at: int) -> None:
        line = instruction(text)
        HANDLERS[line.name](Group(state, np.array(at), False, mem, "gfx942", {}), line)

    run("ds_write_b32 v0, v1", 0, 2)
    mem.barrier(np.array([1]))
    run("ds_read_b32 v2, v0", 3)
    assert set(state.v[2, 3].tolist()) == {2}
    with pytest.raises(MemoryFault, match="workgroup 0, wave 1"):
        run("ds_read_b32 v2, v0", 1)
