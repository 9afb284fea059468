"""What a wrong kernel reads: which keys and values it takes for a request's, for each fault of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from portable.conformance.cells import Case
from portable.conformance.inputs import Inputs, each, worth

Rows = Callable[[Case, Inputs], "Inputs | None"]  # the inputs as the fault makes them; None where it cannot be told
Rescale = Callable[[torch.Tensor], torch.Tensor]

FLAVOURS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def rescaled(k: Rescale | None, v: Rescale | None) -> Rows:
    """Other scales of an fp8 cache."""

    def fault(case: Case, inputs: Inputs) -> Inputs | None:
        k_scale, v_scale = inputs.tensors.k_scale, inputs.tensors.v_scale
        if inputs.stored is None or k_scale is None:
            return None
        changed = inputs
        if k is not None:
            changed = replace(changed, k=inputs.k * (k(k_scale.double()) / k_scale.double()).reshape(-1, 1))
        if case.layer.family == "mla":
            return replace(changed, v=changed.k[..., : case.layer.kv_lora_rank])
        if v is not None and v_scale is not None:
            changed = replace(changed, v=inputs.v * (v(v_scale.double()) / v_scale.double()).reshape(-1, 1))
        return changed

    return fault


def another_flavour(flavour: torch.dtype) -> Rows:
    """The bytes of the cache taken for another 8-bit type."""

    def fault(case: Case, inputs: Inputs) -> Inputs | None:
        stored, tensors, device = inputs.stored, inputs.tensors, str(inputs.k.device)
        if stored is None or stored.k.dtype.itemsize > 1 or stored.k.dtype == flavour:
            return None
        read = each(stored, lambda part: part.view(flavour))
        k = worth(read.k, tensors.k_scale, device)
        if read.v is None:
            k = k[:, None]
            return replace(inputs, k=k, v=k[..., : case.layer.kv_lora_rank])
        return replace(inputs, k=k, v=worth(read.v, tensors.v_scale, device))

    return fault


def swapped(case: Case, inputs: Inputs) -> Inputs | None:
    return replace(inputs, k=inputs.v, v=inputs.k) if inputs.k.shape == inputs.v.shape else None


def on_pages(order: Callable[[list[int]], list[int]]) -> Rows:
    """The pages of each request in another order."""

    def fault(case: Case, inputs: Inputs) -> Inputs | None:
        table, size = inputs.segment.block_table, case.page_size
        if table is None or size is None:
            return None
        rows, at = [], 0
        for r, (_, keys) in enumerate(case.lens):
            pages = table[r, : -(-keys // size)].tolist()
            places = {page: i for i, page in enumerate(pages)}
            positions = [places[page] * size + i for page in order(pages) for i in range(size)][:keys]
            rows += [at + position if position < keys else -1 for position in positions]
            at += keys
        chosen = torch.tensor(rows, dtype=torch.int64, device=inputs.k.device)
        k, v = (torch.cat([part, 0 * part[:1]])[chosen] for part in (inputs.k, inputs.v))  # a tail of zeros is read
        return None if rows == list(range(at)) else replace(inputs, k=k, v=v)

    return fault


def of_another_request(case: Case, inputs: Inputs) -> Inputs | None:
    """Every request on the pages of the one before it."""
    keys = [s for _, s in case.lens]
    if inputs.segment.block_table is None or len(set(keys)) > 1 or len(keys) < 2:
        return None
    order = torch.arange(len(inputs.k), device=inputs.k.device).roll(keys[0])
    return replace(inputs, k=inputs.k[order], v=inputs.v[order])


READ: dict[str, Rows] = {
    "k_scale missing": rescaled(torch.ones_like, None),
    "v_scale missing": rescaled(None, torch.ones_like),
    "k_scale and v_scale missing": rescaled(torch.ones_like, torch.ones_like),
    "reciprocal scales": rescaled(torch.reciprocal, torch.reciprocal),
    "scale of the first head for all": rescaled(
        lambda scale: scale.flatten()[0].expand_as(scale), lambda scale: scale.flatten()[0].expand_as(scale)
    ),
    **{f"fp8 flavour: read as {str(name).removeprefix('torch.float8_')}": another_flavour(name) for name in FLAVOURS},
    "K and V swapped": swapped,
    "page order": on_pages(sorted),
    "page order, reversed": on_pages(lambda pages: pages[::-1]),
    "pages of another request": of_another_request,
}


def read(case: Case, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """(name, what a kernel with the fault reads) of each fault of reading that can be told in this case."""
    for name, fault in READ.items():
        if (found := fault(case, inputs)) is not None:
            yield name, found


def another(dtype: torch.dtype) -> list[torch.dtype]:
    """The 8-bit types that its bytes may be taken for."""
    return [flavour for flavour in FLAVOURS if flavour != dtype]
