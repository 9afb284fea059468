"""An emulated MI300 and MI350: compiled AMD code, executed on the CPU.

`with activate("gfx942"):` makes one Triton's active device, for CPU tensors. What runs there shows that the code
computes the right numbers within its resources; nothing about speed, hazards or memory ordering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.platform.emulated.driver import Emulation, Launch, activate

__all__ = ["Emulation", "Launch", "activate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from portable.platform.emulated import driver

        return getattr(driver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
