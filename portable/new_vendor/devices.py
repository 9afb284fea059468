"""Acme's devices: which architectures there are, which kernels they prefer, and how to find one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from portable.platform.machine import Machine, as_target
from portable.platform.sources import Card
from portable.platform.target import Arch, Product, Target, order

DEVICE = "acme"  # torch's name of the device type
ENVIRONMENT = ("ACME_ON_CPU",)  # variables that change what `probe` answers
ARCHS: Mapping[str, Arch] = {
    "acme1": Arch(name="acme1", vendor="acme", family="Acme 1", wave_size=32, shared_memory=65536),
}
PRODUCTS: Mapping[str, Product] = {"Acme One": Product(name="Acme One", arch="acme1", compute_units=64)}
ORDER: Mapping[str, tuple[str, ...]] = order("acme", "torch")  # providers of kernels, best first


def count(machine: Machine) -> int:
    """The number of devices that torch sees."""
    if on_cpu(machine):
        return 1
    runtime = find_runtime()
    return 0 if runtime is None else int(runtime.device_count())


def probe(machine: Machine, index: int) -> Target | None:
    """Device `index`, or None where there is no such device."""
    if index >= count(machine):
        return None
    device = "cpu" if on_cpu(machine) else f"{DEVICE}:{index}"
    card = Card(arch="acme1", name="Acme One", memory=None)  # ask the driver here
    return as_target(card, ARCHS[card.arch], PRODUCTS[card.name], index=index, device=device, runtime=None)


def why_not(machine: Machine, index: int = 0) -> str:
    """Why device `index` is not there."""
    if find_runtime() is None:
        return f"torch has no device type {DEVICE!r}; install its extension"
    return f"torch sees {count(machine)} devices of type {DEVICE!r}"


def find_runtime() -> Any:
    """`torch.acme`, which the vendor's extension of torch brings; None without it."""
    return getattr(torch, DEVICE, None)


def on_cpu(machine: Machine) -> bool:
    """Whether the processor stands in for a device, to try this package before there is one."""
    return machine.environ.get("ACME_ON_CPU") == "1"
