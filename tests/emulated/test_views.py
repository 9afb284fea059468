"""A view that a kernel is given is an allocation of its own: its elements alone, and their aliases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable.platform.emulated import activate
from portable.platform.emulated.memory import MemoryFault
from portable.platform.emulated.views import extent

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def copy(x, out, offset, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + offset + at))


@triton.jit
def add_pages(k, v, out, stride, offset, size: tl.constexpr):
    page, at = tl.program_id(0), tl.arange(0, size)
    place = page.to(tl.int64) * stride + offset + at
    tl.store(out + page * size + at, tl.load(k + place) + tl.load(v + place))


@triton.jit
def write_then_add(x, y, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, at.to(tl.float32))
    tl.debug_barrier()
    tl.store(y + at, tl.load(y + at) + 100)


@triton.jit
def copy_rows(x, out, x_stride, out_stride, width: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, width)
    tl.store(out + row * out_stride + at, tl.load(x + row * x_stride + at))


@pytest.fixture(params=["gfx942", "gfx950"])
def device(request):
    with activate(request.param) as emulation:
        yield emulation


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_an_overrun_from_one_view_into_another_is_reported(device, kind):
    both = torch.randn(2, 64)
    k, v = both if kind == "torch" else torch.from_numpy(both.numpy())
    assert v.data_ptr() == k.data_ptr() + 256
    out = torch.zeros(64)
    add_pages[(1,)](k, v, out, 64, 0, size=64)
    assert torch.equal(out, both.sum(0))
    with pytest.raises(MemoryFault, match=r"^add_pages: .*read.* \(byte 256 of 'k', which has 256 bytes\).*lanes 63"):
        add_pages[(1,)](k, v, out, 64, 1, size=64)
    with pytest.raises(MemoryFault, match=r"^copy: .*read of .*byte -4 of 'x', which has 256 bytes.*lanes 0$"):
        copy[(1,)](v, out, -1, block=64)
    with pytest.raises(MemoryFault, match=r"^copy: .*write of .*byte 128 of 'out', which has 128 bytes"):
        copy[(1,)](k, out[:32], 0, block=64)


def test_arrays_are_bounded_like_tensors(device):
    k, v = np.arange(128, dtype=np.float32).reshape(2, 64)
    out = torch.zeros(64)
    copy[(1,)](torch.from_numpy(v), out, 0, block=64)
    given = device.arguments()
    addresses = [given.pointer(name, x) for name, x in (("k", k), ("v", v), ("back", v[::-1]), ("k", k))]
    assert [(each.name, each.data.size) for each in given.buffers] == [("k", 256), ("v", 256)]
    assert addresses[2] == addresses[1] + 252 and addresses[3] == addresses[0]
    assert addresses[1] - addresses[0] > 1 << 36


def test_a_view_that_begins_within_its_storage(device):
    base, out = torch.arange(256.0), torch.zeros(64)
    view = base[96:160]
    copy[(1,)](view, out, 0, block=64)
    assert torch.equal(out, view)
    with pytest.raises(MemoryFault, match="byte -4 of 'x', which has 256 bytes"):
        copy[(1,)](view, out, -1, block=64)
    device.whole = True
    copy[(1,)](view, out, 96, block=64)
    assert torch.equal(out, base[192:])
    with pytest.raises(MemoryFault, match="read at a negative offset, beyond the end of a buffer"):
        copy[(1,)](view, out, -1, block=64)
    with pytest.raises(MemoryFault, match="byte 1024 of 'x', which has 1024 bytes"):
        copy[(1,)](view, out, 97, block=64)


@pytest.mark.parametrize("axis", [0, 1])
def test_views_of_a_pool_of_pages(device, axis):
    """K and V apart, or a page of K beside its page of V; only within a page's rows may a kernel read."""
    pool = torch.randn(2, 4, 16, 8) if axis == 0 else torch.randn(4, 2, 16, 8)
    k, v = pool.unbind(axis)
    out = torch.zeros(4, 16, 8)
    add_pages[(4,)](k, v, out, k.stride(0), 0, size=128)
    assert torch.equal(out, k + v)
    message = "byte 512 of 'k', a view with rows of 512 bytes, is between them" if axis else "byte 2048 of 'k', which"
    with pytest.raises(MemoryFault, match=message):
        add_pages[(4 - axis,)](k, v, out, k.stride(0), 1, size=128)


def test_heads_of_a_packed_projection(device):
    qkv, out = torch.randn(64, 3, 16), torch.zeros(64)
    q = qkv[:, 0]
    copy[(1,)](q, out, 48, block=16)
    assert torch.equal(out[:16], q[1])
    with pytest.raises(MemoryFault, match=r"byte 64 of 'x', a view with rows of 64 bytes, is between them.*lanes 16"):
        copy[(1,)](q, out, 0, block=32)


@pytest.mark.parametrize("first, last", [(0, 64), (32, 96), (0, 128)])
def test_aliases_see_each_others_writes(device, first, last):
    base = torch.zeros(128)
    write_then_add[(1,)](base[:64], base[first:last], block=64)
    want = torch.cat([torch.arange(64.0), torch.zeros(64)])
    want[first : first + 64] += 100
    assert torch.equal(base, want)


def test_a_view_without_elements_has_no_bytes(device):
    with pytest.raises(MemoryFault, match="byte 0 of 'x', which has 0 bytes"):
        copy[(1,)](torch.zeros(64)[64:], torch.zeros(64), 0, block=64)


def test_uninitialised_bytes_are_those_of_the_view(device):
    base, out = torch.zeros(4, 64), torch.zeros(64)
    device.uninitialised(base[2:])
    copy[(1,)](base[1], out, 0, block=64)
    with pytest.raises(MemoryFault, match="read of uninitialised bytes of 'x', the first is byte 0"):
        copy[(1,)](base[2], out, 0, block=64)
    copy[(1,)](out, base[2], 0, block=64)
    copy[(1,)](base[2], out, 0, block=64)
    with pytest.raises(MemoryFault, match="read of uninitialised bytes of 'x', the first is byte 768"):
        copy[(1,)](base, out, 192, block=64)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(shapes, st.data(), st.sampled_from([1, 2, 4, 8]))
def test_an_extent_holds_exactly_the_bytes_of_the_elements(shape, data, itemsize):
    steps = [data.draw(st.integers(-12, 12)) * itemsize for _ in shape]
    before, size, rows = extent(shape, steps, itemsize)
    firsts = [sum(i * s for i, s in zip(at, steps, strict=True)) for at in np.ndindex(*shape)]
    own = {first + before + byte for first in firsts for byte in range(itemsize)}
    assert min(own) == 0 and max(own) == size - 1
    byte = np.arange(size)
    held = {int(n) for n in byte[rows.hold(byte, 1)]} if rows else set(range(size))
    assert held == own if rows else held >= own
    if rows:
        for nbytes in (2, 4, 8):
            want = [all(n + k in own for k in range(nbytes)) for n in range(size)]
            got = rows.hold(byte, nbytes).tolist()
            assert all(g <= w for g, w in zip(got, want, strict=True))
            assert [g for n, g in enumerate(got) if (n + before) % itemsize == 0 and nbytes <= itemsize] == [
                w for n, w in enumerate(want) if (n + before) % itemsize == 0 and nbytes <= itemsize
            ]


def test_views_whose_rows_interlock_are_bounded_by_what_they_span():
    assert extent((3, 2), (16, 24), 4) == (0, 60, None)
    assert extent((2, 2, 2), (100, 10, 4), 4).rows is not None


def test_the_first_workgroup_that_leaves_its_rows_is_the_one_that_is_named():
    """The last one leaves the tensor as well, in the same instruction."""
    padded = torch.zeros(8, 24)[:, :16]
    out = torch.zeros(8, 32)
    with (
        activate("gfx942"),
        pytest.raises(MemoryFault, match=r"byte 64 of 'x', a view.*workgroup \(0, 0, 0\)"),
    ):
        copy_rows[(8,)](padded, out, padded.stride(0), out.stride(0), width=32)
