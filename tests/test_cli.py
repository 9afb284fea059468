"""The command line: exit codes, one-line errors, and what doctor and explain say."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import portable
from portable import cli, doctor
from portable.attention import load_kernels
from portable.explain_cli import parse_dtype
from portable.kernel import FEATURES, Kernel, KernelCaps, Op, Requires
from portable.layer import CACHE_LAYOUTS, Layer, UnsupportedError
from portable.packages import Package
from portable.platform.detect import describe
from portable.sets import ANY, ANY_SIZE

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PORTABLE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a vendor package, of Triton and the reference, in place of the installed ones."""
    able: dict[str, Any] = dict(head_dims=ANY_SIZE, gqa_ratios=ANY_SIZE, page_sizes=ANY_SIZE, archs=ANY)
    able |= dict(dtypes=ANY, kv_dtypes=ANY, cache_layouts=CACHE_LAYOUTS)

    def make(provider: str, op: Op, *required: Requires, **caps: Any) -> Kernel:
        name = f"{provider}.{op}"
        return Kernel(KernelCaps(op=op, name=name, provider=provider, requires=required, **able, **caps), run=print)

    kernels = tuple(
        kernel
        for op in (Op.PREFILL, Op.PAGED, Op.MLA_DECODE, Op.MERGE, Op.CACHE_WRITE, Op.CACHE_GATHER)
        for kernel in (
            make("reference", op, vendors=ANY, features=FEATURES),
            make("aiter", op, Requires("amd-aiter", ">=0.1.7"), vendors={"amd"}),
            make("triton", op, Requires("triton", ">=3.0"), vendors={"amd", "nvidia"}, features=FEATURES),
        )
    )
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)


def command(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Make `portable toy` call `run`."""
    module = ModuleType("toy_command")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_command", module)
    monkeypatch.setitem(cli.COMMANDS, "toy", ("toy_command", "a toy"))


def raiser(error: BaseException) -> Any:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        ValueError("size is 3"),
        UnsupportedError("no kernel"),
        FileNotFoundError(2, "No such file", "x"),
        ImportError("y"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, raiser(error))
    assert cli.main(["toy"]) == 2
    assert capsys.readouterr() == ("", f"portable: error: {error}\n")
    monkeypatch.setenv("PORTABLE_LOG", "debug")
    assert cli.main(["toy"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_portable_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, raiser(AssertionError("a fault")))
    with pytest.raises(AssertionError):
        cli.main(["toy"])


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, raiser(KeyboardInterrupt()))
    assert cli.main(["toy"]) == 130
    assert capsys.readouterr().err == "portable: interrupted\n"


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, lambda args: args.size)
    assert cli.main(["toy", "--size", "7"]) == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["toy", "--size", "many"], "argument --size: invalid int value: 'many' (see portable toy --help)"),
        (["toy", "--si", "1"], "unrecognized arguments: --si 1"),
        (["broken"], "command 'broken' cannot be loaded: No module named 'no_such_module'"),
    ],
)
def test_usage_errors_are_one_line_too(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, lambda args: 0)
    monkeypatch.setitem(cli.COMMANDS, "broken", ("no_such_module", "a command that is not there"))
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("portable: error: ") and error.count("\n") == 1
    assert message in error


def test_a_broken_command_does_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "broken", ("no_such_module", "a command that is not there"))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"portable {portable.__version__}\n"
    assert cli.main([]) == cli.main(["--help"]) == cli.main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_an_unknown_log_level_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PORTABLE_LOG", "loud")
    assert cli.main(["--version"]) == 2
    assert "PORTABLE_LOG is 'loud'; it must be one of debug, info, warning, error" in capsys.readouterr().err


def test_a_report_is_plain_unless_a_terminal_and_rich_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "kernels:\n    no  [bold]a.b[/bold]  vendor 'x' is not one of y"
    cli.show(text)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)  # an import of it is an ImportError
    cli.show(text)
    assert capsys.readouterr().out == text + "\n"


def test_a_report_in_colours_has_the_same_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = "kernels:\n    no  [bold]a.b[/bold]  " + "a long line, " * 40 + "end"
    cli.show(text)
    shown = capsys.readouterr().out
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == text + "\n"


def test_it_runs_as_a_module_and_survives_a_reader_that_leaves() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "portable", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141


# doctor


def test_doctor_reports_in_json_all_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert text == json.dumps(found, indent=2, sort_keys=True) + "\n"
    assert found["schema"] == 1
    assert found["problems"] == {}
    assert {"vendor", "arch", "product", "compute_units", "memory", "fp8"} <= found["target"].keys()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert {"amd-aiter", "flash-attn", "flash_attn_3", "flash-attn-4", "flash_mla", "triton"} <= found[
        "packages"
    ].keys()
    for package in found["packages"].values():
        assert (package["usable"] is True) == (package["problem"] is None)
    assert found["absent"].keys() == {"amd", "nvidia"} - {found["target"]["vendor"]}
    assert found["environment"].keys() >= doctor.VARIABLES.keys()
    assert found["plugins"].keys() == {"portable.platforms", "portable.kernels"}
    assert any(kernel["provider"] == "reference" and kernel["usable"] for kernel in found["kernels"])
    assert {kernel["op"] for kernel in found["kernels"] if kernel["features"]} == {"prefill", "paged", "mla_decode"}
    assert found["cache_dir"]


def test_doctor_says_it_all_to_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_DEVICE", "emulated:gfx942")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PORTABLE_CACHE_DIR", "/somewhere")
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("device: amd gfx942, emulated")
    for words in (
        "wave          64 lanes, 65536 bytes of shared memory",
        "HIP_VISIBLE_DEVICES  '0': which devices this process sees",
        "PORTABLE_DEVICE      'emulated:gfx942': the device when none is named",
        "reference.prefill",
        "folder  /somewhere",
        torch.__version__,
    ):
        assert words in shown


def test_one_broken_part_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_DEVICE", "nosuch")
    monkeypatch.setenv("PORTABLE_BACKEND", "alsonot")
    monkeypatch.setenv("PORTABLE_BACKENDS", "reference")
    monkeypatch.setattr(doctor, "_cache_dir", lambda: 1 / 0)
    found = doctor.report(os.environ)
    assert found["target"] is None
    assert "PORTABLE_DEVICE is 'nosuch'; it must be one of" in found["problems"]["target"]
    assert "PORTABLE_BACKEND 'alsonot' is not known" in found["problems"]["backend"]
    assert found["problems"]["cache_dir"] == "ZeroDivisionError: division by zero"
    assert found["environment"]["PORTABLE_BACKENDS"]["meaning"] == "not a variable of portable; is it misspelt?"
    assert found["versions"]["torch"] == torch.__version__
    text = doctor.render(found)
    assert text.startswith("device: none\n")
    assert "ZeroDivisionError" in text


def test_doctor_says_once_why_kernels_of_a_provider_are_not_used() -> None:
    found = doctor.report(os.environ)
    rows = [
        line.split(maxsplit=2) for line in doctor.render(found).split("kernels:\n")[1].split("\n\n")[0].splitlines()
    ]
    usable = [kernel["name"] for kernel in found["kernels"] if kernel["usable"]]
    assert [name.split()[0] for mark, _, name in rows if mark == "yes"] == usable
    told = [
        int(more[1]) + 1 if (more := re.match(r"\S+ and (\d+) more  ", name)) else 1
        for mark, _, name in rows
        if mark == "no"
    ]
    assert sum(told) == len(found["kernels"]) - len(usable)
    assert len(told) < sum(told) or not told


def test_doctor_lists_plug_ins_and_whether_they_may_load(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("b", "pkg.b", "portable.kernels"), EntryPoint("a", "pkg.a", "portable.kernels")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "portable.kernels" else [])
    monkeypatch.setenv("PORTABLE_PLUGINS", "a, c")
    load_kernels.cache_clear()
    found = doctor.report(os.environ)
    load_kernels.cache_clear()
    problem = "ModuleNotFoundError: No module named 'pkg'"
    of_both = {"distribution": None}
    assert found["plugins"] == {
        "portable.platforms": [],
        "portable.kernels": [
            {"name": "a", "value": "pkg.a", "allowed": True, "state": "left out", "problem": problem, **of_both},
            {"name": "b", "value": "pkg.b", "allowed": False, "state": "not allowed", "problem": None, **of_both},
        ],
    }
    text = doctor.render(found)
    assert re.search(rf"no +portable.kernels +a +pkg.a +{problem}", text)
    assert re.search(r"not used +portable.kernels +b +pkg.b +PORTABLE_PLUGINS leaves it out", text)


# explain


def explained(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert cli.main(["explain", "--json", *argv]) == code
    return json.loads(capsys.readouterr().out)


def served(explanation: Any) -> dict[str, str]:
    return {f"{row['op']} {row['phase']}".strip(): row["kernel"] for row in explanation["rows"]}


def test_explain_answers_for_another_machine(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    without = explained(capsys, "--arch", "gfx942", "--with", "triton=3.6")["explanations"][0]
    assert set(served(without).values()) == {f"triton.{row['op']}" for row in without["rows"]}
    reasons = [{"kernel": "aiter.prefill", "reasons": ["amd-aiter is not installed"]}]
    assert without["rows"][0]["rejected"] == reasons
    having = explained(capsys, "--arch", "gfx942", "--with", "triton=3.6", "--with", "AMD_aiter=0.1.7")["explanations"][
        0
    ]
    assert set(served(having).values()) == {f"aiter.{row['op']}" for row in having["rows"]}
    assert having["rows"][0]["alternatives"] == ["triton.prefill", "reference.prefill"]
    old = explained(capsys, "--arch", "gfx942", "--with", "amd-aiter==0.1.5")["explanations"][0]
    assert old["rows"][0]["rejected"][0]["reasons"] == ["amd-aiter 0.1.5 is not >=0.1.7"]
    bare = explained(capsys, "--arch", "gfx942", "--without", "triton")["explanations"][0]
    assert set(served(bare).values()) == {f"reference.{row['op']}" for row in bare["rows"]}
    hopper = explained(capsys, "--arch", "sm90", "--with", "amd-aiter=0.1.7", "--with", "triton=3.6")["explanations"][0]
    assert hopper["rows"][0]["rejected"] == [
        {"kernel": "aiter.prefill", "reasons": ["vendor 'nvidia' is not one of amd"]},
    ]


def test_explain_reads_the_layer_from_flags(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-heads 64 --num-kv-heads 4 --head-dim 192 --v-head-dim 128 --dtype fp16 --kv-dtype fp8 --page-size 32"
    flags += " --window 128 --softcap 50 --sinks --alibi --non-causal --cache-layout shuffled --lse"
    found = explained(capsys, "--arch", "gfx942", "--product", "MI300A", *flags.split(), "--with", "amd-aiter=0.2")
    layer = found["explanations"][0]["layer"]
    expected = dict(
        family="gqa",
        num_heads=64,
        num_kv_heads=4,
        qk_head_dim=192,
        v_head_dim=128,
        dtype="float16",
        kv_dtype="float8_e4m3fnuz",
        window=[127, 0],
        softcap=50.0,
        sinks=True,
        alibi=True,
        causal=False,
        cache_layout="shuffled",
    )
    assert {name: layer[name] for name in expected} == expected
    assert (found["target"]["product"], found["target"]["compute_units"]) == ("MI300A", 228)
    refused = {row["kernel"]: row["reasons"] for row in found["explanations"][0]["rows"][0]["rejected"]}
    features = ("window", "softcap", "sinks", "alibi", "noncausal", "lse")
    assert refused["aiter.prefill"] == [f"{name} is not supported" for name in features]
    assert found["explanations"][0]["rows"][1]["needs"]["page_size"] == 32


def test_explain_knows_the_operations_of_mla(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "--arch", "gfx950", "--mla", "--num-heads", "128", "--with", "amd-aiter=0.2")
    assert served(found["explanations"][0]) == {
        "prefill": "aiter.prefill",
        "mla_decode decode": "aiter.mla_decode",
        "mla_decode verify": "aiter.mla_decode",
        "prefill context": "triton.prefill",  # these of aiter have no LSE
        "merge": "aiter.merge",
        "cache_write": "aiter.cache_write",
        "cache_gather": "aiter.cache_gather",
    }


def test_explain_takes_the_distinct_layers_of_a_model(
    toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full, local = (Layer.gqa(num_heads=8, num_kv_heads=4, head_dim=256, window=w) for w in ((None, None), 512))
    models = ModuleType("portable.models")
    models.layers_of = lambda path, dtype=None: [full, local, local]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "portable.models", models)
    assert cli.main(["explain", "--arch", "gfx942", "--model", "somewhere"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("layer   gqa, 8 heads on 4, head_dim 256") == 2
    assert shown.count("window (511, 0)") == 1


def test_explain_obeys_the_forced_choice_and_says_what_fails(
    toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORTABLE_BACKEND", "aiter")
    found = explained(capsys, "--arch", "gfx942", "--sinks", "--with", "amd-aiter=0.1.7", code=1)["explanations"][0]
    assert found["rows"][0]["kernel"] is None
    assert found["rows"][0]["how"] == "PORTABLE_BACKEND 'aiter'"
    assert found["rows"][0]["rejected"] == [{"kernel": "aiter.prefill", "reasons": ["sinks is not supported"]}]
    found = explained(capsys, "--arch", "gfx942", "--backend", "reference")["explanations"][0]
    assert set(served(found).values()) == {f"reference.{row['op']}" for row in found["rows"]}


def test_explain_runs_offline_with_the_installed_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--arch", "gfx942", "--with", "amd-aiter=0.1.7", "--with", "odd-lib=1.0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("target  amd gfx942 (")
    assert "prefill: " in shown and "cache_gather: " in shown
    assert "note    odd-lib 1.0: no kernel of this version of portable uses it" in shown
    assert cli.main(["explain"]) == 0


def test_explain_for_another_machine_does_not_ask_whether_its_compiler_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for here in (Package("13"), Package(None, "libnvrtc.so is away")):
        monkeypatch.setattr("portable.backends.hip.sources.nvrtc_here", lambda here=here: here)
        assert cli.main(["explain", "--arch", "sm90"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "cache_write: hip.cache_write" in said[0]


def test_explain_says_that_an_arch_is_in_no_table(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "--arch", "gfx942")["explanations"][0]["notes"] == []
    assert cli.main(["explain", "--arch", "gfx943"]) == 0
    note = "note    arch gfx943 is in no table, so it has only what every amd device has; near it: gfx942\n"
    assert note in "".join(capsys.readouterr().out.splitlines(keepends=True)[:3])


def test_kernels_for_another_vendors_devices_are_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What else they would refuse parts no phases; JSON has each with its reasons."""
    assert cli.main(["explain", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "vendor 'cpu'" not in shown and "\npaged (decode, verify, extend): " in shown
    paged = explained(capsys, "--device", "cpu")["explanations"][0]["rows"][1]
    others = [each for each in paged["rejected"] if each["reasons"][0].startswith("vendor 'cpu' is not one of ")]
    (line,) = re.findall(r"^paged .*\n(?:    not (?!for).*\n)*    not for cpu: kernels of (.*)$", shown, re.MULTILINE)
    assert "hip (1)" in line and sum(map(int, re.findall(r"\((\d+)\)", line))) == len(others) > 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--arch gfx", "arch is 'gfx'; it must be one of gfx90a, gfx942"),
        ("--arch gfx9420", "; near it: gfx942"),
        ("--arch gfx942 --product H100", "the products of gfx942 are MI300A"),
        ("--product MI300X", "--product MI300X describes no machine of its own; give --arch"),
        ("--arch gfx942 --device cpu", "give one of them"),
        ("--device nosuch", "device is 'nosuch'; it must be one of"),
        ("--dtype int4", "dtype 'int4' is not known; it must be one of float32, float16, bfloat16"),
        ("--arch gfx90a --kv-dtype fp8", "gfx90a has no fp8 of its own"),
        ("--backend nosuch", "--backend 'nosuch' is not known; providers: reference"),
        ("--backend attend=triton", "--backend names the operation 'attend'; it must be one of prefill"),
        ("--with amd-aiter", "write NAME=VERSION"),
        ("--with amd-aiter=latest", "version 'latest', which is not like 1.2.3"),
        ("--page-size 0", "page_size is 0; it must be at least 1"),
        ("--num-heads 7", "num_heads 7 is not a multiple of num_kv_heads 8"),
        ("--window 0", "window is 0"),
        ("--cache-layout odd", "cache_layout is 'odd'; it must be one of strided"),
        ("--mla --softcap 30", "--mla layers have no softcap to choose"),
        ("--model m --head-dim 64", "--model says what the layers are; head_dim cannot be given with it"),
        ("--model /no/such/model", "/no/such/model"),
    ],
)
def test_explain_names_the_value_and_the_remedy(
    argv: str, message: str, toys: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("portable: error: ") and err.count("\n") == 1
    assert message in err


def test_fp8_is_the_targets_own_flavour() -> None:
    assert parse_dtype("fp8", describe("gfx942")) is torch.float8_e4m3fnuz
    assert parse_dtype("fp8", describe("gfx950")) is parse_dtype("fp8", describe("sm90")) is torch.float8_e4m3fn
    assert parse_dtype("bf16", describe("x86_64")) is torch.bfloat16
