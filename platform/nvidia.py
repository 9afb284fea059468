"""NVIDIA: Ampere and later under CUDA."""

from __future__ import annotations

import re
from collections.abc import Mapping

from portable.platform import nvidia_measured
from portable.platform.machine import Machine, as_target, recognise, seen, short, why_none
from portable.platform.sources import Card
from portable.platform.target import Arch, Product, Target, order

DEVICE = "cuda"
ENVIRONMENT = ("CUDA_DEVICE_ORDER",)
KIB, GIB = 1 << 10, 1 << 30


def _arch(name: str, family: str, kib: int, matrix: str, fp8: str | None = None) -> Arch:
    return Arch(
        name=name,
        vendor="nvidia",
        family=family,
        wave_size=32,
        shared_memory=kib * KIB,  # the opt-in limit of one block
        fp8=fp8,
        matrix=matrix,
        graphs=True,
    )


def _unknown(name: str) -> Arch:
    # 48 KiB: what a block may use without opting in
    return Arch(name=name, vendor="nvidia", family="unknown", wave_size=32, shared_memory=48 * KIB)


ARCHS: Mapping[str, Arch] = {
    arch.name: arch
    for arch in (
        _arch("sm80", "Ampere", 163, "mma"),
        _arch("sm86", "Ampere", 99, "mma"),
        _arch("sm89", "Ada", 99, "mma", "e4m3fn"),
        _arch("sm90", "Hopper", 227, "wgmma", "e4m3fn"),
        _arch("sm100", "Blackwell", 227, "tcgen05", "e4m3fn"),
        _arch("sm120", "Blackwell", 99, "mma", "e4m3fn"),
    )
}


def _product(name: str, arch: str, units: int | None, gib: int | None, pattern: str = "") -> Product:
    memory = gib * GIB if gib else None
    return Product(name=name, arch=arch, compute_units=units, memory=memory, pattern=pattern)


# The memory of a product that comes in several sizes is None.
PRODUCTS: Mapping[str, Product] = {
    product.name: product
    for product in (
        _product("A100", "sm80", 108, None, r"A100([- ].*)?"),
        _product("A30", "sm80", 56, 24),
        _product("A10", "sm86", 72, 24),
        _product("A40", "sm86", 84, 48),
        _product("RTX 3090", "sm86", 82, 24),
        _product("L4", "sm89", 58, 24),
        _product("L40S", "sm89", 142, 48),
        _product("RTX 4090", "sm89", 128, 24),
        _product("H100", "sm90", 132, 80, r"H100( SXM5?| \d+GB HBM3)?"),
        _product("H100 PCIe", "sm90", 114, 80),
        _product("H100 NVL", "sm90", 132, 94),
        _product("H200", "sm90", 132, 141, "H200( NVL| SXM5?)?"),
        _product("GH200", "sm90", 132, None, r"GH200( .*)?"),
        _product("B200", "sm100", 148, 180),
        _product("GB200", "sm100", None, None),
        _product("RTX 5090", "sm120", 170, 32),
        _product("RTX 5080", "sm120", 84, 16),
    )
}

ORDER: Mapping[str, tuple[str, ...]] = order("flash_attn", "flash_mla", "triton", "hip", "torch")
MEASURED = nvidia_measured.MEASURED


def parse(name: str) -> Arch | None:
    """The architecture of a name as drivers and compilers write it; None for a name that is not NVIDIA's.

    A well-formed name that no table lists is of family "unknown", with what every NVIDIA device has.

    >>> parse("sm_90a") == ARCHS["sm90"], parse("sm_103").family, parse("sm")
    (True, 'unknown', None)
    """
    match = re.fullmatch(r"sm_?([1-9]\d|1\d\d)[af]?", name)
    return (ARCHS.get(f"sm{match[1]}") or _unknown(f"sm{match[1]}")) if match else None


def listed(machine: Machine) -> tuple[Card, ...]:
    """The devices as torch numbers them; () when the installed torch has no CUDA."""
    if machine.torch_hip or not machine.torch_cuda:
        return ()
    return seen(machine, "cuda", machine.nvml())


def count(machine: Machine) -> int:
    """Number of devices that torch can use."""
    return len(listed(machine))


def probe(machine: Machine, index: int) -> Target | None:
    """The device with torch's index `index`, or None."""
    cards = listed(machine)
    if not 0 <= index < len(cards) or not machine.torch_cuda:
        return None
    card = cards[index]
    arch = parse(card.arch) or _unknown(card.arch)
    runtime = f"cuda {short(machine.torch_cuda)}"
    product = recognise(PRODUCTS, arch.name, card)
    return as_target(card, arch, product, index=index, device=f"{DEVICE}:{index}", runtime=runtime)


def why_not(machine: Machine, index: int = 0) -> str:
    """Why torch has no NVIDIA device `index`."""
    if machine.torch_cuda and not machine.torch_hip:
        return why_none(machine, "cuda", machine.nvml(), index)
    return machine.built_for + (", but an NVIDIA device is there" if machine.nvml() else "")
