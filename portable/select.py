"""The choice of a kernel: a pure function of the target, the layer, the need and the installed packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from portable.arguments import named
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer, UnsupportedError
from portable.packages import Package
from portable.platform.target import Target

if TYPE_CHECKING:
    from portable.platform.target import Fastest

REFERENCE = "reference"  # the provider that is asked last
VARIABLE = "PORTABLE_BACKEND"

Reasons = tuple[str, ...]
Verdict = Callable[[Kernel], "str | None"]  # why a kernel that could serve is not to be used


@dataclass(frozen=True, slots=True)
class Request:
    """What the user forces: one name for every operation that it serves, and names for single operations."""

    name: str | None = None
    ops: tuple[tuple[Op, str], ...] = ()
    source: str = "backend"  # what an error message calls it

    @property
    def names(self) -> tuple[str, ...]:
        """Every provider and kernel name in the request."""
        return tuple(name for name in (self.name, *(name for _, name in self.ops)) if name is not None)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that serves an operation, why it was chosen, and what became of the others."""

    op: Op
    kernel: Kernel
    rejected: tuple[tuple[str, Reasons], ...] = ()  # kernels that were asked and cannot, in the order of asking
    alternatives: tuple[str, ...] = ()  # kernels that can as well, ranked after the chosen one
    how: str = "automatic"


def parse_requested(requested: str | Mapping[str, str] | Request | None, source: str = "backend") -> Request | None:
    """Read a forced choice: a provider or kernel name, "op=name,...", or a mapping from operation to name.

    >>> parse_requested("triton").name
    'triton'
    >>> parse_requested("triton,prefill=flash_attn").ops
    ((<Op.PREFILL: 'prefill'>, 'flash_attn'),)

    Raises:
        ValueError: an operation that does not exist, one that is named twice, or an entry without a name.
    """
    if requested is None or isinstance(requested, Request):
        return requested
    if isinstance(requested, str):
        if not requested.strip():
            return None
        pairs = [tuple(part.strip() for part in entry.rpartition("=")[::2]) for entry in requested.split(",")]
    else:
        pairs = [(str(op), name) for op, name in requested.items()]
    general: str | None = None
    ops: dict[Op, str] = {}
    for key, name in pairs:
        if not name:
            raise ValueError(f"{source} {requested!r} has an entry without a name; write a name, or op=name,...")
        if not key:
            if general is not None:
                raise ValueError(f"{source} {requested!r} has two names for every operation, {general!r} and {name!r}")
            general = name
            continue
        if key not in {op.value for op in Op}:
            raise ValueError(f"{source} names the operation {key!r}; it must be one of {', '.join(Op)}")
        if Op(key) in ops:
            raise ValueError(f"{source} {requested!r} names the operation {key!r} twice")
        ops[Op(key)] = name
    return Request(general, tuple(ops.items()), source)


def requested_from_env(environ: Mapping[str, str]) -> Request | None:
    """The forced choice of `PORTABLE_BACKEND`; None when it is unset or empty.

    >>> requested_from_env({"PORTABLE_BACKEND": "paged=triton"}).names
    ('triton',)
    """
    return parse_requested(environ.get(VARIABLE), VARIABLE)


def requested_by(backend: str | None) -> Request | None:
    """The forced choice of an argument; None for that of the environment.

    >>> requested_by("triton").names
    ('triton',)
    """
    return requested_from_env(os.environ) if backend is None else parse_requested(backend)


@named
def select(
    op: Op,
    target: Target,
    layer: Layer,
    needs: Needs,
    requested: str | Mapping[str, str] | Request | None = None,
    installed: Mapping[str, str | Package] | None = None,
    kernels: Iterable[Kernel] | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
    verdict: Verdict | None = None,
) -> Choice:
    """The first kernel, in order, that can serve; of those that the user forced, when he forced any.

    Args:
        requested: a forced choice, as `parse_requested` reads it. A name for every operation leaves those to the
            automatic choice for which its provider has no kernel.
        installed: distribution name -> version, or `Package`; None = nothing is installed.
        kernels: the candidates in their order of registration.
        order: operation -> provider (or kernel) names, best first; None = what was measured on the target's arch for
            the need, and then the order of its vendor. What it does not list follows as registered, and the reference
            comes last.
        verdict: asked last, of one kernel after the other until one may be used; None = every one may.

    Raises:
        ValueError: a forced name that no kernel or provider has.
        UnsupportedError: no candidate can serve; the message lists each with its reasons, one candidate per line.
    """
    how, asked = survey(
        op,
        target,
        layer,
        needs,
        parse_requested(requested),
        {} if installed is None else installed,
        () if kernels is None else tuple(kernels),
        order,
        verdict,
    )
    able = [kernel for kernel, reasons in asked if not reasons]
    rejected = tuple((kernel.name, reasons) for kernel, reasons in asked if reasons)
    if not able:
        lines = [f"{name}: {'; '.join(reasons)}" for name, reasons in rejected] or ["no kernel is registered for it"]
        head = f"no kernel can serve {op} on {target.vendor} {target.arch} ({how})"
        raise UnsupportedError("\n  ".join((head, *lines)))
    return Choice(op, able[0], rejected, tuple(kernel.name for kernel in able[1:]), how)


def survey(
    op: Op,
    target: Target,
    layer: Layer,
    needs: Needs,
    request: Request | None,
    installed: Mapping[str, str | Package],
    kernels: tuple[Kernel, ...],
    order: Mapping[str, Sequence[str]] | None,
    verdict: Verdict | None = None,
) -> tuple[str, tuple[tuple[Kernel, Reasons], ...]]:
    """How the choice is made, and every candidate in its order with its reasons (none: it can serve)."""
    how, candidates = _candidates(op, kernels, request)
    fastest: tuple[str, ...] = ()
    if order is None:
        fastest = measured(op, target, layer, needs)
        names = (*fastest, *vendor_order(target).get(op.value, ()))
    else:
        names = tuple({str(key): ranked for key, ranked in order.items()}.get(op.value, ()))

    def rank(kernel: Kernel) -> int:
        if kernel.caps.provider == REFERENCE:
            return len(names) + 1
        return next((i for i, name in enumerate(names) if name in (kernel.name, kernel.caps.provider)), len(names))

    asked, served = [], False
    for kernel in sorted(candidates, key=rank):
        reasons = kernel.why_not(target, layer, needs)
        reasons += _package_reasons(kernel, target, installed, opened=not reasons)
        if not (reasons or served) and verdict is not None and (found := verdict(kernel)):
            reasons = (found,)
        served = served or not reasons
        asked.append((kernel, reasons))
    chosen = next((kernel.caps for kernel, reasons in asked if not reasons), None)
    if chosen is not None and not {chosen.name, chosen.provider}.isdisjoint(fastest):
        how += f", as measured on {target.arch}"
    return how, tuple(asked)


def why_not_here(
    kernel: Kernel, target: Target, installed: Mapping[str, str | Package], verdict: Verdict | None = None
) -> Reasons:
    """Every reason for which a kernel cannot run on a target, whatever the layer; empty when it can."""
    reasons = kernel.why_not_on(target)
    reasons += _package_reasons(kernel, target, installed, opened=not reasons)
    found = None if reasons or verdict is None else verdict(kernel)
    return (found,) if found else reasons


def vendor_order(target: Target) -> Mapping[str, Sequence[str]]:
    """The `ORDER` of the target's vendor: operation -> provider names, best first; empty for an unknown vendor."""
    from portable.platform.detect import vendors

    order: Mapping[str, Sequence[str]] = getattr(vendors().get(target.vendor), "ORDER", {})
    return order


def measured(op: Op, target: Target, layer: Layer, needs: Needs) -> tuple[str, ...]:
    """The names that the vendor's first row of `MEASURED` for this need puts before its order; () where none fits."""
    from portable.platform.detect import vendors

    rows: Sequence[Fastest] = getattr(vendors().get(target.vendor), "MEASURED", ())
    facts = {
        "num_heads": layer.num_heads,
        "qk_head_dim": layer.qk_head_dim,
        "query_len": needs.query_len,
        "seq_len": needs.seq_len,
        "reqs": needs.reqs,
        "page_size": needs.page_size or 0,
    }
    fits = (row for row in rows if row.fits(op.value, target.arch, facts, target.product))
    return next((row.first for row in fits), ())


def check_request(request: Request, kernels: Iterable[Kernel]) -> None:
    """Raise a ValueError, listing the valid names, unless every name in the request has a kernel."""
    every = tuple(kernels)
    providers = dict.fromkeys(kernel.caps.provider for kernel in every)
    names = dict.fromkeys(kernel.name for kernel in every)
    for name in request.names:
        if name not in providers and name not in names:
            near = [each for each in names if each.startswith(f"{name}.")][:3] or get_close_matches(name, names)
            like = f"; kernels like it: {', '.join(near)}" if near else ""
            raise ValueError(f"{request.source} {name!r} is not known; providers: {', '.join(providers)}{like}")
    for op, name in request.ops:
        able = [kernel for kernel in every if kernel.caps.op is op]
        if not any(name in (kernel.name, kernel.caps.provider) for kernel in able):
            served = ", ".join(dict.fromkeys(kernel.caps.provider for kernel in able)) or "no provider"
            raise ValueError(f"{request.source} {name!r} has no kernel for {op}; served by: {served}")


def _candidates(op: Op, kernels: tuple[Kernel, ...], request: Request | None) -> tuple[str, list[Kernel]]:
    """How the choice is made, and the kernels that may serve: all of the operation, or those that the request names."""
    of_op = [kernel for kernel in kernels if kernel.caps.op is op]
    if request is None:
        return "automatic", of_op
    check_request(request, kernels)
    wanted = dict(request.ops).get(op, request.name)
    if wanted is None:
        return "automatic", of_op
    forced = [kernel for kernel in of_op if wanted in (kernel.name, kernel.caps.provider)]
    if forced:
        return f"{request.source} {wanted!r}", forced
    return f"automatic: {wanted!r} has no kernel for {op}", of_op


def _package_reasons(
    kernel: Kernel, target: Target, installed: Mapping[str, str | Package], *, opened: bool
) -> Reasons:
    """Why the packages that a kernel needs will not do.

    A package matters only where the kernel could run, so nobody is told to install what would not help. It is
    opened (imported, on a live machine) only when nothing else refuses the kernel.
    """
    if target.vendor not in kernel.caps.vendors:
        return ()
    reasons = []
    for name, versions in (*kernel.caps.requires, *kernel.caps.requires_on.get(target.vendor, ())):
        # "name[build]" is one build of a package; of one that is only described, any
        found = installed.get(canonicalize_name(name)) or installed.get(name) or installed.get(name.partition("[")[0])
        package = Package(found) if isinstance(found, str) else found
        if package is None:
            reasons.append(f"{name} is not installed")
        elif package.version is None:
            reasons.append(f"{name} is not installed: {package.problem}")
        elif wrong := _wrong_version(package.version, versions):
            reasons.append(f"{name} {package.version} {wrong}")
        elif opened and package.problem:
            reasons.append(f"{name} {package.version} cannot be used: {package.problem}")
    return tuple(reasons)


def _wrong_version(version: str, versions: str) -> str | None:
    """How a version misses a specifier set, or None; pre-releases, post-releases and local versions count."""
    try:
        fits = not versions or SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return f"is not a version that can be compared with {versions}"
    return None if fits else f"is not {versions}"
