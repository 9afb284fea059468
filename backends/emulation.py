"""The emulated device that CPU tensors belong to: for launchers of device code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from portable.platform import emulated


def emulated_arch() -> str:
    """The active device's architecture, or that which the environment names.

    Raises:
        ValueError: none is active or named.
    """
    if (active := _active()) is not None:
        return str(active.arch)
    name = os.environ.get("PORTABLE_DEVICE", "")
    if not name.startswith("emulated:"):
        raise ValueError(
            "the tensors are on the CPU and no emulated device is active; a kernel of this backend needs a GPU, or "
            "PORTABLE_DEVICE=emulated:gfx942"
        )
    return name.removeprefix("emulated:")


def emulating(arch: str | None = None) -> AbstractContextManager[Any]:
    """Makes an emulated device active, where none is: of an architecture, or of `emulated_arch()`."""
    return nullcontext() if _active() is not None else emulated.activate(arch or emulated_arch())


@contextmanager
def reachable(tensors: Sequence[Any]) -> Iterator[None]:
    """Within the block, kernels of the active device, if any, may reach these tensors by addresses in others."""
    active = _active() if tensors else None
    if active is None:
        yield
        return
    known = active.reachable
    known += tensors
    try:
        yield
    finally:
        del known[len(known) - len(tensors) :]


def _active() -> Any:
    from portable.platform.emulated import driver

    try:
        return driver.current()
    except RuntimeError:
        return None
