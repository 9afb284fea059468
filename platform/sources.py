"""The sources that describe the devices of this machine, each as a function that returns `Card` values.

A source whose library or files are missing returns (). Only `read_torch` opens the devices.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 0}  # parts of an AMD product; 0: one per accelerator die


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device as one source describes it; what the source does not tell is None or empty."""

    arch: str
    name: str = ""
    uuid: str = ""  # "GPU-..."
    memory: int | None = None  # bytes
    compute_units: int | None = None
    xcds: int | None = None  # of this device, which may be a partition of a product
    partition: str | None = None
    device_id: int | None = None  # PCI


Lister = Callable[[], tuple[Card, ...]]


def read_kfd(nodes: Path = KFD_NODES) -> tuple[Card, ...]:
    """The AMD devices of the kernel's topology, in the order of the HIP runtime: a few small files, no library."""
    cards = []
    with suppress(OSError):
        for node in sorted((n for n in nodes.iterdir() if n.name.isdigit()), key=lambda n: int(n.name)):
            with suppress(OSError, ValueError):  # a device that a container may not use has no readable file
                if card := _kfd_card(node):
                    cards.append(card)
    return tuple(cards)


def _kfd_card(node: Path) -> Card | None:
    facts = _kfd_facts(node / "properties")
    version = facts.get("gfx_target_version", 0)
    if not version or not facts.get("simd_count"):
        return None  # a CPU
    banks = [_kfd_facts(bank) for bank in node.glob("mem_banks/*/properties")]
    unique_id = facts.get("unique_id", 0)
    on_board = (1, 2)  # heap types: the part of the device's memory that the host maps, and the rest
    return Card(
        arch=gfx_name(version // 10000, version // 100 % 100, version % 100),
        uuid=f"GPU-{unique_id:016x}" if unique_id else "",
        memory=sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in on_board) or None,
        compute_units=facts["simd_count"] // facts.get("simd_per_cu", 4),
        xcds=facts.get("num_xcc"),
        device_id=facts.get("device_id"),
    )


def _kfd_facts(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2}


def gfx_name(major: int, minor: int, stepping: int) -> str:
    """The compiler's name of an AMD architecture: minor and stepping are one hexadecimal digit each.

    >>> gfx_name(9, 0, 10), gfx_name(9, 4, 2), gfx_name(12, 0, 1)
    ('gfx90a', 'gfx942', 'gfx1201')
    """
    return f"gfx{major}{minor:x}{stepping:x}"


def read_amdsmi() -> tuple[Card, ...]:
    """The AMD devices as AMD's management library lists them, sorted into the kernel's order."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
    except Exception:  # its import alone raises ImportError, OSError, KeyError or AttributeError without the driver
        return ()
    cards = []
    try:
        for position, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
            asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
            units, serial = asic.get("num_compute_units"), asic["asic_serial"]
            node, partition, memory = position, None, None
            with suppress(Exception):  # not every card and driver knows what follows
                memory = int(amdsmi.amdsmi_get_gpu_vram_info(handle)["vram_size"]) << 20
            with suppress(Exception):
                partition = amdsmi.amdsmi_get_gpu_compute_partition(handle) or None
            with suppress(Exception):
                node = int(amdsmi.amdsmi_get_gpu_kfd_info(handle)["node_id"])
            card = Card(
                arch=asic["target_graphics_version"],
                name=asic["market_name"],
                uuid=f"GPU-{int(serial, 16):016x}" if serial.startswith("0x") else "",
                memory=memory,
                compute_units=units if isinstance(units, int) else None,
                partition=partition if partition in PARTITIONS else None,
                device_id=int(asic["device_id"], 16) if asic["device_id"].startswith("0x") else None,
            )
            cards.append((node, position, card))
    except Exception:  # amdsmi's exceptions share no base with Python's own
        return ()
    finally:
        with suppress(Exception):
            amdsmi.amdsmi_shut_down()
    return tuple(card for _, _, card in sorted(cards, key=lambda entry: entry[:2]))


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_nvml() -> tuple[Card, ...]:
    """The NVIDIA devices as the driver's management library lists them, in the order of the PCI bus."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        return ()
    try:
        number = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)):
            return ()
        return tuple(_nvml_cards(nvml, number.value))
    finally:
        nvml.nvmlShutdown()


def _nvml_cards(nvml: ctypes.CDLL, count: int) -> Iterator[Card]:
    for index in range(count):
        handle, memory, text = ctypes.c_void_p(), _NvmlMemory(), ctypes.create_string_buffer(96)
        major, minor, cores, mig = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            continue
        name = "" if nvml.nvmlDeviceGetName(handle, text, 96) else text.value.decode()
        uuid = "" if nvml.nvmlDeviceGetUUID(handle, text, 96) else text.value.decode()
        size = None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.total
        units = None
        with suppress(AttributeError):  # both came with driver 450 or later
            if not nvml.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)):
                # sm80 has 64 cores in a multiprocessor, everything after it 128
                units = cores.value // (64 if (major.value, minor.value) <= (8, 0) else 128)
            nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mig), ctypes.byref(ctypes.c_uint()))
        card = Card(arch=sm_name(major.value, minor.value), name=name, uuid=uuid, memory=size, compute_units=units)
        # what torch gets is a slice then, of a size that only opening it tells
        yield replace(card, memory=None, compute_units=None, partition="MIG") if mig.value else card


def sm_name(major: int, minor: int) -> str:
    """The name of an NVIDIA architecture from its compute capability; never ask it about another vendor's device.

    >>> sm_name(9, 0), sm_name(12, 0)
    ('sm90', 'sm120')
    """
    return f"sm{major}{minor}"


def read_torch() -> tuple[Card, ...]:
    """The devices as torch sees them, visibility applied. The last resort: this opens them."""
    if not torch.cuda.is_available():
        return ()
    cards = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        # HIP counts work-group processors, of two compute units each, where a wave has 32 lanes
        units_each = 2 if torch.version.hip and facts.warp_size == 32 else 1
        name, mig, _ = facts.name.partition(" MIG ")  # of a slice: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        cards.append(
            Card(
                arch=facts.gcnArchName if torch.version.hip else sm_name(facts.major, facts.minor),
                name=name,
                memory=facts.total_memory,
                compute_units=facts.multi_processor_count * units_each,
                partition="MIG" if mig else None,
            )
        )
    return tuple(cards)


def read_cpu() -> Card:
    """The processor that runs this process: its cores are those that the process may use."""
    name, memory = platform.processor(), None
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    with suppress(AttributeError, ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    affinity = getattr(os, "sched_getaffinity", None)
    return Card(
        arch=platform.machine().lower(),
        name=name or platform.machine(),
        memory=memory,
        compute_units=len(affinity(0)) if affinity else os.cpu_count(),
    )


def current_device() -> int | None:
    """torch's current device index; None while torch has opened no device."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
