"""Workgroups that are shared among processes: the same results, faults and messages as in one."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from emulated_one import run_one

from portable.platform.emulated import processes
from portable.platform.emulated.isa import decode
from portable.platform.emulated.machine import Buffer, launch, pack
from portable.platform.emulated.memory import Allocations, Memory, MemoryFault
from portable.platform.emulated.processes import Shared
from portable.platform.emulated.scheduler import ExecutionError

LANE = np.arange(64, dtype=np.uint32)
HERE = os.getpid()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Forks at the first pulse."""
    monkeypatch.setattr(processes, "WORTH", 0)


@pytest.fixture
def forks(monkeypatch):
    """The numbers of the forked processes."""
    fork, seen = os.fork, []

    def counted():
        process = fork()
        seen.append(process)
        return process

    monkeypatch.setattr(os, "fork", counted)
    return seen


def in_all(count, work, processes=2, allocations=None):
    """`work(batch)` in every batch, after a pulse; this process does not begin before another one has."""
    reading, writing = os.pipe()

    def run(batch, pulse):
        if os.getpid() != HERE:
            os.write(writing, b"1")
        elif batch == 0:
            pulse = pulse or (lambda: None)
            pulse()
            if count > 1 and processes > 1:
                os.read(reading, 1)
        work(batch)
        return 1

    return Shared("k", count, run, allocations or Allocations(), processes).all()


def ended(process):
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
    return True


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_each_batch_runs_once_and_what_it_writes_arrives(count, number, forks):
    allocations, out = Allocations(), np.zeros(2 * 64 * 32, np.uint32)
    address = allocations.add(out.view(np.uint8), "out")

    def work(batch):
        memory = Memory(1, 0, 1, 0, allocations)
        v = {0: (2 * 64 * batch + 2 * LANE) * 4, 1: LANE + batch, 2: np.full(64, os.getpid())}
        run_one("global_store_dwordx2 v0, v[1:2], s[2:3]", v, {"s[2:3]": address}, memory=memory)

    assert in_all(count, work, number, allocations) == count
    pairs = out.reshape(32, 64, 2)
    np.testing.assert_array_equal(pairs[:count, :, 0], LANE + np.arange(count)[:, None])
    assert not pairs[count:].any()
    assert len(forks) == min(number - 1, max(0, count - 1))
    workers = set(pairs[:count, :, 1].reshape(-1).tolist())
    assert workers <= {HERE, *forks}
    assert len(workers) >= min(2, number, count)
    assert all(map(ended, forks))


def test_there_may_be_more_batches_than_a_pipe_holds(monkeypatch):
    monkeypatch.setattr(processes, "TICKETS", 4)
    assert in_all(23, lambda batch: None) == 23


@pytest.mark.parametrize("bad", [0, 1, 7, 8])
def test_the_first_failure_is_raised_whoever_met_it(bad, forks):
    def work(batch):
        time.sleep(0.003 * (batch % 3))
        if batch >= bad:
            raise ExecutionError(f"batch {batch}")

    with pytest.raises(ExecutionError, match=f"^batch {bad}$"):
        in_all(20, work)
    assert len(forks) == 1
    assert all(map(ended, forks))


def test_a_process_that_is_killed_is_an_error(forks):
    def work(batch):
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        ExecutionError, match=r"^k: the process \d+ that ran some of its workgroups was killed by signal 9"
    ):
        in_all(5, work)
    assert all(map(ended, forks))


def test_a_process_that_leaves_is_an_error():
    def work(batch):
        if os.getpid() != HERE:
            raise SystemExit

    with pytest.raises(ExecutionError, match=r"some of its workgroups was ended before they were done"):
        in_all(5, work)


def test_an_interrupt_ends_all_processes(forks):
    def work(batch):
        if os.getpid() == HERE:
            raise KeyboardInterrupt
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_all(5, work)
    assert time.monotonic() - start < 30
    assert all(map(ended, forks))


def test_an_error_that_cannot_be_sent_is_named():
    def work(batch):
        if os.getpid() != HERE:
            raise ValueError("of a lock", threading.Lock())

    with pytest.raises(ExecutionError, match=r"cannot pickle.*ValueError.'of a lock'"):
        in_all(5, work)


# Workgroup n writes n + 1 to 64 words from word 64 * n, after 300 turns of a loop.
KERNEL = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.file	1 "/src" "kernel.py"
k:
	.loc	1 7 0
	s_load_dwordx2 s[8:9], s[0:1], 0x0
	s_mov_b32 s5, 300
.LBB0_1:
	s_sub_u32 s5, s5, 1
	s_cmp_lg_u32 s5, 0
	s_cbranch_scc1 .LBB0_1
	v_lshlrev_b32_e32 v3, 2, v0
	v_lshl_add_u32 v3, s2, 8, v3
	v_mov_b32_e32 v1, s2
	v_add_u32_e32 v1, 1, v1
	{last}
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel k
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_count 2
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
"""


def run(number, size=128, last="global_store_dword v3, v1, s[8:9]", written=None):
    out = np.zeros(64 * size, np.uint32)
    code, explicit = decode(KERNEL.format(last=last), "k"), pack([("*i32", out.ctypes.data)])
    buffers = [Buffer("out", out.view(np.uint8), written)]
    count = launch(code, (128, 1, 1), (64, 1, 1), explicit, buffers, processes=number)
    return out, count


def test_a_kernel_has_the_same_results(forks):
    (one, count), (two, same) = run(1), run(2)
    assert len(forks) == 1
    np.testing.assert_array_equal(one, two)
    assert one.tolist() == np.repeat(np.arange(1, 129), 64).tolist()
    assert count == same


@pytest.mark.parametrize("size", [10, 60, 127])
def test_a_fault_has_the_same_message(size, forks):
    messages = []
    for number in (1, 2):
        with pytest.raises(MemoryFault) as caught:
            run(number, size)
        fault = caught.value
        messages.append(str(fault).split(" at 0x")[0] + str(fault).partition("(")[2])
        assert (fault.kernel, fault.workgroup, fault.wave, fault.lanes) == ("k", (size, 0, 0), 0, tuple(range(64)))
        assert fault.source == "kernel.py:7"
    assert messages[0] == messages[1]
    assert len(forks) == 1


def test_atomics_run_in_one_process(forks):
    out, _ = run(2, last="global_atomic_add v3, v1, s[8:9]")
    assert out.tolist() == np.repeat(np.arange(1, 129), 64).tolist()
    assert not forks


def test_what_another_process_writes_holds_a_value(forks):
    written = np.zeros(4 * 64 * 129, np.bool_)
    run(2, 129, written=written)
    assert written[: 4 * 64 * 128].all()
    assert not written[4 * 64 * 128 :].any()
    with pytest.raises(MemoryFault, match=r"the first is byte 30208 by .*workgroup \(118, 0, 0\)"):
        written[256 * 118 :] = False
        run(2, 129, "global_load_dword v1, v3, s[8:9]", written)
    assert len(forks) == 2
