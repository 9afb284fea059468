"""Our Triton kernels, one source for gfx942, gfx950 and NVIDIA GPUs; a file is a kernel, its launcher and its caps."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from portable.kernel import Kernel

# in the order in which `select` prefers them: the kernel for fewer devices or longer queries comes first
FILES = (
    "prefill_hopper",
    "prefill",
    "paged",
    "mla_decode_hopper",
    "mla_decode",
    "merge",
    "cache",
    "gather",
    "copy",
    "conv1d",
    "ssd",
    "scan",
    "state_update",
    "state_copy",
)


def _kernels() -> tuple[Kernel, ...]:
    if find_spec("triton") is None:
        return ()
    modules = (importlib.import_module(f"portable.backends.triton.{name}") for name in FILES)
    return tuple(kernel for module in modules for kernel in module.KERNELS)


KERNELS = _kernels()
