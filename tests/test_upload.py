"""Uploads: one block, one copy, aligned; nothing read back."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from portable import Batch
from portable.upload import ALIGNMENT, stage, upload

DTYPES = (np.int32, np.int64, np.bool_, np.float32, np.uint8)
arrays = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from([(0,), (1,), (3,), (17,), (2, 3), (0, 4), (3, 0)])).map(
        lambda made: (np.arange(int(np.prod(made[1]))) % 2 + 5).astype(made[0]).reshape(made[1])
    ),
    max_size=6,
)


@given(arrays)
def test_on_the_cpu_the_arrays_are_the_tensors(given_arrays):
    for array, tensor in zip(given_arrays, upload(given_arrays, "cpu"), strict=True):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert not array.size or tensor.data_ptr() == array.ctypes.data


@given(arrays)
def test_a_staging_block_holds_every_array_aligned_and_apart(given_arrays):
    before = [array.tobytes() for array in given_arrays]
    block, places = stage(given_arrays, pin_memory=False)
    assert block.dtype == torch.uint8 and len(places) == len(given_arrays)
    end = 0
    for array, start in zip(given_arrays, places, strict=True):
        assert start % ALIGNMENT == 0 and start >= end
        end = start + array.nbytes
        assert block[start:end].numpy().tobytes() == array.tobytes()
    assert end <= block.numel() < end + ALIGNMENT
    assert [array.tobytes() for array in given_arrays] == before


def test_a_staging_block_takes_arrays_of_any_strides():
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    views = [table[:, ::2], table.T, table[::-1]]
    block, places = stage(views, pin_memory=False)
    for view, start in zip(views, places, strict=True):
        assert block[start : start + view.nbytes].numpy().tobytes() == view.tobytes()


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_all_arrays_travel_in_one_copy_of_one_pinned_block(unpinned):
    given_arrays = [np.zeros(shape, dtype) for shape in ((5,), (2, 3), (0,), (0, 4)) for dtype in DTYPES]
    with Calls() as calls:
        tensors = upload(given_arrays, "meta")
    assert unpinned == [True] and calls.names["_to_copy"] == 1 and not calls.names["copy_"]
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
    for array, tensor in zip(given_arrays, tensors, strict=True):
        assert tensor.shape == array.shape and tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
        assert tensor.is_contiguous()


def test_a_batch_is_one_upload(unpinned):
    table = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    with Calls() as calls:
        batches = (
            Batch.from_lens([1, 4], [5, 9], block_table=np.zeros((2, 3), np.int32), page_size=4, device="meta"),
            Batch.from_lens([1, 4], [5, 9], block_table=table, page_size=4),
            Batch.from_token_table(
                table, torch.zeros(2, dtype=torch.int64, device="meta"), [1, 1], [3, 2], page_size=2
            ),
        )
    assert len(unpinned) == len(batches)
    assert calls.names["_local_scalar_dense"] == 0
    for batch in batches:
        assert {t.device.type for t in (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)} == {"meta"}
        assert batch.slot_mapping.dtype == torch.int64
        assert {batch.cu_seqlens_q.dtype, batch.seq_lens.dtype, batch.block_table.dtype} == {torch.int32}


@pytest.mark.device
def test_a_far_device_gets_the_values_without_a_wait():
    given_arrays = [np.arange(7, dtype=np.int32), np.arange(6, dtype=np.int64).reshape(2, 3), np.array([True, False])]
    table = torch.tensor([[7, 9], [4, 2]], dtype=torch.int32)
    far = table.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tensors = upload(given_arrays, "cuda")
        batch = Batch.from_lens([2, 1], [6, 3], block_table=far, page_size=4)
        csr = batch.csr()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in given_arrays]
    near = Batch.from_lens([2, 1], [6, 3], block_table=table, page_size=4)
    assert batch.slot_mapping.tolist() == near.slot_mapping.tolist()
    assert csr.indices.tolist() == near.csr().indices.tolist()


@pytest.mark.device
def test_a_step_in_flight_keeps_its_numbers():
    """The copies of many steps are queued behind a busy stream; each still brings its own step's numbers."""
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    steps = [upload([np.full(1000, step)], "cuda")[0] for step in range(50)]
    assert [int(step.min()) == int(step.max()) == i for i, step in enumerate(steps)] == [True] * 50
