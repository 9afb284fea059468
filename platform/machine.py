"""A machine as detection sees it: what torch was built for, the environment, and the sources of its devices.

A `Machine` holds one callable per source, so that a test, or a report about another machine, can put its own there.
Nothing is read before it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from portable.platform.sources import (
    PARTITIONS,
    Card,
    Lister,
    current_device,
    read_amdsmi,
    read_cpu,
    read_kfd,
    read_nvml,
    read_torch,
)
from portable.platform.target import Arch, Product, Target
from portable.platform.visibility import UNKNOWN, Runtime, hiding, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that detection asks. `Machine()` is this machine; give a field to replace a source.

    >>> Machine(torch_cuda="13.0", torch_hip=None, environ={}, nvml=lambda: ()).nvml()
    ()
    """

    torch_version: str = torch.__version__
    torch_cuda: str | None = torch.version.cuda
    torch_hip: str | None = torch.version.hip
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    kfd: Lister = read_kfd
    amdsmi: Lister = read_amdsmi
    nvml: Lister = read_nvml
    torch_cards: Lister = read_torch
    cpu: Callable[[], Card] = read_cpu
    current: Callable[[], int | None] = current_device

    @property
    def built_for(self) -> str:
        """What the installed torch was built for, as a sentence."""
        if self.torch_hip:
            return f"torch {self.torch_version} was built for ROCm {short(self.torch_hip)}"
        if self.torch_cuda:
            return f"torch {self.torch_version} was built for CUDA {short(self.torch_cuda)}"
        return f"torch {self.torch_version} was built without CUDA or ROCm"


def short(version: str) -> str:
    """major.minor of a version.

    >>> short("7.0.51831-a3e329ad8")
    '7.0'
    """
    return ".".join(version.split(".")[:2])


def seen(machine: Machine, runtime: Runtime, cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """`cards`, the devices of the machine, as torch numbers them.

    torch is asked where no other source lists a device, and once it has opened its devices: the runtime's list is
    fixed then, whatever the variables say later. It is asked too where it stays open which of several unlike cards is
    meant: by a uuid that no source knows, or by CUDA, which lists the fastest first unless CUDA_DEVICE_ORDER is
    PCI_BUS_ID.
    """
    if not cards or machine.current() is not None:
        return machine.torch_cards()
    picked = visible(machine.environ, runtime, len(cards), tuple(card.uuid for card in cards))
    by_bus = runtime == "hip" or machine.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    alike = len({(card.arch, card.name, card.device_id, card.compute_units) for card in cards}) == 1
    if picked and not alike and (UNKNOWN in picked or not by_bus):
        return machine.torch_cards()
    partition = "MIG" if runtime == "cuda" else None
    untold = replace(cards[0], uuid="", memory=None, compute_units=None, partition=partition)
    return tuple(untold if index == UNKNOWN else cards[index] for index in picked)


def why_none(machine: Machine, runtime: Runtime, cards: tuple[Card, ...], index: int) -> str:
    """Why torch has no device `index` among `cards`, the devices of the machine."""
    hidden = hiding(machine.environ, runtime, len(cards), index, tuple(card.uuid for card in cards))
    if hidden:
        return f"{hidden} devices"
    number = len(seen(machine, runtime, cards))
    return f"{machine.built_for}, but sees {number or 'no'} device{'s' if number > 1 else ''}"


def recognise(products: Mapping[str, Product], arch: str, card: Card) -> Product | None:
    """The product that a card is: by its name or PCI id, and by its compute units where several share those."""
    fits = [p for p in products.values() if p.arch == arch and (p.named(card.name) or card.device_id in p.device_ids)]
    if len(fits) > 1:
        fits = [p for p in fits if p.compute_units == card.compute_units]
    return fits[0] if len(fits) == 1 else None


def as_target(
    card: Card, arch: Arch, product: Product | None, *, index: int, device: str, runtime: str | None
) -> Target:
    """Join what the source, the architecture and the product say; what the source measured wins."""
    whole = (product and product.xcds) or arch.xcds
    parts, partition, units, memory = 1, card.partition, card.compute_units, card.memory
    if product and card.xcds:
        parts = max(1, whole // card.xcds)
    elif partition in PARTITIONS:
        parts = PARTITIONS[partition] or whole
    elif product and product.compute_units and units and whole > 1:
        parts = max(1, product.compute_units // units)
    if product and whole > 1:
        partition = "CPX" if parts == whole else {n: name for name, n in PARTITIONS.items()}.get(parts)
    if product and partition != "MIG":
        if product.compute_units and units in (None, product.compute_units):
            units = product.compute_units // parts  # a source may count the whole product
        memory = memory or (product.memory if parts == 1 else None)
    return Target(
        vendor=arch.vendor,
        arch=arch.name,
        product=product.name if product else None,
        name=card.name or (product.name if product else arch.name),
        index=index,
        wave_size=arch.wave_size,
        compute_units=units,
        xcds=card.xcds or max(1, whole // parts),
        partition=partition,
        shared_memory=arch.shared_memory,
        memory=memory,
        fp8=arch.fp8,
        matrix=arch.matrix,
        graphs=arch.graphs,
        runtime=runtime,
        family=arch.family,
        device=device,
    )
