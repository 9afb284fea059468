"""AMD's aiter: its CK, assembly, HIP and Triton kernels, and where each departs from the contract.

Two ranges of versions are known: 0.1.7, the release on PyPI, and what follows it.
"""

from portable.backends.aiter import mla, paged, varlen

KERNELS = (*varlen.KERNELS, *paged.KERNELS, *mla.KERNELS)
