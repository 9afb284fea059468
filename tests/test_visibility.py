"""Which devices torch sees under the visibility variables (C02)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable.platform.visibility import STAGES, UNKNOWN, hiding, visible

UUIDS = ("GPU-aaaa0001", "GPU-aaaa0002", "GPU-bbbb0003")


def hip(count=2, uuids=(), **variables):
    return visible({f"{name}_VISIBLE_DEVICES": value for name, value in variables.items()}, "hip", count, uuids)


def cuda(value, count=4, uuids=()):
    return visible({"CUDA_VISIBLE_DEVICES": value}, "cuda", count, uuids)


def test_rocm_honours_both_names():
    assert hip() == (0, 1)
    assert hip(HIP="1") == (1,)
    assert hip(CUDA="1") == (1,)
    assert hip(HIP="1", CUDA="1") == (1,)
    assert hip(HIP="1,0", CUDA="1, 0") == (1, 0)


@pytest.mark.parametrize(("hip_value", "cuda_value"), [("0", "1"), ("", "0"), ("0", "")])
def test_two_names_that_differ_are_an_error_naming_both(hip_value, cuda_value):
    with pytest.raises(ValueError) as error:
        hip(HIP=hip_value, CUDA=cuda_value)
    for part in ("HIP_VISIBLE_DEVICES", repr(hip_value), "CUDA_VISIBLE_DEVICES", repr(cuda_value)):
        assert part in str(error.value)


@pytest.mark.parametrize("variable", ["HIP", "CUDA", "ROCR"])
def test_empty_means_no_device(variable):
    assert hip(**{variable: ""}) == ()
    assert cuda("") == ()


def test_rocr_renumbers_below_the_others():
    assert hip(ROCR="1") == (1,)
    assert hip(ROCR="1", CUDA="0,1") == (1,)
    assert hip(4, ROCR="3,1,0", HIP="2,0") == (0, 3)


def test_the_hidden_ordinal_names_its_variable():
    environ = {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert hiding(environ, "hip", 2, 0) is None
    assert hiding(environ, "hip", 2, 1) == "ROCR_VISIBLE_DEVICES='1' leaves 1 of 2"
    assert hiding({"HIP_VISIBLE_DEVICES": "0"}, "hip", 2, 1) == "HIP_VISIBLE_DEVICES='0' leaves 1 of 2"
    assert hiding(environ, "hip", 1, 1) is None  # the machine has no device 1: nothing hides it


def test_cuda_reads_one_variable_only():
    environ = {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": ""}
    assert visible(environ, "cuda", 2) == (0, 1)


@pytest.mark.parametrize(
    ("value", "devices"),
    [("3,0", (3, 0)), ("0,9,1", (0,)), ("-1", ()), ("0,-1,2", (0,)), ("1,x,2", (1,)), (" 1 , 2 ", (1, 2)), ("1,1", ())],
)
def test_the_first_entry_that_names_no_device_ends_the_list(value, devices):
    assert cuda(value) == devices
    assert hip(4, HIP=value) == devices


def test_a_repeated_device_ends_the_list_of_rocr():
    assert hip(4, ROCR="1,2,1,3") == (1, 2)


def test_uuids_are_matched_by_their_beginning():
    assert cuda("GPU-bbbb", 3, UUIDS) == (2,)
    assert cuda("gpu-aaaa0002,GPU-AAAA0001", 3, UUIDS) == (1, 0)
    assert cuda("GPU-aaaa", 3, UUIDS) == ()  # it fits two
    assert cuda("0,GPU-cccc,1", 3, UUIDS) == (0,)
    assert hip(3, UUIDS, ROCR="GPU-bbbb0003,0", HIP="1") == (0,)
    assert hip(3, UUIDS, ROCR="0", HIP="GPU-bbbb0003") == ()


def test_what_no_uuid_tells_is_counted():
    assert cuda("GPU-aaaa0001,GPU-bbbb0003") == (UNKNOWN, UNKNOWN)
    assert cuda("MIG-5c89852c", 3, UUIDS) == (UNKNOWN,)


entries = st.one_of(st.integers(-2, 9).map(str), st.sampled_from(["", "x", "GPU-aaaa", "GPU-bbbb0003", "MIG-1"]))
lists = st.lists(entries, max_size=5).map(",".join)


@given(
    runtime=st.sampled_from(list(STAGES)),
    environ=st.dictionaries(st.sampled_from(["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]), lists),
    uuids=st.sampled_from([(), UUIDS]),
)
def test_every_visible_device_is_on_the_machine_once_and_hiding_agrees(runtime, environ, uuids):
    devices = visible(environ, runtime, 3, uuids)
    known = [device for device in devices if device != UNKNOWN]
    assert len(set(known)) == len(known) and set(known) <= {0, 1, 2}
    for index in range(3):
        if index < len(devices):
            assert hiding(environ, runtime, 3, index, uuids) is None
        else:
            assert hiding(environ, runtime, 3, index, uuids) is not None
