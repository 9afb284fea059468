"""The processor itself: always there, one device."""

from __future__ import annotations

from collections.abc import Mapping

from portable.platform.machine import Machine, as_target
from portable.platform.target import Arch, Product, Target, order

DEVICE = "cpu"


def _arch(name: str, family: str) -> Arch:
    return Arch(name=name, vendor="cpu", family=family, wave_size=1, shared_memory=0)


ARCHS: Mapping[str, Arch] = {"x86_64": _arch("x86_64", "x86"), "aarch64": _arch("aarch64", "Arm")}
PRODUCTS: Mapping[str, Product] = {}
ORDER: Mapping[str, tuple[str, ...]] = order("torch")
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}  # what Windows and macOS say


def parse(name: str) -> Arch | None:
    """The architecture of a name as operating systems write it; None for a name that no table lists.

    >>> parse("arm64").name
    'aarch64'
    """
    return ARCHS.get(ALIASES.get(name, name))


def count(machine: Machine) -> int:
    """1."""
    return 1


def probe(machine: Machine, index: int) -> Target | None:
    """The processor as device 0, or None for another index."""
    if index:
        return None
    card = machine.cpu()
    return as_target(card, parse(card.arch) or _arch(card.arch, "unknown"), None, index=0, device=DEVICE, runtime=None)


def why_not(machine: Machine, index: int = 0) -> str:
    """Why there is no processor `index`."""
    return "the processor is one device, cpu"
