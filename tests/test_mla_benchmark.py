"""The MLA benchmark, as far as a CPU carries it: every kind of row is right, dispatched, and in the file."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from benchmarks import flashinfer_stage, mla  # noqa: E402
from benchmarks.mla_problems import Decode, Shape  # noqa: E402
from benchmarks.mla_prompts import Prompt, Write  # noqa: E402
from benchmarks.timing import contest  # noqa: E402

from portable.attention import load_kernels  # noqa: E402


def test_every_kind_of_row_is_measured(tmp_path, capsys, monkeypatch):
    file = tmp_path / "mla.json"
    monkeypatch.setattr(mla, "GRID", mla.GRID[:3])
    given = ["--device", "cpu", "--shrink", "4096", "--budget", "0.1", "--grid", "--out", str(file)]
    mla.main([*given, "--only", "H16 q4 page64,P3 H16,write"])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found["rows"]) == ["X q4", "P3 H16 4096 192/128", "cache write 8192x576"]
    assert all(times["dispatched"] > 0 for times in list(found["rows"].values())[:2])
    assert set(found["rows"]["cache write 8192x576"]) == {"torch.index_put", "copy", "index_copy"}
    assert len(found["grid"]) == 3 and all(re.fullmatch(r"H16 q4 page64 b\d+ \d+", name) for name in found["grid"])
    assert set(found["selected"]) == {*found["rows"], *found["grid"]}
    assert "6 dispatched" in capsys.readouterr().out


@pytest.mark.parametrize("problem", [Decode, Prompt, Write])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_result_does_not_count(problem, wrong):
    pool = mla.latents(1 << 12, torch.device("cpu"))
    given = {Decode: (Shape(4, 2, 100, 3),), Prompt: (2, 50), Write: (128,)}[problem]
    made = problem(*given, pool)
    jobs = list(made.jobs([kernel for kernel in load_kernels() if kernel.caps.provider == "torch"]))
    if wrong:
        calls = jobs[0].calls
        outputs = jobs[0].outputs

        def bent():
            first, *rest = calls()
            return [lambda: (first(), outputs[0].mul_(1.1)), *rest]

        jobs = [jobs[0].__class__(jobs[0].name, bent, outputs, jobs[0].error, jobs[0].tolerance)]
    found = contest(jobs, 0.1, 0.0, lambda name: True)
    assert found and all(measure.ok is not wrong for measure in found.values())


def test_the_grid_holds_every_shape_that_selection_was_made_of():
    record = json.loads((ROOT / "ci" / "results" / "mla-sm90.json").read_text(encoding="utf-8"))["grid"]
    assert {row.name for row in mla.rows(True, 1) if row.quick} == set(record)


class Recorded:
    """FlashInfer's module, as its binding declares it: a plan that is kept, and a run that attends in float64."""

    def __init__(self):
        self.calls = {}

    def plan(self, *given):
        self.calls["Plan"] = given
        host = given[2]
        host[:12] = torch.arange(12, dtype=torch.uint8)
        return [1, 132], 12

    def run(self, *given):
        self.calls["Run"] = given
        _, work, plan, q, q_rope, latents, ropes, indices, out, _, mask, heads, page, scale, *_ = given
        _, _, _, starts, pages, lens, *_ = self.calls["Plan"]
        assert plan == [1, 132] and work[:12].tolist() == list(range(12)) and heads == q.shape[1]
        for i, count in enumerate(lens.tolist()):
            which = indices[pages[i] : pages[i + 1]].long()
            assert latents.shape[1] == page
            keys = torch.cat([latents[which], ropes[which]], -1).flatten(0, 1)[:count].double()
            new = int(starts[i + 1] - starts[i])
            for j in range(new):
                row = int(starts[i]) + j
                seen = keys[: count - new + 1 + j] if mask else keys
                query = torch.cat([q[row], q_rope[row]], -1).double()
                out[row] = (torch.softmax(query @ seen.T * scale, -1) @ seen[:, : latents.shape[-1]]).to(out.dtype)


@pytest.mark.parametrize("new", [1, 3])
def test_flashinfer_is_planned_once_and_held_against_float64(new):
    pool, module = mla.latents(1 << 13, torch.device("cpu")), Recorded()
    problem = Decode(Shape(4, 3, 200, new), pool)
    assert len(problem.q) > 1
    (job,) = problem.peers({"flashinfer": module})
    assert job.name == "flashinfer" and contest([job], 0.1, 0.0, lambda name: True)["flashinfer"].ok
    assert module.calls["Run"][5].data_ptr() == problem.pages.data_ptr()  # views of the cache, no copies


def test_flashinfer_is_called_by_the_signature_of_its_binding():
    binding = Path(os.environ.get("PEERS", "nowhere")) / "site" / flashinfer_stage.SIGNATURE
    if not binding.exists():
        pytest.skip("no folder of staged peers (PEERS) has FlashInfer")
    kinds = {
        "TensorView": torch.Tensor,
        "int64_t": int,
        "double": float,
        "bool": bool,
        "Array<int64_t>": list,
        "Optional<TensorView>": (torch.Tensor, type(None)),
    }
    module = Recorded()
    (job,) = Decode(Shape(4, 2, 100, 3), mla.latents(1 << 12, torch.device("cpu"))).peers({"flashinfer": module})
    job.calls()[0]()
    declared = re.findall(r"BatchMLAPagedAttentionSM90(Plan|Run)\(([^;]+?)\);", binding.read_text(encoding="utf-8"))
    assert [name for name, _ in declared] == ["Plan", "Run"]
    for name, text in declared:
        wanted = [part.split()[0] for part in text.replace("ADDITIONAL_FUNC_PARAMS", "").split(",")]
        for kind, value in zip(wanted, module.calls[name], strict=True):
            assert isinstance(value, kinds[kind]), (name, kind, value)


def test_a_folder_that_was_staged_without_flashinfer_is_told(tmp_path, capsys):
    (tmp_path / "manifest.json").touch()
    assert "flashinfer" not in mla.raw_peers(tmp_path) and "flashinfer" not in mla.raw_peers(None)
    assert f"flashinfer: {tmp_path} was filled without it" in capsys.readouterr().out


def test_flashinfer_is_loaded_by_the_staged_tvm_ffi_alone(tmp_path, monkeypatch):
    for file, text in (
        (flashinfer_stage.FLASHINFER, ""),
        ("tvm_ffi/__init__.py", "def load_module(path):\n    return 'loaded', path\n"),
    ):
        (tmp_path / "site" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / file).write_text(text)
    (tmp_path / "manifest.json").touch()
    monkeypatch.delitem(sys.modules, "tvm_ffi", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = list(sys.path)
    library = str(tmp_path / "site" / flashinfer_stage.FLASHINFER)
    assert mla.raw_peers(tmp_path)["flashinfer"] == ("loaded", library)
    assert sys.path == before and sys.modules.pop("tvm_ffi")
