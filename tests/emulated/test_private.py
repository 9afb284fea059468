"""Private arrays of HIP kernels, in registers and in scratch, and addresses that may lead to any memory."""

import pytest
import torch

pytest.importorskip("triton")  # its wheel has the HIP headers

from portable.platform.emulated import activate, hip
from portable.platform.emulated.memory import MemoryFault

ARCHS = ("gfx942", "gfx950")
SOURCE = r"""
#include <hip/hip_runtime.h>

// 12 registers, indexed by numbers that are the same for all lanes of a workgroup
extern "C" __global__ void indexed(int* out, const int* x, const int* which) {
    int all[12], n = which[2 * blockIdx.x], k = which[2 * blockIdx.x + 1];
    for (int i = 0; i < 12; ++i) all[i] = x[i * 64 + threadIdx.x];
    all[n] = 7;
    out[blockIdx.x * 64 + threadIdx.x] = all[k] + 1000 * all[n];
}

extern "C" __global__ void scratch(float* out, const float* x, const int* which, int n) {
    float all[200];
    for (int i = 0; i < n; ++i) all[i] = x[i * blockDim.x + threadIdx.x];
    out[threadIdx.x] = all[which[threadIdx.x]];  // HERE
}

// the address is of scratch, LDS or global memory, as each lane chooses
extern "C" __global__ void anywhere(int* out, int* far, const int* which, int n, int at) {
    __shared__ int part[4];
    int own[64];
    for (int i = 0; i < n; ++i) own[i] = i * 3 + threadIdx.x;
    if (threadIdx.x < 4) part[threadIdx.x] = threadIdx.x * 5;
    __syncthreads();
    int w = which[threadIdx.x];
    int* p = w == 0 ? own : w == 1 ? part : far;
    int space = __builtin_amdgcn_is_shared(p) + 2 * __builtin_amdgcn_is_private(p);
    out[threadIdx.x] = p[threadIdx.x % 4] + 1000 * space;
    if (w != 1) p[at] = 7;  // WRITTEN
}
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    cache = tmp_path_factory.mktemp("hip")
    return {arch: hip.compile(SOURCE, arch, cache=cache) for arch in ARCHS}


@pytest.fixture(params=ARCHS)
def module(request, modules):
    with activate(request.param):
        yield modules[request.param]


def line(mark):
    return next(number for number, text in enumerate(SOURCE.split("\n"), 1) if f"// {mark}" in text)


def test_arrays_in_registers(module):
    kernel = module["indexed"]
    assert {"s_set_gpr_idx_on", "s_set_gpr_idx_off"} <= {i.name for i in kernel.code.instructions}
    x = torch.arange(12 * 64, dtype=torch.int32).reshape(12, 64)
    which = torch.tensor([[n, k] for n in range(12) for k in range(12)], dtype=torch.int32)
    out = torch.zeros(len(which), 64, dtype=torch.int32)
    kernel(len(which), 64, out, x, which)
    assert torch.equal(out, torch.where(which[:, :1] == which[:, 1:], 7, x[which[:, 1].long()]) + 7000)
    with pytest.raises(MemoryFault, match=r"^indexed: out-of-bounds register v\d+, an index of 200 from v\d"):
        kernel(1, 64, out, x, torch.tensor([200, 0], dtype=torch.int32))


def test_arrays_in_scratch(module):
    kernel = module["scratch"]
    assert any(i.name.startswith("scratch_load") for i in kernel.code.instructions)
    x, which = torch.randn(200, 64), torch.randint(0, 200, (64,), dtype=torch.int32)
    out = torch.zeros(64)
    kernel(1, 64, out, x, which, 200)
    assert torch.equal(out, x[which.long(), torch.arange(64)])
    which[9] = 1000
    place = rf"source\.hip:{line('HERE')}\b.*workgroup \(0, 0, 0\), wave 0, lanes 9$"
    with pytest.raises(MemoryFault, match=rf"^scratch: out-of-bounds scratch read of 4 bytes at \d+ of \d+ .*{place}"):
        kernel(1, 64, out, x, which, 200)
    which[9] = 150
    with pytest.raises(MemoryFault, match=r"^scratch: read of 4 uninitialised bytes of scratch.*lanes .*\b9\b"):
        kernel(1, 64, out, x, which.clamp(max=150), 150)


def test_addresses_of_any_memory(module):
    kernel = module["anywhere"]
    names = {i.name for i in kernel.code.instructions}
    assert names >= {"flat_load_dword", "flat_store_dword"}
    which = torch.arange(64, dtype=torch.int32) % 3
    far, out = torch.arange(10, dtype=torch.int32) + 500, torch.zeros(64, dtype=torch.int32)
    kernel(1, 64, out, far, which, 60, 8)
    lane = torch.arange(64)
    want = torch.stack([lane % 4 * 3 + lane + 2000, lane % 4 * 5 + 1000, lane % 4 + 500])
    assert torch.equal(out, want[which.long(), lane].int())
    assert far.tolist() == [*range(500, 508), 7, 509]
    with pytest.raises(MemoryFault, match=rf"anywhere: .*scratch write .*source\.hip:{line('WRITTEN')}\b.*lanes 0, 3"):
        kernel(1, 64, out, far, which, 60, 5000)
    with pytest.raises(MemoryFault, match=r"anywhere: .*write of 4 bytes.*byte 40 of 'far', which has 40 bytes"):
        kernel(1, 64, out, far, torch.full((64,), 2, dtype=torch.int32), 60, 10)
