"""Tensors by their addresses, as a captured graph knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from portable.kernel import Kernel


class CaptureError(RuntimeError):
    """What the runtime refuses during a capture, or a replay that reads memory that is gone."""


class Address(NamedTuple):
    """A tensor as a graph knows it."""

    storage: Any  # a StorageWeakRef; of the pool, the storage itself
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> torch.Tensor:
        """The tensor that is there now."""
        storage = self.storage
        if isinstance(storage, StorageWeakRef):
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if storage is None:
                raise CaptureError(
                    f"the graph reads a tensor of {self.dtype} and shape {list(self.size)} at an address that was "
                    "freed after the capture"
                )
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with each tensor and address in it changed; arrays are copied, as numbers of the host are."""
    if isinstance(value, torch.Tensor | Address):
        return change(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Kernel):
        copy = object.__new__(type(value))
        for field in dataclasses.fields(value):
            object.__setattr__(copy, field.name, mapped(getattr(value, field.name), change))
        return copy
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(value, lambda each: found.append(each) if isinstance(each, torch.Tensor) else None)
    return found


def leaves_of(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def read(address: Any) -> Any:
    return address.read() if isinstance(address, Address) else address


def holders(storage: Any) -> int:
    """Who holds a storage, other than its Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def spoil(storage: Any, dtype: torch.dtype) -> None:
    memory = torch.empty(0, dtype=dtype).set_(storage)
    if dtype.is_floating_point or dtype.is_complex:
        memory.fill_(torch.nan)
    else:
        memory.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
