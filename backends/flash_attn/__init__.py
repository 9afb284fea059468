"""FlashAttention in its releases and builds: what each can do, and how its calls depart from the contract."""

from __future__ import annotations

from portable.backends.flash_attn import version2, version2_amd, version3, version4, vllm_builds

# The most special first: of what can serve, the first that is listed is taken.
KERNELS = (*version4.KERNELS, *version3.KERNELS, *vllm_builds.KERNELS, *version2.KERNELS, *version2_amd.KERNELS)
