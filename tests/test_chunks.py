"""Chunk plans against the loop over tokens, and the public cases of empty and uneven chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable.chunks import aligned_chunks, chunk_context
from portable.shards import shard_lens

contexts = st.lists(st.one_of(st.just(0), st.integers(0, 100)), max_size=8)


@given(contexts, st.integers(1, 8), st.integers(0, 60))
def test_every_context_token_is_in_one_chunk_that_fits(lens, page_size, more):
    workspace = page_size + more
    chunks = chunk_context(lens, workspace, page_size)
    found = []
    for chunk in chunks:
        rows = chunk.requests.tolist()
        assert len(rows) == len(chunk.starts) == len(chunk.lens)
        assert 0 < chunk.num_tokens <= workspace and (chunk.lens > 0).all() and (chunk.starts % page_size == 0).all()
        assert not chunk.starts[1:].any()  # only the first may be a continuation
        assert rows == sorted(set(rows)) and chunk.requests.dtype == np.int32
        assert {chunk.starts.dtype, chunk.lens.dtype, chunk.cu_seqlens.dtype} == {np.dtype(np.int32)}
        for row, start, n in zip(rows, chunk.starts, chunk.lens, strict=True):
            found += [(row, token) for token in range(start, start + n)]
    assert found == [(row, token) for row, n in enumerate(lens) for token in range(n)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 12))
def test_chunks_are_as_full_as_whole_pages_allow(lens, page_size, pages):
    workspace = pages * page_size
    chunks = chunk_context(lens, workspace, page_size)
    for chunk in chunks[:-1]:
        assert (-(-chunk.lens // page_size)).sum() == pages
    assert len(chunks) == -(-sum(-(-n // page_size) for n in lens) // pages)


@given(contexts, st.integers(1, 8), st.integers(0, 60))
def test_where_a_whole_request_is_cut_depends_on_its_own_length(lens, page_size, more):
    workspace, found = page_size + more, {}
    chunks = chunk_context(lens, workspace, page_size, whole=True)
    for chunk in chunks:
        assert 0 < chunk.num_tokens <= workspace and not chunk.starts[1:].any() and (chunk.lens > 0).all()
        for row, start, n in zip(chunk.requests.tolist(), chunk.starts.tolist(), chunk.lens.tolist(), strict=True):
            found.setdefault(row, []).append((start, n))
    for row, n in enumerate(lens):
        alone = chunk_context([n], workspace, page_size)
        assert found.get(row, []) == [(int(chunk.starts[0]), int(chunk.lens[0])) for chunk in alone]


def test_decodes_and_requests_without_a_context_make_no_chunk():
    # beside a decode of 5,000 tokens, dividing by the longest made 20 chunks of these, 18 of them empty
    assert [chunk.lens.tolist() for chunk in chunk_context([300, 0, 50], 512, 16)] == [[300, 50]]
    assert chunk_context([0, 0], 512, 16) == [] and chunk_context([], 512, 16) == []
    many = chunk_context([8] * 64, 512, 16)  # divided by 64, the workspace would hold no page of each
    assert [chunk.num_tokens for chunk in many] == [256, 256]


@given(contexts, st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4))
def test_chunks_of_a_context_shared_by_ranks_are_whole_pages_of_each(lens, world, page_size, blocks, pages):
    """A page of the whole is one of each rank: a rank's rows of a chunk fit its budget, from a page boundary on."""
    interleave = page_size // blocks or 1
    interleave = interleave if page_size % interleave == 0 else 1
    for chunk in chunk_context(lens, pages * page_size * world, page_size * world):
        for rank in range(world):
            first, last = (shard_lens(at, world, rank, interleave) for at in (chunk.starts, chunk.starts + chunk.lens))
            assert not (first % page_size).any() and (last - first).sum() <= pages * page_size


@pytest.mark.parametrize(("workspace", "page_size", "message"), [(15, 16, "workspace is 15"), (4, 0, "page_size is 0")])
def test_a_workspace_without_a_page_is_refused(workspace, page_size, message):
    with pytest.raises(ValueError, match=message):
        chunk_context([3], workspace, page_size)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.integers(1, 9))
def test_aligned_chunks_equal_the_loop(rows, chunk):
    found = aligned_chunks([c for c, _ in rows], [q for _, q in rows], chunk)
    lens, request, last = [], [], []
    for row, (context, new) in enumerate(rows):
        before = None
        for position in range(context, context + new):
            if position // chunk != before:
                lens.append(0)
                request.append(row)
                before = position // chunk
            lens[-1] += 1
        last.append(len(lens) - 1 if new else -1)
    assert found.cu_seqlens.tolist() == np.cumsum([0, *lens]).tolist()
    assert found.request.tolist() == request and found.last.tolist() == last
    assert {found.cu_seqlens.dtype, found.request.dtype, found.last.dtype} == {np.dtype(np.int32)}


def test_aligned_chunks_name_what_does_not_fit():
    with pytest.raises(ValueError, match="chunk is 0"):
        aligned_chunks([1], [1], 0)
    with pytest.raises(ValueError, match="context_lens has 1 rows and query_lens 2"):
        aligned_chunks([1], [1, 2], 4)
