"""The benchmark of planning for graphs, as far as one round of it goes."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "ci"))

from benchmarks import graphs


def test_every_row_is_measured_beside_its_peer(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(graphs, "ROUNDS", 1)
    monkeypatch.setattr(graphs, "WIDTHS", (512,))
    peer, out = tmp_path / "peer.json", tmp_path / "out.json"
    peer.write_text(json.dumps({name: {"1": {"med": 7.5}} for name in graphs.PEERS.values()}))
    graphs.main(["--peer", str(peer), "--json", str(out)])
    found = json.loads(out.read_text())
    assert found["steps"].keys() == {f"{n} x 512, {kind}" for n in (16, 256) for kind in ("BlockTable", "array")}
    assert graphs.PEERS.keys() <= found["planning"]["1"].keys() and found["peer"]["MLA decode"] == {"1": 7.5}
    assert capsys.readouterr().out.count("peer at 1: 7.5") == len(graphs.PEERS)
