"""Machines that do not exist, for the tests of detection."""

from dataclasses import replace
from functools import partial

from portable.platform.machine import Machine
from portable.platform.sources import Card

GIB = 1 << 30
MI300X = Card(arch="gfx942", uuid="GPU-01", compute_units=304, xcds=8, device_id=0x74A1)
MI300X_CPX = replace(MI300X, compute_units=38, xcds=1)
MI350X = Card(arch="gfx950", name="AMD Instinct MI350X", compute_units=256)
MI250 = Card(arch="gfx90a", compute_units=104, xcds=1, device_id=0x740C)
RX7900 = Card(arch="gfx1100", compute_units=96, xcds=1, device_id=0x744C)
H100 = Card(arch="sm90", name="NVIDIA H100 80GB HBM3", uuid="GPU-aa", memory=85520809984)
A100 = Card(arch="sm80", name="NVIDIA A100-SXM4-80GB", uuid="GPU-bb")


def must_not_open():
    raise AssertionError("the device was opened")


def machine(build=None, environ=None, **listed):
    """A machine whose sources list the given cards, with torch built for "hip", "cuda" or neither."""
    cards = {source: tuple(listed.pop(source, ())) for source in ("kfd", "amdsmi", "nvml")}
    facts = {source: partial(tuple, records) for source, records in cards.items()}
    facts |= {"torch_hip": "7.0.51831" if build == "hip" else None, "torch_cuda": "12.8" if build == "cuda" else None}
    facts |= {"torch_version": "2.13.0+test", "environ": environ or {}, "torch_cards": must_not_open}
    return Machine(**facts | {"current": lambda: None} | listed)
