"""The contract that every kernel meets, as one check against float64 on data made to show each departure from it.

    for case in cases(kernel, target): check(kernel, case, device)

An error is |got - want| / (1 + size), per element, and at most the kernel's declared tolerance for the layer's dtype.
The size of an output is the sum of |weight x value| (rounding a weight costs that, whatever cancels), of an LSE |want|.
What is not data is NaN: the rest of each page, pages of nobody, gaps of strided views, `out` before the call.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import recurrent
import torch
from cells import Case, Lens
from inputs import (
    Inputs,
    as_stored,
    blank_pages,
    build,
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
)

from portable.backends.reference import attend
from portable.kernel import ATTENTION, KV, Kernel, Op

SEEN = 0.15  # leaving a feature out changes the result by at least this error
MOST = 0.03  # so no tolerance may come near it
LSE_TOLERANCE = 2e-6  # the least that is asked of an LSE: it is float32 for every dtype


def check(kernel: Kernel, case: Case, device: str = "cpu") -> set[str]:
    """Raise AssertionError where the kernel departs from the contract in this case; else the features it shows."""
    if case.op in ATTENTION:
        return check_attention(kernel, case, device)
    if case.op in recurrent.AXES:
        recurrent.check(kernel, case, device)
        return set()
    {
        Op.MERGE: check_merge,
        Op.CACHE_WRITE: check_write,
        Op.CACHE_GATHER: check_gather,
        Op.CACHE_COPY: check_copy,
    }[case.op](kernel, case, device)
    return set()


def tolerance(kernel: Kernel, case: Case) -> float:
    declared = kernel.caps.tolerance.get(case.layer.dtype)
    assert declared is not None, f"{kernel} declares no tolerance for {case.layer.dtype}"
    assert declared <= MOST, f"{kernel} declares tolerance {declared}, above {MOST}: it would hide a dropped feature"
    return declared


def error(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | None = None) -> float:
    """The largest error; infinite where one is NaN or infinite and the other is not the same."""
    got, want = got.double(), want.double()
    errors = (got - want).abs() / (1 + (want.abs() if size is None else size))
    errors = errors.nan_to_num(nan=torch.inf).masked_fill(~want.isfinite(), torch.inf).masked_fill(got == want, 0)
    return float(errors.max()) if errors.numel() else 0.0


def check_attention(kernel: Kernel, case: Case, device: str) -> set[str]:
    layer, (inputs, features) = case.layer, telling(kernel, case, device)
    want, want_lse = expected(case, inputs)
    size = size_of(case, inputs)
    tokens, heads = inputs.q.shape[:2]
    out, out_guard = guarded((tokens, heads, inputs.v.shape[-1]), layer.dtype, case.strided, device)
    lse, lse_guard = guarded((tokens, heads) if case.strided else (heads, tokens), torch.float32, case.strided, device)
    lse = lse.T if case.strided else lse
    with unchanged(inputs.q, *inputs.kv, *inputs.tensors, *tensors_of(inputs.segment)):
        kernel.run(inputs.q, inputs.kv, inputs.segment, layer, inputs.tensors, out, lse if case.lse else None)
    most = tolerance(kernel, case)
    assert (wrong := error(out, want, size)) <= most, f"out is wrong by {wrong:.3g}, the tolerance is {most}"
    assert (out[(want == 0).all(-1)] == 0).all(), "a row without keys is not 0"
    out_guard("out")
    if case.lse:
        most = max(most, LSE_TOLERANCE)
        assert (wrong := error(lse, want_lse)) <= most, f"lse is wrong by {wrong:.3g}, the tolerance is {most}"
    lse_guard("lse")
    return features


def expected(case: Case, inputs: Inputs, **without: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The right answer, request by request; `without` overrides what a feature says, to leave it out."""
    layer, tensors = case.layer, inputs.tensors
    outs, lses, tokens, keys = [], [], 0, 0
    for r, (queries, length) in enumerate(case.lens):
        rows, columns = slice(tokens, tokens + queries), slice(keys, keys + length)
        given = {
            "scale": layer.scale,
            "causal": case.causal if isinstance(case.causal, bool) else case.causal[r],
            "window": layer.window,
            "softcap": layer.softcap,
            "sinks": tensors.sinks,
            "alibi": tensors.alibi,
        }
        part = attend(inputs.q[rows], inputs.k[columns], inputs.v[columns], **given | without, compute=torch.float64)
        outs.append(part.out)
        lses.append(part.lse)
        tokens, keys = tokens + queries, keys + length
    return torch.cat(outs), torch.cat(lses, 1)


def size_of(case: Case, inputs: Inputs) -> torch.Tensor:
    """The sum of |weight x value|, as large as the output where nothing cancels."""
    return expected(case, replace(inputs, v=inputs.v.abs()))[0]


def telling(kernel: Kernel, case: Case, device: str) -> tuple[Inputs, set[str]]:
    """Inputs for which each feature of the case changes the result, so that a kernel that drops one cannot pass."""
    for attempt in range(100):
        inputs = build(kernel, case, device, attempt)
        want, size = expected(case, inputs)[0], size_of(case, inputs)
        shown = {name: error(changed, want, size) for name, changed in without_features(case, inputs).items()}
        if all(difference >= SEEN for difference in shown.values()):
            return inputs, set(shown)
    raise AssertionError(f"no data were found that show every feature by {SEEN}: {shown}")


def without_features(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The result without each feature that must matter, given which keys the rows see."""
    layer = case.layer
    counts, causal_counts, open_counts = (
        visible_keys(case.lens, case.causal if causal is None else causal, window)
        for causal, window in ((None, layer.window), (True, layer.window), (None, (None, None)))
    )
    many, some = max(counts, default=0) > 1, max(counts, default=0) > 0
    drop: dict[str, dict[str, object]] = {}
    if open_counts != counts:
        drop["window"] = {"window": (None, None)}
    if causal_counts != counts:
        drop["noncausal"] = {"causal": True}
    if layer.softcap is not None and many:
        drop["softcap"] = {"softcap": None}
    if layer.alibi and many:
        drop["alibi"] = {"alibi": None}
    if layer.sinks and some:
        drop["sinks"] = {"sinks": None}
    if many:
        drop["scale"] = {"scale": layer.scale / 3}
    changed = {name: expected(case, inputs, **given)[0] for name, given in drop.items()}
    if case.scales != "none" and some:
        k_scale, v_scale = (1.0 if s is None else s.double().reshape(-1, 1) for s in inputs.tensors[2:4])
        changed["v_scale"] = expected(case, replace(inputs, v=inputs.v / v_scale))[0]
        if many:
            changed["k_scale"] = expected(case, replace(inputs, k=inputs.k / k_scale))[0]
    return changed


def visible_keys(lens: Lens, causal: bool | tuple[bool, ...], window: tuple[int | None, int | None]) -> list[int]:
    """How many keys each query sees."""
    left, right = window
    counts = []
    for r, (queries, keys) in enumerate(lens):
        bound = 0 if (causal if isinstance(causal, bool) else causal[r]) else right
        bound = bound if right is None or bound is None else min(bound, right)
        for here in range(keys - queries, keys):
            first = 0 if left is None else max(0, here - left)
            last = keys - 1 if bound is None else min(keys - 1, here + bound)
            counts.append(max(0, last - first + 1))
    return counts


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
    sinks = torch.linspace(-1, 2, heads, device=device) if layer.sinks else None
    weights = [part.double().masked_fill(part.isinf(), -torch.inf).exp().T[..., None] for part in lses]
    total = torch.stack(weights).sum(0) + (0 if sinks is None else sinks.double().exp()[:, None])
    want = torch.stack([(w * o.double()).masked_fill(w == 0, 0) for w, o in zip(weights, outs, strict=True)]).sum(0)
    want = (want / total).masked_fill(total == 0, 0)
    out, guard = guarded((tokens, heads, width), layer.dtype, case.strided, device)
    out, guard = (outs[0], lambda _: None) if case.in_place else (out, guard)
    lse = torch.full((heads, tokens), torch.nan, device=device)
    with unchanged(*outs[case.in_place :], *lses, sinks):
        kernel.run(outs, lses, sinks, out, lse)
    most = tolerance(kernel, case)
    assert (wrong := error(out, want)) <= most, f"out is wrong by {wrong:.3g}, the tolerance is {most}"
    assert (wrong := error(lse, total[..., 0].log().T)) <= LSE_TOLERANCE, f"lse is wrong by {wrong:.3g}"
    assert (out[parts] == 0).all(), "a row without keys in any part is not 0"
    guard("out")


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
    kv, want = (blank_pages(case, num_pages, device) for _ in range(2))
    tensors = scales_of(case, device)
    rows = KV(*(new and normal(tokens, *new).to(layer.dtype) for new in row_shapes(case)))
    stored = as_stored(layer, rows, tensors)
    given = KV(*(None if x is None else strided(x, case.strided, device) for x in rows))
    if layer.family == "mla" and not case.joined:
        given = KV(given.k[:, : layer.kv_lora_rank], given.k[:, layer.kv_lora_rank :])
    slots = slots.to(device=device, dtype=torch.int32 if case.slots == "int32" else torch.int64)
    blank = [storage_of(pages).clone() for pages in want if pages is not None]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < capacity:
            put(case, want, slot, stored, token)
    try:
        with unchanged(*given, slots, *tensors):
            kernel.run(given.k, given.v, kv, slots, layer, tensors)
        after = [storage_of(pages) for pages in want if pages is not None]
    except ValueError:
        assert case.slots == "past_the_end", "only a slot past the end may be refused"
        after = blank
    for got, right in zip((storage_of(pages) for pages in kv if pages is not None), after, strict=True):
        wrong = ~((got.double() == right.double()) | (got.double().isnan() & right.double().isnan()))
        assert not wrong.any(), f"{int(wrong.sum())} elements of the pages are wrong"


def check_gather(kernel: Kernel, case: Case, device: str) -> None:
    layer, inputs = case.layer, build(kernel, case, device)
    with unchanged(*inputs.kv, *inputs.tensors, *tensors_of(inputs.segment)):
        got = kernel.run(inputs.kv, inputs.segment, layer, inputs.tensors)
    expected_rows = (inputs.k[:, 0], None) if layer.family == "mla" else (inputs.k, inputs.v)
    for part, want in zip(got, expected_rows, strict=True):
        if want is None:
            assert part is None, "MLA has one tensor of latents"
            continue
        assert part.dtype == layer.dtype and part.shape == want.shape, f"gathered {part.dtype} {tuple(part.shape)}"
        assert (wrong := error(part, want)) <= tolerance(kernel, case), f"gathered rows are wrong by {wrong:.3g}"


def check_copy(kernel: Kernel, case: Case, device: str) -> None:
    """Three pages and a pair that copies nothing; every element of both pools afterwards."""
    pools = [blank_pages(case, 9, device) for _ in range(1 if case.same_pool else 2)]
    normal = numbers(case)
    for pages in (pages for pool in pools for pages in pool if pages is not None):
        pages.copy_(normal(*pages.shape).to(pages.dtype))
    source, target = pools[0], pools[-1]
    pairs = torch.tensor([[7, 0], [2, 8], [-1, 3], [7, 5], [4, -1]], device=device)
    memory = [[storage_of(pages, torch.uint8) for pages in pool if pages is not None] for pool in pools]
    before = [[part.clone() for part in pool] for pool in memory]
    want = [None if pages is None else pages.clone() for pages in target]
    for come, go in pairs.tolist():
        for pages, right in zip(source, want, strict=True):
            if come >= 0 and go >= 0 and pages is not None and right is not None:
                right[go] = pages[come]
    kernel.run(source, target, pairs, case.layer)
    for pages, right in zip(target, want, strict=True):
        if pages is not None and right is not None:
            assert torch.equal(pages.double(), right.double()), "pages differ from what was to be copied"
            pages[[0, 8, 5]] = torch.nan
    for pages, old in zip(memory[-1], before[-1], strict=True):
        changed = (pages != old).sum()
        assert changed <= 3 * pages.numel() // 9, f"{int(changed)} bytes beside the three pages were written"
    if not case.same_pool:
        assert all(torch.equal(a, b) for a, b in zip(memory[0], before[0], strict=True)), "the source was written"
