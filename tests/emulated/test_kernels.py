"""Small Triton kernels, compiled for an emulated device and run there, against torch."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from portable.platform.emulated import activate  # noqa: E402

ARCHS = ["gfx942", "gfx950"]
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
# Triton 3.6 compiles neither of the first two for gfx942, and converts foreign fp8 types in the way of the first
# architecture that a process compiles for.
LIMITED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


@pytest.fixture(params=ARCHS)
def device(request):
    torch.manual_seed(0)
    with activate(request.param) as emulation:
        yield emulation
    assert {launch.arch for launch in emulation.launches} <= {request.param}


@triton.jit
def add_kernel(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8])
def test_add(device, dtype):
    x, y = (torch.randn(1000).mul(50).to(dtype) for _ in range(2))
    out = torch.zeros(1024, dtype=dtype)
    add_kernel[(8,)](x, y, out, 1000, block=128)
    torch.testing.assert_close(out[:1000], x + y)
    assert not out[1000:].any()


@triton.jit
def softmax_kernel(x, out, stride, n, block: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    logits = tl.load(x + row * stride + at, mask=at < n, other=float("-inf")).to(tl.float32)
    weights = tl.exp(logits - tl.max(logits, 0))
    tl.store(out + row * stride + at, weights / tl.sum(weights, 0), mask=at < n)


@pytest.mark.parametrize("num_warps", [1, 4])
def test_masked_softmax(device, num_warps):
    x = torch.randn(5, 777)
    x[2, 5:700] = float("-inf")
    out = torch.empty_like(x)
    softmax_kernel[(5,)](x, out, 777, 777, block=1024, num_warps=num_warps)
    torch.testing.assert_close(out, x.softmax(-1), rtol=1e-5, atol=1e-7)


@triton.jit
def scan_kernel(x, sums, order, n: tl.constexpr):
    at = tl.arange(0, n)
    value = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(value, 0))
    tl.store(order + at, tl.sort(value))


def test_cumsum_and_sort(device):
    x = torch.randn(512)
    sums, order = torch.empty_like(x), torch.empty_like(x)
    scan_kernel[(1,)](x, sums, order, 512)
    torch.testing.assert_close(sums, x.cumsum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(order, x.sort().values)


@triton.jit
def count_kernel(x, counts, lock, total, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(counts + tl.load(x + at, mask=at < n, other=0), 1, mask=at < n)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + 1)
    tl.atomic_xchg(lock, 0)


def test_atomics_and_a_lock(device):
    x = torch.randint(0, 7, (900,))
    counts, lock, total = torch.zeros(7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    count_kernel[(4,)](x, counts, lock, total, 900, block=256)
    assert torch.equal(counts, x.bincount().int())
    assert total.item() == 4
    assert lock.item() == 0


@triton.jit
def dot_kernel(a, b, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, step: tl.constexpr):
    rows, columns, inner = tl.arange(0, m), tl.arange(0, n), tl.arange(0, step)
    total = tl.dot(tl.load(a + rows[:, None] * k + inner[None, :]), tl.load(b + inner[:, None] * n + columns[None, :]))
    for first in range(step, k, step):
        left = tl.load(a + rows[:, None] * k + (first + inner)[None, :])
        total += tl.dot(left, tl.load(b + (first + inner)[:, None] * n + columns[None, :]))
    tl.store(out + rows[:, None] * n + columns[None, :], total)


def dot(a, b, **options):
    (m, k), n = a.shape, b.shape[1]
    accumulator = {torch.int8: torch.int32, torch.float64: torch.float64}.get(a.dtype, torch.float32)
    out = torch.empty(m, n, dtype=accumulator)
    dot_kernel[(1,)](a, b, out, m, n, k, min(64, k), **options)
    return out


@pytest.mark.parametrize("instruction", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, "fp8"])
def test_dot_is_exact_for_small_integers(device, dtype, instruction):
    dtype = FP8[device.arch] if dtype == "fp8" else dtype
    a, b = (torch.randint(-8, 9, shape).to(dtype) for shape in ((64, 128), (128, 64)))
    out = dot(a, b, matrix_instr_nonkdim=instruction)
    assert torch.equal(out, (a.double() @ b.double()).to(out.dtype))


@pytest.mark.parametrize(
    "dtype, relative", [(torch.float32, 2e-3), (torch.float64, 1e-14), (torch.float8_e5m2, 1e-6), ("other fp8", 1e-6)]
)
def test_dot_of_other_types(device, dtype, relative):
    if LIMITED and (dtype == "other fp8" or (dtype == torch.float64 and device.arch == "gfx942")):
        pytest.skip(f"triton {triton.__version__}")
    dtype = FP8[next(arch for arch in ARCHS if arch != device.arch)] if dtype == "other fp8" else dtype
    a, b = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((32, 64), (64, 32)))
    exact = a.double() @ b.double()
    torch.testing.assert_close(dot(a, b).double(), exact, rtol=relative, atol=relative * exact.abs().max().item())


@pytest.mark.parametrize("m, n", [(4, 64), (64, 4)])
def test_dot_of_four_rows_or_columns(device, m, n):
    a, b = (torch.randint(-8, 9, shape).half() for shape in ((m, 64), (64, n)))
    assert torch.equal(dot(a, b), a.float() @ b.float())


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def scaled_kernel(a, b, a_scale, b_scale, out, kind: tl.constexpr, width: tl.constexpr, n: tl.constexpr):
    """a [n, width bytes] and b [128, n] with a scale for every 32 of the 128 elements."""
    at, left, right, blocks = tl.arange(0, n), tl.arange(0, width), tl.arange(0, 128), tl.arange(0, 4)
    scales = at[:, None] * 4 + blocks[None, :]
    total = tl.dot_scaled(
        tl.load(a + at[:, None] * width + left[None, :]),
        tl.load(a_scale + scales),
        kind,
        tl.load(b + right[:, None] * n + at[None, :]),
        tl.load(b_scale + scales),
        "e4m3",
    )
    tl.store(out + at[:, None] * n + at[None, :], total)


@pytest.mark.parametrize("instruction", [16, 32])
@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_scaled_dot_with_a_scale_for_each_block(device, kind, instruction):
    """Scales differ from block to block, and types may differ: where in K a lane's elements stand matters."""
    if LIMITED and device.arch == "gfx942":
        pytest.skip(f"triton {triton.__version__}")
    b = torch.randn(128, 32).to(torch.float8_e4m3fn)
    if kind == "e4m3":
        a = torch.randn(32, 128).to(torch.float8_e4m3fn)
        wide = a.double()
    else:
        codes = torch.randint(0, 16, (32, 128))
        a, wide = (codes[:, ::2] | codes[:, 1::2] << 4).byte(), E2M1[codes].double()
    scale = torch.randint(120, 134, (2, 32, 4), dtype=torch.uint8)
    a_scale, b_scale = (2.0 ** (scale.double() - 127)).repeat_interleave(32, -1)
    out = torch.empty(32, 32)
    scaled_kernel[(1,)](a, b, *scale, out, kind, a.shape[1], 32, matrix_instr_nonkdim=instruction)
    exact = (wide * a_scale) @ (b.double() * b_scale.T)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6 * exact.abs().max().item())


@triton.jit
def attention_kernel(
    q, k, v, out, seq_len, scale, rows: tl.constexpr, keys: tl.constexpr, dim: tl.constexpr, stages: tl.constexpr
):
    """Causal attention of one head and `rows` queries, over `keys` keys at a time."""
    first = tl.program_id(0) * rows
    base = tl.program_id(1) * seq_len * dim
    row, at, column = first + tl.arange(0, rows), tl.arange(0, keys), tl.arange(0, dim)
    query = tl.load(q + base + row[:, None] * dim + column[None, :], mask=row[:, None] < seq_len, other=0.0)
    top = tl.full((rows,), float("-inf"), tl.float32)
    norm = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, dim), tl.float32)
    for start in tl.range(0, tl.minimum(seq_len, first + rows), keys, num_stages=stages):
        key = start + at
        inside = key < seq_len
        keys_t = tl.load(k + base + key[None, :] * dim + column[:, None], mask=inside[None, :], other=0.0)
        logits = tl.dot(query, keys_t) * (scale * 1.4426950408889634)
        logits = tl.where((key[None, :] <= row[:, None]) & inside[None, :], logits, float("-inf"))
        high = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - high[:, None])
        shrink = tl.exp2(top - high)
        values = tl.load(v + base + key[:, None] * dim + column[None, :], mask=inside[:, None], other=0.0)
        norm = norm * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None])
        top = high
    place = out + base + row[:, None] * dim + column[None, :]
    inverse = 1 / norm
    tl.store(place, (total * inverse[:, None]).to(out.dtype.element_ty), mask=row[:, None] < seq_len)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("dtype, instruction", [(torch.float16, 16), (torch.bfloat16, 32)])
def test_attention(device, dtype, instruction, stages):
    q, k, v = (torch.randn(2, 150, 64).to(dtype) for _ in range(3))
    out = torch.empty_like(q)
    attention_kernel[(3, 2)](
        q, k, v, out, 150, 0.125, 64, 32, 64, stages, num_warps=4, matrix_instr_nonkdim=instruction
    )
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3 if dtype == torch.float16 else 1.6e-2)


def test_attention_that_spills_registers(device):
    q, k, v = (torch.randn(1, 160, 128).bfloat16() for _ in range(3))
    out = torch.empty_like(q)
    compiled = attention_kernel[(2, 1)](
        q, k, v, out, 160, 0.09, 128, 128, 128, 1, num_warps=4, matrix_instr_nonkdim=16, waves_per_eu=2
    )
    assert "scratch_load" in compiled.asm["amdgcn"]
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=0.09
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1.6e-2)


@triton.jit
def decode_kernel(
    q, cache, table, seq_lens, out, scale, width, heads: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr
):
    """One query token of `heads` heads that share a head of K and V, over a paged cache [pages, 2, page_size, dim]."""
    request = tl.program_id(0)
    head, column, at = tl.arange(0, heads), tl.arange(0, dim), tl.arange(0, page_size)
    query = tl.load(q + (request * heads + head)[:, None] * dim + column[None, :])
    seq_len = tl.load(seq_lens + request)
    top = tl.full((heads,), float("-inf"), tl.float32)
    norm = tl.zeros((heads,), tl.float32)
    total = tl.zeros((heads, dim), tl.float32)
    for page in range(0, tl.cdiv(seq_len, page_size)):
        base = tl.load(table + request * width + page).to(tl.int64) * 2 * page_size * dim
        inside = page * page_size + at < seq_len
        keys_t = tl.load(cache + base + at[None, :] * dim + column[:, None], mask=inside[None, :], other=0.0)
        logits = tl.dot(query, keys_t.to(query.dtype)) * scale
        logits = tl.where(inside[None, :], logits, float("-inf"))
        high = tl.maximum(top, tl.max(logits, 1))
        weights, shrink = tl.exp(logits - high[:, None]), tl.exp(top - high)
        place = base + page_size * dim + at[:, None] * dim + column[None, :]
        values = tl.load(cache + place, mask=inside[:, None], other=0.0).to(query.dtype)
        norm = norm * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(query.dtype), values)
        top = high
    tl.store(out + (request * heads + head)[:, None] * dim + column[None, :], total / norm[:, None])


@pytest.mark.parametrize("dtype", [torch.float16, "fp8"])
def test_paged_decode(device, dtype):
    dtype = FP8[device.arch] if dtype == "fp8" else dtype
    q, cache = torch.randn(2, 16, 64).half(), torch.randn(12, 2, 16, 64).to(dtype)
    table, seq_lens = torch.randperm(12).view(2, 6).int(), torch.tensor([37, 96], dtype=torch.int32)
    out = torch.zeros(2, 16, 64)
    decode_kernel[(2,)](q, cache, table, seq_lens, out, 0.125, 6, 16, 64, 16)
    for request, seq_len in enumerate(seq_lens.tolist()):
        k, v = cache[table[request].long()].to(torch.float64).transpose(0, 1).reshape(2, -1, 64)[:, :seq_len]
        exact = (q[request].double() @ k.T * 0.125).softmax(-1) @ v
        torch.testing.assert_close(out[request].double(), exact, rtol=0, atol=1e-3)


@triton.jit
def quantise_kernel(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_fp8(device, dtype):
    if LIMITED and dtype != FP8[device.arch]:
        pytest.skip(f"triton {triton.__version__}")
    x = torch.cat([torch.randn(900), torch.randn(100) * 2.0**-8, torch.linspace(-100, 100, 24)])
    out = torch.zeros(1024, dtype=dtype)
    quantise_kernel[(1,)](x, out, 1024)
    assert torch.equal(out.view(torch.uint8), x.to(dtype).view(torch.uint8))
