"""`portable bench`: its sections on a CPU, what it makes of wrong and absent contestants, and its pictures."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from portable import bench, cli
from portable.backends.reference import attend
from portable.bench import ceilings, host, kernels, peers, plots, text
from portable.bench.problem import Pool, Problem, build
from portable.bench.timing import ROUNDS, Job, contest, orders
from portable.bench.workloads import Workload, decode, shrunk
from portable.layer import Layer
from portable.platform.detect import describe, detect

CPU = detect("cpu")
LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
DECODE = decode("decode 2 x 40", LAYER, [40, 33], 8)
EXTEND = decode("extend", LAYER, [40, 33], 8, new=3)
PREFILL = Workload(name="prefill", layer=LAYER, query_lens=(9, 5), seq_lens=(9, 5), page_size=None)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """A whole run, of shrunken workloads."""
    absent: dict[str, str] = {}
    works = [shrunk(work) for work in kernels.workloads(CPU, quick=True)]
    found: dict[str, Any] = {"schema": 1, "machine": bench.machine(CPU)}
    found["ceilings"] = ceilings.ceilings(torch.device("cpu"), torch.float32, 1, 64)
    found["kernels"] = dict(kernels.rows(CPU, works, absent, 0.1, lambda who: None))
    return {**found, "absent": absent}


def problem_of(work: Workload) -> Problem:
    return build(work, Pool(torch.device("cpu"), [work]))


def test_every_row_has_the_selected_kernel_and_right_results(result: dict[str, Any]) -> None:
    assert {row["op"] for row in result["kernels"].values()} == {"paged", "prefill"}
    for row in result["kernels"].values():
        assert row["contestants"][row["selected"]]["ok"]
        assert all(each["ok"] and each["us"] > 0 and not each["graph"] for each in row["contestants"].values())
        assert not any(name.startswith("reference.") for name in row["contestants"])
    assert set(result["absent"]) == set(peers.PEERS)


def test_a_cache_that_does_not_fit_is_left_out() -> None:
    every = {work.name for work in kernels.workloads(describe("gfx942", "MI300X"), quick=False)}
    few = {work.name for work in kernels.workloads(replace(describe("gfx942"), memory=8 << 30), quick=False)}
    assert few < every
    assert all("256 x" in name or "64 x 32768" in name for name in every - few)


def test_the_table_and_the_pictures_hold_what_was_measured(result: dict[str, Any], tmp_path: Path) -> None:
    shown = "\n".join(text.text(result))
    for name, row in result["kernels"].items():
        assert name in shown and all(who in shown for who in row["contestants"])
    assert shown.count("selected") == len(result["kernels"]) and "it needs a GPU" in shown
    pytest.importorskip("matplotlib")
    made = plots.draw(result, tmp_path)
    assert [path.name for path in made] == ["roofline.svg", "latency.svg", "share.svg"]
    assert all(path.read_text().startswith("<?xml") for path in made)
    nothing = {**result, "kernels": {}}
    assert plots.draw(nothing, tmp_path) == []


def test_pictures_need_matplotlib(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"install portable-attention\[bench\]"):
        plots.draw(result, tmp_path)
    monkeypatch.setattr(bench, "measure", lambda *given: pytest.fail("it was found out after the run"))
    assert cli.main(["bench", "--device", "cpu", "--plots", str(tmp_path)]) == 2


def test_contestants_are_told_apart(result: dict[str, Any]) -> None:
    (work,) = (name for name, row in result["kernels"].items() if row["op"] == "prefill")
    one = next(iter(result["kernels"][work]["contestants"].values()))
    many = {work: {**result["kernels"][work], "contestants": {f"kernel {i}": one for i in range(40)}}}
    looks = [(each["color"], each["marker"]) for each in plots.styles({**result, "kernels": many}).values()]
    assert len(set(looks)) == 40


def test_the_share_of_peak_is_of_what_binds() -> None:
    found = {"copy TB/s": 2.0, "read TB/s": math.nan, "matmul TFLOP/s": 100.0}
    assert kernels.share({"bytes": 2e6, "flops": 0.0}, found, 2.0) == pytest.approx(0.5)
    assert kernels.share({"bytes": 0.0, "flops": 1e8}, found, 4.0) == pytest.approx(0.25)
    assert math.isnan(kernels.share({"bytes": 1, "flops": 1}, {}, 1.0))


# peers: each one's interface, on a stand-in that computes with it


def oracle(problem: Problem, i: int, k: torch.Tensor, v: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
    """[T, H, D] from the slots of each request."""
    turn, out, start = problem.rotations[i], [], 0
    for queries, at in zip(problem.work.query_lens, slots, strict=True):
        out.append(attend(turn.q[start : start + queries], k[at], v[at], scale=problem.work.layer.scale).out)
        start += queries
    return torch.cat(out).to(turn.q.dtype)


def slots_of(table: torch.Tensor, lens: torch.Tensor, page: int) -> list[torch.Tensor]:
    places = [torch.arange(int(length)) for length in lens]
    return [table[r, at // page].long() * page + at % page for r, at in enumerate(places)]


def test_unified_attention_gets_its_arguments() -> None:
    problem = problem_of(EXTEND)

    def unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
                          window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
                          softmax_segm_output=None, sinks=None):  # fmt: skip
        assert seq_threshold_3D == 64 and softmax_segm_output.shape == (64 * 3, 4, peers.SPLITS, 16)
        assert causal and window_size == (-1, -1) and max_seqlen_q == 3 and max_seqlen_k == 40 and sinks is None
        assert cu_seqlens_q.tolist() == [0, 3, 6] and softmax_scale == LAYER.scale
        at = slots_of(block_table, seqused_k, 8)
        out.copy_(oracle(problem, 0, k.flatten(0, 1), v.flatten(0, 1), at))

    call = peers.unified(problem, unified_attention)
    call(0)
    assert problem.error() < 1e-5


def test_split_decode_gets_its_arguments() -> None:
    problem = problem_of(DECODE)

    def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits,
                             max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0):  # fmt: skip
        assert attn_logits.shape == (2, 4, max_kv_splits, 16)
        blocks, units = 2 * 2, CPU.compute_units  # a block has the heads of a group
        assert 1 <= int(num_kv_splits.max()) <= -(-units // blocks)
        at = [kv_indices[a:b] for a, b in itertools.pairwise(kv_indptr)]
        o.copy_(oracle(problem, 0, k_buffer, v_buffer, at))

    call = peers.split(problem, decode_attention_fwd)
    call(0)
    assert problem.error() < 1e-5
    assert peers.split(problem_of(EXTEND), decode_attention_fwd) is None
    assert peers.split(problem_of(PREFILL), decode_attention_fwd) is None


class Wrapper:
    """The three wrappers of flashinfer, which take other names and the same pages in compressed rows."""

    def __init__(self, space: torch.Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD" and space.dtype == torch.uint8


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=-1,
             q_data_type="float16", kv_data_type=None, sm_scale=None):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, q_data_type) == (4, 2, 16, torch.float32)
        self.rows = indptr, indices, last_page_len, page_size

    def run(self, q, cache):
        indptr, indices, last, page = self.rows
        at = []
        for a, b, end in zip(indptr[:-1], indptr[1:], last, strict=True):
            pages = indices[a:b].long()
            every = (pages[:, None] * page + torch.arange(page)).flatten()
            at.append(every[: (len(pages) - 1) * page + int(end)])
        return oracle(self.problem, 0, cache[0].flatten(0, 1), cache[1].flatten(0, 1), at)


class NewDecode(Decode):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *old, **more):
        assert not old and {"sm_scale", "window_left", "q_data_type"} <= more.keys()
        super().plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **more)


class Paged(Decode):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, causal=False, sm_scale=None, window_left=-1, q_data_type="float16",
             kv_data_type=None):  # fmt: skip
        assert causal and qo_indptr.tolist() == [0, 3, 6] and q_data_type == torch.float32
        self.rows = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size


class Ragged(Wrapper):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
             sm_scale=None, window_left=-1, q_data_type="float16", kv_data_type=None):  # fmt: skip
        assert causal and kv_indptr.tolist() == [0, 9, 14] and head_dim_vo == 16

    def run(self, q, k, v):
        return oracle(self.problem, 0, k, v, [torch.arange(9), torch.arange(9, 14)])


@pytest.mark.parametrize(
    ("work", "decode"),
    [(DECODE, Decode), (DECODE, NewDecode), (EXTEND, Decode), (PREFILL, Decode)],
    ids=["decode", "decode by any name", "extend", "prefill"],
)
def test_wrappers_get_their_arguments(work: Workload, decode: type[Decode]) -> None:
    problem = problem_of(work)
    package = ModuleType("flashinfer")
    for name, wrapper in (("BatchDecodeWithPagedKVCache", decode), ("BatchPrefillWithPagedKVCache", Paged),
                          ("BatchPrefillWithRaggedKVCache", Ragged)):  # fmt: skip
        setattr(package, f"{name}Wrapper", type(name, (wrapper,), {"problem": problem}))
    call = peers.flashinfer(problem, package)
    assert problem.error(call(0)) < 1e-5


def test_a_peer_is_looked_for_and_its_absence_said(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ModuleType("peer_old"), ModuleType("peer_new")
    old.f = print  # type: ignore[attr-defined]
    for module in (old, new):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    wanted = {
        "found": peers.Peer(("peer_new", "peer_old"), "f", peers.unified),
        "lost": peers.Peer(("peer_new",), "f", peers.unified),
        "none": peers.Peer(("peer_nowhere",), "f", peers.unified),
    }
    absent: dict[str, str] = {}
    found = peers.load(torch.device("meta"), absent, wanted)
    assert {name: function for name, (_, function) in found.items()} == {"found": print}
    assert "has no attribute 'f'" in absent["lost"] and "No module named 'peer_nowhere'" in absent["none"]


@pytest.mark.parametrize("count", range(14))
def test_each_contestant_follows_every_other_about_as_often(count: int) -> None:
    rounds = [*orders("abcdefghijklm"[:count], ROUNDS)]
    assert all(len({*order}) == len(order) == count for order in rounds)
    pairs = [pair for order in rounds for pair in itertools.pairwise(order)]
    often = [pairs.count(pair) for pair in itertools.permutations("abcdefghijklm"[:count], 2)]
    assert not often or max(often) - min(often) <= (0 if count in (2, 3, 4, 6, 12) else 2)


def test_what_is_wrong_is_said_and_does_not_stop_the_others() -> None:
    out = torch.zeros(4)
    fill = [lambda: out.fill_(1.0)]

    def refuse() -> None:
        raise ValueError("head_dim 3")

    jobs = [
        Job("right", lambda: fill, [out], lambda _: float((out - 1).abs().sum()), 1e-3),
        Job("wrong", lambda: [lambda: out.fill_(2.0)], [out], lambda _: float((out - 1).abs().sum()), 1e-3),
        Job("raises", refuse, [out], lambda _: 0.0, 1e-3),  # type: ignore[arg-type]
    ]
    measured = contest(jobs, 0.1, 0.0, lambda _: True)
    each = {name: vars_of(found) for name, found in measured.items()}
    row = {"contestants": each, "selected": "wrong", "bytes": 1, "flops": 1}
    lines = list(text.contestants("row", row, {}))
    assert next(line[1] for line in lines) == "right" and lines[0][3] == "1.00x"
    assert [line[5] for line in lines if line[1] == "wrong"] == ["selected wrong: error 4"]
    assert [line[5] for line in lines if line[1] == "raises"] == ["ValueError: head_dim 3"]


def vars_of(measure: Any) -> dict[str, Any]:
    return {name: getattr(measure, name) for name in measure.__slots__}


# the command


def test_the_command_writes_all_that_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(kernels, "workloads", lambda target, quick: iter([DECODE, PREFILL]))
    monkeypatch.setattr(host, "planning", lambda target, quick: {"decode 64": {"us": 1.0, "low": 1.0}})
    argv = ["bench", "kernels", "planning", "graphs", "--device", "cpu", "--quick", "--budget", "0"]
    assert cli.main([*argv, "--json", str(tmp_path / "bench.json")]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    assert set(found["kernels"]) == {"decode 2 x 40 page 8", "prefill"} and "has no graphs" in shown
    assert cli.main(["bench", "--read", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out == shown
    (tmp_path / "other.json").write_text('{"schema": 1}')
    for other in ("other.json", "none.json"):
        assert cli.main(["bench", "--read", str(tmp_path / other)]) == 2
    assert capsys.readouterr().err.count("which is no run of this command") == 2
    assert cli.main(["bench", "graphs", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == {"absent": f"cpu {CPU.arch} has no graphs"}


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "workloads", lambda target, quick: iter([DECODE, PREFILL]))
    monkeypatch.setattr(host, "planning", ended)
    file = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        bench.measure(CPU, ["kernels", "planning"], True, 0.0, lambda found: bench.write(file, found))
    assert set(bench.read(file)["kernels"]) == {DECODE.name, PREFILL.name}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["kernel"], "section 'kernel' is not known; the sections are kernels, planning"),
        (["--device", "emulated:gfx942"], "an emulated device has no speed"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
    ],
)
def test_flags_that_cannot_be_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_the_host_is_measured() -> None:
    found = host.dispatch(CPU)
    assert found["decode 1"]["kernel"] == "torch.sdpa_paged"
    assert found["decode 1"]["Attention.run"]["us"] >= found["torch add"]["low"] > 0
