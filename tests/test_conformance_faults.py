"""Each fault that kernels have been seen to have makes the kit fail, with a message that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import portable
from portable.backends import reference
from portable.conformance.features import Scope
from portable.conformance.outcomes import FAILED, Row, row
from portable.conformance.report import kinds_of, of_row
from portable.kernel import GraphLevel, Kernel, Op
from portable.layer import UnsupportedError
from portable.sets import one_of

FP8 = {torch.float8_e4m3fn, torch.float8_e4m3fnuz}
CPU = portable.detect("cpu")
RIGHT = {kernel.caps.op: kernel for kernel in reference.KERNELS}
LN2 = 0.6931471805599453
SCORES, CALL, FP8_CELLS = "scores and mask", "call", "cache dtype"
WHERE = {  # the features of the kit that are run, where they are not those of scores: so that all faults take seconds
    "LSE": ("lengths",),
    "top-left causal": ("lengths",),
    "V not unpadded": ("head dim",),
    "block id in 32 bits": (CALL,),
    "stale graph metadata": (CALL, "extend", "decode"),
    "host lengths taken for true ones": (CALL, "extend"),
    "fp8 flavour": (FP8_CELLS,),
    "k_scale missing": (FP8_CELLS,),
    "v_scale missing": (FP8_CELLS,),
    "empty row": ("no keys", "more queries", "extend"),
    "wrong GQA map": ("2", "extend", "verify"),
    "page order, reversed": ("extend", "long", "verify", "holes"),
    "KV length one short": ("extend", "verify", "prefill"),
    "reads past the end of a request": ("lengths",),
    "out not written": ("extend",),
    "rows not written": ("extend", "decode", "verify"),
    "input written": ("extend",),
    "memory written that is not its own": ("strided", "extend"),
    "not batch invariant": (CALL,),
    "right unless": ("lengths",),
    "wrong from": ("lengths",),
}


def scope_of(kind: str) -> Scope:
    return Scope(pairs=0, features=next((some for begin, some in WHERE.items() if kind.startswith(begin)), (SCORES,)))


right = reference.paged


def small(op: Op, run: Callable[..., Any], **caps: Any) -> Kernel:
    """A kernel of few types and sizes, so that its row has few cells; it may be captured."""
    few: dict[str, Any] = dict(dtypes={torch.float32}, kv_dtypes=FP8, head_dims=one_of(64, 128, 192))
    if op is not Op.MERGE:
        few |= dict(page_sizes=one_of(16), cache_layouts=("strided",))
    if op is Op.PAGED:
        few |= dict(gqa_ratios=one_of(2), graph=GraphLevel.ALWAYS)
    return replace(RIGHT[op], caps=replace(RIGHT[op].caps, **few | caps), run=run)


def layered(**changes: Any) -> Callable[..., None]:
    """The layer says one thing and the kernel does another; a change may be a function of the layer."""

    def run(q, kv, segment, layer, tensors, out, lse):
        made = {name: value(layer) if callable(value) else value for name, value in changes.items()}
        right(q, kv, segment, replace(layer, **made), tensors, out, lse)

    return run


def given(**changes: Any) -> Callable[..., None]:
    """Other tensors than the layer's; a change may be a function of the tensor."""

    def run(q, kv, segment, layer, tensors, out, lse):
        made = {
            name: change(old) if callable(change) and (old := getattr(tensors, name)) is not None else None
            for name, change in changes.items()
        }
        right(q, kv, segment, layer, tensors._replace(**made), out, lse)

    return run


def segmented(**changes: Callable[[Any], Any]) -> Callable[..., None]:
    """Another segment than the one that was given."""

    def run(q, kv, segment, layer, tensors, out, lse):
        right(q, kv, replace(segment, **{name: f(segment) for name, f in changes.items()}), layer, tensors, out, lse)

    return run


def after(change: Callable[[torch.Tensor, torch.Tensor | None], None]) -> Callable[..., None]:
    """A right result, spoilt."""

    def run(q, kv, segment, layer, tensors, out, lse):
        right(q, kv, segment, layer, tensors, out, lse)
        change(out, lse)

    return run


def of_lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return after(lambda out, lse: None if lse is None else lse.copy_(change(lse.clone())))


def each_request(attend: Callable[..., Any]) -> Callable[..., None]:
    """Another attention, request by request: attend(q, k, v, **what the layer says)."""

    def run(q, kv, segment, layer, tensors, out, lse):
        start = 0
        for r, (queries, keys) in enumerate(reference.host_lens(segment)):
            k, v = reference.gather(kv, segment, r, keys, layer, tensors, torch.float32)
            rows = slice(start, start + queries)
            causal = segment.causal if isinstance(segment.causal, bool) else bool(segment.causal[r])
            part = attend(
                q[rows],
                k,
                v,
                scale=layer.scale,
                causal=causal,
                window=layer.window,
                softcap=layer.softcap,
                sinks=tensors.sinks,
                alibi=tensors.alibi,
            )
            out[rows] = part[0]
            if lse is not None:
                lse[:, rows] = part[1]
            start += queries

    return run


def top_left(q, k, v, **said):
    return reference.attend(q, k, v, **said, first=0)


def one_short(q, k, v, **said):
    return reference.attend(q, k[:-1], v[:-1], **said, first=len(k) - len(q))


def cap_last(q, k, v, *, scale, causal, window, softcap, sinks, alibi):
    """The cap after the mask."""
    if softcap is None:
        said = dict(scale=scale, causal=causal, window=window, softcap=None, sinks=sinks, alibi=alibi)
        return reference.attend(q, k, v, **said)
    group, places = q.shape[1] // k.shape[1], torch.arange(len(k) - len(q), len(k))
    distance = places[:, None] - torch.arange(len(k))
    seen = reference.visible(distance, causal, window)
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
    scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores - alibi[:, None, None] * distance.abs()
    extra = (
        torch.full((*scores.shape[:2], 1), -torch.inf) if sinks is None else sinks[:, None, None].expand(-1, len(q), 1)
    )
    weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(torch.cat([scores, extra], -1), -1)


def heads_in_turn(q, kv, segment, layer, tensors, out, lse):
    """Query head h on KV head h % num_kv_heads."""
    order = torch.arange(layer.num_heads).reshape(-1, layer.num_kv_heads).T.flatten()
    tensors = tensors._replace(
        sinks=None if tensors.sinks is None else tensors.sinks[order],
        alibi=None if tensors.alibi is None else tensors.alibi[order],
    )
    part, part_lse = torch.empty_like(out), torch.empty(layer.num_heads, len(q))
    right(q[:, order], kv, segment, layer, tensors, part, part_lse)
    out[:, order] = part
    if lse is not None:
        lse[order] = part_lse


def left_padded(q, kv, segment, layer, tensors, out, lse):
    """V is as wide as K to the vendor; its rows are copied as they come."""
    part = torch.empty(out.shape)
    right(q, kv, segment, layer, tensors, part, lse)
    wide = torch.nn.functional.pad(part, (0, max(0, q.shape[-1] - out.shape[-1])))
    out.copy_(wide.flatten()[: out.numel()].view(out.shape))


def other_flavour(q, kv, segment, layer, tensors, out, lse):
    turn = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    right(
        q, portable.KV(*(part.view(turn.get(part.dtype, part.dtype)) for part in kv)), segment, layer, tensors, out, lse
    )


def in_32_bits(q, kv, segment, layer, tensors, out, lse):
    step = kv.k.stride(0)
    offsets = (segment.block_table.long() * step).to(torch.int32).long()
    table = torch.div(offsets, step, rounding_mode="floor") % len(kv.k)
    right(q, kv, replace(segment, block_table=table), layer, tensors, out, lse)


def stale() -> Callable[..., None]:
    """The lengths that a tensor held when it was first seen."""
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(q, kv, segment, layer, tensors, out, lse):
        _, lens = known.setdefault(id(segment.seq_lens), (segment.seq_lens, segment.seq_lens.clone()))
        right(q, kv, replace(segment, seq_lens=lens, exact=False), layer, tensors, out, lse)

    return run


def of_empty(value: float) -> Callable[..., None]:
    return of_lse(lambda lse: lse.masked_fill(lse == -torch.inf, value))


def writes_rows_around(q, kv, segment, layer, tensors, out, lse):
    right(q, kv, segment, layer, tensors, out, lse)
    if out.storage_offset():
        out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()


def scales_q(q, kv, segment, layer, tensors, out, lse):
    q.mul_(layer.scale)
    right(q, kv, segment, replace(layer, scale=1.0), tensors, out, lse)


def whole_pages(q, kv, segment, layer, tensors, out, lse):
    size = segment.page_size
    if segment.exact:
        segment = replace(segment, host_seq_lens=-(-segment.host_seq_lens // size) * size)
    right(q, kv, segment, layer, tensors, out, lse)


def skips_the_last(q, kv, segment, layer, tensors, out, lse):
    part = torch.empty_like(out)
    right(q, kv, segment, layer, tensors, part, lse)
    last = int(segment.cu_seqlens_q.diff().nonzero()[-1])
    end = int(segment.cu_seqlens_q[last])
    out[:end] = part[:end]


def by_the_batch(q, kv, segment, layer, tensors, out, lse):
    right(q, kv, segment, layer, tensors, out, lse)
    out.mul_(1 + 1e-6 * (len(segment.host_seq_lens) > 1))


def spoilt_where(which: Callable[[int, int, int], bool]) -> Callable[..., None]:
    """Other numbers than any known fault's, in some requests: which(place, keys, how many there are)."""

    def run(q, kv, segment, layer, tensors, out, lse):
        right(q, kv, segment, layer, tensors, out, lse)
        ends, lens = segment.cu_seqlens_q.tolist(), segment.seq_lens.tolist()
        for r, keys in enumerate(lens):
            if which(r, keys, len(lens)):
                out[ends[r] : ends[r + 1]] *= -1.5

    return run


def flipped_pages(segment):
    counts = -(-segment.host_seq_lens // segment.page_size)
    table = segment.block_table.clone()
    for pages, count in zip(table, counts, strict=True):
        pages[:count] = pages[:count].flip(0)
    return table


def refuses(q, kv, segment, layer, tensors, out, lse):
    if layer.alibi:
        raise UnsupportedError("ALiBi is not in this build")
    right(q, kv, segment, layer, tensors, out, lse)


def slot_of_numpy(k, v, kv, slots, layer, tensors):
    """-1 is the last slot."""
    size = reference.page_size_of(kv, layer)
    reference.cache_write(k, v, kv, torch.where(slots < 0, len(kv.k) * size - 1, slots), layer, tensors)


def unscaled(k, v, kv, slots, layer, tensors):
    reference.cache_write(k, v, kv, slots, layer, type(tensors)())


def in_order(k, v, kv, slots, layer, tensors):
    """Row i to the i-th slot that is none of -1."""
    kept = slots[slots >= 0]
    reference.cache_write(k[: len(kept)], None if v is None else v[: len(kept)], kv, kept, layer, tensors)


def swaps(kv, segment, layer, tensors, out):
    same = out.v is not None and out.k.shape == out.v.shape
    reference.cache_gather(kv, segment, layer, tensors, portable.KV(*reversed(out)) if same else out)


def sinks_in_each_part(outs, lses, sinks, out, lse):
    if sinks is not None:
        shares = [torch.exp(part - torch.logaddexp(part, sinks[:, None])) for part in lses]
        outs = [o * share.T[..., None].to(o.dtype) for o, share in zip(outs, shares, strict=True)]
        lses = [torch.logaddexp(part.masked_fill(part == torch.inf, -torch.inf), sinks[:, None]) for part in lses]
        outs = [o.nan_to_num(0) for o in outs]
    reference.merge(outs, lses, None, out, lse)


def merged_in_base_2(outs, lses, sinks, out, lse):
    reference.merge(outs, lses, sinks, out, lse)
    if lse is not None:
        lse.div_(LN2)


PAGED: dict[str, Callable[..., Any]] = {
    "LSE base 2": of_lse(lambda lse: lse / LN2),
    "LSE layout transposed": of_lse(lambda lse: lse.T.contiguous().view(lse.shape)),
    "top-left causal": each_request(top_left),
    "window off by one on the left": layered(window=lambda layer: _wider(layer.window, 1, 0)),
    "window off by one on the left, too narrow": layered(window=lambda layer: _wider(layer.window, -1, 0)),
    "window off by one on the right": layered(window=lambda layer: _wider(layer.window, 0, 1)),
    "window dropped": layered(window=(None, None)),
    "sink dropped": given(sinks=None),
    "sink scaled": given(sinks=lambda sinks: sinks * 0.125),
    "scale missing": layered(scale=1.0),
    "scale applied twice": layered(scale=lambda layer: layer.scale**2),
    "another scale than the layer's": layered(scale=0.05),
    "V not unpadded": left_padded,
    "block id in 32 bits": in_32_bits,
    "stale graph metadata": stale(),
    "host lengths taken for true ones": segmented(exact=lambda segment: True),
    "softcap after mask": each_request(cap_last),
    "softcap dropped": layered(softcap=None),
    "fp8 flavour": other_flavour,
    "empty row NaN": after(lambda out, lse: out.masked_fill_((out == 0).all(-1, keepdim=True), torch.nan)),
    "empty row LSE is 0": of_empty(0.0),
    "empty row LSE is +inf": of_empty(torch.inf),
    "wrong GQA map": heads_in_turn,
    "ALiBi dropped": given(alibi=None),
    "ALiBi sign": given(alibi=lambda slopes: -slopes),
    "page order, reversed": segmented(block_table=flipped_pages),
    "KV length one short": each_request(one_short),
    "reads past the end of a request": whole_pages,
    "out not written": lambda *args: None,
    "rows not written": skips_the_last,
    "k_scale missing": given(k_scale=None),
    "v_scale missing": given(v_scale=None),
    "causal where it is not asked": segmented(causal=lambda segment: True),
    "causal dropped": segmented(causal=lambda segment: False),
    "input written": scales_q,
    "memory written that is not its own": writes_rows_around,
    "not batch invariant": by_the_batch,
    "raised": refuses,
    "right unless there is one request": spoilt_where(lambda place, keys, count: count == 1),
    "wrong from the 9th request on": spoilt_where(lambda place, keys, count: place >= 8),
    "wrong from the 17th request on": spoilt_where(lambda place, keys, count: place >= 16),
    "wrong from 2048 keys on": spoilt_where(lambda place, keys, count: keys >= 2048),
}
OTHERS: dict[str, tuple[Op, Callable[..., Any]]] = {
    "slot -1 written": (Op.CACHE_WRITE, slot_of_numpy),
    "scales missing": (Op.CACHE_WRITE, unscaled),
    "holes closed up": (Op.CACHE_WRITE, in_order),
    "K and V swapped": (Op.CACHE_GATHER, swaps),
    "sink counted in every part": (Op.MERGE, sinks_in_each_part),
    "LSE base 2, of a merge": (Op.MERGE, merged_in_base_2),
}


def _wider(window, left, right):
    return tuple(None if side is None else max(0, side + by) for side, by in zip(window, (left, right), strict=True))


def names_it(found: Row, kind: str) -> None:
    assert found.status == FAILED
    named = kinds_of(of_row(found, CPU)["cells"])
    assert any(name.startswith(kind) for name in named), named
    assert next(iter(named)).startswith(kind), named  # it explains the most
    messages = [outcome.reason for outcome in found.outcomes if any(k.startswith(kind) for k in outcome.kinds)]
    assert all(messages)


@pytest.mark.parametrize("kind", PAGED)
def test_a_faulty_attention_kernel_fails_and_the_fault_is_named(kind):
    names_it(row(small(Op.PAGED, PAGED[kind]), CPU, scope_of(kind)), kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_faulty_kernel_beside_attention_fails_and_the_fault_is_named(kind):
    op, run = OTHERS[kind]
    names_it(row(small(op, run), CPU, Scope(pairs=0)), kind.partition(", of")[0])


def of_op(op: Op, kind: str) -> Callable[..., None]:
    """A few of the faults for another operation of the same form."""

    def run(q, kv, segment, layer, tensors, out, lse):
        if kind == "scale missing":
            layer = replace(layer, scale=1.0)
        if kind == "causal dropped":
            segment = replace(segment, causal=False)
        RIGHT[op].run(q, kv, segment, layer, tensors, out, lse)
        if kind == "LSE base 2" and lse is not None:
            lse.div_(LN2)

    return run


@pytest.mark.parametrize("kind", ["scale missing", "causal dropped", "LSE base 2"])
@pytest.mark.parametrize("op", [Op.PREFILL, Op.MLA_DECODE])
def test_prompts_and_latents_are_told_as_pages_are(op, kind):
    kernel = replace(RIGHT[op], caps=replace(RIGHT[op].caps, dtypes={torch.float32}), run=of_op(op, kind))
    names_it(row(kernel, CPU, Scope(pairs=0, features=("lengths",))), kind)


@pytest.mark.parametrize("op", [Op.PAGED, *dict.fromkeys(op for op, _ in OTHERS.values())])
def test_the_same_kernels_without_a_fault_pass(op):
    found = row(small(op, RIGHT[op].run), CPU, Scope(pairs=0))
    assert found.status == "parity" and not found.count(FAILED)
