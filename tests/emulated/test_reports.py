"""What is reported of a faulty kernel: its name, the instruction, the source line, the workgroup and the lanes."""

import inspect
import re

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from portable.platform.emulated import activate  # noqa: E402
from portable.platform.emulated.isa import decode  # noqa: E402
from portable.platform.emulated.machine import ExecutionError  # noqa: E402
from portable.platform.emulated.memory import MemoryFault  # noqa: E402
from portable.platform.emulated.waves import LANES  # noqa: E402

SCRATCH = [("global_scratch", "*i8", None), ("profile_scratch", "*i8", None)]


@pytest.fixture(params=["gfx942", "gfx950"])
def device(request):
    with activate(request.param) as emulation:
        yield emulation


@triton.jit
def copy(x, y, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at)
    tl.store(y + at, value)


@triton.jit
def total(x, y, block: tl.constexpr):
    """Waves exchange their parts of the sum through LDS."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at) / tl.sum(tl.load(x + at), 0))


def line_of(kernel, text):
    """file:line of a kernel's line, as a pattern."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return rf"test_reports\.py:{first + next(n for n, line in enumerate(lines) if text in line)}\b"


def changed(device, replace, x, y, lds_bytes=None):
    """Launch `total` with lines of its assembly replaced, as no compiler would."""
    compiled = total.warmup(x, y, block=256, num_warps=4, grid=(1,))
    text, count = re.subn(*replace, compiled.asm["amdgcn"], flags=re.MULTILINE)
    assert count or lds_bytes
    given = device.arguments()
    for name, kind, value in [("x", "*fp32", x), ("y", "*fp32", y), *SCRATCH]:
        given.add(name, kind, value)
    lds_bytes = lds_bytes or compiled.metadata.shared
    device.run(decode(text, "total"), (2, 1, 1), (4 * LANES, 1, 1), given, lds_bytes)


def test_a_read_out_of_bounds(device):
    with pytest.raises(MemoryFault) as caught:
        copy[(3,)](torch.zeros(128 + 20), torch.zeros(192), block=64, num_warps=1)
    message = str(caught.value)
    assert re.match(
        r"copy: out-of-bounds read of 4 bytes at 0x\w+ \(byte 592 of 'x', which has 592 bytes\) by '", message
    )
    assert re.search(r"'(global|buffer)_load_dword.*' \(assembly line \d+\) at " + line_of(copy, "tl.load"), message)
    assert message.endswith("workgroup (2, 0, 0), wave 0, lanes 20-63")


def test_a_read_out_of_bounds_that_ends_in_another_tensor(device):
    both = np.zeros(256, np.float32)
    x, y = torch.from_numpy(both[:64]), torch.from_numpy(both[64:])
    assert y.data_ptr() == x.data_ptr() + 256
    with pytest.raises(MemoryFault, match=r"byte 256 of 'x', which has 256 bytes.*workgroup \(1, 0, 0\)"):
        copy[(2,)](x, y, block=64, num_warps=1)


def test_a_write_out_of_bounds(device):
    with pytest.raises(MemoryFault, match=r"^copy: out-of-bounds write .* of 'y'.* at " + line_of(copy, "tl.store")):
        copy[(2,)](torch.zeros(128), torch.zeros(100), block=64, num_warps=1)


def test_a_missing_barrier(device):
    x, y = torch.ones(512), torch.zeros(512)
    changed(device, ("there is no such line", ""), x, y, lds_bytes=1024)
    assert y.eq(1 / 256).all()
    with pytest.raises(MemoryFault) as caught:
        changed(device, (r"^\ts_barrier$", "\ts_nop 0"), x, y)
    message = str(caught.value)
    assert re.match(
        r"total: data race in LDS: (read|write) of \d+ bytes (read|written) by wave \d.* by 'ds_\w+ ", message
    )
    assert re.search(r"'ds_.*' \(assembly line \d+\) at .*, workgroup \(0, 0, 0\), wave \d, lanes \d", message)


def test_a_read_of_uninitialised_lds(device):
    with pytest.raises(MemoryFault) as caught:
        changed(device, (r"^\tds_write.*$", "\ts_nop 0"), torch.ones(512), torch.zeros(512))
    pattern = (
        r"total: read of \d+ uninitialised bytes of LDS by 'ds_read\w* .*' \(assembly line \d+\) at .+:\d+, workgroup"
    )
    assert re.match(pattern + r" \(0, 0, 0\), wave 0, lanes \d", str(caught.value))


def test_more_lds_than_there_is():
    x, y = torch.ones(512), torch.zeros(512)
    message = r"^total: 71680 bytes of LDS where gfx942 has 65536$"
    with activate("gfx942") as device, pytest.raises(ExecutionError, match=message):
        changed(device, ("there is no such line", ""), x, y, lds_bytes=70 << 10)
    with activate("gfx950") as device:
        changed(device, ("there is no such line", ""), x, y, lds_bytes=70 << 10)


def test_a_read_of_uninitialised_global_memory(device):
    x, y = device.uninitialised(torch.empty(256)), device.uninitialised(torch.empty(256))
    with pytest.raises(MemoryFault) as caught:
        copy[(4,)](x, y, block=64, num_warps=1)
    assert str(caught.value).startswith("copy: read of uninitialised bytes of 'x', the first is byte 0 by '")
    assert str(caught.value).endswith("workgroup (0, 0, 0), wave 0, lanes 0-63")
    copy[(3,)](torch.ones(256), x, block=64, num_warps=1)
    copy[(3,)](x, y, block=64, num_warps=1)
    with pytest.raises(MemoryFault, match=r"bytes of 'x', the first is byte 768 .*workgroup \(3, 0, 0\)"):
        copy[(4,)](x, y, block=64, num_warps=1)
    copy[(4,)](torch.ones(256), x, block=64, num_warps=1)
    copy[(4,)](x, y, block=64, num_warps=1)
    assert y.eq(1).all()


def test_what_torch_writes_counts_as_written(device):
    x, y = device.uninitialised(torch.empty(64)), torch.zeros(64)
    x.view(8, 8)[:] = 2
    copy[(1,)](x, y, block=64, num_warps=1)
    assert y.eq(2).all()


def test_a_view_may_be_uninitialised_alone(device):
    whole, y = torch.zeros(8, 64), torch.zeros(256)
    device.uninitialised(whole[:, 32:])
    copy[(1,)](whole, y, block=32, num_warps=1)
    with pytest.raises(MemoryFault, match=r"the first is byte 128 .*lanes 32-63"):
        copy[(1,)](whole, y, block=64, num_warps=1)


def test_tensors_that_cannot_be_declared(device):
    with pytest.raises(ValueError, match="tensor is on meta"):
        device.uninitialised(torch.empty(1, device="meta"))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference tensor"):
        device.uninitialised(torch.empty(1))
    assert device.uninitialised(torch.empty(0)).numel() == 0
