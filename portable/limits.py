"""The largest step that an object plans: checked when it is made, and in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from portable.arguments import at_least
from portable.batch import Batch
from portable.ragged import cdiv

SHORT = 16  # tokens: shorter queries are compiled for one by one, longer ones by power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of the largest step, each an int of at least 1; anything else is a ValueError that names it."""

    page_size: int
    max_reqs: int
    max_tokens: int
    max_seq_len: int

    def __post_init__(self) -> None:
        at_least(1, **{field.name: getattr(self, field.name) for field in fields(self)})

    def check(self, batch: Batch, device: torch.device, owner: str) -> None:
        """Raise a ValueError unless a step fits and is on this device; `owner` is what was made for the limits.

        >>> limits = Limits(page_size=4, max_reqs=1, max_tokens=8, max_seq_len=8)
        >>> limits.check(Batch.from_lens([9], [9]), torch.device("cpu"), "Attention")
        Traceback (most recent call last):
        ValueError: the batch has 9 tokens, above the 8 that this Attention was made for
        """
        reqs, tokens, longest = batch.num_reqs, batch.num_tokens, batch.max_seq_len
        if reqs > self.max_reqs or tokens > self.max_tokens or longest > self.max_seq_len:
            for name, value, limit in (
                ("requests", reqs, self.max_reqs),
                ("tokens", tokens, self.max_tokens),
                ("tokens in one sequence", longest, self.max_seq_len),
            ):
                if value > limit:
                    raise ValueError(f"the batch has {value} {name}, above the {limit} that this {owner} was made for")
        if batch.block_table is not None and batch.page_size != self.page_size:
            raise ValueError(f"the batch has page_size {batch.page_size}; this {owner} was made for {self.page_size}")
        if batch.device != device:
            raise ValueError(f"the batch is on {batch.device}; this {owner} runs on {device}")

    def checked(self, query_lens: Iterable[int] | None, chunk: int | None = None) -> tuple[int, ...]:
        """Lengths of queries that somebody named, or those that stand for all; a ValueError for one that never comes.

        Of a layer with chunks a request is attended to in pieces, which begin and end wherever its context lies in one:
        the lengths are then those that stand for all pieces.

        >>> limits = Limits(page_size=16, max_reqs=4, max_tokens=100, max_seq_len=128)
        >>> limits.checked([1, 40]), limits.checked([1, 40], chunk=24)[14:], limits.checked([1, 3], chunk=24)
        ((1, 40), (15, 16, 24), (1, 2, 3))
        """
        lens, most = (
            self.query_lens if query_lens is None else tuple(query_lens),
            min(self.max_tokens, self.max_seq_len),
        )
        for length in lens:
            if not 1 <= length <= most:
                raise ValueError(f"query_lens holds {length}; lengths are 1 to {most}")
        if chunk is None:
            return lens
        longest = min(chunk, max(lens, default=1))
        return tuple(dict.fromkeys(min(n, longest) for n in self.query_lens))

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Lengths of queries that stand for all up to the longest.

        >>> Limits(page_size=16, max_reqs=4, max_tokens=100, max_seq_len=64).query_lens[14:]
        (15, 16, 32, 64)
        """
        most = min(self.max_tokens, self.max_seq_len)
        longer = [SHORT << i for i in range(1, 40) if SHORT << (i - 1) < most]
        return tuple(dict.fromkeys(min(n, most) for n in (*range(1, SHORT + 1), *longer)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of block tables, from one to the most.

        >>> Limits(page_size=16, max_reqs=4, max_tokens=100, max_seq_len=4096).widths
        (1, 4, 16, 64, 256)
        """
        most = cdiv(self.max_seq_len, self.page_size)
        return (*(4**i for i in range(20) if 4**i < most), most)
