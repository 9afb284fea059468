"""Copying whole pages of a cache: forks of a shared prefix, and swapping between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np
import torch

from portable.arguments import named
from portable.attention import Kernels
from portable.kernel import KV, Needs, Op
from portable.layer import Layer
from portable.overlap import Pages, shared_pages
from portable.platform.detect import detect


@named
def copy_pages(layer: Layer, source: KV, target: KV, pages: Sequence[tuple[int, int]] | torch.Tensor) -> None:
    """Copy pages of one layer's cache, within a pool or to another one, on the same device or between devices.

    Args:
        layer: whose caches these are; both have its layout and type.
        source, target: pools with pages of the same shape and any strides; for a copy within a pool the same one twice.
        pages: pairs (from, to), as a sequence or a tensor [n, 2]. A pair with a negative page copies nothing. Pairs
            on the host are checked; those on a device are not read, and a page that is not there copies nothing.

    Between devices the pages go through one packed block, which is copied without waiting where the host's memory
    is pinned; the caller orders the streams.

    Raises:
        ValueError: pools that do not fit together; a pair on the host beyond a pool, a page written twice, or one that
            is read and written: pairs run at the same time, so which of the two it has would be chance. Views of one
            pool are held against each other by what lies in memory; with pairs on a device, all their pages.

    >>> layer = Layer.gqa(num_heads=1, head_dim=8, dtype=torch.float32)
    >>> pool = KV(torch.arange(3.0).reshape(3, 1, 1, 1).repeat(1, 2, 1, 8), torch.zeros(3, 2, 1, 8))
    >>> copy_pages(layer, pool, pool, [(2, 0)])
    >>> pool.k[:, 0, 0, 0].tolist()
    [2.0, 1.0, 2.0]
    """
    source, target = KV(*source), KV(*target)
    _check(source, target)
    given = pages if isinstance(pages, torch.Tensor) else torch.tensor(pages, dtype=torch.int64)
    if not given.numel():
        given = given.reshape(0, 2).long()
    if given.dim() != 2 or given.shape[1] != 2 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"pages is {given.dtype} {tuple(given.shape)}; it must be pairs (from, to): integers [n, 2]")
    if given.device.type == "cpu":
        _check_pairs(given, source, target)
    elif any(one is not other for one, other in zip(source, target, strict=True)):
        _check_apart(source, np.arange(len(source.k)), target, np.arange(len(target.k)))
    if source.k.device == target.k.device:
        kernel = _kernels(source.k.device, layer)(Op.CACHE_COPY, Needs(page_size=_page_size(source, layer)))
        kernel.run(source, target, given.to(source.k.device, torch.int64).contiguous(), layer)
        return
    if given.device.type != "cpu":
        raise ValueError(
            f"pages is on {given.device}; a copy between {source.k.device} and {target.k.device} needs it on the host"
        )
    come, go = given[(given >= 0).all(1)].long().unbind(1)
    for read, written in zip(source, target, strict=True):
        if read is not None and written is not None:
            packed = read[come.to(read.device)].to(written.device, non_blocking=True)
            if written.device.type == "cpu" and read.device.type != "cpu":
                torch.get_device_module(read.device).current_stream(read.device).synchronize()
            written[go.to(written.device)] = packed


def _check(source: KV, target: KV) -> None:
    for name, come, go in (("K", source.k, target.k), ("V", source.v, target.v)):
        if (come is None) != (go is None):
            raise ValueError(f"{'source' if come is None else 'target'} has no {name} pages and the other pool has")
        if come is None or go is None:
            continue
        if len(go) > 1 and shared_pages(go, np.array([0]), go, np.array([1])):
            raise ValueError(f"target has {name} pages that lie on each other; each must have memory of its own")
        if come.shape[1:] != go.shape[1:] or come.dtype != go.dtype:
            raise ValueError(
                f"{name} pages are {come.dtype} {tuple(come.shape[1:])} in source and {go.dtype} {tuple(go.shape[1:])} "
                "in target; both pools must have the same"
            )


def _check_pairs(pages: torch.Tensor, source: KV, target: KV) -> None:
    live = pages[(pages >= 0).all(1)]
    come, go = live.unbind(1)
    for name, some, pool in (("source", come, source), ("target", go, target)):
        if some.numel() and (most := int(some.max())) >= len(pool.k):
            raise ValueError(f"pages names page {most} of {name}, which has pages 0 to {len(pool.k) - 1}")
    if target.v is not None and (found := shared_pages(target.k, go.numpy(), target.v, go.numpy())):
        raise ValueError(f"target has K page {found[0]} and V page {found[1]} in the same memory; give each its own")
    written, times = go.unique(return_counts=True)
    if (times > 1).any():
        raise ValueError(f"pages writes page {int(written[times > 1][0])} twice; a page can be the target of one pair")
    _check_apart(source, come.numpy(), target, go.numpy())


def _check_apart(source: KV, come: Pages, target: KV, go: Pages) -> None:
    for read, written in product(source, target):
        if read is None or written is None or (found := shared_pages(read, come, written, go)) is None:
            continue
        what = f"page {found[1]}"
        if read is not written:
            what = f"memory: page {found[0]} of source and page {found[1]} of target share it"
        raise ValueError(f"pages reads and writes {what}; pairs run at the same time, so copy in two calls")


def _page_size(kv: KV, layer: Layer) -> int:
    return kv.k.shape[1] if layer.cache_layout == "strided" else kv.k.shape[3]


@lru_cache(maxsize=64)
def _kernels(device: torch.device, layer: Layer) -> Kernels:
    return Kernels(detect(device), layer, None)
