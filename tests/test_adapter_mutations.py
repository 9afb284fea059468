"""Every convention matters: with one field of an adapter's convention changed, some case of the contract fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import test_aiter as aiter_tests
import test_flash_attn as flash
import test_flash_mla as mla
import test_torch_flash as torch_tests
import torch
from fakes import aiter as fake_aiter
from fakes.torch_ops import installed
from packaging.specifiers import SpecifierSet

import portable
from portable.backends import aiter, flash_attn, flash_mla
from portable.backends.convention import Convention
from portable.conformance import cells, contract
from portable.kernel import Kernel

OTHER_LAYOUT = {"ht": "th", "th": "ht", "bhs": "bsh", "bsh": "bhs", "bhs1": "bsh"}
# Leaving these out changes what is computed, or cannot be called at all.
NEEDED = ("scale", "lse", "block_table", "seq_lens", "cu_seqlens_k", "kv_indptr", "kv_indices", "max_seq_len")
SCALES = ("k_descale", "v_descale")
OTHER_PAGES = {"page": "token", "token": "page", "single": "token"}
SCRATCH = ("mla_decode_fwd",)  # what returns something else than its output first
FEATURES = ("window", "softcap", "alibi", "sinks")


def mutants(convention: Convention, features: frozenset[str]) -> Iterator[tuple[str, Convention]]:
    """Conventions that are wrong in one thing, such that it matters somewhere."""
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
    for name in (*NEEDED, *FEATURES, *SCALES):
        if name in names and (name in features or name not in FEATURES):
            rest = {other: keyword for other, keyword in names.items() if other != name}
            yield f"without {name}", replace(convention, names=rest)
    if "window" in names and "window" in features:
        yield "open_side", replace(convention, open_side=-1 if convention.open_side is None else None)
        if convention.literal_right:
            yield "literal_right", replace(convention, literal_right=False)
        yield "window_more", replace(convention, window_more=() if convention.window_more else (0,))
    yield "rows", replace(convention, rows="batch" if convention.rows == "packed" else "packed")
    for field in ("equal_value_dim", "folds_single", "dense_rows", "out_of_single"):
        if getattr(convention, field):
            yield field, replace(convention, **{field: False})
    if "causal" in names and "window" not in names:  # which would close the right side as well
        yield "without causal", replace(convention, names={n: word for n, word in names.items() if n != "causal"})
    if "fa_version" in convention.fixed:
        yield "fixed", replace(convention, fixed={"fa_version": 5 - convention.fixed["fa_version"]})
    if convention.sink_dtype is not None:
        yield "sink_dtype", replace(convention, sink_dtype=None)
    if "out" in names and (not convention.writes_out or convention.function in SCRATCH):
        yield "writes_out", replace(convention, writes_out=not convention.writes_out)
    if "kv_indices" in names:
        yield "pages", replace(convention, pages=OTHER_PAGES[convention.pages])
    for keyword in convention.step:
        if keyword != "scheduler_metadata":  # a schedule saves time and changes no result
            rest = {word: make for word, make in convention.step.items() if word != keyword}
            yield f"without the step's {keyword}", replace(convention, step=rest)


@dataclass(frozen=True)
class Subject:
    """A kernel on the stand-ins for its builds, and the contract's cases for it."""

    kernel: Kernel
    installs: Sequence[Callable[[pytest.MonkeyPatch], object]]
    cases: Callable[[], Sequence[cells.Case]]


def subjects() -> Iterator[Subject]:
    for kernel in flash_attn.KERNELS:
        module, arch, builds = flash.builds_of(kernel)
        target = portable.describe(arch)
        installs = [lambda patch, make=make, name=module: patch.setitem(sys.modules, name, make()) for make in builds]
        yield Subject(kernel, installs, partial(flash.cases_of, kernel, target))
    for kernel in flash_mla.KERNELS:
        installs = [partial(mla.install, kernel=kernel, build=build) for build in mla.BUILDS]
        yield Subject(kernel, installs, partial(mla.cases_of, kernel))
    for kernel in aiter.KERNELS:
        new, arch = aiter_tests.is_new(kernel), min(kernel.caps.archs)
        readings = [replace(each, arch=arch) for each in aiter_tests.READINGS]
        installs = [partial(fake_aiter.install, new=new, readings=each) for each in readings]
        yield Subject(kernel, installs, partial(aiter_tests.cases_of, kernel, portable.describe(arch)))
    for name, readings in (
        ("torch.flash", torch_tests.CUDA),
        ("torch.flash_rocm", torch_tests.ROCM),
        ("torch.varlen", [replace(each, varlen=True) for each in torch_tests.CUDA]),
    ):
        kernel = torch_tests.KERNELS[name]
        if all(SpecifierSet(needs).contains(torch.__version__, prereleases=True) for _, needs in kernel.caps.requires):
            installs = [lambda patch, each=each: installed(each) for each in readings]
            yield Subject(kernel, installs, partial(torch_tests.cases_of, kernel))


def all_mutants() -> Iterator[tuple[Subject, str, Convention]]:
    """Of each convention once, with a kernel that has it and serves most."""
    seen: list[Convention] = []
    for subject in sorted(subjects(), key=lambda subject: not subject.kernel.caps.kv_dtypes):
        owner = subject.kernel.run.__self__
        convention = getattr(owner, "adapter", owner).convention
        if convention not in seen:
            seen.append(convention)
            features = subject.kernel.caps.features
            yield from ((subject, name, mutant) for name, mutant in mutants(convention, features))


ALL = list(all_mutants())


def install_for(patch: pytest.MonkeyPatch, install: Callable[[pytest.MonkeyPatch], object]) -> Any:
    """What has been installed for as long as a block lasts, or the patch does."""
    made = install(patch)
    return made if isinstance(made, AbstractContextManager) else nullcontext()


@pytest.mark.parametrize(
    ("subject", "name", "mutant"), ALL, ids=[f"{each.kernel.name}-{name.replace(' ', '_')}" for each, name, _ in ALL]
)
def test_a_wrong_convention_fails_the_contract(subject, name, mutant, monkeypatch):
    broken = type(subject.kernel.run.__self__)(mutant)
    wrong = replace(subject.kernel, run=broken.run, prepare=broken.prepare)
    for install in subject.installs:
        with monkeypatch.context() as patch, install_for(patch, install):
            for case in subject.cases():
                try:
                    contract.check(wrong, case)
                except Exception:
                    return
    pytest.fail(f"no case notices a wrong {name}")
