"""What one step asks: how many new tokens each request has, how long it is, and where its pages are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.block_table import BlockTable
from portable.lengths import (
    MAX_INT32,
    Int32,
    Lens,
    as_array,
    as_lens,
    as_table,
    check_integers,
    check_lens,
    check_page_size,
    check_pages,
    check_table,
    check_tensor,
    new_positions,
    twin,
)
from portable.order import Kinds, Split, is_ordered, kinds, split
from portable.paging import PageCsr, num_pages, page_csr, page_table_from_tokens
from portable.paging import slot_mapping as slots_of
from portable.ragged import cdiv, cu_from_lens, ragged_arange
from portable.upload import upload
from portable.view import View


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """One step of an engine, immutable. Device tensors feed kernels; host twins feed planners.

    B counts rows with padding, T tokens with padding; `num_reqs` and `num_tokens` count without.

    >>> batch = Batch.from_lens([1, 3], [5, 3], block_table=np.array([[0, 1], [2, 3]]), page_size=4, device="cpu")
    >>> batch.num_tokens, batch.context_lens.tolist(), batch.slot_mapping.tolist()
    (4, [4, 0], [4, 8, 9, 10])
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

    @classmethod
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
        q, s = as_lens("query_lens", query_lens), as_lens("seq_lens", seq_lens)
        check_lens(q, s, page_size)
        if device is None:
            device = block_table.device if isinstance(block_table, torch.Tensor) else "cpu"
        device = torch.device(device)
        pages = block_table if isinstance(block_table, BlockTable) else None
        if pages is not None:
            block_table = pages.rows(q.size)
        cu = cu_from_lens(q)
        if block_table is None:
            cu_device, s_device = upload((cu, s), device)
            table = slots = None
        elif isinstance(block_table, torch.Tensor) and block_table.device.type != "cpu":
            if block_table.device.type != device.type or device.index not in (None, block_table.device.index):
                raise ValueError(f"block_table is on {block_table.device}; device is {device}")
            requests, positions = new_positions(q, s)
            cu_device, s_device, r, p = upload((cu, s, requests, positions), device)
            check_table(block_table, q, s, page_size)
            table = block_table.to(device=device, dtype=torch.int32)
            slots = slots_of(table, r, p, page_size)
        else:
            assert not isinstance(block_table, BlockTable)
            given = as_array("block_table", block_table)
            check_table(given, q, s, page_size)
            host = as_table(given)
            requests, positions = new_positions(q, s)
            new_slots = slots_of(host, requests, positions, page_size)
            # A CPU's kernels look at the context's pages themselves; for another device this is the last chance, and
            # worth what it costs: to scan 1,024 rows of 512 takes as long as all the rest.
            if device.type != "cpu" or (new_slots.size and new_slots.min() < 0):
                check_pages(host, s, page_size)
            cu_device, s_device, table, slots = upload((cu, s, host, new_slots), device)
        return cls._of(
            q, s, cu, cu_device, s_device, table, slots, page_size, causal, is_prefilling, exact=True, pages=pages
        )

    @classmethod
    def decode(cls, seq_lens: Lens, block_table: npt.NDArray[np.integer] | BlockTable, *, page_size: int) -> Batch:
        """`from_lens` of one new token for each request, on the host: what a plan that is padded to a size takes.

        In half the time: 15 us for 256 requests.

        >>> batch = Batch.decode(np.array([5, 2]), np.array([[3, 7], [1, 0]]), page_size=4)
        >>> batch.cu_seqlens_q.tolist(), batch.slot_mapping.tolist()
        ([0, 1, 2], [28, 5])
        """
        s = as_lens("seq_lens", seq_lens)
        steps = _single(s.size)
        check_page_size(page_size)
        if s.size and s.min() < 1:
            raise ValueError(f"row {int(s.argmin())}: seq_len is {s.min()}; it counts the new token too")
        if isinstance(block_table, BlockTable):
            table, pages = block_table.rows(s.size), block_table
        else:
            table, pages = as_table(as_array("block_table", block_table)), None
        check_table(table, steps.ones, s, page_size)
        last = s - steps.ones
        slots = table[steps.rows, last // page_size].astype(np.int64) * page_size + last % page_size
        if slots.size and slots.min() < 0:
            check_pages(table, s, page_size)
        return cls(
            cu_seqlens_q=steps.cu_device,
            seq_lens=torch.from_numpy(s),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            page_size=page_size,
            causal=True,
            query_lens=steps.ones,
            host_cu_seqlens_q=steps.cu,
            host_seq_lens=s,
            exact=True,
            is_prefilling=None,
            num_reqs=s.size,
            num_tokens=s.size,
            padded_tokens=s.size,
            max_query_len=min(1, s.size),
            max_seq_len=int(s.max(initial=0)),
            pages=pages,
        )

    @classmethod
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
        rows = seq_lens.numel()
        for name, tensor, dtype, shape in (
            ("cu_seqlens_q", cu_seqlens_q, torch.int32, (rows + 1,)),
            ("seq_lens", seq_lens, torch.int32, (rows,)),
            ("block_table", block_table, torch.int32, (rows, None)),
            ("slot_mapping", slot_mapping, torch.int64, (None,)),
        ):
            if tensor is not None:
                check_tensor(name, tensor, dtype, shape, seq_lens.device)
        cu = as_lens("cu_seqlens_q", twin("cu_seqlens_q", cu_seqlens_q, host_cu_seqlens_q))
        s = as_lens("seq_lens", twin("seq_lens", seq_lens, host_seq_lens))
        if cu.size != rows + 1 or s.size != rows:
            raise ValueError(f"the host twins have {cu.size - 1} and {s.size} rows; the tensors have {rows}")
        if cu[0] != 0:
            raise ValueError(f"row 0: cu_seqlens_q starts at {cu[0]}; it must start at 0")
        q = np.diff(cu)
        if (falls := q < 0).any():
            row = int(falls.argmax())
            raise ValueError(f"row {row}: cu_seqlens_q goes from {cu[row]} to {cu[row + 1]}; it never falls")
        check_lens(q, s, page_size)
        if block_table is not None:
            check_table(block_table, q, s, page_size)
        if slot_mapping is not None and slot_mapping.numel() < cu[-1]:
            raise ValueError(f"slot_mapping has {slot_mapping.numel()} rows; the batch has {cu[-1]} new tokens")
        batch = cls._of(
            q, s, cu, cu_seqlens_q, seq_lens, block_table, slot_mapping, page_size, causal, is_prefilling, exact=exact
        )
        if num_reqs is None:
            return batch
        if not 0 <= num_reqs <= rows or q[num_reqs:].any():
            raise ValueError(
                f"num_reqs is {num_reqs}; rows behind it are padding and have no new tokens, of {rows} rows"
            )
        return replace(batch, num_reqs=num_reqs)

    @classmethod
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
        q, s = as_lens("query_lens", query_lens), as_lens("seq_lens", seq_lens)
        check_lens(q, s, page_size)
        if rows.shape != (q.size,):
            raise ValueError(f"rows has shape {list(rows.shape)}; it must be [{q.size}], one per request")
        check_integers("rows", rows)
        check_integers("req_to_token", req_to_token)
        if rows.device != req_to_token.device:
            raise ValueError(f"rows is on {rows.device}; req_to_token is on {req_to_token.device}")
        start = as_lens("offsets", np.zeros(q.size, np.int32) if offsets is None else offsets)
        if start.size != q.size:
            raise ValueError(f"offsets has {start.size} rows; it must have {q.size}, one per request")
        if (inside := start % page_size != 0).any():
            row = int(inside.argmax())
            raise ValueError(f"row {row}: offset {start[row]} is not a multiple of page_size {page_size}")
        columns = int((start + s).max(initial=0))
        if req_to_token.dim() != 2 or req_to_token.shape[1] < columns:
            raise ValueError(f"req_to_token has shape {list(req_to_token.shape)}; a row needs {columns} columns")
        if req_to_token.device.type == "cpu" and q.size:
            chosen = rows.numpy()
            if chosen.min() < 0 or chosen.max() >= len(req_to_token):
                row = int(((chosen < 0) | (chosen >= len(req_to_token))).argmax())
                raise ValueError(
                    f"row {row}: rows is {chosen[row]}; req_to_token has rows 0 to {len(req_to_token) - 1}"
                )
        cu = cu_from_lens(q)
        requests, positions = new_positions(q, s)
        cu_device, s_device, r, p, offset = upload(
            (cu, s, requests, positions + start[requests], start), req_to_token.device
        )
        width = cdiv(int(s.max(initial=0)), page_size)
        table = page_table_from_tokens(req_to_token, rows, s_device, page_size, width, offset)
        slots = req_to_token[rows.long()[r.long()], p.long()].long()
        if slots.device.type == "cpu" and slots.numel() and slots.numpy().max() // page_size > MAX_INT32:
            raise ValueError(f"req_to_token holds slot {slots.numpy().max()}; page ids are int32")
        if slots.device.type == "cpu" and slots.numel() and slots.numpy().min() < 0:
            token = int(slots.numpy().argmin())
            raise ValueError(f"row {requests[token]}: req_to_token holds slot {slots.numpy()[token]} for a new token")
        return cls._of(q, s, cu, cu_device, s_device, table, slots, page_size, causal, is_prefilling, exact=True)

    @classmethod
    def _of(
        cls,
        q: Int32,
        s: Int32,
        cu: Int32,
        cu_device: torch.Tensor,
        s_device: torch.Tensor,
        table: torch.Tensor | None,
        slots: torch.Tensor | None,
        page_size: int,
        causal: bool | torch.Tensor,
        is_prefilling: npt.ArrayLike | None,
        *,
        exact: bool,
        pages: BlockTable | None = None,
    ) -> Batch:
        if isinstance(causal, np.bool_):
            causal = bool(causal)
        if not isinstance(causal, bool | torch.Tensor):
            raise ValueError(f"causal is {causal!r}; it must be a bool, or a [{q.size}] bool tensor")
        if isinstance(causal, torch.Tensor) and (causal.shape != (q.size,) or causal.dtype != torch.bool):
            raise ValueError(
                f"causal has shape {list(causal.shape)} and dtype {causal.dtype}; a tensor must be [{q.size}] bool"
            )
        if isinstance(causal, torch.Tensor) and causal.device != s_device.device:
            raise ValueError(f"causal is on {causal.device}; seq_lens is on {s_device.device}")
        prefilling = None if is_prefilling is None else np.array(is_prefilling, dtype=np.bool_)
        if prefilling is not None and prefilling.shape != q.shape:
            raise ValueError(f"is_prefilling has shape {list(prefilling.shape)}; it must be [{q.size}]")
        return cls(
            cu_seqlens_q=cu_device,
            seq_lens=s_device,
            block_table=table,
            slot_mapping=slots,
            page_size=page_size,
            causal=causal,
            query_lens=q,
            host_cu_seqlens_q=cu,
            host_seq_lens=s,
            exact=exact,
            is_prefilling=prefilling,
            num_reqs=q.size,
            num_tokens=int(cu[-1]),
            padded_tokens=int(cu[-1]) if slots is None else slots.numel(),
            max_query_len=int(q.max(initial=0)),
            max_seq_len=int(s.max(initial=0)),
            pages=pages,
        )

    @property
    def context_lens(self) -> Int32:
        """[B] host: tokens that are in the cache already; upper bounds where not `exact`."""
        return self.host_seq_lens - self.query_lens

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

    def split(self, threshold: int = 1, *, uniform: bool = False, short_extends_as_decodes: bool = True) -> Split:
        """The regions of an ordered batch.

        Raises:
            ValueError: the requests are not in order; the message names the first one out of place.

        >>> Batch.from_lens([1, 1, 7, 0, 0], [9, 4, 7, 0, 0]).split().prefills
        Region(requests=slice(2, 3, None), tokens=slice(2, 9, None))
        """
        kind = self.kinds(threshold, uniform=uniform, short_extends_as_decodes=short_extends_as_decodes)
        return split(kind, self.host_cu_seqlens_q)

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
            table = torch.nn.functional.pad(self.view.of(table), (0, 0, 0, rows))
        return replace(self, block_table=table, slot_mapping=slot_mapping, page_size=page_size)


class _Single(NamedTuple):
    """What all steps of so many requests with one new token each share; read only."""

    ones: Int32
    rows: Int32
    cu: Int32
    cu_device: torch.Tensor


@lru_cache(maxsize=1024)
def _single(num_reqs: int) -> _Single:
    cu = torch.arange(num_reqs + 1, dtype=torch.int32)
    made = np.ones(num_reqs, np.int32), np.arange(num_reqs, dtype=np.int32), np.arange(num_reqs + 1, dtype=np.int32)
    for array in made:
        array.flags.writeable = False
    return _Single(*made, cu)
