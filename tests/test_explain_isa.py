"""`portable explain --isa`: what the assembly text of compiled kernels says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from portable import cli

ROOT = Path(__file__).parent.parent
TEXT = """\
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
{code}
	.amdgpu_metadata
amdhsa.kernels:
{entries}
	.end_amdgpu_metadata
"""
CODE = """\
{name}:
.Lloop_{name}:
	global_load_dwordx4 v[0:3], v[4:5], off
	v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[2:3], v[0:3]
	v_exp_f32 v0, v0
	s_cbranch_scc1 .Lloop_{name}
	s_endpgm
.Lfunc_end_{name}:
	.amdhsa_kernel {name}
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_next_free_vgpr 100
	.end_amdhsa_kernel
"""
ENTRY = """\
  - .agpr_count:     0
    .max_flat_workgroup_size: 256
    .name:           {name}
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     100
    .vgpr_spill_count: 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(arch: str = "gfx942", **lds: int) -> str:
        code = "".join(CODE.format(name=name, lds=size) for name, size in lds.items())
        entries = "".join(ENTRY.format(name=name) for name in lds)
        path = tmp_path / "kernels.amdgcn"
        path.write_text(TEXT.format(arch=arch, code=code, entries=entries))
        return str(path)

    return write


def test_every_kernel_of_a_file_is_printed(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--isa", file(first=16384, second=512)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines() == [
        "first: gfx942",
        "  registers      100 vector, 0 accumulation, 20 scalar; 100 of 512 allocated",
        "  spills         0 vector, 0 scalar; 0 bytes of scratch a lane",
        "  LDS            16384 of 65536 bytes",
        "  occupancy      4 of 8 waves per SIMD (registers 4, LDS 4), workgroups of 4 waves",
        "  matrix         1 of 5 instructions (20%): 1 v_mfma_f32_16x16x16_f16",
        "  global loads   1 of 16 bytes a lane",
        "  global stores  none",
        "  loop .Lloop_first at line 4: 4 instructions; clocks: 16 matrix, 0 vector, 16 transcendental; "
        "matrix unit busy 100% at most",
    ]
    assert second.startswith("second: gfx942\n")


def test_json_says_the_same(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--json", "--isa", file("gfx950", first=16384)]) == 0
    data = json.loads(capsys.readouterr().out)
    (kernel,) = data["kernels"]
    assert data["schema"] == 1
    assert (kernel["name"], kernel["arch"], kernel["lds_limit"], kernel["occupancy"]) == ("first", "gfx950", 163840, 4)
    assert kernel["loads"] == {"16": 1}
    assert kernel["loops"][0]["matrix_clocks"] == 16


def test_a_kernel_that_cannot_be_launched_is_exit_code_1(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--isa", file(small=512, big=71680)]) == 1
    assert "kernel big uses 71680 bytes of LDS where gfx942 has 65536" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--arch gfx942", "--arch"),
        ("--num-heads 0", "--num-heads"),
        ("--mla --with a=1", "--mla, --with"),
        ("--page-size 32 --lse", "--lse, --page-size"),
    ],
)
def test_flags_of_layers_and_machines_are_refused(
    file: Any, flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "--isa", file(first=0), *flags.split()]) == 2
    assert f"which {named} would not change" in capsys.readouterr().err


def test_a_file_that_is_missing_or_holds_no_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--isa", str(tmp_path / "absent.amdgcn")]) == 2
    assert "absent.amdgcn" in capsys.readouterr().err
    (tmp_path / "empty.amdgcn").write_text("")
    assert cli.main(["explain", "--isa", str(tmp_path / "empty.amdgcn")]) == 2
    assert "holds no kernel" in capsys.readouterr().err


def test_triton_is_not_needed(file: Any) -> None:
    script = "import sys; sys.modules['triton'] = None; from portable import cli; sys.exit(cli.main(sys.argv[1:]))"
    argv = [sys.executable, "-c", script, "explain", "--isa", file(first=0)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("first: gfx942")
