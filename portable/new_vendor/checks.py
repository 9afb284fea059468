"""What this package promises, tried on the processor: `pytest`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import portable
from portable.platform.machine import Machine


def test_the_tables_describe_the_device() -> None:
    target = portable.describe("acme1", "Acme One")
    assert (target.vendor, target.compute_units) == ("acme", 64)


def test_a_machine_without_a_device_says_why() -> None:
    with pytest.raises(ValueError, match="torch has no device type 'acme'"):
        portable.detect("acme", machine=Machine(environ={}))


def test_a_device_is_found_and_gets_the_kernel() -> None:
    target = portable.detect("acme", machine=Machine(environ={"ACME_ON_CPU": "1"}))
    layer, needs = portable.Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64), portable.Needs(page_size=16)
    kernels = portable.available_kernels("cpu")
    assert portable.select(portable.Op.PAGED, target, layer, needs, kernels=kernels).kernel.name == "acme.paged"


def test_every_kernel_keeps_the_contract(conformance: Callable[..., object]) -> None:
    conformance("acme", device="cpu")  # a fixture of portable: every kernel of this provider, every cell of each
