"""HIP C++ kernels on both emulated architectures."""

import struct

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # its wheel has the HIP headers

from portable.platform.emulated import activate, clang, hip
from portable.platform.emulated.data import link, references
from portable.platform.emulated.isa import decode
from portable.platform.emulated.machine import ExecutionError
from portable.platform.emulated.memory import MemoryFault

ARCHS = ("gfx942", "gfx950")
NATIVE_FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

SOURCE = r"""
#include <hip/hip_runtime.h>

template <typename S, typename T> __device__ T cast(S x) { return x; }
template <> __device__ unsigned char cast(__bf16 x) {
    return __builtin_amdgcn_cvt_pk_fp8_f32((float)x, 0.0f, 0, false) & 0xff;
}

// x [tokens, heads, dim] into the slots of pages [blocks, heads, size, dim]
template <typename S, typename T>
__global__ void scatter(const S* x, T* pages, const long* slots, int heads, int dim, int size) {
    long slot = slots[blockIdx.x];
    if (slot < 0) return;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) {
        long row = (slot / size * heads + i / dim) * size + slot % size;
        pages[row * dim + i % dim] = cast<S, T>(x[(long)blockIdx.x * heads * dim + i]);
    }
}
template __global__ void scatter(const __bf16*, __bf16*, const long*, int, int, int);
template __global__ void scatter(const _Float16*, _Float16*, const long*, int, int, int);
template __global__ void scatter(const __bf16*, unsigned char*, const long*, int, int, int);

template <typename T, bool SHUFFLE> __global__ void block_sum(const T* x, float* sums, int n) {
    __shared__ float part[1024];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += (float)x[(long)blockIdx.x * n + i];
    int count = blockDim.x;
    if (SHUFFLE) {
        for (int other = 32; other; other /= 2) sum += __shfl_xor(sum, other);
        if (threadIdx.x % 64 == 0) part[threadIdx.x / 64] = sum;
        count /= 64;
    } else {
        part[threadIdx.x] = sum;
    }
    for (int half = count / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
template __global__ void block_sum<float, true>(const float*, float*, int);
template __global__ void block_sum<float, false>(const float*, float*, int);
template __global__ void block_sum<__bf16, true>(const __bf16*, float*, int);
template __global__ void block_sum<_Float16, false>(const _Float16*, float*, int);

__device__ void tell(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int* mine = out + ((long)block * blockDim.x * blockDim.y * blockDim.z + thread) * 6;
    mine[0] = gridDim.x, mine[1] = gridDim.y, mine[2] = gridDim.z;
    mine[3] = blockDim.x, mine[4] = blockDim.y, mine[5] = blockDim.z;
}
extern "C" __global__ void sizes(int* out) { tell(out); }
extern "C" __global__ void sizes_behind(char, double, short a, int* out, short b) { tell(out); out[0] += a - b; }

struct Affine { float factor; int shift; };
const __device__ float powers[8] = {1, 2, 4, 8, 16, 32, 64, 128};
__device__ int calls = 5;

extern "C" __global__ void numbers(double* out, bool flag, signed char i8, unsigned short u16, int i32, unsigned u32,
                                   long i64, _Float16 f16, __bf16 bf16, float f32, double f64, Affine affine) {
    double all[] = {(double)flag, (double)i8, (double)u16, (double)i32, (double)u32, (double)i64, (double)f16,
                    (double)bf16, (double)f32, f64, affine.factor, (double)affine.shift};
    if (threadIdx.x == 0) for (int i = 0; i < 12; ++i) out[i] = all[i];
}

extern "C" __global__ void looked_up(float* out, const int* which) {
    out[threadIdx.x] = powers[which[threadIdx.x] & 7];
    if (threadIdx.x == 0) ++calls;
}
extern "C" __global__ void called(int* out) { *out = calls; }

__constant__ int* where = &calls;
__device__ __noinline__ int outside(int x) { return x * x + 1; }
extern "C" __global__ void pointed(int* out) { *out = *where; }
extern "C" __global__ void calling(int* out) { *out = outside(*out); }

extern "C" __global__ void reverse(float* x) {
    extern __shared__ float all[];
    __shared__ float first[4];
    if (threadIdx.x < 4) first[threadIdx.x] = 100 * x[threadIdx.x];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x] + first[threadIdx.x % 4];
}

extern "C" __global__ void maths(const float* x, float* out) {
    float v = x[threadIdx.x];
    double wide = v;
    float all[] = {expf(v), logf(fabsf(v)), sinf(v), tanhf(v), erff(v), 1 / v, rsqrtf(fabsf(v)), fmodf(v, 0.7f),
                   (float)sin(wide), (float)(wide / 3)};
    for (int i = 0; i < 10; ++i) out[i * 64 + threadIdx.x] = all[i];
}

extern "C" __global__ void lanes(const int* x, long* out) {
    int v = x[threadIdx.x];
    long all[] = {(long)__ballot(v & 1), __shfl(v, 5), __shfl_down(v, 3), __any(v == 7), __all(v >= 0), __popc(v),
                  __clz(v), v / 7, v % 7, v * 123456789123L / 1000};
    for (int i = 0; i < 10; ++i) out[i * 64 + threadIdx.x] = all[i];
}

typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef float float4_ __attribute__((ext_vector_type(4)));
extern "C" __global__ void matrix(const half4* a, const half4* b, float4_* c) {
    float4_ zero = {0, 0, 0, 0};
    c[threadIdx.x] = __builtin_amdgcn_mfma_f32_16x16x16f16(a[threadIdx.x], b[threadIdx.x], zero, 0, 0, 0);
}

extern "C" __global__ void overrun(float* x, const float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n)
        x[i] = y[i];  // OVERRUN
}

extern "C" __global__ void private_array(int* out, const int* which) {
    int all[4] = {1, 2, 3, 4};
    all[which[threadIdx.x] & 3] = 9;
    out[threadIdx.x] = all[which[threadIdx.x + 1] & 3];
}
extern "C" __global__ void trapped(int* flag) {
    if (flag[0]) __builtin_trap();
    flag[1] = 1;
}

extern "C" __global__ void printing(int* x) { printf("%d", x[0]); }
extern "C" __global__ void timing(long* x) { x[0] = clock64(); }

extern "C" __global__ void count(int* bins, const int* which) {
    atomicAdd(bins + which[threadIdx.x], 1);  // COUNT
}
"""
OVERRUN, COUNT = (
    next(number for number, line in enumerate(SOURCE.split("\n"), 1) if f"// {mark}" in line)
    for mark in ("OVERRUN", "COUNT")
)


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    cache = tmp_path_factory.mktemp("hip")
    return {arch: hip.compile(SOURCE, arch, cache=cache) for arch in ARCHS}


@pytest.fixture(params=ARCHS)
def module(request, modules):
    with activate(request.param):
        yield modules[request.param]


def mangled(module, name, *types):
    (symbol,) = (s for s, each in module.signatures.items() if each.name == name and all(t in s for t in types))
    return module[symbol]


@pytest.mark.parametrize(("source", "target"), [("bf16", "bf16"), ("f16", "f16"), ("bf16", "fp8")])
def test_scatter_into_pages(module, source, target):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[source]
    stored = dtype if target != "fp8" else NATIVE_FP8[module.arch]
    tokens, heads, dim, size, blocks = 7, 2, 40, 16, 4
    slots = torch.tensor([3, 17, -1, 40, 0, 63, 20])
    x = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, :12] = torch.tensor([0, -0.0, 240, -240, 1e-3, 2**-9, 2**-10, 2**-7, 17, 18, 19, 1.9375]).to(dtype)
    pages = torch.full((blocks, heads, size, dim), 2).to(stored)
    want = pages.clone().view(torch.uint8 if target == "fp8" else dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // size, :, slot % size] = x[token].to(stored).view(want.dtype)
    names = {"bf16": "<__bf16, __bf16>", "f16": "<_Float16, _Float16>", "fp8": "<__bf16, unsigned char>"}
    module["scatter" + names[target]](tokens, 64, x, pages, slots, heads, dim, size)
    assert torch.equal(pages.view(want.dtype).view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("kind", ["<float, true>", "<float, false>", "<__bf16, true>", "<_Float16, false>"])
@pytest.mark.parametrize("threads", [64, 256])
def test_block_sums(module, kind, threads):
    dtype = {"<f": torch.float32, "<_": torch.bfloat16 if "bf16" in kind else torch.float16}[kind[:2]]
    x = torch.arange(3 * 300).reshape(3, 300).remainder(13).to(dtype)  # whole numbers: sums are exact
    sums = np.full(3, np.nan, np.float32)
    module["block_sum" + kind](3, threads, x, sums, 300)
    np.testing.assert_array_equal(sums, x.double().sum(1).numpy())


def test_device_functions(module):
    x, out = torch.linspace(-4, 4, 64), torch.zeros(10, 64)
    module["maths"](1, 64, x, out)
    d = x.double()
    want = [d.exp(), d.abs().log(), d.sin(), d.tanh(), d.erf(), 1 / d, d.abs().rsqrt(), d.fmod(0.7), d.sin(), d / 3]
    torch.testing.assert_close(out.double(), torch.stack(want), rtol=1e-6, atol=1e-6)


def test_functions_across_lanes(module):
    x, out = 3 * np.arange(64, dtype=np.int32), np.zeros((10, 64), np.int64)
    module["lanes"](1, 64, x, out)
    odd, down = int("10" * 32, 2) - (1 << 64), [x[i + 3] if i < 61 else x[i] for i in range(64)]
    ones, zeros = [int(v).bit_count() for v in x], [32 - int(v).bit_length() for v in x]
    want = [odd, 15, down, 0, 1, ones, zeros, x // 7, x % 7, x.astype(np.int64) * 123456789123 // 1000]
    for number, (got, each) in enumerate(zip(out, want, strict=True)):
        np.testing.assert_array_equal(got, each, err_msg=f"function {number}")


def test_a_product_of_matrices(module):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randint(-4, 5, (2, 16, 16), generator=generator).half()
    lanes = [m.reshape(16, 4, 4).transpose(0, 1).contiguous() for m in (a, b.T)]  # lane 16 k + row has columns 4 k..
    c = torch.zeros(4, 16, 4)  # lane 16 k + column has rows 4 k..
    module["matrix"](1, 64, *lanes, c)
    assert torch.equal(c.transpose(1, 2).reshape(16, 16), a.float() @ b.float())


@pytest.mark.parametrize(("grid", "block"), [((3, 2, 2), (4, 2, 3)), ((2,), (70,)), (1, 1)])
def test_sizes_come_from_each_kernels_own_hidden_arguments(module, grid, block):
    full = [tuple(x) if isinstance(x, tuple) else (x,) for x in (grid, block)]
    full = [(*x, 1, 1)[:3] for x in full]
    want = np.tile(np.array(full[0] + full[1], np.int32), (np.prod(full), 1))
    out = np.zeros_like(want)
    module["sizes"](grid, block, out)
    np.testing.assert_array_equal(out, want)
    out[:] = 0
    module["sizes_behind"](grid, block, 1, 2.0, 7, out, 7)
    np.testing.assert_array_equal(out, want)


def test_numbers_and_structs(module):
    numbers = [True, -5, 65535, -(2**31), 2**32 - 1, -(2**63), 0.1, 3.0, 0.1, 0.1]
    out = torch.zeros(12, dtype=torch.float64)
    module["numbers"](1, 64, out, *numbers, struct.pack("<fi", 2.5, -3))
    narrow = [float(np.float16(0.1)), 3.0, float(np.float32(0.1)), 0.1]
    assert out.tolist() == [*map(float, numbers[:6]), *narrow, 2.5, -3.0]
    module["numbers"](1, 64, out, *[0] * 10, np.array((1, 2), "<f4, <i4")[()])
    assert out.tolist() == [0.0] * 10 + [1.0, 2.0]


def test_dynamic_lds_lies_behind_the_kernels_own(module):
    x = torch.arange(100.0)
    module["reverse"](1, 100, x, lds=400)
    assert x.tolist() == [99 - i + 100 * (i % 4) for i in range(100)]
    with pytest.raises(MemoryFault, match=r"reverse.*LDS"):
        module["reverse"](1, 100, x, lds=396)
    with pytest.raises(ValueError, match="lds=-1"):
        module["reverse"](1, 100, x, lds=-1)


def test_lds_beyond_the_architecture(modules):
    for arch, fits in (("gfx942", False), ("gfx950", True)):
        x = torch.arange(4.0)
        with activate(arch):
            if fits:
                modules[arch]["reverse"](1, 4, x, lds=70 << 10)
                assert x.tolist() == [3, 102, 201, 300]
            else:
                with pytest.raises(ExecutionError, match=r"reverse: 71696 bytes of LDS where gfx942 has 65536"):
                    modules[arch]["reverse"](1, 4, x, lds=70 << 10)


def test_an_access_out_of_bounds_is_reported_with_its_line(module):
    x, y = torch.zeros(128), torch.zeros(99)
    module["overrun"](2, 64, x, y, 98)
    with pytest.raises(MemoryFault, match=rf"overrun.*read of 4 bytes.*'y'.*source\.hip:{OVERRUN}\b.*lanes 35"):
        module["overrun"](2, 64, x, y, 99)
    with pytest.raises(MemoryFault, match=r"overrun.*read of 4 bytes.*at 0x0"):
        module["overrun"](2, 64, x, None, 99)
    bins, which = torch.zeros(4, dtype=torch.int32), torch.arange(64, dtype=torch.int32) % 4
    module["count"](1, 64, bins, which)
    assert bins.tolist() == [16] * 4
    which[5] = 4
    with pytest.raises(MemoryFault, match=rf"count.*byte 16 of 'bins'.*called at source\.hip:{COUNT}\b.*lanes 5"):
        module["count"](1, 64, bins, which)


def test_constants_and_variables_of_a_source(module):
    which, out, count = torch.arange(64, dtype=torch.int32), torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    module["called"](1, 1, count)
    before = int(count)
    module["looked_up"](1, 64, out, which)
    assert out.tolist() == [2.0 ** (i % 8) for i in range(64)]
    module["called"](1, 1, count)
    assert int(count) == before + 1


@pytest.mark.parametrize("offset", [0, 4, 7])
def test_addresses_replace_distances(offset):
    lines = f"f:\n s_getpc_b64 s[2:3]\n s_add_u32 s2, s2, t@rel32@lo+{4 + offset}\n"
    lines += f" s_addc_u32 s3, s3, t@rel32@hi+{12 + offset}\n"
    code = decode(f'.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n{lines}', "f")
    assert references(code) == ("t",)
    _, low, high = link(code, {"t": 0x5_FFFF_FFFC}).instructions
    assert (high.operands[2].bits << 32) + low.operands[2].bits == 0x5_FFFF_FFFC + offset


def test_private_arrays_and_untaken_traps(modules):
    """The array is promoted to LDS, where its place is found by the sizes in the dispatch packet."""
    for arch, module in modules.items():
        which = torch.tensor([i * i for i in range(129)], dtype=torch.int32)
        out = torch.zeros(128, dtype=torch.int32)
        with activate(arch):
            module["private_array"](1, 128, out, which)
        a, b = which[:-1] & 3, which[1:] & 3
        assert torch.equal(out, torch.where(a == b, 9, b + 1).to(torch.int32))
        flag = torch.tensor([0, 0], dtype=torch.int32)
        with activate(arch):
            module["trapped"](1, 64, flag)
            assert flag.tolist() == [0, 1]
            with pytest.raises(ExecutionError, match=r"trapped, .*'s_trap 2'"):
                module["trapped"](1, 64, flag.fill_(1))


def test_calls_and_addresses_in_data_are_refused(modules):
    with pytest.raises(NotImplementedError, match="calling uses _Z7outsidei, a function that is not inlined"):
        modules["gfx942"]["calling"]
    with pytest.raises(NotImplementedError, match="pointed uses where, data with addresses in it"):
        modules["gfx942"]["pointed"]


def test_printing_and_clocks_are_refused(module):
    for name, opcode in (("printing", r"s_sendmsg \(printing\)"), ("timing", r"s_memtime \(a clock\)")):
        with pytest.raises(ExecutionError, match=rf"^{name} \({module.arch}\) uses opcodes that are not .*: {opcode}$"):
            module[name](1, 64, torch.zeros(2, dtype=torch.int64))


def test_arguments_are_checked(module):
    x = torch.zeros(64)
    overrun, numbers = module["overrun"], module["numbers"]
    with pytest.raises(TypeError, match=r"overrun takes 3 arguments \(x, y, n\), not 2"):
        overrun(1, 64, x, x)
    with pytest.raises(TypeError, match=r"argument n of overrun is an integer of 4 bytes, not 1\.5"):
        overrun(1, 64, x, x, 1.5)
    with pytest.raises(TypeError, match=r"argument y of overrun is a pointer.*not 7"):
        overrun(1, 64, x, 7, 1)
    with pytest.raises(TypeError, match="argument n of overrun is an integer of 4 bytes, not tensor"):
        overrun(1, 64, x, x, x)
    with pytest.raises(ValueError, match="argument n of overrun is an integer of 4 bytes from -2147483648 to 4"):
        overrun(1, 64, x, x, 1 << 32)
    with pytest.raises(ValueError, match="argument y is on meta"):
        overrun(1, 64, x, x.to("meta"), 1)
    frozen = np.zeros(64, np.float32)
    frozen.flags.writeable = False
    overrun(1, 64, x, frozen, 1)
    with pytest.raises(MemoryFault, match="write to 'x', which is read-only"):
        overrun(1, 64, frozen, x, 1)
    good = [False, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, bytes(8)]
    for place, wrong in ((0, 2), (6, 1e6), (8, "1"), (10, bytes(4))):
        with pytest.raises(ValueError if place < 8 else TypeError, match="of numbers is"):
            numbers(1, 64, torch.zeros(12, dtype=torch.float64), *good[:place], wrong, *good[place + 1 :])


def test_grids_and_blocks_are_checked(module):
    x = torch.zeros(64)
    for grid, block, message in ((0, 64, "grid=0"), ((1, 1, 1, 1), 64, "grid="), (1, (64, 0), "block=")):
        with pytest.raises(ValueError, match=message):
            module["overrun"](grid, block, x, x, 1)
    with pytest.raises(ValueError, match=r"block \(1024, 2, 1\) has more threads than the 1024"):
        module["overrun"](1, (1024, 2), x, x, 1)


def test_launches_are_recorded_and_belong_to_an_active_device(modules):
    x = torch.zeros(64)
    with activate("gfx950") as emulation:
        modules["gfx950"]["overrun"]((2, 1), 32, x, x, 63)
        with pytest.raises(RuntimeError, match="overrun was compiled for gfx942, and the emulated device is gfx950"):
            modules["gfx942"]["overrun"](1, 64, x, x, 64)
    (launch,) = emulation.launches
    assert (launch.name, launch.arch, launch.grid) == ("overrun", "gfx950", (2, 1, 1)) and launch.instructions > 0
    with pytest.raises(RuntimeError, match="no emulated device is active"):
        modules["gfx950"]["overrun"](1, 64, x, x, 64)


def test_kernels_are_found_by_both_names(modules):
    module = modules["gfx942"]
    assert module["_Z9block_sumIfLb1EEvPKT_Pfi"] is module["block_sum<float, true>"]
    with pytest.raises(KeyError, match=r"'nothing' is no kernel of source.hip, which has scatter<"):
        module["nothing"]


def test_files_and_what_they_include_are_compiled_once(tmp_path, monkeypatch):
    kernel = tmp_path / "fill.hip"
    body = "__global__ void fill(float* x) { x[__builtin_amdgcn_workitem_id_x()] = VALUE + MORE; }"
    kernel.write_text(f'#include "deep/first.h"\n{body}\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "first.h").write_text('#include "value.h"\n')
    builds, build = [], clang.build
    monkeypatch.setattr(clang, "build", lambda *given: builds.append(given) or build(*given))
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "cache"))
    for value, more, count in ((1, 2, 1), (1, 2, 1), (3, 2, 2), (3, 5, 3)):
        (tmp_path / "deep" / "value.h").write_text(f"#define VALUE {value}\n")
        module, x = hip.compile(kernel, "gfx942", [f"-DMORE={more}"]), torch.zeros(64)
        with activate("gfx942"):
            module["fill"](1, 64, x)
        assert (x == value + more).all() and len(builds) == count
    assert {file.suffix for file in (tmp_path / "cache" / "hip").iterdir()} == {".json"}


def test_a_source_that_does_not_compile(tmp_path):
    with pytest.raises(ValueError, match=r"source.hip:1:24: error: use of undeclared identifier 'nothing'"):
        hip.compile("__global__ void f() { +nothing; }", "gfx942", cache=tmp_path)
    with pytest.raises(ValueError, match="arch 'gfx90a' is not one of gfx942, gfx950"):
        hip.compile(SOURCE, "gfx90a", cache=tmp_path)
    with pytest.raises(ValueError, match=r"source is 'kernels\.hip', the name of a file; .* or a Path"):
        hip.compile("kernels.hip", "gfx942", cache=tmp_path)


@pytest.mark.parametrize("absent", ["ziglang", "clang_include_cleaner", "triton"])
def test_what_is_missing_is_named(absent, monkeypatch):
    find = clang.find_spec
    monkeypatch.setattr(clang, "find_spec", lambda name: None if name == absent else find(name))
    clang.tools.cache_clear()
    clang.version.cache_clear()
    with pytest.raises(RuntimeError, match=f"not installed: pip install {absent.replace('_', '-')}$"):
        hip.compile(SOURCE, "gfx942")
