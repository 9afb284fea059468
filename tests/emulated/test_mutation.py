"""What the emulator's checks are worth: a wrong instruction shows. (The sweep by hand is ci/mutate.py.)"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from portable.platform.emulated.isa import Code, instruction
from portable.platform.emulated.liveness import liveness
from portable.platform.emulated.machine import Buffer, pack

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_dropped_live_instruction_of_attention_is_detected(tmp_path):
    """20 trials a device; the script fails below 85%."""
    command = [sys.executable, ROOT / "ci" / "mutate.py", "--trials", "20", tmp_path / "result.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for result in json.loads((tmp_path / "result.json").read_text())["archs"]:
        assert result["live"] >= 15
        assert result["detected"] >= 0.85 * result["live"]
        assert result["dead_but_detected"] == []


def lines_that_live(text, groups=1, threads=64, lds_bytes=64):
    """The lines of a kernel whose one argument is 256 bytes that it may write, and that ends after them."""
    lines = [line.strip() for line in text.strip().split("\n")]
    code = [instruction(line, number) for number, line in enumerate([*lines, "s_endpgm"])]
    out = np.zeros(256, np.uint8)
    facts = {"user_sgpr_count": "2", "private_segment_fixed_size": "16"}
    found = liveness(
        Code("k", "gfx942", tuple(code), {"end": len(lines)}, facts),
        (groups, 1, 1),
        (threads, 1, 1),
        pack([("*", out.ctypes.data)]),
        [Buffer("out", out)],
        lds_bytes,
    )
    return [line for line, live in zip(lines, found.live, strict=False) if live]


PAIR_TO_SCRATCH = ["v_mov_b32 v1, 1", "scratch_store_dwordx2 off, v[0:1], off"]
STORE = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "v_lshlrev_b32 v9, 2, v0", "global_store_dword v9, v1, s[4:5]"]


def with_store(*lines):
    return "\n".join([*STORE[:2], *lines, STORE[2]])


@pytest.mark.parametrize(
    "lines, dead",
    [
        (["v_mov_b32 v1, 1"], []),
        (["v_mov_b32 v1, 1", "v_mov_b32 v1, 2"], [0]),  # written again
        (["v_mov_b32 v1, 1", "v_mov_b32 v2, v1"], [1]),  # read by an instruction, itself of no effect
        (["v_mov_b32 v1, 1", "s_mov_b64 exec, 1", "v_mov_b32 v1, 2"], []),  # other lanes keep the first value
        (["v_mov_b32 v1, 1", "s_mov_b64 exec, 0", "s_mov_b64 exec, -1", "v_mov_b32 v1, 2"], [0, 1]),
        (["v_mov_b32 v1, 1", "s_cmp_eq_u32 s4, s4", "s_cmp_eq_u32 s4, s5", "s_cselect_b32 s6, 1, 0"], [1, 3]),
        (["v_mov_b32 v1, 1", "v_cmp_eq_u32 vcc, v0, v0", "v_cndmask_b32 v1, v0, v0, vcc"], [0]),
        (["v_mov_b32 v1, 1", "v_mov_b32 v3, 3", "v_writelane_b32 v1, 5, 3"], [1]),
        (["v_mov_b32 v1, 1", "ds_write_b32 v9, v1", "v_mov_b32 v1, 2"], [1]),  # nobody reads that LDS
        (["v_mov_b32 v1, 1", "ds_write_b32 v9, v1", "ds_write_b32 v9, v0", "ds_read_b32 v1, v9"], [1]),
        (["v_mov_b32 v1, 1", "scratch_store_dword off, v1, off", "scratch_load_dword v1, off, off"], []),
        ([*PAIR_TO_SCRATCH, "scratch_store_dword off, v0, off", "scratch_load_dword v1, off, off offset:4"], [2]),
        (["v_mov_b32 v1, 1", "s_branch end"], [0]),
    ],
)
def test_what_is_live(lines, dead):
    live = lines_that_live(with_store(*lines), lds_bytes=256)
    assert [n for n, line in enumerate(lines) if line not in live and not line.startswith("s_branch")] == dead


def test_a_matrix_instruction_writes_every_lane():
    zero = ["v_mov_b32 v1, 0", "v_mov_b32 v2, 0", "v_mov_b32 v3, 0", "v_mov_b32 v4, 0"]
    product = "v_mfma_f32_16x16x16_f16 v[1:4], v[6:7], v[6:7], v[1:4]"
    inputs = ["v_mov_b32 v6, 0", "v_mov_b32 v7, 0"]
    live = lines_that_live(with_store(*inputs, *zero, product))
    assert {*inputs, *zero, product} <= set(live)
    live = lines_that_live(with_store(*inputs, *zero, product.replace("v[1:4])", "0"), *zero))
    assert product not in live


def test_each_batch_of_workgroups_counts():
    """Only the last of 40 workgroups, in another batch than the first, reads what all write."""
    lines = ["v_mov_b32 v1, 1", "s_cmp_lg_u32 s2, 39", "s_cbranch_scc1 end", *STORE]
    assert "v_mov_b32 v1, 1" in lines_that_live("\n".join(lines), groups=40)
