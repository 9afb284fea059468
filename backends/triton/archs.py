"""What the caps of all kernels of this folder share."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernel import KernelCaps, Requires

# gfx90a and RDNA are compiled and checked for resources; gfx942 and gfx950 are executed in emulation as well.
AMD = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"})
NVIDIA = frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm120"})
# beside float64, relative to the sum of |weight x value|: half a unit in the last place of the weights, which are
# rounded to the layer's type before they multiply V, and of the result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def on_gpus(**caps: Any) -> KernelCaps:
    """Caps of a kernel that runs on every GPU here, in float32, float16 and bfloat16."""
    return KernelCaps(
        **{
            "provider": "triton",
            "vendors": frozenset({"amd", "nvidia"}),
            "archs": AMD | NVIDIA,
            "emulated": True,
            "requires": (Requires("triton", ">=3.6"),),
            "dtypes": frozenset(TOLERANCE),
            "tolerance": TOLERANCE,
            **caps,
        }
    )
