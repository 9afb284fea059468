"""Buffers: addresses that never move, padding that nothing of an earlier step shows through."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.buffers import Buffer, Buffers


@given(st.data(), st.sampled_from([(8,), (6, 5), (4, 3, 2)]), st.sampled_from([0, -1, 7]))
def test_a_stage_shows_x_and_padding_at_the_same_address(data, shape, pad):
    buffer = Buffer(shape, torch.int64, "cpu", pad=pad)
    address = buffer.tensor.data_ptr()
    assert (buffer.tensor == pad).all()
    for _ in range(5):
        sizes = [data.draw(st.integers(0, most)) for most in shape]
        n = data.draw(st.one_of(st.none(), st.integers(sizes[0], shape[0])))
        x = torch.randint(100, 200, sizes)
        before = x.clone()
        view = buffer.stage(x, n)
        n = sizes[0] if n is None else n
        right = np.full((n, *shape[1:]), pad)
        right[tuple(slice(0, size) for size in sizes)] = x.numpy()
        assert view.tolist() == right.tolist()
        assert buffer.tensor[:n].tolist() == right.tolist() and torch.equal(x, before)
        assert buffer.tensor.data_ptr() == address
        assert n == 0 or view.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float32])
def test_a_hundred_stages_move_nothing(dtype):
    buffer = Buffer((16, 4), dtype, "cpu")
    address = buffer.tensor.data_ptr()
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows, width = int(rng.integers(0, 17)), int(rng.integers(0, 5))
        view = buffer.stage(torch.ones(rows, width, dtype=dtype), 16)
        assert view.data_ptr() == address == buffer.tensor.data_ptr()
        assert view.dtype == dtype and int(view.sum()) == rows * width


def test_a_buffer_is_padded_from_its_creation():
    assert Buffer((3,), torch.int32, "cpu", pad=-1).tensor.tolist() == [-1] * 3
    assert torch.isneginf(Buffer((2, 2), torch.float32, "cpu", pad=float("-inf")).tensor).all()


def test_a_stale_wide_row_does_not_show_behind_a_narrow_one():
    table = Buffer((3, 4), torch.int32, "cpu", pad=0)
    table.stage(torch.full((3, 4), 9, dtype=torch.int32))
    view = table.stage(torch.tensor([[5, 6]], dtype=torch.int32), 2)
    assert view.tolist() == [[5, 6, 0, 0], [0, 0, 0, 0]]


def test_a_part_of_a_buffer_may_be_staged_into_it_again():
    buffer = Buffer((2, 3), torch.int32, "cpu")
    view = buffer.stage(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    assert buffer.stage(view[:1, :2], 2).tolist() == [[1, 2, 0], [0, 0, 0]]


def test_replays_of_a_captured_size_refresh_the_address_that_was_captured():
    """Lengths [1, 1, 1, 1] captured, then [5, 9, 2] and a pad, then [3, 3, 3, 3]: what a replay would read."""
    lens, table = Buffer((4,), torch.int32, "cpu"), Buffer((4, 3), torch.int32, "cpu")
    captured = lens.stage(torch.ones(4, dtype=torch.int32)), table.stage(torch.full((4, 3), 8, dtype=torch.int32))
    lens.stage(torch.tensor([5, 9, 2], dtype=torch.int32), 4)
    table.stage(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32), 4)
    assert captured[0].tolist() == [5, 9, 2, 0]
    assert captured[1].tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 0], [0, 0, 0]]
    lens.stage(torch.full((4,), 3, dtype=torch.int32))
    assert captured[0].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("x", "n", "message"),
    [
        (torch.zeros(5, 3, dtype=torch.int32), None, r"block_table has shape \[4, 3\]; x of shape \[5, 3\]"),
        (torch.zeros(4, 4, dtype=torch.int32), None, r"block_table has shape \[4, 3\]; x of shape \[4, 4\]"),
        (torch.zeros(4, dtype=torch.int32), None, r"block_table has shape \[4, 3\]; x of shape \[4\]"),
        (torch.zeros((), dtype=torch.int32), None, r"block_table has shape \[4, 3\]; x of shape \[\]"),
        (torch.zeros(2, 3, dtype=torch.int64), None, r"block_table holds torch.int32; x is torch.int64"),
        (
            torch.zeros(2, 3, dtype=torch.int32),
            1,
            r"n is 1; it must lie between the 2 rows of x and the 4 of block_table",
        ),
        (torch.zeros(2, 3, dtype=torch.int32), 5, r"n is 5; .* the 4 of block_table"),
        (torch.zeros(2, 3, dtype=torch.int32, device="meta"), None, r"block_table is on cpu; x is on meta"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(x, n, message):
    buffer = Buffer((4, 3), torch.int32, "cpu", pad=-1, name="block_table")
    buffer.stage(torch.ones(4, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        buffer.stage(x, n)
    assert (buffer.tensor == 1).all()


def test_buffers_of_two_groups_are_apart_and_stay():
    buffers = Buffers("cpu")
    first, second = (buffers.get("block_table", (2, 3), torch.int32, group=g) for g in (0, 1))
    first.stage(torch.ones(2, 3, dtype=torch.int32))
    second.stage(torch.full((2, 3), 2, dtype=torch.int32))
    assert (first.tensor == 1).all() and (second.tensor == 2).all()
    assert buffers.get("block_table", (2, 3), torch.int32, group=0) is first
    assert buffers.get("seq_lens", (2,), torch.int32, pad=1).tensor.tolist() == [1, 1]
    assert buffers.nbytes == 2 * 24 + 8


@pytest.mark.parametrize(
    "asked", [{"shape": (3, 3)}, {"dtype": torch.int64}, {"pad": -1}], ids=["shape", "dtype", "pad"]
)
def test_a_buffer_cannot_become_another(asked):
    buffers, made = Buffers("cpu"), {"shape": (2, 3), "dtype": torch.int32, "pad": 0}
    buffers.get("block_table", **made)
    with pytest.raises(ValueError, match=r"buffer 'block_table' of group 0 was made as .* cannot become"):
        buffers.get("block_table", **(made | asked))


def test_a_stage_does_not_read_the_device(no_sync):
    buffer, x = Buffer((4, 3), torch.int32, "cpu"), torch.ones(2, 2, dtype=torch.int32)
    with no_sync():
        buffer.stage(x, 3)
