"""Global, flat, buffer and scratch instructions, and the faults of memory, against plain numpy indexing."""

import numpy as np
import numpy.typing as npt
import pytest
from emulated_one import run_one

import portable.platform.emulated.buffer
import portable.platform.emulated.global_
import portable.platform.emulated.scratch  # noqa: F401
from portable.platform.emulated.global_ import TO_LDS
from portable.platform.emulated.isa import instruction
from portable.platform.emulated.memory import Allocations, Memory, MemoryFault
from portable.platform.emulated.spans import Span, places
from portable.platform.emulated.transfer import LOADS, STORES
from portable.platform.emulated.waves import HANDLERS, Group, Waves

LANE = np.arange(64, dtype=np.uint64)
OLD = np.uint32(0xDEADBEEF)
HALF = (1 << 64) // 3  # every other lane


def bytes_of(size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def memory(waves: int = 1, scratch: int = 0, lds: int = 0) -> Memory:
    return Memory(1, lds, waves, scratch)


def expected(name: str, raw: bytes) -> list[int]:
    """The registers after a load of these bytes onto registers that hold OLD, from the ISA manual's words."""
    size = LOADS[name].nbytes
    if size >= 4:
        return [int.from_bytes(raw[k : k + 4], "little") for k in range(0, size, 4)]
    value = int.from_bytes(raw, "little", signed=name.startswith(("sbyte", "sshort")))
    if name.endswith("_d16"):
        return [(int(OLD) & 0xFFFF0000) | (value & 0xFFFF)]
    if name.endswith("_d16_hi"):
        return [(int(OLD) & 0xFFFF) | (value & 0xFFFF) << 16]
    return [value & 0xFFFFFFFF]


def destination(name: str) -> str:
    words = max(1, LOADS[name].nbytes // 4)
    return "v20" if words == 1 else f"v[20:{19 + words}]"


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("form", ["pair", "base", "flat", "buffer", "scratch"])
def test_loads_of_every_width(name: str, form: str) -> None:
    """Odd addresses too, half of the lanes, three waves at once."""
    source = bytes_of(64 * 19 + 64)
    mem = memory(3, source.size)
    address = np.uint64(mem.add(source, "x"))
    to = destination(name)
    stride = np.stack([LANE * 19, LANE * 16, LANE * 4 + 2])
    state = {20 + k: np.full(64, OLD) for k in range(4)}
    s = {"s[2:3]": int(address), 4: source.size, 5: 0}
    text = {
        "pair": f"global_load_{name} {to}, v[0:1], off offset:7 sc0 sc1 nt",
        "base": f"global_load_{name} {to}, v0, s[2:3] offset:7",
        "flat": f"flat_load_{name} {to}, v[0:1] offset:7",
        "buffer": f"buffer_load_{name} {to}, v0, s[2:5], 0 offen offset:7",
        "scratch": f"scratch_load_{name} {to}, v0, off offset:7",
    }[form]
    start = stride + address if form in ("pair", "flat") else stride.astype(np.uint32)
    if form == "scratch":
        mem.scratch.bytes.reshape(192, -1)[:, : source.size] = source
        mem.scratch._written.units[1][:] = 0xFF
    got = run_one(text, {0: start} | state, s, exec_mask=HALF, waves=3, memory=mem)
    for wave in range(3):
        for lane in range(64):
            at = int(stride[wave, lane]) + 7
            want = expected(name, source[at : at + LOADS[name].nbytes].tobytes()) if lane % 2 == 0 else [int(OLD)]
            assert got.v[20 : 20 + len(want), wave, lane].tolist() == want, (wave, lane)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("form", ["pair", "base", "flat", "buffer", "scratch"])
def test_stores_of_every_width(name: str, form: str) -> None:
    size, shift = STORES[name]
    words = max(1, size // 4)
    values = np.random.default_rng(3).integers(0, 1 << 32, (words, 2, 64), np.uint32)
    target, before = bytes_of(4096), bytes_of(4096)
    mem = memory(2, 4096)
    address = np.uint64(mem.add(target, "x"))
    stride = np.stack([LANE * 17, LANE * 16 + 2048])
    start = stride + address if form in ("pair", "flat") else stride.astype(np.uint32)
    data = "v20" if words == 1 else f"v[20:{19 + words}]"
    text = {
        "pair": f"global_store_{name} v[0:1], {data}, off offset:3",
        "base": f"global_store_{name} v0, {data}, s[2:3] offset:3 nt",
        "flat": f"flat_store_{name} v[0:1], {data} offset:3",
        "buffer": f"buffer_store_{name} {data}, v0, s[2:5], 0 offen offset:3",
        "scratch": f"scratch_store_{name} v0, {data}, off offset:3",
    }[form]
    per_lane = mem.scratch.bytes.reshape(128, -1)
    per_lane[:] = before
    s = {"s[2:3]": int(address), 4: 4096, 5: 0}
    run_one(text, {0: start} | {20 + k: values[k] for k in range(words)}, s, HALF, waves=2, memory=mem)
    want, private = before.copy(), np.tile(before, (128, 1))
    for wave in range(2):
        for lane in range(0, 64, 2):
            raw = b"".join(int(values[k, wave, lane] >> np.uint32(shift)).to_bytes(4, "little") for k in range(words))
            at = int(stride[wave, lane]) + 3
            for memory_of in (want, private[64 * wave + lane]):
                memory_of[at : at + size] = np.frombuffer(raw[:size], np.uint8)
    np.testing.assert_array_equal(*((per_lane, private) if form == "scratch" else (target, want)))


def test_global_offsets_are_signed_and_vector_offsets_are_not() -> None:
    source = bytes_of(1 << 16)
    mem = memory()
    address = mem.add(source, "x")
    words = source.view(np.uint32)
    got = run_one("global_load_dword v1, v0, s[2:3] offset:-16", {0: np.full(64, 64)}, {"s[2:3]": address}, memory=mem)
    assert set(got.v[1, 0].tolist()) == {int(words[12])}
    with pytest.raises(MemoryFault, match="out-of-bounds read"):
        minus = np.full(64, -4, np.int32)
        run_one("global_load_dword v1, v0, s[2:3]", {0: minus}, {"s[2:3]": address + 64}, memory=mem)


def test_accumulation_registers_hold_loaded_and_stored_data() -> None:
    source, target = bytes_of(1024), np.zeros(1024, np.uint8)
    mem = memory()
    addresses = {2: mem.add(source, "x"), 4: mem.add(target, "y")}
    s = {f"s[{k}:{k + 1}]": value for k, value in addresses.items()}
    v = {0: LANE.astype(np.uint32) * 16}
    run_one("global_load_dwordx4 a[4:7], v0, s[2:3]\nglobal_store_dwordx4 v0, a[4:7], s[4:5]", v, s, memory=mem)
    np.testing.assert_array_equal(source, target)


def test_pointers_inside_an_allocation_reach_another() -> None:
    target = bytes_of(64)
    mem = memory()
    table = np.array([mem.add(target, "x") + 8], np.uint64)
    start = mem.add(table.view(np.uint8), "table")
    text = "global_load_dwordx2 v[2:3], v0, s[2:3]\nglobal_load_dword v4, v[2:3], off"
    got = run_one(text, {0: np.zeros(64, np.uint32)}, {"s[2:3]": start}, memory=mem)
    assert set(got.v[4, 0].tolist()) == {int(target.view(np.uint32)[2])}


def test_unknown_modifiers_and_operands_are_refused() -> None:
    for text in (
        "global_load_dword v1, v[2:3], off clamp",
        "global_load_dword v1, v[2:3], off slc",
        "buffer_load_dword v1, v0, s[0:3], 0 idxen",
        "buffer_load_dwordx2 v[1:2], v0, s[0:3], 0 offen lds",
        "buffer_load_dword v1, v0, s[0:3], 0",
        "scratch_load_dword v1, v0, off gds",
        "global_store_dword v[2:3], -v1, off",
        "flat_load_dword v1, v[2:3], off",
    ):
        with pytest.raises(NotImplementedError, match="line 0"):
            run_one(text, memory=memory())


@pytest.mark.parametrize(("word", "bit"), [(1, 31), (3, 23)])
def test_swizzled_buffers_are_refused(word: int, bit: int) -> None:
    with pytest.raises(NotImplementedError, match="not emulated"):
        run_one("buffer_load_dword v1, off, s[0:3], 0", s={word: 1 << bit}, memory=memory())


def test_buffer_range_is_checked_word_by_word_and_counts_the_scalar_offset() -> None:
    """num_records 20: at offset 12 + 4 (scalar) one of four words is inside; a stride is there for the cache only."""
    source = bytes_of(64)
    before = source.copy()
    mem = memory()
    address = mem.add(source, "x")
    s = {"s[0:1]": address | 0x4004 << 48, 2: 20, 3: 0, 8: 4}
    offsets = np.tile(np.array([0, 4, 12, 16, 0x80000000, 0xFFFFFFFF], np.uint32), 11)[:64]
    got = run_one("buffer_load_dwordx4 v[4:7], v0, s[0:3], s8 offen", {0: offsets}, s, memory=mem)
    words = [int(word) for word in source.view(np.uint32)]
    assert got.v[4:8, 0, :6].T.tolist() == [
        words[1:5],
        [*words[2:5], 0],
        [words[4], 0, 0, 0],
        [0] * 4,
        [0] * 4,
        [0] * 4,
    ]
    new = {4 + k: np.full(64, k + 1, np.uint32) for k in range(4)}
    run_one("buffer_store_dwordx4 v[4:7], v0, s[0:3], s8 offen", {0: np.full(64, 12)} | new, s, memory=mem)
    before.view(np.uint32)[4] = 1
    np.testing.assert_array_equal(source, before)
    run_one("buffer_store_short v4, v0, s[0:3], 0 offen", {0: np.full(64, 19)} | new, s, memory=mem)
    np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize(("name", "pitch"), TO_LDS.items())
@pytest.mark.parametrize("form", ["global", "buffer"])
def test_loads_straight_into_lds(name: str, pitch: int, form: str) -> None:
    """LDS[M0 + offset + lane * pitch]; a lane beyond the buffer writes zeros."""
    source = bytes_of(64 * 16)
    mem = memory(lds=32 + 64 * pitch)
    s = {"s[4:5]": mem.add(source, "x"), 6: source.size if form == "global" else 62 * 16, 7: 0, "m0": 24}
    v = {0: np.where(LANE < 60, LANE * 16, LANE * 16 - 8).astype(np.uint32)}
    global_ = f"global_load_lds_{name} v0, s[4:5] offset:8"
    buffer = f"buffer_load_{name} v0, s[4:7], 0 offen offset:8 lds"
    run_one(global_ if form == "global" else buffer, v, s, exec_mask=~0b10, memory=mem, arch="gfx950")
    size = LOADS[name].nbytes
    got = mem.lds._span.units[1][32:].reshape(64, pitch)
    for lane in (0, 5, 61, 63):
        at = int(v[0][lane]) + 8
        raw = source[at : at + size].tobytes()
        if form == "buffer" and lane == 63:
            raw = b"\0" * size
        value = int.from_bytes(raw, "little", signed=name[0] == "s")
        assert got[lane].tobytes() == (value & (1 << 8 * pitch) - 1).to_bytes(pitch, "little"), lane
    assert set(got[1].tolist()) == {0xCB}, "lane 1 is inactive"


def test_scratch_belongs_to_a_lane_and_adds_three_parts() -> None:
    mem = memory(2, 64)
    value = np.arange(128, dtype=np.uint32).reshape(2, 64)
    v = {0: value, 1: np.full(64, 8)}
    loads = "scratch_load_dword v2, off, s5\nscratch_load_dword v3, off, off offset:8"
    got = run_one(f"scratch_store_dword v1, v0, s4 offset:-4\n{loads}", v, {4: 4, 5: 8}, waves=2, memory=mem)
    assert (got.v[2] == value).all() and (got.v[3] == value).all()
    with pytest.raises(MemoryFault, match="out-of-bounds scratch write of 8 bytes at 60 of 64"):
        run_one("scratch_store_dwordx2 off, v[0:1], off offset:60", v, waves=2, memory=mem)


def test_a_fault_names_the_instruction_the_line_the_workgroup_and_the_lanes() -> None:
    source = bytes_of(4 * 62)
    state = Waves(3, 2, 0, 0)
    mem = Memory(3, 0, 2, 0)
    mem.workgroup_name = lambda index: (index, 7, 0)
    start = mem.add(source, "scores")
    state.v[0] = LANE * 4
    state.v[0, :5] = 0
    state.s[2], state.s[3] = start & 0xFFFFFFFF, start >> 32
    line = instruction("global_load_dword v1, v0, s[2:3]", 41, "kernel.py:12")
    with pytest.raises(MemoryFault) as caught:
        HANDLERS[line.name](Group(state, np.arange(6), True, mem, "gfx942", {}), line)
    fault = caught.value
    assert (fault.workgroup, fault.wave, fault.lanes) == ((2, 7, 0), 1, (62, 63))
    assert (fault.instruction, fault.source) == (line.text, "kernel.py:12")
    assert str(fault) == (
        f"out-of-bounds read of 4 bytes at {start + 248:#x} (byte 248 of 'scores', which has 248 bytes) by "
        "'global_load_dword v1, v0, s[2:3]' (assembly line 41) at kernel.py:12, "
        "workgroup (2, 7, 0), wave 1, lanes 62-63"
    )


def test_inactive_lanes_never_fault() -> None:
    mem = memory()
    start = mem.add(bytes_of(256), "x")
    v = {0: LANE.astype(np.uint32) * 8}
    run_one("global_load_dword v1, v0, s[2:3]", v, {"s[2:3]": start}, exec_mask=(1 << 32) - 1, memory=mem)
    run_one("global_load_dword v1, v0, s[2:3]", v, {"s[2:3]": 0}, exec_mask=0, memory=mem)


def test_an_access_may_not_straddle_two_allocations_but_views_of_one_array_are_one() -> None:
    whole = bytes_of(64)
    text, v, s = "global_load_dwordx2 v[2:3], v0, s[2:3]", {0: np.full(64, 28)}, {"s[2:3]": whole.ctypes.data}
    apart, together = memory(), memory()
    for start, end in ((0, 32), (32, 64)):
        apart.add(whole[start:end], f"part {start}")
    for start, end in ((0, 33), (32, 64)):
        together.add(whole[start:end], f"part {start}")
    with pytest.raises(MemoryFault, match="out-of-bounds read of 8 bytes"):
        run_one(text, v, s, memory=apart)
    got = run_one(text, v, s, memory=together)
    assert got.v[2, 0, 0] == whole.view(np.uint32)[7] and got.v[3, 0, 0] == whole.view(np.uint32)[8]


def test_an_offset_from_one_array_never_reaches_another() -> None:
    """At the real distance, at 4 GiB and at the distance of the addresses that kernels see."""
    whole = bytes_of(512)
    mem = memory()
    starts = [mem.add(whole[:256], "x"), mem.add(whole[256:], "y")]
    assert starts[1] - starts[0] > 1 << 36 and starts[0] >= 1 << 47 and starts[1] < 1 << 48
    text = "global_load_dword v2, v[0:1], off"
    for name, start, offset in (("x", starts[0], 256), ("y", starts[1], -4), ("x", starts[0], 1 << 32)):
        v = {0: np.full(64, start + offset, np.uint64)}
        with pytest.raises(MemoryFault, match=f"byte {offset} of '{name}', which has 256 bytes"):
            run_one(text, v, memory=mem)
    got = run_one(text, {0: np.full(64, whole[256:].ctypes.data, np.uint64)}, memory=mem)
    assert got.v[2, 0, 0] == whole[256:].view(np.uint32)[0], "a real address, as a tensor holds it"


def test_scratch_is_uninitialised_until_written() -> None:
    mem = memory(1, 16)
    run_one("scratch_store_dword off, v0, off", exec_mask=0xFF, memory=mem)
    run_one("scratch_load_dword v1, off, off", exec_mask=0xFF, memory=mem)
    with pytest.raises(MemoryFault, match="read of 4 uninitialised bytes of scratch") as caught:
        run_one("scratch_load_dword v1, off, off", exec_mask=0x1FF, memory=mem)
    assert caught.value.lanes == (8,)


def test_lanes_may_use_several_allocations() -> None:
    arrays = [bytes_of(256), bytes_of(512)]
    mem = memory()
    starts = np.array([mem.add(each, f"x{k}") for k, each in enumerate(arrays)], np.uint64)
    which = (LANE % 2).astype(int)
    got = run_one("global_load_dword v2, v[0:1], off", {0: starts[which] + LANE * 4}, memory=mem)
    want = [int(arrays[k].view(np.uint32)[lane]) for lane, k in enumerate(which)]
    assert got.v[2, 0].tolist() == want


def test_read_only_arrays_are_read_and_not_written() -> None:
    source = bytes_of(256)
    source.flags.writeable = False
    mem = memory()
    s, v = {"s[2:3]": mem.add(source, "weights")}, {0: LANE.astype(np.uint32) * 4}
    run_one("global_load_dword v1, v0, s[2:3]", v, s, memory=mem)
    with pytest.raises(MemoryFault, match="write to 'weights', which is read-only"):
        run_one("global_store_dword v0, v1, s[2:3]", v, s, memory=mem)


def test_uninitialised_global_bytes_are_reported_until_written() -> None:
    mem = memory()
    s = {"s[2:3]": mem.add(bytes_of(256), "workspace", initialised=False)}
    v = {0: LANE.astype(np.uint32) * 4}
    run_one("global_store_dword v0, v0, s[2:3]", v, s, exec_mask=0xFF, memory=mem)
    run_one("global_load_dword v1, v0, s[2:3]", v, s, exec_mask=0xFF, memory=mem)
    with pytest.raises(MemoryFault, match="read of uninitialised bytes of 'workspace', the first is byte 32") as caught:
        run_one("global_load_dword v1, v0, s[2:3]", v, s, exec_mask=0x1FF, memory=mem)
    assert caught.value.lanes == (8,)


def test_scalar_loads_are_checked_and_named() -> None:
    source = bytes_of(64)
    mem = memory(2)
    start = mem.add(source, "arguments")
    got = mem.load_scalar(np.array([start, start + 48], np.uint64), 16)
    np.testing.assert_array_equal(got, np.stack([source[:16], source[48:]]))
    with pytest.raises(MemoryFault, match=r"out-of-bounds read of 8 bytes .*workgroup unknown"):
        mem.load_scalar(np.array([start, start + 60], np.uint64), 8)
    line = instruction("s_load_dwordx2 s[0:1], s[2:3], 0x0", 9)
    mem.now(line, Group(Waves(1, 2, 0, 0), np.arange(2), True, mem, "gfx942", {}))
    with pytest.raises(MemoryFault, match=r"by 's_load_dwordx2.* \(assembly line 9\), workgroup 0, wave 1$"):
        mem.load_scalar(np.array([start, start + 60], np.uint64), 8)


def test_allocations_outlive_a_batch() -> None:
    shared = Allocations()
    start = Memory(1, 0, 1, 0, shared).add(bytes_of(16), "x")
    assert Memory(4, 0, 2, 0, shared).load_scalar(np.array([start], np.uint64), 8).shape == (1, 8)


def test_wrong_arrays_and_workgroups_are_refused() -> None:
    with pytest.raises(ValueError, match="array 'x' is float32"):
        memory().add(np.zeros(4, np.float32).view(), "x")
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        memory().add(np.zeros(8, np.uint8)[::2], "x")
    with pytest.raises(ValueError, match="waves_per_group=17"):
        Memory(1, 0, 17, 0)
    assert memory().add(np.zeros(0, np.uint8), "nothing") >= 0
    with pytest.raises(MemoryFault, match="nothing is allocated"):
        run_one("global_load_dword v1, v[2:3], off", memory=memory())


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 16])
def test_spans_read_and_write_any_address(nbytes: int) -> None:
    raw = bytes_of(256)
    copy = raw.copy()
    for index in (np.arange(0, 240, 16), np.arange(2, 200, 18), np.arange(1, 200, 17)):
        words = Span(raw).load(places(index, nbytes))
        for k, start in enumerate(index):
            want = [copy[start + at : start + min(at + 4, nbytes)].tobytes() for at in range(0, nbytes, 4)]
            assert words[:, k].tolist() == [int.from_bytes(word, "little") for word in want]
        raw[:] = 0
        Span(raw).store(places(index, nbytes), words)
        touched = (index[:, None] + np.arange(nbytes)).ravel()
        np.testing.assert_array_equal(raw[touched], copy[touched])
        assert not np.delete(raw, touched).any()
        raw[:] = copy
