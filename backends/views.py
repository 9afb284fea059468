"""Tensors as a callable wants them, kept by where their memory is: a look takes 0.4 us (a CPU), making one 1 to 4.

What is kept holds no memory, so whoever asks for it holds the tensor until it was used. In return it is right for every
tensor that has the address, the shape, the strides, the dtype and the device's number later on: they are all that it
says. Of a tensor whose negative or conjugate bit is set nothing is kept; but one that has the facts of a kept tensor
without the bit is taken for it: to look at each call would take 0.08 us, and what a step computes has no such bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch

from portable.backends.reach import Reach, extent
from portable.kernel import KV


class View(NamedTuple):
    """What a callable is given for a cache."""

    k: torch.Tensor
    v: torch.Tensor | None
    apart: int = 0  # tokens from a page to the next; 0: the callable reads pages, not slots


class Views:
    """What `make` gives for a cache; that it is in reach is seen then, for the same facts decide it.

    >>> pages = torch.zeros(3, 16, 8)
    >>> kept = Views(latent)
    >>> kept.of(pages) is kept.of(pages[:])
    True
    >>> kept.of(pages).k.shape
    torch.Size([3, 16, 1, 8])
    """

    MOST = 1024  # layers of the models of a process

    def __init__(self, make: Callable[[KV], View], reach: Reach | None = None) -> None:
        self._make, self._reach = make, reach
        self._kept: dict[tuple[Any, ...], View] = {}
        self._last: dict[int, tuple[Any, ...]] = {}  # by the address of K: what was met there last, and the view

    def of(self, k: torch.Tensor, v: torch.Tensor | None = None) -> View:
        """What is given for a cache."""
        last = self._last.get(k.data_ptr())
        if last is not None:
            found: View
            shape, strides, dtype, device, of_v, found = last
            if (
                k.shape == shape
                and (k.is_contiguous() if strides is None else k.stride() == strides)
                and k.dtype is dtype
                and k.get_device() == device
                and (of_v is None if v is None else of_v is not None and _is(v, of_v))
            ):
                return found
        return self._met(KV(k, v))

    def kept(self, k: torch.Tensor) -> tuple[Any, Any, View] | None:
        """K's strides, None where being contiguous tells them, V's facts, and the view, of what was met last there."""
        last = self._last.get(k.data_ptr())
        return None if last is None else (last[1], last[4], last[5])

    def _met(self, kv: KV) -> View:
        k, v = kv
        of_k, of_v = _facts(k), None if v is None else _facts(v)
        found = self._kept.get((of_k, of_v))
        if found is None:
            if not of_k[0]:
                return self._make(kv)
            if self._reach is not None:
                self._reach.check(kv, pages=True)
            if _is_lazy(k) or (v is not None and _is_lazy(v)):
                return self._make(kv)
            found = self._make(KV(alias(k), None if v is None else alias(v)))
            if len(self._kept) >= self.MOST:
                self._kept.clear()
                self._last.clear()
            self._kept[of_k, of_v] = found
        self._last[of_k[0]] = (*_short(of_k)[1:], of_v and _short(of_v), found)
        return found


class Aliases:
    """What `make` gives for a tensor of a call; kept once its facts were met twice, for the alias takes 6 us.

    >>> rows = torch.arange(12).view(4, 3)
    >>> kept = Aliases(lambda rows: rows.view(2, 2, 3))
    >>> kept.of(rows) is kept.of(rows), kept.of(rows) is kept.of(rows)
    (False, True)
    >>> kept.of(rows)[1, 0]
    tensor([6, 7, 8])
    """

    MOST = 256  # layers of a step take turns at few addresses

    def __init__(self, make: Callable[[torch.Tensor], Any], *, dense: bool = False) -> None:
        self.make, self.dense = make, dense
        self._kept: dict[tuple[Any, ...], Any] = {}  # None: met once
        self._last: dict[int, tuple[Any, ...]] = {}  # by address: what was met there last, and what is kept of it

    def of(self, tensor: torch.Tensor) -> Any:
        """What is given for a tensor; None where it has to be `dense` and is not."""
        last = self._last.get(tensor.data_ptr())
        if last is not None:
            shape, strides, dtype, device, found = last
            if (
                tensor.shape == shape
                and (tensor.is_contiguous() if strides is None else tensor.stride() == strides)
                and tensor.dtype is dtype
                and tensor.get_device() == device
            ):
                return found
        return self._met(tensor)

    def kept(self, tensor: torch.Tensor) -> tuple[Any, Any] | None:
        """The strides, None where being contiguous tells them, and the view, of what its address was met with last."""
        last = self._last.get(tensor.data_ptr())
        return None if last is None else (last[1], last[4])

    def _met(self, tensor: torch.Tensor) -> Any:
        if self.dense and not tensor.is_contiguous():
            return None
        key = _facts(tensor)
        found = self._kept.get(key)
        if found is None:
            if not key[0] or _is_lazy(tensor):  # 0: without elements, which all devices have there
                return self.make(tensor)
            met = key in self._kept
            if not met and len(self._kept) >= self.MOST:
                self._kept.clear()
                self._last.clear()
            self._kept[key] = found = self.make(alias(tensor)) if met else None
            if not met:
                return self.make(tensor)
        self._last[key[0]] = (*_short(key)[1:], found)
        return found


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()  # its number: 0.05 us


def _is(tensor: torch.Tensor, short: tuple[Any, ...]) -> bool:
    address, shape, strides, dtype, device = short
    return (
        tensor.data_ptr() == address
        and tensor.shape == shape
        and (tensor.is_contiguous() if strides is None else tensor.stride() == strides)
        and tensor.dtype is dtype
        and tensor.get_device() == device
    )


def _short(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Facts with None for the strides where being contiguous tells them, in 0.08 us instead of 0.18.

    It does not where a size is 1, whose stride may be any.
    """
    address, shape, strides, *rest = facts
    told = 1 not in shape and strides == tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]
    return address, shape, None if told else strides, *rest


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its numbers are not those of its memory, but to be negated or conjugated."""
    return tensor.is_neg() or tensor.is_conj()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor once more, without a hold on its memory."""
    with torch.inference_mode(False):  # an inference tensor could not be written outside of it
        size = extent(tensor)
        memory: Any = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return found.set_(memory, 0, tensor.shape, tensor.stride())


@lru_cache(maxsize=96)  # three of a size of batch
def aliases(
    make: Callable[[torch.Tensor, tuple[int, ...]], Any], sizes: tuple[int, ...], *, dense: bool = False
) -> Aliases:
    """Those of one way to cut or group tensors, for all steps and adapters."""
    return Aliases(lambda tensor: make(tensor, sizes), dense=dense)


def parts(rows: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Columns in parts of these sizes."""
    return torch.unsafe_split_with_sizes(rows, sizes, -1)


def grouped(rows: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Rows [B * Sq, ...] as [B, Sq, ...]."""
    return rows.unsqueeze(1) if sizes[1] == 1 else rows.view(*sizes, *rows.shape[1:])


def grouped_lse(lse: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """An LSE [H, B * Sq] as [B, H, Sq]."""
    return lse.mT.unsqueeze(-1) if sizes[1] == 1 else lse.unflatten(1, sizes).transpose(0, 1)


def turned_lse(lse: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """An LSE [H, T] as [T, H]."""
    return lse.mT


def latent(kv: KV) -> View:
    """Latent pages [pages, page_size, D] with their one head."""
    return View(kv.k.unsqueeze(-2), kv.v)


def latent_parts(kv: KV, width: int) -> View:
    """Latent pages as values, of their first `width` columns, and keys, of the others."""
    v, k = kv.k.unsqueeze(-2).split_with_sizes((width, kv.k.shape[-1] - width), -1)
    return View(k, v)


def slots(kv: KV, *, paged: bool = False) -> View:
    """Pages [pages, page_size, ...] as slots [N, H, D]. Latent pages have one head.

    `paged`: each slot is a page of one token, [N, 1, H, D].

    Raises:
        ValueError: pages that do not lie a whole number of tokens apart, the same in K and V.
    """
    caches = [each for each in kv if each is not None]
    dense = all(each.is_contiguous() for each in caches)
    steps = {each.shape[1] if dense else each.stride(0) / each.stride(1) for each in caches}
    step = steps.pop()
    if steps or step != int(step):
        strides = " and ".join(str(list(each.stride())) for each in caches)
        raise ValueError(f"caches have strides {strides}; their pages must be the same whole number of tokens apart")

    def of(pages: torch.Tensor) -> torch.Tensor:
        if dense:
            found = pages.view(-1, *pages.shape[2:])  # strides of dimensions of one say nothing
        else:
            count = (len(pages) - 1) * int(step) + pages.shape[1]
            found = pages.as_strided((count, *pages.shape[2:]), pages.stride()[1:])
        found = found if pages.dim() == 4 else found.unsqueeze(1)
        return found.unsqueeze(1) if paged else found

    return View(of(kv.k), None if kv.v is None else of(kv.v), int(step))


def slot_indices(indices: torch.Tensor, page_size: int, apart: int) -> torch.Tensor:
    """Slot numbers of dense pages as those of pages that lie `apart` tokens from each other."""
    return indices if apart == page_size else indices + indices // page_size * (apart - page_size)
