"""What a vendor's module does while it is imported costs that vendor's kernels, and nothing else that portable does."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import forked
import pytest

from portable.backends.packages import PACKAGES

ROOT = Path(__file__).parent.parent
FORKS = multiprocessing.get_context("forkserver")  # from a process that imported torch once: 3 of the 8 s of each
FORKS.set_forkserver_preload(["torch"])

# A kernel of "lib" is first in line; then attention runs twice, as an engine would.
USE = """
import json, sys, threading
import torch, portable
from portable import attention, packages
from portable.backends.packages import PACKAGES
from portable.kernel import Kernel, Op, Requires
from dataclasses import replace

packages.WARNS, packages.ENDS = 0.2, 1.0
lib = packages.VendorPackage(name="lib", module="lib", title="Lib", provider="lib", symbols=("attend",))
packages.known_packages = lambda: (lib, *PACKAGES)
every = attention.load_kernels()
first = next(kernel for kernel in every if kernel.name == "torch.sdpa_paged")
caps = replace(first.caps, name="lib.paged", provider="lib", requires=(Requires("lib"),))

def run(*given):
    import lib
    lib.attend(*given)
    first.run(*given)

attention.load_kernels = lambda: (Kernel(caps, run, first.prepare), *every)
order = {op.value: ("lib", "torch") for op in Op}
sys.modules["portable.select"].vendor_order = lambda target: order
layer = portable.Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
attn = portable.Attention(layer, page_size=4, device="cpu")
cache = portable.allocate_cache(layer, num_pages=4, page_size=4)
for _ in range(2):
    plan = attn.plan(portable.Batch.from_lens([2], [2], block_table=[[1]], page_size=4))
    attn.write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, plan)
    out = attn.run(torch.ones(2, 2, 8), cache, plan).out
rejected = dict(attn.choices["decode"].rejected)
print(json.dumps({
    "right": bool((out == 1).all()), "kernel": attn.choices["decode"].kernel.name,
    "reasons": rejected.get("lib.paged", ()), "explain": str(attn.explain()),
}))
"""


def use(site: Path, source: str) -> tuple[dict[str, Any], str]:
    """What attention does in a process that finds `source` as the module lib, and what it writes to stderr."""
    (site / "lib.py").write_text(textwrap.dedent(source))
    info = site / "lib-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
    process = FORKS.Process(target=forked.run, args=(USE, site, ROOT))
    process.start()
    process.join(120)
    process.kill()
    noise = (site / "stderr").read_text()
    assert process.exitcode == 0, noise
    return json.loads((site / "stdout").read_text()), noise  # one line: a module that prints is not heard


ATTEND = "def attend(*given): pass\n"


LATE = "importing lib did not end within 1 s"
TESTED = "its self-test failed: the first tokens of requests: "


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('0 active drivers')", "importing lib raised RuntimeError: 0 active drivers"),
        ("print('bye')\nimport sys\nsys.exit(3)", "importing lib raised SystemExit: 3"),
        ("raise BaseException('deep')", "importing lib raised BaseException: deep"),
        ("def f(): f()\nf()", "importing lib raised RecursionError: maximum recursion depth exceeded"),
        ("x = 1", "it has no lib.attend"),
        ("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", LATE),
        ("import fcntl\na = open(__file__)\nb = open(__file__)\nfcntl.flock(a, 2)\nfcntl.flock(b, 2)", LATE),
        ("import os\nos.write(2, b'no GPU')\nos._exit(3)", "importing lib ended its process with code 3: no GPU"),
        ("import os\nos.abort()", "importing lib ended its process with code -6"),
        ("import ctypes\nctypes.string_at(8)", "importing lib ended its process with code -11"),
        ("import ctypes\nctypes.PyDLL(None).sleep(60)", LATE),  # and no other thread of its process runs
        ("def attend(*given): raise RuntimeError('no image')", f"{TESTED}RuntimeError: no image"),
        ("import sys\ndef attend(*given): sys.exit(4)", f"{TESTED}SystemExit: 4"),
        ("def attend(q, *given): q.mul_(2)", f"{TESTED}it wrote into q"),
    ],
)
def test_attention_works_without_a_library_that_fails(tmp_path: Path, source: str, reason: str) -> None:
    found, noise = use(tmp_path, source)
    assert found["right"] and found["kernel"] != "lib.paged"
    assert len(found["reasons"]) == 1 and reason in found["reasons"][0]
    assert f"not lib.paged: {found['reasons'][0]}" in found["explain"]
    assert "Traceback" not in noise


@pytest.mark.parametrize(
    "source",
    [
        ATTEND,
        f"import sys\nprint('banner')\nprint('warning', file=sys.stderr)\n{ATTEND}",
        f"import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n{ATTEND}",  # the main thread's alone
    ],
    ids=["quiet", "loud", "signals"],
)
def test_a_library_that_works_is_used(tmp_path: Path, source: str) -> None:
    found, noise = use(tmp_path, source)
    assert found["right"] and found["kernel"] == "lib.paged"
    assert "banner" not in noise and "warning" not in noise


UNASKED = """
import sys, torch, portable
from portable import cli
from portable.attention import load_kernels
from portable.backends.packages import PACKAGES

assert len({kernel.caps.provider for kernel in load_kernels()}) > 5
layer = portable.Layer.gqa(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
attn = portable.Attention(layer, page_size=4, device="cpu")
cache = portable.allocate_cache(layer, num_pages=4, page_size=4)
plan = attn.plan(portable.Batch.from_lens([2], [2], block_table=[[1]], page_size=4))
attn.write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, plan)
assert (attn.run(torch.ones(2, 2, 8), cache, plan).out == 1).all()
for arch, given in (("gfx942", "amd-aiter=0.1.12"), ("sm90", "flash_attn_3=3.0.0b1")):  # machines that are described
    assert cli.main(["explain", "--arch", arch, "--with", given, "--json"]) in (0, 1)
"""


def test_no_vendor_is_imported_that_nobody_asked_about(tmp_path: Path) -> None:
    """Each vendor's module, were it imported, would end the process."""
    names = {each.module for each in PACKAGES if not each.bundled}
    for name in sorted(names):
        file = tmp_path.joinpath(*name.split(".")) / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, *file.parent.parents):
            if folder == tmp_path:
                break
            (folder / "__init__.py").write_text("import os\nos._exit(9)")
    environ = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", UNASKED], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and {"aiter", "flash_attn", "flash_mla"} <= names, done.stderr
