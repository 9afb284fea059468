"""The benchmark of planning, as far as one round of it goes: each row of a peer's builder stands beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "ci"))

from benchmarks import builders, planning


def test_rows_stand_beside_a_peer_that_is_there(monkeypatch, capsys):
    built = []

    def builder(batch):
        return lambda: built.append(batch.num_reqs)

    monkeypatch.setattr(planning, "ROUNDS", 1)
    monkeypatch.setattr(planning, "SIZES", (1, 4))
    monkeypatch.setattr(builders, "load", lambda folder: {"MLA mixed": builder, "local decode": builder})
    found = planning.measure(None, ())
    assert set(built) == {1, 4} and all(row.keys() == {"1", "4"} for row in found.values())
    assert {name for name, row in found.items() if "ratio" in row["4"]} == {"MLA mixed", "local decode"}
    assert capsys.readouterr().out.count("vllm") == 4
    monkeypatch.setattr(builders, "load", lambda folder: None)
    assert planning.measure(None, ["MHA decode"]).keys() == {"MHA decode"}
    assert "vllm: left out" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert builders.load(tmp_path) is None
