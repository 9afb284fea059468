"""Which device this process computes on, and what its architecture can do."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Protocol, TypeVar, cast

import torch

from portable import plugins
from portable.arguments import named
from portable.platform.machine import Machine, as_target
from portable.platform.sources import Card
from portable.platform.target import OPERATIONS, Arch, Product, Target
from portable.platform.visibility import VARIABLES

NAMES = ("ARCHS", "PRODUCTS", "ORDER", "probe", "count")
EMULATED = ("gfx942", "gfx950")
Answer = TypeVar("Answer")
_targets: dict[tuple[object, ...], Target] = {}
_hung: set[str] = set()  # plug-ins that are not asked again


class Vendor(Protocol):
    """What a vendor's file, or a plug-in's module, defines.

    It may also define `DEVICE`, torch's type of its devices (else the vendor's own name); `ENVIRONMENT`, the variables
    that change what `probe` answers; `parse(name) -> Arch | None`, which reads the spellings of its architectures;
    `why_not(machine, index) -> str`, why a device is not there; and `MEASURED`, a tuple of `Fastest` that refines
    ORDER.
    """

    @property
    def ARCHS(self) -> Mapping[str, Arch]: ...
    @property
    def PRODUCTS(self) -> Mapping[str, Product]: ...
    @property
    def ORDER(self) -> Mapping[str, tuple[str, ...]]:
        """Provider names per operation, best first."""

    def probe(self, machine: Machine, index: int) -> Target | None: ...
    def count(self, machine: Machine) -> int: ...


@named
def detect(device: str | torch.device | None = None, *, machine: Machine | None = None) -> Target:
    """The best device of this machine, or the one that `device` names.

    `device` is "cpu", "cuda" (torch's current one), "cuda:1", a `torch.device`, "emulated:gfx942" or a plug-in's vendor
    name. None means what the environment variable PORTABLE_DEVICE says and, without it, the first vendor that has a
    device, the CPU last. No device is opened where the driver's tables can answer. Raises ValueError for a name that is
    not known, a device that is not there, and visibility variables that contradict each other.

    >>> detect("cpu").vendor
    'cpu'
    """
    if machine is not None:
        return _find(device, machine)
    machine = Machine()
    environment = {*VARIABLES, "PORTABLE_DEVICE", plugins.VARIABLE}
    for vendor in vendors().values():
        environment.update(getattr(vendor, "ENVIRONMENT", ()))
    settings = (machine.environ.get(name) for name in sorted(environment))
    # opening the device changes no answer that was given before
    key = (None if device is None else str(device), machine.current() or 0, *settings)
    if key not in _targets:
        _targets[key] = _find(device, machine)
    return _targets[key]


@named
def describe(arch: str, product: str | None = None) -> Target:
    """A device of architecture `arch` from the tables alone, on any machine.

    The names of drivers and compilers are understood ("gfx942:sramecc+:xnack-", "sm_90a"). Without `product` the number
    of compute units is None, unless every product of the architecture has the same. A well-formed name that no table
    lists gives family "unknown". Raises ValueError for any other name, and for a product of another architecture.

    >>> describe("gfx942").compute_units, describe("gfx942", "MI300A").compute_units, describe("sm_90a").arch
    (None, 228, 'sm90')
    """
    return _describe(arch, product, vendors())


def vendors(environ: Mapping[str, str] | None = None) -> dict[str, Vendor]:
    """Every vendor by name, the CPU last: the files of this folder, then the plug-ins that PORTABLE_PLUGINS allows.

    A plug-in that does not load is logged and left out.

    >>> list(vendors({"PORTABLE_PLUGINS": ""}))
    ['amd', 'nvidia', 'cpu']
    """
    found = {**_files(), **_plugins((os.environ if environ is None else environ).get(plugins.VARIABLE))}
    return dict(sorted(found.items(), key=lambda entry: entry[0] == "cpu"))


def reserved() -> frozenset[str]:
    """The names that no plug-in's vendor can have: of the built-in vendors, and what their devices are called.

    >>> sorted(reserved())
    ['amd', 'cpu', 'cuda', 'emulated', 'hip', 'nvidia', 'rocm']
    """
    files = _files()
    return frozenset({*files, *(_device_type(*each) for each in files.items()), "emulated", "hip", "rocm"})


def nearest(arch: str) -> str | None:
    """The listed architecture that a name is a product of, or is spelled most like; None where none is near.

    >>> nearest("gfx943"), nearest("H100"), nearest("mi300"), nearest("rtx4090"), nearest("?")
    ('gfx942', 'sm90', 'gfx942', 'sm89', None)
    """
    known = vendors().values()
    names = {product.lower(): each.arch for vendor in known for product, each in vendor.PRODUCTS.items()}
    names |= {each: each for vendor in known for each in vendor.ARCHS}
    named = [product.arch for vendor in known for product in vendor.PRODUCTS.values() if product.named(arch)]
    alike = [names[each] for each in get_close_matches(arch.lower(), names, 1)]
    return next(iter(named + alike), None)


def absent(machine: Machine | None = None) -> dict[str, str]:
    """The reason for every vendor that has no usable device here.

    >>> "built without CUDA or ROCm" in absent(Machine(torch_cuda=None, torch_hip=None, environ={}))["amd"]
    True
    """
    machine = machine or Machine()
    reasons = {}
    for name, vendor in vendors(machine.environ).items():
        try:
            if not _ask(name, vendor.count, machine):
                reasons[name] = _why_not(name, vendor, machine, 0)
        except ValueError as error:  # visibility variables that contradict each other
            reasons[name] = str(error)
    return reasons


def cache_clear() -> None:
    """Forget every detected device and every plug-in."""
    _targets.clear()
    _hung.clear()
    _plugins.cache_clear()
    plugins.cache_clear()


@cache
def _files() -> Mapping[str, Vendor]:
    package = __name__.rpartition(".")[0]
    names = [entry.name for entry in pkgutil.iter_modules([os.path.dirname(__file__)]) if not entry.ispkg]
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {n: cast(Vendor, m) for n, m in modules.items() if hasattr(m, "ARCHS") and hasattr(m, "probe")}


@cache
def _plugins(allowed: str | None) -> Mapping[str, Vendor]:
    environ = {} if allowed is None else {plugins.VARIABLE: allowed}
    return plugins.load(plugins.PLATFORMS, _sound, environ)


def _sound(name: str, vendor: Any) -> Vendor:
    """A plug-in's module, if it has what a vendor defines, and in the form that the tables are read in."""
    if name in reserved():
        raise ValueError(f"the name {name!r} is a built-in vendor's, or its devices'")
    if missing := [each for each in NAMES if not hasattr(vendor, each)]:
        raise AttributeError(f"{getattr(vendor, '__name__', vendor)} lacks {', '.join(missing)}")
    for table, kind in (("ARCHS", Arch), ("PRODUCTS", Product)):
        for key, facts in getattr(vendor, table).items():
            if not isinstance(facts, kind) or facts.name != key:
                raise TypeError(f"{table}[{key!r}] is {facts!r}; it must be the {kind.__name__} of that name")
    for key, arch in vendor.ARCHS.items():
        if arch.vendor != name:
            raise ValueError(f"ARCHS[{key!r}] is of vendor {arch.vendor!r}; the plug-in's name is {name!r}")
    for product in vendor.PRODUCTS.values():
        product.named("a name")  # its pattern is a regular expression
    if not all(isinstance(each, str) for each in getattr(vendor, "ENVIRONMENT", ())):
        raise TypeError(f"ENVIRONMENT is {vendor.ENVIRONMENT!r}; it must be a tuple of names of variables")
    if stray := [key for key, product in vendor.PRODUCTS.items() if product.arch not in vendor.ARCHS]:
        raise ValueError(f"PRODUCTS[{stray[0]!r}] is of an arch that ARCHS does not have")
    for op, providers in vendor.ORDER.items():
        if op not in OPERATIONS or not isinstance(providers, tuple):
            raise ValueError(f"ORDER[{op!r}] is {providers!r}; it must be a tuple of providers of an operation")
    return cast(Vendor, vendor)


def _find(device: str | torch.device | None, machine: Machine) -> Target:
    known = vendors(machine.environ)
    setting = machine.environ.get("PORTABLE_DEVICE")
    if device is not None:
        return _named(str(device), f"device is {str(device)!r}", known, machine)
    if setting:
        return _named(setting, f"PORTABLE_DEVICE is {setting!r}", known, machine)
    found = (_device(name, vendor, machine, None) for name, vendor in known.items())
    return next(target for target in found if target)  # the CPU is always there


def _named(device: str, stated: str, known: Mapping[str, Vendor], machine: Machine) -> Target:
    if device in (emulated := {f"emulated:{arch}": arch for arch in EMULATED}):
        return replace(_describe(emulated[device], None, known), emulated=True, device="cpu")
    kind, colon, number = device.partition(":")
    named = {name: vendor for name, vendor in known.items() if kind in (name, _device_type(name, vendor))}
    if not named or bool(colon) != (number.isascii() and number.isdigit()):
        kinds = dict.fromkeys(_device_type(name, vendor) for name, vendor in known.items())
        valid = (*kinds, *(f"{kind}:N" for kind in kinds if kind != "cpu"), *emulated)
        raise ValueError(f"{stated}; it must be one of {', '.join(valid)}")
    index = int(number) if number else None
    for name, vendor in named.items():
        if target := _device(name, vendor, machine, index):
            return target
    reasons = dict.fromkeys(_why_not(name, vendor, machine, index or 0) for name, vendor in named.items())
    telling = [reason for reason in reasons if reason != machine.built_for] or reasons
    raise ValueError(f"{stated}, which torch does not have: {'; '.join(telling)}")


def _device(name: str, vendor: Vendor, machine: Machine, index: int | None) -> Target | None:
    """The vendor's device `index`, or its current one; None when it has no such device."""
    if index is None:
        index = (machine.current() or 0) if _device_type(name, vendor) == "cuda" else 0
    return _ask(name, vendor.probe, machine, index, right=partial(_is_of, name))


def _of_vendor(name: str, facts: object) -> bool:
    return isinstance(facts, Arch) and facts.vendor == name


def _is_of(name: str, target: object) -> bool:
    """Whether `probe` told of a device of its own vendor, on which torch can make a tensor."""
    if not isinstance(target, Target) or target.vendor != name:
        return False
    torch.device(target.device)  # raises for a type that torch does not know
    return True


def _ask(
    name: str, question: Callable[..., Answer], *about: object, right: Callable[[Any], bool] = lambda answer: True
) -> Answer | None:
    """What a vendor answers; None where a plug-in fails, hangs, or gives an answer that is not right."""
    if name in _files():
        return question(*about)
    if name in _hung:
        return None
    try:
        answer = plugins.ask(question, *about)
        if answer is not None and not right(answer):
            raise TypeError(f"{getattr(question, '__name__', 'it')} answered {answer!r}"[:300])
    except Exception as error:
        plugins.blame_named(plugins.PLATFORMS, name, error)
        if isinstance(error, TimeoutError):
            _hung.add(name)
        return None
    return answer


def _device_type(name: str, vendor: Vendor) -> str:
    return str(getattr(vendor, "DEVICE", name))


def _why_not(name: str, vendor: Vendor, machine: Machine, index: int) -> str:
    reason = _ask(name, getattr(vendor, "why_not", lambda *about: None), machine, index)
    return str(reason or f"{name} lists no device {index}")


def _describe(arch: str, product: str | None, known: Mapping[str, Vendor]) -> Target:
    facts: Arch | None = None
    for name, vendor in known.items():
        parse = getattr(vendor, "parse", vendor.ARCHS.get)
        if facts := _ask(name, parse, arch, right=partial(_of_vendor, name)):
            break
    if facts is None:
        archs = ", ".join(arch for vendor in known.values() for arch in vendor.ARCHS)
        near = f"; near it: {listed}" if (listed := nearest(arch)) else ""
        raise ValueError(f"arch is {arch!r}; it must be one of {archs}{near}")
    products = [p for p in vendor.PRODUCTS.values() if p.arch == facts.name]
    chosen = None if product is None else next((p for p in products if p.named(product)), None)
    if product is not None and chosen is None:
        others = [p.arch for v in known.values() for p in v.PRODUCTS.values() if p.named(product)]
        what = f"of arch {others[0]}, not {facts.name}" if others else "in no table"
        names = ", ".join(p.name for p in products) or "not listed"
        raise ValueError(f"product {product!r} is {what}; the products of {facts.name} are {names}")
    units = {p.compute_units for p in products}
    card = Card(arch=facts.name, compute_units=units.pop() if chosen is None and len(units) == 1 else None)
    device = _device_type(name, vendor)
    return as_target(card, facts, chosen, index=0, device=device if device == "cpu" else f"{device}:0", runtime=None)
