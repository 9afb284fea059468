"""Verdicts on vendors' kernels: found once, kept, and never the end of the process that asks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from portable import attention, doctor, verdicts
from portable.backends import reference
from portable.kernel import Kernel, Needs, Op, Requires
from portable.layer import Layer, UnsupportedError
from portable.packages import Package
from portable.platform.detect import describe
from portable.platform.target import Target
from portable.select import select, why_not_here
from portable.verdicts import Verdicts, apart, is_vendors

TARGET = replace(describe("gfx942"), device="cpu")
REFERENCE = next(kernel for kernel in reference.KERNELS if kernel.caps.op is Op.PAGED)
LAYER = Layer.gqa(num_heads=2, head_dim=8)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that knows no verdict."""
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    yield tmp_path / "self-test"


def kernel(name: str = "lib.paged", package: str = "lib", **caps: object) -> Kernel:
    given = {"name": name, "provider": package, "requires": (Requires(package),), **caps}
    return Kernel(replace(REFERENCE.caps, **given), REFERENCE.run)


class Faults:
    """A self-test that gives these faults and remembers who was tested."""

    def __init__(self, **faults: str) -> None:
        self.faults, self.asked = faults, []

    def __call__(self, kernel: Kernel, target: Target) -> str | None:
        self.asked.append(kernel.name)
        return self.faults.get(kernel.name.partition(".")[0])


def test_only_what_needs_a_package_of_others_is_tested() -> None:
    test = Faults()
    ours = kernel("triton.paged", "triton")
    assert not is_vendors(REFERENCE) and not is_vendors(ours) and is_vendors(kernel())
    ask = Verdicts(TARGET, {}, test)
    assert ask(REFERENCE) is None and ask(ours) is None and test.asked == []


def test_a_verdict_is_found_once_and_read_from_disk_by_the_next_process(kept: Path, monkeypatch) -> None:
    for faults, told in (({}, None), ({"bad": "lse is wrong"}, "its self-test failed: lse is wrong")):
        name = "bad.paged" if faults else "good.paged"
        test = Faults(**faults)
        for _ in range(2):
            assert Verdicts(TARGET, {"lib": "1.0"}, test)(kernel(name)) == told
        assert test.asked == [name]
        monkeypatch.setattr(verdicts, "_known", {})
        assert Verdicts(TARGET, {"lib": "1.0"}, test)(kernel(name)) == told
        assert test.asked == [name]
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize("what", ["version", "arch", "product", "runtime", "torch", "portable"])
def test_a_verdict_holds_for_what_it_was_found_on(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test = Faults()
    Verdicts(TARGET, {"lib": Package("1.0")}, test)(kernel())
    target, version = TARGET, "1.0"
    if what == "version":
        version = "1.1"
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif what == "portable":
        monkeypatch.setattr(verdicts, "_portable", lambda: "another")
    else:
        target = replace(TARGET, **{what: "another"})
    Verdicts(target, {"lib": Package(version)}, test)(kernel())
    assert len(test.asked) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "another", "fault": null}', '{"key": null}', "null"])
def test_a_file_that_is_not_the_verdict_is_not_believed(kept: Path, monkeypatch, text: str) -> None:
    test = Faults(lib="out is wrong")
    Verdicts(TARGET, {}, test)(kernel())
    (file,) = kept.iterdir()
    file.write_text(text)
    monkeypatch.setattr(verdicts, "_known", {})
    assert Verdicts(TARGET, {}, test)(kernel()) == "its self-test failed: out is wrong"
    assert len(test.asked) == 2 and json.loads(file.read_text())["fault"] == "out is wrong"


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "file"))
    test = Faults()
    assert [Verdicts(TARGET, {}, test)(kernel()) for _ in range(2)] == [None, None]
    assert test.asked == ["lib.paged"]


# what it does to the choice


def choose(ask: Verdicts, *kernels: Kernel):
    order = {"paged": ("lib", "other", "third")}
    here = {"lib": "1.0", "other": "1.0", "third": "1.0"}
    return select(Op.PAGED, TARGET, LAYER, Needs(page_size=16), None, here, (*kernels, REFERENCE), order, ask)


def test_a_kernel_that_fails_is_rejected_with_the_reason_and_those_behind_the_chosen_are_not_tested() -> None:
    test = Faults(lib="softcap: out is wrong by 0.4, above 0.02")
    found = choose(Verdicts(TARGET, {}, test), kernel(), kernel("other.paged", "other"), kernel("third.paged", "third"))
    assert found.kernel.name == "other.paged"
    assert found.rejected == (("lib.paged", ("its self-test failed: softcap: out is wrong by 0.4, above 0.02",)),)
    assert found.alternatives == ("third.paged", "reference.paged")
    assert test.asked == ["lib.paged", "other.paged"]


def test_a_forced_kernel_that_fails_is_an_error_that_says_so() -> None:
    ask = Verdicts(TARGET, {}, Faults(lib="lse is wrong"))
    with pytest.raises(UnsupportedError, match=r"lib\.paged: its self-test failed: lse is wrong"):
        select(Op.PAGED, TARGET, LAYER, Needs(page_size=16), "lib", {"lib": "1"}, (kernel(), REFERENCE), {}, ask)


def test_what_is_refused_anyway_is_not_tested() -> None:
    test = Faults()
    assert why_not_here(kernel(vendors={"nvidia"}), TARGET, {"lib": "1"}, Verdicts(TARGET, {}, test))
    assert why_not_here(kernel(), TARGET, {}, Verdicts(TARGET, {}, test)) == ("lib is not installed",)
    assert test.asked == []


def test_doctor_shows_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "load_kernels", lambda: (kernel(package="pytest"), REFERENCE))
    monkeypatch.setattr(attention, "verdicts_on", lambda t, p: Verdicts(t, p, Faults(lib="lse is wrong")))
    found = doctor.report({})
    assert [k["reasons"] for k in found["kernels"]] == [["its self-test failed: lse is wrong"], []]
    assert "its self-test failed: lse is wrong" in doctor.render(found)


def test_what_compiles_at_its_first_call_waits_for_settle() -> None:
    test = Faults(aiter="out is wrong")
    late = kernel("aiter.paged", "amd-aiter")
    ask = Verdicts(TARGET, {"amd-aiter": "0.1.7"}, test)
    assert ask(late) is None and test.asked == []
    assert ask.settle(late) == ask(late) == "its self-test failed: out is wrong"
    assert test.asked == ["aiter.paged"]


# in a process of its own

CHILD = """
import os, sys, time
from portable.child import saying
from portable.verdicts import answer
def test(name):
    print("noise"); os.write(1, b"more noise\\n")
    if name == "hangs": time.sleep(60)
    if name == "dies": os.write(2, b"Memory access fault by GPU node-1\\n"); os._exit(134)
    if name == "leaves": sys.exit(3)
    if name == "parent": os.system("sleep 60 &"); time.sleep(60)
    return "out is wrong" if name == "wrong" else None
os.write(1, b"a banner\\n")
with saying() as say:
    print("no device?")
    if sys.argv[1] == "none": raise RuntimeError("no device")
    answer(map(test, sys.argv[2:]), say)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "CHILD", CHILD)


@pytest.mark.usefixtures("child")
def test_each_fault_has_its_kernel_and_the_rest_is_tested_still() -> None:
    found = dict(apart("gpu", ["a", "wrong", "dies", "b", "hangs", "leaves", "c"], each=2.0))
    assert list(found) == ["a", "wrong", "dies", "b", "hangs", "leaves", "c"]
    assert [found[name] for name in ("a", "b", "c")] == [None, None, None]
    assert found["wrong"] == "out is wrong"
    assert (
        found["dies"]
        == "it ended its process with code 134: no device? noise more noise Memory access fault by GPU node-1"
    )
    assert found["hangs"] == "it did not end within 2 s"
    assert found["leaves"] is not None and found["leaves"].startswith("it ended its process with code 3")


@pytest.mark.usefixtures("child")
def test_what_a_hanging_test_started_ends_with_it() -> None:
    """Else the reader of its stream would wait for who holds the other end."""
    start = time.perf_counter()
    assert dict(apart("gpu", ["parent"], each=0.5)) == {"parent": "it did not end within 0.5 s"}
    assert time.perf_counter() - start < 30


@pytest.mark.usefixtures("child")
def test_where_no_process_can_be_had_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(apart("none", ["a"])) == {}
    monkeypatch.setattr(sys, "executable", os.devnull)
    assert dict(apart("gpu", ["a"])) == {}


@pytest.mark.usefixtures("child")
def test_a_gpu_is_tested_in_one_process_for_all_kernels_of_a_package() -> None:
    target, test = replace(TARGET, device="cuda:0"), Faults()
    every = (kernel("a"), kernel("wrong"), kernel("b", "other"))
    ask = Verdicts(target, {}, test, every)
    assert ask(every[0]) is None
    assert len(verdicts._known) == 2 and test.asked == []
    assert ask(every[1]) == "its self-test failed: out is wrong"
    stranger = kernel("stranger")  # no other process knows it by name
    assert ask(stranger) is None and test.asked == ["stranger"]


def test_another_process_tests_real_kernels() -> None:
    assert dict(apart("cpu", ["torch.sdpa_lse", "reference.mla_decode"])) == {
        "torch.sdpa_lse": None,
        "reference.mla_decode": None,
    }


@pytest.mark.usefixtures("child")
def test_what_others_print_before_is_not_taken_for_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print(1); print(2); print('{\"fault\": null}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert dict(apart("gpu", ["wrong"])) == {"wrong": "out is wrong"}


def test_a_test_that_hangs_in_this_process_is_left_behind() -> None:
    waiting = threading.Event()
    ask = Verdicts(TARGET, {}, lambda kernel, target: str(waiting.wait(60)))
    assert ask.settle(kernel(), each=0.1) == "its self-test failed: it did not end within 0.1 s"
    waiting.set()


def test_ctrl_c_during_a_test_is_not_swallowed(kept: Path) -> None:
    def test(kernel: Kernel, target: Target) -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Verdicts(TARGET, {}, test)(kernel())
    assert not kept.exists()


def test_settling_chooses_again_where_a_late_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    test = Faults(aiter="out is wrong")
    late, other = kernel("aiter.paged", "amd-aiter"), kernel("other.paged", "other")
    here = {"amd-aiter": Package("0.1.7"), "other": Package("1.0")}
    monkeypatch.setattr(attention, "load_kernels", lambda: (late, other, REFERENCE))
    monkeypatch.setattr(attention, "installed", lambda target, requested: here)
    monkeypatch.setattr(attention, "verdicts_on", lambda target, packages: Verdicts(target, packages, test))
    chosen, needs = attention.Kernels(TARGET, LAYER, None), Needs(page_size=16)
    assert chosen(Op.PAGED, needs) is late
    chosen.settle()
    assert chosen(Op.PAGED, needs) is other
    assert test.asked == ["aiter.paged", "other.paged"]
