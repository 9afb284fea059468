"""Persistent memory that a captured graph reads: filled by one copy from the host, at addresses that never change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from portable.platform.graphs import current_stream, plain
from portable.upload import ALIGNMENT


class Field(NamedTuple):
    """What one tensor of a block is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its room in a block."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Views(NamedTuple):
    """The tensors of a layout, by name: on the device, and on each of the two blocks of the host."""

    there: dict[str, torch.Tensor]
    here: tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]
    start: int  # bytes from the block's
    end: int


class Staging:
    """A block of bytes on a device, and two pinned ones on the host that are copied into it in turns.

    A block of the host is filled again only once an event behind its copy has passed: a step in flight is never
    overwritten, and the host waits for no step but the one before the last.

    Args:
        nbytes: of each block.
        more: bytes of the device's block alone, behind.
        block: memory for the device's block; None: new.

    >>> staging = Staging(256, torch.device("cpu"))
    >>> lens = staging.views({"lens": Field((3,), torch.int32)}, end=256)
    >>> turn = staging.turn()
    >>> lens.here[turn]["lens"][:] = 7, 8, 9
    >>> staging.send(lens.start, lens.end)
    >>> lens.there["lens"].tolist()
    [7, 8, 9]
    """

    def __init__(self, nbytes: int, device: torch.device, *, more: int = 0, block: torch.Tensor | None = None) -> None:
        far = device.type != "cpu"
        with plain():
            if block is None:
                block = torch.empty(nbytes + more, dtype=torch.uint8, device=device)
            self.block = block.zero_()
            self._hosts = tuple(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=far) for _ in range(2))
        module: Any = torch.get_device_module(device) if far else None
        self._events = tuple(module.Event() for _ in range(2)) if far else None
        self._stream = current_stream(self.block.device) if far else None
        self._turn = 0

    @plain()
    def views(self, fields: Mapping[str, Field], *, start: int = 0, end: int | None = None) -> Views:
        """Fields one behind the other from `start` on, or up to `end`."""
        if end is not None:
            start = end - sum(field.nbytes for field in fields.values())
        assert start >= 0
        blocks: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        at = start
        for name, (shape, dtype) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            for views, block in zip(blocks, (self.block, *self._hosts), strict=True):
                views[name] = block[at : at + size].view(dtype).view(shape)
            at += Field(shape, dtype).nbytes
        first, second = ({name: view.numpy() for name, view in views.items()} for views in blocks[1:])
        if at > self._hosts[0].nbytes:
            raise ValueError(f"a layout ends at byte {at} of a block of {self._hosts[0].nbytes}; make the block for it")
        return Views(blocks[0], (first, second), start, at)

    def turn(self) -> int:
        """The block of the host to fill now."""
        self._turn ^= 1
        if self._events is not None:
            self._events[self._turn].synchronize()
        return self._turn

    def between(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A range of both blocks of the host."""
        first, second = self._hosts
        return first[start:end], second[start:end]

    def send(self, start: int, end: int) -> None:
        """Copy a range of the block of this turn to the device, on its current stream."""
        self.copy(self.block[start:end], self._hosts[self._turn][start:end])
        self.sent()

    def copy(self, to: torch.Tensor, come: torch.Tensor) -> None:
        """The copy alone, of ranges at hand: what may be captured. `sent` is due behind it, and behind each replay."""
        to.copy_(come, non_blocking=True)

    def sent(self) -> None:
        """The block of this turn is on its way, on the device's current stream."""
        if self._events is not None and self._stream is not None:
            self._events[self._turn].record(self._stream())

    @property
    def nbytes(self) -> int:
        """Bytes held on the device, and on the host twice."""
        return self.block.nbytes
