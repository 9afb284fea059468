"""C++ kernels of one source for both vendors, compiled at run time and launched in microseconds.

A `.cu` file holds the device code; the `.py` file of the same name its launcher and caps.
"""

from __future__ import annotations

import importlib

from portable.kernel import Kernel

FILES = ("paged_decode", "cache", "merge", "state_copy", "refresh")


def _kernels() -> tuple[Kernel, ...]:
    modules = (importlib.import_module(f"portable.backends.hip.{name}") for name in FILES)
    return tuple(kernel for module in modules for kernel in module.KERNELS)


KERNELS = _kernels()
