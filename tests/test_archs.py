"""Architecture names (C04), and the tables of architectures and products."""

import pytest
from machines import GIB, MI300X, RX7900, machine

from portable.attention import load_kernels
from portable.kernel import Op
from portable.platform import amd, nvidia
from portable.platform.detect import describe, detect, vendors
from portable.platform.sources import Card


@pytest.mark.parametrize(
    ("name", "arch", "family", "wave", "shared_memory"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", "CDNA3", 64, 65536),
        ("gfx942:xnack+", "gfx942", "CDNA3", 64, 65536),
        ("gfx90a:sramecc+:xnack-", "gfx90a", "CDNA2", 64, 65536),
        ("gfx950", "gfx950", "CDNA4", 64, 163840),
        ("gfx1151", "gfx1151", "RDNA3.5", 32, 65536),
        ("gfx1201", "gfx1201", "RDNA4", 32, 65536),
        ("sm_90", "sm90", "Hopper", 32, 232448),
        ("sm_90a", "sm90", "Hopper", 32, 232448),
        ("sm120", "sm120", "Blackwell", 32, 101376),
        ("arm64", "aarch64", "Arm", 1, 0),
        ("gfx1036", "gfx1036", "unknown", 32, 65536),
        ("gfx906:sramecc+:xnack-", "gfx906", "unknown", 64, 65536),
        ("sm_103", "sm103", "unknown", 32, 49152),
    ],
)
def test_the_spellings_of_an_architecture(name, arch, family, wave, shared_memory):
    target = describe(name)
    assert (target.arch, target.family, target.wave_size, target.shared_memory) == (arch, family, wave, shared_memory)


@pytest.mark.parametrize(
    "name", ["", "gfx", "gfx9", "gfx95", "gfx9500", "gfx942:", "xgfx942", "9.4", "sm", "sm_9", "sm900", "(9, 4)"]
)
def test_other_names_are_an_error_that_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        describe(name)
    assert repr(name) in str(error.value) and "gfx942" in str(error.value) and "sm90" in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("gfx9420", "gfx942"), ("gfx94", "gfx942"), ("sm900", "sm90"), ("MI355X", "gfx950"), ("nosuch", "")],
)
def test_the_error_ends_with_what_is_near(name, near):
    with pytest.raises(ValueError, match=rf"aarch64{f'; near it: {near}' if near else ''}$"):
        describe(name)


def test_an_unknown_chip_is_detected_with_what_every_device_has():
    target = detect(machine=machine("hip", kfd=[Card(arch="gfx1250", compute_units=8)]))
    assert (target.vendor, target.arch, target.family, target.product) == ("amd", "gfx1250", "unknown", None)
    assert target.fp8 is None and target.matrix is None and not target.graphs
    assert detect(machine=machine(cpu=lambda: Card(arch="riscv64", compute_units=4))).arch == "riscv64"


def test_every_card_has_its_own_architecture():
    """The first agent of the machine says nothing about the others."""
    there = machine("hip", kfd=[RX7900, MI300X])
    assert [detect(f"cuda:{index}", machine=there).arch for index in (0, 1)] == ["gfx1100", "gfx942"]


# the tables


FNUZ, FN = ("gfx942",), ("gfx950", "gfx1200", "gfx1201", "sm89", "sm90", "sm100", "sm120")
FP8 = dict.fromkeys(FNUZ, "e4m3fnuz") | dict.fromkeys(FN, "e4m3fn")


@pytest.mark.parametrize("arch", [*amd.ARCHS, *nvidia.ARCHS])
def test_fp8_flavours(arch):
    assert describe(arch).fp8 == FP8.get(arch)


def test_products():
    assert describe("gfx942").compute_units is None
    assert describe("gfx950").compute_units == 256  # all its products agree
    for name, units, xcds, gib in (("MI300X", 304, 8, 192), ("MI300A", 228, 6, 128), ("MI308X", 80, 4, 192)):
        target = describe("gfx942", name)
        assert (target.compute_units, target.xcds, target.memory) == (units, xcds, gib * GIB)
    assert describe("sm90", "H100 SXM") == describe("sm90", "h100")
    assert describe("sm90", "H100 PCIe").compute_units == 114
    assert describe("gfx1151", "Strix Halo").compute_units == 40


@pytest.mark.parametrize(
    ("arch", "product"), [("gfx942", "MI350X"), ("sm90", "MI300X"), ("gfx942", "MI999"), ("gfx942", "")]
)
def test_a_product_of_another_architecture_is_an_error(arch, product):
    with pytest.raises(ValueError) as error:
        describe(arch, product)
    assert repr(product) in str(error.value) and arch in str(error.value)
    assert ("MI300A" if arch == "gfx942" else "H200") in str(error.value)


@pytest.mark.parametrize("vendor", [amd, nvidia], ids=["amd", "nvidia"])
def test_every_product_is_found_by_its_name_and_ids(vendor):
    for product in vendor.PRODUCTS.values():
        assert product.arch in vendor.ARCHS
        assert describe(product.arch, product.name).product == product.name
        named = [Card(arch=product.arch, name=f"VENDOR Line {product.name}", compute_units=product.compute_units)]
        by_id = [Card(arch=product.arch, device_id=i, compute_units=product.compute_units) for i in product.device_ids]
        for card in named + by_id:
            build, source = ("cuda", "nvml") if vendor is nvidia else ("hip", "kfd")
            assert detect(machine=machine(build, **{source: [card]})).product == product.name


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40"])
def test_a_name_that_only_begins_alike_is_another_product(name):
    assert detect(machine=machine("cuda", nvml=[Card(arch="sm89", name=name)])).product is None


def test_every_vendor_orders_every_operation_with_the_reference_last():
    for vendor in vendors({"PORTABLE_PLUGINS": ""}).values():
        assert set(vendor.ORDER) == {op.value for op in Op}
        assert all(providers[-1] == "reference" for providers in vendor.ORDER.values())
        assert {vendor.ORDER[op] for op in Op}  # an Op looks its own name up


def test_what_was_measured_names_operations_archs_and_kernels_that_there_are():
    kernels = load_kernels()
    names = {name for kernel in kernels for name in (kernel.name, kernel.caps.provider)}
    for vendor in vendors({"PORTABLE_PLUGINS": ""}).values():
        for row in getattr(vendor, "MEASURED", ()):
            assert row.op in {op.value for op in Op} and set(row.archs) <= set(vendor.ARCHS)
            assert row.first and set(row.first) <= names


def test_the_tables_hold_the_devices_of_this_field():
    archs = (
        "gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1151 gfx1200 gfx1201 sm80 sm86 sm89 sm90 sm100 sm120 x86_64 aarch64"
    )
    products = "MI300X MI300A MI308X MI325X MI350X MI355X MI250X H100 H200 B200 A100"
    known = vendors({"PORTABLE_PLUGINS": ""}).values()
    assert set(archs.split()) <= {name for vendor in known for name in vendor.ARCHS}
    assert set(products.split()) <= {name for vendor in known for name in vendor.PRODUCTS}
