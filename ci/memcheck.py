"""Some cells of the contract of each kernel, for a checker of memory to look at:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python ci/memcheck.py [CELLS [KERNEL...]]
    compute-sanitizer --tool racecheck python ci/memcheck.py 3 hip.

KERNEL is a beginning of names (default: triton. and hip.). Without torch's caching each tensor is an allocation of its
own, so an access past one is seen; results are checked too. No vendor's kernel is tested before: racecheck spent a
minute in cuDNN's. Compiled kernels are taken from the cache of an earlier run (`ci/prove.py`): under a sanitizer,
compiling takes most of the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent)]

import contract_cells  # noqa: E402 - it imports portable

from portable import detect  # noqa: E402 - the checkout's, whatever is installed
from portable.attention import load_kernels  # noqa: E402
from portable.conformance import cells  # noqa: E402
from portable.packages import installed  # noqa: E402
from portable.select import why_not_here  # noqa: E402


def main(most: int, names: tuple[str, ...]) -> int:
    target = detect()
    packages = installed(target, None)
    asked = [kernel for kernel in load_kernels() if kernel.name.startswith(names)]
    kernels = [kernel for kernel in asked if not why_not_here(kernel, target, packages)]
    if not kernels:
        print(f"no kernel of this machine begins with {' or '.join(names)}: {target}", file=sys.stderr)
        return 2
    failures = 0
    for kernel in kernels:
        passed, failed = contract_cells.run(kernel, cells.cases(kernel, target, most), target.device)
        failures += failed
        if target.device != "cpu":
            torch.accelerator.synchronize()
        print(f"{kernel.name}: {passed + failed} cells", flush=True)
    print(f"{len(kernels)} kernels, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    most, *given = sys.argv[1:] or ["12"]
    sys.exit(main(int(most), tuple(given) or ("triton.", "hip.")))
