"""Tensors as a callable wants them, made once: a view takes 1.2 us of an H100's host, and to look for it 0.4.

Of a cache, for as long as it lives; of the tensors of a call, which are others each time, by where their memory is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch

from portable.backends.reach import Reach
from portable.kernel import KV


class View(NamedTuple):
    """What a callable is given for a cache."""

    k: torch.Tensor
    v: torch.Tensor | None
    apart: int = 0  # tokens from a page to the next; 0: the callable reads pages, not slots


class Views:
    """What `make` gives for a cache, made anew where its tensors have died or moved; it checks their reach as well.

    >>> pages = torch.zeros(3, 16, 8)
    >>> kept = Views(latent)
    >>> kept(KV(pages, None)) is kept(KV(pages, None))
    True
    >>> kept(KV(pages, None)).k.shape
    torch.Size([3, 16, 1, 8])
    """

    def __init__(self, make: Callable[[KV], View], reach: Reach | None = None) -> None:
        self._make, self._reach = make, reach
        self._kept: dict[int, tuple[Any, ...]] = {}

    def __call__(self, kv: KV) -> View:
        k, v = kv
        found = self._kept.get(id(k))
        if found is not None:
            view: View
            view, of, facts, of_v, v_facts = found
            same = of() is k and (of_v is None if v is None else of_v is not None and of_v() is v)
            # a tensor may be given other memory in place, or another size or dtype
            if same and facts == _facts(k) and (v is None or v_facts == _facts(v)):
                return view
        if self._reach is not None:
            self._reach.check(kv, pages=True)
        view = self._make(KV(k.data, None if v is None else v.data))  # views of `k` itself would keep it alive

        def forget(dead: object, key: int = id(k)) -> None:
            if (kept := self._kept.get(key)) is not None and dead in (kept[1], kept[3]):
                del self._kept[key]

        facts = [(None, None) if each is None else (ref(each, forget), _facts(each)) for each in kv]
        self._kept[id(k)] = view, *facts[0], *facts[1]
        return view


def _facts(cache: torch.Tensor) -> tuple[Any, ...]:
    return cache.data_ptr(), cache.shape, cache.stride(), cache.dtype


class Aliases:
    """What `make` gives for a tensor; of a dense one, kept by its address, shape and dtype once these were met twice.

    What is kept holds no memory, so whoever asks for it holds the tensor until it was used. In return it is right for
    every dense tensor that has the address later on: an address, a shape and a dtype are all that it says, and devices
    of a process share no address. To make one to be kept takes 6 us, so what is met once has a view.

    >>> rows = torch.arange(12).view(4, 3)
    >>> kept = Aliases(lambda rows: rows.view(2, 2, 3))
    >>> kept(rows) is kept(rows), kept(rows) is kept(rows)
    (False, True)
    >>> kept(rows)[1, 0]
    tensor([6, 7, 8])
    """

    MOST = 256  # layers of a step take turns at few addresses

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make
        self._kept: dict[tuple[int, torch.Size, torch.dtype], Any] = {}  # None: met once

    def __call__(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_contiguous() or not tensor.numel():  # without elements all have the address 0
            return self.make(tensor)
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        found = self._kept.get(key)
        if found is not None:
            return found
        met = key in self._kept
        if not met and len(self._kept) >= self.MOST:
            self._kept.clear()
        self._kept[key] = found = self.make(alias(tensor)) if met else None
        return found if met else self.make(tensor)


def alias(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor once more, without a hold on its memory; dimensions of one have the strides of others."""
    with torch.inference_mode(False):  # an inference tensor could not be written outside of it
        memory: Any = torch._C._construct_storage_from_data_pointer(dense.data_ptr(), dense.device, dense.nbytes)
        found: torch.Tensor = torch.empty(0, dtype=dense.dtype, device=dense.device).set_(memory, 0, dense.shape, ())
    return found


@lru_cache(maxsize=64)
def aliases(make: Callable[[torch.Tensor, tuple[int, ...]], Any], sizes: tuple[int, ...]) -> Aliases:
    """Those of one way to cut or group tensors, for all steps and adapters."""
    return Aliases(lambda tensor: make(tensor, sizes))


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
