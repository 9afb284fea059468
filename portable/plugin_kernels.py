"""The kernels of plug-ins, looked at before they are offered: what their caps promise is tried, not believed."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet

from portable import plugins
from portable.kernel import Kernel, Needs, Op
from portable.layer import Layer
from portable.platform.detect import detect
from portable.proof import package_hash, packages_of

if TYPE_CHECKING:
    from portable.platform.target import Target

LAYERS = (
    Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32),
    Layer.mla(num_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.float32),
    Layer.mamba2(num_heads=4, head_dim=16, state_dim=16, num_groups=1, dtype=torch.float32),
)


def plugin_kernels(others: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """The kernels of the plug-ins that PORTABLE_PLUGINS allows, each with `plugin` set; `others` are portable's own.

    A plug-in is a module with `KERNELS`, or a sequence of kernels. It is left out as a whole where an item is not a
    kernel, has the name of another one or the provider of portable's, or cannot say what it serves.
    """
    others = tuple(others)
    taken = {kernel.name for kernel in others} | {kernel.caps.provider for kernel in others}
    found: list[Kernel] = []
    loaded = plugins.load(plugins.KERNELS, partial(checked, taken))
    listed = {plugin.name: plugin for plugin in plugins.listed(plugins.KERNELS) if plugin.state == "loaded"}
    hashed = cache(package_hash)  # a package once, however many kernels it brings: 200 MiB take 0.2 s
    for name, kernels in loaded.items():
        brought, point = listed[name].distribution or name, listed[name].value
        found += (replace(kernel, plugin=f"{brought} {digest(kernel, point, hashed)}") for kernel in kernels)
    return tuple(found)


def checked(taken: set[str], name: str, loaded: Any) -> tuple[Kernel, ...]:
    """The kernels of a plug-in; raises what is wrong with the first that cannot be offered. `taken` grows by them."""
    kernels = tuple(getattr(loaded, "KERNELS", loaded))
    names: set[str] = set()
    for place, kernel in enumerate(kernels):
        if not isinstance(kernel, Kernel):
            raise TypeError(f"KERNELS[{place}] is {kernel!r}; it must be a Kernel"[:300])
        if not all(re.fullmatch(r"[\w.-]+", str(name)) for name in (kernel.caps.name, kernel.caps.provider)):
            raise ValueError(
                f"KERNELS[{place}] is named {kernel.caps.name!r}; letters, digits, dots and dashes will do"
            )
        for what, value in (("name", kernel.caps.name), ("provider", kernel.caps.provider)):
            if value in taken or (what == "name" and value in names):
                raise ValueError(f"KERNELS[{place}] has the {what} {value!r}, which another kernel has")
        names.add(kernel.caps.name)
        if not isinstance(kernel.caps.op, Op) or not callable(kernel.run) or not callable(kernel.prepare or print):
            raise TypeError(f"{kernel.name}: op must be an Op, and run and prepare functions")
        if not isinstance(kernel.caps.tolerance, Mapping):
            raise TypeError(f"{kernel.name}: tolerance is {kernel.caps.tolerance!r}; it must map a dtype to a float")
        for layer in LAYERS:
            try:
                reasons = kernel.why_not(detect("cpu"), layer, Needs(page_size=16, lse=True))
                for needed in (kernel.caps.requires, *kernel.caps.requires_on.values()):
                    for _, versions in needed:
                        SpecifierSet(versions)
            except Exception as error:
                raise TypeError(f"{kernel.name}: its caps cannot be read: {plugins.said(error)}") from error
            if not all(isinstance(reason, str) for reason in reasons):
                raise TypeError(f"{kernel.name}: its caps refuse with {reasons!r}, which are not sentences")
    taken |= names
    return kernels


def fault(kernel: Kernel, target: Target) -> str | None:
    """What a kernel that is not an attention one does wrong on a device, by the contract's own cases; None: nothing.

    >>> from portable.backends.reference import KERNELS
    >>> merge = next(kernel for kernel in KERNELS if kernel.name == "reference.merge")
    >>> fault(merge, detect("cpu")) is None
    True
    """
    try:
        row = importlib.import_module("portable.conformance.outcomes").row(kernel, target)
    except Exception as error:
        return plugins.said(error)[:300]
    if wrong := [outcome for outcome in row.outcomes if outcome.status == "failed"]:
        return " ".join(f"{wrong[0].group} {wrong[0].value}: {wrong[0].reason}".split())[:300]
    return None if row.status == "parity" else "it serves no case of the contract"


def digest(kernel: Kernel, point: str, hashed: Callable[[str], str] = package_hash) -> str:
    """Of the packages of a kernel's functions and of an entry point's module: an edited plug-in is tested again.

    >>> from portable.backends.reference import KERNELS
    >>> len(digest(KERNELS[0], "packaging.version:Version"))
    16
    """
    found = hashlib.sha256()
    for package in sorted(packages_of(kernel) | {point.partition(":")[0].partition(".")[0]}):
        with suppress(OSError):  # a file that is gone or cannot be read
            found.update(hashed(package).encode())
    return found.hexdigest()[:16]
