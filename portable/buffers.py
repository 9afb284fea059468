"""Persistent tensors: what a captured graph reads, at addresses that never change."""

from __future__ import annotations

import torch


class Buffer:
    """A tensor that is filled with its pad value and then only ever written into.

    >>> seq_lens = Buffer((4,), torch.int32, "cpu", pad=0)
    >>> seq_lens.stage(torch.tensor([7, 9], dtype=torch.int32), 3).tolist()
    [7, 9, 0]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        pad: int | float = 0,
        name: str = "buffer",
    ) -> None:
        self.tensor = torch.full(shape, pad, dtype=dtype, device=device)
        self.pad, self.name = pad, name

    def stage(self, x: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """Copy x [m, ...] to the front, fill up to row n with the pad value, and return the view [n, ...].

        A narrower x leaves the columns behind it padded too, so that nothing of an earlier step stays in view.

        Raises:
            ValueError: x does not fit, is of another dtype or device, or n is below its rows or above the buffer's.
        """
        if x.dtype != self.tensor.dtype:
            raise ValueError(f"{self.name} holds {self.tensor.dtype}; x is {x.dtype}")
        if x.device != self.tensor.device:
            raise ValueError(f"{self.name} is on {self.tensor.device}; x is on {x.device}")
        if x.dim() != self.tensor.dim() or any(a > b for a, b in zip(x.shape, self.tensor.shape, strict=True)):
            raise ValueError(
                f"{self.name} has shape {list(self.tensor.shape)}; x of shape {list(x.shape)} does not fit into it"
            )
        rows = len(x)
        n = rows if n is None else n
        if not rows <= n <= len(self.tensor):
            raise ValueError(
                f"n is {n}; it must lie between the {rows} rows of x and the {len(self.tensor)} of {self.name}"
            )
        front = view = self.tensor[:n]
        for dim, size in enumerate(x.shape):
            front.narrow(dim, size, front.shape[dim] - size).fill_(self.pad)
            front = front.narrow(dim, 0, size)
        front.copy_(x, non_blocking=True)
        return view


class Buffers:
    """The buffers of a plan slot by name and KV group: made at their first use, and the same ever after.

    >>> buffers = Buffers("cpu")
    >>> a = buffers.get("block_table", (4, 8), torch.int32, group=0)
    >>> a is buffers.get("block_table", (4, 8), torch.int32, group=0), a is buffers.get("block_table", (4, 8),
    ...     torch.int32, group=1)
    (True, False)
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._buffers: dict[tuple[str, int], Buffer] = {}

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, group: int = 0, pad: int | float = 0
    ) -> Buffer:
        """The buffer of this name and KV group.

        Raises:
            ValueError: it exists with another shape, dtype or pad value: an address cannot move once captured.
        """
        key = (name, group)
        if key not in self._buffers:
            self._buffers[key] = Buffer(shape, dtype, self.device, pad, name)
        buffer = self._buffers[key]
        made, asked = (tuple(buffer.tensor.shape), buffer.tensor.dtype, buffer.pad), (shape, dtype, pad)
        if made != asked:
            raise ValueError(f"buffer {name!r} of group {group} was made as {made}; it cannot become {asked}")
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers.values())
