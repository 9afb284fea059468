"""Caches as a callable wants them: views that are made once for as long as a cache lives, for they take 1 to 4 us."""

from __future__ import annotations

from collections.abc import Callable
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
            view, of, at, strides, of_v, v_at, v_strides = found
            # a tensor may be given other memory in place
            same = of() is k and at == k.data_ptr() and strides == k.stride()
            if same and (v is None or (of_v() is v and v_at == v.data_ptr() and v_strides == v.stride())):
                return view
        if self._reach is not None:
            self._reach.check(kv, pages=True)
        view = self._make(KV(k.data, None if v is None else v.data))  # views of `k` itself would keep it alive

        def forget(dead: object, key: int = id(k)) -> None:
            if (kept := self._kept.get(key)) is not None and dead in (kept[1], kept[4]):
                del self._kept[key]

        facts = [(None, 0, ()) if each is None else (ref(each, forget), each.data_ptr(), each.stride()) for each in kv]
        self._kept[id(k)] = view, *facts[0], *facts[1]
        return view


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
