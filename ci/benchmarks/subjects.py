"""portable's own kernels as contestants: those of one provider."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from portable.attention import load_kernels
from portable.bench.subjects import calls, chosen, needs_of, planned_calls, why_not
from portable.kernel import Kernel, Op

__all__ = ["calls", "chosen", "kernels", "needs_of", "planned_calls", "why_not"]


def kernels(provider: str, op: Op, absent: dict[str, str]) -> Iterator[Kernel]:
    """Of one provider and operation; Triton's also from files that the backend does not list yet."""
    found = {kernel.name: kernel for kernel in load_kernels()}
    if provider == "triton":
        package = importlib.import_module("portable.backends.triton")
        for info in pkgutil.iter_modules(package.__path__):
            try:
                module = importlib.import_module(f"{package.__name__}.{info.name}")
            except Exception as error:  # a kernel that is being written must not stop the others' run
                absent[f"portable/{info.name}"] = f"{type(error).__name__}: {error}"[:200]
                continue
            found |= {kernel.name: kernel for kernel in getattr(module, "KERNELS", ())}
    for kernel in found.values():
        if kernel.caps.provider == provider and kernel.caps.op is op:
            yield kernel
