"""The scheduler: pages have one owner, nothing leaks, and everyone finishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable.schedule import Chunk, Request, Scheduler

STOP = 0


def check_pages(scheduler: Scheduler) -> None:
    """Every page and row has exactly one owner, and the block table says the same as the requests."""
    owned = [page for request in scheduler.running for page in request.pages]
    assert sorted(owned + scheduler.free_pages) == list(range(scheduler.num_pages))
    rows = [request.row for request in scheduler.running]
    assert sorted(rows + scheduler.free_rows) == list(range(scheduler.max_reqs))
    for request in scheduler.running:
        assert scheduler.block_table[request.row, : len(request.pages)].tolist() == request.pages
    for request in scheduler.waiting:
        assert request.pages == [] and request.row == -1 and request.cached == 0


def check_chunks(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """A step is ordered, within its budget, once per request, and only touches tokens and pages that are there."""
    phases = [2 if chunk.start == 0 else 0 if chunk.length == 1 else 1 for chunk in chunks]
    assert phases == sorted(phases)
    assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
    prompt_tokens = 0
    for chunk in chunks:
        request = chunk.request
        assert chunk.length >= 1 and chunk.start == request.cached
        assert chunk.start + chunk.length <= min(len(request.tokens), len(request.pages) * scheduler.page_size)
        assert chunk.samples == (chunk.start + chunk.length == len(request.tokens))
        prompt_tokens += 0 if chunk.samples and chunk.start and chunk.length == 1 else chunk.length
    assert prompt_tokens <= scheduler.prefill_chunk


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Scheduler, list[tuple[int, Request]]]:
    """A pool, and requests that fit it with the step at which each arrives."""
    page_size = draw(st.integers(1, 5))
    num_pages = draw(st.integers(1, 12))
    capacity = page_size * num_pages
    scheduler = Scheduler(
        num_pages=num_pages,
        page_size=page_size,
        prefill_chunk=draw(st.integers(1, 9)),
        max_reqs=draw(st.integers(1, 4)),
        stop_ids=(STOP,),
    )
    arrivals = []
    for index in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, capacity))
        new = draw(st.integers(1, capacity - length + 1))
        arrivals.append((draw(st.integers(0, 20)), Request(index, [7] * length, new)))
    return scheduler, sorted(arrivals, key=lambda arrival: arrival[0])


@settings(max_examples=300, deadline=None)
@given(workloads(), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1]))
def test_every_request_finishes_and_every_page_has_one_owner(workload, random, stop_chance):
    scheduler, arrivals = workload
    requests = [request for _, request in arrivals]
    # Between two tokens of the oldest request lie at most its own tokens, one a step, so this bound is generous.
    limit = 21 + sum((len(r.prompt) + r.max_new_tokens + 1) * (r.max_new_tokens + 1) for r in requests)
    for step in range(limit):
        while arrivals and arrivals[0][0] <= step:
            scheduler.add(arrivals.pop(0)[1])
        chunks = scheduler.step()
        check_chunks(scheduler, chunks)
        check_pages(scheduler)
        assert chunks or scheduler.done
        sampled = [STOP if random.random() < stop_chance else 9 for chunk in chunks if chunk.samples]
        before = {id(request): len(request.tokens) for request in requests}
        for request in scheduler.commit(chunks, sampled):
            assert len(request.tokens) == before[id(request)] + 1
        check_pages(scheduler)
        if scheduler.done and not arrivals:
            break
    assert scheduler.done and sorted(scheduler.free_pages) == list(range(scheduler.num_pages))
    for request in requests:
        assert request.tokens[: len(request.prompt)] == list(request.prompt)
        assert STOP not in request.generated[:-1]
        if request.finish_reason == "length":
            assert len(request.generated) == request.max_new_tokens
        else:
            assert request.finish_reason == "stop" and request.generated[-1] == STOP


@settings(max_examples=100, deadline=None)
@given(workloads())
def test_requests_start_in_the_order_of_arrival(workload):
    scheduler, arrivals = workload
    for _, request in arrivals:
        scheduler.add(request)
    started: list[int] = []
    while chunks := scheduler.step():
        for chunk in chunks:
            if chunk.request.index not in started:
                started.append(chunk.request.index)
        scheduler.commit(chunks, [9 for chunk in chunks if chunk.samples])
    assert started == [request.index for _, request in arrivals]


@settings(max_examples=100, deadline=None)
@given(workloads(), st.integers(0, 15))
def test_an_interrupt_takes_every_page_back_and_keeps_the_tokens(workload, steps):
    scheduler, arrivals = workload
    requests = [request for _, request in arrivals]
    for request in requests:
        scheduler.add(request)
    for _ in range(steps):
        chunks = scheduler.step()
        scheduler.commit(chunks, [9 for chunk in chunks if chunk.samples])
    tokens = [list(request.tokens) for request in requests]
    scheduler.interrupt()
    check_pages(scheduler)
    assert scheduler.done and len(scheduler.free_pages) == scheduler.num_pages
    assert tokens == [request.tokens for request in requests]
    assert all(request.finish_reason for request in requests)


def test_the_newest_request_is_preempted_and_keeps_its_tokens():
    scheduler = Scheduler(num_pages=4, page_size=2, prefill_chunk=16, max_reqs=2)
    old, new, last = Request(0, [1, 2, 3], 4), Request(1, [4, 5, 6], 4), Request(2, [7], 1)
    for request in (old, new, last):
        scheduler.add(request)
    scheduler.commit(scheduler.step(), [9, 9])
    scheduler.commit(scheduler.step(), [9, 9])  # both hold 2 full pages now, and each needs a third
    chunks = scheduler.step()
    assert [chunk.request for chunk in chunks] == [old] and scheduler.preemptions == 1
    assert list(scheduler.waiting) == [new, last] and new.generated == [9, 9]
    scheduler.commit(chunks, [9])
    scheduler.commit(scheduler.step(), [9])
    assert old.finish_reason == "length"
    chunk, _ = scheduler.step()
    assert (chunk.request, chunk.start, chunk.length, chunk.samples) == (new, 0, 5, True)


def test_decodes_run_beside_a_long_prompt():
    scheduler = Scheduler(num_pages=64, page_size=1, prefill_chunk=4, max_reqs=2)
    scheduler.add(Request(0, [1], 8))
    scheduler.commit(scheduler.step(), [9])
    scheduler.add(Request(1, [1] * 10, 1))
    shapes = []
    for _ in range(3):
        chunks = scheduler.step()
        shapes.append([(chunk.request.index, chunk.length) for chunk in chunks])
        scheduler.commit(chunks, [9 for chunk in chunks if chunk.samples])
    assert shapes == [[(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2)]]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    scheduler = Scheduler(num_pages=3, page_size=4, prefill_chunk=8, max_reqs=2)
    scheduler.add(Request(0, [1] * 8, 5))  # 12 cached tokens: the 13th is only sampled
    with pytest.raises(ValueError, match=r"num_pages 3 of page_size 4 .* up to 13 tokens, which need 4 pages"):
        scheduler.add(Request(1, [1] * 8, 6))


@pytest.mark.parametrize("name", ["num_pages", "page_size", "prefill_chunk", "max_reqs"])
def test_sizes_below_one_are_refused_by_name(name):
    sizes = {"num_pages": 1, "page_size": 1, "prefill_chunk": 1, "max_reqs": 1}
    with pytest.raises(ValueError, match=f"{name} is 0; it must be an int of at least 1"):
        Scheduler(**{**sizes, name: 0})


def test_empty_requests_are_refused():
    with pytest.raises(ValueError, match="prompt 2 has no tokens"):
        Request(2, [], 1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        Request(0, [1], 0)
