"""Every kernel of ours meets the contract when its AMD code is executed: each cell on one of the two architectures.

All on both take twice as long; `portable conformance --full --device emulated:ARCH` has them, which the lanes of the
matrix run, and ci/results/conformance-ARCH.json says with what result, of which source.
"""

from __future__ import annotations

import pytest

import portable
from portable.attention import load_kernels
from portable.conformance import cells, contract
from portable.kernel import Kernel
from portable.platform.emulated import activate
from portable.platform.emulated.driver import DEVICES

pytest.importorskip("triton")

KERNELS = [kernel for kernel in load_kernels() if kernel.caps.emulated and kernel.caps.provider in ("triton", "hip")]
THINNED = {"hip.paged_decode": 4}  # one cell of so many, else of 2: all 40 take 40 s
PARTS = 2  # of a kernel's cells, so that the workers of a test run share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_cell_is_right(kernel: Kernel, arch: str, part: int) -> None:
    wrong = []
    every = list(cells.cases(kernel, portable.detect(f"emulated:{arch}")))
    cases = every[list(DEVICES).index(arch) :: THINNED.get(kernel.name, len(DEVICES))]
    assert cases, f"{kernel} serves nothing on {arch}"
    with activate(arch) as emulation:
        for case in cases[part::PARTS]:
            try:
                contract.check(kernel, case, "cpu")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}\n    {case}")
    assert not wrong, f"{kernel} is wrong in {len(wrong)} cells:\n" + "\n".join(wrong[:5])
    assert {each.arch for each in emulation.launches} <= {arch}
