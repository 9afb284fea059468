"""Every keyword that an adapter passes is one that the vendor's function takes, and none that it wants is left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import aiter, aiter_releases, flash_attn_2, flash_attn_4
from packaging.specifiers import SpecifierSet
from signatures import RELEASES, Away, Release, Sources, sources

from portable.attention import load_kernels
from portable.backends.adapter import Adapter, Convention
from portable.backends.convention import why_not_called
from portable.kernel import Kernel

# Of these, no release can be had from the registry, or only one that is too large to fetch (FlashMLA's cannot even say
# its version without a compiler): stand-ins have their signatures.
ELSEWHERE = frozenset({"flash_attn_3", "flash_mla", "vllm"})
# They are for releases that are in no registry yet; their signatures were read in the projects' repositories.
LATER = frozenset(
    {
        "aiter.mla_decode",
        "aiter.varlen",
        "aiter.varlen_triton",
        "flash_attn.aiter_kvcache",
        "flash_attn.aiter_varlen",
        "flash_attn.kvcache_eager",
    }
)


def convention_of(kernel: Kernel) -> Convention | None:
    """How the vendor's function behind a kernel is called; None for a kernel of ours."""
    owner = getattr(kernel.run, "__self__", None)
    adapter = owner if isinstance(owner, Adapter) else getattr(owner, "adapter", None)
    return adapter.convention if isinstance(adapter, Adapter) else None


def adapted() -> list[tuple[Kernel, Convention]]:
    return [(kernel, found) for kernel in load_kernels() if (found := convention_of(kernel)) is not None]


def is_for(kernel: Kernel, release: Release) -> bool:
    """Whether a kernel accepts a release; "name[build]" is a build of the package "name"."""
    return any(
        name.partition("[")[0] == release.package and SpecifierSet(versions).contains(release.version, prereleases=True)
        for name, versions in kernel.caps.requires
    )


def drift(found: Sources, convention: Convention) -> str | None:
    """What keeps a release's function from being called as the convention says."""
    function = found.signature(convention.module, convention.function)
    return "is not there" if function is None else why_not_called(function, convention.keywords)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_every_keyword_exists_in_the_release(release: Release) -> None:
    try:
        found = sources(release)
    except Away as error:
        pytest.skip(f"the registry is away: {error}")
    checked, wrong = 0, []
    for kernel, convention in adapted():
        if is_for(kernel, release):
            checked += 1
            if reason := drift(found, convention):
                wrong.append(f"{kernel.name}: {convention.module}.{convention.function} {reason}")
    assert not wrong, "\n".join(wrong)
    assert checked, f"no kernel is for {release}"


def stand_ins() -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """The functions that stand in for those of a release: module and function."""
    old = aiter_releases.public(aiter.Aiter(False, aiter.Readings()))
    places = {"triton_varlen": "aiter.ops.triton.mha", "mla_decode_fwd": "aiter.mla"}
    flash_2, flash_4 = flash_attn_2.module(flash_attn_2.CUDA), flash_attn_4.module()
    return {
        "amd-aiter-0.1.7.post2.dev18": [(places.get(name, "aiter"), function) for name, function in old.items()],
        "flash-attn-2.8.3": [
            ("flash_attn", flash_2.flash_attn_varlen_func),
            ("flash_attn", flash_2.flash_attn_with_kvcache),
        ],
        "flash-attn-4-4.0.0b36": [("flash_attn.cute", flash_4.flash_attn_varlen_func)],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "functions"), stand_ins().items(), ids=lambda given: given if str is type(given) else ""
)
def test_a_stand_in_has_the_signature_of_its_release(release: str, functions: list[Any]) -> None:
    """Names, their order, and which may be left out; a stand-in may end before arguments that no adapter passes."""
    try:
        found = sources(next(each for each in RELEASES if str(each) == release))
    except Away as error:
        pytest.skip(f"the registry is away: {error}")
    for module, function in functions:
        fake = inspect.signature(function).parameters
        name = {"triton_varlen": "flash_attn_varlen_func"}.get(function.__name__, function.__name__)
        real = found.signature(module, name)
        assert real is not None, f"{module}.{name} is not there"
        wanted = list(inspect.signature(real).parameters.values())
        given = [(each.name, each.default is each.empty) for each in fake.values()]
        assert given == [(each.name, each.default is each.empty) for each in wanted][: len(given)], name
        assert all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in wanted[len(given) :])


def test_every_adapter_is_for_a_release_that_is_checked_or_is_known_not_to_be() -> None:
    unchecked = set()
    for kernel, _ in adapted():
        packages = {name.partition("[")[0] for name, _ in kernel.caps.requires}
        if not packages & ELSEWHERE and not is_torch(kernel) and not any(is_for(kernel, each) for each in RELEASES):
            unchecked.add(kernel.name)
    assert unchecked == LATER


def test_torch_here_takes_what_it_is_given() -> None:
    found = [(kernel, convention) for kernel, convention in adapted() if is_torch(kernel)]
    assert {convention.function.partition(".")[0] for _, convention in found} >= {"ops", "varlen_attn"}
    for kernel, convention in found:
        if all(
            SpecifierSet(versions).contains(torch.__version__, prereleases=True) for _, versions in kernel.caps.requires
        ):
            assert Adapter(convention).bind()


def is_torch(kernel: Kernel) -> bool:
    return any(name == "torch" for name, _ in kernel.caps.requires)


# The reading itself, on a package made for it.

PACKAGE = Sources(
    {
        "lib/__init__.py": "from .inner import *\nfrom lib.other import f as renamed\nif X: from .deep import late",
        "lib/inner.py": "try:\n    def f(q, k, /, v, scale=None, *rest, causal, window=(-1, -1)): ...\nexcept X: pass",
        "lib/other.py": "def f(a, **options): ...",
        "lib/deep/__init__.py": "from ..deep.end import late",
        "lib/deep/end.py": "@decorated\ndef late(x): ...",
    }
)


@pytest.mark.parametrize(
    ("name", "keywords", "reason"),
    [
        ("f", ("v", "causal"), None),
        ("f", ("v", "causal", "window"), None),
        ("f", ("v",), "wants 'causal'"),
        ("f", ("v", "causal", "softcap"), "takes no 'softcap'"),
        ("renamed", ("a", "softcap"), None),
        ("inner.f", ("causal",), "wants 'v'"),
        ("late", (), "wants 'x'"),
        ("absent", (), "is not there"),
    ],
)
def test_a_signature_is_read_without_an_import(name: str, keywords: tuple[str, ...], reason: str | None) -> None:
    convention = Convention(module="lib", function=name, names={}, fixed=dict.fromkeys(keywords))
    assert drift(PACKAGE, convention) == reason


def test_a_drift_is_named() -> None:
    def next_release(query: object, key: object, value: object, *, soft_cap: float = 0.0) -> None: ...

    wants: Callable[..., Any] = next_release
    assert why_not_called(wants, ("query", "key", "value", "softcap")) == "takes no 'softcap'"
