"""How the driver's own records are read: KFD topology, AMD's and NVIDIA's management libraries, the processor."""

import os
import sys
import types
from dataclasses import replace

import pytest
from machines import GIB, MI300X, machine, must_not_open

from portable.platform import sources
from portable.platform.detect import detect
from portable.platform.machine import Machine
from portable.platform.sources import Card, read_amdsmi, read_kfd, read_nvml


def kfd_node(root, number, banks=(), **facts):
    node = root / str(number)
    for index, bank in enumerate(banks):
        folder = node / "mem_banks" / str(index)
        folder.mkdir(parents=True)
        (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in bank.items()))
    node.mkdir(exist_ok=True)
    (node / "properties").write_text("".join(f"{key} {value}\n" for key, value in facts.items()))


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_kfd_versions(tmp_path, version, arch):
    kfd_node(tmp_path, 1, gfx_target_version=version, simd_count=152, simd_per_cu=4, num_xcc=1)
    assert read_kfd(tmp_path) == (Card(arch=arch, compute_units=38, xcds=1),)


def test_kfd_topology(tmp_path):
    kfd_node(tmp_path, 0, cpu_cores_count=64, simd_count=0, gfx_target_version=0)
    banks = [{"heap_type": 1, "size_in_bytes": 192 * GIB}, {"heap_type": 4, "size_in_bytes": 65536}]
    facts = {"simd_count": 1216, "simd_per_cu": 4, "num_xcc": 8, "device_id": 0x74A1, "unique_id": 0xABCDEF}
    kfd_node(tmp_path, 10, banks, gfx_target_version=90402, **facts)
    kfd_node(tmp_path, 2, gfx_target_version=110000, simd_count=192, simd_per_cu=2)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "properties").write_text("")  # a device that the container may not use
    (tmp_path / "4").mkdir()
    first, second = read_kfd(tmp_path)
    assert (first.arch, first.compute_units) == ("gfx1100", 96)  # by number, not by spelling
    assert second == replace(MI300X, uuid="GPU-0000000000abcdef", memory=192 * GIB)
    target = detect(machine=machine("hip", {"ROCR_VISIBLE_DEVICES": "GPU-0000000000ABCDEF"}, kfd=[first, second]))
    assert (target.product, target.memory) == ("MI300X", 192 * GIB)
    assert read_kfd(tmp_path / "absent") == ()


def test_amdsmi_records(monkeypatch):
    """Listed in the kernel's order, whatever the library's; what a card does not tell stays None."""
    asic = {
        "market_name": "AMD Instinct MI300X",
        "target_graphics_version": "gfx942",
        "asic_serial": "0x00000000000000AB",
        "device_id": "0x74a1",
        "num_compute_units": 304,
    }
    plain = asic | {"market_name": "AMD Radeon", "device_id": "N/A", "asic_serial": "N/A", "num_compute_units": "N/A"}
    library = types.ModuleType("amdsmi")
    library.amdsmi_init = library.amdsmi_shut_down = lambda: None
    library.amdsmi_get_processor_handles = lambda: [plain, asic]
    library.amdsmi_get_gpu_asic_info = lambda handle: handle
    library.amdsmi_get_gpu_vram_info = lambda handle: {"vram_size": 196592} if handle is asic else {}
    library.amdsmi_get_gpu_compute_partition = lambda handle: "CPX" if handle is asic else "N/A"
    library.amdsmi_get_gpu_kfd_info = lambda handle: {"node_id": 2 if handle is asic else 3}
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    first, second = read_amdsmi()
    assert (first.uuid, first.memory, first.device_id) == ("GPU-00000000000000ab", 196592 << 20, 0x74A1)
    assert (second.uuid, second.memory, second.device_id, second.compute_units) == ("", None, None, None)
    target = detect(machine=machine("hip", amdsmi=[first]))
    assert (target.name, target.compute_units, target.partition) == ("AMD Instinct MI300X", 38, "CPX")
    library.amdsmi_init = must_not_open
    assert read_amdsmi() == ()


def test_sources_without_their_library_list_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert read_amdsmi() == ()

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(sources.ctypes, "CDLL", missing)
    assert read_nvml() == ()


def test_nvml_records(monkeypatch):
    """The driver's library is called as its C interface says; sm80 counts 64 cores a multiprocessor."""
    cards = (("NVIDIA A100-SXM4-40GB", (8, 0), 6912, 0), ("NVIDIA H100 80GB HBM3", (9, 0), 16896, 1))

    class Library:
        def nvmlInit_v2(self):
            return 0

        nvmlShutdown = nvmlInit_v2

        def nvmlDeviceGetCount_v2(self, count):
            count._obj.value = len(cards)

        def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
            handle._obj.value = index + 1

        def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
            major._obj.value, minor._obj.value = cards[handle.value - 1][1]

        def nvmlDeviceGetName(self, handle, text, size):
            text.value = cards[handle.value - 1][0].encode()

        def nvmlDeviceGetUUID(self, handle, text, size):
            text.value = b"GPU-%d" % handle.value

        def nvmlDeviceGetMemoryInfo(self, handle, memory):
            memory._obj.total = 40 * GIB

        def nvmlDeviceGetNumGpuCores(self, handle, cores):
            cores._obj.value = cards[handle.value - 1][2]

        def nvmlDeviceGetMigMode(self, handle, current, pending):
            current._obj.value = cards[handle.value - 1][3]

    monkeypatch.setattr(sources.ctypes, "CDLL", lambda name: Library())
    whole, sliced = read_nvml()
    assert whole == Card(arch="sm80", name="NVIDIA A100-SXM4-40GB", uuid="GPU-1", memory=40 * GIB, compute_units=108)
    assert (sliced.arch, sliced.partition, sliced.compute_units, sliced.memory) == ("sm90", "MIG", None, None)


def test_the_processor_counts_the_cores_of_this_process():
    target = detect("cpu", machine=Machine())
    assert target.compute_units == (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    assert target.memory is None or target.memory > 0
    assert target.vendor == "cpu" and target.wave_size == 1
