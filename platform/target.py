"""What a kernel can run on: one frozen value, and the facts of each architecture as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OPERATIONS = (
    "prefill",
    "paged",
    "mla_decode",
    "merge",
    "cache_write",
    "cache_gather",
    "cache_copy",
    "conv1d",
    "ssd",
    "state_update",
    "state_copy",
    "refresh",
    "advance",
    "collect",
)


Range = tuple[int, "int | None"]  # least and most; None for no end
ANY: Range = (0, None)


def order(*providers: str, **exceptions: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """A vendor's `ORDER`: the providers of every operation, best first, `reference` last.

    >>> order("triton", "torch", merge=("torch",))["merge"]
    ('torch', 'reference')
    """
    unknown = exceptions.keys() - set(OPERATIONS)
    if unknown:
        raise ValueError(f"operation {min(unknown)!r} is not one of {', '.join(OPERATIONS)}")
    return {op: (*exceptions.get(op, providers), "reference") for op in OPERATIONS}


@dataclass(frozen=True, slots=True)
class Fastest:
    """Kernels that were measured beside each other: a row of a vendor's `MEASURED`, which refines its `ORDER`.

    >>> row = Fastest("mla_decode", ("sm90",), ("flash_attn", "triton"), num_heads=(64, 128), reqs=(8, None))
    >>> row.fits("mla_decode", "sm90", {"num_heads": 128, "reqs": 16}), row.fits("paged", "sm90", {})
    (True, False)
    """

    op: str
    archs: tuple[str, ...]
    first: tuple[str, ...]  # providers or kernels, the fastest first; the vendor's order follows
    num_heads: Range = ANY
    qk_head_dim: Range = ANY
    query_len: Range = ANY
    seq_len: Range = ANY
    reqs: Range = ANY
    page_size: Range = ANY
    products: tuple[str, ...] = ()  # of those architectures; none: all

    def fits(self, op: str, arch: str, facts: Mapping[str, int], product: str | None = None) -> bool:
        """Whether every fact is in its range, ends included."""
        if op != self.op or arch not in self.archs or (self.products and product not in self.products):
            return False
        ranges = ((getattr(self, name), value) for name, value in facts.items())
        return all(least <= value and (most is None or value <= most) for (least, most), value in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """The facts that an architecture name fixes.

    >>> Arch(name="gfx942", vendor="amd", family="CDNA3", wave_size=64, shared_memory=65536).matrix is None
    True
    """

    name: str  # "gfx942", "sm90", "x86_64"
    vendor: str  # "amd", "nvidia", "cpu", or a plug-in's own name
    family: str  # "CDNA3", "Hopper"; "unknown" for an architecture that no table lists
    wave_size: int  # lanes that execute one instruction
    shared_memory: int  # bytes of LDS / shared memory that one workgroup may use; 0 on a CPU
    fp8: str | None = None  # the e4m3 flavour of the matrix units: "e4m3fnuz", "e4m3fn" or None
    matrix: str | None = None  # matrix instructions: "mfma", "wmma", "mma", "wgmma", "tcgen05", "amx"
    xcds: int = 1  # accelerator dies with an L2 each, when the product is not partitioned
    graphs: bool = False  # the runtime captures and replays graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The facts that a product name fixes beyond its architecture, per device that torch lists.

    >>> Product(name="H200", arch="sm90", compute_units=132, pattern="H200( NVL)?").named("NVIDIA H200 NVL")
    True
    """

    name: str  # "MI300X"
    arch: str
    compute_units: int | None = None  # None where the variants of the product differ, or where it is not known
    memory: int | None = None  # nominal bytes
    xcds: int | None = None  # None: what the architecture says
    device_ids: tuple[int, ...] = ()  # PCI device ids; several products may share one
    pattern: str = ""  # regular expression for the end of the driver's name; empty: the product's own name

    def named(self, text: str) -> bool:
        """Whether `text`, a driver's or a person's name for a device, ends in this product's name."""
        return bool(re.search(rf"(?:^|[\s/])(?:{self.pattern or re.escape(self.name)})$", text.strip(), re.IGNORECASE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One device, as the planners and the selection see it.

    There is no (major, minor) pair on purpose: gfx942 reports (9, 4) and would pass for Hopper in a
    ``>= (9, 0)`` test. Compare `vendor` and `arch`.
    """

    vendor: str
    arch: str
    product: str | None  # "MI300X", "MI300A"; the arch does not fix the number of compute units
    name: str  # what the driver calls the device
    index: int  # torch's device index, after the visibility variables
    wave_size: int
    compute_units: int | None  # compute units (AMD) or multiprocessors (NVIDIA); CPU cores on a CPU
    xcds: int
    partition: str | None  # "SPX", "CPX", ... where the device can be partitioned
    shared_memory: int  # bytes that a workgroup may use
    memory: int | None  # bytes of device memory
    fp8: str | None
    matrix: str | None
    graphs: bool
    emulated: bool = False
    runtime: str | None = None  # "hip 7.0", "cuda 13.0": what the installed torch was built for
    family: str = "unknown"
    device: str = "cpu"  # torch's name: "cuda:N" for both GPU vendors, "cpu" where an emulated device computes
