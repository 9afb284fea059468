"""Every convention matters: with one field of an adapter's convention changed, some case of the contract fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import contract
import pytest
import test_flash_attn as flash

import portable
from portable.backends import flash_attn
from portable.backends.adapter import Adapter
from portable.backends.convention import Convention
from portable.kernel import Kernel

OTHER_LAYOUT = {"ht": "th", "th": "ht", "bhs": "bsh", "bsh": "bhs", "bhs1": "bsh"}
# Leaving these out changes what is computed, or cannot be called at all.
NEEDED = ("scale", "lse", "block_table", "seq_lens", "cu_seqlens_k")
FEATURES = ("window", "softcap", "alibi", "sinks")


def mutants(convention: Convention, features: frozenset[str]) -> Iterator[tuple[str, Convention]]:
    """Conventions that are wrong in one thing."""
    form, names = convention.lse, convention.names
    if "lse" in names:
        yield "base", replace(convention, lse=replace(form, base="2"))
        yield "layout", replace(convention, lse=replace(form, layout=OTHER_LAYOUT[form.layout]))
        if form.empty not in ("-inf", "sink") and convention.zeroes_empty:  # else rows are set from lengths as it is
            yield "empty", replace(convention, lse=replace(form, empty="-inf"))
        count, at = next(iter(convention.returns.items()))
        yield "arity", replace(convention, returns={count + 1: at})
        yield "place of the LSE", replace(convention, returns={count: 1 - at})
    if not convention.zeroes_empty:
        yield "zeroes_empty", replace(convention, zeroes_empty=True)
    for name in (*NEEDED, *FEATURES):
        if name in names and (name in features or name not in FEATURES):
            rest = {other: keyword for other, keyword in names.items() if other != name}
            yield f"without {name}", replace(convention, names=rest)
    if "window" in names and "window" in features:
        yield "open_side", replace(convention, open_side=-1 if convention.open_side is None else None)
        yield "window_more", replace(convention, window_more=(0,))
    yield "rows", replace(convention, rows="batch" if convention.rows == "packed" else "packed")
    for field in ("equal_value_dim", "folds_single"):
        if getattr(convention, field):
            yield field, replace(convention, **{field: False})
    if "causal" in names and "window" not in names:  # which would close the right side as well
        yield "without causal", replace(convention, names={n: word for n, word in names.items() if n != "causal"})
    if "fa_version" in convention.fixed:
        yield "fixed", replace(convention, fixed={"fa_version": 5 - convention.fixed["fa_version"]})
    if convention.sink_dtype is not None:
        yield "sink_dtype", replace(convention, sink_dtype=None)
    if not convention.writes_out:
        yield "writes_out", replace(convention, writes_out=True)


def all_mutants() -> Iterator[tuple[Kernel, str, Convention]]:
    """Of each convention once, with a kernel that has it."""
    seen: list[Convention] = []
    for kernel in flash_attn.KERNELS:
        convention = kernel.run.__self__.convention
        if convention not in seen:
            seen.append(convention)
            yield from ((kernel, name, mutant) for name, mutant in mutants(convention, kernel.caps.features))


ALL = list(all_mutants())


@pytest.mark.parametrize(
    ("kernel", "name", "mutant"), ALL, ids=[f"{kernel.name}-{name.replace(' ', '_')}" for kernel, name, _ in ALL]
)
def test_a_wrong_convention_fails_the_contract(kernel, name, mutant, monkeypatch):
    module, arch, builds = flash.builds_of(kernel)
    broken = Adapter(mutant)
    wrong = replace(kernel, run=broken.run, prepare=broken.prepare)
    cases = flash.cases_of(kernel, portable.describe(arch))
    for make in builds:
        monkeypatch.setitem(sys.modules, module, make())
        for case in cases:
            try:
                contract.check(wrong, case)
            except Exception:
                return
    pytest.fail(f"no case notices a wrong {name}")
