"""What one step asks: how many new tokens each request has, how long it is, and where its pages are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from portable import step_inputs
from portable.arguments import named
from portable.block_table import BlockTable
from portable.lengths import Int32, Lens, check_page_size, check_table, check_tensor, counted
from portable.order import Kinds, Split, is_ordered, kinds, split
from portable.paging import PageCsr, num_pages, page_csr
from portable.ragged import ragged_arange
from portable.step_inputs import StepInputs
from portable.view import View


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """One step of an engine, immutable. Device tensors feed kernels; host twins feed planners.

    B counts rows with padding, T tokens with padding; `num_reqs` and `num_tokens` count without.

    >>> batch = Batch.from_lens([1, 3], [5, 3], block_table=np.array([[0, 1], [2, 3]]), page_size=4, device="cpu")
    >>> batch.num_tokens, batch.context_lens.tolist(), batch.slot_mapping.tolist()
    (4, [4, 0], [4, 8, 9, 10])
    >>> batch
    Batch(2 requests, 4 tokens, page 4)
    """

    cu_seqlens_q: torch.Tensor  # [B + 1] i32
    seq_lens: torch.Tensor  # [B] i32, context + new
    block_table: torch.Tensor | None  # [B, W] i32
    slot_mapping: torch.Tensor | None  # [T] i64; -1 is not written
    page_size: int  # tokens per page
    causal: bool | torch.Tensor  # or [B] bool
    query_lens: Int32  # [B] host
    host_cu_seqlens_q: Int32  # [B + 1] host
    host_seq_lens: Int32  # [B] host; upper bounds where not `exact`
    exact: bool  # False under asynchronous scheduling, where the host runs ahead of what was accepted
    is_prefilling: npt.NDArray[np.bool_] | None  # [B] host: the prompt is still being read
    num_reqs: int
    num_tokens: int
    padded_tokens: int
    max_query_len: int
    max_seq_len: int
    self_attention: bool = True  # the last keys of a sequence are its new tokens
    view: View | None = None  # set by variants that pick pages
    pages: BlockTable | None = None  # whose first rows `block_table` was made of
    _continues: bool | None = field(init=False, default=None, repr=False)  # asked once; `replace` asks anew

    @classmethod
    @named
    def from_lens(
        cls,
        query_lens: Lens,
        seq_lens: Lens,
        *,
        block_table: npt.ArrayLike | torch.Tensor | BlockTable | None = None,
        page_size: int = 1,
        causal: bool | torch.Tensor = True,
        is_prefilling: npt.ArrayLike | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch from the number of new tokens and the whole length of each request.

        Args:
            query_lens: [B] new tokens of each request.
            seq_lens: [B] tokens of each request once the new ones are written: context + new.
            block_table: [B, W] page ids, W at least ceil(seq_len / page_size) of every row. It is read until the
                next plan, not copied where it is an int32 array on the same device; of a `BlockTable` the first B
                rows. None for a batch without a cache.
            page_size: tokens per page.
            causal: bottom-right aligned causal mask, for all or for each request ([B] bool).
            is_prefilling: [B] bool, requests whose prompt is still being read.
            device: where the kernels run; the device of `block_table` or the CPU by default.

        Raises:
            ValueError: naming the row and its values, where the lengths or the table cannot be right.
        """
        made = step_inputs.of_lens(query_lens, seq_lens, block_table, page_size, device)
        pages = block_table if isinstance(block_table, BlockTable) else None
        return cls._of(made, page_size, causal, is_prefilling, pages=pages)

    @classmethod
    @named
    def decode(cls, seq_lens: Lens, block_table: npt.ArrayLike | BlockTable, *, page_size: int) -> Batch:
        """`from_lens` of one new token for each request, on the host: what a plan that is padded to a size takes.

        In half the time: 15 us for 256 requests.

        >>> batch = Batch.decode(np.array([5, 2]), np.array([[3, 7], [1, 0]]), page_size=4)
        >>> batch.cu_seqlens_q.tolist(), batch.slot_mapping.tolist()
        ([0, 1, 2], [28, 5])
        """
        ones, s, cu, cu_device, s_device, table, slots = step_inputs.of_decodes(seq_lens, block_table, page_size)
        rows = s.size
        return cls(
            cu_seqlens_q=cu_device,
            seq_lens=s_device,
            block_table=table,
            slot_mapping=slots,
            page_size=page_size,
            causal=True,
            query_lens=ones,
            host_cu_seqlens_q=cu,
            host_seq_lens=s,
            exact=True,
            is_prefilling=None,
            num_reqs=rows,
            num_tokens=rows,
            padded_tokens=rows,
            max_query_len=min(1, rows),
            max_seq_len=int(s.max(initial=0)),
            pages=block_table if isinstance(block_table, BlockTable) else None,
        )

    @classmethod
    @named
    def from_tensors(
        cls,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | None,
        slot_mapping: torch.Tensor | None,
        *,
        page_size: int,
        host_cu_seqlens_q: npt.ArrayLike | None = None,
        host_seq_lens: npt.ArrayLike | None = None,
        exact: bool = True,
        causal: bool | torch.Tensor = True,
        is_prefilling: npt.ArrayLike | None = None,
        num_reqs: int | None = None,
    ) -> Batch:
        """A batch from an engine's own tensors, as vLLM keeps them; they are used as they are, not copied.

        Args:
            cu_seqlens_q: [B + 1] int32 on the device, padded rows repeating the last entry.
            seq_lens: [B] int32 on the device.
            block_table: [B, W] int32.
            slot_mapping: [T] int64 slots of the new tokens; behind the last new token, -1.
            host_cu_seqlens_q, host_seq_lens: their host twins; needed where the tensors are not on the CPU.
            exact: False where host_seq_lens are upper bounds.
            num_reqs: rows that are requests; the others are padding. None: all.

        Raises:
            ValueError: naming the argument, its shape or dtype, or the row whose values cannot be right.
        """
        made = step_inputs.of_tensors(
            cu_seqlens_q, seq_lens, block_table, slot_mapping, page_size, host_cu_seqlens_q, host_seq_lens
        )
        batch = cls._of(made, page_size, causal, is_prefilling, exact=exact)
        if num_reqs is None:
            return batch
        rows = made.query_lens.size
        if not 0 <= num_reqs <= rows or made.query_lens[num_reqs:].any():
            raise ValueError(
                f"num_reqs is {num_reqs}; rows behind it are padding and have no new tokens, of {rows} rows"
            )
        return replace(batch, num_reqs=num_reqs)

    @classmethod
    @named
    def from_token_table(
        cls,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        query_lens: Lens,
        seq_lens: Lens,
        *,
        page_size: int,
        offsets: npt.ArrayLike | None = None,
        causal: bool | torch.Tensor = True,
        is_prefilling: npt.ArrayLike | None = None,
    ) -> Batch:
        """A batch from a table of token slots, as SGLang keeps it, at any page size.

        Args:
            req_to_token: [R, C] the slot of each token of each request; slots of one page are consecutive.
            rows: [B] which row of it each request has.
            query_lens, seq_lens: [B] on the host, as in `from_lens`.
            offsets: [B] on the host, the column at which each request's tokens start (behind those of its encoder):
                a multiple of page_size. None: 0.

        >>> tokens = torch.tensor([[8, 9, 10, 11, 20, 21, 22, 23, 4]])
        >>> batch = Batch.from_token_table(tokens, torch.tensor([0]), [1], [9], page_size=4)
        >>> batch.block_table.tolist(), batch.slot_mapping.tolist()
        ([[2, 5, 1]], [4])
        """
        made = step_inputs.of_token_table(req_to_token, rows, query_lens, seq_lens, page_size, offsets)
        return cls._of(made, page_size, causal, is_prefilling)

    @classmethod
    def _of(
        cls,
        made: StepInputs,
        page_size: int,
        causal: bool | torch.Tensor,
        is_prefilling: npt.ArrayLike | None,
        *,
        exact: bool = True,
        pages: BlockTable | None = None,
    ) -> Batch:
        rows, slots = made.query_lens.size, made.slot_mapping
        num_tokens = int(made.host_cu_seqlens_q[-1])
        return cls(
            **made._asdict(),
            page_size=page_size,
            causal=step_inputs.causal_of(causal, rows, made.seq_lens.device),
            exact=exact,
            is_prefilling=step_inputs.prefilling_of(is_prefilling, rows),
            num_reqs=rows,
            num_tokens=num_tokens,
            padded_tokens=num_tokens if slots is None else slots.numel(),
            max_query_len=int(made.query_lens.max(initial=0)),
            max_seq_len=int(made.host_seq_lens.max(initial=0)),
            pages=pages,
        )

    def __repr__(self) -> str:
        pages = "no pages" if self.block_table is None else f"page {self.page_size}"
        return f"Batch({counted(self.num_reqs, self.num_tokens)}, {pages})"

    @property
    def context_lens(self) -> Int32:
        """[B] host: tokens that are in the cache already; upper bounds where not `exact`."""
        return self.host_seq_lens - self.query_lens

    @property
    def continues(self) -> bool:
        """Whether all rows have equally many new tokens, at least one, on a context: decodes, or drafts to verify.

        >>> table = np.array([[0], [1]])
        >>> Batch.from_lens([2, 2], [9, 3], block_table=table, page_size=16).continues
        True
        >>> Batch.from_lens([2, 2], [9, 2], block_table=table, page_size=16).continues
        False
        """
        found = self._continues
        if found is None:
            found = bool(0 < self.host_cu_seqlens_q[-1] == self.query_lens.size * self.max_query_len)
            if found and self.self_attention:
                found = bool((self.host_seq_lens - self.query_lens).min() > 0)
            object.__setattr__(self, "_continues", found)
        return found

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.seq_lens.device

    @property
    def padded_reqs(self) -> int:
        """Rows, padding included."""
        return self.query_lens.size

    def needs_exact(self, what: str) -> None:
        """Refuse host lengths that are bounds, for planning that would be wrong on them."""
        if not self.exact:
            raise ValueError(f"{what} needs exact lengths; this batch's host_seq_lens are upper bounds (exact=False)")

    @named
    def kinds(self, threshold: int = 1, *, uniform: bool = False, short_extends_as_decodes: bool = True) -> Kinds:
        """What each request is: see `portable.order.kinds`."""
        return kinds(
            self.query_lens,
            self.context_lens if self.self_attention else np.ones_like(self.query_lens),
            threshold=threshold,
            is_prefilling=self.is_prefilling,
            short_extends_as_decodes=short_extends_as_decodes,
            uniform=uniform,
        )

    @named
    def split(self, threshold: int = 1, *, uniform: bool = False, short_extends_as_decodes: bool = True) -> Split:
        """The regions of an ordered batch.

        Raises:
            ValueError: the requests are not in order; the message names the first one out of place.

        >>> Batch.from_lens([1, 1, 7, 0, 0], [9, 4, 7, 0, 0]).split().prefills
        Region(requests=slice(2, 3, None), tokens=slice(2, 9, None))
        """
        kind = self.kinds(threshold, uniform=uniform, short_extends_as_decodes=short_extends_as_decodes)
        return split(kind, self.host_cu_seqlens_q)

    @named
    def is_ordered(self, threshold: int = 1, *, uniform: bool = False, short_extends_as_decodes: bool = True) -> bool:
        """Whether `split` has an answer.

        >>> Batch.from_lens([5, 1], [5, 33]).is_ordered()
        False
        """
        kind = self.kinds(threshold, uniform=uniform, short_extends_as_decodes=short_extends_as_decodes)
        return is_ordered(kind)

    def token_to_req(self) -> Int32:
        """[T] host: the row of each new token.

        >>> Batch.from_lens([3, 0, 2], [3, 4, 9]).token_to_req().tolist()
        [0, 0, 0, 2, 2]
        """
        return ragged_arange(self.query_lens)[0]

    def csr(self) -> PageCsr:
        """The pages in compressed rows."""
        if self.block_table is None:
            raise ValueError("the batch has no block_table, so there are no pages to compress")
        total = num_pages(self.host_seq_lens, self.page_size)
        return page_csr(self.block_table, self.seq_lens, self.page_size, total)

    @named
    def with_group(self, block_table: torch.Tensor, slot_mapping: torch.Tensor | None, page_size: int) -> Batch:
        """The same step on the pages of another KV group; lengths, order and variants are not worked out again.

        A derived batch (`variants.local`) takes the group's own table and picks its pages from it as before.
        """
        if self.view is not None and page_size != self.page_size:
            raise ValueError(f"page_size is {page_size}; a derived batch keeps its {self.page_size}: derive it anew")
        check_page_size(page_size)
        check_tensor("block_table", block_table, torch.int32, (None, None), self.device)
        if slot_mapping is not None:
            check_tensor("slot_mapping", slot_mapping, torch.int64, (self.padded_tokens,), self.device)
        table = block_table
        if self.view is None:
            check_table(table, self.query_lens, self.host_seq_lens, page_size)
        else:
            self.view.check(table, self.host_seq_lens, page_size)
            rows = self.padded_reqs - self.view.rows.size  # of padding, on page 0
            if self.view.picked:
                table = torch.nn.functional.pad(self.view.of(table), (0, 0, 0, rows))
        return replace(self, block_table=table, slot_mapping=slot_mapping, page_size=page_size)
