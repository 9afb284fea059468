"""Prefix caching: pages that a request leaves behind serve others that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from portable.schedule import Chunk, Request, Scheduler
from portable.state_slots import StateSlots


class PrefixScheduler(Scheduler):
    """A `Scheduler` whose whole pages stay until they are needed, found by all the tokens up to their end.

    A request goes on behind the longest cached prefix of it that leaves a token to compute; with recurrent layers, one
    that has a checkpoint of the states as well. Cached pages are never written.

    Args:
        slots: of the states of recurrent layers; its block_size is the page_size.

    >>> scheduler = PrefixScheduler(num_pages=4, page_size=2, prefill_chunk=9, max_reqs=2)
    >>> for index in range(2):
    ...     scheduler.add(Request(index, [1, 2, 3, 4, 5], max_new_tokens=1))
    ...     chunks = scheduler.step()
    ...     print([(chunk.start, chunk.length) for chunk in chunks], len(scheduler.commit(chunks, [6])))
    [(0, 5)] 1
    [(4, 1)] 1
    """

    def __init__(self, *, slots: StateSlots | None = None, **sizes: object) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        if slots is not None and slots.block_size != self.page_size:
            raise ValueError(f"slots has block_size {slots.block_size}; it must be page_size {self.page_size}")
        self.slots = slots
        self.hits = 0  # tokens that were not computed again
        self._prefixes: dict[tuple[int, tuple[int, ...]], int] = {}  # (prefix before, tokens of a page) -> prefix
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._page: dict[int, int] = {}  # of each prefix, its last page
        self._ends: dict[int, int] = {}  # and back: the prefix that a cached page ends
        self._users: dict[int, int] = {}  # of each cached page
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages that nobody uses, the first to go in front
        self._of: dict[int, list[int]] = {}  # row -> the prefixes of its request's whole pages
        self._next = 1  # 0 is the empty prefix

    def commit(self, chunks: Iterable[Chunk], sampled: Iterable[int]) -> list[Request]:
        chunks = list(chunks)
        for chunk in chunks:
            self._keep(chunk)
        return super().commit(chunks, sampled)

    def _keep(self, chunk: Chunk) -> None:
        """Cache the pages that a step made whole."""
        request, size = chunk.request, self.page_size
        known = self._of[request.row]
        for block in range(len(known), (chunk.start + chunk.length) // size):
            key = (known[-1] if known else 0, tuple(request.tokens[block * size : (block + 1) * size]))
            prefix = self._prefixes.get(key)
            if prefix is None:
                prefix, page = self._next, request.pages[block]
                self._next += 1
                self._prefixes[key], self._keys[prefix] = prefix, key
                self._page[prefix], self._ends[page], self._users[page] = page, prefix, 1
            known.append(prefix)
        if self.slots is not None:
            self.slots.after(chunk, known)

    def _hit(self, request: Request) -> list[int]:
        found: list[int] = []
        size, before = self.page_size, 0
        for start in range(0, (len(request.tokens) - 1) // size * size, size):
            prefix = self._prefixes.get((before, tuple(request.tokens[start : start + size])))
            if prefix is None:
                break
            found.append(prefix)
            before = prefix
        return found if self.slots is None else found[: self.slots.longest(found)]

    def _admit(self, request: Request) -> bool:
        prefixes = self._hit(request)
        pages = [self._page[prefix] for prefix in prefixes]
        idle = sum(page in self._idle for page in pages)
        if not self.free_rows or self._pages_for(len(request.tokens)) - len(pages) > self._free() - idle:
            return False
        request.row = self.free_rows.pop()
        request.pages += pages
        request.cached = len(pages) * self.page_size
        self.hits += request.cached
        self.block_table[request.row, : len(pages)] = pages
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        self._of[request.row] = prefixes
        if self.slots is not None:
            self.slots.admit(request.row, prefixes)
        return self._grow(request)

    def _grow(self, request: Request) -> bool:
        want = self._pages_for(len(request.tokens)) - len(request.pages)
        if want > self._free():
            return False
        while want > len(self.free_pages):
            self._evict(next(iter(self._idle)))
        return super()._grow(request)

    def _release(self, request: Request) -> None:
        if self.slots is not None:
            self.slots.release(request.row)
        del self._of[request.row]
        cached = [page for page in request.pages if page in self._users]
        request.pages[:] = [page for page in request.pages if page not in self._users]
        for page in reversed(cached):  # the end of a prefix goes before its beginning
            self._users[page] -= 1
            if not self._users[page]:
                self._idle[page] = None
        super()._release(request)

    def _evict(self, page: int) -> None:
        """Forget a page that nobody uses; longer prefixes are not found any more, and their pages go in their turn."""
        prefix = self._ends.pop(page)
        del self._idle[page], self._users[page], self._page[prefix], self._prefixes[self._keys.pop(prefix)]
        if self.slots is not None:
            self.slots.forget(prefix)
        self.free_pages.append(page)

    def _free(self) -> int:
        return len(self.free_pages) + len(self._idle)
