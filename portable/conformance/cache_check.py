"""The contract of the operations around attention: merges, and what writes, gathers and copies the pages of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from portable.conformance.cells import Case
from portable.conformance.faults import LN2
from portable.conformance.inputs import (
    as_stored,
    blank_pages,
    build,
    drawn,
    each,
    given_as,
    guarded,
    numbers,
    put,
    row_shapes,
    scales_of,
    seed_of,
    storage_of,
    strided,
    tensors_of,
    unchanged,
    untouched,
)
from portable.conformance.measure import LSE_TOLERANCE, NOT_ITS_OWN, Departure, error, require, tolerance, within
from portable.conformance.move_faults import explaining, memory_of, pages_wrongly, same
from portable.conformance.reading import another, read
from portable.kernel import KV, Kernel
from portable.layer import LayerTensors

GUARD = 16  # pages before the pool, which a slot of -1 must not reach; 16 of them keep every alignment
Rows = tuple[KV, torch.Tensor]  # stored rows, and the slot of each


def check_merge(kernel: Kernel, case: Case, device: str) -> None:
    """Row i < parts has no keys in part i, and the row behind those in no part; either infinity says so."""
    layer, normal, parts = case.layer, numbers(case), case.parts
    tokens, heads, width = parts + 4, layer.num_heads, layer.v_head_dim
    outs = [strided(normal(tokens, heads, width).to(layer.dtype), case.strided, device) for _ in range(parts)]
    lses = [2 * normal(heads, tokens) for _ in range(parts)]
    for part in range(parts):
        for row in (part, parts):
            lses[part][:, row] = torch.inf if (part + row) % 2 else -torch.inf
            outs[part][row] = torch.nan
    lses = [strided(part.T, True, device).T if case.strided else part.to(device) for part in lses]
    sinks = torch.linspace(-1, 2, heads, device=device).to(given_as(case)) if layer.sinks else None
    weights = [part.double().masked_fill(part.isinf(), -torch.inf).exp().T[..., None] for part in lses]
    total = torch.stack(weights).sum(0) + (0 if sinks is None else sinks.double().exp()[:, None])
    want = torch.stack([(w * o.double()).masked_fill(w == 0, 0) for w, o in zip(weights, outs, strict=True)]).sum(0)
    want = (want / total).masked_fill(total == 0, 0)
    out, guard = guarded((tokens, heads, width), layer.dtype, case.strided, device)
    out, guard = (outs[0], lambda _: None) if case.in_place else (out, guard)
    lse = untouched((heads, tokens), torch.float32, device)
    given = [part.double() for part in outs]  # before one of them is written in place
    with unchanged(*outs[case.in_place :], *lses, sinks):
        kernel.run(outs, lses, sinks, out, lse)
    right = want, total[..., 0].log().T
    try:
        within("out", out, right[0], tolerance(kernel, case))
        within("lse", lse, right[1], LSE_TOLERANCE)
        require((out[parts] == 0).all(), "a row without keys in any part is not 0")
    except Departure as departure:
        kinds = [
            name
            for name, (wrong, wrong_lse) in merged_wrongly(given, weights, sinks, right)
            if error(out, wrong) <= tolerance(kernel, case) and error(lse, wrong_lse) <= 10 * LSE_TOLERANCE
        ]
        raise Departure(departure.args[0], *kinds) from None
    guard("out")


def merged_wrongly(
    outs: list[torch.Tensor],
    weights: list[torch.Tensor],
    sinks: torch.Tensor | None,
    right: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """What a wrong kernel merges: (fault, (out, lse)); weights [T, H, 1] are the exponentials of the LSEs."""

    def merged(weights: list[torch.Tensor], more: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.stack(weights).sum(0) + more
        parts = [(w * o).masked_fill(w == 0, 0) for w, o in zip(weights, outs, strict=True)]
        return (torch.stack(parts).sum(0) / total).masked_fill(total == 0, 0), total[..., 0].log().T

    out, lse = right
    extra = 0.0 if sinks is None else sinks.double().exp()[:, None]
    yield "LSE base 2", (out, lse / LN2)
    yield "LSEs taken for base 2", merged([w**LN2 for w in weights], extra)
    yield "LSE not written", (out, torch.full_like(lse, torch.nan))
    yield "the last part left out", merged([*weights[:-1], 0 * weights[-1]], extra)
    yield "parts not weighted", merged([(w > 0).double() for w in weights], extra)
    if sinks is not None:
        yield "sink dropped", merged(weights, 0.0)
        yield "sink counted in every part", merged(weights, len(weights) * extra)
        yield "sink left out of the LSE", (out, merged(weights, 0.0)[1])


def check_write(kernel: Kernel, case: Case, device: str) -> None:
    """Every element of the pages afterwards: what was written, and all that was not."""
    layer, normal, page_size = case.layer, numbers(case), case.page_size or 1
    tokens, num_pages = 13, 3 + 13 // page_size
    capacity = num_pages * page_size
    slots = torch.from_numpy(np.random.default_rng(seed_of(case)).permutation(capacity)[:tokens])
    if case.slots in ("holes", "nothing"):
        slots[torch.arange(tokens) % 3 == 0 if case.slots == "holes" else slice(None)] = -1
    elif case.slots == "short":
        slots = slots[:-4]
    elif case.slots == "past_the_end":
        slots[1] = capacity
    tensors = scales_of(case, device)
    rows = each(drawn(normal, tokens, row_shapes(case.layer)), lambda new: new.to(layer.dtype))
    given = each(rows, lambda new: strided(new, case.strided, device))
    if layer.family == "mla" and not case.joined:
        given = KV(given.k[:, : layer.kv_lora_rank], given.k[:, layer.kv_lora_rank :])
    kv = pool(case, num_pages, device)
    right = pages_after(case, num_pages, device, as_stored(layer, rows, tensors), slots)
    asked = slots.to(device=device, dtype=torch.int32 if case.slots == "int32" else torch.int64)
    try:
        with unchanged(*given, asked, *tensors):
            kernel.run(given.k, given.v, kv, asked, layer, tensors)
    except ValueError:
        require(case.slots == "past_the_end", "only a slot past the end may be refused")
        right = memory(pool(case, num_pages, device))
    if wrong := differing(memory(kv), right):
        kinds = [
            name
            for name, (stored, at) in written_wrongly(case, rows, tensors, slots, capacity)
            if not differing(memory(kv), pages_after(case, num_pages, device, stored, at))
        ]
        raise Departure(f"{wrong} elements of the pages are wrong", *kinds)


def pool(case: Case, num_pages: int, device: str) -> KV:
    """Blank pages behind others that nobody may write."""
    return each(blank_pages(case, num_pages + GUARD, device), lambda pages: pages[GUARD:])


def memory(kv: KV) -> list[torch.Tensor]:
    """All the memory of the pages."""
    return [storage_of(pages) for pages in kv if pages is not None]


def differing(got: list[torch.Tensor], right: list[torch.Tensor]) -> int:
    """How many elements differ; NaN is like NaN."""
    return sum(
        int((~((a.double() == b.double()) | (a.double().isnan() & b.double().isnan()))).sum())
        for a, b in zip(got, right, strict=True)
    )


def pages_after(case: Case, num_pages: int, device: str, stored: KV, slots: torch.Tensor) -> list[torch.Tensor]:
    """The memory of a blank pool after rows were written to the slots that are in it."""
    kv = pool(case, num_pages, device)
    live = (slots >= 0) & (slots < num_pages * (case.page_size or 1))
    put(case, kv, slots[live], each(stored, lambda part: part[: len(slots)][live]))
    return memory(kv)


def written_wrongly(
    case: Case, rows: KV, tensors: LayerTensors, slots: torch.Tensor, capacity: int
) -> Iterator[tuple[str, Rows]]:
    """What a wrong kernel writes, and where: (fault, (stored rows, slots))."""
    layer, page_size = case.layer, case.page_size or 1
    stored = as_stored(layer, rows, tensors)
    nothing = torch.full_like(slots, -1)
    yield "pages not written", (stored, nothing)
    if (slots < 0).any():
        yield "slot -1 written", (stored, torch.where(slots < 0, capacity - 1, slots))
        yield "slot -1 written, to slot 0", (stored, torch.where(slots < 0, 0, slots))
        kept = slots[slots >= 0]
        yield "holes closed up", (stored, torch.cat([kept, nothing[len(kept) :]]))
    yield "slot past the end wraps", (stored, torch.where(slots >= capacity, slots % capacity, slots))
    yield "page and offset swapped", (stored, slots % page_size * (capacity // page_size) + slots // page_size)
    yield "slots one too far", (stored, slots + 1)
    if rows.v is not None and rows.v.shape == rows.k.shape:
        yield "K and V swapped", (KV(*(as_stored(layer, KV(rows.v, rows.k), tensors))), slots)
    if layer.kv_dtype.itemsize == 1:
        yield "scales missing", (as_stored(layer, rows, LayerTensors()), slots)
        inverse = tensors._replace(**{
            name: None if (scale := getattr(tensors, name)) is None else 1 / scale for name in ("k_scale", "v_scale")
        })  # fmt: skip
        yield "reciprocal scales", (as_stored(layer, rows, inverse), slots)
        for flavour in another(layer.kv_dtype):
            other = as_stored(replace(layer, kv_dtype=flavour), rows, tensors)
            name = str(flavour).removeprefix("torch.float8_")
            yield f"fp8 flavour: written as {name}", (each(other, lambda part: part.view(layer.kv_dtype)), slots)


def check_gather(kernel: Kernel, case: Case, device: str) -> None:
    layer, inputs = case.layer, build(kernel, case, device)
    expected = KV(inputs.k[:, 0], None) if layer.family == "mla" else KV(inputs.k, inputs.v)
    guards = []

    def room(want: torch.Tensor) -> torch.Tensor:
        rows, guard = guarded(tuple(want.shape), layer.dtype, False, device)
        guards.append(guard)
        return rows

    got = each(expected, room)
    with unchanged(*inputs.kv, *inputs.tensors, *tensors_of(inputs.segment)):
        kernel.run(inputs.kv, inputs.segment, layer, inputs.tensors, got)
    for part, want in zip(got, expected, strict=True):
        if part is None or want is None:
            continue
        try:
            within("a gathered row", part, want, tolerance(kernel, case))
        except Departure as departure:
            kinds = [
                name
                for name, other in read(case, inputs)
                if error(part, other.k[:, 0] if layer.family == "mla" else (other.k if part is got.k else other.v))
                <= tolerance(kernel, case)
            ]
            raise Departure(departure.args[0], *kinds) from None
    for guard in guards:
        guard("out")


def check_copy(kernel: Kernel, case: Case, device: str) -> None:
    """Three pages and a pair that copies nothing; every element of both pools afterwards."""
    pools = [blank_pages(case, 9, device) for _ in range(1 if case.same_pool else 2)]
    normal = numbers(case)
    for pages in (pages for pool in pools for pages in pool if pages is not None):
        pages.copy_(normal(*pages.shape).to(pages.dtype))
    source, target = pools[0], pools[-1]
    pairs = torch.tensor([[7, 0], [2, 8], [-1, 3], [7, 5], [4, -1]], device=device)
    want = [None if pages is None else pages.clone() for pages in target]
    for come, go in pairs.tolist():
        for part, copied in zip(source, want, strict=True):
            if come >= 0 and go >= 0 and part is not None and copied is not None:
                copied[go] = part[come]
    before = memory_of(*source, *target)
    kernel.run(source, target, pairs, case.layer)
    after = memory_of(*source, *target)
    got, right = ([part for part in pages if part is not None] for pages in (target, want))
    if differing(got, right):
        faults = pages_wrongly(source, target, before, [(come, go) for come, go in pairs.tolist()])
        kinds = explaining(faults, lambda wrong: same(wrong, after))
        raise Departure("pages differ from what was to be copied", *kinds)
    own = memory_of(*target)
    for at, old in before.items():
        changed = int((after[at] != old).sum())
        if at in own:  # K and V may share it
            require(changed <= 3 * len(old) // 9, f"{changed} bytes beside the three pages were written", NOT_ITS_OWN)
        else:
            require(changed == 0, "the source was written", "input written")
