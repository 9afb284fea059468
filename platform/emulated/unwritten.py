"""Tensors that were declared to hold no values, and which of their bytes kernels have written since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from portable.platform.emulated.access import Array
from portable.platform.emulated.arguments import storage


@dataclass(slots=True)
class Declared:
    """A tensor, kept so that no other takes its place; torch's count of changes to it; its storage's written bytes."""

    tensor: Any
    version: int
    written: Array


class Unwritten:
    """Declared tensors, by the addresses of their storages."""

    def __init__(self) -> None:
        self._declared: dict[int, Declared] = {}

    def add(self, tensor: Any) -> Any:
        """Declare a CPU tensor, and return it. A view's storage keeps its other bytes.

        Raises:
            ValueError: it is on another device, or torch does not count its changes.
        """
        if tensor.device.type != "cpu":
            raise ValueError(f"tensor is on {tensor.device}; an emulated device takes CPU tensors")
        if tensor.is_inference():
            raise ValueError("tensor is an inference tensor, of which torch does not say whether it was changed")
        if not tensor.numel():
            return tensor
        data = storage(tensor)
        self.written()  # drops what torch has changed
        found = self._declared.setdefault(
            data.ctypes.data, Declared(tensor, tensor._version, np.ones(data.size, np.bool_))
        )
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        first = found.written[tensor.storage_offset() * size :]
        np.lib.stride_tricks.as_strided(first, (*tensor.shape, size), strides)[...] = False
        return tensor

    def written(self) -> Mapping[int, Array]:
        """[bytes] bool by storage; those whose bytes all hold values are forgotten."""
        self._declared = {
            address: each
            for address, each in self._declared.items()
            if each.tensor._version == each.version and not each.written.all()
        }
        return {address: each.written for address, each in self._declared.items()}
