"""What `ci/compile_facts.py` asks of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

CI = str(Path(__file__).parents[1] / "ci")
ROW = {"shared": 0, "vector_spills": 0, "scratch": 0, "matrix": {"v_mfma": 1}, "loads_16": 9}


def assembly(k: str, v: str, file: str = "prefill_kernel.py") -> str:
    """Loads of queries, of K and of V, at the places of the kernel's own lines."""
    from compile_facts import KERNELS

    lines = (KERNELS / file).read_text().splitlines()
    text = ["\t.loc\t1 1 1 ; other.py:1:1", "\tglobal_load_dwordx4 v[0:3], v0, s[0:1]"]
    for name, load in (("k", k), ("v", v)):
        number = next(
            i for i, line in enumerate(lines, 1) if line.strip().startswith(f"{name}_tile = ") and "load" in line
        )
        text += [
            f"\t.loc\t1 37 16 ; {file}:37:16 @[ {file}:{number}:9 @[ {file}:250:9 ] ]",
            f"\t{load} v[0:3], v0, s[0:1]",
        ]
    return "\n".join(text)


@pytest.mark.parametrize("file", ["prefill_kernel.py", "paged_kernel.py"])
def test_narrow_loads_of_k_or_v_are_refused(file, monkeypatch):
    monkeypatch.syspath_prepend(CI)
    from compile_facts import faults, widest

    def found(k, v, least=16):
        return faults({**ROW, **widest(assembly(k, v, file))}, "gfx942", "attention", True, least=least)

    wide, half, short = "buffer_load_dwordx4", "global_load_dwordx2", "global_load_ushort"
    assert found(wide, wide) == found(half, half, least=8) == []
    assert found(wide, half) == ["V is loaded by 8 bytes a lane"]
    assert found(short, wide) == ["K is loaded by 2 bytes a lane"]
    assert found(wide, "s_load_dwordx4") == ["V is loaded by 0 bytes a lane"]


def test_spills_on_rdna_are_refused_but_for_those_that_are_named(monkeypatch):
    monkeypatch.syspath_prepend(CI)
    from compile_matrix import SPILLS_ON_RDNA, faults

    row = {**ROW, "vector_spills": 3, "scratch": 16, "k_bytes": 16, "v_bytes": 16}
    known = sorted(SPILLS_ON_RDNA)[0]
    assert faults({"rows": {f"{known} | gfx1100": row}}) == []
    for key in (f"{known} | gfx942", "prefill d128 | attention | gfx1201", "tables | _csr | gfx1100"):
        assert faults({"rows": {key: row}}) == [f"{key}: 3 vector registers are spilled, 16 bytes of scratch a lane"]


def test_mlas_kernels_may_spill_nowhere(monkeypatch):
    monkeypatch.syspath_prepend(CI)
    from compile_matrix import faults

    row = {"shared": 0, "stack": 8, "matrix": {}, "loads_16": 1}
    for key in ("mla decode 128 heads | attend_mla_kernel | sm90", "hopper prefill 192/128 | attend_kernel | sm90"):
        assert faults({"rows": {key: row}}) == [f"{key}: 8 bytes of registers are spilled a lane"]
        assert faults({"rows": {key: {**row, "stack": 0}}}) == []
    assert faults({"rows": {"prefill d256 softcap | attention | sm90": row}}) == []
