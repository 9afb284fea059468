"""Sizes that steps are padded to: what a captured graph holds, whichever step it is replayed for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from portable.arguments import at_least
from portable.batch import Batch
from portable.kernel import GraphLevel
from portable.ragged import cdiv


@dataclass(frozen=True, slots=True)
class Size:
    """The rows and tokens of a padded step.

    Without `tokens` it is uniform: each request has exactly `queries` new tokens. With them requests have up to
    `queries` each, in any mixture, and `tokens` together; then there are as many more rows as padding of all the tokens
    takes, so that each token is some row's.

    Args:
        reqs: requests at most.
        queries: new tokens of a request, or the most of them.
        tokens: of the step, padding included; None for reqs * queries.
        seq_len: the longest sequence; None for the longest that is planned at all.
        ahead: tokens that each request grows by within a graph, by `advance`.

    Raises:
        ValueError: a number below 1, or more tokens than the requests have or fewer than one has.

    >>> Size(8).level.name, Size(8, 4).level.name, Size(8, 64, tokens=128).level.name
    ('SINGLE', 'UNIFORM', 'VARLEN')
    >>> Size(8, 4).padded_tokens, Size(8, 4).rows, Size(8, 64, tokens=128).rows
    (32, 8, 10)
    """

    reqs: int
    queries: int = 1
    tokens: int | None = None
    seq_len: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        at_least(1, reqs=self.reqs, queries=self.queries)
        at_least(1, **{name: value for name in ("tokens", "seq_len") if (value := getattr(self, name)) is not None})
        at_least(0, ahead=self.ahead)
        if self.tokens is not None and not self.queries <= self.tokens <= self.reqs * self.queries:
            raise ValueError(
                f"tokens is {self.tokens}; {self.reqs} requests of up to {self.queries} have {self.queries} to "
                f"{self.reqs * self.queries} together"
            )

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same number of new tokens."""
        return self.tokens is None

    @property
    def padded_tokens(self) -> int:
        return self.reqs * self.queries if self.tokens is None else self.tokens

    @property
    def rows(self) -> int:
        """Of the padded step."""
        return self.reqs if self.tokens is None else self.reqs + cdiv(self.tokens, self.queries)

    @property
    def level(self) -> GraphLevel:
        """What a kernel must declare to be captured for it."""
        if not self.uniform:
            return GraphLevel.VARLEN
        return GraphLevel.SINGLE if self.queries == 1 else GraphLevel.UNIFORM

    def why_not(self, batch: Batch) -> str | None:
        """Why a step does not fit, as the end of a sentence; None where it does.

        >>> Size(2, 4).why_not(Batch.from_lens([4, 3], [9, 9]))
        'row 1 has 3 new tokens, where each has 4'
        """
        if batch.num_reqs > self.reqs:
            return f"it has {batch.num_reqs} requests, above {self.reqs}"
        if batch.num_tokens > self.padded_tokens:
            return f"it has {batch.num_tokens} tokens, above {self.padded_tokens}"
        if self.seq_len is not None and batch.max_seq_len + self.ahead > self.seq_len:
            return f"it has a sequence of {batch.max_seq_len + self.ahead} tokens, above {self.seq_len}"
        if batch.max_query_len > self.queries:
            return f"it has a request of {batch.max_query_len} new tokens, above {self.queries}"
        if self.uniform and batch.num_tokens != batch.num_reqs * self.queries:
            row = int((batch.query_lens != self.queries).argmax())
            return f"row {row} has {batch.query_lens[row]} new tokens, where each has {self.queries}"
        return None

    def check_within(self, owner: str, max_reqs: int, max_tokens: int, max_seq_len: int | None = None) -> None:
        """Raise a ValueError where the size is above what `owner` was made for."""
        for name, value, limit in (
            ("requests", self.reqs, max_reqs),
            ("tokens", self.padded_tokens, max_tokens),
            ("tokens in one sequence", self.seq_len, max_seq_len),
        ):
            if value is not None and limit is not None and value > limit:
                raise ValueError(f"pad_to has {value} {name}, above the {limit} that this {owner} was made for")

    def check(self, batch: Batch) -> None:
        """Raise a ValueError unless the step fits."""
        reqs, queries, plain = batch.num_reqs, self.queries, self.tokens is self.seq_len is None
        if plain and reqs <= self.reqs and batch.max_query_len == queries and batch.num_tokens == reqs * queries:
            return  # the usual step: 0.5 us, where all questions take 2
        if reason := self.why_not(batch):
            raise ValueError(f"the step does not fit into {self}: {reason}")

    def __str__(self) -> str:
        each = (
            f"{self.reqs} x {self.queries}"
            if self.uniform
            else f"{self.reqs} x up to {self.queries}, {self.tokens} in all"
        )
        return f"{each} tokens" + (f", sequences up to {self.seq_len}" if self.seq_len else "")


def size_of(pad_to: int | Size, batch: Batch) -> Size:
    """The size that `pad_to` means for a step: so many requests, each with as many new tokens as the step's have.

    >>> size_of(4, Batch.from_lens([2], [7]))
    Size(reqs=4, queries=2, tokens=None, seq_len=None, ahead=0)
    """
    if isinstance(pad_to, Size):
        return pad_to
    if pad_to < 1:
        at_least(1, pad_to=pad_to)
    return _uniform(pad_to, max(1, batch.max_query_len))


@cache
def _uniform(reqs: int, queries: int) -> Size:
    return Size(reqs, queries)


def ladder(most: int, *, queries: int = 1) -> tuple[Size, ...]:
    """Uniform sizes up to `most` requests: powers of two up to 8, then steps of 8, of 16 from 256 on, as engines take.

    >>> [size.reqs for size in ladder(36)]
    [1, 2, 4, 8, 16, 24, 32, 36]
    """
    reqs = (*(n for n in (1, 2, 4) if n < most), *range(8, min(most, 256), 8), *range(256, most, 16), most)
    return tuple(Size(n, queries) for n in reqs)


def least(sizes: Iterable[Size], batch: Batch) -> Size | None:
    """The size that pads a step least: the fewest tokens, then the fewest rows; None where it fits into none.

    >>> least(ladder(36), Batch.from_lens([1] * 5, [9] * 5)).reqs
    8
    """
    fits = [size for size in sizes if size.why_not(batch) is None]
    return min(
        fits, key=lambda size: (size.padded_tokens, not size.uniform, size.rows, size.seq_len or 1 << 62), default=None
    )
