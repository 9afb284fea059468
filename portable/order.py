"""The order of a step's requests: decode, short extend, long extend, prefill; padding behind them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt

from portable.ragged import IntArray

DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL, PAD = range(5)
Kinds = npt.NDArray[np.int8]


def kinds(
    query_lens: IntArray,
    context_lens: IntArray,
    *,
    threshold: int = 1,
    is_prefilling: npt.NDArray[np.bool_] | None = None,
    short_extends_as_decodes: bool = True,
    uniform: bool = False,
) -> Kinds:
    """What each request is, [B] int8.

    Without a context it is a prefill, whatever its length: a first chunk of one token has no state to decode from.
    On a context, up to `threshold` new tokens are a decode, or a short extend where the prompt is still being read
    (`is_prefilling`) and `short_extends_as_decodes` is False; more are a long extend. With `uniform`, decodes are as
    long as the first one, and from one of another length on they are short extends. No new tokens make padding.

    >>> kinds(np.array([1, 1, 4, 1, 0]), np.array([9, 3, 8, 0, 0]), is_prefilling=np.array([0, 1, 1, 1, 0], bool),
    ...       short_extends_as_decodes=False).tolist()
    [0, 1, 2, 3, 4]
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}; it counts the new tokens of a decode, so it is at least 1")
    kind = np.where(context_lens > 0, np.where(query_lens > threshold, LONG_EXTEND, DECODE), PREFILL).astype(np.int8)
    if is_prefilling is not None and not short_extends_as_decodes:
        kind[(kind == DECODE) & is_prefilling] = SHORT_EXTEND
    kind[query_lens == 0] = PAD
    if uniform and (decodes := kind == DECODE).any():
        others = decodes & (query_lens != query_lens[decodes.argmax()])
        kind[decodes & np.logical_or.accumulate(others)] = SHORT_EXTEND
    return kind


def decode_threshold(num_draft: int = 0, *, shards: int = 1, varlen: bool = True) -> int:
    """New tokens up to which a request decodes: itself and its drafts to verify.

    Over a context shared among ranks, only a kernel that takes several new tokens per request keeps them together.

    >>> decode_threshold(), decode_threshold(3), decode_threshold(3, shards=2, varlen=False)
    (1, 4, 1)
    """
    if num_draft < 0 or shards < 1:
        raise ValueError(f"num_draft is {num_draft} and shards {shards}; they are at least 0 and 1")
    return 1 if shards > 1 and not varlen else 1 + num_draft


def order(
    query_lens: IntArray,
    context_lens: IntArray,
    *,
    threshold: int = 1,
    is_prefilling: npt.NDArray[np.bool_] | None = None,
    short_extends_as_decodes: bool = True,
) -> npt.NDArray[np.int64]:
    """The permutation that puts requests in order: new[i] = old[permutation[i]]. Apply it to anything per request.

    Only requests in the wrong place move, in the fewest swaps that any way takes: the shortest cycles first. Requests
    that stand in order already give the identity.

    >>> order(np.array([7, 1, 1, 1]), np.array([0, 5, 0, 3])).tolist()
    [3, 1, 2, 0]
    """
    kind = kinds(
        query_lens,
        context_lens,
        threshold=threshold,
        is_prefilling=is_prefilling,
        short_extends_as_decodes=short_extends_as_decodes,
    )
    permutation = np.arange(kind.size)
    zone = np.sort(kind)
    if (zone == kind).all():
        return permutation
    # misplaced[a][b]: places that belong to kind a and hold kind b
    misplaced = {
        (a, b): np.flatnonzero((zone == a) & (kind == b)) for a in range(PAD + 1) for b in range(PAD + 1) if a != b
    }
    for length in range(2, PAD + 2):
        for cycle in permutations(range(PAD + 1), length):
            if cycle[0] != min(cycle):
                continue  # the same cycle from another start
            edges = [(a, cycle[(i + 1) % length]) for i, a in enumerate(cycle)]
            n = min(misplaced[edge].size for edge in edges)
            if n:
                # the place of kind a gets the request of kind a, which stands where the edge into a points from
                for i, edge in enumerate(edges):
                    permutation[misplaced[edge][:n]] = misplaced[edges[i - 1]][:n]
                for edge in edges:
                    misplaced[edge] = misplaced[edge][n:]
    return permutation


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive requests of a batch and their tokens."""

    requests: slice
    tokens: slice

    @property
    def num_reqs(self) -> int:
        return int(self.requests.stop - self.requests.start)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, slots=True)
class Split:
    """An ordered batch as regions; plain ints throughout."""

    decodes: Region
    short_extends: Region  # empty unless they are told apart from decodes, or those are to be uniform
    long_extends: Region
    prefills: Region
    pads: Region

    @property
    def extends(self) -> Region:
        """Short and long extends."""
        short, long = self.short_extends, self.long_extends
        return Region(slice(short.requests.start, long.requests.stop), slice(short.tokens.start, long.tokens.stop))

    @property
    def padded_decodes(self) -> slice:
        """The rows of a decode kernel: the decodes, and the padding where nothing lies between."""
        alone = self.pads.requests.start == self.decodes.requests.stop
        return slice(0, self.pads.requests.stop if alone else self.decodes.requests.stop)


def split(kind: Kinds, cu_seqlens_q: IntArray) -> Split:
    """The regions of requests whose kinds ascend.

    Requests without new tokens between others belong to the region around them; those at the end are padding.

    Raises:
        ValueError: the kinds do not ascend; the message names the first request out of place.
    """
    if (kind[1:] >= kind[:-1]).all():  # padding at the end alone: the usual step
        edges = [0, *np.searchsorted(kind, (SHORT_EXTEND, LONG_EXTEND, PREFILL, PAD)).tolist(), kind.size]
        return Split(*_regions(edges, cu_seqlens_q))
    live = kind != PAD
    reached = np.maximum.accumulate(np.where(live, kind, DECODE))
    if (late := live & (kind != reached)).any():
        row = int(late.argmax())
        raise ValueError(
            f"the batch is not ordered: request {row} ({NAMES[kind[row]]}) stands behind a {NAMES[reached[row]]}; "
            "order requests as decode, short extend, long extend, prefill"
        )
    end = int(live.size - live[::-1].argmax()) if live.any() else 0
    inner = np.searchsorted(reached[:end], (SHORT_EXTEND, LONG_EXTEND, PREFILL))
    edges = [0, *(int(edge) for edge in inner), end, int(kind.size)]
    return Split(*_regions(edges, cu_seqlens_q))


def _regions(edges: list[int], cu_seqlens_q: IntArray) -> list[Region]:
    tokens = cu_seqlens_q[edges].tolist()
    return [Region(slice(*rows), slice(*of)) for rows, of in zip(pairwise(edges), pairwise(tokens), strict=True)]


def is_ordered(kind: Kinds) -> bool:
    """Whether `split` has an answer.

    >>> is_ordered(np.array([DECODE, PAD, PREFILL, PAD])), is_ordered(np.array([PREFILL, DECODE]))
    (True, False)
    """
    live = kind[kind != PAD]
    return bool((live[1:] >= live[:-1]).all())


NAMES = ("decode", "short extend", "long extend", "prefill", "pad")
