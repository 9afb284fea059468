"""The lengths of requests that the kit asks for, and how it tells where a kernel is wrong."""

from __future__ import annotations

import pytest

from portable.backends import reference_mamba
from portable.backends.reference import KERNELS
from portable.conformance import cells, features, lens
from portable.kernel import ATTENTION, Op
from portable.platform.detect import describe, detect

PLAIN = [kernel for kernel in KERNELS if kernel.caps.op in (*ATTENTION, Op.CACHE_GATHER)]


def test_a_name_of_lengths_means_one_thing():
    assert len(lens.NAMED) == len({*lens.LENS, *lens.LONG, *lens.MORE})
    assert all(lens.NAMED[name] == value for each in (lens.LENS, lens.LONG, lens.MORE) for name, value in each.items())


@pytest.mark.parametrize("kernel", PLAIN, ids=lambda k: k.name)
def test_one_request_many_requests_and_long_ones_are_asked(kernel):
    """Of the contract's 40 cells too, which hold not every pair of values."""
    target = detect("cpu")
    asked = {case.lens for case in cells.cases(kernel, target)}
    assert asked == {lens.LENS[name] for name in lens.LENS}
    probes = [probe for probe in features.probes(kernel, target) if probe.group == "lengths" and probe.runs]
    asked |= {probe.case.lens for probe in probes}
    assert max(keys for each in asked for _, keys in each) > 4096
    assert any(len(each) == 1 and each[0][1] > 2048 for each in asked)
    singles = {each[0] for each in asked if len(each) == 1}
    assert min(queries for queries, _ in singles) == 1 < max(queries for queries, _ in singles)
    assert max(len(each) for each in asked) == 20


@pytest.mark.parametrize("op", [Op.CONV1D, Op.SSD, Op.STATE_UPDATE])
def test_one_request_and_many_are_asked_of_recurrent_layers(op):
    kernel = next(kernel for kernel in reference_mamba.KERNELS if kernel.caps.op is op)
    counts = {len(case.call.rows) for case in cells.cases(kernel, detect("cpu"))}
    assert 1 in counts and max(counts) == 20


def test_an_emulated_device_is_asked_for_no_more_than_it_has_time_for():
    kernel = next(kernel for kernel in KERNELS if kernel.caps.op is Op.PAGED)
    named = set(features.asked_lens(kernel, detect("emulated:gfx942"), True))
    assert "one_2k" in named and max(sum(keys for _, keys in lens.NAMED[name]) for name in named) < 2100
    assert set(features.asked_lens(kernel, detect("cpu"), True)) - named == {"to_4k"}
    gpu = set(features.asked_lens(kernel, describe("gfx942"), True))
    assert gpu - named == {"to_4k", "to_32k"}
