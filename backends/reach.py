"""What a kernel's offsets reach: beyond it they would wrap without a word, so it is refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portable.kernel import KV, KernelCaps
from portable.layer import UnsupportedError

ANOTHER = "Name another backend, or give Attention its num_pages, so that one is chosen that can"


@dataclass(frozen=True, slots=True)
class Reach:
    """The limits of a kernel's addresses."""

    name: str
    max_block_id: int | None
    most: int | None  # bytes of a tensor
    window: int | None  # bytes whose multiples K and V may not cross

    def holds(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> bool:
        """Whether dense tensors are so small that there is nothing to check: seen in 0.5 us, in place of 1.5."""
        most = self.most
        return (
            most is not None
            and self.window is self.max_block_id is None
            and q.nbytes <= most
            and k.nbytes <= most
            and (v is None or (v.nbytes <= most and v.is_contiguous()))
            and k.is_contiguous()
            and q.is_contiguous()
        )

    def check_query(self, q: torch.Tensor) -> None:
        """Raise an UnsupportedError for queries that are not reached."""
        self._check("q", extent(q))

    def check(self, kv: KV, *, pages: bool) -> None:
        """Raise an UnsupportedError for keys or values, in `pages` or contiguous, that are not reached."""
        if pages and self.max_block_id is not None and len(kv.k) - 1 > self.max_block_id:
            raise UnsupportedError(
                f"the cache has {len(kv.k)} pages; {self.name} can address {self.max_block_id + 1}. {ANOTHER}"
            )
        if self.window is self.most is None:
            return
        for name, tensor in (("k", kv.k), ("v", kv.v)):
            if tensor is None or not (reach := extent(tensor)):
                continue
            self._check(name, reach)
            if self.window is not None and tensor.data_ptr() % self.window + reach > self.window:
                raise UnsupportedError(
                    f"{name} crosses a multiple of {self.window} bytes in memory, where addresses of {self.name} "
                    f"wrap. {ANOTHER}"
                )

    def _check(self, name: str, reach: int) -> None:
        if self.most is not None and reach > self.most:
            raise UnsupportedError(f"{name} extends over {reach} bytes; {self.name} can address {self.most}. {ANOTHER}")


def reach_of(caps: KernelCaps, window: int | None) -> Reach | None:
    """The limits of a kernel; None where it has none."""
    if caps.max_block_id is caps.max_tensor_bytes is window is None:
        return None
    return Reach(caps.name, caps.max_block_id, caps.max_tensor_bytes, window)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last, whatever lies between them."""
    size = tensor.nbytes
    if not size or tensor.is_contiguous():
        return size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
