"""The memory of a batch of workgroups: global, LDS and scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from portable.platform.emulated.access import Access, Array, MemoryFault, ScalarAccess
from portable.platform.emulated.allocations import Allocations
from portable.platform.emulated.isa import Instruction
from portable.platform.emulated.races import MOST_WAVES
from portable.platform.emulated.shared import Lds, Scratch
from portable.platform.emulated.waves import Group

__all__ = ["Access", "Allocations", "Memory", "MemoryFault"]


class Memory:
    """What the waves of `num_groups` workgroups of `waves_per_group` waves see.

    `allocations` may be shared by several batches: global memory outlives LDS and scratch.
    `workgroup_name` turns a workgroup's index in the batch into what faults call it; they begin with `kernel`.

    >>> memory = Memory(num_groups=1, lds_bytes=64, waves_per_group=1, scratch_bytes=0)
    >>> values = np.arange(8, dtype=np.uint8)
    >>> address = memory.add(values, "values")
    >>> memory.load_scalar(np.array([address + 4], np.uint64), 4).tolist()
    [[4, 5, 6, 7]]

    Raises:
        ValueError: more waves than a workgroup can have.
    """

    def __init__(
        self,
        num_groups: int,
        lds_bytes: int,
        waves_per_group: int,
        scratch_bytes: int,
        allocations: Allocations | None = None,
    ) -> None:
        if not 1 <= waves_per_group <= MOST_WAVES:
            raise ValueError(f"waves_per_group={waves_per_group} is not between 1 and {MOST_WAVES}")
        self.allocations = allocations or Allocations()
        self.lds = Lds(num_groups, lds_bytes, waves_per_group)
        self.scratch = Scratch(num_groups * waves_per_group, scratch_bytes)
        self.workgroup_name: Callable[[int], object] = int
        self.kernel = ""
        self._scalar = ScalarAccess(None, None)

    def add(self, array: npt.NDArray[np.uint8], name: str, initialised: bool = True) -> int:
        """Let the kernel touch an array; `Allocations.add`."""
        return self.allocations.add(array, name, initialised)

    def now(self, instruction: Instruction, group: Group) -> None:
        """Announce the instruction that loads scalars next, for the fault that it may raise."""
        self._scalar = ScalarAccess(group, instruction)

    def load_scalar(self, addresses: Array, nbytes: int) -> npt.NDArray[np.uint8]:
        """[G, nbytes] uint8 from addresses [G] uint64; nbytes is a multiple of 4."""
        words = self.allocations.load(self._scalar, addresses, nbytes)
        return np.ascontiguousarray(words.T).view(np.uint8)

    def barrier(self, workgroups: Array) -> None:
        """All waves of these workgroups (indices of the batch) have passed a barrier."""
        self.lds.barrier(workgroups)
