"""The vendor packages that kernels may need, as facts: `portable.packages` looks for them on a machine.

The symbols are those that the adapters bind, so that a release without one is refused by name.
"""

from __future__ import annotations

from portable.packages import Package, VendorPackage

AMD, NVIDIA = frozenset({"amd"}), frozenset({"nvidia"})
TRITON_BUILD = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def _nvrtc() -> Package:
    from portable.backends.hip.sources import nvrtc_here

    return nvrtc_here()


PACKAGES = (
    VendorPackage(
        name="amd-aiter",
        module="aiter",
        title="AMD AITER",
        provider="aiter",
        vendors=AMD,
        aliases=("aiter",),  # what source builds of AMD's were called, and what an async library on PyPI is called
        marker="ops",
        symbols=("flash_attn_varlen_func", "mla.mla_decode_fwd"),
        compiles=True,
    ),
    VendorPackage(
        name="flash-attn",
        module="flash_attn",
        title="FlashAttention 2",
        provider="flash_attn",
        vendors=AMD | NVIDIA,
        extension="flash_attn_2_cuda",
        switch=(TRITON_BUILD, "TRUE"),
        symbols=("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ),
    # AMD's builds of it, of which an environment variable chooses one
    VendorPackage(
        name="flash-attn[ck]",
        module="flash_attn",
        title="FlashAttention 2 on Composable Kernel",
        provider="flash_attn",
        vendors=AMD,
        aliases=("flash-attn",),
        extension="flash_attn_2_cuda",
        chosen_by=(TRITON_BUILD, "TRUE", False),
        symbols=("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ),
    VendorPackage(
        name="flash-attn[triton]",
        module="flash_attn",
        title="FlashAttention 2 on Triton",
        provider="flash_attn",
        vendors=AMD,
        aliases=("flash-attn",),
        chosen_by=(TRITON_BUILD, "TRUE", True),
        symbols=("flash_attn_varlen_func",),
    ),
    VendorPackage(
        name="vllm",
        module="vllm.vllm_flash_attn",
        title="vLLM",
        provider="flash_attn",
        vendors=NVIDIA,
        symbols=("flash_attn_varlen_func",),
    ),
    VendorPackage(
        name="flash_attn_3",
        module="flash_attn_interface",
        title="FlashAttention 3",
        provider="flash_attn",
        vendors=NVIDIA,
        symbols=("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ),
    VendorPackage(
        name="flash-attn-4",
        module="flash_attn.cute",
        title="FlashAttention 4",
        provider="flash_attn",
        vendors=NVIDIA,
        symbols=("flash_attn_varlen_func",),
        compiles=True,
    ),
    VendorPackage(
        name="flash_mla",
        module="flash_mla",
        title="FlashMLA",
        provider="flash_mla",
        vendors=NVIDIA,
        symbols=("get_mla_metadata", "flash_mla_with_kvcache"),
    ),
    VendorPackage(
        name="vllm[flash_mla]",
        module="vllm.third_party.flashmla.flash_mla_interface",
        title="vLLM's FlashMLA",
        provider="flash_mla",
        vendors=NVIDIA,
        aliases=("vllm",),
        symbols=("get_mla_metadata", "flash_mla_with_kvcache"),
    ),
    # what compiles the C++ kernels; torch's wheels for these devices bring it
    VendorPackage(name="nvrtc", module="", title="NVRTC", vendors=NVIDIA, bundled=True, find=_nvrtc),
    VendorPackage(name="torch", module="torch", title="PyTorch", bundled=True),
    VendorPackage(
        name="triton",
        module="triton",
        title="Triton",
        bundled=True,
        # torch's own GPU wheels bring Triton under these names
        aliases=("triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
        symbols=("jit", "language"),
    ),
)
