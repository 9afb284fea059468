"""What the caps of all kernels of this folder share."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernel import KernelCaps, Requires

# gfx90a and RDNA are compiled and checked for resources; gfx942 and gfx950 are executed in emulation as well.
AMD = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"})
NVIDIA = frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm120"})
NAMES = {torch.float32: "float", torch.float16: "fp16", torch.bfloat16: "bf16"}  # in the sources
FP8_NAMES = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
# beside float64: half a unit in the last place of the result, and float32's own sums
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def on_gpus(**caps: Any) -> KernelCaps:
    """Caps of a kernel that runs on every GPU here, in float32, float16 and bfloat16."""
    return KernelCaps(
        **{
            "provider": "hip",
            "vendors": frozenset({"amd", "nvidia"}),
            "archs": AMD | NVIDIA,
            "requires_on": {"nvidia": (Requires("nvrtc"),)},  # AMD's may lack hipRTC: Triton's come first
            "emulated": True,
            "dtypes": frozenset(NAMES),
            "tolerance": TOLERANCE,
            **caps,
        }
    )
