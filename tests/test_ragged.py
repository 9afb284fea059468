"""Laws of the ragged primitives, on numpy and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.ragged import cdiv, cu_from_lens, next_power_of_2, ragged_arange, round_down, round_up

lens = st.lists(st.integers(0, 50), max_size=20)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_brackets_its_argument(a, b):
    assert round_down(a, b) <= a <= round_up(a, b)
    assert round_up(a, b) - round_down(a, b) in (0, b)
    assert cdiv(a, b) * b == round_up(a, b)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=8), st.sampled_from([1, 2, 3, 16, 2**30, 2**31 - 1]))
def test_arrays_round_as_their_elements_do_up_to_the_end_of_int32(values, b):
    right = [-(-a // b) for a in values]
    for array in (np.array(values, np.int32), np.array(values, np.uint32), torch.tensor(values, dtype=torch.int32)):
        before = array.tolist()
        assert cdiv(array, b).tolist() == right
        assert round_down(array, b).tolist() == [a // b * b for a in values]
        assert cdiv(array, b).dtype == array.dtype and array.tolist() == before
    assert round_up(np.array(values, np.int64), b).tolist() == [n * b for n in right]


def test_rounding_refuses_what_has_no_answer():
    for bad in ((-1, 4), (4, 0), (4, -2)):
        for function in (cdiv, round_up, round_down):
            with pytest.raises(ValueError, match=str(min(bad))):
                function(*bad)


@given(st.integers(0, 2**40))
def test_next_power_of_2_is_the_least(n):
    p = next_power_of_2(n)
    assert p & (p - 1) == 0 and p >= n and (p == 1 or p // 2 < n)


@given(lens)
def test_cu_is_the_exclusive_sum_in_int32_on_both_libraries(values):
    cu = cu_from_lens(values)
    assert cu.dtype == np.int32 and cu[0] == 0 and np.diff(cu).tolist() == values
    twin = cu_from_lens(torch.tensor(values, dtype=torch.int64))
    assert twin.dtype == torch.int32 and twin.tolist() == cu.tolist()


@given(lens)
def test_ragged_arange_equals_the_loop(values):
    segment, position = ragged_arange(values)
    expected = [(i, j) for i, n in enumerate(values) for j in range(n)]
    assert list(zip(segment.tolist(), position.tolist(), strict=True)) == expected
    assert segment.dtype == position.dtype == np.int32


def test_ragged_arange_of_the_checklist():
    segment, position = ragged_arange([2, 4, 2])
    assert position.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    assert segment.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
