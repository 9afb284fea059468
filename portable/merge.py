"""Attention over disjoint sets of keys, merged by LSE, and the one form that every LSE is brought to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from portable.kernel import AttnOut, LseForm
from portable.layer import Window


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttnOut:
    """Attention over the union of disjoint key sets, from the attention over each set.

    Args:
        outs: one [T, H, Dv] per set, any strides. Where a set is empty its values are not read, NaN included.
        lses: one [H, T] float32 per set, natural log, without the sink. -inf marks an empty set, and so does +inf,
            which some vendors return for one. NaN stays NaN.
        sinks: [H], the extra logit of each head, counted once here: partials that are merged run without it.
        out, lse: where to write, of the same shapes; any strides, and `out` may be one of `outs`.

    Returns:
        out [T, H, Dv] in the dtype of the first, and lse [H, T] float32, the sink included. A row whose sets are all
        empty has out 0 and lse -inf (the sink, where there is one). Sums are float32, or float64 for float64 inputs.

    Raises:
        ValueError: no set, a different number of `outs` and `lses`, or shapes that do not fit together.

    Eight keys of score 0 with value 1, in two halves, beside a sink of 0: the weight of the keys is 8/9.

    >>> half, lse = torch.ones(1, 1, 1), torch.full((1, 1), math.log(4))
    >>> round(merge_states([half, half], [lse, lse], sinks=torch.zeros(1)).out.item(), 3)
    0.889
    """
    _check(outs, lses, sinks)
    compute = torch.promote_types(outs[0].dtype, torch.float32)
    logs = [part.to(compute) for part in lses]
    logs = [part.masked_fill(torch.isposinf(part), -torch.inf) for part in logs]
    top = torch.stack(logs).amax(0)  # [H, T]; NaN wins
    if sinks is not None:
        sink = sinks.to(compute)[:, None]
        top = torch.maximum(top, sink)
    base = top.masked_fill(torch.isneginf(top), 0)  # keeps (-inf) - (-inf) out of the exponents
    weights = [torch.exp(part - base) for part in logs]
    total = torch.stack(weights).sum(0)
    if sinks is not None:
        total = total + torch.exp(sink - base)
    merged = torch.zeros(outs[0].shape, dtype=compute, device=outs[0].device)
    for part, log, weight in zip(outs, logs, weights, strict=True):
        share = (weight / total).T.unsqueeze(-1)
        merged += (part.to(compute) * share).masked_fill(torch.isneginf(log).T.unsqueeze(-1), 0)
    out = torch.empty_like(merged, dtype=outs[0].dtype) if out is None else out
    lse = torch.empty_like(base, dtype=torch.float32) if lse is None else lse
    out.copy_(merged)
    lse.copy_(base + torch.log(total))
    return AttnOut(out, lse)


def has_keys(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    causal: bool | torch.Tensor = True,
    window: Window = (None, None),
) -> torch.Tensor:
    """Which query tokens see a key at all, [T] bool, from the lengths alone and without a sync.

    Args:
        cu_seqlens_q: [B + 1] int32, starts at 0 and ends at `num_tokens`.
        seq_lens: [B] int32, keys of each request; its last query sits at its last key.
        causal: bool or [B] bool.

    Three causal queries over two keys: the first one has none.

    >>> has_keys(torch.tensor([0, 3]), torch.tensor([2]), num_tokens=3)
    tensor([False,  True,  True])
    """
    request, offset = _requests(cu_seqlens_q, num_tokens)
    keys = seq_lens.long()[request]
    position = offset + keys - cu_seqlens_q.long().diff()[request]
    left, right = window
    first = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    last = keys - 1 if right is None else torch.minimum(position + right, keys - 1)
    if isinstance(causal, torch.Tensor):
        last = torch.where(causal[request], torch.minimum(position, last), last)
    elif causal:
        last = torch.minimum(position, last)
    return first <= last


def normalize_lse(
    lse: torch.Tensor,
    form: LseForm,
    num_heads: int,
    seen: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A vendor's LSE as the contract has it: [H, T] float32, contiguous, natural log, empty rows -inf or the sink.

    Args:
        lse: in a layout of `LseForm`, as `form.layout` declares; the axis that runs over tokens may be longer than
            needed. The declaration decides: for T == H shapes say nothing.
        seen: [T] bool, the rows that see a key (`has_keys`); what `lse` holds in the others is not used.
        cu_seqlens_q: [B + 1] int32, for layouts with an axis of requests.
        sinks: [H], where the kernel was given sinks: what rows without keys hold.

    Raises:
        ValueError: a shape that the declared layout cannot have, or one with an axis of requests without cu_seqlens_q.

    >>> normalize_lse(torch.tensor([[3.0, 5.0]]), LseForm(layout="th", base="2"), 2, torch.tensor([True]))
    tensor([[2.0794],
            [3.4657]])
    """
    rows = lse_rows(lse, form, num_heads, seen.shape[0], cu_seqlens_q)
    empty = torch.full_like(rows[:, :1], -torch.inf) if sinks is None else sinks.float()[:, None]
    return torch.where(seen, rows, empty).contiguous()


def lse_rows(
    lse: torch.Tensor, form: LseForm, num_heads: int, num_tokens: int, cu_seqlens_q: torch.Tensor | None = None
) -> torch.Tensor:
    """A vendor's LSE as [H, T] float32 in natural log, a view where it can be; its empty rows as they are.

    >>> lse_rows(torch.zeros(1, 2, 8, 1), LseForm(layout="bhs1"), 2, 5, torch.tensor([0, 5])).shape
    torch.Size([2, 5])

    Raises:
        ValueError: as `normalize_lse`.
    """
    layout, given = form.layout, lse
    if layout == "ht":
        fits = lse.dim() == 2 and lse.shape[0] == num_heads and lse.shape[1] >= num_tokens
    elif layout == "th":
        fits = lse.dim() == 2 and lse.shape[0] >= num_tokens and lse.shape[1] == num_heads
        lse = lse.T if fits else lse
    else:
        if layout == "bsh":
            lse = lse.transpose(-1, -2)
        elif layout == "bhs1" and lse.shape[-1] == 1:
            lse = lse.squeeze(-1)
        if cu_seqlens_q is None:
            raise ValueError(f"cu_seqlens_q is None; an LSE of layout {layout!r} needs it to find each request's rows")
        fits = lse.dim() == 3 and lse.shape[:2] == (len(cu_seqlens_q) - 1, num_heads)
    if not fits:
        raise ValueError(
            f"lse has shape {tuple(given.shape)}; layout {layout!r} of {num_heads} heads and {num_tokens} tokens "
            "does not allow it"
        )
    if layout.startswith("b"):
        assert cu_seqlens_q is not None
        request, offset = _requests(cu_seqlens_q, num_tokens)
        lse = lse[request, :, offset].T
    rows = lse[:, :num_tokens].float()
    return rows * math.log(2) if form.base == "2" else rows


def _requests(cu_seqlens_q: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each packed token and its place there, both [T] int64."""
    cu = cu_seqlens_q.long()
    token = torch.arange(num_tokens, device=cu.device)
    request = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    return request, token - cu[request]


def _check(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; they must be as many, and at least one")
    shape = outs[0].shape
    if len(shape) != 3:
        raise ValueError(f"outs[0] has shape {tuple(shape)}; it must be [T, H, Dv]")
    tokens, heads, _ = shape
    for i, (part, log) in enumerate(zip(outs, lses, strict=True)):
        if part.shape != shape:
            raise ValueError(f"outs[{i}] has shape {tuple(part.shape)}; outs[0] has {tuple(shape)}")
        if log.shape != (heads, tokens):
            raise ValueError(f"lses[{i}] has shape {tuple(log.shape)}; it must be [H, T] = {(heads, tokens)}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be [H] = {(heads,)}")
