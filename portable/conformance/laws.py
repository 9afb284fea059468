"""What a kernel promises beyond the result of one call: its bits in any batch, replays, far pages, other devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch

from portable.conformance import contract
from portable.conformance.cells import Case
from portable.conformance.inputs import Inputs, block_table, build, each, segment
from portable.conformance.lens import LENS, LONG, MORE, Lens
from portable.conformance.measure import Departure, require
from portable.conformance.oracle import expected, size_of
from portable.conformance.replay import captured, replaying
from portable.kernel import ATTENTION, GraphLevel, Kernel, Op
from portable.platform.target import Target


class Law(str, Enum):
    """What is asked of a case, beside the contract itself."""

    CONTRACT = "contract"
    BATCH = "batch invariance"
    BOUNDS = "lengths on the device"
    REPLAY = "graph replay"
    FAR = "pages past 2^31"
    DEVICE = "second device"

    def __str__(self) -> str:
        return self.value


FAR = 1 << 31  # elements of K before the pages that are used
STEPS: Mapping[GraphLevel, Lens] = {  # what a kernel of a graph level may be captured for
    GraphLevel.SINGLE: LENS["decode"],
    GraphLevel.UNIFORM: LENS["verify"],
    GraphLevel.VARLEN: LENS["extend"],
    GraphLevel.ALWAYS: LENS["extend"],
}


def asked(law: Law, kernel: Kernel, case: Case, target: Target) -> tuple[Case, tuple[str, ...]] | str | None:
    """The case that shows a law and the kernel's reasons against it; or why it cannot be asked on this machine.

    None where it is no law of the operation.

    A case is bent as far as the law needs: queries one by one where a kernel takes no more, and so on.
    """
    op, layer = kernel.caps.op, case.layer
    paged = op in (Op.PAGED, Op.MLA_DECODE)
    if law is Law.DEVICE:
        return (case, ()) if len(others(target)) else "this machine has one device"
    if law is Law.REPLAY and not paged:
        refused = kernel.why_not(target, layer, case.needs(GraphLevel.SINGLE))
        return "this device has no graphs" if target.device == "cpu" else (case, refused)
    if op not in ATTENTION or (law is not Law.BATCH and not paged):
        return None
    if law is Law.FAR and target.emulated:
        return "an emulated device has no room for it"
    many: tuple[Lens, ...] = LENS["extend"], MORE["holes"], LENS["decode"], LENS["verify"]
    graph = GraphLevel.NEVER
    if law is Law.BATCH:
        case = replace(case, layer=replace(layer, batch_invariant=True))
    elif law is Law.REPLAY:
        graph = max(GraphLevel.SINGLE, kernel.caps.graph_level)
        many = (STEPS[graph], *(LONG.values() if graph > GraphLevel.UNIFORM else ()))
    pages = pages_of(case) if law is Law.FAR else None
    reasons: tuple[str, ...] = ()
    for lens in (case.lens, *many) if law is not Law.REPLAY else many:
        bent = replace(case, lens=lens)
        refused = kernel.why_not(target, bent.layer, bent.needs(graph, pages))
        if not refused:
            return bent, ()
        reasons = reasons or refused
    return case, reasons


def check(law: Law, kernel: Kernel, case: Case, target: Target) -> set[str]:
    """Raise a Departure where the kernel breaks the law; else the features that the case shows."""
    if law is Law.CONTRACT:
        return contract.check(kernel, case, target.device)
    if law is Law.DEVICE:
        return contract.check(kernel, case, others(target)[0])
    if law is Law.REPLAY and kernel.caps.op not in (Op.PAGED, Op.MLA_DECODE):
        return contract.check(replace(kernel, run=captured(kernel.run, target.device)), case, target.device)
    checks: Mapping[Law, Callable[[Kernel, Case, str], None]] = {
        Law.BATCH: check_batch,
        Law.BOUNDS: check_bounds,
        Law.REPLAY: check_replay,
        Law.FAR: check_far,
    }
    checks[law](kernel, case, target.device)
    return set()


def others(target: Target) -> list[str]:
    """The devices of the same kind that are not the target, while it is the current one."""
    if target.device == "cpu":
        return []
    kind = target.device.partition(":")[0]
    return [f"{kind}:{i}" for i in range(torch.accelerator.device_count()) if i != target.index]


def is_right(kernel: Kernel, case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    contract.compare(kernel, case, inputs, out, lse, expected(case, inputs), size_of(case, inputs))


def check_batch(kernel: Kernel, case: Case, device: str) -> None:
    """The bits of a request are the same alone, and behind the others in another order."""
    inputs = build(kernel, case, device)
    out, lse = contract.call(kernel, case, inputs)
    is_right(kernel, case, inputs, out, lse)
    count = len(case.lens)
    for order in (*([r] for r in range(count)), list(range(count))[::-1]):
        rows, part, some = reordered(kernel, case, inputs, order, device)
        got, got_lse = contract.call(kernel, some, part)
        same = torch.equal(got.view(torch.uint8), out[rows].contiguous().view(torch.uint8))
        if lse is not None and got_lse is not None:
            same = same and torch.equal(got_lse, lse[:, rows])
        how = "alone" if len(order) == 1 else "in another order"
        require(same, f"the bits of requests {order} are others {how} than in the batch", "not batch invariant")


def reordered(
    kernel: Kernel, case: Case, inputs: Inputs, order: Sequence[int], device: str, lens: Lens | None = None
) -> tuple[torch.Tensor, Inputs, Case]:
    """Some requests of a batch, of their keys the first of `lens`; and the rows of their queries in the batch."""
    lens = lens or case.lens
    starts, keys = (np.concatenate([[0], np.cumsum([pair[i] for pair in case.lens])]) for i in range(2))

    def rows_of(at: np.ndarray, counts: Sequence[int]) -> torch.Tensor:
        rows = [np.arange(at[r], at[r] + n) for r, n in zip(order, counts, strict=True)]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)

    tokens = rows_of(starts, [case.lens[r][0] for r in order])
    seen = rows_of(keys, [lens[r][1] for r in order])
    causal = case.causal if isinstance(case.causal, bool) else tuple(case.causal[r] for r in order)
    some = replace(case, lens=tuple((case.lens[r][0], lens[r][1]) for r in order), causal=causal)
    table, kv = inputs.segment.block_table, inputs.kv
    if table is None:
        kv = each(kv, lambda part: part[seen])
    else:
        table = table[list(order)].contiguous()
    made = segment(kernel, some.lens, case.layer, table, case.page_size, causal, device)
    return tokens, Inputs(inputs.q[tokens], kv, made, inputs.tensors, inputs.k[seen], inputs.v[seen]), some


def bounded(kernel: Kernel, case: Case, inputs: Inputs, most: Lens, prepare: bool = True) -> Inputs:
    """The same step with true lengths on the device alone: the host knows `most`, at least as long."""
    keys = np.array([s for _, s in most], np.int32)
    made = replace(inputs.segment, host_seq_lens=keys, max_seq_len=int(keys.max(initial=0)), exact=False, prepared=None)
    if prepare and kernel.prepare is not None:
        made = replace(made, prepared=kernel.prepare(made, case.layer))
    return replace(inputs, segment=made)


def longer(lens: Lens, page_size: int | None) -> Lens:
    """Lengths that are no shorter and need no more pages than the table of the contract's cases has columns."""
    columns = max(-(-s // (page_size or 1)) for _, s in lens) + 1
    return tuple((q, min(s + 5, columns * (page_size or 1))) for q, s in lens)


def check_bounds(kernel: Kernel, case: Case, device: str) -> None:
    """The host knows upper bounds of the lengths only, as behind a speculative step."""
    inputs = bounded(kernel, case, build(kernel, case, device), longer(case.lens, case.page_size))
    try:
        is_right(kernel, case, inputs, *contract.call(kernel, case, inputs))
    except Departure as departure:
        raise Departure(departure.args[0], "host lengths taken for true ones", *departure.kinds) from None


def check_replay(kernel: Kernel, case: Case, device: str) -> None:
    """A captured call serves later steps: other lengths, other pages and other queries at the same addresses.

    On a device without graphs the call is made again as a replay would make it: all that the host knows is of the
    first step, and only what is on the device has changed.
    """
    later = build(kernel, case, device)
    order = list(range(len(case.lens)))
    if len({queries for queries, _ in case.lens}) == 1:
        order.reverse()  # each request on the pages of another
    shorter: Lens = tuple((q, max(min(q, s), s - 3 * (r + 1))) for r, (q, s) in enumerate(case.lens))
    _, first, first_case = reordered(kernel, case, later, order, device, shorter)
    most: Lens = tuple((q, max(s, t)) for (q, s), (_, t) in zip(first_case.lens, case.lens, strict=True))
    live = bounded(kernel, first_case, copied(first), most, prepare=False)
    out = first.q.new_empty(*first.q.shape[:2], later.v.shape[-1])
    lse = out.new_empty(out.shape[1], len(out), dtype=torch.float32) if case.lse else None

    def step() -> None:
        made = live.segment
        if kernel.prepare is not None:
            made = replace(made, prepared=kernel.prepare(made, case.layer))
        kernel.run(live.q, live.kv, made, case.layer, live.tensors, out, lse)

    steps = (("the captured step", first_case, first), ("a later step", case, later))
    with replaying(step, device) as replay:
        for name, at, inputs in (*steps, steps[0]):
            for old, new in zip(changing(live), changing(inputs), strict=True):
                old.copy_(new)
            out.fill_(torch.nan)
            replay()
            try:
                is_right(kernel, at, inputs, out, lse)
            except Departure as departure:
                later_on = ("stale graph metadata",) if name != steps[0][0] else ()
                message = f"in a replay of {name}, {departure.args[0]}"
                raise Departure(message, *later_on, *departure.kinds) from None


def changing(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is new in each step of a captured call."""
    assert inputs.segment.block_table is not None
    return inputs.q, inputs.segment.seq_lens, inputs.segment.block_table


def copied(inputs: Inputs) -> Inputs:
    q, seq_lens, table = (each.clone() for each in changing(inputs))
    return replace(inputs, q=q, segment=replace(inputs.segment, seq_lens=seq_lens, block_table=table))


def pages_of(case: Case) -> int:
    """Pages of a pool whose last ones are behind 2^31 elements."""
    layer = case.layer
    row = layer.latent_dim if layer.family == "mla" else layer.num_kv_heads * layer.qk_head_dim
    return -(-FAR // (row * (case.page_size or 1))) + block_table(case)[1]


def check_far(kernel: Kernel, case: Case, device: str) -> None:
    """Offsets of more than 32 bits: the same pages at the end of a pool of over 2^31 elements."""
    inputs = build(kernel, replace(case, pages="nhd", strided=False), device)
    table = inputs.segment.block_table
    assert table is not None
    total, used = pages_of(case), inputs.kv.k.shape[0]

    def far(part: torch.Tensor) -> torch.Tensor:
        shape = (total, *part.shape[1:])
        if device == "cpu":  # zeros of numpy take no memory until they are written
            base = torch.from_numpy(np.zeros(int(np.prod(shape)) * part.element_size(), np.uint8))
        else:
            base = torch.zeros(int(np.prod(shape)) * part.element_size(), dtype=torch.uint8, device=device)
        pool = base.view(part.dtype).view(shape)
        pool[total - used :] = part
        return pool

    inputs = replace(
        inputs,
        kv=each(inputs.kv, far),
        segment=segment(kernel, case.lens, case.layer, table + (total - used), case.page_size, case.causal, device),
    )
    try:
        is_right(kernel, case, inputs, *contract.call(kernel, case, inputs))
    except Departure as departure:
        raise Departure(departure.args[0], "block id in 32 bits", *departure.kinds) from None
