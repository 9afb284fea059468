"""The benchmarks of graphs, as far as one round of them goes."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "ci"))

from benchmarks import captured, graphs
from launched import launches
from recording import Recorder

from portable.backends import reference, reference_mamba, reference_steps
from portable.platform.graphs import using


def test_each_kind_of_table_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(graphs, "ROUNDS", 1)
    monkeypatch.setattr(graphs, "WIDTHS", (512,))
    out = tmp_path / "out.json"
    graphs.main(["--json", str(out)])
    found = json.loads(out.read_text())
    assert found["steps"].keys() == {f"{n} x 512, {kind}" for n in (16, 256) for kind in ("BlockTable", "array")}


def test_serving_steps_are_run_and_told_in_a_line(monkeypatch, capsys):
    oracles = (*reference.KERNELS, *reference_mamba.KERNELS, *reference_steps.KERNELS)
    kernels = tuple(launches(kernel) for kernel in oracles)
    monkeypatch.setattr("portable.attention.load_kernels", lambda: kernels)
    with using(Recorder()):
        assert captured.main(["--seed", "1", "--steps", "3", "--small", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["steps"], told["error"], sum(told["counts"].values())) == (3, None, 3) and told["replayed"]
    assert captured.main(["--seed", "1", "--steps", "1", "--device", "cpu"]) == 1  # which has no graphs
    assert "cpu has no graphs" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
