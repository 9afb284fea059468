"""What an `out` may be: any view whose elements are apart from each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.check import _like_out

CPU = torch.device("cpu")


@pytest.mark.parametrize("strides", [(0, 4, 1), (8, 8, 1), (1, 8, 2), (8, 3, 1), (7, 4, 1), (8, 4, 0), (3, 4, 1)])
def test_an_out_whose_rows_overlap_is_refused(strides):
    out = torch.zeros(64).as_strided((3, 2, 4), strides)
    with pytest.raises(ValueError, match=r"out has strides \[.*; its rows share memory or lie among each other"):
        _like_out(out, (3, 2, 4), out.dtype, CPU)


@given(
    shape=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    order=st.permutations(range(3)),
    starts=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_every_cut_of_a_dense_tensor_in_any_order_is_an_out(shape, order, starts, steps):
    out = torch.zeros(shape).permute(order)[tuple(map(slice, starts, (None,) * 3, steps))]
    _like_out(out, tuple(out.shape), out.dtype, CPU)


def test_strides_of_nothing_and_of_dimensions_of_one_say_nothing():
    for shape, strides in (
        ((0, 2, 4), (0, 0, 1)),
        ((1, 2, 4), (0, 4, 1)),
        ((3, 1, 4), (4, 4, 1)),
        ((1, 1, 1), (0, 0, 0)),
    ):
        out = torch.zeros(64).as_strided(shape, strides)
        _like_out(out, shape, out.dtype, CPU)
