"""`validate`: whatever the builders and padding make passes, and each way to spoil it is named with its values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases

from portable import Batch
from portable.padding import pad, unpad
from portable.validate import validate


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def step(**changes):
    """A decode of 9 tokens and a first chunk of 2, on pages of 4, and a row and a token of padding."""
    table = [[5, 0, 3], [7, 1, 1]]
    batch = pad(Batch.from_lens([1, 2], [9, 2], block_table=table, page_size=4, is_prefilling=[False, True]), 3, 4)
    return replace(batch, **changes)


@given(cases(), st.integers(0, 2), st.booleans())
def test_what_builders_make_is_valid(case, more, with_mask):
    causal = torch.ones(len(case.query_lens), dtype=torch.bool) if with_mask else True
    batch = case.batch(causal=causal)
    padded = pad(batch, batch.num_reqs + more, batch.num_tokens + more)
    for made in (batch, padded, unpad(padded), Batch.from_lens(case.query_lens, case.seq_lens)):
        validate(made)
        validate(made, sync=True)
        validate(made, sync=True, num_pages=case.num_pages)


def test_a_step_of_another_sequence_may_have_fewer_keys_than_queries():
    """Encoder-decoder: the queries are not among the keys."""
    crossed = step(seq_lens=int32(3, 0, 0), host_seq_lens=np.array([3, 0, 0], np.int32), slot_mapping=None)
    with pytest.raises(ValueError, match="row 1: seq_len 0 is less than query_len 2"):
        validate(crossed)
    validate(replace(crossed, self_attention=False), sync=True, num_pages=8)


def test_bounds_may_lie_above_the_device_but_not_below():
    host = np.array([12, 2, 0], np.int32)
    loose = step(host_seq_lens=host, exact=False, max_seq_len=12)
    validate(loose, sync=True)
    with pytest.raises(ValueError, match="row 0: seq_len is 9 on the device and 12 on the host"):
        validate(replace(loose, exact=True), sync=True)
    validate(replace(loose, exact=True))
    with pytest.raises(ValueError, match="row 1: seq_len 3 on the device is above its bound 2 on the host"):
        validate(replace(loose, seq_lens=int32(9, 3, 0)), sync=True)
    with pytest.raises(ValueError, match="row 1: seq_len 1 on the device is less than 2"):
        validate(replace(loose, seq_lens=int32(9, 1, 0)), sync=True)


def host(*values, dtype=np.int32):
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(query_lens=host(1, 2, 0, dtype=np.int64)), "query_lens has dtype int64; it must be int32"),
        (dict(host_seq_lens=host(9, 2)), "query_lens has 3 rows and seq_lens 2"),
        (dict(query_lens=host(1, -2, 0)), r"query_lens\[1\] is -2"),
        (dict(host_seq_lens=host(9, 1, 0)), "row 1: seq_len 1 is less than query_len 2"),
        (dict(host_cu_seqlens_q=host(0, 1, 3)), r"host_cu_seqlens_q has shape \[3\]; it must be \[4\]"),
        (dict(host_cu_seqlens_q=host(0, 1, 2, 3)), r"row 2: host_cu_seqlens_q\[2\] is 2; .* sum to 3"),
        (dict(num_reqs=4), "num_reqs is 4; the batch has 3 rows"),
        (dict(num_reqs=1), "row 1: query_len 2 in padding, which starts at num_reqs 1"),
        (dict(num_tokens=4), "num_tokens is 4; query_lens sum to 3"),
        (dict(padded_tokens=2), "padded_tokens is 2, below num_tokens 3"),
        (dict(max_query_len=1), "row 1: query_len 2 is above max_query_len 1"),
        (dict(max_seq_len=8), "row 0: seq_len 9 is above max_seq_len 8"),
        (dict(is_prefilling=host(1, dtype=bool)), r"is_prefilling has shape \[1\]; it must be \[3\]"),
        (dict(page_size=0), "page_size is 0"),
        (dict(page_size=2), "row 0: seq_len 9 needs 5 pages of 2 tokens, but block_table is 3 wide"),
        (dict(cu_seqlens_q=int32(0, 1, 3)), r"cu_seqlens_q has shape \[3\]; it must be \[4\]"),
        (dict(cu_seqlens_q=int32(0, 1, 3, 3).to("meta")), "cu_seqlens_q is on meta; seq_lens is on cpu"),
        (dict(seq_lens=torch.tensor([9, 2, 0])), "seq_lens has dtype torch.int64; it must be torch.int32"),
        (dict(block_table=int32([5, 0, 3], [7, 1, 1])), r"block_table has shape \[2, 3\]; it must be \[3, any\]"),
        (dict(slot_mapping=torch.zeros(3, dtype=torch.int64)), r"slot_mapping has shape \[3\]; it must be \[4\]"),
        (dict(causal=torch.ones(2).bool()), r"causal has shape \[2\]; it must be \[3\]"),
    ],
)
def test_what_the_host_can_see_is_refused_without_reading_the_device(changes, message, no_sync):
    spoilt = step(**changes)
    with no_sync(), pytest.raises(ValueError, match=message):
        validate(spoilt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cu_seqlens_q=int32(0, 2, 3, 3)), r"row 1: cu_seqlens_q\[1\] is 2 on the device and 1 on the host"),
        (dict(seq_lens=int32(8, 2, 0)), "row 0: seq_len is 8 on the device and 9 on the host"),
        (dict(block_table=int32([5, 0, 3], [8, 1, 1], [0, 0, 0])), r"row 1: block_table\[1, 0\] is 8; .* pages 0 to 7"),
        (
            dict(slot_mapping=torch.tensor([12, -2, 29, -1])),
            r"row 1: slot_mapping\[1\] is -2; .* slots 0 to 31, and -1",
        ),
        (dict(slot_mapping=torch.tensor([32, 28, 29, -1])), r"row 0: slot_mapping\[0\] is 32; .* slots 0 to 31"),
        (dict(slot_mapping=torch.tensor([12, 28, 29, 32])), r"row 2: slot_mapping\[3\] is 32"),
        (
            dict(slot_mapping=torch.tensor([12, 28, 12, -1])),
            r"row 1: slot_mapping\[2\] is 12, and so is slot_mapping\[0\] of row 0",
        ),
        (dict(slot_mapping=torch.tensor([12, 28, 29, 2])), r"slot_mapping\[3\] is 2: padding would write into a page"),
    ],
)
def test_what_only_the_device_shows_is_refused_with_sync(changes, message):
    spoilt = step(**changes)
    validate(spoilt)
    with pytest.raises(ValueError, match=message):
        validate(spoilt, sync=True, num_pages=8)


def test_what_no_token_reaches_may_be_anything():
    validate(step(block_table=int32([5, 0, 3], [7, -9, 99], [-1, -1, -1])), sync=True, num_pages=8)
    validate(step(slot_mapping=torch.tensor([-1, -1, 29, -1])), sync=True, num_pages=8)  # others write those
    validate(step(slot_mapping=torch.tensor([12, 28, 29, 24])), sync=True, num_pages=8)  # a spare page takes padding


def test_without_the_size_of_the_cache_ids_are_open_above():
    far = step(block_table=int32([5, 0, 3], [2**31 - 1, 1, 1], [0, 0, 0]))
    validate(far, sync=True)
    with pytest.raises(ValueError, match=r"block_table\[0, 2\] is -3; the cache has pages from 0 on"):
        validate(step(block_table=int32([5, 0, -3], [7, 1, 1], [0, 0, 0])), sync=True)


def test_the_host_check_does_not_read_the_device(no_sync):
    batch = step(causal=torch.ones(3).bool())
    with no_sync():
        validate(batch)
        far = [tensor.to("meta") for tensor in (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)]
        twins = {"host_cu_seqlens_q": batch.host_cu_seqlens_q, "host_seq_lens": batch.host_seq_lens}
        validate(Batch.from_tensors(*far, batch.slot_mapping.to("meta"), page_size=4, **twins))
