"""Plug-ins that raise, exit, hang or lie: each is left out and reported, and nothing else is lost."""

import itertools
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import portable
from portable import attention, cli, doctor, plugin_kernels, plugins, verdicts
from portable.conformance import command as conformance
from portable.platform.detect import cache_clear, describe, detect, vendors

RIGHT = (Path(portable.__file__).parent / "new_vendor" / "kernels.py").read_text(encoding="utf-8")
DEVICES = (Path(portable.__file__).parent / "new_vendor" / "devices.py").read_text(encoding="utf-8")
NUMBERS = itertools.count()
LAYER = portable.Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def forget():
    cache_clear()
    attention.load_kernels.cache_clear()
    verdicts._known.clear()
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install plug-ins, "group name" -> source of its module, for the time of a test."""
    monkeypatch.delenv("PORTABLE_PLUGINS", raising=False)
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "cache"))

    def install(**modules):
        # only who hangs meets the limit: a busy machine may take a second for the others
        hangs = any("sleep(60)" in source or "while time" in source for source in modules.values())
        monkeypatch.setattr(plugins, "LIMIT", 1.0 if hangs else 30.0)
        info = tmp_path / "extra-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
        points, files = {"kernels": "", "platforms": ""}, {}
        for key, source in modules.items():
            group, _, name = key.partition("_")
            module = f"plugin_{next(NUMBERS)}"  # a new name each time: who hangs in an import keeps its module's lock
            points[group] += f"{name} = {module}\n"
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
            files[key] = tmp_path / f"{module}.py"
        text = "".join(f"[portable.{group}]\n{lines}" for group, lines in points.items())
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        forget()
        return files

    yield install
    forget()


def states(group):
    return {plugin.name: (plugin.state, plugin.problem) for plugin in plugins.listed(group)}


def names():
    return {kernel.name for kernel in attention.load_kernels()}


def test_a_plug_in_brings_its_kernels(install):
    own = names()
    install(kernels_acme=RIGHT)
    assert names() == own | {"acme.paged"}
    (kernel,) = (kernel for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    assert kernel.plugin.startswith("extra 1.0 ")
    assert kernel in portable.available_kernels("cpu")
    assert states(plugins.KERNELS) == {"acme": ("loaded", None)}


def test_a_package_is_hashed_once_for_all_its_kernels(install, monkeypatch):
    hashed = []
    monkeypatch.setattr(plugin_kernels, "package_hash", lambda package: hashed.append(package) or "0")
    second = "replace(KERNELS[0], caps=replace(KERNELS[0].caps, name='acme.other'))"
    install(kernels_acme=f"{RIGHT}\nfrom dataclasses import replace\nKERNELS = (*KERNELS, {second})")
    assert names() >= {"acme.paged", "acme.other"}
    assert len(hashed) == len(set(hashed)) == 1


BROKEN = {
    "raises": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "hangs": ("import time; time.sleep(60)", "TimeoutError: no answer within 1 s"),
    "spins": (
        "import time\nend = time.time() + 3\nwhile time.time() < end: pass",
        "TimeoutError: no answer within 1 s",
    ),
    "has no kernels": ("x = 1", "TypeError: 'module' object is not iterable"),
    "not a kernel": ("KERNELS = ({'op': 'paged'},)", r"KERNELS[0] is {'op': 'paged'}; it must be a Kernel"),
    "takes a name": (RIGHT.replace('"acme.paged"', '"torch.sdpa"'), "has the name 'torch.sdpa', which another"),
    "takes a provider": (RIGHT.replace('provider="acme"', 'provider="reference"'), "has the provider 'reference'"),
    "twice the same": (RIGHT + "KERNELS = KERNELS * 2", "KERNELS[1] has the name 'acme.paged'"),
    "no sizes": (RIGHT.replace("head_dims=ANY_SIZE", "head_dims=64"), "acme.paged: its caps cannot be read: Attr"),
    "no vendors": (RIGHT.replace('vendors={"acme", "cpu"}', "vendors=None"), "its caps cannot be read: TypeError"),
    "unknown feature": (RIGHT.replace('"sinks"', '"sink"'), "features ['sink'] are not among"),
    "no package": (RIGHT.replace("archs=ANY", "archs=ANY, requires=('torch',)"), "its caps cannot be read: ValueError"),
    "no package of a vendor": (
        RIGHT.replace("archs=ANY", "archs=ANY, requires_on={'acme': ('torch',)}"),
        "its caps cannot be read: ValueError",
    ),
    "no version of a vendor's package": (
        RIGHT.replace("archs=ANY", "archs=ANY, requires_on={'acme': (('torch', '>>2'),)}"),
        "its caps cannot be read: InvalidSpecifier",
    ),
    "no packages of vendors": (
        RIGHT.replace("archs=ANY", "archs=ANY, requires_on=None"),
        "its caps cannot be read: AttributeError",
    ),
    "a path": (RIGHT.replace('"acme.paged"', '"../acme"'), "KERNELS[0] is named '../acme'"),
    "raises what cannot be read": (
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "E: its message cannot be",
    ),
    "cannot be shown": ("class W:\n    def __repr__(self): 1 / 0\nKERNELS = (W(),)", "ZeroDivisionError"),
    "speaks to a terminal": ("raise OSError('\\x1b[2J\\x07\\u202ebye')", "OSError: \\x1b[2J\\x07\\u202ebye"),
    "is interrupted": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "no function": (RIGHT.replace("run=paged", "run=None"), "run and prepare functions"),
}


@pytest.mark.parametrize(("source", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_left_out_and_the_others_stay(install, caplog, source, said):
    own = names()
    install(kernels_bad=source, kernels_good=RIGHT.replace("acme", "good"))
    assert names() == own | {"good.paged"}
    state, problem = states(plugins.KERNELS)["bad"]
    assert state == "left out" and said in problem
    assert f"plug-in 'bad' is left out of portable.kernels: {problem}" in caplog.text
    shown = {plugin["name"]: plugin for plugin in doctor._plugins(plugins.KERNELS, {})}
    assert doctor._plugin_row(plugins.KERNELS, shown["bad"]) == ("no", plugins.KERNELS, "bad", "extra 1.0", problem)
    assert doctor._plugin_row(plugins.KERNELS, shown["good"])[::4] == ("yes", "loaded")


FEATURES = "features=frozenset({"
LIES = {
    "softcap": (FEATURES, FEATURES + '"softcap", ', "softcap: out is wrong"),
    "alibi": (FEATURES, FEATURES + '"alibi", ', "alibi: out is wrong"),
    "the scale": ("* layer.scale", "/ math.sqrt(q.shape[-1])", "out is wrong"),
    "heads": ("repeat_interleave(layer.group, 1)", "repeat(1, layer.group, 1)", "out is wrong"),
    "both sides": ("if segment.causal if isinstance(segment.causal, bool) else segment.causal[request]:", "if True:",
                   "keys on both sides: out is wrong"),
    "its input": ("    assert kv.v", "    q.mul_(2)\n    assert kv.v", "it wrote into q"),
    "its life": ("    assert kv.v", "    raise SystemExit(3)\n    assert kv.v", "SystemExit: 3"),
    "a window": ("visible &= distance <= left", "pass", "the edge of a window"),
    "sinks": ("logits = torch.cat([scores, sinks], -1)", "pass", "sinks: out is wrong"),
    "the diagonal": ("num_keys - num_queries, num_keys, dev", "0, num_queries, dev", "out is wrong"),
    "the LSE": ("lse[:, rows] = total", "lse[:, rows] = total / math.log(2)", "lse is wrong"),
    "an empty row": ("weights = torch.exp(scores - total[..., None]).masked_fill(~visible, 0)",
                     "weights = torch.softmax(scores, -1)", "out is wrong by inf"),
    "a dtype": ("q[rows].float()", "q[rows].float() if q.dtype == torch.float16 else 1 / 0", "ZeroDivisionError"),
    "an end": ("keys, values = (", "import time; time.sleep(60); keys, values = (", "it did not end within 1 s"),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "about"), LIES.values(), ids=LIES)
def test_a_kernel_that_lies_is_not_offered(install, monkeypatch, caplog, right, wrong, about):
    assert right in RIGHT
    monkeypatch.setattr(verdicts, "apart", lambda *given: iter(()))  # in a thread: a process for each takes seconds
    monkeypatch.setattr(verdicts.Verdicts.settle, "__defaults__", (1.0,))
    install(kernels_bad=RIGHT.replace(right, wrong))
    assert "acme.paged" in names()
    assert "acme.paged" not in {kernel.name for kernel in portable.available_kernels("cpu")}
    (kernel,) = (kernel for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    row = doctor._kernel(kernel, detect("cpu"), {}, attention.verdicts_on(detect("cpu"), {}))
    assert not row["usable"] and about in row["reasons"][0], row["reasons"]
    assert "acme.paged is not used on cpu: its self-test failed" in caplog.text
    chosen = portable.Attention(LAYER, page_size=16, device="cpu").explain()
    assert "acme.paged" not in {row.choice.kernel.name for row in chosen.rows if row.choice}
    assert "self-test failed" in conformance.offered(detect("cpu"))[1]["acme.paged"][0]
    assert [kernel.name for kernel in conformance.offered(detect("cpu"), ["acme.paged"])[0]] == ["acme.paged"]


ENDS = "it ended its process with code "
DEADLY = {
    "leaves": ("import os; os._exit(3)", f"{ENDS}3"),
    "aborts": ("import os; os.abort()", f"{ENDS}-6"),
    "reads nowhere": ("import ctypes; ctypes.string_at(8)", f"{ENDS}-11"),
    "hangs": ("import ctypes; ctypes.PyDLL(None).sleep(60)", "it did not end within 8 s"),  # and holds every lock
}


@pytest.mark.parametrize(("statement", "reason"), DEADLY.values(), ids=DEADLY)
def test_a_kernel_that_takes_its_process_along_takes_no_engine(install, monkeypatch, statement, reason):
    monkeypatch.setattr(verdicts.Verdicts.settle, "__defaults__", (8.0,))
    bad = RIGHT.replace("    assert kv.v", f"    {statement}\n    assert kv.v")
    install(kernels_bad=bad, kernels_good=RIGHT.replace("acme", "good"))
    found = {kernel.name for kernel in portable.available_kernels("cpu")}
    assert "acme.paged" not in found and "good.paged" in found
    (kernel,) = (kernel for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    said = attention.verdicts_on(detect("cpu"), {})(kernel)
    assert said.startswith(f"its self-test failed: {reason}")


def test_a_device_that_the_processor_stands_in_for_is_tested_as_itself(install, monkeypatch):
    """The other process asks for the vendor: of a "cpu" this kernel would refuse everything."""
    install(kernels_acme=RIGHT.replace('{"acme", "cpu"}', '{"acme"}'), platforms_acme=DEVICES)
    monkeypatch.setenv("ACME_ON_CPU", "1")
    target = detect("acme")
    (kernel,) = (kernel for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    assert verdicts.spelled(target) == "acme:0"
    assert dict(verdicts.apart(verdicts.spelled(target), ["acme.paged"])) == {"acme.paged": None}
    assert attention.verdicts_on(target, {})(kernel) is None


def test_what_a_helper_module_does_is_tested_again(install, tmp_path):
    """An edit of any file of the package, and not only of the one that holds the function."""
    package = tmp_path / "vendor_pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(RIGHT)
    (package / "inner" / "launch.cu").write_text("one")
    install(kernels_acme="from vendor_pkg.kernels import KERNELS")
    before = next(kernel.plugin for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    (package / "inner" / "launch.cu").write_text("two")
    forget()
    after = next(kernel.plugin for kernel in attention.load_kernels() if kernel.name == "acme.paged")
    assert before.startswith("extra 1.0 ") and after.startswith("extra 1.0 ") and before != after


MERGE = """
from dataclasses import replace
from portable.backends.reference import KERNELS as OURS
from portable.kernel import Kernel
from portable.merge import merge_states

def merge(outs, lses, sinks, out, lse):
    found = merge_states(outs, lses, sinks=sinks)
    out.copy_(found.out)
    if lse is not None:
        lse.copy_(found.lse)

ours = next(kernel for kernel in OURS if kernel.name == "reference.merge")
KERNELS = (Kernel(replace(ours.caps, name="acme.merge", provider="acme"), merge),)
"""


@pytest.mark.parametrize(("wrong", "offered"), [("sinks=sinks", True), ("sinks=None", False)])
def test_an_operation_that_is_no_attention_is_tried_as_well(install, wrong, offered):
    install(kernels_acme=MERGE.replace("sinks=sinks", wrong))
    kernels = {kernel.name: kernel for kernel in attention.load_kernels()}
    said = attention.verdicts_on(detect("cpu"), {})(kernels["acme.merge"])
    assert (said is None) == offered and (offered or "its self-test failed" in said)


def test_an_edited_plug_in_is_tested_again(install):
    files = install(kernels_acme=RIGHT.replace("distance <= left", "distance < left"))
    assert "acme.paged" not in {kernel.name for kernel in portable.available_kernels("cpu")}
    files["kernels_acme"].write_text(RIGHT)
    forget()
    assert "acme.paged" in {kernel.name for kernel in portable.available_kernels("cpu")}


@pytest.mark.parametrize(("allowed", "found"), [("", set()), ("b, c", {"b"}), ("c", set())])
def test_the_variable_limits_which_are_loaded(install, monkeypatch, allowed, found):
    own = names()
    broken = "raise RuntimeError('must not be imported')"
    files = install(kernels_a=broken, kernels_b=RIGHT.replace("acme", "b"), platforms_a=broken)
    monkeypatch.setenv("PORTABLE_PLUGINS", allowed)
    assert names() - own == {f"{name}.paged" for name in found}
    assert "a" not in vendors() and not {files["kernels_a"].stem, files["platforms_a"].stem} & sys.modules.keys()
    assert {name: state for name, (state, _) in states(plugins.KERNELS).items()} == {
        "a": "not allowed",
        "b": "loaded" if found else "not allowed",
    }


def test_what_a_plug_in_prints_is_in_no_document(install, capsys):
    """At import, in a probe and in the self-test."""
    chatty = (
        DEVICES + "\nprint('here'); ask = probe\ndef probe(*given):\n    print('probing')\n    return ask(*given)\n"
    )
    install(
        kernels_acme=RIGHT.replace("    assert kv.v", "    print('running')\n    assert kv.v") + "print('{')\n",
        platforms_acme=chatty,
    )
    capsys.readouterr()
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["usable"] for row in found["kernels"] if row["name"] == "acme.paged"] == [True]


def test_names_are_text(install, capsys):
    """Of markup that a browser reads, see the conformance kit's page; a terminal gets nothing to obey."""
    install(**{"kernels_<img onerror>\x1b[31m": RIGHT})
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert r"<img onerror>\x1b[31m  extra 1.0  loaded" in shown and "\x1b" not in shown


def test_a_name_that_no_plug_in_has_is_said(install, monkeypatch, capsys):
    install(kernels_acme=RIGHT)
    monkeypatch.setenv("PORTABLE_PLUGINS", "acme, amce")
    assert cli.main(["doctor"]) == 0
    assert re.search(r"PORTABLE_PLUGINS +no plug-in is named 'amce'\n", capsys.readouterr().out)


VENDORS = {
    "probe hangs": ("def probe(machine, index): import time; time.sleep(60)", "TimeoutError"),
    "probe exits": ("def probe(machine, index): raise SystemExit('bye')", "SystemExit: bye"),
    "another's device": ("def probe(machine, index): return detect('cpu', machine=machine)", "probe answered Target("),
    "no device of torch": ("def on_cpu(machine): return False\ndef count(machine): return 1", "acme"),
    "an arch of another": ("ARCHS = {'acme1': Arch(name='acme1', vendor='amd', family='x', wave_size=1, "
                           "shared_memory=0)}", "is of vendor 'amd'"),
    "a broken pattern": ("PRODUCTS = {'X': Product(name='X', arch='acme1', pattern='(')}", "error: missing )"),
    "a number of variables": ("ENVIRONMENT = (3,)", "ENVIRONMENT is (3,)"),
    "a table of strings": ("ARCHS = {'acme1': 'acme1'}", "ARCHS['acme1'] is 'acme1'; it must be the Arch"),
    "an unknown operation": ("ORDER = {'attention': ('acme',)}", "ORDER['attention']"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "said"), VENDORS.values(), ids=VENDORS)
def test_a_vendor_that_lies_is_left_out(install, monkeypatch, caplog, lie, said):
    install(platforms_acme=f"{DEVICES}\nfrom portable.platform.detect import detect\n{lie}")
    monkeypatch.setenv("ACME_ON_CPU", "1")
    assert detect().vendor != "acme"
    assert describe("gfx942").vendor == "amd"
    state, problem = states(plugins.PLATFORMS)["acme"]
    assert state == "left out" and said in problem
    assert problem in caplog.text


def test_a_vendor_that_hung_is_not_asked_again(install, monkeypatch):
    files = install(
        platforms_acme=DEVICES + "\nasked = []\ndef count(machine): asked.append(1); import time; time.sleep(60)"
    )
    for _ in range(3):
        portable.platform.detect.absent()
    assert len(sys.modules[files["platforms_acme"].stem].asked) == 1


def test_two_plug_ins_of_one_name(install, tmp_path):
    install(kernels_acme=RIGHT)
    other = tmp_path / "other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[portable.kernels]\nacme = plugin_z\n")
    (tmp_path / "plugin_z.py").write_text(RIGHT)
    forget()
    assert "acme.paged" in names()
    assert {kernel.plugin[:9] for kernel in attention.load_kernels() if kernel.plugin} == {"extra 1.0"}
    assert [(p.distribution, p.state, p.problem) for p in plugins.listed(plugins.KERNELS)] == [
        ("extra 1.0", "loaded", None),
        ("other 2.0", "left out", "another plug-in has that name"),
    ]
