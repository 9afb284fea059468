"""A vendor is one file or one plug-in (F79)."""

import sys

import pytest
from machines import MI300X, machine

from portable.platform import amd
from portable.platform.detect import cache_clear, describe, detect, vendors

TOY = """
from portable.platform.target import Arch, Product, Target, order

ARCHS = {"toy1": Arch(name="toy1", vendor="toy", family="Toy", wave_size=8, shared_memory=1024)}
PRODUCTS = {}
ORDER = order("toy")

def count(machine):
    return 1

def probe(machine, index):
    if index:
        return None
    return Target(
        vendor="toy", arch="toy1", product=None, name="Toy", index=0, wave_size=8, compute_units=2, xcds=1,
        partition=None, shared_memory=1024, memory=None, fp8=None, matrix=None, graphs=False, device="cpu",
    )
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install plug-ins, name -> source of its module, for the time of a test."""

    def install(**modules):
        info = tmp_path / "plugins-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[portable.platforms]\n" + "".join(f"{name} = plugin_{name}\n" for name in modules)
        )
        for name, source in modules.items():
            (tmp_path / f"plugin_{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        cache_clear()

    monkeypatch.delenv("PORTABLE_PLUGINS", raising=False)
    yield install
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]
    cache_clear()


def test_a_vendor_is_one_module(plugin):
    plugin(toy=TOY)
    assert list(vendors())[-1] == "cpu" and "toy" in vendors()
    assert detect(machine=machine()).arch == "toy1"
    assert detect("toy", machine=machine()).vendor == "toy"
    assert detect("cuda", machine=machine("hip", kfd=[MI300X])).vendor == "amd"
    assert describe("toy1").wave_size == 8
    with pytest.raises(ValueError, match="toy lists no device 1"):
        detect("toy:1", machine=machine())


@pytest.mark.parametrize(("allowed", "found"), [("toy", True), ("other, toy", True), ("other", False), ("", False)])
def test_the_list_of_allowed_plugins(plugin, allowed, found):
    plugin(toy=TOY)
    environ = {"PORTABLE_PLUGINS": allowed}
    assert ("toy" in vendors(environ)) == found
    assert detect(machine=machine(environ=environ)).vendor == ("toy" if found else "cpu")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("ARCHS = {}", "AttributeError: plugin_bad lacks PRODUCTS, ORDER, probe, count"),
        (TOY + "\ndef probe(machine, index): raise KeyError('chip')", "KeyError: 'chip'"),
        (TOY + "\ndef parse(name): raise KeyError('parser')", "KeyError: 'parser'"),
    ],
)
def test_a_broken_plugin_is_reported_and_left_out(plugin, caplog, source, said):
    plugin(bad=source.replace('vendor="toy"', 'vendor="bad"'))
    if "parser" in said:
        assert describe("gfx942").vendor == "amd"
        with pytest.raises(ValueError, match="arch is 'toy9'"):
            describe("toy9")
    else:
        assert detect(machine=machine()).vendor == "cpu"
    assert "'bad' is left out" in caplog.text and said in caplog.text


@pytest.mark.parametrize("name", ["amd", "cuda", "emulated"])
def test_a_plugin_does_not_replace_a_vendor(plugin, caplog, name):
    """Nor does it take what a built-in vendor's devices are called, or `detect` would have two of a name."""
    plugin(**{name: TOY.replace('vendor="toy"', f'vendor="{name}"')})
    assert list(vendors()) == ["amd", "nvidia", "cpu"] and vendors()["amd"] is amd
    assert f"the name '{name}' is a built-in vendor's, or its devices'" in caplog.text
