"""Which requests run in a step and who owns the pages: continuous batching without a tensor in sight.

A step holds every decode, then prompt chunks up to a budget of tokens. Requests are admitted first come, first served,
once the free pages hold all the tokens that they have to (re)compute; from then on only decodes ask for pages. When
none is left, the most recently admitted request gives its pages back and waits at the head of the queue: it keeps what
it generated and computes its keys and values again later. The oldest request is never preempted for another one, and
alone it fits, so every step makes progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from portable.arguments import at_least


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what was generated for it, and how far its keys and values are in the pages.

    >>> request = Request(0, [5, 6, 7], max_new_tokens=4)
    >>> request.tokens.append(8)
    >>> request.generated, request.pending
    ([8], 4)
    """

    index: int
    prompt: Sequence[int]
    max_new_tokens: int
    tokens: list[int] = field(init=False)  # prompt + generated
    cached: int = 0  # tokens whose keys and values are in the pages
    pages: list[int] = field(default_factory=list)
    row: int = -1  # of the block table while admitted
    finish_reason: str | None = None  # "stop", "length" or "interrupted"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt {self.index} has no tokens; it needs at least one")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that a step computes."""

    request: Request
    start: int
    length: int
    samples: bool  # the last pending token is among them, so the step gives the next one


class Scheduler:
    """Requests, pages and the block table of one pool.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page.
        prefill_chunk: prompt tokens per step, of all requests together.
        max_reqs: requests that run at once.
        stop_ids: tokens that end a request; the token itself is kept.

    >>> scheduler = Scheduler(num_pages=4, page_size=2, prefill_chunk=3, max_reqs=2)
    >>> scheduler.add(Request(0, [1, 2, 3, 4], max_new_tokens=2))
    >>> [(chunk.start, chunk.length, chunk.samples) for chunk in scheduler.step()]
    [(0, 3, False)]
    """

    def __init__(
        self, *, num_pages: int, page_size: int, prefill_chunk: int, max_reqs: int, stop_ids: Collection[int] = ()
    ) -> None:
        at_least(1, num_pages=num_pages, page_size=page_size, prefill_chunk=prefill_chunk, max_reqs=max_reqs)
        self.num_pages, self.page_size, self.prefill_chunk, self.max_reqs = (
            num_pages,
            page_size,
            prefill_chunk,
            max_reqs,
        )
        self.stop_ids = frozenset(stop_ids)
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.free_rows = list(range(max_reqs - 1, -1, -1))
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_reqs, 1), np.int32)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.preemptions = 0

    def check(self, request: Request) -> int:
        """The pages that a request fills at most.

        Raises:
            ValueError: it cannot finish even with all the pages for itself.
        """
        most = len(request.prompt) + request.max_new_tokens - 1  # the last token is sampled but never cached
        if (pages := self._pages_for(most)) > self.num_pages:
            raise ValueError(
                f"num_pages {self.num_pages} of page_size {self.page_size} cannot hold prompt {request.index}: its "
                f"{len(request.prompt)} tokens and max_new_tokens {request.max_new_tokens} cache up to {most} tokens, "
                f"which need {pages} pages"
            )
        return pages

    def add(self, request: Request) -> None:
        """Queue a request that `check` lets pass."""
        if (pages := self.check(request)) > self.block_table.shape[1]:
            self.block_table = np.pad(self.block_table, ((0, 0), (0, pages - self.block_table.shape[1])))
        self.waiting.append(request)

    @property
    def done(self) -> bool:
        return not (self.waiting or self.running)

    def step(self) -> list[Chunk]:
        """What to compute next: decodes, then chunks on a context, then first chunks. Empty once all are done."""
        chunks = self._decodes()
        prefills = self._prefills()
        if prefills:
            chunks += prefills
            chunks.sort(key=_phase)
        return chunks

    def commit(self, chunks: Iterable[Chunk], sampled: Iterable[int]) -> list[Request]:
        """Record a computed step and the tokens sampled for its chunks that `samples`; returns who finished."""
        tokens = iter(sampled)
        finished = []
        for chunk in chunks:
            request = chunk.request
            request.cached += chunk.length
            if not chunk.samples:
                continue
            token = next(tokens)
            request.tokens.append(token)
            if token in self.stop_ids:
                request.finish_reason = "stop"
            elif len(request.tokens) - len(request.prompt) == request.max_new_tokens:
                request.finish_reason = "length"
            else:
                continue
            finished.append(request)
        for request in finished:
            self.running.remove(request)
            self._release(request)
        return finished

    def interrupt(self) -> None:
        """End all requests where they are and take their pages back."""
        for request in self.running:
            self._release(request)
        for request in (*self.running, *self.waiting):
            request.finish_reason = request.finish_reason or "interrupted"
        self.running.clear()
        self.waiting.clear()

    def _decodes(self) -> list[Chunk]:
        chunks = []
        for request in tuple(self.running):
            if request.row < 0 or request.pending != 1 or not request.cached:
                continue  # preempted for an older one in this very step, or not ready
            while not self._grow(request):
                victim = self.running.pop()
                self._release(victim)
                self.waiting.appendleft(victim)
                self.preemptions += 1
                if victim is request:
                    break
            else:
                chunks.append(Chunk(request, request.cached, 1, True))
        return chunks

    def _prefills(self) -> list[Chunk]:
        chunks = []
        budget = self.prefill_chunk
        for request in self.running:  # at most one is amid its tokens: the next is admitted only with budget left
            if request.pending > 1:
                chunks.append(_next_chunk(request, budget))
                budget -= chunks[-1].length
        while budget and self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            chunks.append(_next_chunk(request, budget))
            budget -= chunks[-1].length
        return chunks

    def _admit(self, request: Request) -> bool:
        if not self.free_rows or self._pages_for(len(request.tokens)) > len(self.free_pages):
            return False
        request.row = self.free_rows.pop()
        return self._grow(request)

    def _grow(self, request: Request) -> bool:
        """Give the request pages for all its tokens, unless too few are free."""
        have, want = len(request.pages), self._pages_for(len(request.tokens))
        if want > have:
            if want - have > len(self.free_pages):
                return False
            request.pages += [self.free_pages.pop() for _ in range(want - have)]
            self.block_table[request.row, have:want] = request.pages[have:]
        return True

    def _release(self, request: Request) -> None:
        self.free_pages += reversed(request.pages)
        self.free_rows.append(request.row)
        request.pages.clear()
        request.row, request.cached = -1, 0

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def _next_chunk(request: Request, budget: int) -> Chunk:
    length = min(budget, request.pending)
    return Chunk(request, request.cached, length, length == request.pending)


def _phase(chunk: Chunk) -> int:
    if not chunk.start:
        return 2
    return 0 if chunk.length == 1 else 1
