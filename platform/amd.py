"""AMD: CDNA accelerators and RDNA graphics cards under ROCm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from portable.platform.machine import Machine, as_target, recognise, seen, short, why_none
from portable.platform.sources import Card, gfx_name
from portable.platform.target import Arch, Product, Target, order

DEVICE = "cuda"  # torch's name for a HIP device
ENVIRONMENT = ("HSA_OVERRIDE_GFX_VERSION",)
KIB, GIB = 1 << 10, 1 << 30


_CDNA = Arch(name="", vendor="amd", family="", wave_size=64, shared_memory=64 * KIB, matrix="mfma", graphs=True)
_RDNA = replace(_CDNA, wave_size=32, matrix="wmma")


def _unknown(name: str) -> Arch:
    wave = 64 if re.match(r"gfx9[0-9a-f]{2}$", name) else 32
    return Arch(name=name, vendor="amd", family="unknown", wave_size=wave, shared_memory=64 * KIB)


ARCHS: Mapping[str, Arch] = {
    arch.name: arch
    for arch in (
        replace(_CDNA, name="gfx90a", family="CDNA2"),
        replace(_CDNA, name="gfx942", family="CDNA3", fp8="e4m3fnuz", xcds=8),
        replace(_CDNA, name="gfx950", family="CDNA4", fp8="e4m3fn", xcds=8, shared_memory=160 * KIB),
        replace(_RDNA, name="gfx1100", family="RDNA3"),
        replace(_RDNA, name="gfx1101", family="RDNA3"),
        replace(_RDNA, name="gfx1151", family="RDNA3.5"),
        replace(_RDNA, name="gfx1200", family="RDNA4", fp8="e4m3fn"),
        replace(_RDNA, name="gfx1201", family="RDNA4", fp8="e4m3fn"),
    )
}


def _instinct(name: str, arch: str, units: int, gib: int, ids: tuple[int, ...], xcds: int | None = None) -> Product:
    # "HF" and "VF" (a virtual function) end the names of further forms of one product
    return Product(
        name=name,
        arch=arch,
        compute_units=units,
        memory=gib * GIB,
        xcds=xcds,
        device_ids=ids,
        pattern=rf"{name}( HF)?( VF)?",
    )


def _radeon(name: str, arch: str, units: int, gib: int | None, ids: tuple[int, ...], pattern: str = "") -> Product:
    memory = gib * GIB if gib else None
    return Product(name=name, arch=arch, compute_units=units, memory=memory, device_ids=ids, pattern=pattern)


# MI250 and MI250X are two devices each for torch: these are the facts of one.
PRODUCTS: Mapping[str, Product] = {
    product.name: product
    for product in (
        _instinct("MI210", "gfx90a", 104, 64, (0x740F,)),
        _instinct("MI250", "gfx90a", 104, 64, (0x740C,)),
        _instinct("MI250X", "gfx90a", 110, 64, (0x7408, 0x740C)),
        _instinct("MI300A", "gfx942", 228, 128, (0x74A0,), xcds=6),
        _instinct("MI300X", "gfx942", 304, 192, (0x74A1, 0x74A9, 0x74B5, 0x74BD), xcds=8),
        _instinct("MI308X", "gfx942", 80, 192, (0x74A2, 0x74A8, 0x74B6, 0x74BC), xcds=4),
        _instinct("MI325X", "gfx942", 304, 256, (0x74A5, 0x74B9), xcds=8),
        _instinct("MI350X", "gfx950", 256, 288, (0x75A0, 0x75B0), xcds=8),
        _instinct("MI355X", "gfx950", 256, 288, (0x75A3, 0x75B3), xcds=8),
        _radeon("RX 7900 XTX", "gfx1100", 96, 24, (0x744C,)),
        _radeon("RX 7900 XT", "gfx1100", 84, 20, (0x744C,)),
        _radeon("RX 7900 GRE", "gfx1100", 80, 16, (0x744C,)),
        _radeon("PRO W7900", "gfx1100", 96, 48, (0x7448,)),
        _radeon("RX 7800 XT", "gfx1101", 60, 16, (0x747E,)),
        _radeon("RX 7700 XT", "gfx1101", 54, 12, (0x747E,)),
        _radeon("Strix Halo", "gfx1151", 40, None, (0x1586,), "Strix Halo|Radeon 8060S( Graphics)?"),
        _radeon("Radeon 8050S", "gfx1151", 32, None, (0x1586,), "Radeon 8050S( Graphics)?"),
        _radeon("RX 9060 XT", "gfx1200", 32, None, (0x7590,)),
        _radeon("RX 9060", "gfx1200", 28, 8, (0x7590,)),
        _radeon("RX 9070 XT", "gfx1201", 64, 16, (0x7550,)),
        _radeon("RX 9070", "gfx1201", 56, 16, (0x7550,)),
    )
}

ORDER: Mapping[str, tuple[str, ...]] = order("aiter", "flash_attn", "triton", "hip", "torch")


def parse(name: str) -> Arch | None:
    """The architecture of a name as drivers and compilers write it; None for a name that is not AMD's.

    A well-formed name that no table lists is of family "unknown", with what every AMD device has.

    >>> parse("gfx942:sramecc+:xnack-") == ARCHS["gfx942"], parse("gfx1153").family, parse("gfx95")
    (True, 'unknown', None)
    """
    match = re.fullmatch(r"(gfx(?:[1-9]|1\d)[0-9a-f]{2})(?::(?:sramecc|xnack)[+-])*", name)
    return (ARCHS.get(match[1]) or _unknown(match[1])) if match else None


def on_board(machine: Machine) -> tuple[Card, ...]:
    """The AMD devices of the machine, hidden ones included, in the HIP runtime's order.

    The kernel's topology comes first: it is the runtime's own order and needs no library.
    """
    cards = machine.kfd() or machine.amdsmi()
    # The runtime takes this variable for the truth, and so does the code that it loads.
    version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", machine.environ.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if not version:
        return cards
    arch = gfx_name(*(int(part) for part in version.groups()))
    return tuple(replace(card, arch=arch) for card in cards)


def listed(machine: Machine) -> tuple[Card, ...]:
    """The devices as torch numbers them; () when the installed torch has no ROCm."""
    if not machine.torch_hip:
        return ()
    return seen(machine, "hip", on_board(machine))


def count(machine: Machine) -> int:
    """Number of devices that torch can use."""
    return len(listed(machine))


def probe(machine: Machine, index: int) -> Target | None:
    """The device with torch's index `index`, or None."""
    cards = listed(machine)
    if not 0 <= index < len(cards) or not machine.torch_hip:
        return None
    card = cards[index]
    arch = parse(card.arch) or _unknown(card.arch)
    product = recognise(PRODUCTS, arch.name, card)
    runtime = f"hip {short(machine.torch_hip)}"
    return as_target(card, arch, product, index=index, device=f"{DEVICE}:{index}", runtime=runtime)


def why_not(machine: Machine, index: int = 0) -> str:
    """Why torch has no AMD device `index`."""
    if machine.torch_hip:
        return why_none(machine, "hip", on_board(machine), index)
    return machine.built_for + (", but an AMD device is there" if on_board(machine) else "")
