"""The guards of conftest.py bite."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uninitialised_floats_are_nan(dtype):
    like = torch.zeros(5, dtype=dtype)
    for made in (torch.empty(5, dtype=dtype), torch.empty_like(like), like.new_empty(5)):
        assert made.float().isnan().all()


def test_uninitialised_integers_are_far_outside_of_any_table():
    assert (torch.empty(5, dtype=torch.int32) == 2**31 - 1).all()


@pytest.mark.parametrize(
    "sync",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: bool(t),
        lambda t: int(t),
        lambda t: float(t),
        lambda t: [0, 0][t],
    ],
)
def test_a_sync_is_caught_inside_the_guard_only(no_sync, sync):
    tensor = torch.ones(1, dtype=torch.int64)
    sync(tensor)
    with no_sync(), pytest.raises(AssertionError, match="waits for the device"):
        sync(tensor)
    sync(tensor)


def test_tensor_work_passes_the_guard(no_sync):
    with no_sync():
        torch.ones(3).add_(1).to(torch.bfloat16).view(-1, 1).index_select(
            0, torch.tensor([2])
        ).contiguous().shape.numel()


@hypothesis.given(st.integers())
def test_hypothesis_runs_beside_the_guard(no_sync, number):
    with no_sync():
        assert isinstance(number, int)
