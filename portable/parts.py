"""Steps over the same query tokens but disjoint keys, whose outputs are merged by their LSE."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from portable.arguments import named
from portable.batch import Batch
from portable.layer import UnsupportedError
from portable.lengths import MAX_INT32, Int32, check_integers
from portable.ragged import cdiv, cu_from_lens
from portable.upload import upload
from portable.view import View

# With 8 requests on 256 shared tokens, 1,792 rows of K and V per KV head are not read again; what the merge adds is
# three outputs of 8 rows per query head, and the launches of a second pass.
PAYS_REQUESTS, PAYS_TOKENS = 8, 256


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of one step, in the order of its query tokens. They run without the sink: merging applies it once."""

    batches: tuple[Batch, ...]

    @property
    def step(self) -> Batch:
        """The part that carries the slots of the new tokens."""
        return self.batches[-1]


@named
def prefix(batch: Batch, length: int) -> Parts:
    """A prefix that all requests share, attended to once by all their tokens, and each request's own rest (cascade).

    Args:
        length: tokens of the prefix: whole pages, inside every context.

    Raises:
        ValueError: the prefix is not in whole pages, a request's context does not hold it, or (where the table is on
            the CPU) its pages are others.

    >>> table = np.array([[3, 7, 1], [3, 7, 2]])
    >>> shared, own = prefix(Batch.from_lens([1, 1], [10, 9], block_table=table, page_size=4), 8).batches
    >>> shared.query_lens.tolist(), shared.block_table.tolist(), own.host_seq_lens.tolist()
    ([2], [[3, 7]], [2, 1])
    """
    if batch.block_table is None or not batch.self_attention:
        raise UnsupportedError("a shared prefix needs a step of self-attention over pages")
    batch.needs_exact("a shared prefix")
    if length < 1 or length % batch.page_size:
        raise ValueError(
            f"length is {length}; a shared prefix is whole pages of {batch.page_size} tokens, at least one"
        )
    live = batch.query_lens > 0
    if (short := live & (batch.context_lens < length)).any():
        row = int(short.argmax())
        raise ValueError(f"row {row}: context {batch.context_lens[row]} is shorter than the shared prefix of {length}")
    pages = length // batch.page_size
    if batch.device.type == "cpu" and live.any():
        table = batch.block_table[torch.from_numpy(live)][:, :pages]
        if (other := (table != table[0]).any(1)).any():
            row = int(np.flatnonzero(live)[int(other.int().argmax())])
            raise ValueError(f"row {row}: its first {pages} pages are not those of row {int(live.argmax())}")
    lens = np.where(live, batch.host_seq_lens - length, 0).astype(np.int32)
    own = without_leading(batch, np.full(lens.size, pages), lens)
    leader = np.array([int(live.argmax()) if live.any() else 0])
    shared_q = np.array([batch.num_tokens], np.int32)
    shared_s = np.array([length if live.any() else 0], np.int32)
    cu = cu_from_lens(shared_q)
    cu_device, s_device, leader_device = upload((cu, shared_s, leader), batch.device)
    shared = replace(
        batch,
        cu_seqlens_q=cu_device,
        seq_lens=s_device,
        block_table=batch.block_table[leader_device, :pages] if len(lens) else batch.block_table.new_zeros(1, pages),
        slot_mapping=None,
        causal=False,
        query_lens=shared_q,
        host_cu_seqlens_q=cu,
        host_seq_lens=shared_s,
        is_prefilling=None,
        num_reqs=1,
        max_query_len=batch.num_tokens,
        max_seq_len=int(shared_s[0]),
        self_attention=False,
        view=None,
    )
    return Parts((shared, own))


def without_leading(batch: Batch, pages: npt.NDArray[np.int64], lens: Int32) -> Batch:
    """The step without each row's first `pages` [B] pages, its sequences as long as `lens` [B]."""
    assert batch.block_table is not None
    longest = int(lens.max(initial=0))
    view = View(rows=np.arange(lens.size), first_page=pages, width=max(1, cdiv(longest, batch.page_size)))
    starts, lens_device = upload((view.starts(batch.block_table), lens), batch.device)
    return replace(
        batch,
        seq_lens=lens_device,
        block_table=view.pick(batch.block_table, starts),
        host_seq_lens=lens,
        max_seq_len=longest,
        view=view if batch.view is None else batch.view.then(view),
    )


@named
def prefix_pays(batch: Batch, length: int) -> bool:
    """Whether reading a shared prefix once is likely to cost less than merging its output.

    >>> prefix_pays(Batch.from_lens([1] * 16, [2000] * 16), 1024), prefix_pays(Batch.from_lens([1], [2000]), 1024)
    (True, False)
    """
    return length >= PAYS_TOKENS and batch.num_reqs >= PAYS_REQUESTS


@named
def tree(batch: Batch, parents: torch.Tensor, slots: torch.Tensor, depth: int) -> Parts:
    """A draft tree verified in one step: each node sees the committed tokens, its ancestors and itself; no sibling.

    Args:
        batch: the committed tokens: a live row is a request, its seq_len what the tree stands on.
        parents: [B, N] integers, each node's parent within its tree, -1 for a child of the committed text. A parent
            stands before its children.
        slots: [B, N] int64, where each node's K and V are written: any slots, so that a page that is partly
            committed, or split among branches, needs no care.
        depth: levels of the deepest node, 1 for a tree of roots; with `parents` on a device, it is not looked up.

    The committed part keeps the step's pages, of any size; the tree part has pages of one token. A layer whose mask
    depends on positions (a window, ALiBi) cannot use it: nodes of one level share a position.

    >>> batch = Batch.from_lens([1], [7], block_table=[[4, 2]], page_size=4)
    >>> committed, nodes = tree(batch, torch.tensor([[-1, -1, 0]]), torch.tensor([[11, 40, 41]]), depth=2).batches
    >>> committed.query_lens.tolist(), committed.host_seq_lens.tolist()
    ([3], [7])
    >>> nodes.block_table.tolist(), nodes.seq_lens.tolist(), nodes.page_size
    ([[11, 0], [40, 0], [41, 11]], [1, 1, 2], 1)
    """
    if batch.block_table is None or not batch.self_attention:
        raise UnsupportedError("a draft tree needs a step of self-attention over pages")
    rows = batch.padded_reqs
    if parents.dim() != 2 or len(parents) != rows or parents.shape != slots.shape:
        raise ValueError(
            f"parents has shape {list(parents.shape)} and slots {list(slots.shape)}; both must be [{rows}, N]"
        )
    for name, tensor in (("parents", parents), ("slots", slots)):
        check_integers(name, tensor)
        if tensor.device != batch.device:
            raise ValueError(f"{name} is on {tensor.device}; the batch is on {batch.device}")
    width = parents.shape[1]
    if not 1 <= depth <= max(1, width):
        raise ValueError(f"depth is {depth}; a tree of {width} nodes has 1 to {width} levels")
    on_host = parents.device.type == "cpu"
    if on_host and (bad := (parents < -1) | (parents >= torch.arange(width))).any():
        row, node = (int(i) for i in bad.nonzero()[0])
        raise ValueError(f"row {row}: parent {int(parents[row, node])} of node {node} does not stand before it")
    if slots.device.type == "cpu" and slots.numel() and (most := int(slots.numpy().max())) > MAX_INT32:
        raise ValueError(f"slots holds {most}; block tables are int32, so a slot of a tree is at most 2**31 - 1")
    live = batch.query_lens > 0
    if slots.device.type == "cpu" and (slots.numpy()[live] < 0).any():
        row = int(((slots.numpy() < 0).any(1) & live).argmax())
        raise ValueError(
            f"row {row}: slots holds {slots.numpy()[row].min()}; each node is written to a slot of its own"
        )
    query_lens = np.where(live, width, 0).astype(np.int32)
    cu = cu_from_lens(query_lens)
    num_nodes = int(cu[-1])
    alive, cu_device, each = upload((np.flatnonzero(live), cu, np.arange(num_nodes + 1, dtype=np.int32)), batch.device)
    own_parents, own_slots = parents[alive].long(), slots[alive].long()
    levels = [torch.arange(width, device=batch.device).expand(len(alive), width)]
    for _ in range(depth - 1):
        above = own_parents.gather(1, levels[-1].clamp(min=0))
        levels.append(above.where(levels[-1] >= 0, -1))
    lineage = torch.stack(levels, -1)  # [live, N, depth] a node, its parent, ...; -1 behind the root
    seen = lineage >= 0
    if on_host and depth < width and seen[..., -1].any():
        beyond = own_parents.gather(1, levels[-1].clamp(min=0)).where(levels[-1] >= 0, -1)
        if (beyond >= 0).any():
            raise ValueError(f"depth is {depth}, but a node stands lower")
    table = own_slots[:, None].expand(-1, width, -1).gather(2, lineage.clamp(min=0)).where(seen, 0)
    table = table.reshape(num_nodes, depth).to(torch.int32)
    lens_device = seen.sum(-1).reshape(num_nodes).to(torch.int32)
    lens = lens_device.numpy() if on_host else np.full(num_nodes, depth, np.int32)
    extra = batch.padded_tokens - batch.num_tokens
    both = replace(
        batch,
        causal=False,
        is_prefilling=None,
        num_tokens=num_nodes,
        padded_tokens=num_nodes + extra,
        self_attention=False,
    )
    committed = replace(
        both,
        cu_seqlens_q=cu_device,
        slot_mapping=None,
        query_lens=query_lens,
        host_cu_seqlens_q=cu,
        max_query_len=int(query_lens.max(initial=0)),
    )
    nodes = replace(
        both,
        cu_seqlens_q=each,
        seq_lens=lens_device,
        block_table=table,
        slot_mapping=torch.nn.functional.pad(own_slots.reshape(-1), (0, extra), value=-1),
        page_size=1,
        query_lens=np.ones(num_nodes, np.int32),
        host_cu_seqlens_q=np.arange(num_nodes + 1, dtype=np.int32),
        host_seq_lens=lens,
        exact=on_host,
        num_reqs=num_nodes,
        max_query_len=min(1, num_nodes),
        max_seq_len=int(lens.max(initial=0)),
        view=None,
    )
    return Parts((committed, nodes))


def branch_layout(prefix_len: int, steps: int, page_size: int) -> tuple[int, int]:
    """Where branches of `steps` tokens have pages of their own: (tokens of the last page to copy, pages per branch).

    >>> branch_layout(prefix_len=7, steps=5, page_size=4)
    (3, 2)
    """
    partial = prefix_len % page_size
    return partial, cdiv(partial + steps, page_size)
