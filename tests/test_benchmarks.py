"""The attention benchmark, as far as a CPU carries it: shapes, timing, the check of outputs, the table, the staging."""

import json
import math
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from benchmarks import flashinfer_stage, stage, subjects, table, twins, workloads  # noqa: E402
from benchmarks.problem import Pool, build, rotations  # noqa: E402
from benchmarks.run import gathered, main  # noqa: E402
from benchmarks.timing import Broken, Job, Measure, contest  # noqa: E402
from measured_table import measured  # noqa: E402

from portable.kernel import Op  # noqa: E402

WORKS = {work.name: work for section in workloads.SECTIONS.values() for work in section()}
MIB = 1 << 20


def test_the_grid_holds_the_points_of_128_mib_and_more():
    grid = [work for name, work in WORKS.items() if name.startswith(("D1", "D2", "D3"))]
    small = {work.name for work in grid if work.kv_bytes < 128 * MIB}
    assert small == {f"D1 1x{size}k page {page}" for size in (1, 8) for page in (16, 64)}


def test_the_ragged_draws_are_those_of_the_record():
    assert [sum(WORKS[f"{kind} 64 page 16"].seq_lens) for kind in ("ragged", "equal")] == [394241] * 2
    assert [sum(WORKS[f"{kind} 256 page 16"].seq_lens) for kind in ("ragged", "equal")] == [358171] * 2
    assert WORKS["ragged 64 page 16"].seq_lens[:3] == (19418, 5753, 8977)


def test_bytes_and_flops_count_what_is_seen():
    assert WORKS["sinks, window 128 page 16"].kv_bytes == 16 * MIB
    assert WORKS["fp8 64x8k page 64"].kv_bytes * 2 == WORKS["bf16 64x8k page 64"].kv_bytes == 64 * 8192 * 4096
    assert WORKS["P1a 1x8192"].flops == pytest.approx(4 * 32 * 128 * 8192 * 8193 / 2)
    assert WORKS["D1 8x8k page 16"].flops == 4 * 32 * 128 * 8 * 8192


@pytest.mark.parametrize("name", ["D1 8x8k page 16", "D3 64x8k page 16", "fp8 64x8k page 64", "P1c mixed 16"])
@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_outputs_are_held_against_float64(name, wrong):
    problem = build_small(WORKS[name])
    (kernel,) = subjects.kernels("reference", Op.PAGED if problem.work.page_size else Op.PREFILL, {})
    calls = subjects.calls(problem, kernel)
    out = problem.rotations[0].out

    def first():
        calls[0]()
        out.mul_(1 + wrong)

    found = contest([Job("it", lambda: [first, *calls[1:]], [out], problem.error, 1.5e-2)], 0.1, 0.0, lambda _: True)
    assert found["it"].ok == (wrong == 0) and found["it"].us > 0


@pytest.mark.parametrize("name", ["sinks, window 128 page 16", "verify 4 page 64", "D5 60 decodes, 4 prefills page 16"])
def test_the_reference_knows_windows_sinks_and_causality(name):
    problem = build_small(WORKS[name])
    (kernel,) = subjects.kernels("reference", Op.PAGED, {})
    for call in (subjects.calls(problem, kernel)[0], subjects.planned_calls(problem, [kernel])[0]):
        problem.rotations[0].out.fill_(math.nan)
        call()
        assert problem.error() < 1e-2
    left_out = replace(
        problem, work=replace(problem.work, layer=replace(problem.work.layer, sinks=False, window=(2, 0)))
    )
    subjects.calls(left_out, kernel)[0]()
    assert problem.error() > 3e-2


def build_small(work):
    small = workloads.shrunk(work)
    return build(small, Pool(torch.device("cpu"), [small]))


def test_rotations_touch_other_pages():
    problem = build_small(WORKS["D1 1x1k page 16"])
    assert rotations(problem.work) == len(problem.rotations) == 32
    tables = torch.cat([turn.block_table for turn in problem.rotations])
    assert len(tables.unique()) == tables.numel()


def test_who_fails_or_is_refused_leaves_the_others():
    out = torch.zeros(4)
    fill = [lambda: out.fill_(1.0)]

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuse():
        raise ValueError("head_dim 3 is not a multiple of 8")

    error = lambda _: float((out - 1).abs().sum())  # noqa: E731
    jobs = [
        Job("bad", refuse, [out], error, 1e-3),
        Job("absent", lambda: None, [out], error, 1e-3),
        Job("unwanted", lambda: fill, [out], error, 1e-3),
        Job("lazy", lambda: [lambda: None], [out], error, 1e-3),
        Job("good", lambda: fill, [out], error, 1e-3),
    ]
    found = contest(jobs, 0.1, 0.0, lambda name: name != "unwanted")
    assert set(found) == {"bad", "lazy", "good"}
    assert found["good"].ok and found["bad"].failed.startswith("ValueError: head_dim 3")
    assert not found["lazy"].ok and math.isnan(found["lazy"].error)  # what was poisoned and not written is seen
    with pytest.raises(Broken):
        contest([Job("lost", lost, [out], error, 1e-3)], 0.1, 0.0, lambda _: True)


def timed(us, ok=True):
    return asdict(Measure(us=us, ok=ok, error=0.0))


def test_every_goal_is_computed_from_rows_that_exist():
    names = {*WORKS, "merge", "cache write page 16", "cache write page 64"}
    who = ("portable a", "fa3", "fa3 fp8 q", "copy")
    rows = {name: {"contestants": {each: timed(100.0) for each in who}} for name in names}
    result = gathered([{"rows": rows}], ["D1 1x1k page 16|vllm unified", "load|fa3"])
    assert result["absent"] == {"load|fa3": "the process died or hung"}
    assert result["rows"]["D1 1x1k page 16"]["contestants"]["vllm unified"]["failed"]
    assert [found.value for _, found in table.rows(result)] == [
        100.0 if goal.unit == "us" else 1.0 for goal in table.GOALS
    ]


def test_a_row_takes_the_slowest_point_and_no_wrong_output():
    rows = {
        "D2 1x32k page 16": {"contestants": {"portable a": timed(50.0), "fa3": timed(50.0)}},
        "D2 64x1k page 16": {
            "contestants": {"portable a": timed(100.0), "portable b": timed(9.0, ok=False), "fa3": timed(94.6)}
        },
    }
    text = table.markdown(gathered([{"rows": rows}], []))
    assert "| D2 decode 64/8 d128 | 100 us at D2 64x1k | 94.6 us (fa3) | 0.946x | 0.95x | 1x | short |" in text


@pytest.mark.parametrize(("card", "state"), [("NVIDIA H100 80GB HBM3", "aim"), ("NVIDIA H200", "not judged")])
def test_bounds_in_us_judge_the_card_that_they_are_of(card, state):
    rows = {name: {"contestants": {"portable a": timed(6.0), "copy": timed(6.0)}} for name in ("merge", *WORKS)}
    text = table.markdown(gathered([{"machine": {"card": card}, "rows": rows}], []))
    for row in ("decode 1x1k", "decode 1x8k", "sinks and window 128, 64/8 d64"):
        line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
        assert "6.00 us" in line and line.split("|")[-2].strip().startswith(state), line
    assert "| merge 8192x32x128 beside a copy | 6 us | 6 us (copy) | 1.000x | 0.95x | 1x | aim |" in text


def test_committed_results_become_the_table():
    assert measured(ROOT / "ci" / "results").count("One NVIDIA") == len(
        list((ROOT / "ci" / "results").glob("attention-*"))
    )


def test_the_run_on_a_cpu(tmp_path, capfd):
    out = tmp_path / "result.json"
    options = ["--device", "cpu", "--shrink", "--provider", "reference", "--budget", "0.1", "--out", str(out)]
    assert main(["--only", "prefill,sinks,merge", "--rows", "P1a|sinks.*16", *options]) == 0
    result = json.loads(out.read_text())
    assert set(result["rows"]) == {"P1a 1x8192", "sinks, window 128 page 16", "merge"}
    assert all(found["ok"] for row in result["rows"].values() for found in row["contestants"].values())
    assert result["rows"]["P1a 1x8192"]["selected"] == "portable reference.prefill"
    assert "merge 8192x32x128 beside a copy" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "attention is measured on a GPU" in capfd.readouterr().err


def test_twins_on_a_cpu(tmp_path, capfd, monkeypatch):
    for name in ("BUDGET", "WARM", "LOOP"):
        monkeypatch.setattr(twins, name, 1)  # of ms, and calls
    out = tmp_path / "result.json"
    options = ["--device", "cpu", "--providers", "reference,torch", "--json", str(out)]
    assert twins.main(["--only", "gather 64|write 16$|merge 1$|decode 1x64$|host|latency", *options]) == 0
    result = json.loads(out.read_text())
    assert set(result["rows"]) == {"gather 64/1", "write 16", "merge 1", "decode 1x64"}
    assert all(each["ok"] for row in result["rows"].values() for each in row.values())
    assert "portable torch.index_put" in result["rows"]["write 16"]
    assert result["host us"].keys() >= {"reference.cache_write", "reference.merge", "reference.paged"}
    assert result["host us"].keys() >= {"reference.cache_copy", "reference.prefill prompt", "reference.paged prompt"}
    assert result["latency us"]["torch.index_put 255"] > 0 and len(result["latency us"]) == 4 * len(result["host us"])
    with pytest.raises(SystemExit):
        twins.main(["--device", "cpu", "--providers", "hip"])
    assert "--providers hip --device cpu" in capfd.readouterr().err


def test_what_a_call_launches_is_launched_by_triton_itself():
    launch = pytest.importorskip("portable.backends.triton.launch")
    launched, calls = [], []

    class Function:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append((grid, arguments, options))

    def call():
        calls.append(launch.bound(function, {"BLOCK": 16})((3,), 5))

    function = Function()
    run = twins.by_triton(call, torch.device("cpu"))
    run()
    run()
    assert launched == [((3,), (5,), {"BLOCK": 16})] * 2 and len(calls) == 1


def test_staged_files_lose_what_only_amd_takes(tmp_path):
    text = 'return {\n    "TILE_SIZE": 64,\n    "waves_per_eu": 2,\n    "num_stages": 1,\n}\n'
    stage.put(tmp_path, tmp_path / "site", f"{stage.AITER}/unified_attention.py", text.encode())
    stage.put(tmp_path, tmp_path / "site", stage.FA3, b"library")
    written = (tmp_path / "site" / stage.AITER / "unified_attention.py").read_text()
    assert written == 'return {\n    "TILE_SIZE": 64,\n    "num_stages": 1,\n}\n'
    library = tmp_path / "site" / stage.FA3
    assert (tmp_path / "fa3.so.xz").exists() and not library.exists()
    with pytest.raises(FileNotFoundError, match="is no folder that python"):
        stage.unpacked(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert stage.unpacked(tmp_path) == tmp_path / "site" and library.read_bytes() == b"library"
    stage.put(tmp_path, tmp_path / "site", stage.FA3, b"another")
    assert stage.unpacked(tmp_path) == tmp_path / "site" and library.read_bytes() == b"another"


def fake_download(code):
    """What brings wheels that have every file that is asked of them; their compiler is a shell's `code`."""

    def download(name, wheel, into):
        into.mkdir(exist_ok=True)
        path = into / f"{name}.whl"
        nvcc = f"{flashinfer_stage.CUDA}/bin/nvcc"
        with zipfile.ZipFile(path, "w") as archive:
            for pattern in wheel.files:
                archive.writestr(
                    pattern.replace("*", "some.py"), "using DTypeQ = {{ dtype_q }};\n" * ("jinja" in pattern)
                )
            if name == "nvidia-cuda-nvcc":
                archive.writestr(nvcc, f"#!/bin/sh\n{code}\n")
            if name == "nvidia-nvvm":
                archive.writestr(f"{flashinfer_stage.CUDA}/nvvm/bin/cicc", "")
        return path

    return download


def test_flashinfer_is_compiled_where_it_is_staged_and_once(tmp_path, monkeypatch):
    code = f'cat {flashinfer_stage.DATA}/csrc/*.inc > mla.so; echo "$@" >> mla.so'
    monkeypatch.setattr(flashinfer_stage, "download", fake_download(code))
    folder = tmp_path / "peers"
    assert flashinfer_stage.stage(folder, tmp_path / "wheels") == "flashinfer-python 0.7.2.post1"
    assert not list(folder.rglob("*.so"))  # they travel packed
    (folder / "manifest.json").touch()
    site = stage.unpacked(folder)
    config, command = (site / stage.FLASHINFER).read_text().splitlines()
    assert config == "using DTypeQ = nv_bfloat16;"
    assert "code=sm_90a" in command and all(source in command for source in flashinfer_stage.SOURCES)
    assert all((site / file).exists() for file in (*stage.TVM_FFI, flashinfer_stage.SIGNATURE))
    monkeypatch.setattr(flashinfer_stage, "download", None)
    assert flashinfer_stage.stage(folder, tmp_path / "wheels") == "flashinfer-python 0.7.2.post1"
    monkeypatch.setattr(flashinfer_stage, "FLAGS", ("-O0",))
    with pytest.raises(TypeError):
        flashinfer_stage.stage(folder, tmp_path / "wheels")
    assert not (site / stage.FLASHINFER).exists()  # of other flags


def test_without_a_compiler_the_other_peers_are_staged(tmp_path, monkeypatch, capsys):
    for module in (stage, flashinfer_stage):
        monkeypatch.setattr(module, "download", fake_download("exit 1"))
    folder = tmp_path / "peers"
    stage.stage(folder, tmp_path / "wheels")
    assert "vllm 0.33.0" in (told := capsys.readouterr().out) and "no flashinfer: Command" in told
    assert set(json.loads((folder / "manifest.json").read_text())) == {"vllm", "amd-aiter"}
    assert (folder / "fa3.so.xz").exists() and not list(folder.rglob("*flashinfer*"))


def test_a_wheel_without_what_is_asked_of_it_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as archive:
        for name in ("package/", "package/a.py", "package/sub/b.py"):
            archive.writestr(name, "")
        assert stage.matching(archive, ["package/*.py"]) == ["package/a.py", "package/sub/b.py"]
        with pytest.raises(ValueError, match=r"it\.whl has no package/\*\.so"):
            stage.matching(archive, ["package/*.py", "package/*.so"])
