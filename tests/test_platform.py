"""Which device is detected, from injected sources (C01, C02, C03, F77)."""

import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import A100, H100, MI250, MI300X, MI300X_CPX, MI350X, RX7900, machine, must_not_open

from portable.platform import sources
from portable.platform.detect import absent, cache_clear, describe, detect
from portable.platform.machine import Machine
from portable.platform.sources import Card, read_torch


def run(script, **environ):
    """Run a script in a fresh interpreter and return what it printed."""
    root = Path(__file__).parent.parent
    path = os.pathsep.join(entry for entry in (str(root), os.environ.get("PYTHONPATH")) if entry)
    environ = {**os.environ, "PYTHONPATH": path, "PORTABLE_PLUGINS": "", **environ}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# C01: nothing opens a device


def test_detection_opens_no_device():
    script = """
import torch
from portable.platform.detect import detect
print(torch.cuda.is_initialized())
detect()
print(torch.cuda.is_initialized())
"""
    assert run(script) == ["False", "False"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_detects_and_allocates():
    script = """
import os, torch
from portable.platform.detect import cache_clear, detect
target = detect()
child = os.fork()
if child == 0:
    cache_clear()
    same = detect() == target
    torch.zeros(4, device=target.device)
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(script) == ["0"]


def test_visibility_set_after_the_import_is_seen(monkeypatch):
    cards = {"kfd": lambda: (MI300X, MI350X), "torch_hip": "7.0", "torch_cuda": None, "torch_cards": must_not_open}
    monkeypatch.setattr("portable.platform.detect.Machine", lambda: Machine(**cards, current=lambda: None))
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PORTABLE_DEVICE"):
        monkeypatch.delenv(variable, raising=False)
    cache_clear()
    assert detect("cuda").arch == "gfx942"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert detect("cuda").arch == "gfx950"
    assert detect("cuda") is detect("cuda")
    monkeypatch.setenv("PORTABLE_DEVICE", "cpu")
    assert detect().vendor == "cpu" and detect("cuda").arch == "gfx950"
    cache_clear()


def test_opening_the_device_does_not_change_the_target(monkeypatch):
    there = machine("hip", kfd=[MI300X], torch_cards=lambda: (replace(MI300X, name="AMD Instinct MI300X", memory=1),))
    monkeypatch.setattr("portable.platform.detect.Machine", lambda: there)
    cache_clear()
    before = detect()
    monkeypatch.setattr("portable.platform.detect.Machine", lambda: replace(there, current=lambda: 0))
    assert detect() is before
    cache_clear()


def test_a_device_that_torch_has_opened_is_asked_of_torch():
    opened = machine("hip", {"HIP_VISIBLE_DEVICES": "0"}, kfd=[MI300X], torch_cards=lambda: (MI300X, MI350X))
    assert detect(machine=replace(opened, current=lambda: 1)).arch == "gfx950"
    assert detect("cuda", machine=replace(opened, current=lambda: 1)).index == 1


# C02 and C03: what the installed torch was built for comes first


@pytest.mark.parametrize(
    ("build", "nvml", "kfd", "vendor"),
    [
        ("hip", [H100], [MI300X], "amd"),
        ("cuda", [H100], [MI300X], "nvidia"),
        (None, [H100], [], "cpu"),
        ("hip", [], [], "cpu"),
    ],
)
def test_the_build_of_torch_decides(build, nvml, kfd, vendor):
    there = machine(build, nvml=nvml, kfd=kfd, torch_cards=lambda: ())
    assert detect(machine=there).vendor == vendor


@pytest.mark.parametrize("source", ["kfd", "amdsmi"])
def test_a_cpu_build_beside_a_gpu_is_a_cpu(source):
    there = machine(**{source: [RX7900]})
    assert detect(machine=there).vendor == "cpu"
    assert absent(there)["amd"] == "torch 2.13.0+test was built without CUDA or ROCm, but an AMD device is there"
    assert absent(there)["nvidia"] == "torch 2.13.0+test was built without CUDA or ROCm"


def test_the_reason_for_an_absent_device():
    empty = machine("hip", torch_cards=lambda: ())
    assert absent(empty) == {
        "amd": "torch 2.13.0+test was built for ROCm 7.0, but sees no device",
        "nvidia": "torch 2.13.0+test was built for ROCm 7.0",
    }
    hidden = machine("cuda", {"CUDA_VISIBLE_DEVICES": ""}, nvml=[H100])
    assert detect(machine=hidden).vendor == "cpu"
    assert absent(hidden)["nvidia"] == "CUDA_VISIBLE_DEVICES='' leaves 0 of 1 devices"
    torn = machine("hip", {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, kfd=[MI300X])
    assert "HIP_VISIBLE_DEVICES is '0'" in absent(torn)["amd"]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is '1'"):
        detect(machine=torn)


def test_an_ordinal_that_is_hidden_names_the_variable():
    there = machine("hip", {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, kfd=[MI300X, MI350X])
    assert detect("cuda:0", machine=there).arch == "gfx950"
    with pytest.raises(ValueError, match=r"'cuda:1', .*ROCR_VISIBLE_DEVICES='1' leaves 1 of 2 devices"):
        detect("cuda:1", machine=there)
    with pytest.raises(ValueError, match=r"'cuda:2', .*but sees 1 device"):
        detect("cuda:2", machine=there)


def test_only_the_vendor_that_torch_was_built_for_gives_the_reason():
    for build, source, card in (("hip", "kfd", MI300X), ("cuda", "nvml", H100)):
        with pytest.raises(ValueError) as error:
            detect("cuda:7", machine=machine(build, **{source: [card]}))
        assert str(error.value).count("built for") == 1 and str(error.value).endswith("but sees 1 device")


def test_the_devices_order_and_names():
    there = machine("hip", {"HIP_VISIBLE_DEVICES": "1,0"}, kfd=[MI300X, MI350X])
    for device in ("cuda:1", torch.device("cuda:1"), "amd:1"):
        target = detect(device, machine=there)
        assert (target.arch, target.index, target.device) == ("gfx942", 1, "cuda:1")
    assert detect("cpu", machine=there).device == "cpu"
    assert detect(machine=replace(there, environ={"PORTABLE_DEVICE": "cuda:1"})).arch == "gfx950"
    assert detect("cpu", machine=replace(there, environ={"PORTABLE_DEVICE": "cuda:1"})).vendor == "cpu"


@pytest.mark.parametrize(
    "device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "meta", "emulated:", "emulated:sm90", "cpu:1"]
)
def test_an_unknown_device_is_an_error_with_its_value(device):
    with pytest.raises(ValueError, match=rf"device is '{device}'"):
        detect(device, machine=machine())


def test_a_bad_setting_names_the_variable():
    with pytest.raises(ValueError, match=r"PORTABLE_DEVICE is 'gpu'; it must be one of .*cpu.*emulated:gfx942"):
        detect(machine=machine(environ={"PORTABLE_DEVICE": "gpu"}))


def test_an_emulated_device_computes_on_the_cpu():
    target = detect(machine=machine(environ={"PORTABLE_DEVICE": "emulated:gfx950"}))
    assert target == replace(describe("gfx950"), emulated=True, device="cpu")


# F77: each kind of device, from its driver's record


@pytest.mark.parametrize(
    ("build", "card", "facts"),
    [
        ("cuda", H100, ("nvidia", "sm90", "H100", "Hopper", 132, 1, 32)),
        ("cuda", A100, ("nvidia", "sm80", "A100", "Ampere", 108, 1, 32)),
        ("hip", MI300X, ("amd", "gfx942", "MI300X", "CDNA3", 304, 8, 64)),
        ("hip", MI350X, ("amd", "gfx950", "MI350X", "CDNA4", 256, 8, 64)),
        ("hip", MI250, ("amd", "gfx90a", "MI250", "CDNA2", 104, 1, 64)),
        ("hip", RX7900, ("amd", "gfx1100", "RX 7900 XTX", "RDNA3", 96, 1, 32)),
    ],
)
def test_detection_of(build, card, facts):
    target = detect(machine=machine(build, **{"nvml" if build == "cuda" else "kfd": [card]}))
    assert facts == (
        target.vendor,
        target.arch,
        target.product,
        target.family,
        target.compute_units,
        target.xcds,
        target.wave_size,
    )
    assert target.runtime == ("cuda 12.8" if build == "cuda" else "hip 7.0")
    assert target.device == "cuda:0" and not target.emulated


def test_gfx9_is_never_hopper(monkeypatch):
    """torch reports (9, 4) for gfx942 and (9, 0) for gfx90a and H100 alike."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def cards(hip, major, minor, gcn=""):
        facts = types.SimpleNamespace(major=major, minor=minor, gcnArchName=gcn, name="", total_memory=1)
        facts.warp_size, facts.multi_processor_count = (32 if gcn.startswith("gfx1") else 64), 48
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
        monkeypatch.setattr(torch.version, "hip", hip)
        return read_torch

    for gcn, major, minor in (("gfx942:sramecc+:xnack-", 9, 4), ("gfx90a:sramecc+:xnack-", 9, 0)):
        target = detect(machine=machine("hip", torch_cards=cards("7.0", major, minor, gcn)))
        assert (target.vendor, target.arch, target.wave_size) == ("amd", gcn[:6], 64)
    # HIP counts pairs of compute units on wave32 devices
    assert detect(machine=machine("hip", torch_cards=cards("7.0", 11, 0, "gfx1100"))).compute_units == 96
    target = detect(machine=machine("cuda", torch_cards=cards(None, 9, 0)))
    assert (target.arch, target.family) == ("sm90", "Hopper")
    assert detect(machine=machine("cuda", torch_cards=cards(None, 9, 4))).family == "unknown"


@pytest.mark.parametrize(
    ("card", "product", "units", "xcds", "partition"),
    [
        (MI300X, "MI300X", 304, 8, "SPX"),
        (MI300X_CPX, "MI300X", 38, 1, "CPX"),
        (replace(MI300X, compute_units=152, xcds=4), "MI300X", 152, 4, "DPX"),
        (replace(MI300X, xcds=None, partition="CPX"), "MI300X", 38, 1, "CPX"),  # a source that counts the whole product
        (replace(MI300X, compute_units=76, xcds=None), "MI300X", 76, 2, "QPX"),  # torch: compute units only
        (Card(arch="gfx942", device_id=0x74A0, compute_units=76, xcds=2), "MI300A", 76, 2, "TPX"),
        (Card(arch="gfx942", device_id=0x74A2, compute_units=80, xcds=4), "MI308X", 80, 4, "SPX"),
        (Card(arch="gfx942", compute_units=304, xcds=8), None, 304, 8, None),
    ],
)
def test_partitions_of_mi300(card, product, units, xcds, partition):
    target = detect(machine=machine("hip", kfd=[card]))
    assert (target.product, target.compute_units, target.xcds, target.partition) == (product, units, xcds, partition)
    assert (target.memory is None) == (partition != "SPX")  # how partitions share the memory is not known


def test_a_slice_of_a_gpu_has_no_size():
    for there in (
        machine("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-1"}, nvml=[H100]),
        machine("cuda", nvml=[replace(H100, memory=None, partition="MIG")]),
    ):
        target = detect(machine=there)
        assert (target.arch, target.partition) == ("sm90", "MIG")
        assert target.compute_units is None and target.memory is None


def test_a_slice_is_its_product_whether_or_not_torch_has_opened_it(monkeypatch):
    """torch adds the slice to the name, which NVML leaves to the slice's own handle."""
    name = "NVIDIA H200 MIG 1g.18gb"
    facts = types.SimpleNamespace(major=9, minor=0, warp_size=32, name=name, total_memory=16 << 30)
    facts.multi_processor_count = 16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    whole = Card(arch="sm90", name="NVIDIA H200", uuid="GPU-1", partition="MIG")
    for current in (None, 0):
        there = replace(machine("cuda", nvml=[whole], torch_cards=read_torch), current=lambda c=current: c)
        target = detect(machine=there)
        assert (target.product, target.name, target.partition) == ("H200", "NVIDIA H200", "MIG")
        assert target.compute_units == (None if current is None else 16)


def test_what_the_driver_counts_wins_over_the_table():
    assert detect(machine=machine("cuda", nvml=[replace(H100, compute_units=78)])).compute_units == 78


def test_unlike_cards_are_numbered_by_torch_unless_their_order_is_fixed():
    """CUDA's default order is by speed, which the driver's list does not tell."""
    both = {"nvml": [A100, H100], "torch_cards": lambda: (H100, A100)}
    assert detect("cuda:0", machine=machine("cuda", **both)).arch == "sm90"
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert detect("cuda:0", machine=machine("cuda", by_bus, nvml=[A100, H100])).arch == "sm80"
    assert detect("cuda:0", machine=machine("cuda", nvml=[H100, H100])).arch == "sm90"


def test_the_overridden_version_is_what_rocm_runs():
    there = machine("hip", {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, kfd=[Card(arch="gfx1103", compute_units=12)])
    assert detect(machine=there).arch == "gfx1100"


def test_the_standard_platform_module_is_not_shadowed():
    root = Path(__file__).parent.parent
    assert not (root / "platform" / "__init__.py").exists()
    assert sources.platform.system()
