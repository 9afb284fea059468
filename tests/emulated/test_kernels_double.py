"""Triton kernels on float64 and 16-bit integers, whose code uses instructions that attention does not."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from portable.platform.emulated import activate  # noqa: E402

ARCHS = ["gfx942", "gfx950"]


@triton.jit
def double_kernel(x, y, quotient, root, sine, n: tl.constexpr):
    at = tl.arange(0, n)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(quotient + at, a / b)
    tl.store(root + at, tl.sqrt(tl.abs(a)))
    tl.store(sine + at, tl.sin(a))


@pytest.mark.parametrize("arch", ARCHS)
def test_division_roots_and_sines_of_float64(arch):
    torch.manual_seed(0)
    x, y = (torch.randn(64, dtype=torch.float64) * 10.0 ** torch.randint(-300, 300, (64,)).double() for _ in range(2))
    x[:4] = torch.tensor([1e22, -0.0, 3.0, 6381956970095103 * 2.0**797], dtype=torch.float64)
    quotient, root, sine = (torch.empty(64, dtype=torch.float64) for _ in range(3))
    with activate(arch):
        # Fused, the reduction of large angles counts the low part of a product twice: the compiler's fault, seen by
        # following its code in fractions.
        double_kernel[(1,)](x, y, quotient, root, sine, n=64, num_warps=1, enable_fp_fusion=False)
    assert torch.equal(quotient, x / y)
    torch.testing.assert_close(root, x.abs().sqrt(), rtol=1e-15, atol=0)
    expected = torch.tensor([math.sin(number) for number in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(sine, expected, rtol=1e-14, atol=1e-300)


@triton.jit
def short_kernel(x, y, z, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at) * tl.load(y + at) + tl.load(z + at))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
def test_multiply_add_of_short_integers_wraps(arch, dtype):
    x, y, z = (torch.randint(-(1 << 15), 1 << 15, (64,)).to(dtype) for _ in range(3))
    out = torch.empty(64, dtype=dtype)
    with activate(arch):
        short_kernel[(1,)](x, y, z, out, n=64, num_warps=1)
    assert torch.equal(out, (x.long() * y.long() + z.long()).to(dtype))
