"""A kernel's cells of the contract, counted: for the scripts that run them on a device."""

from __future__ import annotations

from collections.abc import Iterable

from portable.conformance import contract
from portable.conformance.cells import Case
from portable.kernel import Kernel


def run(kernel: Kernel, cases: Iterable[Case], device: str) -> tuple[int, int]:
    """(cells that passed, that failed); each failure is printed with its case, and the rest go on."""
    passed, failed = 0, 0
    for case in cases:
        try:
            contract.check(kernel, case, device)
            passed += 1
        except Exception as error:
            failed += 1
            print(f"{kernel.name}: {type(error).__name__}: {error}\n    {case}", flush=True)
    return passed, failed
